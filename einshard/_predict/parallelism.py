"""parallelism: predicts the collectives of a sharded einsum.

An axis of the result is *free*: devices with different shards of it compute different parts of the
result. A contracted axis is *reduced*: devices with different shards of it compute partial sums.
The blocks of two operands match if the operands shard their common axes in the same way, and no
mesh axis shards two array axes.
"""

from __future__ import annotations

import difflib
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, overload

from .._display import Display, as_json
from .._errors import EinshardError, plural, public, quoted
from .._notation.expression import ELLIPSIS
from .._notation.words import signs_text
from .._page import Column, Page, Section
from .._working_fixes import keep_working_suggestions
from .choices import Choice, Communication, Contractor
from .contraction import Contraction, from_numpy_subscripts, is_placed, read_contraction
from .mesh_axes import array_axes_of, mesh_and_operands

Kind: TypeAlias = Literal[
    'replicated', 'data parallelism', 'tensor parallelism', 'hybrid', 'resharding'
]

# Sharding the batch, a free axis, is data parallelism; sharding columns or heads, which are also
# free, is tensor parallelism. Axis names do not say which, so the text says what devices compute.
_KIND_TEXTS: dict[Kind, str] = {
    'replicated': 'replicated: every device computes the full result',
    'data parallelism': 'only free axes are sharded: each device computes its part of the result',
    'tensor parallelism': 'only reduced axes are sharded: each device computes a partial sum',
    'hybrid': 'free and reduced axes are sharded: each device computes a partial sum of its part',
    'resharding': 'resharding: the blocks do not match, so an operand must be resharded first',
}
# the parameters of `parallelism` other than counts
_PARAMETERS = ('einsum', 'devices', 'sizes', 'item_bytes')


@dataclass(frozen=True, repr=False)
class Parallelism(Display):
    """The parallelism of a sharded einsum, made by `parallelism`.

    Attributes:
        einsum: the einsum, without placements.
        kind: 'replicated', 'data parallelism' (only free axes are sharded, even if they are columns
            or heads), 'tensor parallelism' (only reduced axes are sharded), 'hybrid' (both) or
            'resharding' (the blocks do not match).
        devices: mesh axes and their sizes, slowest-varying first.
        free: the axes of the result.
        reduced: the axes that are summed over.
        operands: the placements of the operands.
        conflicts: the reasons why the blocks do not match.
        choices: ways to compute the einsum. If the blocks match and the result has no placement,
            XLA compiles the first one. Otherwise the sizes decide which one XLA compiles.
    """

    einsum: str
    kind: Kind
    devices: Mapping[str, int] = field(hash=False)
    free: tuple[str, ...]
    reduced: tuple[str, ...]
    operands: tuple[str, ...]
    conflicts: tuple[str, ...]
    choices: tuple[Choice, ...]

    @property
    def result(self) -> str:
        """The placement of the result in the first choice."""
        return self.choices[0].result

    @property
    def collectives(self) -> tuple[Communication, ...]:
        """The collectives of the first choice."""
        return self.choices[0].collectives

    def to_dict(self) -> dict[str, Any]:
        """Converts to dictionaries, lists, strings and numbers, for JSON."""
        return {'schema': 1, **as_json(self)}

    def _page(self) -> Page:
        return Page(self._title(), tuple(self._sections()))

    def _title(self) -> str:
        return f'{self.einsum}   on {plural(math.prod(self.devices.values()), "device")}'

    def _summary(self) -> tuple[str, ...]:
        free, reduced = (', '.join(names) or 'none' for names in (self.free, self.reduced))
        return f'free: {free}; reduced: {reduced}', _KIND_TEXTS[self.kind], *self.conflicts

    def _marked_choices(self) -> Iterator[tuple[str, list[str]]]:
        """Yields the lines of each choice, and its number, '1. ', if there are several."""
        for number, choice in enumerate(self.choices, 1):
            lines = [f'each device multiplies {choice.block}', *str(choice).split('\n')]
            yield f'{number}. ' if len(self.choices) > 1 else '', lines

    def _sections(self) -> Iterator[Section]:
        yield Section('', lines=self._summary())
        operands = tuple((f'operand {i}', text) for i, text in enumerate(self.operands))
        yield Section('', (Column('array'), Column('placement')), operands)
        for mark, (title, *steps) in self._marked_choices():
            yield Section(f'{mark}{title}', lines=tuple(steps))

    def _text(self, width: int | None) -> str:
        lines = [
            self._title(),
            *(f'  {line}' for line in self._summary()),
            *(f"  operand {i}: '{text}'" for i, text in enumerate(self.operands)),
        ]
        for mark, (title, *steps) in self._marked_choices():
            lines += [f'  {mark}{title}', *(f'  {" " * len(mark)}{step}' for step in steps)]
        return '\n'.join(lines)


