"""Reads the collectives of a compiled program from its HLO text. Imports no JAX."""
