"""Sizes, arrays and places in a source in few words, and how wide words are."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

MONO = 'font-family: ui-monospace, Menlo, Consolas, monospace'  # of words in columns, in HTML


def amount(n_bytes: int) -> str:
    """1536 -> '1.5 KiB'"""
    size, units = float(n_bytes), ['B', 'KiB', 'MiB', 'GiB', 'TiB']
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f'{n_bytes} B' if units[0] == 'B' else f'{size:.1f} {units[0]}'


def shape_text(shape: Sequence[int]) -> str:
    """[6,8]"""
    return f'[{",".join(map(str, shape))}]'


def short_arrays(text: str) -> str:
    """Many arrays in short: '7 f32[8], f32[8,4] and 3 more'."""
    counts = Counter(re.findall(r'\w+\[[^\]]*\]', text))
    arrays = [f'{n} x {array}' if n > 1 else array for array, n in counts.items()]
    if len(arrays) <= 2:
        return ', '.join(arrays)
    more = counts.total() - sum([*counts.values()][:2])
    return f'{", ".join(arrays[:2])} and {more} more'


def first_of(texts: Sequence[str], n: int) -> str:
    """The first n of some texts, and how many more there are."""
    more = f', and {len(texts) - n} more' if len(texts) > n else ''
    return ', '.join(texts[:n]) + more


def short_source(source: str | None) -> str:
    """'/home/me/model.py:12' -> 'model.py:12'; 'cell:3' in a notebook."""
    # IPython keeps each cell in a file of its own, whose name is a hash
    source = re.sub(r'.*ipykernel_\d+[\\/]\d+\.py', 'cell', source or '')
    return re.split(r'[\\/]', source)[-1]


def columns(text: str) -> int:
    """Terminal columns: wide East Asian characters take two, combining marks none."""
    seen = [c for c in text if unicodedata.category(c) not in ('Mn', 'Me', 'Cf')]
    return len(seen) + sum(unicodedata.east_asian_width(c) in 'WF' for c in seen)
