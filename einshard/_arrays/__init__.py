"""Places, constrains and gathers arrays, and builds them from the rows of each host."""
