"""Logical axis names: `axis_rules` maps axis names to placements."""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, ParamSpec, TypeAlias, TypeVar

from jax.sharding import NamedSharding, PartitionSpec

from .._cache import cached
from .._errors import EinshardError, Suggestion
from .._notation.expression import ELLIPSIS, Expression, Term, check_mesh_axes, parse
from .._notation.write import write_short
from .._text import deferred_kind
from .context import AxisRules, enter_rules, leave_rules
from .mesh import FREE, partition_text, spec_axes

P = ParamSpec('P')
R = TypeVar('R')

# What to do with mesh axes that an expression names and the mesh lacks.
Missing: TypeAlias = Literal['error', 'replicate']
# A placement: the text after a name, or a PartitionSpec with one entry.
Placed: TypeAlias = str | PartitionSpec | NamedSharding


class axis_rules:
    """Maps axis names to placements, as a context manager or a decorator.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import axis_rules, describe, einshard
        >>> types = (jax.sharding.AxisType.Auto,) * 2
        >>> mesh = jax.make_mesh((jax.device_count(), 1), ('data', 'tp'), axis_types=types)
        >>> x = np.ones((jax.device_count(), 16, 4))
        >>> with axis_rules(batch='@data', heads='@tp'):
        ...     x = einshard(x, 'batch heads d', mesh=mesh)
        >>> describe(x)
        'a b c -> a@data b@tp c'

    Rules apply to expressions in the short form. A name without its own placement takes the
    placement of its rule; a name without a rule is not sharded; unused devices hold replicas.
    So the same model code works on any mesh. Nested rules are merged, and the inner rule of an axis
    wins. One object can be entered many times, also by several threads.

    Rules are part of JAX's cache keys: functions under `jax.jit` and `sharded` are traced once per
    set of rules.

    Do not hold rules across an `await` or a `yield`. Asyncio tasks share a thread, and JAX's cache
    keys are per thread; einshard raises an error in a task with other rules. In a thread with a
    copied context, `einshard` and `sharded` use the rules of that context; for plain `jax.jit`,
    enter the rules in the function that the thread runs.

    Args:
        placements: a mapping from axis names to placements, such as `TRAINING_AXES`. A placement
            is what follows a name in an expression: '@data', '@(data,fsdp)', '4', '*', '2*'. Use
            '' for not sharded, to override an outer rule. `P('data')` means '@data'; so does a
            `NamedSharding` with this spec, whose mesh is not used.
        missing: what to do with mesh axes in these rules that the mesh lacks: 'error', or
            'replicate' to ignore them. Nested rules keep their own setting.
        more: placements by keyword.

    Raises:
        EinshardError: a placement is invalid, an axis has two rules, or the decorated function is a
            coroutine or a generator. In use: two names of an array take the same mesh axis, the
            mesh lacks an axis, or another task holds rules across an `await`.
    """

    def __init__(
        self,
        placements: Mapping[str, Placed] = MappingProxyType({}),
        /,
        *,
        missing: Missing = 'error',
        **more: Placed,
    ):
        _check_mapping(placements)
        check_missing(missing, for_an_axis_named_missing="axis_rules({'missing': '@tp'})")
        self.placements: dict[str, str] = {}
        for name, value in [*placements.items(), *more.items()]:
            placement = _as_text(name, value)
            known = _axis_name(name, placement)
            if known in self.placements:
                raise EinshardError(
                    f"axis_rules has two rules for axis '{known}'",
                    facts={
                        'rules': f"'{self.placements[known]}' and '{placement}'",
                        'instead': 'nested axis_rules, where the inner rule wins',
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
                'axis_rules must be left in reverse order, by the task and thread that entered '
                'them',
                facts={'instead': 'enter axis_rules in a function that does not await or yield'},
            )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        kind = deferred_kind(function)
        if kind:
            name = getattr(function, '__name__', repr(function))
            raise EinshardError(
                f'axis_rules cannot decorate {name}: it is {kind}, and rules cannot be held across '
                'an await or a yield',
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
    """The expression with rules applied, and the mesh axes in it that the mesh lacks.

    Missing axes are removed if `on_missing` or the `missing=` of their rule is 'replicate'.
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
    """The expression with `ruled` as its terms, and a replica for unused devices."""
    terms = [_on_mesh(term, mesh_axes) if lenient else term for term, lenient in ruled]
    takes_devices = any(term.takes_devices for term in terms)
    named = any(term.mesh_axes for term in terms)
    if not any(term.star for term in terms) and (takes_devices or not named):
        terms.insert(0, Term(star=True))  # unused devices hold replicas
    placed = write_short(terms)
    try:
        check_mesh_axes(placed)
    except EinshardError as error:
        raise error.about(
            written=f"'{expression.text}', with axis_rules",
            instead='a name without a rule, for an axis that is not sharded',
        ) from None
    return placed


def _ruled_terms(expression: Expression, rules: AxisRules) -> list[tuple[Term, bool]]:
    """The terms with rules applied, and whether each may have missing mesh axes."""
    by_name = {name: (placement, lenient) for name, placement, lenient in rules}
    terms: list[tuple[Term, bool]] = []
    for term in expression.right:
        plain = expression.short and term.name is not None and term == Term(term.name)
        placement, lenient = by_name.get(str(term.name), ('', False)) if plain else ('', False)
        if plain and rules and term.name not in by_name:
            _check_spelling(expression, term, by_name)
        ruled = replace(_term(placement), name=term.name, span=term.span) if placement else term
        terms.append((ruled, lenient))
    return terms


def _check_spelling(expression: Expression, term: Term, ruled: Collection[str]) -> None:
    """Raises if a name without a rule looks like a misspelling of one that has a rule."""
    name, (start, end) = str(term.name), term.span
    for other in ruled:
        if other not in expression.names and _is_misspelled(name, other):
            raise expression.error(
                f"axis '{name}' has no rule, but '{other}' has one",
                [term],
                fix=Suggestion(f'{expression.text[:start]}{other}{expression.text[end:]}'),
                not_sharded=f"axis_rules({name}='')",
            )


def _is_misspelled(name: str, other: str) -> bool:
    """Whether one letter is missing, added or different, or two neighbours are swapped.

    Stricter than difflib, for which 'q_heads' is close to 'kv_heads'. Names of up to 3 letters and
    words of one letter, as in 'w_q' and 'w_k', are too often different on purpose.
    """
    different = {*name.split('_')} ^ {*other.split('_')}
    if min(len(name), len(other)) < 4 or any(len(word) == 1 for word in different):
        return False
    start = _common_prefix(name, other)
    name, other = name[start:], other[start:]
    end = _common_prefix(name[::-1], other[::-1])
    name, other = name[: len(name) - end], other[: len(other) - end]
    return max(len(name), len(other)) == 1 or (len(name) == 2 and name == other[::-1])


def _common_prefix(name: str, other: str) -> int:
    pairs = zip(name, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _drop_missing(expression: Expression, mesh_axes: tuple[str, ...]) -> Expression:
    """The expression without mesh axes that the mesh lacks."""
    right = tuple(_on_mesh(term, mesh_axes) for term in expression.right)
    if not any(term.is_sharded for term in right):
        right = (Term(star=True), *right)  # nothing is sharded: all devices hold replicas
    return replace(expression, right=right)


def _on_mesh(term: Term, mesh_axes: tuple[str, ...]) -> Term:
    return replace(term, mesh_axes=tuple(axis for axis in term.mesh_axes if axis in mesh_axes))


def check_missing(missing: object, **facts: str) -> None:
    """Raises if `missing=` is not valid."""
    if not isinstance(missing, str) or missing not in ('error', 'replicate'):
        raise EinshardError(
            f"missing= must be 'error' or 'replicate', not {missing!r}", facts=facts
        )


@cached
def _term(placement: str) -> Term:
    (term,) = parse(f'x{placement}').right
    return term


def _check_mapping(placements: object) -> None:
    if not isinstance(placements, Mapping):
        raise EinshardError(
            f'axis_rules needs a mapping from axis names to placements, not {placements!r}',
            facts={'examples': "axis_rules({'batch': '@data'}), axis_rules(batch='@data')"},
        )


def _as_text(name: object, placement: Placed) -> str:
    """A placement as text: '@data' for P('data')."""
    spec = placement.spec if isinstance(placement, NamedSharding) else placement
    if not isinstance(spec, PartitionSpec):
        return spec
    entries = spec_axes(spec)
    if len(entries) > 1 or FREE in entries or spec.unreduced or spec.reduced:
        raise EinshardError(
            f'axis_rules has {name}={partition_text(spec)}, but a rule places one axis',
            facts={'expected': "one entry, such as P('data') or P(('data', 'fsdp'))"},
        )
    return str(Term('', mesh_axes=tuple(map(str, entries[0] if entries else ()))))


def _axis_name(name: object, placement: object) -> str:
    """The NFC name of a rule; raises if the name or the placement is invalid."""
    known = unicodedata.normalize('NFC', str(name))
    if not (isinstance(name, str) and known != ELLIPSIS and _right_side(known) == [Term(known)]):
        raise EinshardError(
            f'axis_rules has a rule for {name!r}, which is not a valid axis name',
            facts={'expected': 'letters and underscores, as in expressions'},
        )
    if not isinstance(placement, str) or not _is_placement(placement):
        raise EinshardError(
            f'axis_rules has {name}={placement!r}, which is not a valid placement',
            facts={'expected': "'@data'  '@(data,fsdp)'  '4'  '*'  '2*'  '' (not sharded)"},
            fix=_as_placement(placement),
        )
    return known


def _is_placement(text: str) -> bool:
    return [term.name for term in _right_side(f'x{text}')] == ['x']


def _right_side(short: str) -> list[Term]:
    """The terms of an expression in the short form; [] if it is invalid or has an arrow."""
    try:
        expression = parse(short)
    except EinshardError:
        return []
    return list(expression.right) if expression.short else []


def _as_placement(mesh_axes: object) -> str | None:
    """The placement for a value of a Flax rule: a mesh axis, several, or None."""
    names = [mesh_axes] if isinstance(mesh_axes, str) else mesh_axes
    if names is None or names == () or names == []:
        return "''"
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None
    placement = f'@{names[0]}' if len(names) == 1 else f'@({",".join(names)})'
    return repr(placement) if _is_placement(placement) else None
