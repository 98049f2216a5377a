"""Replaces stars with counts, for a given device count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._cache import cached
from .._errors import DeviceCounts, EinshardError, plural, quoted
from .expression import ELLIPSIS, Expression, Term
from .repairs import repairs


@dataclass(frozen=True)
class Devices:
    """The devices of a layout, as errors describe them.

    Attributes:
        mesh_axis_terms: the terms with mesh axes, such as 'b@data'. Counts split the devices left.
        taken: the product of the sizes of the mesh axes in `mesh_axis_terms`.
        hints: facts to add to errors, by label.
        on_users_mesh: whether the user chose the mesh. If so, error sentences do not suggest '*',
            which may not fit its axes.
    """

    total: int
    mesh_axis_terms: Sequence[Term]
    taken: int
    hints: Mapping[str, str]
    on_users_mesh: bool = False

    def fact(self, counted: Sequence[Term] = ()) -> str:
        """Formats the device count: '8', or "8 (2 left after 'b@data')".

        `counted` are further terms that take devices.
        """
        terms = [*self.mesh_axis_terms, *counted]
        if not terms:
            return str(self.total)
        left = self.total // self.taken // math.prod(term.factor for term in counted)
        return f'{self.total} ({left} left after {quoted(map(str, terms))})'


def solve_counts(
    expression: Expression, terms: Sequence[Term], n: int, devices: Devices
) -> tuple[int, ...]:
    """Returns the count of each term, with stars replaced by numbers.

    `terms` have no mesh axes, and `n` devices are left after the mesh axes. All stars stand for the
    same number r: r ** (number of stars) = n / (product of the written counts).
    """
    stars = [term for term in terms if term.star]
    product = math.prod(term.factor for term in terms)
    if product >= TOO_MANY:
        raise expression.error(
            f'the counts need {huge_text(product)} devices, but there '
            f'{"is" if n == 1 else "are"} only {n}',
            [term for term in terms if term.factor > 1],
            code='device-count',
            **devices.hints,
            devices=devices.fact(),
        )
    if not stars and product != n:
        raise _wrong_product(expression, terms, product, n, devices)
    if n % product:
        counted, ratio = [term for term in terms if term.factor > 1], ''
        if len(stars) > 1:
            ratio = f', and {quoted(map(str, stars))} must have {_ratio_text(stars)}'
        raise expression.error(
            _indivisible(n, counted, devices) + ratio,
            counted,
            code='device-count',
            fix=repairs(expression, n) if devices.total > 1 else None,
            **devices.hints,
            devices=devices.fact(),
            works_with=_works_with(product * devices.taken, len(stars)),
        )
    star_value = _root(n // product, len(stars)) if stars else 1
    if star_value is None:
        counted = [term for term in terms if term.factor > 1 and not term.star]
        left = n // math.prod(term.factor for term in counted)
        all_left = left == devices.total
        which = plural(left, 'device') if all_left else f'the {left} remaining devices'
        raise expression.error(
            f'{quoted(map(str, stars))} cannot have {_ratio_text(stars)} on {which}',
            stars,
            code='device-count',
            fix=repairs(expression, n),
            **devices.hints,
            devices=devices.fact(counted),
            works_with=_works_with(product * devices.taken, len(stars)),
        )
    return tuple(term.factor * (star_value if term.star else 1) for term in terms)


# Python cannot format more than 4300 digits, and nobody can read them
TOO_MANY = 10**30


def huge_text(n: int) -> str:
    """Formats a number of at least `TOO_MANY`."""
    return f'at least 10^{math.floor(math.log10(n))}'


def _root(n: int, k: int) -> int | None:
    """Returns the integer r with r ** k == n, or None."""
    if k == 1:
        return n
    root = 1
    while root**k < n:  # not a float root: 64 ** (1 / 3) = 3.9999999999999996
        root += 1
    return root if root**k == n else None


def _works_with(multiple: int, n_stars: int) -> DeviceCounts:
    """Lists device counts that work: multiple * r ** n_stars for r = 1, 2, 3 and 4."""
    counts = [multiple * r**n_stars for r in range(1, 5)]
    return DeviceCounts(f'{", ".join(map(str, counts))}, ... devices in total', counts)


def _ratio_text(stars: Sequence[Term]) -> str:
    factors = [term.factor for term in stars]
    if len(set(factors)) == 1:
        return 'equal counts'
    return f'counts in the ratio {":".join(map(str, factors))}'


def _wrong_product(
    expression: Expression, terms: Sequence[Term], product: int, n: int, devices: Devices
) -> EinshardError:
    counted = [term for term in terms if term.factor > 1]
    marked = counted or [term for term in terms if term.name != ELLIPSIS]
    marked = marked or list(expression.right)
    fact = devices.fact()
    if product > n or n % product:
        verb = 'is' if n == 1 else 'are'
        limit = f'only {n} {verb} left' if devices.mesh_axis_terms else f'there {verb} only {n}'
        needed = product * devices.taken
        return expression.error(
            f'the counts need {_product_text(counted)} devices, but {limit}'
            if product > n
            else _indivisible(n, counted, devices),
            marked,
            code='device-count',
            fix=repairs(expression, n) if devices.total > 1 else None,
            **devices.hints,
            devices=fact,
            works_with=DeviceCounts(
                f'{needed} devices; or any multiple of {needed}, '
                "with '*' added to replicate over the rest",
                [needed],
            ),
        )
    if not counted:  # no mesh axes either: with mesh axes, `lay_out` needs no counts
        sentence = f"nothing is sharded; add '*' to replicate over all {n} devices"
    else:
        use = 'uses' if len(counted) == 1 else 'use'
        which = f'the {n} remaining' if devices.mesh_axis_terms else str(n)
        sentence = f'{quoted(map(str, counted))} {use} only {product} of {which} devices; '
        sentence += (
            'counts and stars must use all of them'
            if devices.mesh_axis_terms or devices.on_users_mesh
            else "add '*' to replicate over the rest"
        )
    return expression.error(
        sentence,
        marked,
        code='device-count',
        fix=repairs(expression, n),
        **devices.hints,
        devices=fact,
    )


def _indivisible(n: int, counted: Sequence[Term], devices: Devices) -> str:
    which = 'remaining devices' if devices.mesh_axis_terms else 'devices'
    return f'the number of {which} ({n}) is not divisible by {_product_text(counted)}'


def _product_text(counted: Sequence[Term]) -> str:
    """Formats the product of the counts: '4', or '2 x 4 = 8' for two terms."""
    factors = [term.factor for term in counted]
    text = ' x '.join(map(str, factors))
    return f'{text} = {math.prod(factors)}' if len(factors) > 1 else text


@cached
def prime_factors(n: int) -> tuple[int, ...]:
    """Returns the prime factors of n, largest first: (3, 2, 2) for 12."""
    factors: list[int] = []
    divisor = 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    if n > 1:
        factors.append(n)
    return tuple(reversed(factors))
