"""What einshard costs, measured against the JAX one would write by hand.

`python -m benchmarks` lists the benchmarks; `python -m benchmarks placement` runs one.
"""
