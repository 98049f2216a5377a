"""Parses expressions, lays them out on devices, and writes them. Does not import numpy or JAX."""
