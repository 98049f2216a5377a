"""Logical axis names: `axis_rules` gives names a placement for all expressions inside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import Token
from dataclasses import replace
from typing import ParamSpec, TypeVar

from ._cache import cached
from ._errors import EinshardError
from ._expression import ELLIPSIS, Expression, Term, parse
from ._mesh import Around, AxisRules, around

P = ParamSpec('P')
R = TypeVar('R')


class axis_rules:
    """Gives axis names a placement, inside a `with` or in a function that it decorates.

        >>> types = (jax.sharding.AxisType.Auto,) * 2
        >>> mesh = jax.make_mesh((4, 2), ('data', 'tp'), axis_types=types)
        >>> with axis_rules(batch='@data', heads='@tp'):
        ...     x = einshard(np.ones((8, 16, 4)), 'batch heads d', mesh=mesh)
        >>> describe(x)
        'a b c -> a@data b@tp c'

    Read by expressions in the short form: a name without a placement of its own takes that of its
    rule; a name without a rule is not sharded; devices that no name takes hold replicas. One
    model text then serves any mesh. Rules inside others add to them, and win where both name an
    axis. They are seen by the code inside as `contextvars` are, by tasks of asyncio too.

    A function under `jax.jit` keeps the rules of the call that traced it; under `sharded` each set
    of rules has its own program.

    Args:
        placements: what would follow the name in an expression: '@data', '@(data,fsdp)', '4',
            '*', '2*'; or '' for not sharded, to undo an outer rule.

    Raises:
        EinshardError: a placement is none. In use: two names of an array claim one mesh axis, or
            the mesh has no such axis.
    """

    def __init__(self, **placements: str):
        for name, placement in placements.items():
            _check(name, placement)
        self.placements = placements
        self._tokens: list[Token[Around | None]] = []

    def __enter__(self) -> axis_rules:
        outer = around.get() or Around()
        merged = {**dict(outer.axis_rules), **self.placements}
        inner = Around(outer.mesh, tuple(sorted(merged.items())))
        self._tokens.append(around.set(inner))
        return self

    def __exit__(self, *_: object) -> None:
        around.reset(self._tokens.pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def with_rules(*args: P.args, **kwargs: P.kwargs) -> R:
            # its own instance: tokens belong to the thread of the call
            with axis_rules(**self.placements):
                return function(*args, **kwargs)

        return with_rules


@cached
def apply_axis_rules(expression: Expression, rules: AxisRules) -> Expression:
    """The expression with the placements that its names have by rule."""
    if not expression.short:
        return expression
    placements = dict(rules)
    terms: list[Term] = []
    for term in expression.right:
        plain = term.name is not None and not term.placed and term.count is None
        rule = placements.get(str(term.name)) if plain else None
        terms.append(replace(_term(rule), name=term.name) if rule else term)
    laid = [term for term in terms if term.laid]
    named = any(term.mesh_axes for term in terms)
    if not any(term.star for term in terms) and (laid or not named):
        terms.insert(0, Term(star=True))  # the rest of the devices hold replicas
    return parse(' '.join(map(str, terms)))


def _term(placement: str) -> Term:
    (term,) = parse(f'x{placement}').right
    return term


def _check(name: str, placement: object) -> None:
    try:
        is_name = parse(name).right == (Term(name),) and name != ELLIPSIS
        terms = parse(f'x{placement}').right if isinstance(placement, str) else ()
    except EinshardError:
        is_name, terms = False, ()
    if not is_name or [term.name for term in terms] != ['x']:
        raise EinshardError(
            f'axis_rules gives {name}={placement!r}, which is no placement of an axis',
            facts={'placements are': "'@data'  '@(data,fsdp)'  '4'  '*'  '2*'  '' (not sharded)"},
        )