class Chain(Display, tuple[Parallelism, ...]):
    """The parallelism of a sequence of einsums.

    With counts such as `x=8`, all einsums shard an axis in the same way, so each result is sharded
    as the next one needs. If the einsums have placements, resharding between them is not counted.
    """

    __slots__ = ()

    @property
    def collectives(self) -> tuple[Communication, ...]:
        """The collectives of the first choice of each step, in order."""
        return tuple(itertools.chain.from_iterable(step.collectives for step in self))

    def to_dict(self) -> dict[str, Any]:
        """Converts to dictionaries, lists, strings and numbers, for JSON."""
        return {
            'schema': 1,
            'steps': [step.to_dict() for step in self],
            'collectives': as_json(self.collectives),
        }

    def _page(self) -> Page:
        sections = [(Section(step._title()), *step._sections()) for step in self]  # type: ignore[reportPrivateUsage]
        total = Section('', lines=(self._total(),))
        return Page('', (*itertools.chain.from_iterable(sections), total))

    def _total(self) -> str:
        return f'{plural(len(self.collectives), "collective")} in all'

    def _text(self, width: int | None) -> str:
        return '\n\n'.join([*map(str, self), self._total()])


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
@public
def parallelism(
    einsum: str | list[str] | tuple[str, ...],
    *,
    devices: int | None = None,
    sizes: Mapping[str, int] | None = None,
    item_bytes: int = 4,
    **counts: int,
) -> Parallelism | Chain:
    """Predicts the parallelism and the collectives of a sharded einsum, without compiling it.

        >>> from einshard import parallelism
        >>> print(parallelism('b x, x y -> b y', x=8, sizes={'b': 32, 'x': 512, 'y': 64}))
        b x, x y -> b y   on 8 devices
          free: b, y; reduced: x
          only reduced axes are sharded: each device computes a partial sum
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

    Axes of the result are free: sharding them needs no communication. Contracted axes are reduced:
    sharding them leaves partial sums, to be all-reduced or reduce-scattered. If the blocks of the
    operands do not match, an operand must be resharded first.

    The first choice is that of Shardy, XLA's propagation, which runs on the lowered einsum: a call
    takes 30 ms or more, and needs no devices. If the blocks match and the result has no placement,
    XLA compiles this one. Otherwise it may compile another one; `explain` shows which. For the
    rules, see https://jax-ml.github.io/scaling-book/sharding.

    Args:
        einsum: an einsum of one or two operands, as for `einsum`, or a list of einsums. Operands
            may have placements (`'b x8, x y8 -> b y'`); those without one are replicated.
        devices: the number of devices. Default: as many as the counts use; required if every
            placement has a star and no mesh axis. Devices that `counts` do not use hold replicas.
        sizes: the size of every axis. Without it, the bytes of collectives are None.
        item_bytes: bytes per element.
        counts: `x=8` splits axis x into 8 shards in every operand that has it. The order of the
            keywords is the device order, slowest-varying first. If `einsum` names mesh axes
            (`'b@data x'`), counts are their sizes: `data=8`. No axis can have the name of another
            parameter.

    Returns:
        A `Parallelism`; for a list, a `Chain` of them. Both print as text, show as HTML in
        notebooks, and have `to_dict()` and `save('page.html')`.

    Raises:
        EinshardError: the einsum is invalid, or counts or sizes do not fit it; or
            `jax_use_shardy_partitioner` is off.
    """
    devices, sizes, item_bytes = _read_options(devices, sizes, item_bytes)
    if isinstance(einsum, list | tuple):
        steps = [_read(text, read_contraction) for text in einsum]
        if not steps:
            raise EinshardError('the list of einsums is empty')
        counts = _read_counts(steps, counts)
        return Chain(_analyze(step, devices, sizes, item_bytes, counts) for step in steps)

    def try_fix(fix: str) -> None:
        fixed = read_contraction(fix)
        _place(fixed, devices, sizes, item_bytes, _read_counts([fixed], counts))

    contraction = _read(einsum, try_fix)
    counts = _read_counts([contraction], counts)
    return _analyze(contraction, devices, sizes, item_bytes, counts)


