"""Logical axis names: `axis_rules` gives names a placement for all expressions inside it."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, ParamSpec, TypeAlias, TypeVar

from .._cache import cached
from .._errors import EinshardError
from .._notation.expression import ELLIPSIS, Expression, Term, check_mesh_axes, parse
from .._notation.write import write_short
from .._text import deferred_kind
from .context import AxisRules, enter_rules, leave_rules

P = ParamSpec('P')
R = TypeVar('R')

# What happens to mesh axes that an expression names and the mesh does not have.
Missing: TypeAlias = Literal['error', 'replicate']


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
    axis. One object can be entered many times, by several threads too.

    Rules are part of JAX's cache keys: each distinct set of them compiles once what is called
    inside, under `jax.jit` and `sharded`, and no trace is reused for another set.

    Do not hold rules across an `await` or a `yield`. Tasks of asyncio share a thread, and JAX's
    cache keys belong to the thread; einshard raises where it runs in a task that has other rules.
    In a thread with a copied context, `einshard` and `sharded` use the rules of that context;
    for a bare `jax.jit` enter them in the function that the thread runs.

    Args:
        placements: a mapping from axis names to placements, such as `TRAINING_AXES`.
        missing: what becomes of mesh axes in these rules that the mesh does not have: 'error', or
            'replicate' to cut nothing over them. Rules inside and outside keep their own.
        more: placements by keyword; a placement is what would follow the name in an expression:
            '@data', '@(data,fsdp)', '4', '*', '2*'; or '' for not sharded, to undo an outer rule.

    Raises:
        EinshardError: a placement is none, or an axis has two; a function that is decorated is a
            coroutine or a generator. In use: two names of an array claim one mesh axis, or the
            mesh has no such axis; another task holds its rules across an `await`.
    """

    def __init__(
        self,
        placements: Mapping[str, str] = MappingProxyType({}),
        /,
        *,
        missing: Missing = 'error',
        **more: str,
    ):
        _check_mapping(placements)
        check_missing(missing, for_an_axis_of_that_name="axis_rules({'missing': '@tp'})")
        self.placements: dict[str, str] = {}
        for name, placement in [*placements.items(), *more.items()]:
            known = _axis_name(name, placement)
            if known in self.placements:
                raise EinshardError(
                    f"axis_rules has two rules for axis '{known}'",
                    facts={
                        'rules': f"'{self.placements[known]}' and '{placement}'",
                        'instead': 'one axis_rules inside the other, of which the inner wins',
                    },
                )
            self.placements[known] = placement
        self.missing: Missing = missing

    def __enter__(self) -> axis_rules:
        lenient = self.missing == 'replicate'
        enter_rules(self, [(name, text, lenient) for name, text in self.placements.items()])
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        in_order = leave_rules(self)
        if not in_order and raised is None:
            raise EinshardError(
                'axis_rules are left by another task or thread than entered them, or before rules '
                'that were entered later',
                facts={'instead': 'enter axis_rules in a function that does not await or yield'},
            )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        kind = deferred_kind(function)
        if kind:
            name = getattr(function, '__name__', repr(function))
            raise EinshardError(
                f'{name} is {kind}, whose body runs after the call: axis_rules cannot decorate it, '
                'since rules must not be held across an await or a yield',
                facts={'instead': 'decorate a plain function that it calls'},
            )

        @functools.wraps(function)
        def with_rules(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return with_rules


def apply_axis_rules(
    expression: Expression,
    rules: AxisRules,
    mesh_axes: tuple[str, ...],
    on_missing: Missing = 'error',
) -> tuple[Expression, tuple[str, ...]]:
    """The expression as the rules place its names, and the mesh axes in it that are missing.

    These are left out where `on_missing` or their rule is 'replicate'.
    """
    ruled = _ruled_terms(expression, rules)
    named = dict.fromkeys(axis for term, _ in ruled for axis in term.mesh_axes)
    missing = tuple(axis for axis in named if axis not in mesh_axes)
    if expression.short and rules:
        expression = _placed(expression, ruled, mesh_axes)
    if on_missing == 'replicate' and missing:
        expression = _drop_missing(expression, mesh_axes)
    return expression, missing


def _placed(
    expression: Expression, ruled: Sequence[tuple[Term, bool]], mesh_axes: tuple[str, ...]
) -> Expression:
    """The expression with the terms that rules have placed."""
    terms = [_on_mesh(term, mesh_axes) if lenient else term for term, lenient in ruled]
    takes_devices = any(term.takes_devices for term in terms)
    named = any(term.mesh_axes for term in terms)
    if not any(term.star for term in terms) and (takes_devices or not named):
        terms.insert(0, Term(star=True))  # the rest of the devices hold replicas
    placed = write_short(terms)
    try:
        check_mesh_axes(placed)
    except EinshardError as error:
        raise error.about(
            written=f"'{expression.text}', placed by axis_rules",
            instead='an axis that stays whole goes by a name without a rule',
        ) from None
    return placed


def _ruled_terms(expression: Expression, rules: AxisRules) -> list[tuple[Term, bool]]:
    """The terms as the rules place them, and whether mesh axes of theirs may be missing."""
    by_name = {name: (placement, lenient) for name, placement, lenient in rules}
    terms: list[tuple[Term, bool]] = []
    for term in expression.right:
        plain = expression.short and term.name is not None and term == Term(term.name)
        placement, lenient = by_name.get(str(term.name), ('', False)) if plain else ('', False)
        ruled = replace(_term(placement), name=term.name, span=term.span) if placement else term
        terms.append((ruled, lenient))
    return terms


def _drop_missing(expression: Expression, mesh_axes: tuple[str, ...]) -> Expression:
    """The expression without the mesh axes that are not among these: nothing is cut over them."""
    right = tuple(_on_mesh(term, mesh_axes) for term in expression.right)
    if not any(term.is_sharded for term in right):
        right = (Term(star=True), *right)  # nothing is cut at all: every device has the whole
    return replace(expression, right=right)


def _on_mesh(term: Term, mesh_axes: tuple[str, ...]) -> Term:
    return replace(term, mesh_axes=tuple(axis for axis in term.mesh_axes if axis in mesh_axes))


def check_missing(missing: object, **facts: str) -> None:
    """Raises where `missing=` is neither of its values."""
    if not isinstance(missing, str) or missing not in ('error', 'replicate'):
        raise EinshardError(f"missing= is 'error' or 'replicate', not {missing!r}", facts=facts)


@cached
def _term(placement: str) -> Term:
    (term,) = parse(f'x{placement}').right
    return term


def _check_mapping(placements: object) -> None:
    if not isinstance(placements, Mapping):
        raise EinshardError(
            f'axis_rules takes a mapping from axis names to placements, not {placements!r}',
            facts={'as in': "axis_rules({'batch': '@data'}), axis_rules(batch='@data')"},
        )


def _axis_name(name: object, placement: object) -> str:
    """The name of a rule, as expressions have it; raises where name or placement is none."""
    known = unicodedata.normalize('NFC', str(name))
    if not (isinstance(name, str) and known != ELLIPSIS and _right_side(known) == [Term(known)]):
        raise EinshardError(
            f'axis_rules has a rule for {name!r}, which is no name of an axis',
            facts={'names are': 'of letters and underscores, as in expressions'},
        )
    if not isinstance(placement, str) or not _is_placement(placement):
        raise EinshardError(
            f'axis_rules gives {name}={placement!r}, which is no placement of an axis',
            facts={'placements are': "'@data'  '@(data,fsdp)'  '4'  '*'  '2*'  '' (not sharded)"},
            fix=_as_placement(placement),
        )
    return known


def _is_placement(text: str) -> bool:
    return [term.name for term in _right_side(f'x{text}')] == ['x']


def _right_side(short: str) -> list[Term]:
    """The terms of an expression in the short form; none where it is no such expression."""
    try:
        expression = parse(short)
    except EinshardError:
        return []
    return list(expression.right) if expression.short else []


def _as_placement(mesh_axes: object) -> str | None:
    """What other tables of rules give a name, mesh axes or None, as a placement."""
    names = [mesh_axes] if isinstance(mesh_axes, str) else mesh_axes
    if names is None or names == () or names == []:
        return "''"
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None
    placement = f'@{names[0]}' if len(names) == 1 else f'@({",".join(names)})'
    return repr(placement) if _is_placement(placement) else None
