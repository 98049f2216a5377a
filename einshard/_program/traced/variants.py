"""A lowered module with other shardings, propagated again and again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..edits.keys import Key
from .attributes import Attributes, Sharding
from .outline import Place, bytes_of, main_of, read_outline
from .propagated import CONSTRAINT, Axes
from .shardy import (
    EDGE_SHARDING,
    POSITION,
    QUICK_PASSES,
    SHARDING,
    Op,
    all_ops,
    imported,
    inline_calls,
    locked,
    merge_constants,
    run,
)
from .twin import find_twin

_CONSTRAINT = f'sdy.{CONSTRAINT}'
# modules without some constraints that are kept
_N_COPIES = 4


def resize_meshes(module: Any, size: int) -> None:
    """Gives each axis of a module's meshes another size, in place."""
    with locked(module):
        attributes = Attributes()
        for op in all_ops(module.operation):
            if op.name == 'sdy.mesh':
                sizes = dict.fromkeys(attributes.mesh(op.attributes['mesh']), size)
                op.attributes['mesh'] = attributes.mesh_of(sizes)


class _Copy(NamedTuple):
    """A copy of a module, and its operations that have attributes of sites."""

    module: Op
    main: Op
    constraints: dict[int, Op]

    @classmethod
    def of(cls, module: Op) -> _Copy:
        found = (op for op in all_ops(module) if op.name == _CONSTRAINT)
        positions = {op.attributes[POSITION].value: op for op in found}
        return cls(module, main_of(module), positions)


