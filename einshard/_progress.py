"""Shows the elapsed time of slow compilations on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

_DELAY, _INTERVAL = 3.0, 1.0  # seconds
_line_is_taken = threading.Lock()


@contextmanager
def progress(label: str | Callable[[], str]) -> Generator[None, None, None]:
    """Writes 'label: 12 s' to standard error, if that is a terminal, while a slow block runs.

    A label that is a function is called for each update. Blocks that start while another one runs,
    nested or in another thread, write nothing.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty() or not _line_is_taken.acquire(blocking=False):
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(label, done, stream), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _line_is_taken.release()


def _show(label: str | Callable[[], str], done: threading.Event, stream: TextIO) -> None:
    start, line = time.monotonic(), ''
    wait = _DELAY
    while not done.wait(wait):
        text = label if isinstance(label, str) else label()
        before, line = line, f'{text}: {time.monotonic() - start:.0f} s'
        print(f'\r{line.ljust(len(before))}', end='', file=stream, flush=True)
        wait = _INTERVAL
    if line:
        blank = ' ' * len(line)
        print(f'\r{blank}\r', end='', file=stream, flush=True)
