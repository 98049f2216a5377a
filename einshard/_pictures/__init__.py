"""Placements to pictures: `show`."""
