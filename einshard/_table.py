"""What rules make of a tree: the table of `Rules.table`."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu

from ._errors import EinshardError, quoted
from ._sharding import Placement, Where, find_fitting, mesh_at, offer_missing
from ._specs import LeafSpec, leaf_paths, leaf_text
from ._words import MONO, amount, shape_text

_HEADS = ('path', 'array', 'rule', 'placement', 'on a device', 'bytes')


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf: where it comes from, and what a device holds of it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    rule: str  # the pattern; 'default', or why no rule was needed: 'scalar', 'small'
    expression: str | None  # None: left alone
    shard_shape: tuple[int, ...]
    bytes: int  # on each device
    whole_bytes: int
    replicated_axes: tuple[int, ...]  # those that the expression cuts, but that do not divide
    missing_axes: tuple[str, ...]  # mesh axes that it names, but that the mesh does not have

    @property
    def sharded(self) -> bool:
        return self.bytes < self.whole_bytes


@dataclass(frozen=True)
class Table:
    """The leaves of a tree under some rules. Printed it is text; in a notebook, HTML.

    Attributes:
        rows: one for each array of the tree, in its order.
        n_devices: how many devices share it.
        unused: patterns that no path matches.
        shadowed: patterns whose every match one earlier rule takes, with that rule's pattern.
        unneeded: patterns whose matches several earlier rules take.
    """

    rows: tuple[Row, ...]
    n_devices: int
    unused: tuple[str, ...]
    shadowed: tuple[tuple[str, str], ...]
    unneeded: tuple[str, ...]

    @property
    def bytes_per_device(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def whole_bytes(self) -> int:
        """The bytes of all arrays, each counted once."""
        return sum(row.whole_bytes for row in self.rows)

    @property
    def sharded_share(self) -> float:
        """The share of those bytes that are in arrays which are cut, 0 to 1."""
        sharded = sum(row.whole_bytes for row in self.rows if row.sharded)
        return sharded / self.whole_bytes if self.whole_bytes else 0.0

    @property
    def copies(self) -> float:
        """How often the average byte is held: 1 where all is cut, `n_devices` where nothing is."""
        held = self.bytes_per_device * self.n_devices
        return held / self.whole_bytes if self.whole_bytes else 1.0

    def largest_replicated(self, n: int = 5) -> list[Row]:
        """The largest arrays that every device holds whole."""
        whole = [row for row in self.rows if not row.sharded]
        return sorted(whole, key=lambda row: -row.bytes)[:n]

    def __str__(self) -> str:
        cells = [_HEADS, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(_HEADS))]
        lines = [
            '  '.join(
                cell.rjust(width) if head == 'bytes' else cell.ljust(width)
                for cell, width, head in zip(line, widths, _HEADS, strict=True)
            ).rstrip()
            for line in cells
        ]
        lines.insert(1, '  '.join('-' * width for width in widths))
        return '\n'.join([*lines, '', *self._notes()])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        lines = [
            ('th', '', _HEADS),
            *(('td', f';{MONO}', tuple(map(html.escape, _cells(row)))) for row in self.rows),
        ]
        body = ''.join(
            '<tr>'
            + ''.join(
                f'<{tag} style="white-space:nowrap;padding:0 0.6em;'
                f'text-align:{"right" if name == "bytes" else "left"}{style}">{cell}</{tag}>'
                for name, cell in zip(_HEADS, line, strict=True)
            )
            + '</tr>'
            for tag, style, line in lines
        )
        notes = ''.join(f'<li>{html.escape(note)}</li>' for note in self._notes())
        # a model has hundreds of leaves: they scroll, and the totals stay in sight
        box = 'overflow:auto;max-height:30em'
        return f'<div style="{box}"><table>{body}</table></div><ul>{notes}</ul>'

    def _notes(self) -> list[str]:
        notes = [
            f'{amount(self.bytes_per_device)} on each of {self.n_devices} devices, of '
            f'{amount(self.whole_bytes)} in all; {self.sharded_share:.1%} of it is in arrays that '
            f'are cut, and the average byte is held {self.copies:.2f} times'
        ]
        replicated = [row for row in self.largest_replicated() if row.bytes]
        if replicated and self.n_devices > 1:
            listed = ', '.join(f'{row.path} ({amount(row.bytes)})' for row in replicated)
            notes.append(f'largest on every device: {listed}')
        notes += [
            f'not divisible, so replicated: axis {axis} of {row.path}, size {row.shape[axis]}'
            for row in self.rows
            for axis in row.replicated_axes
        ]
        missing = dict.fromkeys(axis for row in self.rows for axis in row.missing_axes)
        if missing:
            notes.append(f'not in the mesh, so nothing is cut over it: {quoted(missing)}')
        notes += [f"never matches: '{pattern}'" for pattern in self.unused]
        notes += [f"never reached: '{late}', behind '{early}'" for late, early in self.shadowed]
        notes += [
            f"never needed: '{pattern}', whose matches the rules before it take"
            for pattern in self.unneeded
        ]
        return notes


def make_table(
    tree: Any,
    found: Sequence[tuple[int | str | None, LeafSpec | None]],
    patterns: Sequence[re.Pattern[str]],
    where: Where,
) -> Table:
    """The table of a tree, of whose leaves rule and spec were found."""
    paths = leaf_paths(tree)
    rows: list[Row] = []
    for path, leaf, (rule, spec) in zip(paths, jtu.tree_leaves(tree), found, strict=True):
        aval = None if rule == 'no array' else _aval(leaf, path, spec)
        if aval is None:
            continue
        name = patterns[rule].pattern if isinstance(rule, int) else str(rule)
        placement = None
        if spec is not None:
            try:
                placement = find_fitting(spec, tuple(aval.shape), where, None)
            except EinshardError as error:
                fix = "Rules(..., missing='replicate')"
                error = offer_missing(error, fix, spec, tuple(aval.shape), where, None)
                raise error.about(array=leaf_text(path, aval), rule=f"'{name}'") from None
        rows.append(_row(path, aval, name, placement))
    unused: list[str] = []
    shadowed: list[tuple[str, str]] = []
    unneeded: list[str] = []
    for i, pattern in enumerate(patterns):
        pairs = zip(paths, found, strict=True)
        matched = [rule for path, (rule, _) in pairs if pattern.search(path)]
        taken = [rule for rule in matched if isinstance(rule, int)]
        if not matched:
            unused.append(pattern.pattern)
        elif len(set(taken)) > 1 and i not in taken:
            unneeded.append(pattern.pattern)
        elif taken and i not in taken:
            shadowed.append((pattern.pattern, patterns[taken[0]].pattern))
    return Table(tuple(rows), mesh_at(where).size, tuple(unused), tuple(shadowed), tuple(unneeded))


def _aval(leaf: Any, path: str, spec: LeafSpec | None) -> Any:
    """Shape and dtype of a leaf as JAX will have it; None for what it has no arrays of."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return jax.typeof(leaf)
    except TypeError:
        if spec is None:
            return None
        raise EinshardError(
            f'JAX has no arrays of {leaf.dtype}', facts={'array': leaf_text(path, leaf)}
        ) from None


def _row(path: str, aval: Any, rule: str, placement: Placement | None) -> Row:
    shape = tuple(aval.shape)
    shard_shape = placement.sharding.shard_shape(shape) if placement else shape
    itemsize = aval.dtype.itemsize
    return Row(
        path=path,
        shape=shape,
        dtype=str(aval.dtype),
        rule=rule,
        expression=placement.expression.text if placement else None,
        shard_shape=shard_shape,
        bytes=math.prod(shard_shape) * itemsize,
        whole_bytes=math.prod(shape) * itemsize,
        replicated_axes=placement.given_up if placement else (),
        missing_axes=placement.missing if placement else (),
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.path,
        f'{row.dtype}{shape_text(row.shape)}',
        row.rule,
        row.expression or 'left alone',
        shape_text(row.shard_shape),
        amount(row.bytes),
    )