def _read(einsum: str, try_fix: Callable[[str], object]) -> Contraction:
    try:
        return read_contraction(einsum)
    except EinshardError as error:
        error = error.with_fix(from_numpy_subscripts(einsum) or error.fix)
        raise keep_working_suggestions(error, try_fix) from None


def _analyze(contraction: Contraction, n_devices: int | None, *options: Any) -> Parallelism:
    try:
        contractor = _place(contraction, n_devices, *options)
    except EinshardError as error:
        raise keep_working_suggestions(
            error,
            lambda fix: _place(read_contraction(fix), n_devices, *options),
            lambda n: _place(contraction, n, *options),
        ) from None
    conflicts = tuple(_find_conflicts(contractor))
    operands = contractor.operands
    sharded = {name for array in operands for name, axes in array.by_name.items() if axes}
    is_free = not sharded.isdisjoint(contraction.result.names)
    is_reduced = not sharded.isdisjoint(contraction.contracted)
    kind: Kind = 'data parallelism' if is_free else 'replicated'
    if conflicts:
        kind = 'resharding'
    elif is_reduced:
        kind = 'hybrid' if is_free else 'tensor parallelism'
    return Parallelism(
        contraction.plain(),
        kind,
        contractor.user_mesh,
        contraction.result.names,
        contraction.contracted,
        tuple(map(contractor.placement, operands)),
        conflicts,
        contractor.choices(is_placed(contraction.result)),
    )


def _place(
    contraction: Contraction,
    n_devices: int | None,
    sizes: Mapping[str, int] | None,
    item_bytes: int,
    counts: Mapping[str, int],
) -> Contractor:
    """Finds the mesh, and how it shards the arrays. Raises if they do not fit."""
    _check_supported(contraction)
    mesh_shape, placed = mesh_and_operands(contraction, n_devices, counts)
    missing = [name for name in contraction.names if sizes is not None and name not in sizes]
    if missing:
        raise contraction.error(f'sizes= has no size for {quoted(missing)}')
    array_axes = [array_axes_of(array, mesh_shape) for array in (*placed, contraction.result)]
    contractor = Contractor(contraction, mesh_shape, array_axes, sizes, item_bytes)
    for array in (*contractor.operands, contractor.result):
        for name, axes in array.by_name.items():
            n = contractor.n_shards(axes)
            if sizes is not None and sizes[name] % n:
                raise contraction.error(
                    f"axis '{name}' (size {sizes[name]}) of {array.label} is not divisible by {n}",
                    code='not-divisible',
                )
    return contractor


