"""Reads the axis names that Flax and Haliax keep with their arrays.

`flax.linen` boxes arrays with the names of their axes (`Partitioned`, `LogicallyPartitioned`);
`flax.nnx` keeps the names in the metadata of variables; a `NamedArray` of Haliax has axes with
names. All are recognized by their attributes, so these libraries are not imported.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import EinshardError, combine_errors, plural, quoted
from .._notation.expression import ELLIPSIS, Term, axis_letters, parse
from .._sharding.mesh import UNCONSTRAINED, spec_axes
from .paths import leaf_paths, leaf_text
from .specs import shape_of

# the names of each axis of an array; () for an axis without a name
MetadataNames: TypeAlias = tuple[tuple[str, ...], ...]


def metadata_names(tree: Any) -> list[MetadataNames | None]:
    """Returns the axis names of each leaf, or None for a leaf without names.

    There may be fewer names than axes: `nnx.vmap` and `nn.scan` stack layers along a new axis,
    which they name only if asked.
    """
    found: list[MetadataNames | None] = []
    for node in jtu.tree_leaves(tree, is_leaf=lambda x: _names(x) is not None):
        entries = _names(node)
        groups = [entry if isinstance(entry, tuple | list) else (entry,) for entry in entries or ()]
        names = tuple(
            tuple(str(name) for name in group if name not in (None, *UNCONSTRAINED))
            for group in groups
        )
        found += [None if entries is None else names] * len(jtu.tree_leaves(node))
    return found


def fitting_names(tree: Any) -> list[MetadataNames | None]:
    """Returns the valid axis names of each leaf, or None if it does not have one for each axis."""
    pairs = zip(jtu.tree_leaves(tree), metadata_names(tree), strict=True)
    return [
        tuple(tuple(filter(_is_axis_name, axis)) for axis in names)
        if names is not None and _fits(names, leaf)
        else None
        for leaf, names in pairs
    ]


def invalid_names(tree: Any) -> list[str]:
    """Returns the names that are not valid in expressions, such as those with digits."""
    words = {name for names in metadata_names(tree) for axis in names or () for name in axis}
    return sorted(word for word in words if not _is_axis_name(word))


def misfits(tree: Any) -> list[tuple[str, Any, MetadataNames]]:
    """Returns (path, leaf, names) of the leaves that have names, but not one for each axis."""
    leaves = zip(leaf_paths(tree), jtu.tree_leaves(tree), metadata_names(tree), strict=True)
    return [(path, leaf, names) for path, leaf, names in leaves if names and not _fits(names, leaf)]


def _fits(names: MetadataNames, leaf: Any) -> bool:
    return len(names) == len(getattr(leaf, 'shape', ()))


def rules_from_names(tree: Any, is_excluded: Callable[[str], object]) -> list[tuple[str, str]]:
    """Returns (pattern, short-form expression) pairs for the arrays of a tree that have names.

    Paths that differ in numbers only, as those of layers, share a pattern if their names are equal.
    A pattern matches at the end of a path, so that it also matches the moments of a parameter.
    Skips paths that are excluded.
    """
    leaves = [*zip(leaf_paths(tree), jtu.tree_leaves(tree), metadata_names(tree), strict=True)]
    if all(names is None for _, _, names in leaves):
        raise EinshardError(
            'no array of the tree has axis names',
            code='rules',
            facts={'expected': 'arrays of Flax or Haliax with the names of their axes'},
        )
    errors: list[EinshardError] = []
    groups: defaultdict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for path, leaf, names in leaves:
        pattern = re.sub(r'\d+', r'\\d+', re.escape(path))
        expression = None
        if names is not None and shape_of(leaf) and not is_excluded(path):
            try:
                expression = _short_form(names, len(leaf.shape))
            except EinshardError as error:
                text = ', '.join(quoted(axis) if axis else 'None' for axis in names)
                errors.append(error.about(array=leaf_text(path, leaf), names=text))
        groups[pattern].append((path, expression))
    if errors:
        error = combine_errors(errors)
        raise EinshardError(
            **error.parts(
                code='rules',
                facts={
                    **error.facts,
                    'to shard it by another spec': 'Rules.from_axis_names(tree, [(pattern, spec)])',
                },
            )
        )
    # the longest paths come first: 'kernel' is also the end of 'up/kernel'
    found: list[tuple[str, str]] = []
    unnamed = [path for group in groups.values() for path, expression in group if not expression]
    for pattern, group in sorted(groups.items(), key=lambda item: -item[0].count('/')):
        pairs = [*dict.fromkeys((pattern, expression) for _, expression in group)]
        if len(pairs) > 1:
            pairs = [(re.escape(path), expression) for path, expression in group]
        for text, expression in pairs:
            if expression is not None:
                pattern = f'(^|/){text}$'
                is_ambiguous = any(re.search(pattern, path) for path in unnamed)
                found.append((f'^{text}$' if is_ambiguous else pattern, expression))
    return found


def _short_form(names: MetadataNames, ndim: int) -> str:
    """Writes the names of axes as an expression: (('embed',), ()) as 'embed a'."""
    if len(names) != ndim:
        raise EinshardError(
            f'an array with {plural(ndim, "axis")} has names for {len(names)}',
            facts={
                'note': 'nnx.vmap and nn.scan name the axis of stacked layers if they get '
                "{nnx.PARTITION_NAME: 'layers'}"
            },
        )
    taken = {name for axis in names for name in axis}
    free = (letter for letter in axis_letters() if letter not in taken)
    words: list[str] = []
    for axis in names:
        if len(axis) > 1:
            raise EinshardError(
                f'an array axis has {len(axis)} names: {quoted(axis)}',
                facts={'for names of mesh axes': 'einshard(state, nnx.get_partition_spec(state))'},
            )
        words.append(axis[0] if axis else next(free))
    for word in words:
        if not _is_axis_name(word):
            raise EinshardError(
                f"'{word}' is not a valid axis name", facts={'expected': 'letters and underscores'}
            )
    return parse(' '.join(words)).text


def _is_axis_name(word: str) -> bool:
    try:
        return word != ELLIPSIS and parse(word).right == (Term(word),)
    except EinshardError:
        return False


def _names(node: Any) -> Sequence[Any] | None:
    """Returns the names in a box, variable or named array, or None if the node has none."""
    if isinstance(node, type):
        return None
    if hasattr(node, 'unbox') and isinstance(getattr(node, 'names', None), tuple):
        return node.names
    axes = getattr(node, 'axes', None)
    if hasattr(node, 'array') and isinstance(axes, tuple):
        names = [getattr(axis, 'name', None) for axis in axes]
        return names if all(isinstance(name, str) for name in names) else None
    get_metadata: Callable[[], dict[str, Any]] | None = getattr(node, 'get_metadata', None)
    if get_metadata is None:
        return None
    metadata = get_metadata()
    # versions of Flax have different keys for the names
    found = [metadata.get(key) for key in ('out_sharding', 'sharding_names', 'sharding')]
    found = [x.spec if isinstance(x, NamedSharding) else x for x in found]
    found = [spec_axes(x) if isinstance(x, PartitionSpec) else x for x in found]
    return next((names for names in found if isinstance(names, tuple | list)), None)
