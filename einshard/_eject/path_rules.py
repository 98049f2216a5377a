"""Writes the shardings of a pytree as a list of (path pattern, sharding) rules."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import jax.tree_util as jtu
from jax.sharding import NamedSharding

from .._errors import EinshardError
from .._plan.source import raw_string
from .._text import first_of
from .._trees.paths import leaf_paths, path_text, single_keys
from .._trees.rules import Rules
from .shardings import Writer, has_default_memory, numbered, spec_code
from .source import Brackets, Code, statement

Leaf: TypeAlias = tuple[str, NamedSharding | None]  # path, sharding; JAX chooses it if None
PathRule: TypeAlias = tuple[str, NamedSharding | None]  # regular expression, sharding
K = TypeVar('K')
V = TypeVar('V')

_FUNCTION = '''\
def shardings(rules, tree):
    """Returns the shardings of a pytree: the first pattern found in a path applies."""

    def find(path, leaf):
{early_returns}{skip_boxes}        path = jax.tree_util.keystr(path, simple=True, separator='/')
        for pattern, {value} in rules:
            if re.search(pattern, path):
                return {result}
        raise ValueError(f'no rule matches {{path!r}}')

    return jax.tree_util.tree_map_with_path(find, tree)'''


_VALUE = jtu.GetAttrKey('value')
_SKIP_BOXES = """\
        if path[-1:] == (jax.tree_util.GetAttrKey('value'),):  # of a variable of Flax
            path = path[:-1]
