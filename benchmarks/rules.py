"""Match the leaves of a large model against Rules, with a loop of re.search by hand.

50 rules give each of 10,000 leaves its sharding. By hand: the path of each leaf, the first pattern
found in it, and a `NamedSharding` of that pattern's `PartitionSpec`. An `AbstractMesh` stands for
the devices, so 4,096 of them need no hardware.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import Rules, clear_caches, einshard

from ._measure import Bench

BY_HAND = 're.search and NamedSharding by hand'
LAYER = [  # the end of a path, the shape, the spec
    ('attention/q/kernel', (512, 512), P('data', 'model')),
    ('attention/k/kernel', (512, 512), P('data', 'model')),
    ('attention/v/kernel', (512, 512), P('data', 'model')),
    ('attention/o/kernel', (512, 512), P('model', 'data')),
    ('attention/norm/scale', (512,), P()),
    ('mlp/gate/kernel', (512, 2048), P('data', 'model')),
    ('mlp/up/kernel', (512, 2048), P('data', 'model')),
    ('mlp/down/kernel', (2048, 512), P('model', 'data')),
    ('mlp/up/bias', (2048,), P('model')),
    ('mlp/norm/scale', (512,), P()),
]
# rules that do not match, which every path is tried against first
PAIRS = [(rf'block_{i}/.*kernel$', P('data')) for i in range(50 - len(LAYER))]
PAIRS += [(rf'{path}$', spec) for path, _, spec in LAYER]


def run(bench: Bench) -> None:
    n_leaves = 100 if bench.tiny else 10_000
    tree = model(n_leaves // len(LAYER))
    for side in (4, 64):
        sizes, axis_types = (side, side), (AxisType.Auto,) * 2
        mesh = AbstractMesh(sizes, ('data', 'model'), axis_types=axis_types)
        compare(bench, f'{n_leaves:,} shapes, {mesh.size:,} devices', tree, mesh)


def compare(bench: Bench, name: str, tree: Any, mesh: AbstractMesh) -> None:
    rules = Rules(PAIRS)
    again, theirs = partial(einshard, tree, rules, mesh=mesh), partial(by_hand, tree, mesh)
    shardings = [[leaf.sharding for leaf in jax.tree.leaves(f())] for f in (again, theirs)]
    if shardings[0] != shardings[1]:
        raise RuntimeError('the rules and the loop give different shardings')

    def first() -> Any:
        clear_caches()
        return einshard(tree, Rules(PAIRS), mesh=mesh)

    bench.compare(f'{name}, the first time', first, BY_HAND, theirs)
    bench.compare(f'{name}, again', again, BY_HAND, theirs)


def by_hand(tree: Any, mesh: AbstractMesh) -> Any:
    def annotate(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        text = jtu.keystr(path, simple=True, separator='/')
        spec = next(spec for pattern, spec in PAIRS if re.search(pattern, text))
        return leaf.update(sharding=NamedSharding(mesh, spec))

    return jtu.tree_map_with_path(annotate, tree)


def model(n_layers: int) -> dict[str, Any]:
    """A tree of shapes with the paths of LAYER below the number of each layer."""
    layers: list[dict[str, Any]] = [{} for _ in range(n_layers)]
    for layer in layers:
        for path, shape, _ in LAYER:
            *parents, name = path.split('/')
            node = layer
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = jax.ShapeDtypeStruct(shape, np.float32)
    return {'layers': layers}
