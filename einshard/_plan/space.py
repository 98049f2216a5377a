"""Space: the search space of `plan`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .._errors import EinshardError, plural, quoted
from .._notation.expression import Term, parse
from .._notation.layout import mesh_size_text, mesh_text
from .._sharding.axis_rules import AxisPlacement, axis_rules
from .candidate import Candidate
from .model import Model

# a mesh shape: the sizes of the mesh axes
Sizes: TypeAlias = tuple[int, ...]
# the axis names that are sharded over one mesh axis; no argument or constraint has two of them
NameSet: TypeAlias = frozenset[str]
# a point of the search space: a mesh shape, and the name set of each mesh axis
Point: TypeAlias = tuple[Sizes, tuple[NameSet, ...]]

AXES = ('x', 'y', 'z')


@dataclass(frozen=True)
class Space:
    """The search space of `plan`.

    Attributes:
        n_slices: the number of TPU slices. If there are several and `mesh` is None, the first mesh
            axis goes across the slices, and shards only the batch and names pinned to it.
        mesh: the user's mesh axes and their sizes, or None to try all factorizations.
        pinned: the mesh axes of the names in `pin=`.
    """

    model: Model
    n_devices: int
    n_slices: int = 1
    mesh: tuple[tuple[str, int], ...] | None = None
    pinned: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def __post_init__(self) -> None:
        self._check_pins()

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        return AXES if self.mesh is None else tuple(name for name, _ in self.mesh)

    def shapes(self, max_axes: int = len(AXES)) -> list[Sizes]:
        """Returns the shape of the user's mesh, or all shapes that fit the pins and `max_axes`."""
        if self.mesh is not None:
            return [tuple(size for _, size in self.mesh)]
        first = (self.n_slices,) if self.n_slices > 1 else ()
        n_per_slice = self.n_devices // self.n_slices
        found = (
            (*first, *sizes)
            for n_axes in range(max_axes - len(first) + 1)
            for sizes in _factorizations(n_per_slice, n_axes)
        )
        return [sizes for sizes in found if self._fits_pins(sizes)]

    def is_valid(self, point: Point) -> bool:
        """Whether the size of every sharded axis is divisible by its number of shards."""
        sizes, name_sets = point
        shards: dict[str, int] = {}
        for size, names in zip(sizes, name_sets, strict=True):
            for name in names:
                shards[name] = shards.get(name, 1) * size
        return all(self.model.divisors[name] % n == 0 for name, n in shards.items())

    def merged(self, point: Point) -> Point:
        """Merges the mesh axes that shard the same names, except the one across TPU slices."""
        if self.mesh is not None or any(self.pinned.values()):
            return point  # the user has named mesh axes
        sizes: dict[tuple[NameSet, bool], int] = {}
        for i, (size, names) in enumerate(zip(*point, strict=True)):
            key = names, i == 0 and self.n_slices > 1
            sizes[key] = sizes.get(key, 1) * size
        return tuple(sizes.values()), tuple(names for names, _ in sizes)

    def candidate(self, point: Point) -> Candidate:
        sizes, name_sets = point
        pairs = [*zip(self.mesh_axes, name_sets, strict=False)]
        axes = {
            name: tuple(axis for axis, names in pairs if name in names) for name in self.model.sizes
        }
        return Candidate(
            tuple(zip(self.mesh_axes, sizes, strict=False)),
            tuple((axes | dict(self.pinned)).items()),  # a pin '@(y,x)' keeps this order
        )

    def batch_names(self) -> frozenset[str]:
        """Returns the first axis name of each data array, such as 'batch'."""
        return frozenset(
            next((name for one in array.names for name in one), '')
            for array in self.model.arrays
            if not array.is_state
        )

    @functools.cached_property
    def conflicts(self) -> dict[str, set[str]]:
        """Maps each axis name to the others that occur in the same argument or constraint."""
        found: dict[str, set[str]] = {name: set() for name in self.model.sizes}
        for names in self.model.array_names:
            for name, other in itertools.permutations(names, 2):
                if name in found:
                    found[name].add(other)
        return found

    def _fits_pins(self, sizes: Sizes) -> bool:
        mesh: dict[str, int] = dict(zip(AXES, sizes, strict=False))
        return all(
            all(axis in mesh for axis in axes)
            and self.model.divisors[name] % math.prod(mesh[axis] for axis in axes) == 0
            for name, axes in self.pinned.items()
        )

    def _check_pins(self) -> None:
        unknown = [name for name in self.pinned if name not in self.model.sizes]
        if unknown:
            raise EinshardError(
                f'pin= has {quoted(unknown)}, but {self.model.name or "the function"} '
                'has no such axis name',
                code='plan',
                facts={'axis names': ', '.join(self.model.sizes)},
            )
        for names in self.model.array_names:
            for name, other in itertools.combinations(names, 2):
                twice = set(self.pinned.get(name, ())) & set(self.pinned.get(other, ()))
                if twice:
                    raise EinshardError(
                        f"pin= shards two axes of one array, '{name}' and '{other}', over mesh "
                        f"axis '{min(twice)}'",
                        code='plan',
                        facts={'axes of the array': ' '.join(names)},
                    )
        if self.mesh is not None:
            check_divisible('pin=', self.pinned, self.model, dict(self.mesh))
        elif not self.shapes():
            pinned = [
                f'{self.model.axis_text(name)} over {quoted(axes)}'
                for name, axes in self.pinned.items()
                if axes
            ]
            raise EinshardError(
                f'pin= does not fit any mesh of {plural(self.n_devices, "device")}',
                code='plan',
                facts={
                    'pinned': '; '.join(pinned),
                    'expected': 'mesh axes of size 2 or more, whose product divides both the size '
                    f'of the array axis and {self.n_devices}',
                },
            )


