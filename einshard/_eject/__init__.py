"""Writes shardings as plain JAX: `to_jax`."""
