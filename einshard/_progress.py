"""Shows the elapsed time of slow compilations on a terminal, and of commands also without one."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

_DELAY, _INTERVAL = 3.0, 1.0  # seconds
_LOG_INTERVAL = 20.0  # of lines where no terminal can overwrite them
_line_is_taken = threading.Lock()
_logs = False


def log_progress() -> None:
    """From now on, writes progress without a terminal too, as lines: for commands."""
    global _logs
    _logs = True


@contextmanager
def progress(label: str | Callable[[], str]) -> Generator[None, None, None]:
    """Writes 'label: 12 s' to standard error while a slow block runs, if that is a terminal.

    A label that is a function is called for each update. Blocks that start while another one runs,
    nested or in another thread, write nothing.
    """
    stream = sys.stderr
    is_terminal = stream is not None and stream.isatty()
    shows = stream is not None and (is_terminal or _logs)
    if not shows or not _line_is_taken.acquire(blocking=False):
        yield
        return
    done = threading.Event()
    show = _show if is_terminal else _log
    thread = threading.Thread(target=show, args=(label, done, stream), daemon=True)
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


def _log(label: str | Callable[[], str], done: threading.Event, stream: TextIO) -> None:
    start = time.monotonic()
    while not done.wait(_LOG_INTERVAL):
        text = label if isinstance(label, str) else label()
        print(f'{text}: {time.monotonic() - start:.0f} s', file=stream, flush=True)
