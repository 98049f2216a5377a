"""Reads the HLO text of compiled programs; peak rates of chips. Imports no JAX."""