"""


def find_path_rules(
    leaves: Sequence[Leaf], pattern_indices: Sequence[int | str] = (), patterns: Sequence[str] = ()
) -> list[PathRule]:
    """Finds rules that give the leaves of a pytree their shardings.

    A pattern in `patterns` is kept if all leaves that it matched have the same sharding. Rules for
    the other leaves come first: see `_merged_rules`.

    Args:
        pattern_indices: for each leaf, the index in `patterns` of the pattern that matched it, or a
            word if none did.

    Raises:
        EinshardError: leaves with different shardings have the same path.
    """
    groups = _grouped(leaves, pattern_indices or [''] * len(leaves))
    kept = {i for i, g in groups.items() if isinstance(i, int) and len({s for _, s in g}) == 1}
    rest = {path for i, group in groups.items() if i not in kept for path, _ in group}
    rules = [rule for rule, paths in _merged_rules(leaves) if not rest.isdisjoint(paths)]
    rules += [(pattern, groups[i][0][1]) for i, pattern in enumerate(patterns) if i in kept]
    found = [next(s for pattern, s in rules if re.search(pattern, path)) for path, _ in leaves]
    if found == [sharding for _, sharding in leaves]:
        return rules
    counts = Counter(path for path, _ in leaves)
    raise EinshardError(
        'leaves with different shardings have the same path',
        code='rules',
        facts={'paths': first_of([repr(path) for path, n in counts.items() if n > 1], 8)},
    )


def matched_patterns(rules: Rules, tree: Any) -> tuple[list[int | str], list[str]]:
    """Returns the pattern of each leaf, as `find_path_rules` takes them, and all patterns.

    A leaf without a pattern has a word that says why, such as 'scalar'.
    """
    found = rules.find_all(leaf_paths(tree), jtu.tree_leaves(tree))
    # the default is the last rule; its pattern '' matches every path
    numbers = [len(rules.rules) if rule == 'default' else rule for rule, _ in found]
    return [i for i in numbers if i is not None], [*(p for p, _ in rules.rules), '']


def _merged_rules(leaves: Sequence[Leaf]) -> Iterator[tuple[PathRule, list[str]]]:
    """Yields rules for all leaves, each with the paths that it matches.

    The paths of a rule differ only in numbers. A number that does not change the sharding becomes
    `\\d+`; one that does becomes a list of values: `h_\\d+/Dense_(?:0|2)`.
    """
    # '$' also matches before a line break at the end of a path
    end = r'\Z' if any('\n' in path for path, _ in leaves) else '$'
    parts = [re.split(r'(\d+)', path) for path, _ in leaves]
    for group in _grouped(range(len(leaves)), [tuple(one[::2]) for one in parts]).values():
        texts = [re.escape(text) for text in parts[group[0]][::2]]
        numbers = [parts[i][1::2] for i in group]
        shardings = [leaves[i][1] for i in group]
        # 1. Find the numbers that change the sharding. In a group of one, keep all numbers.
        fixed = list(range(len(texts) - 1))
        for slot in fixed if len(group) > 1 else ():
            others = [i for i in fixed if i != slot]
            if len({(*_at(row, others), s) for row, s in zip(numbers, shardings, strict=True)}) == (
                len({tuple(_at(row, others)) for row in numbers})
            ):
                fixed = others
        # 2. Start with one rule for each value of these numbers. Of rules that differ only in the
        # values of one number, make one with all of these values.
        boxes: dict[Any, list[str]] = {}
        for i, row, sharding in zip(group, numbers, shardings, strict=True):
            key = tuple(frozenset([number]) for number in _at(row, fixed)), sharding
            boxes.setdefault(key, []).append(leaves[i][0])
        for slot in range(len(fixed)):
            merged: dict[Any, list[Any]] = {}
            for values, sharding in boxes:
                key = values[:slot], values[slot + 1 :], sharding
                merged.setdefault(key, []).append((values, sharding))
            boxes = {
                (
                    (*before, frozenset().union(*(values[slot] for values, _ in keys)), *after),
                    sharding,
                ): [path for key in keys for path in boxes[key]]
                for (before, after, sharding), keys in merged.items()
            }
        for (values, sharding), paths in boxes.items():
            choices = dict(zip(fixed, values, strict=True))
            middle = [_number_pattern(choices.get(slot)) for slot in range(len(texts) - 1)]
            both = itertools.zip_longest(texts, middle, fillvalue='')
            yield (f'^{"".join(itertools.chain(*both))}{end}', sharding), paths


def _at(row: Sequence[str], slots: Iterable[int]) -> Iterator[str]:
    return (row[slot] for slot in slots)


def _number_pattern(values: frozenset[str] | None) -> str:
    if values is None:
        return r'\d+'
    ordered = sorted(values, key=lambda number: (int(number), number))
    return ordered[0] if len(ordered) == 1 else f'(?:{"|".join(ordered)})'


def _grouped(values: Sequence[V], keys: Sequence[K]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for value, key in zip(values, keys, strict=True):
        groups.setdefault(key, []).append(value)
    return groups


class Tables:
    """Lists of path rules, each assigned to a variable of the written code.

    Attributes:
        skips_boxes: whether the written code leaves out of paths the keys that Flax adds.
    """

    def __init__(self, writer: Writer):
        self.skips_boxes = False
        self._writer = writer
        self._tables: dict[str, Sequence[PathRule]] = {}

    def paths(self, tree: Any) -> list[str]:
        """Returns the paths of a pytree's leaves, as the written code finds them."""
        raw = [single_keys(path) for path, _ in jtu.tree_leaves_with_path(tree)]
        if [*map(path_text, raw)] == [*leaf_paths(tree)]:
            return [*map(path_text, raw)]
        self.skips_boxes = True
        return [path_text(path[:-1] if path[-1:] == (_VALUE,) else path) for path in raw]

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
        value, result = 'sharding', 'sharding'
        if mesh:
            value, result = 'spec', f'NamedSharding({self._writer.mesh(mesh)}, spec)'
        parts: list[str] = []
        for name, rules in self._tables.items():
            pairs: list[Code] = []
            for pattern, sharding in rules:
                write = self._writer.sharding
                code = spec_code(sharding.spec) if mesh and sharding else write(sharding)
                pairs.append(Brackets('(', (raw_string(pattern), code)))
            parts.append(statement(Brackets(f'{name} = [', tuple(pairs), ']')))
        first_lines = ''.join(f'        {line}\n' for line in early_returns)
        function = _FUNCTION.format(
            early_returns=first_lines,
            skip_boxes=_SKIP_BOXES * self.skips_boxes,
            value=value,
            result=result,
        )
        return [*parts, function]
