"""Writes the shardings of a pytree as a list of (path pattern, sharding) rules."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar

from jax.sharding import NamedSharding

from .._errors import EinshardError
from .._plan.source import raw_string
from .._text import first_of
from .shardings import Writer, has_default_memory, numbered, spec_code
from .source import Brackets, Code, statement

Leaf: TypeAlias = tuple[str, NamedSharding | None]  # path, sharding; JAX chooses it if None
PathRule: TypeAlias = tuple[str, NamedSharding | None]  # regular expression, sharding
K = TypeVar('K')

_FUNCTION = '''\
def shardings(rules, tree):
    """Returns the shardings of a pytree: the first pattern found in a path applies."""

    def find(path, leaf):
{early_returns}        path = jax.tree_util.keystr(path, simple=True, separator='/')
        for pattern, {value} in rules:
            if re.search(pattern, path):
                return {result}
        raise ValueError(f'no rule matches {{path!r}}')

    return jax.tree_util.tree_map_with_path(find, tree)'''


def find_path_rules(
    leaves: Sequence[Leaf], pattern_indices: Sequence[int] = (), patterns: Sequence[str] = ()
) -> list[PathRule]:
    """Finds rules that give the leaves of a pytree their shardings.

    A pattern in `patterns` is kept if all leaves that it matched have the same sharding. Other
    leaves share a rule if their paths differ only in numbers ('h/0/w', 'h/1/w') and they have the
    same sharding. The rest have one rule each. If these rules give any leaf a wrong sharding, each
    path gets its own rule instead.

    Args:
        pattern_indices: for each leaf, the index in `patterns` of the pattern that matched it.

    Raises:
        EinshardError: leaves with different shardings have the same path.
    """
    # -1: matched by no pattern
    groups = _grouped(leaves, pattern_indices or [-1] * len(leaves))
    rest = groups.pop(-1, [])
    kept: list[PathRule] = []
    for i, group in sorted(groups.items()):
        if _is_uniform(group):
            kept.append((patterns[i], group[0][1]))
        else:
            rest += group
    for rules in ([*_merged_rules(rest), *kept], _exact_rules(leaves)):
        if all(_find_sharding(rules, path) == sharding for path, sharding in leaves):
            return rules
    counts = Counter(path for path, _ in leaves)
    raise EinshardError(
        'leaves with different shardings have the same path',
        facts={'paths': first_of([repr(path) for path, n in counts.items() if n > 1], 8)},
    )


def _merged_rules(leaves: Sequence[Leaf]) -> Iterator[PathRule]:
    rules = _exact_rules(leaves)
    patterns = [re.sub(r'\d+', r'\\d+', pattern) for pattern, _ in rules]
    for pattern, group in _grouped(rules, patterns).items():
        if len(group) > 1 and _is_uniform(group):
            yield pattern, group[0][1]
        else:
            yield from group


def _exact_rules(leaves: Sequence[Leaf]) -> list[PathRule]:
    # '$' also matches before a line break at the end of a path
    end = r'\Z' if any('\n' in path for path, _ in leaves) else '$'
    return [(f'^{re.escape(path)}{end}', sharding) for path, sharding in leaves]


def _grouped(leaves: Sequence[Leaf], keys: Sequence[K]) -> dict[K, list[Leaf]]:
    groups: dict[K, list[Leaf]] = {}
    for leaf, key in zip(leaves, keys, strict=True):
        groups.setdefault(key, []).append(leaf)
    return groups


def _is_uniform(leaves: Sequence[Leaf]) -> bool:
    return len({sharding for _, sharding in leaves}) == 1


def _find_sharding(rules: Sequence[PathRule], path: str) -> NamedSharding | None:
    return next(sharding for pattern, sharding in rules if re.search(pattern, path))


class Tables:
    """Lists of path rules, each assigned to a variable of the written code."""

    def __init__(self, writer: Writer):
        self._writer = writer
        self._tables: dict[str, Sequence[PathRule]] = {}

    def add(self, name: str, rules: Sequence[PathRule]) -> str:
        """Adds a list of rules and returns its variable. Equal lists share a variable."""
        for existing, table in self._tables.items():
            if table == rules:
                return existing
        names = (numbered(name, i) for i in itertools.count())
        unused = next(name for name in names if name not in self._tables)
        self._tables[unused] = rules
        return unused

    def parts(self, early_returns: Sequence[str] = ()) -> list[str]:
        """Writes the lists of rules, and the function `shardings` that applies a list to a pytree.

        Args:
            early_returns: lines at the start of `find`, for leaves without a rule, such as scalars.
        """
        if not self._tables:
            return []
        shardings = [sharding for rules in self._tables.values() for _, sharding in rules]
        # the lists have PartitionSpecs if all shardings have the same mesh and default memory
        meshes = {s.mesh if s and has_default_memory(s) else None for s in shardings}
        (mesh,) = meshes if len(meshes) == 1 else [None]
        write, value, result = self._writer.sharding, 'sharding', 'sharding'
        if mesh:
            write, value = _spec_of, 'spec'
            result = f'NamedSharding({self._writer.mesh(mesh)}, spec)'
        parts: list[str] = []
        for name, rules in self._tables.items():
            pairs = tuple(Brackets('(', (raw_string(p), write(s))) for p, s in rules)
            parts.append(statement(Brackets(f'{name} = [', pairs, ']')))
        first_lines = ''.join(f'        {line}\n' for line in early_returns)
        return [*parts, _FUNCTION.format(early_returns=first_lines, value=value, result=result)]


def _spec_of(sharding: NamedSharding | None) -> Code:
    assert sharding is not None
    return spec_code(sharding.spec)