def _factorizations(n: int, n_factors: int) -> Iterator[Sizes]:
    """Yields the ways to write n as an ordered product of `n_factors` factors greater than 1."""
    if not n_factors:
        if n == 1:
            yield ()
        return
    for first in range(2, n + 1):
        if n % first == 0:
            for rest in _factorizations(n // first, n_factors - 1):
                yield first, *rest


# the mesh axes that shard each axis name: {'embed': ('x',), 'mlp': ('x', 'y'), 'layers': ()}
MeshAxesByName: TypeAlias = Mapping[str, tuple[str, ...]]


def read_pins(pin: Mapping[str, AxisPlacement], mesh_axes: Collection[str]) -> MeshAxesByName:
    """Reads `pin=`, such as {'embed': '@x', 'mlp': '@(x,y)', 'layers': ''}."""
    return _read_placements('pin=', pin, mesh_axes)


def read_candidate(number: int, given: Any, model: Model, n_devices: int) -> Candidate:
    """Reads element `number` of `candidates=`: a pair of mesh sizes and placements of axis names.

    Ignores names that are not in the model, so that several models can use the same placements.
    """
    label = f'candidates[{number}]'
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if not (is_pair and all(isinstance(part, Mapping) for part in given)):
        raise EinshardError(
            f'{label} must be a pair of mesh sizes and placements, not {given!r}',
            code='plan',
            facts={'example': "({'data': 16, 'tensor': 16}, {'batch': '@data'})"},
        )
    mesh = {str(axis): size for axis, size in given[0].items()}
    if math.prod(mesh.values()) != n_devices:
        raise EinshardError(
            f'the mesh of {label} has {math.prod(mesh.values())} devices, but the plan is for '
            f'{n_devices}',
            code='plan',
            facts={'mesh sizes': mesh_text(mesh)},
        )
    placed = _read_placements(label, given[1], mesh)
    axes = {name: placed.get(name, ()) for name in model.sizes}
    check_divisible(label, axes, model, mesh)
    return Candidate(tuple(mesh.items()), tuple(axes.items()))


def check_divisible(
    label: str, placed: MeshAxesByName, model: Model, mesh: Mapping[str, int]
) -> None:
    """Raises if the size of an axis is not divisible by its number of shards."""
    for name, axes in placed.items():
        n_shards = math.prod(mesh[axis] for axis in axes)
        if model.divisors[name] % n_shards:
            raise EinshardError(
                f'{label} does not fit the mesh: axis {model.axis_text(name)} is not divisible by '
                f'{n_shards}, {mesh_size_text(axes)}',
                code='not-divisible',
                facts={'mesh': mesh_text(mesh)},
            )


def _read_placements(
    label: str, given: Mapping[str, AxisPlacement], mesh_axes: Collection[str]
) -> MeshAxesByName:
    found: dict[str, tuple[str, ...]] = {}
    for rule in axis_rules(given).rules:
        (term,) = parse(f'{rule.name}{rule.placement}').right
        if term != Term(term.name, mesh_axes=term.mesh_axes):
            raise EinshardError(
                f"{label} must name the mesh axes of '{rule.name}', not {rule.placement!r}",
                code='plan',
                facts={'expected': "'@x' or '@(x,y)'; '' for an axis that is not sharded"},
            )
        unknown = [axis for axis in term.mesh_axes if axis not in mesh_axes]
        if unknown:
            raise EinshardError(
                f"{label} shards '{rule.name}' over {quoted(unknown)}, "
                f'but the mesh has only {quoted(list(mesh_axes))}',
                code='mesh',
            )
        found[rule.name] = term.mesh_axes
    return found
