"""Draws placements as text, in color and as SVG. Imports neither NumPy nor JAX."""