def _check_supported(contraction: Contraction) -> None:
    terms = [term for array in contraction.arrays for term in array.right]
    for name in (*contraction.names, *contraction.mesh_axes):
        if name in _PARAMETERS:
            raise contraction.error(
                f"an axis cannot be named '{name}', which is a parameter of parallelism; rename it",
                [term.span for term in terms if name in (term.name, *term.mesh_axes)],
            )
    if len(contraction.operands) > 2:
        raise contraction.error(
            f'parallelism takes one or two operands, not {len(contraction.operands)}',
            instead="pass a list of einsums: ['a b, b c -> a c', 'a c, c d -> a d']",
        )
    if ELLIPSIS in contraction.names:
        raise contraction.error("parallelism does not support '...'; name all axes")
    signed = [term for term in terms if term.sign]
    if signed:
        kinds = signs_text([term.sign for term in signed])
        spans = [term.span for term in signed]
        raise contraction.error(f'parallelism does not support {kinds}', spans)


def _read_counts(contractions: Sequence[Contraction], counts: Mapping[str, Any]) -> dict[str, int]:
    axes: list[str] = []
    for contraction in contractions:
        axes += [*contraction.names, *contraction.mesh_axes]
    for name, count in counts.items():
        if name not in axes:
            near = difflib.get_close_matches(name, axes, n=1)
            facts = {'axes': ' '.join(dict.fromkeys(axes))}
            if near:
                facts['similar'] = f"'{near[0]}'"
            owner = 'the einsum has no' if len(contractions) == 1 else 'no einsum has an'
            raise EinshardError(f"{owner} axis '{name}'", facts=facts)
        if not _is_int(count):
            raise EinshardError(f'{name}= must be a positive integer, not {count!r}')
    return {name: int(count) for name, count in counts.items()}


def _read_options(
    devices: Any, sizes: Any, item_bytes: Any
) -> tuple[int | None, dict[str, int] | None, int]:
    """Checks the options, and converts NumPy integers to int, for JSON."""
    if devices is not None and not _is_int(devices):
        raise EinshardError(f'devices= must be a positive integer, not {devices!r}')
    if not _is_int(item_bytes):
        raise EinshardError(f'item_bytes= must be a positive integer, not {item_bytes!r}')
    if sizes is not None and not isinstance(sizes, Mapping):
        raise EinshardError(f'sizes= must be a dict with the size of every axis, not {sizes!r}')
    for name, size in {} if sizes is None else sizes.items():
        if not _is_int(size, minimum=0):
            raise EinshardError(
                f"the size of axis '{name}' in sizes= must be a non-negative integer, not {size!r}"
            )
    return (
        None if devices is None else int(devices),
        None if sizes is None else {name: int(size) for name, size in sizes.items()},
        int(item_bytes),
    )


def _is_int(value: Any, minimum: int = 1) -> bool:
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_int and int(value) >= minimum


def _find_conflicts(contractor: Contractor) -> Iterator[str]:
    """Yields the reasons why the devices cannot multiply their blocks of the operands."""
    if len(contractor.operands) < 2:
        return
    left, right = contractor.operands
    same_devices = {
        (a, b): None
        for part in contractor.mesh_shape
        if (a := left.array_axis(part)) and (b := right.array_axis(part)) and a != b
    }
    for a, b in same_devices:
        yield (
            f"'{a}' of operand 0 and '{b}' of operand 1 are sharded over the same devices, so for "
            'some blocks of the product no device has both inputs'
        )
    for name in left.names:
        left_parts, right_parts = left.by_name[name], right.by_name.get(name)
        if right_parts is None or left_parts == right_parts:
            continue
        if left_parts and right_parts:
            yield f"'{name}' is sharded differently in operand 0 and operand 1"
            continue
        sharded, unsharded = (0, 1) if left_parts else (1, 0)
        # the loop above reports mesh axes that shard another axis of the unsharded operand
        if not any(map(contractor.operands[unsharded].array_axis, left_parts or right_parts)):
            yield f"'{name}' is sharded in operand {sharded} but not in operand {unsharded}"
