"""The tables of `Rules.table` and `StateSpec.table`, which show how leaves are sharded."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu

from .._errors import EinshardError, combine_errors, plural, quoted
from .._page import Column, Page, Section, page_text
from .._page_html import page_html
from .._sharding.leaf_spec import AnySpec, with_memory_kind
from .._sharding.mesh import MeshLike
from .._sharding.resolve import resolve
from .._sharding.scopes import current_context, mesh_scope
from .._text import first_of, format_bytes, shape_text
from .paths import leaf_paths, leaf_text
from .specs import check_registered_pytree, context_of

_HEADS = ('path', 'array', 'rule', 'placement', 'shard')
_COLUMNS = (*map(Column, _HEADS), Column('per device', right=True))


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf of the table: the rule for its path, its spec, and its shard."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    rule: str  # a pattern, 'default', 'scalar' or 'small'; 'as w' for a moment of parameter w
    expression: str | None  # None without a spec
    shard_shape: tuple[int, ...]  # without a spec, the full shape
    bytes: int  # per device
    total_bytes: int
    replicated_axes: tuple[int, ...]  # replicated because their sizes are not divisible
    missing_axes: tuple[str, ...]  # named in the spec, but not in the mesh

    @property
    def sharded(self) -> bool:
        return self.bytes < self.total_bytes


@dataclass(frozen=True)
class Table:
    """How specs shard the leaves of a pytree, made by `Rules.table` or a `for_optimizer` spec.

    Prints as text; notebooks show it as HTML.

    Attributes:
        rows: one row per array, in the order of the leaves.
        n_devices: the number of devices of the mesh.
        unused: patterns that match no path.
        shadowed: (pattern, earlier pattern) pairs: the earlier one matches first wherever the
            pattern would apply.
        unneeded: patterns that never apply, because earlier patterns together match all their
            paths.
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
    def total_bytes(self) -> int:
        """The bytes of all arrays, without replicas."""
        return sum(row.total_bytes for row in self.rows)

    @property
    def sharded_share(self) -> float:
        """The fraction of all bytes that are in sharded arrays, 0 to 1."""
        sharded = sum(row.total_bytes for row in self.rows if row.sharded)
        return sharded / self.total_bytes if self.total_bytes else 0.0

    @property
    def copies(self) -> float:
        """The average number of copies of each byte.

        1 if all arrays are sharded over all devices, `n_devices` if all are replicated.
        """
        all_devices = self.bytes_per_device * self.n_devices
        return all_devices / self.total_bytes if self.total_bytes else 1.0

    def largest_replicated(self, n: int = 5) -> list[Row]:
        """Returns the n largest replicated arrays; omits arrays without a spec."""
        replicated = [row for row in self.rows if row.expression and not row.sharded]
        return sorted(replicated, key=lambda row: -row.bytes)[:n]

    def __str__(self) -> str:
        return page_text(self._page(), width=None)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return page_html(self._page())

    def _page(self) -> Page:
        rows: list[tuple[str, ...]] = []
        for row in self.rows:
            array, shard = f'{row.dtype}{shape_text(row.shape)}', shape_text(row.shard_shape)
            spec = row.expression or 'no spec'
            rows.append((row.path, array, row.rule, spec, shard, format_bytes(row.bytes)))
        table = Section('', _COLUMNS, tuple(rows), has_rule=True)
        return Page('', (table, Section('', lines=self._notes())))

    def _notes(self) -> tuple[str, ...]:
        notes = [
            f'{format_bytes(self.bytes_per_device)} per device on '
            f'{plural(self.n_devices, "device")}, {format_bytes(self.total_bytes)} in total; '
            f'{self.sharded_share:.1%} of the bytes are sharded; '
            f'{self.copies:.2f} copies of each byte on average'
        ]
        replicated = [row for row in self.largest_replicated() if row.bytes]
        if replicated and self.n_devices > 1:
            listed = ', '.join(f'{row.path} ({format_bytes(row.bytes)})' for row in replicated)
            notes.append(f'largest replicated arrays: {listed}')
        unplaced = [row for row in self.rows if not row.expression]
        if unplaced:
            n_bytes = format_bytes(sum(row.bytes for row in unplaced))
            listed = first_of([row.path for row in unplaced], 5)
            notes.append(f'no spec, so counted as replicated: {listed} ({n_bytes})')
        notes += [
            f'not divisible, so replicated: axis {axis} of {row.path}, size {row.shape[axis]}'
            for row in self.rows
            for axis in row.replicated_axes
        ]
        missing = dict.fromkeys(axis for row in self.rows for axis in row.missing_axes)
        if missing:
            notes.append(f'not in the mesh, so replicated: {quoted(missing)}')
        notes += [f"rule never matches: '{pattern}'" for pattern in self.unused]
        notes += [
            f"rule never applies: '{late}', because '{early}' matches first"
            for late, early in self.shadowed
        ]
        notes += [
            f"rule never applies: '{pattern}', because earlier rules match first"
            for pattern in self.unneeded
        ]
        return tuple(notes)


