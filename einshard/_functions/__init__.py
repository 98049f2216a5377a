"""`sharded`: `jax.jit` with shardings in the notation, and promises of collectives."""
