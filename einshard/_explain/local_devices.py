"""Finds where a function asks for the devices of this process while it is traced for others."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import jax

from .._program.hlo.sources import is_user_file
from .._text import short_source

_FUNCTIONS = ('default_backend', 'device_count', 'devices', 'local_device_count', 'local_devices')

# by jaxpr, since JAX traces a function only once: {line: 'jax.devices()'}
_asked: WeakKeyDictionary[Any, Mapping[str, str]] = WeakKeyDictionary()


def local_device() -> Any:
    """Returns a device of this process. None if JAX has no backend, as for CUDA without a GPU."""
    try:
        return jax.local_devices()[0]
    except (AssertionError, RuntimeError):
        return None


def asked_texts(jaxpr: Any, device_kind: str) -> list[str]:
    """Returns a sentence for each line that `local_devices_asked` recorded, on other devices.

    `device_kind` is that of the devices of the program.
    """
    device = local_device()
    own = device and device.device_kind
    if own in (None, device_kind):
        return []
    return [
        f'{short_source(line)}: {call} returns what this process has ({own}) while the function is '
        f'traced, not what the program is for ({device_kind}): on the target, it may be another '
        'program. Ask the mesh instead: mesh.devices.flat[0].platform'
        for line, call in (_asked.get(jaxpr, {}) if jaxpr is not None else {}).items()
    ]


def remember_asked(jaxpr: Any, asked: Mapping[str, str]) -> None:
    if asked and jaxpr is not None:
        _asked[jaxpr] = asked


@contextmanager
def local_devices_asked(is_for_others: bool) -> Generator[Mapping[str, str]]:
    """Records the lines of the user's code that ask for the devices of this process.

    A profile function also sees `from jax import devices`, and no other thread has it, where a
    replaced `jax.devices` would do neither. Tracing takes twice as long with it, so it is only used
    if the program `is_for_others`, and compiling for those takes longer still.
    """
    asked: dict[str, str] = {}
    if not is_for_others or sys.getprofile() is not None:
        yield asked
        return
    names: dict[Any, str] = {}
    for name in _FUNCTIONS:
        function = getattr(jax, name)
        # what is cached would not be called again
        getattr(function, 'cache_clear', lambda: None)()
        code = getattr(getattr(function, '__wrapped__', function), '__code__', None)
        if code is not None and not is_user_file(code.co_filename):  # not replaced by the user
            names[code] = f'jax.{name}()'

    def on_event(frame: FrameType, event: str, arg: object) -> None:
        caller = frame.f_back
        if event == 'call' and frame.f_code in names and caller is not None:
            file = caller.f_code.co_filename
            if is_user_file(file):  # a library may only choose what to print
                asked[f'{file}:{caller.f_lineno}'] = names[frame.f_code]

    sys.setprofile(on_event)
    try:
        yield asked
    finally:
        sys.setprofile(None)
