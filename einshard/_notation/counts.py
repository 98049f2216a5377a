"""Terms, number of devices -> the count of every term: stars share what is left. Imports no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._errors import EinshardError, Suggestion, plural, quoted
from .expression import ELLIPSIS, Expression, Term


@dataclass(frozen=True)
class Devices:
    """How many devices there are, for errors: in all, and those that names take; and hints."""

    total: int
    named: Sequence[Term]
    taken: int
    hints: Mapping[str, str]

    def fact(self, counted: Sequence[Term] = ()) -> str:
        text = str(self.total)
        if self.named:
            text += f', of which {quoted(map(str, self.named))} '
            text += f'{"takes" if len(self.named) == 1 else "take"} {self.taken}'
            text += f', leaving {self.total // self.taken}'
        if counted:
            left = self.total // self.taken
            replicas = all(term.name is None for term in counted)
            verb = ('replicate' if replicas else 'take') + 's' * (len(counted) == 1)
            text += f', of which {quoted(map(str, counted))} {verb}'
            used = math.prod(term.factor for term in counted)
            text += '' if replicas and len(counted) == 1 else f' {used}'
            text += f', leaving {left // used}'
        return text


def solve_counts(
    expression: Expression, terms: Sequence[Term], n: int, devices: Devices
) -> tuple[int, ...]:
    """The count of every term, its star solved: r ** stars = n / product of counts."""
    stars = [term for term in terms if term.star]
    product = math.prod(term.factor for term in terms)
    if not stars and product != n:
        raise _wrong_product(expression, terms, product, n, devices)
    if n % product:
        raise _not_a_multiple(expression, terms, product, n, devices)
    share = _root(n // product, len(stars)) if stars else 1
    if share is None:
        counted = [term for term in terms if term.factor > 1 and not term.star]
        left = n // math.prod(term.factor for term in counted)
        raise expression.error(
            f'{left} devices cannot be shared '
            f'{" : ".join(str(term.factor) for term in stars)} '
            f'{"between" if len(stars) == 2 else "among"} {quoted(map(str, stars))}',
            stars,
            fix=_first_star_takes_all(expression, stars, left),
            **devices.hints,
            devices=devices.fact(counted),
            works_with=_works_with(product * devices.taken, len(stars)),
        )
    return tuple(term.factor * (share if term.star else 1) for term in terms)


def _root(n: int, k: int) -> int | None:
    """The integer r with r ** k == n, if there is one."""
    if k == 1:
        return n
    root = 1
    while root**k < n:  # a float root is wrong from 64 ** (1 / 3) = 3.9999999999999996 on
        root += 1
    return root if root**k == n else None


def _works_with(multiple: int, stars: int) -> str:
    return ', '.join(str(multiple * r**stars) for r in range(1, 5)) + ', ... devices'


def _wrong_product(
    expression: Expression, terms: Sequence[Term], product: int, n: int, devices: Devices
) -> EinshardError:
    counted = [term for term in terms if term.factor > 1]
    guilty = counted or [term for term in terms if term.name != ELLIPSIS]
    guilty = guilty or list(expression.right)
    fact = devices.fact()
    if product > n or n % product:
        relation = 'more than' if product > n else 'which do not divide'
        there = 'that the names leave' if devices.named else 'there is' if n == 1 else 'there are'
        needed = product * devices.taken
        return expression.error(
            f'the counts ask for {_product_text(counted)} devices, {relation} the {n} {there}',
            guilty,
            **devices.hints,
            devices=fact,
            works_with=f"{needed} devices, or a multiple of {needed} with a replica '*'",
        )
    fix = _with_replica(expression)
    if not counted:
        return expression.error(
            f'nothing is sharded, and nothing says that {n} devices hold replicas',
            guilty,
            fix=fix,
            devices=fact,
        )
    return expression.error(
        f'{quoted(map(str, counted))} {"uses" if len(counted) == 1 else "use"} {product} of '
        f'{n} devices, and nothing says that the others hold replicas',
        guilty,
        fix=fix,
        devices=fact,
    )


def _not_a_multiple(
    expression: Expression, terms: Sequence[Term], product: int, n: int, devices: Devices
) -> EinshardError:
    counted = [term for term in terms if term.factor > 1]
    stars = sum(term.star for term in terms)
    return expression.error(
        f'{plural(n, "device")} cannot be shared out in multiples of {_product_text(counted)}',
        counted,
        **devices.hints,
        devices=devices.fact(),
        works_with=_works_with(product * devices.taken, stars),
    )


def _product_text(counted: Sequence[Term]) -> str:
    """4; 2 x 4 = 8"""
    factors = [term.factor for term in counted]
    text = ' x '.join(map(str, factors))
    return f'{text} = {math.prod(factors)}' if len(factors) > 1 else text


def _with_replica(expression: Expression) -> Suggestion:
    """The expression with '*' before its first placement: the rest of the devices replicate."""
    start = expression.right[0].span[0]
    return Suggestion(f'{expression.text[:start]}* {expression.text[start:]}')


def _first_star_takes_all(expression: Expression, stars: Sequence[Term], n: int) -> Suggestion:
    text = expression.text
    taker = next((term for term in stars if term.name is not None), stars[0])
    for term in reversed(stars):
        start, end = term.span
        placed = str(Term(term.name, n if term is taker else None))
        text = f'{text[:start]}{placed}{text[end:] if placed else text[end:].lstrip()}'
    return Suggestion(text.strip())
