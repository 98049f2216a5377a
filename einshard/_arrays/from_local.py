"""from_local: builds global arrays from the rows of each process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import ArrayLike

from .._cache import cached
from .._errors import EinshardError, public
from .._notation.layout import terms_of_axis
from .._sharding.context import Context
from .._sharding.leaf_spec import AnySpec, as_leaf_spec
from .._sharding.mesh import AnyMesh, MeshLike, is_partial, mesh_fact, process_count, shards_by_axis
from .._sharding.resolve import resolve
from .._sharding.scopes import current_context
from .._sharding.tracing import is_tracing
from .._trees.paths import leaf_paths, leaf_text
from .._trees.specs import (
    Spec,
    check_registered_pytree,
    leaf_specs,
    leaves_with_own_spec,
    not_an_array,
)
from .device_put import as_host
from .place import check_dtype, einshard, kind_of
from .process_agreement import PlannedArray, check_has_device, check_same_plan, group_processes

T = TypeVar('T')


@overload
def from_local(  # type: ignore[reportOverlappingOverload]
    batch: ArrayLike, spec: Spec, *, mesh: MeshLike | None = None, check: bool = True
) -> jax.Array: ...
@overload
def from_local(batch: T, spec: Spec, *, mesh: MeshLike | None = None, check: bool = True) -> T: ...
@public
def from_local(batch: Any, spec: Spec, *, mesh: MeshLike | None = None, check: bool = True) -> Any:
    """Builds global arrays from the rows that each process has loaded.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import from_local
        >>> rows = np.ones((2 * jax.local_device_count(), 4))  # the rows of this process
        >>> batch = from_local(rows, 'batch d -> batch* d')
        >>> batch.shape == (2 * jax.device_count(), 4)
        True

    `einshard` takes the full array in every process; `from_local` takes only the rows that the
    devices of this process will store. For 'batch d -> batch* d' on 4 hosts with 2 devices each, 32
    rows per process make a batch of 128, with 16 rows per device. An axis that is replicated, or
    sharded only within each process, keeps its local size. Processes with replicas of the same rows
    must pass the same values, which is not checked.

    All processes of the mesh must call `from_local`. They first compare shapes, dtypes, paths and
    expressions, because programs hang if these differ. The check waits for pending computations.
    With two processes on one machine it takes 3 ms; building an array takes 0.2 ms.

    Args:
        batch: a pytree of local arrays of shape (local rows, ...). A `jax.ShapeDtypeStruct` is
            returned with the global shape and the sharding. Leaves that are not arrays are returned
            as they are, or are an error, as in `einshard`.
        spec: the spec of the global arrays, as for `einshard`. Spec functions and `Rules` get the
            local arrays.
        mesh: a mesh, or a sequence of devices, as for `make_sharding`.
        check: whether the processes first compare shapes, dtypes, paths and expressions. Use False
            if all processes always have the same number of rows, as with a data loader that drops
            the last incomplete batch.

    Returns:
        A pytree of global arrays of shape (all rows, ...). In one process, the result of
        `einshard`.

    Raises:
        EinshardError: an expression is invalid or does not fit, as for `einshard`; the local size
            of an axis is not divisible by the number of local shards; the arrays of the processes
            do not match, which raises in every process; or an array is already global, or traced.
    """
    leaves, treedef = jtu.tree_flatten(batch)
    if is_tracing() or any(isinstance(leaf, Tracer) for leaf in leaves):
        raise EinshardError(
            'from_local cannot be traced: it needs the data of each process',
            code='tracing',
            facts={'instead': 'call it outside jit; in jit, einshard constrains traced values'},
        )
    context = current_context(mesh)
    if process_count() < 2:
        return einshard(batch, spec, mesh=mesh)
    device_mesh = _device_mesh(context.lowering_mesh)
    if not device_mesh.is_multi_process:
        return einshard(batch, spec, mesh=mesh)
    # 1. Plan the global arrays. Keep the first error: raising it would hang other processes.
    arrays: dict[int, tuple[Any, tuple[int, ...], NamedSharding]] = {}  # by leaf index
    planned: list[PlannedArray] = []
    specs: Sequence[AnySpec | None] = [None] * len(leaves)
    own, first_error = set[int](), None
    try:
        specs = leaf_specs(batch, leaves, spec, context.mesh)
        own = leaves_with_own_spec(batch, spec)
    except Exception as error:  # callables in specs may raise anything
        planned.append((_error_sentence(error), ''))
        first_error = error
    for i, (path, leaf, leaf_spec) in enumerate(zip(leaf_paths(batch), leaves, specs, strict=True)):
        if leaf_spec is None:
            continue
        array, label, sentence = leaf, 'array', ''
        try:
            if kind_of(type(leaf)) == 'other':
                check_registered_pytree(leaf)
                if i not in own:
                    continue
                label = 'got'
                raise not_an_array(path, leaf)
            if isinstance(leaf, jax.Ref):
                raise EinshardError(
                    'from_local takes arrays, not a jax.Ref',
                    code='array',
                    facts={'instead': 'pass an array x: jax.new_ref(from_local(x, ...))'},
                )
            array = leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else as_host(leaf)
            arrays[i] = array, *_global_array(array, leaf_spec, context)
        except Exception as error:
            sentence = f': {_error_sentence(error)}'
            if isinstance(error, EinshardError):
                error = error.about(**{label: leaf_text(path, array)})
            first_error = first_error or error
        planned.append((leaf_text(path, array) + sentence, str(leaf_spec)))
    # 2. Compare the plans, on every call: if only new shapes were checked, a process with a new
    #    shape would wait forever for a process with an old one.
    if check:
        try:
            check_same_plan(planned, device_mesh)
        except EinshardError as error:
            raise error from first_error
    if first_error is not None:
        raise first_error
    # 3. Build the arrays.
    for i, (array, global_shape, sharding) in arrays.items():
        if isinstance(array, jax.ShapeDtypeStruct):
            leaves[i] = array.update(shape=global_shape, sharding=sharding)
            continue
        if isinstance(array, jax.Array) and array.sharding.memory_kind != 'device':
            array = as_host(array)  # JAX cannot slice an array in host memory
        leaves[i] = jax.make_array_from_process_local_data(sharding, array, global_shape)
    return jtu.tree_unflatten(treedef, leaves)


@cached
def _device_mesh(mesh: AnyMesh) -> Mesh:
    if isinstance(mesh, AbstractMesh):
        raise EinshardError(
            'from_local needs a mesh of devices, but this mesh is abstract',
            code='mesh',
            facts={'mesh': mesh_fact(mesh)},
        )
    check_has_device(mesh)
    return mesh


def _global_array(
    array: Any, spec: AnySpec, context: Context
) -> tuple[tuple[int, ...], NamedSharding]:
    """Returns the global shape and the sharding of a local array."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise EinshardError(
            'the array is already global: its shards are on several processes',
            code='processes',
            expression=str(spec),
            facts={'instead': 'use einshard(x, ...) to reshard it'},
        )
    # the global shape is unknown here; sizes of 0 are divisible by any count
    placement = resolve(spec, (0,) * array.ndim, context)
    if is_partial(placement.sharding):
        raise placement.expression.error(
            'from_local cannot build arrays with unreduced or reduced mesh axes',
            [term for term in placement.expression.right if term.sign],
            code='partial-sum',
            instead='einshard(x, ...) on the global array',
        )
    if isinstance(array, np.ndarray):
        check_dtype(placement.expression, array.dtype)
    sizes = list(array.shape)
    counts = shards_by_axis(placement.sharding)
    shards = _shards_by_process(placement.sharding, array.ndim)
    for axis, by_process in shards.items():
        n_local, shard_sets = len(by_process[jax.process_index()]), set(by_process.values())
        if len(shard_sets) == 1:
            continue  # every process has the full axis
        size, n_shards = sizes[axis], counts[axis]
        name, terms = terms_of_axis(placement.expression, axis, array.ndim)
        # the sets must have the same size and must not overlap
        is_even = all(len(shard_set) == n_local for shard_set in shard_sets)
        if not is_even or len(shard_sets) * n_local != n_shards:
            numbers = {p: ', '.join(map(str, sorted(local))) for p, local in by_process.items()}
            raise placement.expression.error(
                f"axis '{name}' is split unevenly across processes, so its global size is unknown",
                terms,
                code='processes',
                **{p: f'shards {text}' for p, text in group_processes(numbers).items()},
                instead='use jax.make_array_from_callback',
            )
        if size % n_local:
            leaf_spec = as_leaf_spec(spec)
            rules = context.axis_rules if leaf_spec.expression.short else ()
            replicates = leaf_spec.on_indivisible == 'replicate' or any(
                rule.replicates_indivisible for rule in rules if rule.name == name
            )
            note = "indivisible='replicate' is ignored: processes have different rows"
            raise placement.expression.error(
                f"axis '{name}' (local size {size}) is not divisible by {n_local}, "
                'the number of local shards',
                terms,
                code='not-divisible',
                process=jax.process_index(),
                global_size=f'{size * n_shards // n_local} in {n_shards} shards',
                works_with=f'multiples of {n_local}',
                **({'note': note} if replicates else {}),
            )
        sizes[axis] *= len(shard_sets)
    global_shape = tuple(sizes)
    return global_shape, resolve(spec, global_shape, context).sharding


@cached
def _shards_by_process(sharding: NamedSharding, ndim: int) -> dict[int, dict[int, frozenset[int]]]:
    """Returns {sharded axis: {process: indices of the shards in the process}}."""
    counts = shards_by_axis(sharding)
    # with one element per shard, the start of a slice is the index of the shard
    indices = sharding.devices_indices_map(tuple(counts.get(axis, 1) for axis in range(ndim)))
    shards: dict[int, dict[int, frozenset[int]]] = {axis: {} for axis in counts}
    for device, index in indices.items():
        process = device.process_index
        for axis in counts:
            so_far = shards[axis].get(process, frozenset[int]())
            shards[axis][process] = so_far | {index[axis].start}
    return shards


def _error_sentence(error: Exception) -> str:
    is_ours = isinstance(error, EinshardError)
    return error.sentence if is_ours else f'{type(error).__name__}: {error}'
