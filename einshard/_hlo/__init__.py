"""Reads the HLO text of compiled programs, and lists peak rates of chips. Does not import JAX."""
