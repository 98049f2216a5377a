"""Reads what is to be moved: the arrays of a pytree, and the placement of each."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from .._arrays.device_put import TopologyError, check_devices, device_put, is_placed
from .._arrays.place import check_ref, kind_of, placement_of_leaf
from .._errors import EinshardError, combine_errors
from .._sharding.mesh import MeshLike, mesh_fact, partition_text, process_count
from .._sharding.resolve import resolve
from .._sharding.scopes import current_context
from .._sharding.tracing import is_tracing
from .._text import array_text
from .._trees.paths import leaf_paths, leaf_text
from .._trees.specs import Spec, context_of, leaf_specs, leaves_with_own_spec, not_an_array

_EXPLAIN_SHOWS = (
    'einshard(x, ...) constrains it; explain(...) names the placement on the way, if one helps'
)


class Leaf(NamedTuple):
    """An array to move."""

    number: int
    array: Any  # a jax.Array or a ShapeDtypeStruct
    sharding: NamedSharding


class Tree(NamedTuple):
    """A pytree with what is to be done with its leaves.

    Attributes:
        moving: the arrays that are sharded otherwise.
        from_host: numpy arrays and numbers, which are placed.
    """

    leaves: list[Any]
    treedef: Any
    moving: list[Leaf]
    from_host: list[Leaf]

    def path(self, index: int) -> str:
        return leaf_paths(self.treedef.unflatten(self.leaves), self.treedef)[index]


def read_tree(tree: Any, spec: Spec, mesh: MeshLike | None, *, only_shapes: bool = False) -> Tree:
    """Finds the placement of each array. One error lists all that do not fit.

    Args:
        only_shapes: whether ShapeDtypeStructs with shardings count as arrays, and devices need not
            exist.
    """
    context = context_of(spec, current_context(mesh))
    leaves, treedef = jtu.tree_flatten(tree)
    specs = leaf_specs(tree, leaves, spec, context.mesh, treedef)
    find = partial(resolve, context=context, owner=None, traced=False)
    found = Tree(leaves, treedef, [], [])
    errors: list[EinshardError] = []
    own: set[int] | None = None  # leaves with a spec of their own
    tracing = is_tracing()
    for i, (leaf, leaf_spec) in enumerate(zip(leaves, specs, strict=True)):
        if leaf_spec is None:
            continue
        kind = kind_of(type(leaf))
        try:
            if kind == 'tracer' or (tracing and kind in ('array', 'numpy')):
                raise EinshardError(
                    f'{array_text(leaf)} is traced, and only arrays outside of a traced function '
                    'can be moved',
                    code='tracing',
                    facts={'instead': _EXPLAIN_SHOWS},
                )
            placement = placement_of_leaf(leaf, kind, leaf_spec, find)
            if placement is None:
                own = leaves_with_own_spec(tree, spec) if own is None else own
                if i in own:
                    raise not_an_array('', leaf)
                continue
            if kind == 'ref':
                check_ref(leaf, placement)
                continue
            to = Leaf(i, leaf, placement.sharding)
            check_devices(to.sharding)
            if kind in ('numpy', 'number'):
                found.from_host.append(to)
                continue
            _check_source(leaf, kind, only_shapes)
            if not is_placed(leaf, to.sharding):
                found.moving.append(to)
        except EinshardError as error:
            errors.append(error.about(array=leaf_text(leaf_paths(tree, treedef)[i], leaf)))
    if errors:
        raise combine_errors(errors)
    if not only_shapes:
        for target in {leaf.sharding.mesh for leaf in found.moving}:
            _check_here(target)
    return found


def _check_source(leaf: Any, kind: str, only_shapes: bool) -> None:
    if kind == 'struct' and not only_shapes:
        raise EinshardError(
            f'{array_text(leaf)} is a ShapeDtypeStruct, which has no values to move',
            code='array',
            facts={'instead': 'explain_move(...), which needs only shapes with shardings'},
        )
    if kind == 'struct' and not isinstance(leaf.sharding, Sharding):
        raise EinshardError(
            f'{array_text(leaf)} has no sharding, so the move has no start',
            code='array',
            facts={'instead': 'jax.ShapeDtypeStruct(shape, dtype, sharding=...)'},
        )
    if kind == 'array' and leaf.is_deleted():
        raise EinshardError(
            f'{array_text(leaf)} was deleted',
            code='array',
            facts={'likely': 'it was donated, or moved before: use the result of that call'},
        )
    if kind == 'array':
        return
    try:
        leaf.sharding.shard_shape(leaf.shape)
    except ValueError:
        raise EinshardError(
            f'{array_text(leaf)} has uneven shards, which JAX has only inside of a program',
            code='not-divisible',
            facts=_sharding_facts(leaf.sharding),
        ) from None


def _sharding_facts(sharding: Any) -> dict[str, str]:
    if not isinstance(sharding, NamedSharding):
        return {'sharding': type(sharding).__name__}
    return {'sharding': partition_text(sharding.spec), 'mesh': mesh_fact(sharding.mesh)}


def _check_here(mesh: Any) -> None:
    """Raises if the devices of a mesh cannot hold arrays, like those of a `topology`."""
    if process_count() < 2 and isinstance(mesh, Mesh):
        try:
            device_put(np.zeros((), np.bool_), mesh.devices.flat[0])
        except TopologyError as error:
            raise TopologyError(
                error.sentence, facts={'instead': 'explain_move(...), which moves nothing'}
            ) from None
