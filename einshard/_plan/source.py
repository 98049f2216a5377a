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
    """Returns lines that assign a spec to each argument, such as "x = 'batch@x embed'".

    `Rules` have a line for each rule. Specs that are None or functions are left out, as are pytrees
    of specs that contain functions or `Rules`. `arguments` are pairs of a name and a spec.
    """
    axes = dict(candidate.axes)
    return tuple(line for name, spec in arguments for line in _assigned(name, spec, axes))


def _assigned(name: str, spec: Spec, axes: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    if isinstance(spec, Rules):
        yield f'{name} = Rules(['
        for pattern, leaf_spec in spec.rules:
            if isinstance(leaf_spec, LEAF_SPECS):
                yield f'    ({raw_string(pattern)}, {_with_mesh_axes(leaf_spec, axes)!r}),'
        default = spec.default if isinstance(spec.default, LEAF_SPECS) else None
        yield '])' if default is None else f'], default={_with_mesh_axes(default, axes)!r})'
    elif isinstance(spec, LEAF_SPECS):
        yield f'{name} = {_with_mesh_axes(spec, axes)!r}'
    elif spec is not None and not callable(spec):
        leaves, treedef = jtu.tree_flatten(spec, is_leaf=lambda one: isinstance(one, Rules))
        if all(isinstance(leaf, LEAF_SPECS) for leaf in leaves):
            texts = [_with_mesh_axes(leaf, axes) for leaf in leaves]
            yield f'{name} = {jtu.tree_unflatten(treedef, texts)}'


def raw_string(pattern: str) -> str:
    """Returns the source text of a pattern: a raw string if it has backslashes."""
    quoted = repr(pattern)
    return f'r{quoted}'.replace('\\\\', '\\') if '\\' in pattern else quoted


def _with_mesh_axes(spec: Any, axes: Mapping[str, tuple[str, ...]]) -> str:
    """Writes a spec with the mesh axes of its axis names; expressions with '->' are unchanged."""
    leaf_spec = as_leaf_spec(spec)
    expression = leaf_spec.expression
    if not expression.short:
        return str(leaf_spec)
    terms = [
        term if term.is_sharded else replace(term, mesh_axes=axes.get(term.name or '', ()))
        for term in expression.right
    ]
    return in_memory(write_short(terms).text, leaf_spec.memory_kind)
