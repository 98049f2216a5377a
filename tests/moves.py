"""Twenty moves between placements, and their routes: python tests/moves.py [all] [NUMBER ...]

With 'all', compares each route with the best of all placements on the way, if there are at most
120. That takes up to two minutes for each move.

A row of `MOVES` has a name, the shape and dtype, and the mesh and spec before and after. Meshes are
{axis: size} over the first devices in order.
"""

import sys
import time

import numpy as np
from ml_dtypes import bfloat16

from einshard._move.candidates import list_candidates
from einshard._move.placed import Placed, refined
from einshard._move.route import Move, compile_route, find_route

MOVES = [
    (
        'FSDP to tensor',
        (4096, 14336),
        'bfloat16',
        {'fsdp': 16},
        ('fsdp', None),
        {'data': 4, 'tensor': 4},
        (None, 'tensor'),
    ),
    (
        'FSDP x tensor to tensor with replicas',
        (4096, 14336),
        'bfloat16',
        {'fsdp': 8, 'tensor': 2},
        ('fsdp', 'tensor'),
        {'data': 4, 'tensor': 4},
        (None, 'tensor'),
    ),
    (
        'FSDP x tensor to wider tensor',
        (4096, 14336),
        'bfloat16',
        {'fsdp': 8, 'tensor': 2},
        ('fsdp', 'tensor'),
        {'data': 2, 'tensor': 8},
        (None, 'tensor'),
    ),
    (
        'FSDP x tensor, narrower FSDP',
        (4096, 14336),
        'bfloat16',
        {'fsdp': 8, 'tensor': 2},
        ('fsdp', 'tensor'),
        {'fsdp': 4, 'tensor': 4},
        ('fsdp', 'tensor'),
    ),
    (
        'axes swapped',
        (4096, 14336),
        'bfloat16',
        {'data': 4, 'tensor': 4},
        ('data', 'tensor'),
        {'data': 4, 'tensor': 4},
        ('tensor', 'data'),
    ),
    ('row to column', (8192, 8192), 'float32', {'x': 8}, ('x', None), {'x': 8}, (None, 'x')),
    ('replicate', (4096, 4096), 'float32', {'x': 8}, ('x', None), {'x': 8}, (None, None)),
    ('shard a replica', (4096, 4096), 'float32', {'x': 8}, (None, None), {'x': 8}, (None, 'x')),
    (
        'three axes',
        (512, 512, 512),
        'float32',
        {'x': 4, 'y': 2},
        ('y', None, 'x'),
        {'x': 4, 'y': 2},
        (None, ('x', 'y'), None),
    ),
    (
        'qkv from FSDP to heads',
        (4096, 32, 128),
        'bfloat16',
        {'fsdp': 16},
        ('fsdp', None, None),
        {'data': 2, 'tensor': 8},
        (None, 'tensor', None),
    ),
    (
        'sequence to heads (Ulysses)',
        (8, 8192, 32, 128),
        'bfloat16',
        {'s': 8},
        (None, 's', None, None),
        {'s': 8},
        (None, None, 's', None),
    ),
    (
        'layers to stages',
        (32, 4096, 4096),
        'bfloat16',
        {'fsdp': 16},
        (None, 'fsdp', None),
        {'stage': 4, 'tensor': 4},
        ('stage', None, 'tensor'),
    ),
    (
        'experts to tokens',
        (64, 2048, 1024),
        'bfloat16',
        {'expert': 16},
        ('expert', None, None),
        {'expert': 16},
        (None, 'expert', None),
    ),
    (
        'HSDP to FSDP',
        (8192, 8192),
        'float32',
        {'replica': 2, 'fsdp': 8},
        (None, 'fsdp'),
        {'fsdp': 16},
        (None, 'fsdp'),
    ),
    (
        'FSDP to HSDP',
        (8192, 8192),
        'float32',
        {'fsdp': 16},
        ('fsdp', None),
        {'replica': 2, 'fsdp': 8},
        ('fsdp', None),
    ),
    (
        'other factors, 12 devices',
        (4608, 4608),
        'float32',
        {'a': 12},
        ('a', None),
        {'q': 4, 'p': 3},
        ('q', 'p'),
    ),
    (
        '12 devices, column groups',
        (4608, 9216),
        'float32',
        {'q': 4, 'p': 3},
        ('q', 'p'),
        {'q': 4, 'p': 3},
        (None, 'q'),
    ),
    (
        'cache from batch to heads',
        (32, 64, 2048, 8, 128),
        'bfloat16',
        {'data': 8, 'tensor': 2},
        (None, 'data', None, 'tensor', None),
        {'data': 2, 'tensor': 8},
        (None, 'data', None, 'tensor', None),
    ),
    (
        'vocabulary to embedding',
        (128256, 4096),
        'bfloat16',
        {'tensor': 16},
        ('tensor', None),
        {'tensor': 16},
        (None, 'tensor'),
    ),
    (
        '64 devices, FSDP to tensor 8',
        (8192, 28672),
        'bfloat16',
        {'fsdp': 64},
        ('fsdp', None),
        {'data': 8, 'tensor': 8},
        (None, 'tensor'),
    ),
]


def move_of(row):
    """The move of a row, as `einshard.move` sees it."""
    _, shape, dtype, *ends = row
    before, after = refined(placed(*ends[:2]), placed(*ends[2:]))
    itemsize = np.dtype(bfloat16 if dtype == 'bfloat16' else dtype).itemsize
    return Move(shape, dtype, itemsize, before, after)


def placed(mesh, spec):
    names = [*mesh]
    entries = (entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in spec)
    return Placed(tuple(mesh.values()), tuple(tuple(map(names.index, axes)) for axes in entries))


def compare_with_all(move):
    """Says how the route compares with the best of all that have one placement on the way."""
    listed = list_candidates(move.before, move.after, move.shape)
    if len(listed) > 120:
        return f'{len(listed)} placements'
    routes = [compile_route(move, (candidate.placed,)) for candidate in listed]
    best = min((route.sent for route in routes if route is not None), default=0)
    return f'{find_route(move).best.sent / best if best else 1:.2f} of the best of {len(listed)}'


def main(numbers, with_all=False):
    mib = 2**20
    print(
        '  move                                      bound   direct   route  by bound  temporaries'
    )
    for number, row in enumerate(MOVES, 1):
        if numbers and number not in numbers:
            continue
        move, since = move_of(row), time.perf_counter()
        found, bound = find_route(move), move.bound()
        seconds = time.perf_counter() - since
        direct, best = found.direct, found.best
        print(
            f'{number:2} {row[0]:38} {bound / mib:6.1f}'
            f'{f"{direct.sent / mib:9.1f}" if direct else "  aborts"}{best.sent / mib:8.1f}'
            f'{best.sent / bound if bound else 0:7.2f}'
            f'{direct.temporaries / mib if direct else 0:9.1f} to {best.temporaries / mib:.1f} MiB,'
            f' {found.compilations} compilations, {seconds:.1f} s, {best.through}',
            flush=True,
        )
        if with_all:
            print('  ', compare_with_all(move), flush=True)


if __name__ == '__main__':
    words = sys.argv[1:]
    main([int(word) for word in words if word != 'all'], 'all' in words)
