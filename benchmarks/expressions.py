"""from text to sharding, against the NamedSharding that one would write by hand

Devices are those of an `AbstractMesh`, so that 9,216 of them need none; the last row of a count
starts with empty caches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from einshard import clear_caches, device_mesh, make_sharding
from einshard._expression import parse
from einshard._layout import lay_out

from ._harness import Bench, figure_at_most

LETTERS = 'abcdefghijklmnopqrstuvwxyz'
BY_HAND = 'NamedSharding(mesh, PartitionSpec(...)) by hand'


def run(bench: Bench) -> None:
    for n_devices in (8,) if bench.tiny else (8, 64, 512, 4096, 9216):
        measure(bench, n_devices)


def measure(bench: Bench, n_devices: int) -> None:
    mesh = device_mesh(AbstractMesh((n_devices,), ('all',)))
    known = 'a b -> a* b2'
    sharding = make_sharding(known, n_dims=2, mesh=mesh)
    by_hand = partial(_by_hand, mesh, tuple(sharding.spec))
    if by_hand() != sharding:
        raise RuntimeError(f'{by_hand()} is compared with {sharding}, which is something else')
    if n_devices == 8:
        # what the number of devices has no part in
        texts = new_expressions('{0} b -> {0}* b2')
        bench.compare('parse a new expression', lambda: parse(next(texts)), BY_HAND, by_hand)
        if jax.device_count() % 2 == 0:
            default = partial(make_sharding, known, n_dims=2)
            limit = figure_at_most(1e-6)
            bench.compare('make_sharding, cached', default, BY_HAND, by_hand, limit)
        else:
            bench.leave_out('make_sharding, cached', f"'{known}' takes an even number of devices")
    on = f'{n_devices:,} devices'
    size = {'devices': n_devices}
    cached = partial(make_sharding, known, n_dims=2, mesh=mesh)
    limit = figure_at_most(1e-6)
    bench.compare(f'make_sharding(mesh=), cached, {on}', cached, BY_HAND, by_hand, limit, **size)
    expression = parse(known)
    laid = partial(lay_out, expression, 2, n_devices)
    bench.compare(f'lay out, {on}', laid, BY_HAND, by_hand, **size)
    kinds = {'a new expression': '{0} b -> {0}* b2', 'axes permuted': '{0} b -> b2 {0}*'}
    root = math.isqrt(n_devices)
    if root * root == n_devices:
        kinds['two stars'] = '{0} b -> {0}* b*'
    limit = figure_at_most(150e-6)
    for kind, text in kinds.items():
        texts = new_expressions(text)
        bench.compare(
            f'make_sharding, {kind}, {on}',
            lambda texts=texts: make_sharding(next(texts), n_dims=2, mesh=mesh),
            BY_HAND,
            by_hand,
            limit,
            **size,
        )
    bench.compare(
        f'make_sharding, nothing cached, {on}',
        partial(_from_nothing, known, n_devices),
        BY_HAND,
        by_hand,
        figure_at_most(10e-3),
        **size,
    )


def new_expressions(text: str) -> Iterator[str]:
    """Expressions that say the same, each with a name that was not there before."""
    for length in itertools.count(3):
        for letters in itertools.product(LETTERS, repeat=length):
            yield text.format(''.join(letters))


def _by_hand(mesh: AbstractMesh, entries: tuple[str | tuple[str, ...] | None, ...]) -> object:
    return NamedSharding(mesh, PartitionSpec(*entries))


def _from_nothing(text: str, n_devices: int) -> object:
    clear_caches()
    return make_sharding(text, n_dims=2, mesh=device_mesh(AbstractMesh((n_devices,), ('all',))))
