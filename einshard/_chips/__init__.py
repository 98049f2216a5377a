"""Chips: their peak rates, their names, and what compilers need to know about them."""
