"""Finds the mesh axes that per-device expressions define ('x2') and use ('y@x').

Does not import JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .._errors import DeviceCounts, EinshardError, quoted
from .._notation.expression import ELLIPSIS, Expression, Term
from .._notation.layout import axis_positions, lay_out
from .._notation.words import signs_text

MeshAxis = tuple[str | None, int]  # name and size; the name is None for replicas


@dataclass(frozen=True, slots=True)
class SpecAxes:
    """An expression, and the mesh axes that it defines and uses.

    Attributes:
        owner: whose spec the expression is: "parameter 'x'" or 'the result'.
    """

    owner: str
    expression: Expression

    @property
    def defines(self) -> dict[str, Term]:
        """The terms with a count (even 1) or a star, keyed by the mesh axis that each defines."""
        return {str(term.name): term for term in self.expression.right if _defines_an_axis(term)}

    @property
    def uses(self) -> dict[str, Term]:
        """The terms that name mesh axes, such as 'y@x', keyed by mesh axis."""
        return {axis: term for term in self.expression.right for axis in term.mesh_axes}

    @property
    def lists_replicas(self) -> bool:
        """Whether a term lists replicas, as in '4 x2'. If so, the expression uses all devices."""
        return any(term.name is None for term in self.expression.right)

    def grid(self, counts: Mapping[str, int], n_devices: int) -> tuple[MeshAxis, ...]:
        """Returns the mesh axes that the expression defines, and its replicas, in device order.

        Leaves out axes of size 1. `counts` has the sizes of the axes. It may lack starred axes of
        an expression with replicas: they share the remaining devices.
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
            raise without_suggestions(error).about(spec_of=self.owner) from None

    def take(self, axis: MeshAxis, grid: tuple[MeshAxis, ...]) -> tuple[MeshAxis, ...] | None:
        """Returns the rest of a device grid after `axis`, or None if `axis` cannot come next.

        An axis that the expression defines must be the first of the grid. An axis that it uses, as
        in 'y@x', leaves the grid unchanged. Any other axis takes replicas from the front of the
        grid, or leaves the grid unchanged if the expression lists no replicas.
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

    def check_signs(self) -> None:
        """Raises if a term has the sign '+' or '='."""
        signed = [term for term in self.expression.right if term.sign]
        if signed:
            kinds = signs_text([term.sign for term in signed])
            raise self.error(f'per_device does not support {kinds}', signed, code='partial-sum')

    def check(self, specs: Sequence[SpecAxes]) -> None:
        """Raises if this spec shards an axis twice, or names an axis that no other spec defines."""
        terms = [term for term in self.expression.right if _defines_an_axis(term)]
        names = [term.name for term in terms]
        repeated = [term for term in terms if names.count(term.name) > 1]
        if repeated:
            name = repeated[0].name
            raise self.error(
                f"axis '{name}' is sharded twice, but per_device makes only one mesh axis for it",
                repeated,
                code='mesh',
                instead=f"pass a mesh with named axes, and use them: '{name}@(p,q)'",
            )
        for term in terms:
            if term.star and term.factor > 1:
                raise self.error(
                    f"'{term}' has a count and a star, but axes of per_device have one of them",
                    [term],
                    code='mesh',
                    instead=f"write the count, such as '{term.name}{term.factor}', or "
                    f"'{term.name}*'",
                )
        defined = {name for spec in specs for name in spec.defines}
        for axis, term in self.uses.items():
            if axis not in defined:
                raise self.error(
                    f"'{term}' names '{axis}', which is neither a mesh axis nor an array axis "
                    'sharded by count',
                    [term],
                    code='mesh',
                    axes_sharded_by_count=quoted(sorted(defined)) if defined else 'none',
                    instead=f"use a mesh with an axis '{axis}': mesh=mesh or jax.set_mesh(mesh)",
                )
            if axis in self.defines:
                raise self.error(
                    f"'{self.defines[axis]}' and '{term}' shard two axes of one array over the "
                    'same devices',
                    [self.defines[axis], term],
                    code='spec',
                )

    def check_order(self, mesh_axes: Sequence[str | None]) -> None:
        """Raises if the mesh axes of an array axis are not in the order of `mesh_axes`."""
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
                    f"the mesh axes of '{name}' ({', '.join(listed)}) must be in device order",
                    [term for term in self.expression.right if term.name == name],
                    code='mesh',
                    device_order=', '.join(in_order),
                )

    def error(self, sentence: str, terms: Sequence[Term], code: str, **facts: str) -> EinshardError:
        return self.expression.error(sentence, terms, code=code, spec_of=self.owner, **facts)


def without_suggestions(error: EinshardError) -> EinshardError:
    """Drops what fits one expression, which may not fit the others."""
    facts = {label: x for label, x in error.facts.items() if not isinstance(x, DeviceCounts)}
    return EinshardError(**error.parts(facts=facts, fix=None))


def leading_replicas(grid: Sequence[MeshAxis]) -> int:
    return grid[0][1] if grid and grid[0][0] is None else 1


def _defines_an_axis(term: Term) -> bool:
    return term.name not in (None, ELLIPSIS) and (term.star or term.count is not None)


def grid_of(
    expression: Expression, n_devices: int, sizes: Mapping[str, int] | None = None
) -> tuple[MeshAxis, ...]:
    """Returns the device grid of an expression, without the terms that have mesh axes.

    `sizes` are the sizes of the mesh axes, or None if the expression names none.
    """
    ndim = len(expression.names) - 1 if ELLIPSIS in expression.names else None
    names = {i: name for name, i in axis_positions(expression, ndim).items() if name != ELLIPSIS}
    layout = lay_out(expression, ndim, n_devices, sizes)
    return tuple(
        (None if split.axis is None else names[split.axis], split.count)
        for split in layout.splits
        if not split.mesh_axes and split.count > 1
    )
