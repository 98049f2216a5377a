"""Parses expressions, lays them out on devices, and writes them. Imports neither numpy nor JAX."""
