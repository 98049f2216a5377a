"""Specs for pytrees: prefixes, rules by path, optimizer states."""
