"""The text of a compiled program to what it communicates. Imports no jax."""
