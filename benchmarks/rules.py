"""the leaves of a large model matched against rules, against a loop of re.search by hand

From 10,000 leaves and 50 rules to a sharding for every leaf. By hand: the path of each leaf, the
first pattern found in it, a `NamedSharding` of that pattern's `PartitionSpec`. Devices are those
of an `AbstractMesh`, so that 4,096 of them need none.
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
from einshard._sharding import find_fitting, find_mesh
from einshard._specs import leaf_specs

from ._harness import Bench, figure_at_most, ratio_at_most

BY_HAND = 're.search and NamedSharding by hand'
KINDS = [  # what a layer has: the end of a path, the shape, the spec
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
# rules of other models before those of this one, which every path has to get past
PAIRS = [(rf'block_{i}/.*kernel$', P('data')) for i in range(50 - len(KINDS))]
PAIRS += [(rf'{path}$', spec) for path, _, spec in KINDS]


def run(bench: Bench) -> None:
    n_leaves = 100 if bench.tiny else 10_000
    tree = model(n_leaves // len(KINDS))
    few = mesh_of(4, 4)
    rules, many = Rules(PAIRS), mesh_of(64, 64)
    for mesh in (few, many):
        measure(bench, tree, mesh, n_leaves)
    bench.compare(
        f'einshard of {n_leaves:,} shapes, {many.size:,} devices',
        partial(einshard, tree, rules, mesh=many),
        BY_HAND,
        partial(annotate_by_hand, tree, many),
        leaves=n_leaves,
        rules=len(PAIRS),
        devices=many.size,
    )
    bench.compare(
        f'{n_leaves:,} leaves, again, {many.size:,} devices',
        partial(resolve, tree, rules, many),
        f'the same on {few.size}',
        partial(resolve, tree, rules, few),
        ratio_at_most(1.1),
        leaves=n_leaves,
        rules=len(PAIRS),
        devices=many.size,
    )


def measure(bench: Bench, tree: Any, mesh: AbstractMesh, n_leaves: int) -> None:
    rules = Rules(PAIRS)
    by_hand = partial(resolve_by_hand, tree, mesh)
    if resolve(tree, rules, mesh) != by_hand():
        raise RuntimeError('what the rules give is not what is compared with it')
    size = {'leaves': n_leaves, 'rules': len(PAIRS), 'devices': mesh.size}
    what, on = f'{n_leaves:,} leaves', f'{mesh.size:,} devices'
    first = partial(resolve_anew, tree, mesh)
    limit = figure_at_most(0.3)
    bench.compare(f'{what}, the first time, {on}', first, BY_HAND, by_hand, limit, **size)
    again = partial(resolve, tree, rules, mesh)
    limit = figure_at_most(0.03)
    bench.compare(f'{what}, again, {on}', again, BY_HAND, by_hand, limit, **size)


def resolve(tree: Any, rules: Rules, mesh: AbstractMesh) -> list[NamedSharding]:
    """The sharding of every leaf: what einshard does before it annotates or moves them."""
    leaves, treedef = jtu.tree_flatten(tree)
    where = find_mesh(mesh)
    specs = leaf_specs(tree, leaves, rules, mesh, treedef)
    found = zip(specs, leaves, strict=True)
    return [find_fitting(spec, leaf.shape, where, None).sharding for spec, leaf in found]


def resolve_anew(tree: Any, mesh: AbstractMesh) -> list[NamedSharding]:
    clear_caches()
    return resolve(tree, Rules(PAIRS), mesh)


def resolve_by_hand(tree: Any, mesh: AbstractMesh) -> list[NamedSharding]:
    shardings: list[NamedSharding] = []
    for path, _ in jtu.tree_leaves_with_path(tree):
        text = jtu.keystr(path, simple=True, separator='/')
        spec = next(spec for pattern, spec in PAIRS if re.search(pattern, text))
        shardings.append(NamedSharding(mesh, spec))
    return shardings


def annotate_by_hand(tree: Any, mesh: AbstractMesh) -> Any:
    leaves, treedef = jtu.tree_flatten(tree)
    shardings = resolve_by_hand(tree, mesh)
    both = zip(leaves, shardings, strict=True)
    return treedef.unflatten([leaf.update(sharding=sharding) for leaf, sharding in both])


def model(n_layers: int) -> dict[str, Any]:
    """A tree of shapes with the paths of KINDS below the number of a layer."""
    layers: list[dict[str, Any]] = []
    for _ in range(n_layers):
        layer: dict[str, Any] = {}
        for path, shape, _ in KINDS:
            *parents, name = path.split('/')
            node = layer
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = jax.ShapeDtypeStruct(shape, np.float32)
        layers.append(layer)
    return {'layers': layers}


def mesh_of(data: int, model: int) -> AbstractMesh:
    return AbstractMesh((data, model), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
