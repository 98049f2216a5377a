"""A lowered module with other shardings, propagated again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..hlo.sources import innermost_frame, innermost_user_frame, is_user_file
from ..jaxpr.spans import Span
from .attributes import Attributes, Sharding, frames_of
from .outline import Site, bytes_of, find_mesh, read_outline
from .program import CONSTRAINT, Axes, Frame
from .shardy import CALL_AT, EDGE_SHARDING, QUICK_PASSES, SHARDING, Op, all_ops, imported, inline_calls, locked, run

# operations behind whose results a constraint may help
_CANDIDATES = frozenset(
    f'stablehlo.{name}'
    for name in ('dot_general', 'convolution', 'gather', 'add', 'reshape', 'concatenate')
)


class Variants:
    """Propagates a module with other shardings of its arguments, results and constraints.

    Args:
        module: from `lowered.compiler_ir('stablehlo')`. It is not changed.

    Attributes:
        outline: what it computes.
        given: the sharding that each argument, result and constraint has, or None. Constraints that
            leave each dimension open have None, too.

    Raises:
        NotPropagated: if Shardy cannot read it.
    """

    def __init__(self, module: Op):
        from jax.extend.mlir import ir

        self._ir: Any = ir
        self._attributes = Attributes()
        self._texts: dict[tuple[Axes, bool], Any] = {}
        with imported(module) as base:
            inline_calls(base)
            self._base = base
            self._open_candidates()
            self.outline = read_outline(base, self._attributes)
            self._ops = all_ops(base)
            self._main = next(
                op
                for op in self._ops
                if op.name == 'func.func' and op.attributes['sym_name'].value == 'main'
            )
            self.given = self._read_given()

    def _open_candidates(self) -> None:
        mesh, _ = find_mesh(self._base, self._attributes)
        for op in all_ops(self._base) if mesh else ():
            if op.name not in _CANDIDATES or len(op.results) != 1:
                continue
            value = op.results[0]
            shape = getattr(value.type, 'shape', ())
            if len(shape) < 2 or any(u.owner.name == f'sdy.{CONSTRAINT}' for u in value.uses):
                continue
            path = self._attributes.location(op.location)[0]
            if 'transpose(' in path and 'rematted' not in path:
                continue
            attribute = self._attributes.sharding(mesh, ((),) * len(shape), True)
            new = self._ir.Operation.create(
                f'sdy.{CONSTRAINT}',
                [value.type],
                [value],
                {EDGE_SHARDING: attribute},
                loc=op.location,
                ip=self._ir.InsertionPoint(op),
            )
            new.move_after(op)
            value.replace_all_uses_except(new.results[0], [new])

    def _read_given(self) -> dict[Site, Axes | None]:
        read, found = self._attributes, dict[Site, Axes | None]()
        for kind, key, values in self._ends():
            given = self._main.attributes.get(key)
            for i in range(len(values)):
                has = given is not None and SHARDING in given[i]
                axes = read.shardings(given[i][SHARDING])[0].axes if has else None
                found[Site(kind, i)] = axes
        for position in self.outline.constraints:
            attribute = self._ops[position].attributes[EDGE_SHARDING]
            axes = read.shardings(attribute)[0].axes
            is_open = not any(axes) and '?' in str(attribute)
            found[Site('constraint', position)] = None if is_open else axes
        return found

    def shape(self, site: Site) -> tuple[int, ...]:
        return self.outline.types[self.value(site)].shape

    def bytes(self, site: Site) -> int:
        return bytes_of(self.outline.types[self.value(site)])

    def value(self, site: Site) -> int:
        """The number of the value whose sharding is at a site."""
        outline = self.outline
        if site.kind == 'constraint':
            return outline.constraints[site.index]
        return (outline.arguments if site.kind == 'argument' else outline.ends)[site.index]

    def path(self, site: Site) -> tuple[Span, ...]:
        """The expression of a constraint and its calls: the user's frames, innermost first.

        Empty if it is in a library other than JAX.
        """
        with locked(self._base):
            frames = self._frames(self._ops[site.index])
        if not frames or innermost_frame(frames) != innermost_user_frame(frames):
            return ()
        return tuple(
            Span(f.file, f.line, f.column - 1, f.end_line, f.end_column - 1)
            for f in frames
            if is_user_file(f.file)
        )

    def _frames(self, op: Op) -> tuple[Frame, ...]:
        """The frames of an operation and of the calls that it is in, innermost first."""
        frames = self._attributes.location(op.location)[1]
        while op is not None:
            if CALL_AT in op.attributes:
                frames += frames_of(op.attributes[CALL_AT].value)
            op = op.parent
        return frames

    def _ends(self) -> list[tuple[str, str, list[int]]]:
        outline = self.outline
        return [
            ('argument', 'arg_attrs', outline.arguments),
            ('result', 'res_attrs', outline.ends),
        ]

    def propagate(self, changes: Mapping[Site, Axes | None]) -> list[Sharding]:
        """Returns the sharding of each value, by its number in the outline.

        Args:
            changes: other shardings of sites. None leaves a result as it is computed, and opens
                each dimension of a constraint, which has the effect of removing it.

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
            run(copy, QUICK_PASSES)
            return self.outline.shardings(copy, self._attributes)

    def _mark(self, changes: Mapping[Site, Axes | None]) -> list[tuple[Op, str, Any]]:
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
            if site.kind == 'constraint':
                ndim = len(self.outline.types[self.outline.constraints[site.index]].shape)
                attribute = self._sharding(((),) * ndim if axes is None else axes, axes is None)
                put(self._ops[site.index], EDGE_SHARDING, attribute)
        return before

    def _sharding(self, axes: Axes, is_open: bool = False) -> Any:
        key = axes, is_open
        if key not in self._texts:
            name = self.outline.mesh_name
            self._texts[key] = self._attributes.sharding(name, axes, is_open)
        return self._texts[key]
