"""Finds the sharding of a model: `plan`."""
