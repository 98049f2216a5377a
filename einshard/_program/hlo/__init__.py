"""Reads optimized HLO: text, graph, collectives, flops, memory. Does not import JAX."""
