"""Finds the mesh axes that the expressions of a per-device function define and use. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .._errors import EinshardError, quoted
from .._notation.expression import ELLIPSIS, Expression, Term, parse
from .._notation.layout import axis_positions, lay_out

MeshAxis = tuple[str | None, int]  # the name of a mesh axis, None for replicas; and the size


def read_spec(owner: str, text: str) -> SpecAxes:
    """Parses the spec of a parameter or of the result; raises if it has partial sums."""
    spec = SpecAxes(owner, parse(text))
    signed = [term for term in spec.expression.right if term.sign]
    if signed:
        raise spec.error('per_device does not support partial sums', signed)
    return spec


@dataclass(frozen=True, slots=True)
class SpecAxes:
    """An expression, and the mesh axes that it defines and uses.

    `owner` says what it is the spec of: "parameter 'x'" or 'the result'.
    """

    owner: str
    expression: Expression

    @property
    def defines(self) -> dict[str, Term]:
        """The terms that define a mesh axis, by its name: those with a count (even 1) or a star."""
        return {str(term.name): term for term in self.expression.right if _defines_an_axis(term)}

    @property
    def uses(self) -> dict[str, Term]:
        """The terms that use mesh axes, such as 'y@x', by mesh axis."""
        return {axis: term for term in self.expression.right for axis in term.mesh_axes}

    @property
    def lists_replicas(self) -> bool:
        """Whether the expression lists replicas, as in '4 x2', so that it uses all devices."""
        return any(term.name is None for term in self.expression.right)

    def grid(self, counts: Mapping[str, int], n_devices: int) -> tuple[MeshAxis, ...]:
        """Returns the device grid of the expression, with stars replaced by `counts`.

        Stars of axes that `counts` lacks are solved. The grid lists counts larger than 1. If the
        expression lists no replicas, the grid has only the axes that the expression defines.
        """
        if not self.lists_replicas:
            return tuple((name, counts[name]) for name in self.defines if counts[name] > 1)
        terms: list[Term] = []
        for term in self.expression.right:
            count = counts.get(str(term.name)) if term.star else None
            terms.append(term if count is None else replace(term, count=count, star=False))
        expression = replace(self.expression, right=tuple(terms))
        try:
            return grid_of(expression, n_devices, counts if self.uses else None)
        except EinshardError as error:
            # the fix is dropped: it was tried without the other expressions
            raise error.about(spec_of=self.owner).with_fix(None) from None

    def take(self, axis: MeshAxis, grid: tuple[MeshAxis, ...]) -> tuple[MeshAxis, ...] | None:
        """Takes the next mesh axis from the front of the grid; returns the rest of the grid.

        Returns None if this axis cannot come next. The grid has the axes that the expression
        defines, in their order. Axes that it uses, as in 'y@x', leave the grid as it is. Other axes
        do so too, unless the expression lists replicas: then they divide the number of replicas at
        the front.
        """
        name, count = axis
        if name in self.uses:
            return grid
        if name is not None and grid[:1] == (axis,):
            return grid[1:]
        if name in self.defines:
            return None
        if not self.lists_replicas:
            return grid
        n_replicas = leading_replicas(grid)
        if n_replicas % count:
            return None
        return grid[1:] if n_replicas == count else ((None, n_replicas // count), *grid[1:])

    def check(self, others: Sequence[SpecAxes]) -> None:
        """Raises if the expression defines or uses a mesh axis in an invalid way.

        It must not define an axis twice, use one that none of `others` defines, or use one that it
        defines itself.
        """
        terms = [term for term in self.expression.right if _defines_an_axis(term)]
        names = [term.name for term in terms]
        repeated = [term for term in terms if names.count(term.name) > 1]
        if repeated:
            name = repeated[0].name
            raise self.error(
                f"axis '{name}' is sharded twice, but only one mesh axis can be called '{name}'",
                repeated,
                instead=f"pass a mesh with named axes, and use them: '{name}@(p,q)'",
            )
        defined = {name for other in others for name in other.defines}
        for axis, term in self.uses.items():
            if axis not in defined:
                raise self.error(
                    f"'{term}' names '{axis}', but there is no mesh with this axis, "
                    f"and no expression shards an array axis '{axis}'",
                    [term],
                    axes_sharded_by_count=quoted(sorted(defined)) if defined else 'none',
                    instead=f"use a mesh with an axis '{axis}': mesh=mesh or jax.set_mesh(mesh)",
                )
            if axis in self.defines:
                raise self.error(
                    f"'{self.defines[axis]}' and '{term}' use the same devices",
                    [self.defines[axis], term],
                )

    def check_order(self, mesh_axes: Sequence[str | None]) -> None:
        """Raises if the expression lists the mesh axes of an array axis out of device order."""
        by_axis: dict[str, list[str]] = {}
        for term in self.expression.right:
            name = str(term.name)
            defined = [name] if name in self.defines and not term.mesh_axes else []
            by_axis.setdefault(name, []).extend([*defined, *term.mesh_axes])
        for name, axes in by_axis.items():
            listed = [axis for axis in axes if axis in mesh_axes]
            in_order = sorted(listed, key=mesh_axes.index)
            if listed != in_order:
                raise self.error(
                    f"axis '{name}' lists {quoted(listed)} out of device order",
                    [term for term in self.expression.right if term.name == name],
                    device_order=', '.join(in_order),
                )

    def error(self, sentence: str, terms: Sequence[Term], **facts: str) -> EinshardError:
        return self.expression.error(sentence, terms, spec_of=self.owner, **facts)


def leading_replicas(grid: Sequence[MeshAxis]) -> int:
    """Returns the number of replicas at the start of a grid."""
    return grid[0][1] if grid and grid[0][0] is None else 1


def _defines_an_axis(term: Term) -> bool:
    return term.name not in (None, ELLIPSIS) and (term.star or term.count is not None)


def grid_of(
    expression: Expression, n_devices: int, sizes: Mapping[str, int] | None = None
) -> tuple[MeshAxis, ...]:
    """Returns the device grid of an expression, without the terms that have mesh axes.

    `sizes` are the sizes of mesh axes by name; None if the expression names none.
    """
    ndim = len(expression.names) - 1 if ELLIPSIS in expression.names else None
    names = {i: name for name, i in axis_positions(expression, ndim).items() if name != ELLIPSIS}
    layout = lay_out(expression, ndim, n_devices, sizes)
    return tuple(
        (None if split.axis is None else names[split.axis], split.count)
        for split in layout.splits
        if not split.mesh_axes and split.count > 1
    )
