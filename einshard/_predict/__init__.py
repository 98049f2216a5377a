"""Contractions: `einsum` computes one, `parallelism` predicts its collectives."""
