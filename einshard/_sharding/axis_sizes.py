"""Solves for the sizes of named mesh axes. Does not import JAX."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from numbers import Integral

from .._errors import EinshardError
from .._notation.counts import TOO_MANY, huge_text
from .._notation.words import is_mesh_axis

_MAX_SHOWN = 5


def solve_sizes(sizes: Mapping[str, int], n_devices: int, call: str) -> dict[str, int]:
    """Replaces a size of -1. Raises unless the product of the resulting sizes is `n_devices`.

    `call` is the first part of suggested fixes, such as 'device_mesh('.
    """
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool) or (size < 1 and size != -1):
            raise EinshardError(
                f'the size of mesh axis {name!r} must be a positive integer or -1, not {size!r}',
                code='mesh',
            )
        if not is_mesh_axis(name):
            raise EinshardError(
                f'{name!a} is not a valid mesh axis name',
                code='mesh',
                facts={
                    'expected': "a name without spaces, '(', ')', ',', '@', '*' and '->', in NFC"
                },
            )
        if re.fullmatch(r'd\d+', name):
            raise EinshardError(
                f"{name!r} is reserved for einshard's own meshes; use another name", code='mesh'
            )
    sizes = {name: int(size) for name, size in sizes.items()}  # converts NumPy integers
    unknown = [name for name, size in sizes.items() if size == -1]
    if len(unknown) > 1:
        raise EinshardError(
            'only one mesh axis may have size -1', code='mesh', facts={'got': _text(sizes)}
        )
    given_sizes = {name: size for name, size in sizes.items() if size != -1}
    product = math.prod(given_sizes.values())
    if product >= TOO_MANY:
        raise EinshardError(
            f'the mesh axes need {huge_text(product)} devices, but there are only {n_devices}',
            code='mesh',
        )
    if n_devices % product or (not unknown and product != n_devices):
        raise _size_error(sizes, given_sizes, n_devices, call)
    return {name: n_devices // product if size == -1 else size for name, size in sizes.items()}


def _size_error(
    sizes: Mapping[str, int], given_sizes: Mapping[str, int], n_devices: int, call: str
) -> EinshardError:
    product = math.prod(given_sizes.values())
    if len(given_sizes) < len(sizes):
        divisor = f'{product} ({_text(given_sizes)})'
        sentence = f'the number of devices ({n_devices}) is not divisible by {divisor}'
    else:
        s = 's' if len(sizes) == 1 else ''
        there_are = 'there is' if n_devices == 1 else 'there are'
        sentence = (
            f'{_text(sizes)} use{s} only {product} of {n_devices} devices; '
            'the sizes must use all of them'
            if product < n_devices
            else f'{_text(sizes)} need{s} {product} devices, but {there_are} only {n_devices}'
        )

    def distance(other: Mapping[str, int]) -> float:
        return sum(abs(math.log(other[name] / n)) for name, n in sizes.items() if n != -1)

    fitting = sorted(_fitting_sizes(sizes, n_devices), key=distance)
    # unlike other fixes, these are not tried: `solve_sizes` accepts any sizes that use all devices
    facts = {'sizes that fit': '; '.join(map(_text, fitting[:_MAX_SHOWN]))}
    if len(given_sizes) == len(sizes) and product < n_devices and call == 'device_mesh(':
        facts[f'on {product} devices'] = f'{call}jax.devices()[:{product}], {_text(sizes)})'
    return EinshardError(sentence, code='mesh', facts=facts, fix=f'{call}{_text(fitting[0])})')


def _fitting_sizes(sizes: Mapping[str, int], n_devices: int) -> Iterator[dict[str, int]]:
    """Yields sizes that use all devices: `sizes` with one or two axes changed (-1 counts as 1).

    Always includes the sizes that give all devices to the first axis.
    """
    requested = {name: max(size, 1) for name, size in sizes.items()}
    candidates: list[dict[str, int]] = []
    for first, second in itertools.combinations_with_replacement(requested, 2):
        rest = math.prod(size for name, size in requested.items() if name not in (first, second))
        product, remainder = divmod(n_devices, rest)
        if remainder:
            continue
        small = [d for d in range(1, math.isqrt(product) + 1) if product % d == 0]
        divisors = [*small, *(product // d for d in reversed(small) if d * d != product)]
        for size in divisors if first != second else (product,):
            second_size = product // size if first != second else size
            candidates.append({**requested, first: size, second: second_size})
    first, *others = requested
    candidates.append({first: n_devices, **dict.fromkeys(others, 1)})
    yield from {tuple(found.items()): found for found in candidates}.values()


def _text(sizes: Mapping[str, int]) -> str:
    return ', '.join(f'{name}={size}' for name, size in sizes.items())