class Variants:
    """Propagates a module with other shardings of its arguments, results and constraints.

    Args:
        module: from `lowered.compiler_ir('stablehlo')`, as that of `Sites`. It is not changed.
        site_of: returns what edits change at a constraint, from the text of its location, and how
            many axes `jax.vmap` adds in front of the value; None if nothing.
        has_types: whether its mesh has Explicit axes. Then the types of values are constraints that
            have no site, and they follow from what is traced again: they are taken out.
        typed: the results whose sharding is that of their type, which is taken out, too.

    Attributes:
        outline: what it computes.
        sites: for each constraint, what `site_of` returns.
        given: the sharding that each argument, result and constraint has, or None. Constraints that
            leave each dimension open have None, too.
        ranks: of arguments and results that have more dimensions in the module than in the program.

    Raises:
        NotPropagated: if Shardy cannot read it.
    """

    def __init__(
        self,
        module: Op,
        site_of: Callable[[str], tuple[Key, int] | None] = lambda _: None,
        has_types: bool = False,
        typed: Collection[int] = (),
    ):
        from jax.extend.mlir import ir

        self.ranks: dict[Place, int] = {}
        self._ir: Any = ir
        self._attributes = Attributes()
        self._texts: dict[tuple[Axes, int], Any] = {}
        with imported(module) as base:
            inline_calls(base)
            merge_constants(base)
            self.outline = read_outline(base, self._attributes)
            self._base = _Copy.of(base)
            self._copies: dict[frozenset[int], _Copy] = {}
            self._folded: set[Place] = set()
            self._numbers: dict[int, int] = {}
            self._mark(self._base, {Place('result', i): None for i in typed})
            self.given = self._read_given()
            self.sites = {
                place: site_of(str(self._base.constraints[place.index].location))
                for place in self.given
                if place.kind == 'constraint'
            }
            # open constraints are taken out: with others in conflict, they would decide where a
            # sharding stops
            self._open = {
                place.index
                for place, site in self.sites.items()
                if self.given[place] is None or (has_types and site is None)
            }

    def _read_given(self) -> dict[Place, Axes | None]:
        read, found = self._attributes, dict[Place, Axes | None]()
        for kind, key, values in self.outline.ports:
            given = self._base.main.attributes.get(key)
            for i in range(len(values)):
                axes = None
                if given is not None and SHARDING in given[i]:
                    axes = read.shardings(given[i][SHARDING])[0].axes
                found[Place(kind, i)] = axes
        for position in self.outline.constraints:
            attribute = self._base.constraints[position].attributes[EDGE_SHARDING]
            axes = read.shardings(attribute)[0].axes
            is_open = not any(axes) and '?' in str(attribute)
            found[Place('constraint', position)] = None if is_open else axes
        return found

    def fold(self, groups: Iterable[Collection[Place]]) -> int:
        """Lets one of many equal layers stand for the others, if groups change them alike.

        Returns how many layers it stands for, or 1.
        """
        sites = {place.index: site for place, site in self.sites.items()}
        with locked(self._base.module):
            twin = find_twin(self._base.module, sites.get)
            if twin is None:
                return 1
            places: dict[Place, set[Place]] = {}
            for place, other in twin.folded.items():
                if place in self.given:
                    places.setdefault(other, {other}).add(place)
            for group in groups:
                of = {*group}
                for alike in places.values():
                    if of & alike and not alike <= of:
                        return 1
            self.outline = read_outline(twin.module, self._attributes)
            twin.scale(self.outline)
            self._base = _Copy.of(twin.module)
            self._copies.clear()
            self._folded = {*twin.folded}
            self._numbers = {r: i for i, r in enumerate(twin.results)}
            self._open &= {*self._base.constraints}
        return twin.count

    def move_to(self, mesh: Mapping[str, int]) -> None:
        """Puts the module on a mesh of another shape, where no axis is used yet.

        Shardings on a mesh of one shape propagate as those of a module that was lowered for it.

        Args:
            mesh: the size of each axis.
        """
        with locked(self._base.module):
            for op in all_ops(self._base.module):
                if op.name == 'sdy.mesh' and self._attributes.mesh(op.attributes['mesh']):
                    op.attributes['mesh'] = self._attributes.mesh_of(mesh)
            self._copies.clear()
            self.outline.mesh = dict(mesh)

    def shape(self, site: Place) -> tuple[int, ...]:
        return self.outline.types[self.value(site)].shape

    def bytes(self, site: Place) -> int:
        return bytes_of(self.outline.types[self.value(site)])

    def value(self, site: Place) -> int:
        """The number of the value whose sharding is at a site."""
        outline = self.outline
        if site.kind == 'constraint':
            return outline.constraints[site.index]
        return (outline.arguments if site.kind == 'argument' else outline.ends)[site.index]

    def propagate(self, changes: Mapping[Place, Axes | None]) -> list[Sharding]:
        """Returns the sharding of each value, by its number in the outline.

        Args:
            changes: other shardings of sites. None leaves a result as it is computed, and removes a
                constraint.

        Raises:
            NotPropagated: if the passes fail.
        """
        with self.changed(changes) as (copy, removed):
            run(copy, QUICK_PASSES)
            return self.outline.shardings(copy, self._attributes, removed)

    @contextmanager
    def changed(
        self, changes: Mapping[Place, Axes | None]
    ) -> Generator[tuple[Op, Collection[int]]]:
        """Yields a copy of the module with `changes`, before any pass, and the constraints that it
        lacks. It must be read inside the `with` block, which holds a lock.
        """
        changes = {s: axes for s, axes in changes.items() if s not in self._folded}
        placed = {s.index for s, axes in changes.items() if s in self.sites and axes is not None}
        removed = {s.index for s, axes in changes.items() if s in self.sites and axes is None}
        removed |= self._open - placed
        with locked(self._base.module):
            base = self._without(frozenset(removed))
            before = self._mark(base, changes)
            try:
                copy = base.module.clone()
            finally:
                for op, key, attribute in before:
                    if attribute is None:
                        del op.attributes[key]
                    else:
                        op.attributes[key] = attribute
            yield copy, removed

    def _without(self, removed: frozenset[int]) -> _Copy:
        """The module without the constraints at these positions.

        It is kept for the next neighbour, which mostly changes the same places.
        """
        found = self._copies.get(removed)
        if found is None:
            found = _Copy.of(self._base.module.clone())
            for position in removed:
                op = found.constraints.pop(position)
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()
            while len(self._copies) >= _N_COPIES:
                self._copies.pop(next(iter(self._copies)))
        else:
            del self._copies[removed]
        self._copies[removed] = found  # the last that was used
        return found

    def _mark(self, base: _Copy, changes: Mapping[Place, Axes | None]) -> list[tuple[Op, str, Any]]:
        """Sets attributes. Returns what they were before."""
        ir, before = self._ir, list[tuple[Op, str, Any]]()

        def put(op: Op, key: str, attribute: Any) -> None:
            before.append((op, key, op.attributes.get(key)))
            op.attributes[key] = attribute

        for kind, key, values in self.outline.ports:
            new = {
                self._numbers[i] if kind == 'result' and self._numbers else i: axes
                for i, axes in ((s.index, axes) for s, axes in changes.items() if s.kind == kind)
            }
            if not new:
                continue
            given = base.main.attributes.get(key) or [ir.DictAttr.get({})] * len(values)
            each: list[Any] = []
            for i, attributes in enumerate(given):
                if i in new:
                    named = {x.name: x.attr for x in attributes if x.name != SHARDING}
                    axes = new[i]
                    if axes is not None:
                        named[SHARDING] = self._sharding(axes)
                    attributes = ir.DictAttr.get(named)
                each.append(attributes)
            put(base.main, key, ir.ArrayAttr.get(each))
        for site, axes in changes.items():
            if site.kind == 'constraint' and axes is not None:
                _, n_mapped = self.sites[site] or ((), 0)
                # an expression leaves the axes open that it does not see
                n_open = 0 if any(axes[:n_mapped]) else n_mapped
                put(base.constraints[site.index], EDGE_SHARDING, self._sharding(axes, n_open))
        return before

    def _sharding(self, axes: Axes, n_open: int = 0) -> Any:
        key = axes, n_open
        if key not in self._texts:
            self._texts[key] = self._attributes.sharding(self.outline.mesh_name, *key)
        return self._texts[key]
