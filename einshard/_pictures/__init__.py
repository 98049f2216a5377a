"""Draws blocks as text, in color and as SVG. Imports neither numpy nor JAX."""
