"""Shows on a terminal that a compilation takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

_AFTER, _EVERY = 3.0, 1.0  # seconds


@contextmanager
def progress(what: str) -> Generator[None, None, None]:
    """Writes 'what: 12 s' to standard error, if that is a terminal and the block takes long."""
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(what, done, stream), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(what: str, done: threading.Event, stream: TextIO) -> None:
    start, line = time.monotonic(), ''
    wait = _AFTER
    while not done.wait(wait):
        line = f'{what}: {time.monotonic() - start:.0f} s'
        print(f'\r{line}', end='', file=stream, flush=True)
        wait = _EVERY
    if line:
        blank = ' ' * len(line)
        print(f'\r{blank}\r', end='', file=stream, flush=True)
