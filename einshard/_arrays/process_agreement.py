"""Checks that all processes build the same arrays."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._cache import cached
from .._errors import EinshardError
from .._sharding.mesh import AnyMesh, mesh_fact, process_count

# an array that a process is about to build: ("float32[6,8], leaf 'w'", 'a b -> a* b')
PlannedArray = tuple[str, str]

MAX_COMPARED = 2**20  # arrays
MAX_SHOWN_BYTES = 1024  # of the text about each array in an error


_SAME_PLAN = {'expected': 'the same shapes, dtypes, paths and expressions in every process'}
_SAME_CONTENTS = {
    'expected': 'the same full array in every process',
    'for local rows': 'from_local(x, ...) joins the rows of all processes',
}


def check_same_plan(
    arrays: Sequence[PlannedArray], mesh: Mesh, expected: Mapping[str, str] = _SAME_PLAN
) -> None:
    """Raises the same error in every process of `mesh` if the processes plan different arrays.

    Also if their meshes of these devices differ. `expected` are facts for the error about arrays.
    """
    of_mesh = _mesh_records(mesh)
    records = [*of_mesh, *('\0'.join(array) for array in arrays)]

    def differ(n: int) -> bool:
        digest = hashlib.blake2b('\n'.join(records[:n]).encode(), digest_size=16)
        return len(set(all_gather_bytes(digest.digest(), mesh).values())) > 1

    if not differ(MAX_COMPARED):
        return
    # all processes see the same digests, so their binary searches take the same steps
    first = bisect.bisect_left(range(MAX_COMPARED), True, key=differ) - 1
    text = records[first] if first < len(records) else 'no more arrays'
    shown = all_gather_bytes(text.encode()[:MAX_SHOWN_BYTES].ljust(MAX_SHOWN_BYTES, b'\0'), mesh)
    texts = {p: row.rstrip(b'\0').decode(errors='ignore') for p, row in shown.items()}
    if first < len(of_mesh):
        raise EinshardError(
            'the processes have different meshes of the same devices',
            code='processes',
            facts={
                **group_processes(texts),
                'expected': 'the same axes, and the same order of devices, in every process',
            },
        )
    # a description of each process's array (or of the lack of one), and the expression, which is
    # missing if there is no array or the description is long
    planned = {p: text.split('\0') for p, text in texts.items()}
    expressions = {expression for _, *rest in planned.values() for expression in rest}
    if len(expressions) == 1:
        texts = {p: array for p, (array, *_) in planned.items()}
    else:
        texts = {p: ' as '.join([array, *map(repr, rest)]) for p, (array, *rest) in planned.items()}
    raise EinshardError(
        'the processes are about to build different arrays',
        code='processes',
        expression=min(expressions) if len(expressions) == 1 else None,
        facts={**group_processes(texts), **expected},
    )


def check_same_contents(arrays: Sequence[tuple[PlannedArray, Any]], mesh: Mesh) -> None:
    """Like `check_same_plan`, but also compares digests of the array values.

    An EinshardError in place of the values tells the other processes that this one failed.
    """
    records: list[PlannedArray] = []
    for (text, expression), x in arrays:
        if isinstance(x, EinshardError):
            records.append((f'{text}: {x.sentence}', expression))
            continue
        if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        digest = hashlib.blake2b(data.data, digest_size=4).hexdigest()
        records.append((f'{text}, contents {digest}', expression))
    check_same_plan(records, mesh, _SAME_CONTENTS)


def mesh_to_compare_on(x: Any, mesh: AnyMesh) -> Mesh | None:
    """Returns `mesh` if several of its processes have their own copy of `x`, and else None."""
    if process_count() < 2 or isinstance(mesh, AbstractMesh) or not mesh.is_multi_process:
        return None
    if not mesh.local_devices or isinstance(x, Tracer | jax.ShapeDtypeStruct | jax.Ref):
        return None
    return None if isinstance(x, jax.Array) and not x.is_fully_addressable else mesh


def all_gather_bytes(data: bytes, mesh: Mesh) -> dict[int, bytes]:
    """Returns {process: data}. All processes must pass data of the same length."""
    row_mesh = _mesh_of_rows(mesh)
    row = np.frombuffer(data, np.uint8)[None]
    by_row = NamedSharding(row_mesh, PartitionSpec('row'))
    shape = row_mesh.shape['row'], len(data)
    sharded = jax.make_array_from_callback(shape, by_row, lambda _: row)
    # This takes 2.1 ms on 8 simulated devices in 2 processes. multihost_utils.process_allgather
    # takes 2.6 ms and waits for processes outside the mesh. One device per process would take
    # 0.4 ms, but the TPU compiler aborts with one device per host of a v5e:4x4.
    with jax.set_mesh(row_mesh):  # JAX refuses it under a mesh of another order of devices
        replicated = jax.device_put(sharded, NamedSharding(row_mesh, PartitionSpec()))
    received = np.asarray(replicated.addressable_data(0))
    processes = [devices[0].process_index for devices in row_mesh.devices]
    return {process: bytes(row) for process, row in zip(processes, received, strict=True)}


@cached
def _mesh_records(mesh: Mesh) -> Sequence[str]:
    """Describes a mesh: its axes, and then each device, so that an error can show the first one."""
    names = [*map(str, mesh.axis_names)]
    devices = zip(np.ndindex(mesh.devices.shape), mesh.devices.flat, strict=True)
    return [
        mesh_fact(mesh),
        *(
            f'device {device.id} at {", ".join(map("{}={}".format, names, at))}'
            for at, device in devices
        ),
    ]


@cached
def _mesh_of_rows(mesh: Mesh) -> Mesh:
    """Reshapes a mesh into rows, as long as possible, each with devices of one process only.

    The same for all meshes of the same devices: processes compare meshes on it.
    """
    devices = sorted(mesh.devices.flat, key=lambda device: (device.process_index, device.id))
    counts = Counter(device.process_index for device in devices)
    grid = np.array(devices).reshape(-1, math.gcd(*counts.values()))
    return Mesh(grid, ('row', 'column'), axis_types=(AxisType.Auto,) * 2)


def check_has_device(mesh: Mesh) -> None:
    """Raises if this process has no device in the mesh."""
    if not mesh.local_devices:
        processes = sorted({device.process_index for device in mesh.devices.flat})
        raise EinshardError(
            f'process {jax.process_index()} has no device in the mesh',
            code='processes',
            facts={'mesh': mesh_fact(mesh), 'devices are in': process_text(processes)},
        )


def group_processes(texts: Mapping[int, str]) -> dict[str, str]:
    """Groups {0: 'a', 1: 'a', 2: 'b'} as {'processes 0, 1': 'a', 'process 2': 'b'}."""
    groups: dict[str, list[int]] = {}
    for process, text in sorted(texts.items()):
        groups.setdefault(text, []).append(process)
    return {process_text(group): text for text, group in itertools.islice(groups.items(), 8)}


def process_text(processes: Sequence[int]) -> str:
    """Formats [3] as 'process 3', and [0, 1, 2, 3, 4] as 'processes 0, 1, 2, 3, ...'."""
    few = ', '.join(map(str, processes[:4])) + (', ...' if len(processes) > 4 else '')
    return f'process {few}' if len(processes) == 1 else f'processes {few}'
