"""Folds paths with equal values, such as those of layers, into patterns: '0-11/{q,k}/w'."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

_Parts: TypeAlias = tuple[tuple[str, ...], ...]  # (('0', '1'), ('w',)) for '0-1/w'
_NUMBERED = re.compile(r'(|.*_)(0|[1-9]\d*)')


def fold(
    paths: Sequence[str], values: Sequence[Hashable], few: int = 12
) -> list[tuple[str, list[int]]]:
    """Folds paths with equal values, unless there are at most `few` paths.

    Returns pairs: a pattern, and the indices of the paths that it replaces.

    >>> from einshard._explain.fold_layers import fold
    >>> fold(['0/w', '0/b', '1/w', '1/b'], ['big', 'small', 'big', 'small'], few=2)
    [('0-1/w', [0, 2]), ('0-1/b', [1, 3])]
    """
    folded: list[tuple[_Parts, Hashable, list[int]]] = [
        (tuple((part,) for part in path.split('/')), value, [i])
        for i, (path, value) in enumerate(zip(paths, values, strict=True))
    ]
    max_depth = max((len(parts) for parts, _, _ in folded), default=0)
    for depth in range(max_depth if len(folded) > few else 0):
        merged: dict[Hashable, tuple[_Parts, Hashable, list[int]]] = {}
        for parts, value, indices in folded:
            key = parts[:depth], parts[depth + 1 :], len(parts), value
            previous = merged.get(key)
            if previous is None or depth >= len(parts):
                merged[key] = parts, value, indices
            else:
                alternatives = (*previous[0][depth], *parts[depth])
                joined = (*parts[:depth], alternatives, *parts[depth + 1 :])
                merged[key] = joined, value, previous[2] + indices
        folded = list(merged.values())
    return [('/'.join(map(_pattern_text, parts)), indices) for parts, _, indices in folded]


def fold_paths(paths: Iterable[str]) -> list[str]:
    """Folds 'layers/gate' and 'layers/up' into 'layers/{gate,up}'."""
    distinct = list(dict.fromkeys(paths))
    return [pattern for pattern, _ in fold(distinct, [None] * len(distinct), few=1)]


def _pattern_text(alternatives: tuple[str, ...]) -> str:
    """Formats '0-11', 'block_0-11' as Flax names its layers, or '{q,k,v}'."""
    numbers: dict[str, list[int]] = {}  # {'block_': [0, .., 11]}
    texts: dict[str, list[str]] = {}  # the same, as they are written; in order of appearance
    for part in alternatives:
        match = _NUMBERED.fullmatch(part)
        if match:
            numbers.setdefault(match[1], []).append(int(match[2]))
        texts.setdefault(match[1] if match else f'{part}/', []).append(part)
    for name, found in numbers.items():
        found.sort()
        if len(found) > 1 and found == list(range(found[0], found[0] + len(found))):
            texts[name] = [f'{name}{found[0]}-{found[-1]}']
    parts = [part for several in texts.values() for part in several]
    return parts[0] if len(parts) == 1 else f'{{{",".join(parts)}}}'
