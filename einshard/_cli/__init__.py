"""The command `einshard`, also as `python -m einshard`."""
