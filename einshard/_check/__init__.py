"""Checks a sharded function against one device: `check_same`."""
