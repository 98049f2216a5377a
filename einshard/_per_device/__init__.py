"""`jax.shard_map` in the notation: `per_device`."""
