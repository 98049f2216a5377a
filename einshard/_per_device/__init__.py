"""`per_device`: `jax.shard_map` with specs in einshard's notation."""
