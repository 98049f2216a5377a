"""The spec of one leaf: an expression with options, or a PartitionSpec, also of a NamedSharding."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from .._cache import cached
from .._errors import EinshardError, plural
from .._notation.expression import (
    ELLIPSIS,
    Expression,
    Term,
    axis_letters,
    check_mesh_axes,
    parse,
    write,
)
from .._notation.words import SIGNS
from .context import Fallback
from .mesh import UNCONSTRAINED, AnyMesh, partition_text, spec_axes, unreduced_kind

REPLICATED = '... -> * ...'


@dataclass(frozen=True, slots=True, eq=False)
class LeafSpec:
    """A parsed spec of one leaf. Compared by identity, which makes it a fast cache key."""

    written: Expression | None  # None if `partition` is the spec
    memory_kind: str | None = None
    on_missing: Fallback = 'error'  # 'replicate': ignore mesh axes that the mesh lacks
    on_indivisible: Fallback = 'error'  # 'replicate': replicate axes that are not divisible
    rule: str | None = None  # the rule that gave this spec, for errors
    mesh: AnyMesh | None = None  # the mesh of a spec that was a NamedSharding
    partition: PartitionSpec | None = None  # as given; None if the spec was an expression
    ndim: int | None = None  # the rank of the array, with which a PartitionSpec is written out

    @property
    def expression(self) -> Expression:
        """The expression, as written or in letters. Most PartitionSpecs never need theirs."""
        if self.partition is None:
            assert self.written is not None
            return self.written
        return _in_letters(self.partition, self.ndim)

    @property
    def unconstrained(self) -> tuple[int, ...]:
        """The positions of the axes that are P.UNCONSTRAINED."""
        entries = [] if self.partition is None else spec_axes(self.partition)
        return tuple(i for i, entry in enumerate(entries) if entry == UNCONSTRAINED)

    def __str__(self) -> str:
        return with_memory_kind(self.expression.text, self.memory_kind)


AnySpec: TypeAlias = str | LeafSpec  # the spec of one leaf, as text or parsed
JAX_SPECS = (NamedSharding, PartitionSpec)
LEAF_SPECS = (str, LeafSpec, *JAX_SPECS)

_MEMORY_KIND = re.compile(r'(.*\S)\s+\(in (\w+)\)\s*', re.DOTALL)


def with_memory_kind(expression: str, memory_kind: str | None) -> str:
    """Appends a memory kind other than 'device', as in 'a -> a8 (in pinned_host)'."""
    return expression if memory_kind in (None, 'device') else f'{expression} (in {memory_kind})'


def split_memory_kind(text: str) -> tuple[str, str | None]:
    """Splits 'a -> a8 (in pinned_host)' into the expression and the memory kind, if it has one."""
    match = _MEMORY_KIND.fullmatch(text)
    return (match[1], match[2]) if match else (text, None)


def as_leaf_spec(spec: AnySpec | NamedSharding | PartitionSpec) -> LeafSpec:
    """Parses or converts a spec. Equal specs give the same object."""
    return spec if isinstance(spec, LeafSpec) else _read(spec)


@cached
def _read(spec: str | NamedSharding | PartitionSpec) -> LeafSpec:
    if isinstance(spec, str):
        text, memory_kind = split_memory_kind(spec)
        return LeafSpec(parse(text), memory_kind)
    if isinstance(spec, NamedSharding):
        default = NamedSharding(spec.mesh, PartitionSpec()).memory_kind
        memory_kind = None if spec.memory_kind == default else spec.memory_kind
        return replace(_read(spec.spec), memory_kind=memory_kind, mesh=spec.mesh)
    kind = unreduced_kind(spec)
    if kind != 'sum':
        raise EinshardError(
            f'partial sums are supported, but not the partial {kind} {partition_text(spec)}',
            code='partial-sum',
        )
    leaf_spec = LeafSpec(None, partition=spec)
    entries = (entry for entry in spec_axes(spec) if entry != UNCONSTRAINED)
    axes = [*itertools.chain(*entries, spec.unreduced, spec.reduced)]
    if len({*axes}) < len(axes):
        try:
            check_mesh_axes(leaf_spec.expression)
        except EinshardError as error:
            raise error.about(spec=partition_text(spec)) from None
    return leaf_spec


@cached
def with_ndim(spec: LeafSpec, ndim: int) -> LeafSpec:
    """Sets the rank of a spec that was a PartitionSpec. Returns other specs unchanged."""
    return spec if spec.partition is None else replace(spec, ndim=ndim)


@cached
def _in_letters(spec: PartitionSpec, ndim: int | None) -> Expression:
    """Converts a PartitionSpec to an expression, with '...' if the rank is not known."""
    entries = [() if entry == UNCONSTRAINED else entry for entry in spec_axes(spec)]
    signed = signed_terms(spec, sorted(spec.unreduced | spec.reduced, key=str))
    if ndim is not None and len(entries) > ndim:
        noun = 'entry' if len(entries) == 1 else 'entries'
        raise EinshardError(
            f'{partition_text(spec)} has {len(entries)} {noun}, '
            f'but the array has {plural(ndim, "dimension")}',
            code='ndim',
        )
    if not (any(entries) or signed):
        return parse(REPLICATED)
    n = len(entries) if ndim is None else ndim
    entries += [()] * (n - len(entries))
    names = itertools.islice(axis_letters(), n)
    axes = [
        Term(name, mesh_axes=tuple(map(str, e))) for name, e in zip(names, entries, strict=True)
    ]
    rest = [Term(ELLIPSIS)] if ndim is None else []
    expression = write([*(Term(axis.name) for axis in axes), *rest], [*axes, *rest, *signed])
    check_mesh_axes(expression)
    return expression


def signed_terms(spec: PartitionSpec, order: Collection[Any]) -> list[Term]:
    """Returns a '+' term for unreduced mesh axes and a '=' term for reduced ones, if there are any.

    `order` is the order of the mesh axes in a term.
    """
    groups = [
        (sign, tuple(str(axis) for axis in order if axis in axes))
        for sign, axes in zip(SIGNS, (spec.unreduced, spec.reduced), strict=True)
    ]
    return [Term(mesh_axes=axes, sign=sign) for sign, axes in groups if axes]


@cached
def with_fallbacks(
    spec: AnySpec,
    *,
    on_missing: Fallback = 'error',
    on_indivisible: Fallback = 'error',
    rule: str | None = None,
) -> LeafSpec:
    """Returns the spec with these options. For 'error', the default, keeps the spec's own option.

    Sets `rule` unless the spec has one, so that errors show the rule of the innermost `Rules`.
    """
    leaf_spec = as_leaf_spec(spec)
    if on_missing == 'error':
        on_missing = leaf_spec.on_missing
    if on_indivisible == 'error':
        on_indivisible = leaf_spec.on_indivisible
    rule = leaf_spec.rule or rule
    return replace(leaf_spec, on_missing=on_missing, on_indivisible=on_indivisible, rule=rule)


def convert_jax_spec(spec: Any) -> Any:
    """Converts a PartitionSpec or NamedSharding to a LeafSpec. Returns other specs unchanged."""
    return as_leaf_spec(spec) if isinstance(spec, JAX_SPECS) else spec


def unconstrained_error() -> EinshardError:
    return EinshardError('P.UNCONSTRAINED is only for values in a traced function', code='spec')


def with_expression(spec: AnySpec, expression: str) -> AnySpec:
    """Returns the spec with another expression, and the same memory kind and options."""
    if isinstance(spec, str):
        return with_memory_kind(expression, split_memory_kind(spec)[1])
    return replace(spec, written=parse(expression), partition=None)
