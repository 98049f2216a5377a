"""expect_placements: whether the arrays of a model are placed as its rules say."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Sharding

from .._arrays.place import einshard
from .._errors import EinshardError, plural, public
from .._sharding.describe import describe
from .._sharding.mesh import MeshLike
from .._text import first_of, format_bytes
from .._trees.paths import leaves_with_paths, path_text
from .._trees.specs import Spec

_MAX_SHOWN = 5


class _Misplaced(NamedTuple):
    """An array that is placed otherwise than expected.

    Attributes:
        text: what is there, and what is expected.
        is_unsharded: whether a device holds all of it, though the spec shards it.
        more: the bytes that a device holds in addition.
    """

    text: str
    is_unsharded: bool
    more: int


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
    found = [
        misplaced
        for path, x, struct in zip(paths, leaves, expected, strict=True)
        if _is_array(x) and (misplaced := _compare(path, x, struct.sharding)) is not None
    ]
    if not found:
        return
    n_arrays, n = sum(map(_is_array, leaves)), len(found)
    unsharded = [each for each in found if each.is_unsharded]
    more = sum(each.more for each in found)
    each = f': {format_bytes(more)} more on a device' if more > 0 else ''
    what = 'are not sharded though the rules shard them'
    if len(unsharded) < n:
        part = f', {len(unsharded)} of which {what}' if unsharded else ''
        what = f'are not placed as the rules say{part}'
    if n == 1:
        what = what.replace('are ', 'is ', 1).replace(' them', ' it')
    raise EinshardError(
        f'{n} of {plural(n_arrays, "array")} {what}{each}',
        code='placed-differently',
        facts={
            'arrays': first_of([each.text for each in found], _MAX_SHOWN),
            'instead': 'einshard(model, rules) moves them; or restore and create them with these '
            'shardings',
        },
    )


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _compare(path: str, x: Any, expected: Sharding | None) -> _Misplaced | None:
    """Compares the placement of an array; None if it is as expected, or nothing is expected."""
    if expected is None:
        return None
    found: Sharding | None = getattr(x, 'sharding', None)
    if found is not None and found.is_equivalent_to(expected, x.ndim):
        return None
    held = prod(x.shape if found is None else found.shard_shape(x.shape))
    should = prod(expected.shard_shape(x.shape))
    now = 'in host memory' if found is None else f"'{_placement(x, found)}'"
    text = f"{path}: {now}, not '{_placement(x, expected)}'"
    is_unsharded = held == prod(x.shape) > should
    return _Misplaced(text, is_unsharded, (held - should) * x.dtype.itemsize)


def _placement(x: Any, sharding: Sharding) -> str:
    return describe(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))
