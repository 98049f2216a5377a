"""Tags of constraints, in the name stack of an equation and the location of its operation."""

from __future__ import annotations

import re

# the number of a place, and how many axes `jax.vmap` adds to the value there
TAG = 'einshard_site_{}_{}_'
_TAG = re.compile(r'einshard_site_(\d+)_(\d+)_')


def tag_in(location: str) -> tuple[int, int] | None:
    """Returns the number of the innermost tag and of the axes, from the text of a location."""
    found = _TAG.findall(location)
    return (int(found[-1][0]), int(found[-1][1])) if found else None
