"""Profiles: the time that each row of a report takes."""
