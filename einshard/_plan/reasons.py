"""Explains in one line why a plan is worse than another."""

from __future__ import annotations

from .._text import format_bytes, format_seconds
from .judgement import Judgement

_VERBS = {
    'all-gather': 'gathers',
    'all-reduce': 'reduces',
    'reduce-scatter': 'reduces',
    'all-to-all': 'exchanges',
    'collective-permute': 'sends',
}


def reason(worse: Judgement, better: Judgement, limit: int | None) -> str:
    """Explains why `worse` loses: it does not compile or fit, or needs more of a resource.

    'reduces 1.8 GiB of activations per run (instead of 0 B); needs 24.0 of 15.8 GiB'
    """
    if worse.error:
        return f'does not compile: {worse.error}'
    found = _dominating(worse, better)
    if limit is not None and worse.memory is not None and worse.memory > limit:
        found.append(f'needs {format_bytes(worse.memory)} of {format_bytes(limit)}')
    elif not found and (worse.memory or 0) > (better.memory or 0):
        found.append(f'needs {format_bytes(worse.memory or 0)} of memory')
    return '; '.join(found) or 'equal by this objective'


def _dominating(worse: Judgement, better: Judgement) -> list[str]:
    """Describes the resource whose bound grows most, if any does."""
    before, after = _by_resource(better), _by_resource(worse)
    if not after:  # no chip
        return [_network(worse, better)] if worse.network_bytes > better.network_bytes else []
    growth = {name: after[name] - before.get(name, 0.0) for name in after}
    resource = max(growth, key=growth.__getitem__)
    if growth[resource] <= 0.001 * sum(before.values()):
        return []
    if resource == 'network':
        return [_network(worse, better)]
    took = f'(instead of {format_seconds(before.get(resource, 0.0))})'
    verb = 'computes' if resource == 'compute' else 'reads and writes HBM'
    return [f'{verb} for {format_seconds(after[resource])} {took}']


def _by_resource(judgement: Judgement) -> dict[str, float]:
    total: dict[str, float] = {}
    for bound in judgement.bounds:
        total[bound.resource] = total.get(bound.resource, 0.0) + bound.seconds
    return total


def _network(worse: Judgement, better: Judgement) -> str:
    """Describes the collectives whose bytes grow most from the better to the worse plan."""
    kinds = [*worse.sent_by]
    if not kinds:
        return f'sends {format_bytes(worse.network_bytes)}'
    growth = {key: worse.sent_by[key] - better.sent_by.get(key, 0) for key in kinds}
    kind, carries = key = max(growth, key=growth.__getitem__)
    if growth[key] <= 0:  # the same bytes, along slower mesh axes
        return f'sends {worse.sent_text}'
    sent, instead = format_bytes(worse.sent_by[key]), format_bytes(better.sent_by.get(key, 0))
    return f'{_VERBS.get(kind, "sends")} {sent} of {carries} per run (instead of {instead})'
