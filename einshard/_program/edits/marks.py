"""Sets the shardings of arguments, results and tagged constraints in a lowered module."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._sharding.mesh import spec_axes
from .keys import Key

# in the name stack of a constraint, and so in its location: the number of the tag, and how many
# axes `jax.vmap` adds to the value
TAG = 'einshard_site_{}_{}_'
_TAG = re.compile(r'einshard_site_(\d+)_(\d+)_')
_SHARDING = 'sdy.sharding'
_OPEN = PartitionSpec.UNCONSTRAINED


_CONSTRAINT = 'sdy.sharding_constraint'


class NotMarked(ValueError):
    """A module has no place for an edit."""


@dataclass(eq=False)
class _Place:
    """A constraint of the module, or where one can stand.

    Attributes:
        default, current: the sharding that it has without marks, and now. None: there is none.
        n_mapped: how many axes `jax.vmap` adds to the value.
        before: the value, or the place of a constraint on it.
        uses: what uses the constrained value: operations or places, and the number of the operand.
        next: the operation or the place after it.
    """

    op: Any
    default: Any
    current: Any
    n_mapped: int
    type: Any
    location: Any
    before: Any = None
    uses: list[tuple[Any, int]] = field(default_factory=list[tuple[Any, int]])
    next: Any = None

    @property
    def value(self) -> Any:
        at: Any = self
        while isinstance(at, _Place):
            at = at.op.results[0] if at.op is not None else at.before
        return at

    def set(self, sharding: Any, ir: Any) -> None:
        if sharding is None and self.op is not None:
            self.op.results[0].replace_all_uses_with(self.op.operands[0])
            self.op.erase()
            self.op = None
        elif sharding is not None and self.op is not None:
            self.op.attributes['sharding'] = sharding
        elif sharding is not None:
            behind, value = self.next, self.value
            while isinstance(behind, _Place):
                behind = behind.op if behind.op is not None else behind.next
            self.op = ir.Operation.create(
                _CONSTRAINT,
                [self.type],
                [value],
                {'sharding': sharding},
                loc=self.location,
                ip=ir.InsertionPoint(behind),
            )
            waiting = [*self.uses]
            for user, i in waiting:
                if not isinstance(user, _Place):
                    user.operands[i] = self.op.results[0]
                elif user.op is not None:
                    user.op.operands[i] = self.op.results[0]
                else:
                    waiting += user.uses
        self.current = sharding


class Marks:
    """The places in one module where an edit can be marked.

    Open constraints are taken out until they are marked: with other constraints in conflict, they
    would still decide where a sharding stops.

    Args:
        module: from `compiler_ir('stablehlo')`. It is changed.
        tags: the number of each tagged place.
        is_open: whether a place is not one of the user's constraints.
    """

    def __init__(self, module: Any, tags: Mapping[Key, int], is_open: Callable[[int], bool]):
        from jax.extend.mlir import ir

        self._ir: Any = ir
        self._module, self._tags = module, tags
        self._places: dict[int, list[_Place]] = defaultdict(list)
        self._touched: list[_Place] = []
        self._edges: dict[str, Any] = {}
        self._meshes: dict[str, str] = {}
        self._main: Any = None
        places: dict[Any, _Place] = {}
        following: dict[_Place, Any] = {}
        waiting = [module.operation]
        for op in waiting:
            if op.name == 'sdy.mesh':
                self._meshes[str(op.attributes['mesh'])] = op.attributes['sym_name'].value
            elif op.name == 'func.func' and op.attributes['sym_name'].value == 'main':
                self._main = op
            for region in op.regions:
                for block in region.blocks:
                    ops = [view.operation for view in block.operations]
                    waiting += ops
                    for one, behind in pairwise(ops):
                        for number, n_mapped in _tags_of(one):
                            now = one.attributes['sharding']
                            made = one, None if is_open(number) else now, now, n_mapped
                            place = _Place(*made, one.results[0].type, one.location)
                            places[one] = place
                            following[place] = behind
                            self._places[number].append(place)
        for op, place in places.items():
            place.next = places.get(following[place], following[place])
            value = op.operands[0]
            # the owner of the argument of a block is the block
            place.before = places.get(value.owner, value)
            for use in op.results[0].uses:
                user = use.owner.operation
                place.uses.append((places.get(user, user), use.operand_number))
        self._touched = [*places.values()]
        self.undo()

    def argument(self, i: int, sharding: NamedSharding) -> None:
        self._set_edge('arg_attrs', i, self._main.regions[0].blocks[0].arguments[i].type, sharding)

    def result(self, i: int, sharding: NamedSharding) -> None:
        types = self._ir.FunctionType(self._main.attributes['function_type'].value).results
        self._set_edge('res_attrs', i, types[i], sharding)

    def site(self, key: Key, sharding: NamedSharding | None) -> None:
        """Constrains the values, and the cotangents, of a site. None removes a constraint."""
        found = self._places.get(self._tags[key], []) if key in self._tags else []
        if not found:
            raise NotMarked(f'the module has no operation for {key}')
        for place in found:
            attribute = None
            if sharding is not None:
                ndim, entries = len(place.type.shape), spec_axes(sharding.spec)
                spec = [(_OPEN,)] * min(place.n_mapped, ndim - len(entries)) + entries
                attribute = self._attribute(self._mesh(sharding.mesh), ndim, spec)
            self._touched.append(place)
            place.set(attribute, self._ir)

    def undo(self) -> None:
        """Takes back what was marked."""
        for place in self._touched:
            if place.current is not place.default:
                place.set(place.default, self._ir)
        for name, attribute in self._edges.items():
            if attribute is None:
                del self._main.attributes[name]
            else:
                self._main.attributes[name] = attribute
        self._touched, self._edges = [], {}

    def _set_edge(self, name: str, i: int, type_: Any, sharding: NamedSharding) -> None:
        ir, main = self._ir, self._main
        with self._module.context, ir.Location.unknown():
            n = len(ir.FunctionType(main.attributes['function_type'].value).results)
            n = n if name == 'res_attrs' else len(main.regions[0].blocks[0].arguments)
            given = (
                [*main.attributes[name]] if name in main.attributes else [ir.DictAttr.get({})] * n
            )
            mesh, entries = self._mesh(sharding.mesh), spec_axes(sharding.spec)
            attribute = self._attribute(mesh, len(type_.shape), entries)
            kept = {one.name: one.attr for one in given[i]}
            given[i] = ir.DictAttr.get({**kept, _SHARDING: attribute})
            self._edges.setdefault(name, main.attributes.get(name))
            main.attributes[name] = ir.ArrayAttr.get(given)

    def _mesh(self, mesh: Any) -> str:
        """Returns the name of a mesh in the module."""
        axes = ', '.join(f'{json.dumps(str(name))}={size}' for name, size in mesh.shape.items())
        devices = [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else []
        order = f', device_ids={devices}' if devices != sorted(devices) else ''
        text = f'#sdy.mesh<[{axes}]{order}>'
        if text not in self._meshes:
            raise NotMarked(f'the module has no mesh {text}')
        return f'@{self._meshes[text]}'

    def _attribute(self, mesh: str, ndim: int, entries: Sequence[Sequence[Any]]) -> Any:
        def dim(entry: Sequence[Any]) -> str:
            names = ['?' if name is _OPEN else json.dumps(str(name)) for name in entry]
            return f'{{{", ".join(names)}}}'

        rest = [[]] * (ndim - len(entries))
        dims = ', '.join(map(dim, [*entries, *rest]))
        with self._module.context:
            return self._ir.Attribute.parse(f'#sdy.sharding<{mesh}, [{dims}]>')


def _tags_of(op: Any) -> list[tuple[int, int]]:
    """Returns the number of the tag of an operation, and how many axes `jax.vmap` adds."""
    if op.name != _CONSTRAINT:
        return []
    return tags_in(str(op.location))


def tags_in(location: str) -> list[tuple[int, int]]:
    """As `_tags_of`, from the text of a location."""
    return [(int(n), int(mapped)) for n, mapped in _TAG.findall(location)[-1:]]
