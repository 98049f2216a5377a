"""Finds changes that make a program cheaper, by compiling it with them."""
