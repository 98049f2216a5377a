"""Exports a traced program, and compiles it in a process that simulates devices."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.export
import jax.tree_util as jtu
from jax.sharding import AxisType

from .._errors import EinshardError
from .._program.hlo.memory import Memory, read_memory
from .oversized import read_sizes
from .stages import Stages

WORKER_FILE = str(Path(__file__).with_name('partition_worker.py'))
_PREFIX = 'jit(call)/call_exported/'  # in op names, added by jax.export


class Compiled(NamedTuple):
    """The optimized HLO of a program, and the program's memory use."""

    text: str
    memory: Memory | None


class Worker:
    """Compiles exported programs for simulated CPU devices, in a process of its own.

    The process starts at the first `submit`, and ends at `close` or with the user's process.
    """

    def __init__(self, n_devices: int):
        self.n_devices = n_devices
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: Any = None  # the standard input of the process
        self._responses: Any = None  # its standard output
        self._log = Path()
        self._stop: Any = None  # ends the process and deletes its folder

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def submit(self, request: dict[str, Any]) -> None:
        """Sends a request made by `export`, and returns without waiting for the response."""
        if self._process is None:
            self._start()
        with contextlib.suppress(BrokenPipeError):  # the process has ended, so `result` will raise
            pickle.dump(request, self._requests)
            self._requests.flush()

    def result(self) -> Compiled | str:
        """Waits for the next response, and returns the compiled program or the compiler's error."""
        try:
            response = pickle.load(self._responses)
        except (EOFError, pickle.UnpicklingError):
            log = self._log.read_text(encoding='utf-8', errors='replace')
            self.close()
            raise _ended_error(self.n_devices, log.strip().splitlines()) from None
        except BaseException:  # for example, Ctrl-C after reading half of the response
            self.close()
            raise
        if isinstance(response, str):
            return response
        # replaces a `jax.stages.Compiled`, of which `read_memory` calls only `memory_analysis`
        sizes = SimpleNamespace(memory_analysis=lambda: read_sizes(response['buffers']))
        return Compiled(response['text'].replace(_PREFIX, ''), read_memory(sizes))

    def close(self) -> None:
        """Ends the process. The next `submit` starts a new one."""
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None

    def _start(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix='einshard-plan-')
        self._log = Path(folder.name) / 'log'
        with self._log.open('wb') as log:
            self._process = subprocess.Popen(
                # with -P, modules of this folder, such as names.py, do not shadow others
                [sys.executable, '-P', WORKER_FILE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    **_worker_environment(self.n_devices),
                    'TMPDIR': folder.name,
                    'EINSHARD_WORKER_FOLDER': folder.name,
                },
            )
        self._requests, self._responses = self._process.stdin, self._process.stdout
        # also called when the interpreter exits
        self._stop = weakref.finalize(self, _end_process, self._process, folder)


_lock = threading.Lock()
_workers: dict[int, Worker] = {}


def compile_in_worker(n_devices: int, request: dict[str, Any]) -> Compiled:
    """Compiles for simulated devices, in a process of its own.

    Raises an EinshardError if the process ends, and a ValueError if the compiler raises.
    """
    with _lock:
        worker = _workers.setdefault(n_devices, Worker(n_devices))
        try:
            worker.submit(request)
            compiled = worker.result()
        except BaseException:  # a response that is left unread would be that of the next request
            worker.close()
            raise
    if isinstance(compiled, str):
        raise ValueError(compiled)
    return compiled


ENDED = 'the process that compiles for'  # how sentences of `_ended_error` begin
# of XLA and absl, of LLVM, of the C++ library, and of Python's faulthandler
_FATAL = re.compile(r'F\d{4} .*|LLVM ERROR:.*|terminate called.*|Fatal Python error:.*')


