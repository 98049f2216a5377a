"""Places, constrains and gathers arrays, and builds global arrays from the rows of each process."""
