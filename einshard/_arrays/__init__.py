"""Arrays: placed, constrained, gathered, and built from the rows of many hosts."""