def _ended_error(n_devices: int, log: Sequence[str]) -> EinshardError:
    """Returns the error for a process that has ended, with the line of its output that says why.

    After that line, XLA prints a stack trace.
    """
    says = next((line for line in log if _FATAL.match(line)), '')
    return EinshardError(
        f'{ENDED} {n_devices} simulated devices has ended{": " * bool(says)}{says}',
        code='does-not-compile',
        facts={}
        if says
        else {'last output': '\n'.join(log[-5:]) or 'none; the process may have run out of memory'},
    )


def _end_process(
    process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]
) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # flushing fails if the process has ended
            stream.close()  # type: ignore[reportOptionalMemberAccess]
    process.wait()
    folder.cleanup()


# The first two passes change bf16 to f32, which doubles the bytes. The others combine all-reduces,
# whose operands are then all in memory at the same time.
_DISABLED_PASSES = (
    'float-normalization-bf16',
    'all-reduce-promotion',
    'all-reduce-combiner',
    'cpu-all-reduce-combiner',
)


def _worker_environment(n_devices: int) -> dict[str, str]:
    removed = ('JAX_', 'XLA_', 'TF_', 'PYTHONWARNINGS')
    kept = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    shardy = getattr(jax.config, 'jax_use_shardy_partitioner', True)
    return {
        **kept,
        'PYTHONPATH': os.pathsep.join(filter(None, sys.path)),
        'XLA_FLAGS': f'--xla_force_host_platform_device_count={n_devices} '
        f'--xla_disable_hlo_passes={",".join(_DISABLED_PASSES)}',
        'JAX_PLATFORMS': 'cpu',
        'JAX_ENABLE_X64': str(int(jax.config.jax_enable_x64)),  # type: ignore[reportAttributeAccessIssue]
        'JAX_USE_SHARDY_PARTITIONER': str(int(shardy)),
        'JAX_ENABLE_COMPILATION_CACHE': '0',
        'CUDA_VISIBLE_DEVICES': '',
    }


# --- export -------------------------------------------------------------------------------------


class _Jitted:
    """Makes a traced function look like a jitted function to `jax.export`."""

    def __init__(self, traced: Any):
        self._traced = traced

    def __call__(self, *_: Any) -> Any:
        raise TypeError('jax.export traces and lowers this function, but does not call it')

    def trace(self, *_: Any) -> Any:
        return self._traced

    def lower(self, *_: Any) -> Any:
        return self._traced.lower()


def check_flatbuffers() -> None:
    if importlib.util.find_spec('flatbuffers') is None:
        raise EinshardError(
            'plan needs flatbuffers to serialize programs, but flatbuffers is not installed',
            code='not-installed',
            facts={'install': "pip install 'einshard[plan]'"},
        )


def export(
    stages: Stages, axes: Sequence[tuple[str, int]], types: Sequence[AxisType] = ()
) -> tuple[dict[str, Any], Sequence[int]]:
    """Lowers a traced program for CPU, and serializes it for a `Worker`.

    Args:
        axes: (name, size) of each mesh axis.
        types: their types. Default: Auto.

    Returns:
        The request for `Worker.submit`, and the positions of the argument leaves that are used.
    """
    traced = stages.traced
    exported = jax.export.export(_Jitted(traced), platforms=['cpu'])()  # type: ignore[reportArgumentType]
    # jax.export cannot serialize custom pytree nodes, so the program takes and returns leaves
    n_in, n_out = len(exported.in_avals), len(exported.out_avals)
    flat = dataclasses.replace(
        exported,
        in_tree=jtu.tree_structure((tuple(range(n_in)), {})),
        out_tree=jtu.tree_structure(tuple(range(n_out))),
    )
    leaves = jtu.tree_leaves(traced.args_info)  # type: ignore[reportOptionalMemberAccess]
    request = {
        'program': bytes(flat.serialize()),
        'axes': tuple(axes),
        'types': tuple(type_.name for type_ in types or [AxisType.Auto] * len(axes)),
        'donated': tuple(i for i, leaf in enumerate(leaves) if leaf.donated),
    }
    return request, exported.module_kept_var_idx
