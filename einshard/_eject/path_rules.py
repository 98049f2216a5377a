"""Writes the shardings of a pytree as a list of patterns of paths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar

from jax.sharding import NamedSharding

from .._errors import EinshardError
from .._plan.source import raw_string
from .._text import first_of
from .shardings import Writer, has_default_memory, spec_code
from .source import Brackets, Code, statement

# A path with its sharding; None leaves the array to JAX.
Leaf: TypeAlias = tuple[str, NamedSharding | None]
# A pattern with a sharding. The first pattern that is found in the path of a leaf applies.
PathRule: TypeAlias = tuple[str, NamedSharding | None]
K = TypeVar('K')

_FUNCTION = '''\
def shardings(rules, tree):
    """Returns the shardings of a pytree: the first pattern found in a path applies."""

    def find(path, leaf):
{conditions}        path = jax.tree_util.keystr(path, simple=True, separator='/')
        for pattern, {value} in rules:
            if re.search(pattern, path):
                return {result}
        raise ValueError(f'no rule matches {{path!r}}')

    return jax.tree_util.tree_map_with_path(find, tree)'''


def find_path_rules(
    leaves: Sequence[Leaf], labels: Sequence[int] = (), patterns: Sequence[str] = ()
) -> list[PathRule]:
    """Finds rules that give the leaves of a pytree their shardings.

    A pattern is kept if all leaves that it matched have the same sharding. The other leaves get a
    rule for all paths that differ only in numbers, or a rule for each path. If these rules give any
    leaf the wrong sharding, no pattern is kept, and each path gets its own rule.

    Args:
        leaves: the leaves; it is an error if leaves with different shardings have the same path.
        labels: for each leaf, the index of the pattern that matched it; empty if there are no
            patterns.
        patterns: the patterns, in order.
    """
    groups = _grouped(leaves, labels or [-1] * len(leaves))
    rest = groups.pop(-1, [])
    kept: list[PathRule] = []
    for label, group in sorted(groups.items()):
        if _is_uniform(group):
            kept.append((patterns[label], group[0][1]))
        else:
            rest += group
    by_path = [(_exactly(path), sharding) for path, sharding in leaves]
    for rules in ([*_by_template(rest), *kept], by_path):
        if all(_find_sharding(rules, path) == sharding for path, sharding in leaves):
            return rules
    counts = Counter(path for path, _ in leaves)
    raise EinshardError(
        'leaves with different shardings have the same path',
        facts={'paths': first_of([repr(path) for path, n in counts.items() if n > 1], 8)},
    )


def _by_template(leaves: Sequence[Leaf]) -> Iterator[PathRule]:
    """Yields one rule for paths that differ only in numbers, or one each if shardings differ."""
    pairs = [(_exactly(path), sharding) for path, sharding in leaves]
    templates = [re.sub(r'\d+', r'\\d+', pattern) for pattern, _ in pairs]
    for template, group in _grouped(pairs, templates).items():
        if len(group) > 1 and _is_uniform(group):
            yield template, group[0][1]
        else:
            yield from group


def _exactly(path: str) -> str:
    return f'^{re.escape(path)}$'


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
    """The lists of rules in the code that is written, by variable name."""

    def __init__(self, writer: Writer):
        self._writer = writer
        self._tables: dict[str, Sequence[PathRule]] = {}

    def add(self, name: str, rules: Sequence[PathRule]) -> str:
        """Adds a list; returns its name, which may be that of an equal list."""
        for known, others in self._tables.items():
            if others == rules:
                return known
        while name in self._tables:
            name += '_'
        self._tables[name] = rules
        return name

    def parts(self, conditions: Sequence[str] = ()) -> list[str]:
        """Writes the lists, and the function that applies them.

        Args:
            conditions: the first lines of the inner function, which finds the sharding of a leaf.
        """
        if not self._tables:
            return []
        shardings = [sharding for rules in self._tables.values() for _, sharding in rules]
        # if all are on one mesh, in default memory, the lists have PartitionSpecs
        meshes = {s.mesh if s and has_default_memory(s) else None for s in shardings}
        (mesh,) = meshes if len(meshes) == 1 else [None]
        write, value, result = self._writer.sharding, 'sharding', 'sharding'
        if mesh:
            write, value = _spec_of, 'spec'
            result = f'NamedSharding({self._writer.mesh(mesh)}, spec)'
        lists = [
            statement(
                Brackets(
                    f'{name} = [',
                    tuple(Brackets('(', (raw_string(p), write(s))) for p, s in rules),
                    ']',
                )
            )
            for name, rules in self._tables.items()
        ]
        first = ''.join(f'        {line}\n' for line in conditions)
        return [*lists, _FUNCTION.format(conditions=first, value=value, result=result)]


def _spec_of(sharding: NamedSharding | None) -> Code:
    assert sharding is not None, 'all leaves have shardings'
    return spec_code(sharding.spec)
