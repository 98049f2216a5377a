"""What einshard costs, measured against hand-written JAX.

`python -m benchmarks` lists the benchmarks; `python -m benchmarks placement` runs one.
"""
