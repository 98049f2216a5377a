"""Draws blocks as text, in colour and as SVG. Imports neither numpy nor JAX."""
