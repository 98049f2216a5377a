"""Text to Expression, Expression to Layout, and back to text. Imports neither numpy nor JAX."""
