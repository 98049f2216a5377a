"""Reads and edits traced programs: graph, sharding rules of operations, source spans, edits."""
