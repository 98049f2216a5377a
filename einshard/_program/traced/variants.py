"""A lowered module with other shardings, propagated again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..edits.keys import Path
from .attributes import Attributes, Sharding
from .outline import Place, bytes_of, read_outline
from .program import CONSTRAINT, Axes
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
    run,
)

_CONSTRAINT = f'sdy.{CONSTRAINT}'


class Variants:
    """Propagates a module with other shardings of its arguments, results and constraints.

    Args:
        module: from `lowered.compiler_ir('stablehlo')`, as that of `Sites`. It is not changed.
        path_of: returns the call path of a constraint from the text of its location; () if it
            cannot be changed.

    Attributes:
        outline: what it computes.
        given: the sharding that each argument, result and constraint has, or None. Constraints that
            leave each dimension open have None, too.

    Raises:
        NotPropagated: if Shardy cannot read it.
    """

    def __init__(self, module: Op, path_of: Callable[[str], Path] = lambda _: ()):
        from jax.extend.mlir import ir

        self._ir: Any = ir
        self._attributes = Attributes()
        self._texts: dict[Axes, Any] = {}
        with imported(module) as base:
            inline_calls(base)
            self._base = base
            self.outline = read_outline(base, self._attributes)
            self._ops = all_ops(base)
            self._main = next(
                op
                for op in self._ops
                if op.name == 'func.func' and op.attributes['sym_name'].value == 'main'
            )
            self.given = self._read_given()
            self.paths = {
                site: path_of(str(self._ops[site.index].location))
                for site in self.given
                if site.kind == 'constraint'
            }
            # open constraints are taken out: with others in conflict, they would decide where a
            # sharding stops
            self._open = {
                s.index for s, axes in self.given.items() if s in self.paths and axes is None
            }

    def _read_given(self) -> dict[Place, Axes | None]:
        read, found = self._attributes, dict[Place, Axes | None]()
        for kind, key, values in self._ends():
            given = self._main.attributes.get(key)
            for i in range(len(values)):
                axes = None
                if given is not None and SHARDING in given[i]:
                    axes = read.shardings(given[i][SHARDING])[0].axes
                found[Place(kind, i)] = axes
        for position in self.outline.constraints:
            attribute = self._ops[position].attributes[EDGE_SHARDING]
            axes = read.shardings(attribute)[0].axes
            is_open = not any(axes) and '?' in str(attribute)
            found[Place('constraint', position)] = None if is_open else axes
        return found

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

    def _ends(self) -> list[tuple[str, str, list[int]]]:
        outline = self.outline
        return [
            ('argument', 'arg_attrs', outline.arguments),
            ('result', 'res_attrs', outline.ends),
        ]

    def propagate(self, changes: Mapping[Place, Axes | None]) -> list[Sharding]:
        """Returns the sharding of each value, by its number in the outline.

        Args:
            changes: other shardings of sites. None leaves a result as it is computed, and removes a
                constraint.

        Raises:
            NotPropagated: if the passes fail.
        """
        with locked(self._base):
            before = self._mark(changes)
            try:
                copy = self._base.clone()
            finally:
                for op, key, attribute in before:
                    if attribute is None:
                        del op.attributes[key]
                    else:
                        op.attributes[key] = attribute
            removed = {s.index for s, axes in changes.items() if s in self.paths and axes is None}
            removed |= self._open - {s.index for s, axes in changes.items() if axes is not None}
            for op in all_ops(copy) if removed else ():
                if op.name == _CONSTRAINT and op.attributes[POSITION].value in removed:
                    op.results[0].replace_all_uses_with(op.operands[0])
                    op.erase()
            run(copy, QUICK_PASSES)
            return self.outline.shardings(copy, self._attributes, removed)

    def _mark(self, changes: Mapping[Place, Axes | None]) -> list[tuple[Op, str, Any]]:
        """Sets attributes. Returns what they were before."""
        ir, before = self._ir, list[tuple[Op, str, Any]]()

        def put(op: Op, key: str, attribute: Any) -> None:
            before.append((op, key, op.attributes.get(key)))
            op.attributes[key] = attribute

        for kind, key, values in self._ends():
            new = {site.index: axes for site, axes in changes.items() if site.kind == kind}
            if not new:
                continue
            given = self._main.attributes.get(key) or [ir.DictAttr.get({})] * len(values)
            each: list[Any] = []
            for i, attributes in enumerate(given):
                if i in new:
                    named = {x.name: x.attr for x in attributes if x.name != SHARDING}
                    axes = new[i]
                    if axes is not None:
                        named[SHARDING] = self._sharding(axes)
                    attributes = ir.DictAttr.get(named)
                each.append(attributes)
            put(self._main, key, ir.ArrayAttr.get(each))
        for site, axes in changes.items():
            if site.kind == 'constraint' and axes is not None:
                put(self._ops[site.index], EDGE_SHARDING, self._sharding(axes))
        return before

    def _sharding(self, axes: Axes) -> Any:
        if axes not in self._texts:
            self._texts[axes] = self._attributes.sharding(self.outline.mesh_name, axes)
        return self._texts[axes]
