"""Compiles exported programs for simulated CPU devices, in a separate process without einshard.

JAX fixes the number of simulated devices when it starts its backend, so the user's process cannot
simulate as many as the target has. The worker reads pickled requests from standard input. Each is a
dict with the arguments of `_lower` or `_lower_move`. For each request, the worker writes a pickled
response to standard output: the result of `_compile`, or the error as text.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

# a placement of a move: the sizes of the mesh axes, and which of them shard each array axis
Stage = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the user's process ends this one
    responses = os.fdopen(os.dup(1), 'wb')
    os.dup2(2, 1)  # printed text must not mix with the responses
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, requests), daemon=True).start()
    while True:
        pickle.dump(_respond(requests.get()), responses)
        responses.flush()


def _read(stream: BinaryIO, requests: queue.SimpleQueue[Any]) -> None:
    """Moves requests to a queue, so that sending one never blocks the user's process."""
    while True:
        try:
            requests.put(pickle.load(stream))
        except Exception:  # the user's process has closed the pipe, or has died, as by SIGTERM
            _delete_folder()
            os._exit(0)


def _delete_folder() -> None:
    """Deletes the folder of this process, which the user's process may have left behind."""
    folder = Path(os.environ['EINSHARD_WORKER_FOLDER'])
    for _ in range(10):  # a program that is being compiled may still write to it
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def _respond(request: dict[str, Any]) -> dict[str, Any] | str:
    import jax

    try:
        return _compile(_lower(**request) if 'program' in request else _lower_move(**request))
    except Exception as error:  # a program may fail with any exception
        return f'{type(error).__name__}: {error}'
    finally:
        jax.clear_caches()


def _lower(
    program: bytes,
    axes: tuple[tuple[str, int], ...],
    types: tuple[str, ...],
    donated: tuple[int, ...],
) -> Any:
    """Lowers an exported program. `donated` are the positions of the donated arguments."""
    import jax
    import jax.export
    import jax.numpy as jnp
    import numpy as np

    exported = jax.export.deserialize(bytearray(program))
    sizes = [size for _, size in axes]
    if exported.nr_devices == 1:  # a program without shardings
        sizes = [1] * len(sizes)
    devices = np.array(jax.devices()[: exported.nr_devices]).reshape(sizes)
    names = [name for name, _ in axes]
    mesh = jax.sharding.Mesh(devices, names)
    # only a mesh with the axis types of the program has its shardings; the program is compiled
    # already, so that here all axes can be Auto
    axis_types = tuple(jax.sharding.AxisType[type_] for type_ in types)
    typed = jax.sharding.Mesh(devices, names, axis_types=axis_types)

    def on_mesh(sharding: Any) -> Any:
        is_typed = isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh == typed
        return jax.sharding.NamedSharding(mesh, sharding.spec) if is_typed else sharding

    kept = exported.module_kept_var_idx
    avals, shardings = exported.in_avals, [*map(on_mesh, exported.in_shardings_jax(typed))]

    def call(*values: Any) -> Any:
        given = dict(zip(kept, values, strict=True))
        unused = (i for i in range(len(avals)) if i not in given)
        given.update((i, jnp.zeros(avals[i].shape, avals[i].dtype)) for i in unused)
        return exported.call(*(given[i] for i in range(len(avals))))

    # an exported program does not record which arguments are donated
    jitted = jax.jit(
        call,
        in_shardings=tuple(shardings[i] for i in kept),
        out_shardings=tuple(map(on_mesh, exported.out_shardings_jax(typed))),
        donate_argnums=tuple(at for at, i in enumerate(kept) if i in donated),
    )
    args = [jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype) for i in kept]
    with jax.set_mesh(mesh):  # for arguments and results without a sharding
        return jitted.lower(*args)


def _lower_move(
    shape: tuple[int, ...],
    dtype: str,
    stages: tuple[Stage, ...],
    targets: tuple[int, ...] = (),
) -> Any:
    import jax
    import jax.numpy as jnp

    n_devices = math.prod(stages[0][0])
    move, first, last = move_program(jax.devices()[:n_devices], stages, targets)
    jitted = jax.jit(move, in_shardings=first, out_shardings=last)
    return jitted.lower(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


def move_program(
    devices: Sequence[Any], stages: Sequence[Stage], targets: Sequence[int] = (), as_bits: str = ''
) -> tuple[Any, Any, Any]:
    """Returns a function that moves an array from the first placement to the others, in turn.

    `einshard.move` runs what it has compiled here.

    Args:
        targets: to which device each device sends its shard at the end. Then the result has the
            shards one after another along the first axis. Empty: they stay where they are.
        as_bits: the dtype in which the array moves, with the same bits, such as 'uint16'.

    Returns:
        The function, and the shardings of its argument and its result.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def sharding(stage: Stage) -> NamedSharding:
        sizes, entries = stage[0] or (1,), stage[1]  # () for one device
        names = [f'd{i}' for i in range(len(sizes))]
        mesh = Mesh(np.array(devices).reshape(sizes), names)
        spec = (tuple(names[axis] for axis in axes) or None for axes in entries)
        return NamedSharding(mesh, PartitionSpec(*spec))

    first, *through = map(sharding, stages)
    last = through[-1]
    end = last
    if targets:
        end = NamedSharding(last.mesh, PartitionSpec(last.mesh.axis_names))

    def send(shard: Any) -> Any:
        return jax.lax.ppermute(shard, last.mesh.axis_names, [*enumerate(targets)])

    def move(x: Any) -> Any:
        dtype = x.dtype
        if as_bits:
            x = jax.lax.bitcast_convert_type(x, as_bits)
            x = jax.lax.with_sharding_constraint(x, first)
        for sharding in through if targets or as_bits else through[:-1]:
            x = jax.lax.with_sharding_constraint(x, sharding)
        if targets:
            x = jax.shard_map(
                send, mesh=last.mesh, in_specs=last.spec, out_specs=end.spec, check_vma=False
            )(x)
        return jax.lax.bitcast_convert_type(x, dtype) if as_bits else x

    return move, first, end


def _compile(lowered: Any) -> dict[str, str]:
    """Returns the optimized HLO of a program as 'text', and the buffer assignment as 'buffers'."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        try:
            lowered.compile(compiler_options={**OPTIONS, 'xla_dump_to': folder})
        except jax.errors.JaxRuntimeError:
            # partition.py disables passes that the CPU backend needs for dots in bf16, so
            # compilation may fail, but only after XLA has dumped the program
            if not _dumped(folder, BUFFERS):
                raise
        return {'text': _dumped(folder, OPTIMIZED), 'buffers': _dumped(folder, BUFFERS)}


OPTIONS: dict[str, Any] = {
    'xla_backend_optimization_level': '0',
    'xla_llvm_disable_expensive_passes': True,
    'xla_dump_hlo_as_text': True,
    'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED',  # as on TPU
}
OPTIMIZED, BUFFERS = '.cpu_after_optimizations.txt', '-buffer-assignment.txt'


def _dumped(folder: str, ending: str) -> str:
    """Returns the text of XLA's last dump with this file name ending, or '' if there is none."""
    dumps = sorted(Path(folder).glob(f'*{ending}'))
    return dumps[-1].read_text(encoding='utf-8') if dumps else ''


if __name__ == '__main__':
    main()
