"""Separates collectives that the user's code requests from those that the compiler inserts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..._program.hlo.collective import Collective
from ..._program.hlo.sources import operations
from ..._program.jaxpr.graph import inner_jaxprs
from .facts import Facts
from .lines import line_of
from .trace import PRODUCTS

_SHARD_MAP_COLLECTIVES = frozenset(
    (
        *('all_gather', 'all_gather_invariant', 'all_gather_reduced', 'all_to_all', 'pbroadcast'),
        *('pmax', 'pmin', 'ppermute', 'psum', 'psum2', 'psum_invariant', 'psum_scatter'),
        *('ragged_all_to_all', 'reduce_scatter', 'unreduced_psum', 'unreduced_reduce_scatter'),
    )
)
_CONSTRAINTS = {'sharding_constraint', 'reshard'}
# operations that leave partial results on each device if they reduce a sharded axis
_REDUCING = {*PRODUCTS, 'reduce_sum', 'reduce_max', 'reduce_min', 'argmax', 'argmin', 'scatter-add'}


def with_causes(facts: Facts) -> Sequence[Collective]:
    constrained = _Constrained(facts)
    return [replace(c, cause=_cause(c, constrained)) for c in facts.collectives]


def _cause(collective: Collective, constrained: _Constrained) -> str:
    found = {*operations(collective.op_name)}
    in_shard_map = 'shard_map' in collective.op_name.rpartition('/')[0]
    if found <= _CONSTRAINTS or (in_shard_map and found <= _SHARD_MAP_COLLECTIVES):
        return 'requested'
    if not constrained.has_trace:
        return 'unknown'
    if collective.kind in ('all-reduce', 'reduce-scatter'):
        return 'inserted' if found <= _REDUCING else 'unknown'
    # a collective for a constraint may have the op_name of the matmul whose result is constrained
    if not found <= {*PRODUCTS}:
        return 'unknown'
    if collective.role == 'weights':
        is_unconstrained = collective.of and constrained.paths.isdisjoint(collective.of)
        return 'inserted' if is_unconstrained else 'unknown'
    return 'unknown' if collective.source in constrained.lines else 'inserted'


class _Constrained:
    """The matmuls and arguments that the user's code constrains.

    Attributes:
        has_trace: whether the function was traced. If not, `lines` and `paths` are empty.
        lines: the source lines of matmuls whose result is constrained, or is returned to a caller
            that may constrain it.
        paths: the paths of the constrained arguments.
    """

    def __init__(self, facts: Facts):
        self.lines: set[str] = set()
        self.paths: set[str] = set()
        self.has_trace = facts.trace is not None
        if facts.trace is None or facts.stages.jaxpr is None:
            return
        jaxpr = facts.stages.jaxpr
        for constraint in facts.trace.constraints:
            if constraint.before.argument is not None:
                self.paths.add(facts.arguments[constraint.before.argument].path)
        for eqn in _last_products(jaxpr):
            self.lines.add(line_of(eqn))


def _last_products(jaxpr: Any) -> Iterator[Any]:
    """Yields the last matmul on each path to a constraint or a result, also in nested jaxprs."""
    producers = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    targets = [id(v) for v in jaxpr.outvars]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CONSTRAINTS:
            targets.append(id(eqn.invars[0]))
        for inner in inner_jaxprs(eqn.params.values()):
            yield from _last_products(inner)
    yield from _last_products_before(targets, producers)


def _last_products_before(variable_ids: Sequence[int], producers: dict[int, Any]) -> Iterator[Any]:
    """`producers` has the equation that computes each variable, by the id of the variable."""
    stack, seen = list(variable_ids), set(variable_ids)
    while stack:
        eqn = producers.get(stack.pop())
        if eqn is None:
            continue
        if eqn.primitive.name in PRODUCTS:
            yield eqn
            continue
        more = [id(v) for v in eqn.invars if id(v) not in seen]
        seen.update(more)
        stack += more