def make_table(
    spec: Any, tree: Any, mesh: MeshLike | None, patterns: Sequence[re.Pattern[str]] = ()
) -> Table:
    """Builds the table of a pytree.

    Args:
        spec: `Rules` or a `StateSpec`, whose `find_all` returns a (rule, spec) pair for each leaf.
            A rule is an index into `patterns`, or a word such as 'default'.
    """
    context, paths = context_of(spec, current_context(mesh)), leaf_paths(tree)
    with mesh_scope(context.mesh):
        rules_and_specs: Sequence[tuple[int | str | None, AnySpec | None]] = spec.find_all(
            paths, jtu.tree_leaves(tree)
        )
    rows: list[Row] = []
    errors: list[EinshardError] = []
    leaves = zip(paths, jtu.tree_leaves(tree), rules_and_specs, strict=True)
    for path, leaf, (rule, leaf_spec) in leaves:
        aval = None if rule == 'not an array' else _aval(leaf, path, leaf_spec)
        if aval is None:
            continue
        name = patterns[rule].pattern if isinstance(rule, int) else str(rule)
        shape, itemsize = tuple(aval.shape), aval.dtype.itemsize
        placement, expression, shard_shape = None, None, shape
        if leaf_spec is not None:
            try:
                placement = resolve(leaf_spec, shape, context, owner='Rules')
            except EinshardError as error:
                errors.append(error.about(array=leaf_text(path, aval), rule=f"'{name}'"))
                continue
            sharding = placement.sharding
            expression = with_memory_kind(placement.expression.text, sharding.memory_kind)
            shard_shape = sharding.shard_shape(shape)
        rows.append(
            Row(
                path=path,
                shape=shape,
                dtype=str(aval.dtype),
                rule=name,
                expression=expression,
                shard_shape=shard_shape,
                bytes=math.prod(shard_shape) * itemsize,
                total_bytes=math.prod(shape) * itemsize,
                replicated_axes=placement.replicated_axes if placement else (),
                missing_axes=placement.missing_axes if placement else (),
            )
        )
    if errors:
        raise combine_errors(errors) from None
    unused, shadowed, unneeded = list[str](), list[tuple[str, str]](), list[str]()
    for i, pattern in enumerate(patterns):
        pairs = zip(paths, rules_and_specs, strict=True)
        rules_of_matches = [rule for path, (rule, _) in pairs if pattern.search(path)]
        applied = [rule for rule in rules_of_matches if isinstance(rule, int)]
        if not rules_of_matches:
            unused.append(pattern.pattern)
        elif len(set(applied)) > 1 and i not in applied:
            unneeded.append(pattern.pattern)
        elif applied and i not in applied:
            shadowed.append((pattern.pattern, patterns[applied[0]].pattern))
    n_devices = context.lowering_mesh.size
    return Table(tuple(rows), n_devices, tuple(unused), tuple(shadowed), tuple(unneeded))


def _aval(leaf: Any, path: str, spec: AnySpec | None) -> Any:
    """Returns the JAX type of a leaf, or None for an unsupported array without a spec."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return jax.typeof(leaf)
    except (TypeError, ValueError):  # ValueError: a masked array
        if spec is None:
            return None
        try:
            check_registered_pytree(leaf)
            raise EinshardError(f'JAX does not support dtype {leaf.dtype}', code='array')
        except EinshardError as error:
            raise error.about(array=leaf_text(path, leaf)) from None
