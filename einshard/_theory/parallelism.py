"""parallelism: what a placement of an einsum means, before anything is compiled. Imports no jax.

Every device holds a block of each operand and multiplies what it has. An axis that is in the
result is *free*: devices that hold different parts of it compute different parts of the result. An
axis that is not is *reduced*: devices that hold different parts of it compute partial sums of the
same result, which must be added up. Blocks fit together where the operands agree on how their
common axes are cut, and where no part of the devices is asked to cut two axes.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

from .._errors import EinshardError, plural, quoted
from .._expression import ELLIPSIS, Expression
from .._layout import fit, lay_out
from .choices import Choice, choices_for, find_conflicts, find_targets
from .contraction import Contraction, is_placed, of_words, read_contraction
from .cuts import Communication, Cuts, Cutting

Kind: TypeAlias = Literal[
    'replicated', 'data parallelism', 'tensor parallelism', 'hybrid', 'resharding'
]

# To cut free axes is data parallelism if they are the batch, and tensor parallelism too if they are
# columns or heads: axes do not say which they are.
_MEANS: dict[Kind, str] = {
    'replicated': 'replicated: every device computes the whole',
    'data parallelism': 'only free axes are cut: each device computes its part of the result',
    'tensor parallelism': 'only reduced axes are cut: each device computes a partial sum',
    'hybrid': 'free and reduced axes are cut: each device computes a partial sum of its part',
    'resharding': 'resharding: the blocks do not fit together: an operand has to be cut otherwise '
    'first',
}


@dataclass(frozen=True)
class Parallelism:
    """What the placement of an einsum means; made by `parallelism`.

    Attributes:
        einsum: the einsum, without placements.
        kind: 'replicated', 'data parallelism' (only free axes are cut; also columns or heads, as in
            tensor parallelism too), 'tensor parallelism' (only reduced axes), 'hybrid' (both), or
            'resharding' (the blocks do not fit together).
        devices: the device axes with their sizes, slowest first.
        free: the axes of the result.
        reduced: the axes that are summed over.
        operands: the placements of the operands.
        conflicts: why blocks do not fit together.
        choices: the ways to compute it; the first is what a compiler does by itself, if the
            result is not asked for elsewhere.
    """

    einsum: str
    kind: Kind
    devices: Mapping[str, int]
    free: tuple[str, ...]
    reduced: tuple[str, ...]
    operands: tuple[str, ...]
    conflicts: tuple[str, ...]
    choices: tuple[Choice, ...]

    @property
    def result(self) -> str:
        """The placement of the result, by the first choice."""
        return self.choices[0].result

    @property
    def collectives(self) -> tuple[Communication, ...]:
        """The collectives of the first choice."""
        return self.choices[0].collectives

    def __str__(self) -> str:
        n_devices = math.prod(self.devices.values())
        lines = [
            f'{self.einsum}   on {plural(n_devices, "device")}',
            f'  free: {_listed(self.free)}; reduced: {_listed(self.reduced)}',
            f'  {_MEANS[self.kind]}',
            *(f'  {why}' for why in self.conflicts),
            *(f"  operand {i}: '{one}'" for i, one in enumerate(self.operands)),
        ]
        for number, choice in enumerate(self.choices, 1):
            first, *rest = [f'each device multiplies {choice.block}', *str(choice).split('\n')]
            mark = f'  {number}. ' if len(self.choices) > 1 else '  '
            lines += [f'{mark}{first}', *(' ' * len(mark) + line for line in rest)]
        return '\n'.join(lines)


def _listed(names: Sequence[str]) -> str:
    return ', '.join(names) or 'none'


class Chain(tuple[Parallelism, ...]):
    """Einsums one after the other, each as `parallelism` has it.

    The axes of all of them are cut as their names say, so the result of one is where the next one
    wants it.
    """

    __slots__ = ()

    @property
    def collectives(self) -> tuple[Communication, ...]:
        """All collectives, in order, each step by its first choice."""
        return tuple(itertools.chain.from_iterable(step.collectives for step in self))

    def __str__(self) -> str:
        total = len(self.collectives)
        return '\n\n'.join([*map(str, self), f'{plural(total, "collective")} in all'])


@overload
def parallelism(
    einsum: str,
    *,
    devices: int | None = None,
    sizes: Mapping[str, int] | None = None,
    item_bytes: int = 4,
    **counts: int,
) -> Parallelism: ...
@overload
def parallelism(
    einsum: list[str] | tuple[str, ...],
    *,
    devices: int | None = None,
    sizes: Mapping[str, int] | None = None,
    item_bytes: int = 4,
    **counts: int,
) -> Chain: ...
def parallelism(
    einsum: str | list[str] | tuple[str, ...],
    *,
    devices: int | None = None,
    sizes: Mapping[str, int] | None = None,
    item_bytes: int = 4,
    **counts: int,
) -> Parallelism | Chain:
    """What it means to cut the axes of an einsum: which parallelism, which collectives.

        >>> print(parallelism('b x, x y -> b y', x=8, sizes={'b': 32, 'x': 512, 'y': 64}))
        b x, x y -> b y   on 8 devices
          free: b, y; reduced: x
          only reduced axes are cut: each device computes a partial sum
          operand 0: 'b x -> b x8'
          operand 1: 'x y -> x8 y'
          1. each device multiplies [b x/8] [x/8 y]
             result 'b y -> 8 b y'
             all-reduce of the result over x: [b y], 8,192 bytes, among 8 devices
          2. each device multiplies [b x/8] [x/8 y]
             result 'b y -> b8 y'
             reduce-scatter of the result over x: [b y], 8,192 bytes, among 8 devices
          3. each device multiplies [b x/8] [x/8 y]
             result 'b y -> b y8'
             reduce-scatter of the result over x: [b y], 8,192 bytes, among 8 devices

    An axis that comes in the result is free, the others are reduced. Cut free axes cost nothing;
    cut reduced axes leave partial sums, which have to be added up over the devices. Where each
    operand is cut by itself, blocks may not fit together, and something has to move first.

    Nothing is compiled; the compiler has the same choices, and may take another one than the first.

    Args:
        einsum: as for `einsum`, with one operand or two; or a list of them. Axes are words. An
            operand may carry its placement (`'b x8, x y8 -> b y'`), on `devices` devices; one that
            does not is on every device.
        devices: how many devices there are, where placements in `einsum` do not tell.
        sizes: the size of every axis, for bytes.
        item_bytes: bytes of an element.
        counts: into how many parts an axis is cut, in every operand that has it; in device order,
            the slowest first. If `einsum` names mesh axes (`'b@data x'`), these are their sizes.

    Returns:
        A `Parallelism`; for a list, a `Chain` of them. Printed they are sentences.

    Raises:
        EinshardError: the einsum breaks a rule, or counts and sizes do not fit it.
    """
    if isinstance(einsum, list | tuple):
        steps = [_read(one) for one in einsum]
        if not steps:
            raise EinshardError('a chain has at least one einsum, but none is given')
        _check_counts(steps, counts)
        return Chain(_explain(one, devices, sizes, item_bytes, counts) for one in steps)
    contraction = _read(einsum)
    _check_counts([contraction], counts)
    return _explain(contraction, devices, sizes, item_bytes, counts)


def _read(einsum: str) -> Contraction:
    try:
        return read_contraction(einsum)
    except EinshardError as error:
        raise error.with_fix(of_words(einsum) or error.fix) from None


def _explain(
    contraction: Contraction,
    n_devices: int | None,
    sizes: Mapping[str, int] | None,
    item_bytes: int,
    counts: Mapping[str, int],
) -> Parallelism:
    _check_form(contraction)
    devices, operand_cuts, asked = _cuttings(contraction, n_devices, counts)
    its_sizes = None if sizes is None else _checked_sizes(contraction, sizes)
    operands = [
        Cutting(f'operand {i}', operand.names, cuts, devices, its_sizes, item_bytes)
        for i, (operand, cuts) in enumerate(zip(contraction.operands, operand_cuts, strict=True))
    ]
    result = Cutting('the result', contraction.result.names, {}, devices, its_sizes, item_bytes)
    for one in (*operands, result.but(asked or {})):
        _check_divisible(contraction, one)
    conflicts = tuple(find_conflicts(contraction, operands))
    choices = tuple(
        choice
        for target in find_targets(operands)
        for choice in choices_for(operands, target, result, asked)
    )
    cut = {name for operand in operands for name, axes in operand.cuts.items() if axes}
    return Parallelism(
        contraction.plain(),
        _kind(cut, contraction, bool(conflicts)),
        devices,
        contraction.result.names,
        contraction.reduced,
        tuple(operand.expression() for operand in operands),
        conflicts,
        choices,
    )


def _kind(cut: set[str], contraction: Contraction, resharding: bool) -> Kind:
    if resharding:
        return 'resharding'
    free, reduced = cut & set(contraction.result.names), cut & set(contraction.reduced)
    if free and reduced:
        return 'hybrid'
    return 'data parallelism' if free else 'tensor parallelism' if reduced else 'replicated'


def _cuttings(
    contraction: Contraction, n_devices: int | None, counts: Mapping[str, int]
) -> tuple[dict[str, int], list[Cuts], Cuts | None]:
    """The device axes, what cuts each operand, and the placement asked for the result, if any."""
    every = (*contraction.operands, contraction.result)
    mesh_axes = [axis for one in every for term in one.right for axis in term.mesh_axes]
    if mesh_axes:
        return _on_mesh(contraction, _named_devices(contraction, mesh_axes, counts))
    if any(map(is_placed, every)):
        if counts:
            raise contraction.error(
                'the axes are cut both by keyword and by placement',
                [term.span for one in every for term in one.right if term.placed],
                by_keyword=', '.join(f'{name}={count}' for name, count in counts.items()),
            )
        return _on_mesh(contraction, _joint_devices(contraction, n_devices))
    devices = {name: count for name, count in counts.items() if count > 1}
    product = math.prod(devices.values())
    if n_devices is not None and n_devices != product:
        if n_devices % product:
            raise contraction.error(
                f'the counts ask for {product} devices, which do not divide {n_devices}'
            )
        devices = {'*': n_devices // product, **devices}
    cuts: list[Cuts] = [
        {name: (name,) for name in operand.names if name in devices}
        for operand in contraction.operands
    ]
    return devices, cuts, None


def _on_mesh(
    contraction: Contraction, devices: dict[str, int]
) -> tuple[dict[str, int], list[Cuts], Cuts | None]:
    cuts = [_cuts_of(operand, devices) for operand in contraction.operands]
    result = contraction.result
    return devices, cuts, _cuts_of(result, devices) if is_placed(result) else None


def _cuts_of(operand: Expression, devices: Mapping[str, int]) -> Cuts:
    if not is_placed(operand):
        return {}
    layout = lay_out(operand, len(operand.names), math.prod(devices.values()), devices)
    fitted = fit(layout, devices)
    assert fitted is not None, 'the device axes are made for all of the operands'
    cuts: dict[str, tuple[str, ...]] = {}
    for split, axes in zip(layout.splits, fitted, strict=True):
        if split.axis is not None:
            name = operand.names[split.axis]
            cuts[name] = cuts.get(name, ()) + axes
    return cuts


def _named_devices(
    contraction: Contraction, mesh_axes: Sequence[str], counts: Mapping[str, int]
) -> dict[str, int]:
    missing = [axis for axis in dict.fromkeys(mesh_axes) if axis not in counts]
    if missing:
        raise contraction.error(
            f'the size of mesh axis {quoted(missing)} is not given',
            give=', '.join(f'{axis}=2' for axis in missing),
        )
    return dict(counts)


def _joint_devices(contraction: Contraction, n_devices: int | None) -> dict[str, int]:
    """Device axes on which the counts of all operands fall."""
    every = [one for one in (*contraction.operands, contraction.result) if is_placed(one)]
    if n_devices is None:
        counted = [one for one in every if not any(term.star for term in one.right)]
        if not counted:
            raise contraction.error(
                'stars share what devices there are, and nothing says how many', give='devices='
            )
        n_devices = math.prod(term.factor for term in counted[0].right)
    steps = {1, n_devices}
    for operand in every:
        layout = lay_out(operand, len(operand.names), n_devices)
        steps.update(itertools.accumulate((s.count for s in layout.splits), lambda a, b: a * b))
    in_order = sorted(steps)
    ratios = [(after, before) for before, after in itertools.pairwise(in_order)]
    if any(after % before for after, before in ratios):
        raise contraction.error(
            'the device grids of the operands do not fall on one another',
            [term.span for one in every for term in one.right if term.laid],
            devices=n_devices,
        )
    return {f'd{i}': after // before for i, (after, before) in enumerate(ratios)}


def _check_form(contraction: Contraction) -> None:
    if len(contraction.operands) > 2:
        raise contraction.error(
            f'the einsum has {len(contraction.operands)} operands, and in which order they are '
            'multiplied is not said',
            give="a list of einsums of two: ['a b, b c -> a c', 'a c, c d -> a d']",
        )
    if ELLIPSIS in contraction.names:
        raise contraction.error("axes need names here: '...' has none to cut")


def _check_counts(contractions: Sequence[Contraction], counts: Mapping[str, object]) -> None:
    known: list[str] = []
    for contraction in contractions:
        every = (*contraction.operands, contraction.result)
        known += contraction.names
        known += [axis for one in every for term in one.right for axis in term.mesh_axes]
    for name, count in counts.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            facts = {'axes': ' '.join(dict.fromkeys(known))} | ({'near': near[0]} if near else {})
            raise EinshardError(f"no einsum has an axis '{name}'", facts=facts)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise EinshardError(f'{name}= is a number of parts, not {count!r}')


def _checked_sizes(contraction: Contraction, sizes: Mapping[str, int]) -> Mapping[str, int]:
    missing = [name for name in contraction.names if name not in sizes]
    if missing:
        raise contraction.error(f'sizes= does not say how long {quoted(missing)} is')
    return sizes


def _check_divisible(contraction: Contraction, one: Cutting) -> None:
    for name, cut in one.cuts.items():
        parts = math.prod(one.devices[axis] for axis in cut)
        if one.sizes is not None and one.sizes[name] % parts:
            raise contraction.error(
                f"axis '{name}' has size {one.sizes[name]}, which {parts} parts do not divide",
                of=one.array,
            )
