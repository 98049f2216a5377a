"""`explain` and `show`: compiled programs and placements to reports and pictures."""
