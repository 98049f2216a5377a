"""Turn expressions into shardings, against NamedSharding(mesh, PartitionSpec(..)) by hand.

An `AbstractMesh` stands for the devices, so 9,216 of them need no hardware. In the last row of each
device count, einshard starts with empty caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from einshard import clear_caches, device_mesh, make_sharding

from ._measure import Bench, Call

LETTERS = 'abcdefghijklmnopqrstuvwxyz'
KNOWN = 'a b -> a* b2'
BY_HAND = 'NamedSharding(mesh, PartitionSpec(..))'


def run(bench: Bench) -> None:
    if jax.device_count() % 2:
        bench.leave_out('make_sharding, cached', f"'{KNOWN}' needs an even number of devices")
    else:
        compare(bench, 'cached', partial(make_sharding, KNOWN), by_hand(device_mesh()))
    for n_devices in (8,) if bench.tiny else (8, 9216):
        on_devices(bench, n_devices)


def on_devices(bench: Bench, n_devices: int) -> None:
    def new_mesh() -> AbstractMesh:
        return device_mesh(AbstractMesh((n_devices,), ('all',)))

    def nothing_cached() -> NamedSharding:
        clear_caches()
        return make_sharding(KNOWN, mesh=new_mesh())

    mesh, texts = new_mesh(), new_expressions()
    calls = {
        'cached, mesh given': partial(make_sharding, KNOWN, mesh=mesh),
        'a new expression': lambda: make_sharding(next(texts), mesh=mesh),
        'nothing cached': nothing_cached,
    }
    for name, call in calls.items():
        compare(bench, f'{name}, {n_devices:,} devices', call, by_hand(mesh))


def compare(bench: Bench, name: str, ours: Call, theirs: Call) -> None:
    if theirs() != ours():
        raise RuntimeError(f'{ours()} is compared with {theirs()}')
    bench.compare(f'make_sharding, {name}', ours, BY_HAND, theirs)


def by_hand(mesh: AbstractMesh) -> Call:
    entries = tuple(make_sharding(KNOWN, mesh=mesh).spec)
    return lambda: NamedSharding(mesh, PartitionSpec(*entries))


def new_expressions() -> Iterator[str]:
    """Expressions that mean the same as KNOWN, each with an axis name not used before."""
    for length in itertools.count(3):
        for letters in map(''.join, itertools.product(LETTERS, repeat=length)):
            yield f'{letters} b -> {letters}* b2'
