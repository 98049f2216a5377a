"""Contractions: `einsum`, and `parallelism`, which says what placements of one mean."""
