"""Finds the positions of named axes in an array."""

from __future__ import annotations

from .._errors import plural, quoted
from .expression import ELLIPSIS, Expression, Term
from .repairs import repairs


def axis_positions(
    expression: Expression, ndim: int | None, rank_text: str | None = None
) -> dict[str, int]:
    """Returns the position of each named axis in an array of `ndim` dimensions.

    If `ndim` is None, '...' counts as no axes, and a sharded axis after it is an error. Errors
    quote `rank_text`, such as 'ndim=3'. Default: 'the array has 3 dimensions'.
    """
    names = expression.names
    rank_text = rank_text or f'the array has {plural(ndim or 0, "dimension")}'
    if ELLIPSIS not in names:
        if ndim is not None and ndim != len(names):
            raise expression.error(
                f'the expression names {plural(len(names), "axis")}, but {rank_text}',
                expression.left if not expression.short else expression.right,
                code='ndim',
                fix=repairs(expression, ndim=ndim),
            )
        return {name: i for i, name in enumerate(names)}
    before = names.index(ELLIPSIS)
    after = len(names) - before - 1
    if ndim is None:
        if needs_rank(expression):
            come = 'comes' if after == 1 else 'come'
            raise expression.error(
                f"{quoted(names[before + 1 :])} {come} after '...', so the sharding depends on "
                'ndim, which is unknown',
                [t for t in expression.left if t.name == ELLIPSIS],
                code='ndim',
                expected='ndim=x.ndim, for an array x',
            )
        ndim = len(names) - 1
    if ndim < before + after:
        raise expression.error(
            f"the expression names {plural(before + after, 'axis')} and '...', but {rank_text}",
            [t for t in expression.left if t.name != ELLIPSIS],
            code='ndim',
        )
    first = {name: i for i, name in enumerate(names[:before])}
    last = {name: ndim - after + i for i, name in enumerate(names[before + 1 :])}
    return first | last


def terms_of_axis(expression: Expression, axis: int, ndim: int) -> tuple[str, list[Term]]:
    """Returns the name of an array axis and its terms on the right side."""
    positions = axis_positions(expression, ndim)
    name = next(name for name, position in positions.items() if position == axis)
    return name, [term for term in expression.right if term.name == name]


def needs_rank(expression: Expression) -> bool:
    """Whether the sharding depends on ndim: a sharded axis comes after '...' on the left side."""
    names = expression.names
    after = names[names.index(ELLIPSIS) + 1 :] if ELLIPSIS in names else ()
    return any(term.name in after and term.spans_devices for term in expression.right)
