"""Warns about valid expressions that are probably typos."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

from .._errors import printable, quoted
from .._working_fixes import works
from .expression import ELLIPSIS, Expression, Term, write, write_short


def spacing_hint(expression: Expression, attempt: Callable[[str], object]) -> str | None:
    """Returns a warning about a count or star after an unsharded name, a likely typo: 'a 8 b'.

    Returns None if any name is sharded, or if no count or star follows a name, as in '8 a b'.

    Args:
        attempt: resolves an expression or raises. The warning suggests 'a8 b' only if it resolves.
    """
    separate = [
        (term, after)
        for term, after in itertools.pairwise(expression.right)
        # not 'a1 8 b', which code such as f'a{n} {m} b' produces for n = 1
        if term.name not in (None, ELLIPSIS) and term == Term(term.name)
        if after.name is None and not after.sign and after.is_counted
    ]
    if not separate or any(term.name and term.spans_devices for term in expression.right):
        return None
    joined = expression.text
    for name, count in reversed(separate):
        joined = f'{joined[: name.span[1]]}{joined[count.span[0] :]}'
    terms = sorted(expression.right, key=lambda term: term.name is not None)
    replicas_first = write_short(terms) if expression.short else write(expression.left, terms)
    to_shard = f"'{joined}' to shard, or " if works(lambda: attempt(joined)) else ''
    return printable(
        f"in '{expression.text}', {quoted(str(count) for _, count in separate)} only "
        f'{"replicates" if len(separate) == 1 else "replicate"}, and nothing is sharded; '
        f"write {to_shard}'{replicas_first.text}' to replicate without this warning"
    )


def mesh_axes_hint(
    expression: Expression, mesh_axes: Collection[str], attempt: Callable[[str], object]
) -> str | None:
    """Returns a warning if array axes are named like mesh axes but not sharded: 'data model'.

    Returns None if the expression with '@' added, 'data@data model@model', does not work.

    Args:
        expression: an expression in the short form without placements.
        mesh_axes: the mesh axes, except those of size 1.
        attempt: resolves an expression or raises.
    """
    same = [term for term in expression.right if term.name in mesh_axes]
    named = expression.text
    for term in reversed(same):
        named = f'{named[: term.span[1]]}@{term.name}{named[term.span[1] :]}'
    if not same or not works(lambda: attempt(named)):
        return None
    are_axes = 'is an array axis' if len(same) == 1 else 'are array axes'
    return printable(
        f"in '{expression.text}', {quoted(map(str, same))} {are_axes}, and nothing is sharded; "
        f"write '{named}' to shard over the mesh {'axis' if len(same) == 1 else 'axes'}, or "
        f"'{' '.join(expression.names)} -> {expression.text}' to replicate without this warning"
    )
