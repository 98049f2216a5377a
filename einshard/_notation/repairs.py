"""Edits of an expression that does not fit an array or its devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .._errors import Suggestion
from .expression import ELLIPSIS, Expression, Term


def repairs(
    expression: Expression, n: int | None = None, ndim: int | None = None
) -> Suggestion | None:
    """Suggests edits of an expression, the best first, or returns None.

    Callers of `lay_out` try them in this order and keep the first that works
    (`keep_working_suggestions`), so an edit need not fit the sizes of the array or of the mesh.

    Args:
        n: the number of devices that counts and stars share, if they do not fit.
        ndim: the rank of the array, if the expression does not fit it.
    """
    text, edits = expression.text, list[str]()
    if (ndim or 0) > 1 and len(expression.names) == 1 and ELLIPSIS not in expression.names:
        # 'x -> x*' to 'x ... -> x* ...'; with more names, the missing one could be any axis
        end = len(text) if expression.short else expression.left[-1].span[1]
        rest = '' if expression.short else f'{text[end:].rstrip()} {ELLIPSIS}'
        edits.append(f'{text[:end].rstrip()} {ELLIPSIS}{rest}')
    if n is not None:
        counted = [term for term in expression.right if term.is_counted]
        if len(counted) > 1 and text[slice(*counted[0].span)] == '*':
            # '* b4 d' to 'b4 * d', which fits other mesh axes
            (start, end), last = counted[0].span, counted[-1].span[1]
            edits.append(f'{text[:start]}{text[end:last].lstrip()} *{text[last:]}')
        terms = [term for term in expression.right if not term.mesh_axes]
        product = math.prod(term.factor for term in terms)
        if not any(term.star for term in terms) and n % product == 0 and n > product:
            # 'b4 d' to '* b4 d' or 'b4 * d', which replicate over the remaining devices
            start = expression.right[0].span[0]
            end = max((term.span[1] for term in terms if term.is_counted), default=start)
            edits += [f'{text[:start]}* {text[start:]}', f'{text[:end]} *{text[end:]}']
        edits += _with_other_counts(expression, n)
    edits = [text for text in dict.fromkeys(edits) if text != expression.text]
    return Suggestion(edits[0], edits[1:]) if edits else None


def _with_other_counts(expression: Expression, n: int) -> list[str]:
    """Edits that share n devices among the terms that have a count or a star.

    First those that shard all axes that are sharded: 'x4 y2' for 'x* y*' on 8 devices, not 'x8 y';
    among these, with the fewest replicas added: 'x2 2 y' for an axis of size 6 on 4 devices. Then
    those that keep most of the counts, and replicas, and come close to the ratio of the terms.
    """
    terms = [term for term in expression.right if term.is_counted and not term.mesh_axes]
    product = math.prod(term.factor for term in terms)
    if not terms or (product < n and n % product):
        return []  # 'a3' on 8 devices: nothing says which count is meant

    def rank(counts: Sequence[int]) -> tuple[Any, ...]:
        pairs = [*zip(terms, counts, strict=False)]
        used = {term.name for term, count in pairs if count > 1}
        n_unsharded = len({term.name for term in terms if term.name} - used)
        n_added = math.prod(counts[len(terms) :])
        n_changed = sum(count != term.factor for term, count in pairs if not term.star)
        ratios = [count / term.factor for term, count in pairs]
        spread = round(max(ratios) / min(ratios), 9)
        n_replicas = math.prod(count for term, count in pairs if not term.name)
        in_order = [-count for count in counts]
        return n_unsharded, n_added, n_changed, counts.count(1), spread, n_replicas, in_order

    can_add = all(term.name for term in terms)
    stars = [term for term in terms if term.star]
    ways = itertools.islice(factorizations(n, len(terms) + can_add), _MAX_FACTORIZATIONS)
    texts: list[str] = []

    def trades_shards_for_replicas(counts: Sequence[int]) -> bool:
        n_unsharded, n_added, *_, n_replicas, _ = rank(counts)
        written = math.prod(term.factor for term in terms if not term.name)
        return n_unsharded > 0 and n_added * n_replicas > written

    ranked = [x for x in sorted(ways, key=rank) if not trades_shards_for_replicas(x)]
    for counts in ranked[:_MAX_EDITS]:
        n_added = math.prod(counts[len(terms) :])
        replacements: list[tuple[Term, str]] = []
        for term, count in zip(terms, counts, strict=False):
            other = str(replace(term, count=count, star=False))
            if stars == [term] and count % term.factor == 0 and count > 1 and n_added == 1:
                other = str(term)  # a single star takes the devices that the counts leave
            replacements.append((term, other if count > 1 else term.name or ''))
        if n_added > 1:
            last, other = replacements[-1]
            replacements[-1] = last, f'{other} {n_added}'
        texts.append(with_terms(expression, replacements))
    return texts


def with_terms(expression: Expression, replacements: Sequence[tuple[Term, object]]) -> str:
    """Returns the text of the expression with some terms replaced, given in its order."""
    text = expression.text
    for term, written in reversed(replacements):
        start, end = term.span
        text = f'{text[:start]}{written}{text[end:] if str(written) else text[end:].lstrip()}'
    return text.strip()


def factorizations(n: int, k: int) -> Iterator[tuple[int, ...]]:
    """Yields the ways to write n as a product of k numbers, in every order."""
    if k == 1:
        yield (n,)
        return
    for first in range(1, n + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in factorizations(n // first, k - 1))


_MAX_FACTORIZATIONS = 5000  # 4096 devices for five terms have 1820
_MAX_EDITS = 24
