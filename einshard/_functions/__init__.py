"""`sharded`: `jax.jit` with shardings in the notation, and limits on collectives."""
