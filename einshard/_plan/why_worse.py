"""Explains in one line why one plan is worse than another."""

from __future__ import annotations

from .._text import format_bytes, format_seconds
from .evaluation import Evaluation

_VERBS = {
    'all-gather': 'gathers',
    'all-reduce': 'reduces',
    'reduce-scatter': 'reduces',
    'all-to-all': 'exchanges',
    'collective-permute': 'sends',
}


def why_worse(worse: Evaluation, better: Evaluation, limit: int | None) -> str:
    """Returns, for example, 'gathers 2.0 GiB of weights per run (instead of 0 B)'."""
    if worse.error:
        return f'does not compile: {worse.error}'
    parts = [_largest_increase(worse, better)]
    memory = worse.memory or 0
    if limit is not None and not worse.fits(limit):
        parts.append(f'needs {format_bytes(memory)} of memory, more than {format_bytes(limit)}')
    elif not parts[0] and memory > (better.memory or 0):
        parts.append(f'needs {format_bytes(memory)} of memory')
    return '; '.join(filter(None, parts)) or 'about equal'


def _largest_increase(worse: Evaluation, better: Evaluation) -> str:
    """Describes the resource whose bounds grow most, or the bytes sent if there are no bounds.

    Returns '' if the bounds grow by at most 1% of their sum in `better`, or the bytes not at all.
    """
    before, after = _seconds_by_resource(better), _seconds_by_resource(worse)
    if not after:
        return _sends(worse, better) if worse.network_bytes > better.network_bytes else ''
    growth = {name: after[name] - before.get(name, 0.0) for name in after}
    resource = max(growth, key=growth.__getitem__)
    if growth[resource] <= 0.01 * sum(before.values()):  # the rounded numbers would look equal
        return ''
    if resource == 'network':
        return _sends(worse, better)
    verb = 'computes' if resource == 'compute' else 'reads and writes HBM'
    instead = format_seconds(before.get(resource, 0.0))
    return f'{verb} for {format_seconds(after[resource])} (instead of {instead})'


def _seconds_by_resource(evaluation: Evaluation) -> dict[str, float]:
    total: dict[str, float] = {}
    for bound in evaluation.bounds:
        total[bound.resource] = total.get(bound.resource, 0.0) + bound.seconds
    return total


def _sends(worse: Evaluation, better: Evaluation) -> str:
    """Describes the collectives whose bytes grow most, or all bytes sent if none grow."""
    growth = {key: n - better.sent_by.get(key, 0) for key, n in worse.sent_by.items()}
    kind, role = key = max(growth, key=growth.__getitem__)
    if growth[key] <= 0:  # no more bytes, but along slower mesh axes
        return f'sends {worse.sent_text}'
    sent, instead = format_bytes(worse.sent_by[key]), format_bytes(better.sent_by.get(key, 0))
    return f'{_VERBS.get(kind, "sends")} {sent} of {role} per run (instead of {instead})'
