"""A line of progress on a terminal."""

from __future__ import annotations

import sys


class Progress:
    """Rewrites one line on standard error; prints nothing if that is not a terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._length = 0

    def __enter__(self) -> Progress:
        return self

    def show(self, text: str) -> None:
        if self._on:
            sys.stderr.write(f'\r{text.ljust(self._length)}')
            sys.stderr.flush()
            self._length = len(text)

    def __exit__(self, *_: object) -> None:
        if self._on and self._length:
            self.show('')
            sys.stderr.write('\r')
