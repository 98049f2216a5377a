"""`explain`, `check_same` and `show`: reports, comparisons and pictures."""
