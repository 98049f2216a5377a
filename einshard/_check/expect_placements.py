"""expect_placements: whether the arrays of a model are placed as its rules say."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Sharding

from .._arrays.place import einshard
from .._errors import EinshardError, plural, public
from .._sharding.describe import describe
from .._sharding.mesh import MeshLike, are_equivalent
from .._text import first_of, format_bytes
from .._trees.paths import leaves_with_paths, path_text
from .._trees.specs import Spec

_MAX_SHOWN = 5


@public
def expect_placements(model: Any, spec: Spec, mesh: MeshLike | None = None) -> None:
    """Raises an error if arrays of a model are not placed as its rules say.

    A checkpoint that was restored without shardings, or a state that was made outside of `jax.jit`,
    is on one device, or replicated, and training runs with it. Moves nothing.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from einshard import EinshardError, Rules, einshard, expect_placements
        >>> n = jax.device_count()
        >>> rules = Rules([('w', 'i o -> i o*'), ('b', 'o -> * o')])
        >>> model = {'w': jnp.ones((4, 8 * n)), 'b': jnp.ones(8 * n)}
        >>> expect_placements(einshard(model, rules), rules)

    Args:
        model: a pytree of arrays, or of shapes with shardings, also of Flax NNX and Equinox.
        spec: how they should be placed, as for `einshard`: `Rules`, an expression, or a pytree.
        mesh: as for `einshard`.

    Raises:
        EinshardError: an array is placed otherwise; the message counts them, says how much more
            a device holds, and lists the first paths. Or `spec` does not fit the model.
    """
    leaves, treedef = jtu.tree_flatten(model)
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_array(x) else x for x in leaves]
    expected = jtu.tree_leaves(einshard(treedef.unflatten(structs), spec, mesh=mesh))
    paths = [path_text(path) for path, _ in leaves_with_paths(model)]
    texts, n_unsharded, more = list[str](), 0, 0
    for path, x, struct in zip(paths, leaves, expected, strict=True):
        if not _is_array(x) or struct.sharding is None:
            continue
        found: Sharding | None = getattr(x, 'sharding', None)
        if found is not None and are_equivalent(found, struct.sharding, len(x.shape)):
            continue
        size = held = prod(x.shape)
        should = prod(struct.sharding.shard_shape(x.shape))
        now = 'in host memory' if isinstance(x, np.ndarray) else 'without a sharding'
        if found is not None:
            held, now = prod(found.shard_shape(x.shape)), f"'{_placement(x, found)}'"
        texts.append(f"{path}: {now}, not '{_placement(x, struct.sharding)}'")
        n_unsharded += held == size > should
        more += (held - should) * x.dtype.itemsize
    if not texts:
        return
    n_arrays, n = sum(map(_is_array, leaves)), len(texts)
    each = f': {format_bytes(more)} more on a device' if more > 0 else ''
    what = 'are not sharded though the rules shard them'
    if n_unsharded < n:
        part = f', {n_unsharded} of which {what}' if n_unsharded else ''
        what = f'are not placed as the rules say{part}'
    if n == 1:
        what = what.replace('are ', 'is ', 1).replace(' them', ' it')
    raise EinshardError(
        f'{n} of {plural(n_arrays, "array")} {what}{each}',
        code='placed-differently',
        facts={
            'arrays': first_of(texts, _MAX_SHOWN),
            'instead': f'einshard(model, rules{", mesh=mesh" * (mesh is not None)}) moves them; or '
            'restore and create them with these shardings',
        },
    )


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _placement(x: Any, sharding: Sharding) -> str:
    return describe(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))
