"""Shows on a terminal that a compilation takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

_AFTER, _EVERY = 3.0, 1.0  # seconds
_line_is_taken = threading.Lock()


@contextmanager
def progress(what: str | Callable[[], str]) -> Generator[None, None, None]:
    """Writes 'what: 12 s' to standard error, if that is a terminal and the block takes long.

    The text may be a function that is called for each update. Inside another block, this writes
    nothing.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty() or not _line_is_taken.acquire(blocking=False):
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
        _line_is_taken.release()


def _show(what: str | Callable[[], str], done: threading.Event, stream: TextIO) -> None:
    start, line = time.monotonic(), ''
    wait = _AFTER
    while not done.wait(wait):
        text = what if isinstance(what, str) else what()
        before, line = line, f'{text}: {time.monotonic() - start:.0f} s'
        print(f'\r{line.ljust(len(before))}', end='', file=stream, flush=True)
        wait = _EVERY
    if line:
        blank = ' ' * len(line)
        print(f'\r{blank}\r', end='', file=stream, flush=True)
