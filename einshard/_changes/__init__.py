"""einshard check: what a change of the code does to compiled programs."""
