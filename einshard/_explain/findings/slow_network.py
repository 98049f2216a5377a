"""Finds collectives between TPU slices that could stay within a slice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..._text import format_bytes
from ..report_rows import Finding
from .facts import Facts


def slow_network(facts: Facts) -> Iterator[Finding]:
    """Reports a mesh axis across TPU slices that sends more than twice as much as one within them.

    Only an axis of the same size, so that the two can be swapped.
    """
    mesh = facts.mesh
    if mesh is None or len(set(facts.slices)) < 2:
        return
    slices = facts.slices
    sent: Counter[str] = Counter()
    crossing: set[str] = set()  # mesh axes that cross slices
    for collective in facts.collectives:
        if len(collective.mesh_axes) == 1:
            (axis,) = collective.mesh_axes
            sent[axis] += collective.total_bytes
            groups = collective.device_groups
            if any(len({slices[i] for i in group}) > 1 for group in groups):
                crossing.add(axis)
    axes = [str(name) for name in mesh.axis_names]
    for axis in filter(crossing.__contains__, axes):
        size = mesh.shape[axis]
        candidates = [
            name
            for name in axes
            if name not in crossing and mesh.shape[name] == size and 2 * sent[name] < sent[axis]
        ]
        if candidates:
            other = min(candidates, key=lambda name: sent[name])
            yield Finding(
                'slow network',
                f'{format_bytes(sent[axis])} are sent along {axis} between slices, and '
                f'{format_bytes(sent[other])} along {other} within them',
                None,
                sent[axis],
            )
