"""Formats sizes, arrays, functions and source lines; measures the display width of text."""

from __future__ import annotations

import inspect
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

MONOSPACED = 'ui-monospace, Menlo, Consolas, monospace'  # CSS fonts, for aligned text


def format_bytes(n_bytes: int) -> str:
    """Formats a number of bytes: '1.5 KiB' for 1536."""
    size, units = float(n_bytes), ['B', 'KiB', 'MiB', 'GiB', 'TiB']
    while abs(size) >= 1023.95 and len(units) > 1:  # rounds to 1024.0
        size /= 1024
        units.pop(0)
    return f'{n_bytes} B' if units[0] == 'B' else f'{size:.1f} {units[0]}'


def format_flops(n: float) -> str:
    """Formats a number of floating-point operations: '1.5 Gflop' for 1.5e9."""
    units = ['', 'k', 'M', 'G', 'T', 'P']
    while n >= 999.5 and len(units) > 1:  # rounds to 1000
        n /= 1000
        units.pop(0)
    return f'{n:.3g} {units[0]}flop'


def format_seconds(seconds: float) -> str:
    """Formats a duration: '1.8 ms' for 0.0018."""
    for unit, size in (('s', 1.0), ('ms', 1e-3), ('us', 1e-6)):
        if seconds >= 0.9995 * size:
            return f'{seconds / size:.3g} {unit}'
    return f'{seconds / 1e-9:.3g} ns'


def shape_text(shape: Sequence[int]) -> str:
    return f'[{",".join(map(str, shape))}]'


def short_arrays(text: str) -> str:
    """Counts equal arrays in a text, and lists two: '7 x f32[8], f32[8,4] and 3 more'."""
    counts = Counter(re.findall(r'\w+\[[^\]]*\]', text))
    arrays = [f'{n} x {array}' if n > 1 else array for array, n in counts.items()]
    if len(arrays) <= 2:
        return ', '.join(arrays)
    more = counts.total() - sum([*counts.values()][:2])
    return f'{", ".join(arrays[:2])} and {more} more'


def first_line(error: object) -> str:
    """Returns the first line of an error, or all lines if the first one announces the others."""
    text = str(error).strip()
    line = text.partition('\n')[0].rstrip()
    return text if line.endswith(':') else line


def first_of(texts: Sequence[str], n: int) -> str:
    """Joins the first n texts, and counts the others: 'a, b, and 3 more'."""
    more = f', and {len(texts) - n} more' if len(texts) > n else ''
    return ', '.join(texts[:n]) + more


def short_source(source: str | None) -> str:
    """Shortens a path with a line number to 'model.py:12', or 'cell:3' in a notebook."""
    # IPython writes each cell to its own file, named by a hash
    source = re.sub(r'.*ipykernel_\d+[\\/]\d+\.py', 'cell', source or '')
    return re.split(r'[\\/]', source)[-1]


def display_width(text: str) -> int:
    """Width in terminal columns: 2 for wide East Asian characters, 0 for combining marks."""
    text = unicodedata.normalize('NFC', text)  # file names may contain decomposed Hangul
    visible = [c for c in text if unicodedata.category(c) not in ('Mn', 'Me', 'Cf')]
    return len(visible) + sum(unicodedata.east_asian_width(c) in 'WF' for c in visible)


def deprecated_alias(old: str, new: str) -> Any:
    """Returns a property that reads the attribute `new` and warns that `old` is deprecated."""

    def read(thing: Any) -> Any:
        warnings.warn(f'.{old} is deprecated; use .{new}', DeprecationWarning, stacklevel=2)
        return getattr(thing, new)

    return property(read, doc=f'Deprecated: use `{new}`.')


def name_of(function: Any) -> str:
    while not hasattr(function, '__name__') and hasattr(function, 'func'):
        function = function.func
    name = getattr(function, '__name__', None)
    return name if isinstance(name, str) else type(function).__name__


def deferred_kind(function: Any) -> str | None:
    """Names the kind of an async or generator function. Returns None for other functions."""
    for is_of_kind, kind in (
        (inspect.isgeneratorfunction, 'a generator function'),
        (inspect.iscoroutinefunction, 'an async function'),
        (inspect.isasyncgenfunction, 'an async generator function'),
    ):
        if is_of_kind(function) or is_of_kind(type(function).__call__):
            return kind
    return None


def array_text(x: Any) -> str:
    """Formats an array as 'float32[6,8]', a number as 'float 1.5', other values as their type."""
    shape, dtype = getattr(x, 'shape', None), getattr(x, 'dtype', None)
    if shape is None or dtype is None or isinstance(x, type):  # the type numpy.float32 has both
        value = f' {x!r}' if isinstance(x, int | float | complex) else ''
        return f'{type(x).__name__}{value}'
    return f'{dtype}{shape_text(shape)}'
