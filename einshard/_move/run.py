"""Moves arrays: groups of them with one program, or piece by piece to other devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._arrays.device_put import put_array, reduced_sharding, without_partial_axes
from .._cache import cached
from .._explain.partition_worker import move_program
from .._sharding.mesh import Device, device_mesh, is_partial, partition_spec, spec_axes
from .route import Found, Route
from .transfer import Piece, Transfer, is_plain, plan_transfer
from .tree import Leaf


@dataclass(eq=False)
class Job:
    """An array that moves. Several leaves may be the same array.

    Attributes:
        source, target: without partial sums and in device memory. What else there is to do, is done
            before and after.
        found: None if the array is cut into pieces as it is.
    """

    leaves: list[Leaf]
    shape: tuple[int, ...]
    dtype: Any
    source: Any
    target: NamedSharding
    transfer: Transfer
    found: Found | None = None

    @property
    def route(self) -> Route | None:
        return None if self.found is None else self.found.best

    @property
    def array(self) -> Any:
        return self.leaves[0].array

    @functools.cached_property
    def growth(self) -> int:
        """Bytes on a device while it moves, beyond the source."""
        is_copied = self.array.sharding != self.source  # from host memory, or a sum
        new, old = self.transfer.new_bytes, self.transfer.old_bytes
        temporaries = self.route.temporaries if self.route is not None else new
        return new + temporaries + old * is_copied


@cached
def normal_move(
    shape: tuple[int, ...], dtype: Any, source: Any, target: NamedSharding
) -> tuple[tuple[int, ...], Any, Any, NamedSharding, Transfer]:
    """Returns what moves, which is numbers in device memory: shape, dtype, shardings, and how."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        numbers = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = numbers.shape, numbers.dtype
    if is_partial(target):
        target = NamedSharding(target.mesh, partition_spec(spec_axes(target.spec)))
    if isinstance(source, NamedSharding) and is_partial(source):
        source = reduced_sharding(source, target)
    source, target = in_device_memory(source), in_device_memory(target)
    return shape, dtype, source, target, plan_transfer(shape, dtype, source, target)


def in_device_memory(sharding: Any) -> Any:
    if sharding.memory_kind in (None, 'device'):
        return sharding
    return sharding.with_memory_kind('device')


# --- one device set ------------------------------------------------------------------------------


def run_program(jobs: Sequence[Job], donate: bool) -> list[Any]:
    """Moves arrays on the same devices with one program."""
    steps: list[Any] = []
    arrays: list[Any] = []
    for job in jobs:
        move, route = job.transfer.move, job.route
        assert move is not None
        assert route is not None
        stages = (move.before, *route.through, move.after)
        is_same_order = job.transfer.is_same and job.transfer.devices == job.transfer.target_devices
        end = job.target if is_same_order and is_plain(job.target) else None
        steps.append((job.transfer.devices, stages, move.targets, end, _as_bits(job)))
    # JAX warns about donated arrays that have the size of no result
    sizes = ((job.transfer.old_bytes, job.transfer.new_bytes) for job in jobs)
    donated = (i for i, (old, new) in enumerate(sizes) if donate and old == new)
    program, firsts, mesh = _program(tuple(steps), tuple(donated))
    for job, first in zip(jobs, firsts, strict=True):
        x, _ = _prepared(job, donate)
        arrays.append(x if is_plain(x.sharding) else relabelled(x, job.shape, first))
    with jax.set_mesh(mesh):  # on the mesh of the context, Explicit axes may be refused
        return program(*arrays)


def _as_bits(job: Job) -> str:
    """Returns the dtype in which CPUs move a narrow float: as bf16 is sent as f32, NaNs change."""
    is_float = jax.numpy.issubdtype(job.dtype, jax.numpy.floating)
    if not is_float or job.transfer.devices[0].platform != 'cpu':
        return ''
    bits = jax.numpy.finfo(job.dtype).bits
    return f'uint{bits}' if bits in (8, 16) else ''


