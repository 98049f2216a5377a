"""Finds a trace and reads what JAX's `ProfileData` does not show: programs, and what was lost.

https://github.com/openxla/xla/blob/main/third_party/tsl/tsl/profiler/protobuf/xplane.proto has the
numbers of the fields.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .._errors import EinshardError
from .._program.hlo.wire import Truncated, fields, messages, text
from .form import Form, read_form

_FILE = '*.xplane.pb'
_METADATA = '/host:metadata'


@dataclass(frozen=True)
class Trace:
    """A trace of one host.

    Attributes:
        path: the file.
        data: its bytes.
        modules: the HloModuleProto of each program, by its name with its number: 'jit_step(2)'.
        lost: what the profiler says that it has lost.
    """

    path: Path
    data: bytes
    modules: Mapping[str, memoryview]
    lost: tuple[str, ...]

    @functools.cached_property
    def forms(self) -> Mapping[str, Form]:
        return {name: read_form(module) for name, module in self.modules.items()}


def find_file(path: str | os.PathLike[str]) -> Path:
    """Returns the trace in a folder that `jax.profiler.trace` wrote: that of the newest run."""
    found = Path(path)
    if found.is_file():
        return found
    if not found.exists():
        raise EinshardError(f"there is no file or folder '{path}'", code='profile')
    files = sorted(found.rglob(_FILE), key=lambda file: (file.stat().st_mtime, file))
    if not files:
        raise EinshardError(
            f"'{path}' has no {_FILE} file, so it is not a folder of jax.profiler.trace",
            code='profile',
        )
    run = [file for file in files if file.parent == files[-1].parent]
    if len(run) > 1:
        raise EinshardError(
            f"the newest run in '{path}' has the traces of {len(run)} hosts",
            code='profile',
            facts={'pass one of': ', '.join(file.name for file in run), 'in': run[0].parent},
        )
    return run[0]


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace.

    Raises:
        EinshardError: there is no trace; it is not complete; or it has no programs.
    """
    file = find_file(path)
    data = file.read_bytes()
    try:
        modules, lost = _read_space(memoryview(data))
    except Truncated as error:
        raise EinshardError(
            f"'{file}' is not a complete trace: {error}", code='profile', facts={'size': len(data)}
        ) from error
    if not modules:
        raise EinshardError(
            f"'{file}' has no programs, which tell those of the same name apart",
            code='profile',
            facts={
                'missing': f'plane {_METADATA}, which the profiler of JAX writes',
                'instead': 'trace with jax.profiler.trace, and enable_hlo_proto if it has options',
            },
        )
    return Trace(file, data, modules, tuple(lost))


def read_planes(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Yields the name and the message of each XPlane of an XSpace."""
    for plane in messages(data, 1):
        yield next(map(text, messages(plane, 2)), ''), plane


def _read_space(data: memoryview) -> tuple[dict[str, memoryview], list[str]]:
    modules: dict[str, memoryview] = {}
    lost = [f'{text(value)}' for number, value in fields(data) if number in (2, 3)]
    for name, plane in read_planes(data):
        if name == _METADATA:
            modules.update(_programs(plane))
        elif n := _dropped(plane):
            lost.append(f'{name} lost {n} events')
    return modules, lost


def _entries(plane: memoryview, number: int) -> Iterator[memoryview]:
    """Yields the values of one of the maps of an XPlane: event metadata is 4, stats metadata 5."""
    for n, entry in fields(plane):
        if n == number and not isinstance(entry, int):
            yield from messages(entry, 2)


def _programs(plane: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Yields the module of each program: the HloProto is the bytes of a stat of its metadata."""
    for metadata in _entries(plane, 4):
        for stat in messages(metadata, 5):
            for proto in messages(stat, 6):
                for module in messages(proto, 1):
                    yield ''.join(map(text, messages(metadata, 2))), module


def _dropped(plane: memoryview) -> int:
    """Reads the stat 'dropped_traces' of a plane."""
    names = {
        dict(fields(metadata)).get(1): [*map(text, messages(metadata, 2))]
        for metadata in _entries(plane, 5)
    }
    stats = [dict(fields(stat)) for stat in messages(plane, 6)]
    counts = (s.get(3, s.get(4, 0)) for s in stats if names.get(s.get(1)) == [_DROPPED])
    return sum(count for count in counts if isinstance(count, int))


_DROPPED = 'dropped_traces'
