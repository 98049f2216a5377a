"""The mesh that the expressions of a per-device function make together. Imports no jax."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .._cache import cached
from .._errors import EinshardError, quoted
from .._expression import Expression, parse
from .axis_order import find_orders
from .mesh_members import Cell, Member, cells_of, differ, starred_otherwise, texts_of


@dataclass(frozen=True, slots=True)
class SharedMesh:
    """The axes of the mesh in device order; None stands for replicas that no expression names."""

    cells: tuple[Cell, ...]

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size by name; replicas get a name that no array axis can have."""
        numbers = itertools.count()
        return {name or f'replica{next(numbers)}': count for name, count in self.cells}

    @property
    def sizes(self) -> dict[str, int]:
        """Size by name of the axes that have one."""
        return {name: count for name, count in self.cells if name is not None}

    def complete(self, expression: Expression) -> str:
        """The expression for all of the devices: 'x y -> x2 y' as 'x y -> 4 x2 y'."""
        places = self._places(expression)
        cells = [(places.get(name or '', ''), count) for name, count in self.cells if count > 1]
        return _written(expression, [f'{name}{count}' for name, count in cells] or ['1'])

    def by_name(self, expression: Expression) -> str:
        """The expression with the names of the mesh axes: 'x y -> x2 y' as 'x y -> x@x y'."""
        axes: dict[str, list[str]] = {}
        for axis, name in self._places(expression).items():
            axes.setdefault(name, []).append(axis)
        terms = [f'{name}@({",".join(its_axes)})' for name, its_axes in axes.items()]
        return _written(expression, terms or ['*'])

    def _places(self, expression: Expression) -> dict[str, str]:
        """The array axis that each mesh axis cuts, in device order."""
        member = Member('', expression)
        places = {axis: str(term.name) for axis, term in member.shares.items()}
        places |= {name: name for name in member.cuts}
        return {axis: places[axis] for axis in self.sizes if axis in places}


def _written(expression: Expression, placed: Sequence[str]) -> str:
    cut = {parse(text).names for text in placed}
    rest = [name for name in expression.names if (name,) not in cut]
    return ' '.join([*expression.names, '->', *placed, *rest])


@cached
def share(members: tuple[Member, ...], n_devices: int) -> SharedMesh:
    """Puts the axes of all expressions in a row: the one order that agrees with each of them.

    A count that one expression gives holds in all. A star is solved where replicas are spelled
    out, since such an expression is about all of the devices; the stars that are then left share
    what the other axes leave.
    """
    for member in members:
        member.check(members)
    counts = _solve(members, n_devices)
    replicas, rest = divmod(n_devices, math.prod(counts.values()))
    if rest:
        raise _too_many(members, counts, n_devices)
    if replicas > 1 and not any(member.is_whole for member in members):
        raise _left_over(members, counts, n_devices)
    rows = find_orders(members, counts, n_devices)
    if len(rows) > 1:
        raise _several_orders(members, rows, n_devices)
    (row,) = rows
    _check_order(members, row)
    uncut = [(name, count) for name, count in counts.items() if count == 1]
    return SharedMesh((*row, *uncut) or ((None, 1),))


def _solve(members: Sequence[Member], n_devices: int) -> dict[str, int]:
    """The count of every axis, in the order in which they appear."""
    known: dict[str, tuple[int, Member]] = {}

    def learn(name: str, count: int, member: Member) -> None:
        first, other = known.setdefault(name, (count, member))
        if first != count:
            raise differ(name, (first, other), (count, member), n_devices)

    for member in members:
        for name, term in member.cuts.items():
            if not term.star:
                learn(name, term.factor, member)
    written = {name: count for name, (count, _) in known.items()}
    for member in members:
        if member.is_whole and not member.shares:
            solved = dict(member.cells(written, n_devices))
            for name in member.cuts:
                learn(name, solved.get(name, 1), member)
    starred: dict[str, tuple[int, Member]] = {}
    for member in members:
        for name, term in member.cuts.items():
            if name not in known:
                factor, other = starred.setdefault(name, (term.factor, member))
                if factor != term.factor:
                    raise starred_otherwise(name, other, member)
    counts = {name: count for name, (count, _) in known.items()}
    if starred:
        factors = {name: factor for name, (factor, _) in starred.items()}
        counts |= _share_out(members, counts, factors, n_devices)
    return {name: counts[name] for member in members for name in member.cuts}