@cached
def _program(
    steps: tuple[Any, ...], donated: tuple[int, ...]
) -> tuple[Callable[..., Any], list[Any], Any]:
    """Returns a program that moves arrays, the shardings of its arguments, and its mesh."""
    moves = [
        move_program(devices, stages, targets, as_bits)
        for devices, stages, targets, _, as_bits in steps
    ]

    def move_group(*arrays: Any) -> list[Any]:
        return [move(x) for (move, _, _), x in zip(moves, arrays, strict=True)]

    ends = [end or last for (_, _, last), (*_, end, _) in zip(moves, steps, strict=True)]
    # JAX warns if the result has another shape, as that of shards that are sent elsewhere
    kept = [i for i, step in enumerate(steps) if step[2]]
    donated = tuple(i for i in donated if i not in kept)
    jitted = jax.jit(move_group, out_shardings=ends, donate_argnums=donated)
    firsts = [first for _, first, _ in moves]
    return jitted, firsts, firsts[0].mesh


def _prepared(job: Job, donate: bool) -> tuple[Any, bool]:
    """Returns the array in device memory, without partial sums, and keys as numbers.

    Also returns whether it is a copy: then, the array of the user is deleted already if `donate`.
    """
    x = job.array
    if x.sharding.memory_kind not in (None, 'device'):
        x = jax.device_put(x, in_device_memory(x.sharding))
    if is_partial(x.sharding):
        x = without_partial_axes(x, job.target)
    is_copy = x is not job.array
    if is_copy and donate:
        jax.block_until_ready(x)
        job.array.delete()
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return x, is_copy


def relabelled(x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Returns an array of the same shards, which are not copied, with another sharding."""
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def finished(job: Job, x: Any) -> Any:
    """Returns the result of a job from the array that a program or `send_pieces` returned."""
    leaf = job.leaves[0]
    if x.sharding != job.target:
        x = relabelled(x, job.shape, job.target)
    if x.dtype != leaf.array.dtype:
        mesh: Any = job.target.mesh
        with jax.set_mesh(mesh):
            x = jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf.array))
    if is_partial(leaf.sharding):
        x = put_array(x, leaf.sharding)
    if x.sharding != leaf.sharding and leaf.sharding.memory_kind != x.sharding.memory_kind:
        x = jax.device_put(x, leaf.sharding)
    return x


# --- other devices -------------------------------------------------------------------------------


def send_pieces(job: Job, donate: bool) -> Any:
    """Moves one array to other devices: each piece by itself, and none through the host."""
    move = job.transfer.move
    # else, the shards on the source devices are the pieces already
    is_moved = move is None or move.before != move.after
    if job.route is not None and is_moved:
        [x], is_own = run_program([job], donate), True
    else:
        x, is_own = _prepared(job, donate)
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    sources = [shards[device] for device in job.transfer.devices]
    placed: list[Any] = []
    pairs = zip(job.transfer.target_devices, job.transfer.pieces, strict=True)
    for device, (pieces, counts) in pairs:
        parts = [_piece(sources[piece.source], piece, device, is_own) for piece in pieces]
        with _on(device):
            placed.append(_joined(parts, counts))
    jax.block_until_ready(placed)
    return jax.make_array_from_single_device_arrays(job.shape, job.target, placed)


def _piece(shard: Any, piece: Piece, device: Device, is_own: bool) -> Any:
    starts, stops = ([getattr(s, end) for s in piece.inside] for end in ('start', 'stop'))
    if tuple(stops) != shard.shape or any(starts):
        with _on(*shard.devices()):
            shard = jax.lax.slice(shard, starts, stops)
    elif {device} == shard.devices() and not is_own:
        with _on(device):
            return jax.numpy.copy(shard)  # `device_put` would share it with the source
    return jax.device_put(shard, device)


def _on(device: Device) -> Any:
    """Enters a mesh of one device: JAX refuses its arrays if the mesh in context has others."""
    return jax.set_mesh(device_mesh([device]))


def _joined(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    """Joins parts in row-major order, along the last axis first."""
    for axis in reversed(range(len(counts))):
        n = counts[axis]
        if n > 1:
            rows = (parts[i : i + n] for i in range(0, len(parts), n))
            parts = [jax.numpy.concatenate(row, axis) for row in rows]
    [whole] = parts
    return whole
