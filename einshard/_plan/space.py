"""The space of candidates: mesh shapes, and the sets of axis names that a mesh axis may shard."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .._errors import EinshardError, plural, quoted
from .._notation.layout import mesh_text
from .._sharding.axis_rules import axis_rules
from .candidate import Candidate
from .model import Model
from .product_cost import MeshAxis, mesh_axes

Sizes: TypeAlias = tuple[int, ...]
# the axis names that one mesh axis shards: at most one of them in each array
Role: TypeAlias = frozenset[str]
Plan: TypeAlias = tuple[Sizes, tuple[Role, ...]]  # a mesh shape, and the role of every mesh axis

AXES = ('x', 'y', 'z')
# once a mesh axis has this many roles, the remaining names are not considered for it
MAX_ROLES = 2000


@dataclass(frozen=True)
class Space:
    """All candidates of a model on a number of devices.

    Attributes:
        n_devices: the number of devices.
        n_slices: the number of TPU slices. If there are several, they are the first mesh axis, and
            only the names in `across_slices` may be sharded over it.
        mesh: the user's mesh axes with their sizes; None to try all factorizations.
        pinned: names with their mesh axes, which do not change.
    """

    model: Model
    n_devices: int
    n_slices: int = 1
    mesh: tuple[tuple[str, int], ...] | None = None
    pinned: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    pruned: Counter[str] = field(default_factory=Counter[str])
    _roles: dict[Any, list[Role]] = field(default_factory=dict[Any, list[Role]])

    def __post_init__(self) -> None:
        self._check_pins()

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        return AXES if self.mesh is None else tuple(name for name, _ in self.mesh)

    def shapes(self, n_axes: int) -> list[Sizes]:
        """The mesh shapes with this number of axes, in hardware order."""
        if self.mesh is not None:
            sizes = tuple(size for _, size in self.mesh)
            return [sizes] if len(sizes) == n_axes else []
        first = (self.n_slices,) if self.n_slices > 1 else ()
        rest = _factorizations(self.n_devices // self.n_slices, n_axes - len(first))
        return [(*first, *sizes) for sizes in rest if self._fits_pins((*first, *sizes))]

    def roles(self, sizes: Sizes, axis: int) -> list[Role]:
        """The sets of names that a mesh axis may shard."""
        is_slow = self.n_slices > 1 and self.mesh is None and axis == 0
        must = frozenset(n for n, axes in self.pinned.items() if self.mesh_axes[axis] in axes)
        key = sizes[axis], is_slow, must
        if key not in self._roles:
            self._roles[key] = self._find_roles(sizes[axis], is_slow, must)
        return self._roles[key]

    def is_valid(self, plan: Plan) -> bool:
        """Whether the mesh axes of every name divide its size."""
        sizes, roles = plan
        shards: dict[str, int] = {}
        for size, role in zip(sizes, roles, strict=True):
            for name in role:
                shards[name] = shards.get(name, 1) * size
        return all(self.model.divisors[name] % n == 0 for name, n in shards.items())

    def axes(self, plan: Plan) -> dict[str, tuple[MeshAxis, ...]]:
        """The mesh axes that shard each name; for the name of a user's mesh axis, that axis."""
        found: dict[str, tuple[MeshAxis, ...]] = dict.fromkeys(self.model.names, ())
        of_mesh = mesh_axes(plan[0])
        for axis, role in zip(of_mesh, plan[1], strict=True):
            for name in role:
                found[name] += (axis,)
        fixed = zip(self.mesh or (), of_mesh, strict=False)
        return {name: (axis,) for (name, _), axis in fixed} | found

    def candidate(self, plan: Plan) -> Candidate:
        sizes, roles = plan
        mesh_axes = list(zip(self.mesh_axes, roles, strict=False))
        return Candidate(
            tuple(zip(self.mesh_axes, sizes, strict=False)),
            tuple(
                (name, tuple(axis for axis, role in mesh_axes if name in role))
                for name in self.model.names
            ),
        )

    def across_slices(self) -> frozenset[str]:
        """The names that may be sharded across slices: the first name of each batch array."""
        return frozenset(
            next((name for one in array.names for name in one), '')
            for array in self.model.arrays
            if array.role == 'batch'
        )

    def _find_roles(self, size: int, is_slow: bool, must: Role) -> list[Role]:
        names = [name for name in self.model.names if name not in self.pinned]
        divided = [name for name in names if self.model.divisors[name] % size == 0]
        self.pruned['indivisible'] += len(names) - len(divided)
        if is_slow:
            across = self.across_slices()
            within = sum(name not in across for name in divided)
            self.pruned['another axis than the batch across slices'] += within
            divided = [name for name in divided if name in across]
        conflicts = self._conflicts()
        roles: list[Role] = [must]
        for name in divided:
            if len(roles) < MAX_ROLES:
                more = [role | {name} for role in roles if role.isdisjoint(conflicts[name])]
                self.pruned['two axes of an array over one mesh axis'] += len(roles) - len(more)
                roles += more
        # a mesh axis may shard nothing only if there is nothing that it can shard
        return [role for role in roles if role] or [frozenset()]

    def _conflicts(self) -> dict[str, set[str]]:
        """For each name, the names that share an array with it."""
        found: dict[str, set[str]] = {name: set() for name in self.model.names}
        for together in self.model.together:
            for name, other in itertools.permutations(together, 2):
                if name in found:
                    found[name].add(other)
        return found

    def _fits_pins(self, sizes: Sizes) -> bool:
        known: dict[str, int] = dict(zip(AXES, sizes, strict=False))
        return all(
            all(axis in known for axis in axes)
            and self.model.divisors[name] % math.prod(known[axis] for axis in axes) == 0
            for name, axes in self.pinned.items()
        )

    def _check_pins(self) -> None:
        unknown = [name for name in self.pinned if name not in self.model.names]
        if unknown:
            raise EinshardError(
                f'pin= has {quoted(unknown)}, which {self.model.name or "the function"} '
                'does not use',
                facts={'axis names': ', '.join(self.model.names)},
            )
        for name, axes in self.pinned.items():
            other = [axis for axis in axes if axis not in self.mesh_axes]
            if other:
                raise EinshardError(
                    f"pin= shards '{name}' over {quoted(other)}, "
                    f'but the mesh axes are {quoted(self.mesh_axes)}'
                )
        for together in self.model.together:
            for name, other in itertools.combinations(together, 2):
                twice = set(self.pinned.get(name, ())) & set(self.pinned.get(other, ()))
                if twice:
                    raise EinshardError(
                        f"pin= shards '{name}' and '{other}' of one array over '{min(twice)}'",
                        facts={'axes of the array': ' '.join(together)},
                    )
        if self.mesh is not None:
            self._check_mesh(dict(self.mesh))
        elif self.pinned and not any(self.shapes(n) for n in range(1, 1 + len(AXES))):
            known = self.model.divisors
            sizes = [f"'{n}' (size {known[n]})" for n, axes in self.pinned.items() if axes]
            raise EinshardError(
                f'pin= fits no mesh of {plural(self.n_devices, "device")}: {" or ".join(sizes)} '
                'is not divisible by its mesh axes',
            )

    def _check_mesh(self, mesh: Mapping[str, int]) -> None:
        for name, axes in self.pinned.items():
            size, parts = self.model.divisors[name], math.prod(mesh[axis] for axis in axes)
            if size % parts:
                raise EinshardError(
                    f"pin= does not fit the mesh: axis '{name}' (size {size}) is not divisible "
                    f'by {parts} ({quoted(axes)})',
                    facts={'mesh': mesh_text(mesh)},
                )


def read_pins(pin: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Reads pins such as {'embed': '@x', 'mlp': '@(x,y)', 'layers': ''}."""
    found: dict[str, tuple[str, ...]] = {}
    for rule in axis_rules(pin).rules:
        text = rule.placement.strip()
        axes = tuple(text.strip('@()').split(',')) if text.startswith('@') else ()
        if text and not axes:
            raise EinshardError(
                f"pin= has {rule.name}='{text}', but a pin names mesh axes; `plan` chooses sizes",
                facts={'expected': "mesh axes: '@x' or '@(x,y)'; or '' for not sharded"},
            )
        found[rule.name] = tuple(axis.strip() for axis in axes)
    return found


def _factorizations(n: int, n_factors: int) -> Iterator[Sizes]:
    """Yields all ways to write n as an ordered product of factors above 1."""
    if n_factors == 0:
        if n == 1:
            yield ()
        return
    if n_factors == 1:
        if n > 1:
            yield (n,)
        return
    for first in range(2, n // 2 + 1):
        if n % first == 0:
            for rest in _factorizations(n // first, n_factors - 1):
                yield first, *rest
