"""Moves arrays between placements, through the intermediate placement that costs least."""
