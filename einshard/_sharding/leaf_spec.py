"""The spec of one leaf: an expression, a memory kind, and what to do if it does not fit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TypeAlias

from .._cache import cached
from .._notation.expression import Expression, parse
from .axis_rules import Missing

REPLICATED = '... -> * ...'


@dataclass(frozen=True, slots=True, eq=False)
class LeafSpec:
    """A parsed spec of one leaf. Compared by identity, because caches use it as a key."""

    expression: Expression
    memory_kind: str | None = None
    on_missing: Missing = 'error'  # 'replicate': ignore mesh axes that the mesh lacks
    on_indivisible: Missing = 'error'  # 'replicate': replicate axes that are not divisible

    def __str__(self) -> str:
        return in_memory(self.expression.text, self.memory_kind)


AnySpec: TypeAlias = str | LeafSpec  # of one leaf: as written, or parsed

_IN_MEMORY = re.compile(r'(.*\S)\s+\(in (\w+)\)\s*', re.DOTALL)


def in_memory(expression: str, memory_kind: str | None) -> str:
    """An expression with a memory kind, as `describe` writes it: 'a -> a8 (in host)'."""
    return expression if memory_kind in (None, 'device') else f'{expression} (in {memory_kind})'


def split_memory(text: str) -> tuple[str, str | None]:
    """The inverse of `in_memory`: the expression, and its memory kind or None."""
    found = _IN_MEMORY.fullmatch(text)
    return (found[1], found[2]) if found else (text, None)


def as_leaf_spec(spec: AnySpec) -> LeafSpec:
    """The parsed spec; one object per text."""
    return _read(spec) if isinstance(spec, str) else spec


@cached
def _read(text: str) -> LeafSpec:
    text, memory_kind = split_memory(text)
    return LeafSpec(parse(text), memory_kind)


@cached
def lenient(
    spec: AnySpec, *, on_missing: Missing = 'error', on_indivisible: Missing = 'error'
) -> LeafSpec:
    """The spec, with each option that is 'replicate' here applied to it."""
    known = as_leaf_spec(spec)
    if on_missing == 'error':
        on_missing = known.on_missing
    if on_indivisible == 'error':
        on_indivisible = known.on_indivisible
    return replace(known, on_missing=on_missing, on_indivisible=on_indivisible)


def rewritten(spec: AnySpec, expression: str) -> AnySpec:
    """The spec with another expression."""
    if isinstance(spec, str):
        return in_memory(expression, split_memory(spec)[1])
    return replace(spec, expression=parse(expression))
