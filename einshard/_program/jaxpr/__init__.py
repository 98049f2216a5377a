"""Reads traced programs: graph, sharding rules of operations, source spans."""
