"""Writes the specs of a function with the placements of a plan, as source text to paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.tree_util as jtu

from .._notation.write import write_short
from .._sharding.leaf_spec import LEAF_SPECS, as_leaf_spec, in_memory
from .._trees.rules import Rules
from .._trees.specs import Spec
from .candidate import Candidate


def spec_lines(arguments: Sequence[tuple[str, Spec]], candidate: Candidate) -> tuple[str, ...]:
    """The spec of each argument: "x = 'batch@x embed'", "params = Rules([...])".

    Arguments without a spec, and specs that are functions, are left out.
    """
    axes = dict(candidate.axes)
    return tuple(line for name, spec in arguments for line in _assigned(name, spec, axes))


def _assigned(name: str, spec: Spec, axes: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    if isinstance(spec, Rules):
        yield f'{name} = Rules(['
        for pattern, one in spec.rules:
            if isinstance(one, LEAF_SPECS):
                yield f'    ({raw_string(pattern)}, {expanded(one, axes)!r}),'
        default = spec.default if isinstance(spec.default, LEAF_SPECS) else None
        yield '])' if default is None else f'], default={expanded(default, axes)!r})'
    elif isinstance(spec, LEAF_SPECS):
        yield f'{name} = {expanded(spec, axes)!r}'
    elif spec is not None and not callable(spec):
        leaves, treedef = jtu.tree_flatten(spec, is_leaf=lambda one: isinstance(one, Rules))
        if all(isinstance(leaf, LEAF_SPECS) for leaf in leaves):
            yield f'{name} = {jtu.tree_unflatten(treedef, [expanded(one, axes) for one in leaves])}'


def raw_string(pattern: str) -> str:
    """Writes a pattern as a raw string, if it has backslashes."""
    quoted = repr(pattern)
    return f'r{quoted}'.replace('\\\\', '\\') if '\\' in pattern else quoted


def expanded(spec: Any, axes: Mapping[str, tuple[str, ...]]) -> str:
    """Writes the mesh axes of a plan into an expression without placements."""
    leaf_spec = as_leaf_spec(spec)
    expression = leaf_spec.expression
    if not expression.short:
        return str(leaf_spec)
    terms = [
        term if term.is_sharded or not axes.get(term.name or '') else _on(term, axes)
        for term in expression.right
    ]
    return in_memory(write_short(terms).text, leaf_spec.memory_kind)


def _on(term: Any, axes: Mapping[str, tuple[str, ...]]) -> Any:
    return replace(term, mesh_axes=axes[term.name])
