"""Diagnoses: likely mistakes in a program. What to write instead is found in `search/`."""
