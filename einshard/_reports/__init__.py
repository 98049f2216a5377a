"""Compiled programs to reports: `explain`."""
