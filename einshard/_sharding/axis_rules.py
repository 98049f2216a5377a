"""Logical axis names: `axis_rules` maps axis names to placements."""

from __future__ import annotations

import functools
import inspect
import keyword
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

from jax.sharding import NamedSharding, PartitionSpec

from .._errors import EinshardError, public
from .._notation.expression import ELLIPSIS, Term, parse
from .._text import deferred_kind
from .context import AxisRule, Fallback
from .mesh import UNCONSTRAINED, AnyMesh, partition_text, spec_axes
from .scopes import enter_rules, leave_rules, leave_rules_since, n_open_scopes

P = ParamSpec('P')
R = TypeVar('R')

# What to do with a rule whose mesh axes already shard another axis of the array.
Taken: TypeAlias = Literal['error', 'next']
# The placement of one axis: the text after its name, such as '@data'; P('data'); or a NamedSharding
# with this spec.
AxisPlacement: TypeAlias = str | PartitionSpec | NamedSharding
# An axis name, and either its mesh axes, as in the logical axis rules of Flax, or a placement.
LogicalRule: TypeAlias = tuple[str, AxisPlacement | Sequence[str] | None]


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

    Rules apply to expressions without an arrow. An axis written without a placement takes the
    placement of its rule. An axis without a rule is not sharded, but einshard raises an error if
    its name looks like a misspelling of a name with a rule. Unused devices hold replicas. Nested
    rules are merged, and the inner rule of an axis wins. An `axis_rules` object is reusable and
    reentrant, also across threads.

    Logical axis rules in the style of Flax and MaxText are a list of pairs. With `taken='next'`, a
    name may be listed several times, and the first rule whose mesh axes are free applies:

        >>> pairs = [('batch', 'data'), ('embed', ('data', 'tp')), ('embed', 'tp')]
        >>> with axis_rules(pairs, taken='next'):
        ...     describe(einshard(np.ones((jax.device_count(), 16)), 'batch embed', mesh=mesh))
        'a b -> a@data b@tp'

    Rules are part of JAX's cache keys: functions under `jax.jit` and `sharded` are traced once per
    set of rules.

    As a decorator, `axis_rules` goes below `@jax.jit`, `@classmethod` and `@property`.

    Async functions cannot enter rules: at an `await`, other tasks of the thread would run with
    them, because JAX's cache keys belong to the thread. Enter the rules in a plain function that
    the async function calls, or decorate that function. A task has the rules of the code that
    starts it.

        >>> import asyncio
        >>> @axis_rules(batch='@data')
        ... def place(x):
        ...     return einshard(x, 'batch d', mesh=mesh)
        >>> async def main():
        ...     return await asyncio.to_thread(place, np.ones((jax.device_count(), 4)))
        >>> describe(asyncio.run(main()))
        'a b -> a@data b'

    A thread starts without rules, so enter them in the function that it runs, as here. If it runs
    in a copied `contextvars` context, as with `asyncio.to_thread`, `einshard` and `sharded` use the
    rules of that context, and einshard raises an error in a function that plain `jax.jit` traces.
    A function that JAX has traced without rules runs without them there.

    Args:
        placements: a mapping from axis names to placements, such as `TRAINING_AXES`. A placement
            is what follows a name in an expression: '@data', '@(data,fsdp)', '4', '*', '2*'. Use
            '' for not sharded, to override an outer rule. `P('data')` means '@data'. A
            `NamedSharding` stands for its spec; its mesh is not used. A list of `(name, mesh_axes)`
            pairs also works, where `mesh_axes` is one name, a tuple of names, or None (not
            sharded).
        missing: what to do with mesh axes in these rules that the mesh lacks: 'error', or
            'replicate' to ignore them. Nested rules keep their own setting.
        indivisible: what to do if the size of an axis is not divisible by the number of shards of
            its rule: 'error', or 'replicate' to replicate that axis only.
        taken: what to do if two axes of an array take the same mesh axis: 'error', or 'next' to
            skip a rule whose mesh axes are in use. Placements in the expression apply first, then
            rules with `taken='error'`, then rules with `taken='next'` in the order listed, those
            of inner blocks first. An axis whose rules are all skipped is not sharded. Mesh axes of
            size 1 may be shared.
        more: placements by keyword.

    Raises:
        EinshardError: a placement or an option is invalid, an axis has two rules without
            `taken='next'`, or the decorated object is not a function, or is a generator or async
            function; an async function enters the rules. When applied: two axes of an array take
            the same mesh axis, the mesh lacks an axis, a name looks misspelled, or another task in
            the thread has entered different rules.
    """

    @public
    def __init__(
        self,
        placements: Mapping[str, AxisPlacement] | Sequence[LogicalRule] = MappingProxyType({}),
        /,
        *,
        missing: Fallback = 'error',
        indivisible: Fallback = 'error',
        taken: Taken = 'error',
        **more: AxisPlacement,
    ):
        for option, value in (('missing', missing), ('indivisible', indivisible)):
            check_option(option, value, **_rule_for_axis_named(option))
        check_option('taken', taken, ('error', 'next'), **_rule_for_axis_named('taken'))
        options = missing == 'replicate', indivisible == 'replicate', taken == 'next'
        self.rules: list[AxisRule] = []
        placement_of: dict[str, str] = {}
        for name, value in [*_pairs(placements), *more.items()]:
            rule = AxisRule(*_read_rule(name, _placement_text(name, value)), *options)
            if rule.name in placement_of and taken == 'error':
                raise EinshardError(
                    f"axis_rules has two rules for axis '{rule.name}'",
                    code='axis-rules',
                    facts={
                        'rules': f"'{placement_of[rule.name]}' and '{rule.placement}'",
                        'instead': "pass taken='next' if the second is a fallback; or nest two "
                        'axis_rules blocks, where the inner rule wins',
                    },
                )
            placement_of[rule.name] = rule.placement
            self.rules.append(rule)

    def __repr__(self) -> str:
        rules = self.rules
        named = [f"{rule.name}='{rule.placement}'" for rule in rules]
        names = {rule.name for rule in rules} - {'missing', 'indivisible', 'taken'}
        if len({x for x in names if not keyword.iskeyword(x)}) < len(rules):
            named = [str([(rule.name, rule.placement) for rule in rules])]
        first = rules[:1]
        options = [
            *("missing='replicate'" for rule in first if rule.ignores_missing),
            *("indivisible='replicate'" for rule in first if rule.replicates_indivisible),
            *("taken='next'" for rule in first if rule.skips_taken),
        ]
        return f'axis_rules({", ".join([*named, *options])})'

    def __enter__(self) -> axis_rules:
        _check_not_async()
        n_open = n_open_scopes()
        try:
            enter_rules(self, self.rules)
        except BaseException:  # Python does not call `__exit__`
            leave_rules_since(n_open)
            raise
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        n_open = None
        try:
            n_open = n_open_scopes()
            in_order = leave_rules(self)
        except BaseException:  # such as KeyboardInterrupt
            if n_open in (None, n_open_scopes()):
                leave_rules(self)
            raise
        if not in_order and raised is None:
            raise EinshardError(
                'axis_rules blocks must be exited innermost first, by the task and thread that '
                'entered them',
                code='axis-rules',
                facts={'instead': "'with axis_rules(...):', without await or yield inside"},
            )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        decorated: Any = function
        if isinstance(decorated, type | staticmethod) or not callable(decorated):
            what, instead = type(decorated).__name__, 'decorate a function'
            if isinstance(decorated, type):
                what, instead = f'class {decorated.__name__}', 'decorate its methods'
            elif isinstance(decorated, staticmethod | classmethod | property):
                instead = f'put axis_rules below @{what}'
            raise EinshardError(
                f'axis_rules must decorate a function, not {what}',
                code='axis-rules',
                facts={'instead': instead},
            )
        kind = deferred_kind(function)
        if kind:
            name = getattr(function, '__name__', repr(function))
            raise EinshardError(
                f'axis_rules cannot decorate {name}, {kind}: rules cannot span an await or a yield',
                code='axis-rules',
                facts={'instead': f'decorate a plain function that {name} calls'},
            )

        @functools.wraps(function)
        def with_rules(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return with_rules


def _check_not_async() -> None:
    """Raises if an async function, which may await in the block, calls `axis_rules.__enter__`.

    At an await, no code of einshard runs. A task that then calls a compiled function under
    `jax.jit` would silently run the program of the rules of this task.
    """
    frame: Any = sys._getframe(2)  # type: ignore[reportPrivateUsage]
    # context managers, and generators that are decorated as such, enter for their caller
    while frame is not None and (
        frame.f_code.co_flags & inspect.CO_GENERATOR
        or frame.f_code.co_name == '__enter__'
        or frame.f_globals.get('__name__') == 'contextlib'
    ):
        frame = frame.f_back
    if frame and frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        name = frame.f_code.co_name
        raise EinshardError(
            f'axis_rules cannot be entered in the async function {name}: at an await, other tasks '
            'of this thread would run with its rules',
            code='axis-rules',
            facts={'instead': f'enter it in a plain function that {name} calls'},
        )


def check_option(
    option: str, value: object, choices: Sequence[str] = ('error', 'replicate'), **facts: str
) -> None:
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        expected = f'{", ".join(others)} or {last}'
        raise EinshardError(
            f'{option}= must be {expected}, not {value!r}', code='axis-rules', facts=facts
        )


def check_flag(option: str, value: object, code: str = 'argument') -> None:
    """Raises if an option is not True or False. `reshard='no'` would be true."""
    if not isinstance(value, bool):
        raise EinshardError(f'{option}= must be True or False, not {value!r}', code=code)


def _rule_for_axis_named(option: str) -> dict[str, str]:
    return {f'for an axis named {option}': f"axis_rules({{'{option}': '@tp'}})"}


def _pairs(placements: Any) -> list[tuple[Any, Any]]:
    if isinstance(placements, Mapping):
        return [*placements.items()]
    if isinstance(placements, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in placements
    ):
        return [(name, _mesh_axes_to_placement(value)) for name, value in placements]
    raise EinshardError(
        'axis_rules needs a mapping from axis names to placements, or a list of pairs, not '
        f'{placements!r}',
        code='axis-rules',
        facts={
            'examples': "axis_rules(batch='@data'), or as in Flax: axis_rules([('batch', 'data')])"
        },
    )


def _placement_text(name: object, placement: AxisPlacement) -> str:
    """Converts a PartitionSpec, or the spec of a NamedSharding, to text: P('data') to '@data'.

    Returns any other value unchanged.
    """
    spec = placement.spec if isinstance(placement, NamedSharding) else placement
    if not isinstance(spec, PartitionSpec):
        return spec
    entries = spec_axes(spec)
    if len(entries) > 1 or UNCONSTRAINED in entries or spec.unreduced or spec.reduced:
        raise EinshardError(
            f'axis_rules has {name}={partition_text(spec)}, but a rule is for one array axis',
            code='axis-rules',
            facts={'expected': "one entry, such as P('data') or P(('data', 'fsdp'))"},
        )
    return str(Term('', mesh_axes=tuple(map(str, entries[0] if entries else ()))))


def _read_rule(name: object, placement: object) -> tuple[str, str]:
    """Returns the NFC-normalized name and the placement of a rule. Raises if either is invalid."""
    axis = unicodedata.normalize('NFC', str(name))
    if not (isinstance(name, str) and axis != ELLIPSIS and _parse_short_form(axis) == [Term(axis)]):
        raise EinshardError(
            f'axis_rules has a rule for {name!r}, which is not a valid axis name',
            code='axis-rules',
            facts={'expected': 'letters and underscores, as in expressions'},
        )
    if not isinstance(placement, str) or not _is_placement(placement):
        instead = _mesh_axes_to_placement(placement)
        if isinstance(placement, AnyMesh):
            raise EinshardError(
                f'axis_rules has no {name}=; enter the mesh before the rules',
                code='mesh',
                facts={'instead': 'with jax.set_mesh(mesh), axis_rules(...):'},
            )
        raise EinshardError(
            f'axis_rules has {name}={placement!r}, which is not a valid placement',
            code='axis-rules',
            facts={'expected': "'@data'  '@(data,fsdp)'  '4'  '*'  '2*'  '' (not sharded)"},
            fix=None if instead is placement else f'axis_rules({ {name: instead}!r})',
        )
    return axis, placement


def _is_placement(text: str) -> bool:
    return [term.name for term in _parse_short_form(f'x{text}')] == ['x']


def _parse_short_form(text: str) -> list[Term]:
    """Returns the terms if `text` is an expression without an arrow, or else []."""
    try:
        expression = parse(text)
    except EinshardError:
        return []
    return list(expression.right) if expression.short else []


def _mesh_axes_to_placement(value: Any) -> Any:
    """Converts the mesh axes of a Flax rule (a name, a sequence of names, or None) to a placement.

    Returns any other value unchanged.
    """
    names = [value] if isinstance(value, str) else value
    if names is None or names == () or names == []:
        return ''
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return value
    if isinstance(value, str) and value.isdigit():  # a count
        return value
    placement = f'@{names[0]}' if len(names) == 1 else f'@({",".join(names)})'
    return placement if _is_placement(placement) else value
