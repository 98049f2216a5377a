"""`move`: moves sharded arrays to other placements by the cheapest route."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from .._arrays.place import einshard
from .._arrays.process_agreement import process_text
from .._errors import EinshardError, public
from .._program.hlo.memory import parse_bytes
from .._sharding.axis_rules import check_flag
from .._sharding.mesh import Device, MeshLike, device_mesh, partition_text, process_count
from .._text import array_text, first_line, first_of, format_bytes
from .._trees.specs import Spec
from .agreement import agree_on_routes, check_same_moves, least_of_all
from .route import find_route
from .run import Job, finished, normal_move, run_program, send_pieces
from .transfer import by_pieces
from .tree import Leaf, Tree, read_tree

T = TypeVar('T')
NO_STATISTICS = 2**30  # bytes; devices such as CPUs do not say how much memory they have
_PARTS = 8  # groups of a large tree: more need less memory, and each takes some 100 us
_SMALL = 4 * 2**20  # bytes on a device, which are not worth a group


class MoveStopped(EinshardError):
    """An error in the middle of a move. `moved` maps paths to the arrays that have moved."""

    code = 'move'
    moved: Mapping[str, Any] = MappingProxyType({})


@public
def move(
    tree: T,
    spec: Spec,
    mesh: MeshLike | None = None,
    donate: bool = True,
    memory: int | str | None = None,
) -> T:
    """Moves sharded arrays to other placements, through intermediate ones where that costs less.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import einshard, move
        >>> n = jax.device_count()
        >>> w = einshard(np.ones((4 * n, 4 * n), np.float32), 'x y -> x* y')
        >>> w = move(w, 'x y -> x y*')
        >>> w.sharding.shard_shape(w.shape) == (4 * n, 4)
        True

    Values stay equal, bit by bit. What is placed already is returned as it is. Before anything is
    compiled in this process, each distinct move is compiled in another one, for simulated devices:
    directly, and through up to two placements on the way. The route that sends the fewest bytes
    wins. Routes are remembered.

    On the same devices, groups of arrays move with one program each. To other devices, arrays move
    one by one: first on their devices, to the pieces that the other devices are to have, and then
    each piece to its device. Nothing goes through the host.

    Args:
        tree: arrays that are sharded already. NumPy arrays and numbers are placed, as by
            `einshard`, and None and other leaves are kept.
        spec: where the arrays go: what `einshard` takes, such as an expression, a `NamedSharding`,
            or a pytree of these that is a prefix of `tree`.
        mesh: a mesh, or a sequence of devices, as for `make_sharding`.
        donate: whether the arrays of `tree` are deleted as soon as they have moved.
        memory: bytes on a device that the move may need at a time, beyond the arrays that are
            there now, such as '2 GiB'. Results that are larger than their sources add to it.
            Default: half of what is free, or 1 GiB if the devices do not say what is.

    Returns:
        `tree` with the new placements.

    Raises:
        EinshardError: a spec does not fit its array or the mesh, an array was deleted or is traced,
            or an array needs more than `memory`. Nothing has moved then. If JAX raises in the
            middle, the error has the arrays that have moved as `error.moved`, by path.
    """
    check_flag('donate', donate)
    limit = None if memory is None else parse_bytes(memory, 'memory=')
    jobs, host, found = _read(tree, spec, mesh)
    if limit is None:
        limit = _default_limit([job.array.sharding for job in jobs])
    shared = _shared_mesh(found.leaves)
    if shared is not None:
        limit = least_of_all(limit, shared)
    _check_memory(found, jobs, limit)
    moved, kept = dict[int, Any](), _used_again(found, jobs)
    spanning = [job for job in jobs if not job.array.is_fully_addressable]
    local = [job for job in jobs if job.array.is_fully_addressable]
    try:
        # arrays of several processes first: all of them must form the same groups
        for part in (spanning, local):
            for group in make_groups(part, limit, donate, kept):
                _run(group, moved, donate, kept)
        if host:
            placed = einshard([leaf.array for leaf in host], [leaf.sharding for leaf in host])
            moved.update(zip((leaf.number for leaf in host), placed, strict=True))
    except Exception as error:
        raise _stopped(found, jobs, moved, error) from error
    leaves = [moved.get(i, leaf) for i, leaf in enumerate(found.leaves)]
    return jax.tree_util.tree_unflatten(found.treedef, leaves)


def _read(tree: Any, spec: Spec, mesh: MeshLike | None) -> tuple[list[Job], list[Leaf], Tree]:
    """Returns the arrays to move, with their routes, and those to place from the host."""
    shared = _shared_mesh(jax.tree_util.tree_leaves(tree))
    try:
        found = read_tree(tree, spec, mesh)
        host = [*found.from_host]
        moving: list[Leaf] = []
        for leaf in found.moving:
            _check_processes(leaf)
            is_local = leaf.array.is_fully_addressable and not leaf.sharding.is_fully_addressable
            (host if is_local else moving).append(leaf)  # each process has its own copy
        jobs = plan_jobs(moving)
    except EinshardError as error:
        if shared is not None:  # without this, the other processes would wait
            check_same_moves([(error.sentence, '')], shared)
        raise
    spanning = [job for job in jobs if not job.array.is_fully_addressable]
    if shared is not None:
        check_same_moves([*map(_text_of, spanning)], shared)
        moves = dict.fromkeys(job.transfer.move for job in spanning if job.transfer.move)
        routes = dict(zip(moves, agree_on_routes([*moves], shared), strict=True))
        for job in spanning:
            job.found = job.transfer.move and routes[job.transfer.move]
            if job.route is None:  # pieces cannot be sent to devices of other processes
                raise EinshardError(
                    f'XLA compiles no route by which {array_text(job.array)} can move',
                    code='does-not-compile',
                    facts={
                        'from': partition_text(job.source.spec),
                        'to': partition_text(job.target.spec),
                    },
                )
    for job in jobs:
        if job.found is None:
            add_route(job)
    return jobs, host, found


def plan_jobs(moving: Sequence[Leaf]) -> list[Job]:
    """Plans the moves, without routes. Leaves that are one array move once."""
    jobs = dict[tuple[int, Any], Job]()
    for leaf in moving:
        key = id(leaf.array), leaf.sharding
        if key in jobs:
            jobs[key].leaves.append(leaf)
            continue
        x = leaf.array
        jobs[key] = Job([leaf], *normal_move(x.shape, x.dtype, x.sharding, leaf.sharding))
    return [*jobs.values()]


def add_route(job: Job) -> None:
    """Finds the route of a move. If none compiles, plans to move it piece by piece."""
    if job.transfer.move is not None:
        job.found = find_route(job.transfer.move)
        if job.found.best is None:
            job.found = None
            job.transfer = by_pieces(job.shape, job.dtype, job.source, job.target)


def _text_of(job: Job) -> tuple[str, str]:
    source, target = (partition_text(s.spec) for s in (job.source, job.leaves[0].sharding))
    return f'{array_text(job.array)}, leaf {job.leaves[0].number}, from {source}', target


def _shared_mesh(leaves: Sequence[Any]) -> Mesh | None:
    """Returns a mesh of all devices of arrays that several processes share, if there are any."""
    if process_count() < 2:
        return None
    devices = {
        device: None
        for leaf in leaves
        if isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and not leaf.is_fully_addressable
        for device in leaf.sharding.device_set
    }
    return device_mesh([*devices]) if devices else None


def _check_processes(leaf: Leaf) -> None:
    source, target = leaf.array.sharding, leaf.sharding
    if source.device_set == target.device_set or source.is_fully_addressable:
        return
    here = sorted({device.process_index for device in source.device_set})
    there = sorted({device.process_index for device in target.device_set})
    raise EinshardError(
        f'{array_text(leaf.array)} cannot be moved between processes to other devices',
        code='processes',
        facts={
            'from': f'{len(source.device_set)} devices in {process_text(here)}',
            'to': f'{len(target.device_set)} devices in {process_text(there)}',
            "JAX's options": 'a backend with cross-host transfers, or the option '
            'jax_cross_host_transfer_socket_address; then jax.device_put moves it',
        },
    )


# --- memory --------------------------------------------------------------------------------------


def _default_limit(shardings: Sequence[Any]) -> int:
    devices: set[Device] = {
        device for sharding in shardings for device in sharding.addressable_devices
    }
    free: list[int] = []
    for device in devices:
        stats = device.memory_stats() or {}
        if 'bytes_limit' in stats:
            free.append(stats['bytes_limit'] - stats.get('bytes_in_use', 0))
    return min(free) // 2 if free else NO_STATISTICS


def _check_memory(found: Tree, jobs: Sequence[Job], limit: int) -> None:
    large = max(jobs, key=lambda job: job.growth, default=None)
    if large is not None and large.growth > limit:
        raise EinshardError(
            f'moving {array_text(large.array)} needs {format_bytes(large.growth)} on a device, '
            f'more than the limit of {format_bytes(limit)}',
            code='memory',
            facts={
                'array': repr(found.path(large.leaves[0].number)),
                'its new shards': format_bytes(large.transfer.new_bytes),
                'instead': f'memory={large.growth}, if the devices have that much',
            },
        )


def _used_again(found: Tree, jobs: Sequence[Job]) -> set[int]:
    """Returns the ids of arrays that must not be donated: another leaf still needs them."""
    uses = Counter(id(leaf) for leaf in found.leaves)
    moves = Counter({id(job.array): len(job.leaves) for job in jobs})
    targets = Counter(id(job.array) for job in jobs)
    return {i for i in moves if uses[i] > moves[i] or targets[i] > 1}


def make_groups(
    jobs: Sequence[Job], limit: int, donate: bool, kept: set[int]
) -> Iterator[list[Job]]:
    """Yields arrays that move together, such that they need no more memory than there is.

    Those whose shards become smaller come first, since they make room for the others.
    """
    total = sum(job.growth for job in jobs)
    limit_of_group = min(limit, max(_SMALL, total // _PARTS))
    group: list[Job] = []
    key: Any = None  # of the group
    grown = used = 0  # by results so far, and by this group
    for job in sorted(jobs, key=lambda job: job.transfer.new_bytes - job.transfer.old_bytes):
        # arrays with equal keys can move with one program; none has the key of one that is cut
        transfer, own = job.transfer, id(job)
        if transfer.is_same and transfer.move is not None:
            own = transfer.devices, id(job.array) in kept
        if group and (own != key or used + job.growth > min(limit_of_group, limit - grown)):
            yield group
            grown += sum(j.transfer.new_bytes - j.transfer.old_bytes * donate for j in group)
            group, used = [], 0
        key = own
        group.append(job)
        used += job.growth
    if group:
        yield group


# --- moving --------------------------------------------------------------------------------------


def _run(group: Sequence[Job], moved: dict[int, Any], donate: bool, kept: set[int]) -> None:
    """Moves a group of arrays, waits for them, and deletes the sources."""
    donate = donate and id(group[0].array) not in kept
    if group[0].transfer.is_same:
        results = run_program(group, donate)
    else:
        results = [send_pieces(job, donate) for job in group]
    results = [finished(job, x) for job, x in zip(group, results, strict=True)]
    jax.block_until_ready(results)
    for job, result in zip(group, results, strict=True):
        # XLA keeps what it donates if no result has its size
        if donate and not job.array.is_deleted():
            job.array.delete()
        moved.update((leaf.number, result) for leaf in job.leaves)


def _stopped(found: Tree, jobs: Sequence[Job], moved: dict[int, Any], error: Exception) -> Any:
    paths = {found.path(i): x for i, x in moved.items()}
    lost = [
        found.path(leaf.number)
        for job in jobs
        for leaf in job.leaves
        if leaf.number not in moved and job.array.is_deleted()
    ]
    stopped = MoveStopped(
        f'the move stopped after {len(moved)} of {sum(len(job.leaves) for job in jobs)} arrays',
        facts={
            'JAX says': first_line(error),
            'error.moved has': first_of([*map(repr, paths)], 8) or 'none',
            **({'lost': first_of([*map(repr, lost)], 8)} if lost else {}),
        },
    )
    stopped.moved = paths
    return stopped
