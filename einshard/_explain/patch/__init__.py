"""Writes the changes of a program into its source files."""
