"""What one expression says of a mesh that it makes together with others. Imports no jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .._errors import EinshardError
from .._expression import ELLIPSIS, Expression, Term
from .._layout import axis_positions, lay_out

Cell = tuple[str | None, int]  # an axis, or replicas, and the number of its parts


@dataclass(frozen=True, slots=True)
class Member:
    """An expression of a function, and whose it is: "parameter 'x'", "the result"."""

    of: str
    expression: Expression

    @property
    def cuts(self) -> dict[str, Term]:
        """The terms that make a mesh axis: array axes with a count or a star, be it 1."""
        return {str(term.name): term for term in self.expression.right if _makes_an_axis(term)}

    @property
    def shares(self) -> dict[str, Term]:
        """The terms that use mesh axes of others by name, as in 'y@x'."""
        return {axis: term for term in self.expression.right for axis in term.mesh_axes}

    @property
    def is_whole(self) -> bool:
        """Whether it spells out its replicas, and so is about all of the devices by itself."""
        return any(term.name is None for term in self.expression.right)

    def filled(self, counts: Mapping[str, int]) -> Expression:
        """The expression with counts for the stars that are known."""
        terms: list[Term] = []
        for term in self.expression.right:
            count = counts.get(str(term.name)) if term.star else None
            if count is not None and count % term.factor:
                raise self.expression.error(
                    f"'{term}' is a multiple of {term.factor}, but the axis has {count} parts",
                    [term],
                    spec_of=self.of,
                )
            terms.append(term if count is None else replace(term, count=count, star=False))
        return replace(self.expression, right=tuple(terms))

    def cells(self, counts: Mapping[str, int], n_devices: int) -> list[Cell]:
        """What it says of the devices, as far as counts are known: in which order they are cut."""
        expression = self.filled(counts)
        if not self.is_whole:
            return [(name, counts[name]) for name in self.cuts if counts[name] > 1]
        try:
            return cells_of(expression, n_devices, counts if self.shares else None)
        except EinshardError as error:
            # its fix is for an expression that stands alone
            raise error.about(spec_of=self.of).with_fix(None) from None

    def check(self, others: Sequence[Member]) -> None:
        """Raises where the axes that it cuts, or shares with others, are none."""
        terms = [term for term in self.expression.right if _makes_an_axis(term)]
        names = [term.name for term in terms]
        again = [term for term in terms if names.count(term.name) > 1]
        if again:
            raise self.expression.error(
                f"axis '{again[0].name}' is cut twice, but the mesh axis of its name is one",
                again,
                spec_of=self.of,
                instead="a mesh of your own, and its axes by name: 'i@(p,q)'",
            )
        known = {name for other in others for name in other.cuts}
        for axis, term in self.shares.items():
            if axis not in known:
                raise self.expression.error(
                    f"'{term}' is over the devices of '{axis}', an axis that no expression cuts",
                    [term],
                    spec_of=self.of,
                    cut=', '.join(f"'{name}'" for name in sorted(known)) or 'none',
                    or_give='a mesh with such an axis, by mesh= or in context',
                )
            if axis in self.cuts:
                raise self.expression.error(
                    f"'{self.cuts[axis]}' and '{term}' are over the same devices",
                    [self.cuts[axis], term],
                    spec_of=self.of,
                )


def _makes_an_axis(term: Term) -> bool:
    return term.name not in (None, ELLIPSIS) and (term.star or term.count is not None)


def cells_of(
    expression: Expression, n_devices: int, shared: Mapping[str, int] | None = None
) -> list[Cell]:
    """The device grid of an expression, but for the axes that it shares with others."""
    n_dims = len(expression.names) - 1 if ELLIPSIS in expression.names else None
    names = {i: name for name, i in axis_positions(expression, n_dims).items() if name != ELLIPSIS}
    layout = lay_out(expression, n_dims, n_devices, shared)
    return [
        (None if split.axis is None else names[split.axis], split.count)
        for split in layout.splits
        if not split.mesh_axes and split.count > 1
    ]


def texts_of(members: Sequence[Member]) -> dict[str, str]:
    """The expressions as facts, each once."""
    first = {member.expression: member for member in reversed(members)}
    shown = [member for member in members if first[member.expression] is member]
    return {member.of: f"'{member.expression.text}'" for member in shown}


def differ(
    name: str, one: tuple[int, Member], other: tuple[int, Member], n_devices: int
) -> EinshardError:
    """The error for two counts of one axis."""
    (count, member), (other_count, other_member) = one, other
    return member.expression.error(
        f"axis '{name}' has {count} parts in one expression and {other_count} in another",
        [member.cuts[name]],
        **texts_of([member, other_member]),
        devices=n_devices,
    )


def starred_otherwise(name: str, member: Member, other: Member) -> EinshardError:
    """The error for two shares of one axis in what is left."""
    return member.expression.error(
        f"axis '{name}' is '{member.cuts[name]}' in one expression and '{other.cuts[name]}' "
        'in another, and no count decides',
        [member.cuts[name]],
        **texts_of([member, other]),
    )