def _share_out(
    members: Sequence[Member],
    counts: Mapping[str, int],
    factors: Mapping[str, int],
    n_devices: int,
) -> dict[str, int]:
    """The counts of starred axes, which share what the others leave."""
    if n_devices % math.prod(counts.values()):
        raise _too_many(members, counts, n_devices)
    terms = [f'{name}{count}' for name, count in counts.items()]
    terms += [f'{name}{"" if factor == 1 else factor}*' for name, factor in factors.items()]
    try:
        solved = dict(cells_of(parse(' '.join(terms)), n_devices))
    except EinshardError as error:
        raise EinshardError(
            error.sentence,
            expression=' '.join(terms),
            spans=error.spans,
            facts={**texts_of(members), **error.facts},
        ) from None
    return {name: solved.get(name, 1) for name in factors}


def _check_order(members: Sequence[Member], row: Sequence[Cell]) -> None:
    """Raises where an axis is over several mesh axes, and these are not in device order."""
    places = [name for name, _ in row]
    for member in members:
        by_axis: dict[str, list[str]] = {}
        for term in member.expression.right:
            own = [str(term.name)] if str(term.name) in member.cuts and not term.mesh_axes else []
            by_axis.setdefault(str(term.name), []).extend([*own, *term.mesh_axes])
        for name, axes in by_axis.items():
            placed = [axis for axis in axes if axis in places]
            in_order = sorted(placed, key=places.index)
            if placed != in_order:
                raise member.expression.error(
                    f"axis '{name}' is over {quoted(placed)}, which is not the device order",
                    [term for term in member.expression.right if term.name == name],
                    spec_of=member.of,
                    in_device_order=', '.join(in_order),
                )


def _too_many(
    members: Sequence[Member], counts: Mapping[str, int], n_devices: int
) -> EinshardError:
    cut = [(name, count) for name, count in counts.items() if count > 1]
    product = math.prod(counts.values())
    times = ' x '.join(str(count) for _, count in cut)
    facts = {**texts_of(members), 'devices': str(n_devices)}
    if len(cut) > 1:
        (first, _), (second, _) = cut[:2]
        facts['over the same'] = f"'{second}@{first}' cuts {second} over the devices of {first}"
    return EinshardError(
        f'{quoted(f"{name}{count}" for name, count in cut)} '
        f'{"asks" if len(cut) == 1 else "together ask"} for '
        f'{times if len(cut) == 1 else f"{times} = {product}"} devices, '
        f'{"more than" if product > n_devices else "which do not divide"} '
        f'the {n_devices} there {"is" if n_devices == 1 else "are"}',
        facts=facts,
    )


def _left_over(
    members: Sequence[Member], counts: Mapping[str, int], n_devices: int
) -> EinshardError:
    cut = [f'{name}{count}' for name, count in counts.items() if count > 1]
    most = max(members, key=lambda member: len(member.cuts))
    expression = most.expression
    start = expression.right[0].span[0]
    fix = f'{expression.text[:start]}* {expression.text[start:]}'
    fixed = tuple(replace(m, expression=parse(fix)) if m is most else m for m in members)
    try:
        share(fixed, n_devices)
    except EinshardError:
        fix = None
    sentence = f'nothing is sharded, and nothing says that {n_devices} devices hold replicas'
    if cut:
        use = f'{"uses" if len(cut) == 1 else "use"} {math.prod(counts.values())}'
        sentence = (
            f'{quoted(cut)} {use} of {n_devices} devices, and nothing says that the others hold '
            'replicas'
        )
    return expression.error(
        sentence,
        most.cuts.values() or expression.right,
        **texts_of(members),
        devices=n_devices,
        fix=fix and f"'{fix}'",
    )


def _several_orders(
    members: Sequence[Member], rows: Sequence[tuple[Cell, ...]], n_devices: int
) -> EinshardError:
    first = next(pair for pair in zip(*rows, strict=False) if pair[0] != pair[1])
    one, other = (f"'{name or ''}{count}'" for name, count in first)
    most = max(members, key=lambda member: len(member.cuts))
    either, or_ = (SharedMesh(row).complete(most.expression) for row in rows)
    return EinshardError(
        f'nothing says which of {one} and {other} changes slower over the devices',
        facts={
            **texts_of(members),
            'devices': str(n_devices),
            'a replica says it': f"'{either}' or '{or_}', for {most.of}",
        },
    )
