"""Applies the spec of an argument or a result to its leaves."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from .._arrays.constrain import constrain, place_constant
from .._errors import EinshardError, combine_errors
from .._notation.expression import ELLIPSIS
from .._notation.layout import axis_positions
from .._sharding.context import Context
from .._sharding.leaf_spec import LeafSpec
from .._sharding.placement import Placement
from .._sharding.resolve import resolve
from .._text import array_text
from .._trees.partition import with_static_nodes
from .._trees.paths import leaves_with_paths, path_text
from .._trees.specs import (
    Spec,
    check_registered_pytree,
    is_array,
    is_none,
    leaf_specs,
    needs_leaves,
)

# (key path of a leaf, the leaf, its placement or None without a spec)
LeafPlacement: TypeAlias = tuple[Sequence[Any], Any, Placement | None]


class ValueSpec:
    """The spec of an argument of a function, or of its result.

    Attributes:
        function: the name of the function.
        name: the label of the argument, such as 'w' or 'args[0]', or None for the result.
        spec: the parsed spec, or None to leave the sharding to the compiler.
    """

    def __init__(self, function: str, name: str | None, spec: Spec):
        self.function = function
        self.name = name
        self.spec = spec
        self._needs_leaves = needs_leaves(spec)
        self._is_tree = not (spec is None or isinstance(spec, LeafSpec))

        # which rules may shard
        self._has_names_after_ellipsis = any(
            isinstance(leaf, LeafSpec)
            and leaf.written is not None
            and leaf.written.short
            and ELLIPSIS in leaf.written.names[:-1]
            for leaf in jtu.tree_leaves(spec, is_leaf=is_none)
        )

    def needs_leaves(self, context: Context) -> bool:
        """Whether the shardings depend on ranks, paths or shapes of leaves."""
        if self._needs_leaves or self.spec is None:
            return self._needs_leaves
        if self._is_tree and 'equinox' in sys.modules:  # it does not fit a `Partitioned`
            return True
        if context.axis_rules and self._has_names_after_ellipsis:
            return True
        return context.replicates_indivisible

    def find_placements(self, value: Any, context: Context) -> list[LeafPlacement]:
        """Finds the placement of every leaf, or returns [] if the value has no spec at all.

        Raises one error for all leaves that do not fit.
        """
        if self.spec is None:
            return []
        try:
            tree = with_static_nodes(value)
            specs = leaf_specs(tree, jtu.tree_leaves(tree), self.spec, context.mesh)
        except EinshardError as error:
            # An error with the fact 'function' comes from a callable spec of `per_device`, and is
            # about the mesh, not about this value.
            if 'function' in error.facts:
                raise
            owner = 'the result' if self.name is None else f"parameter '{self.name}'"
            error = error.about(spec_of=f'{owner} of {self.function}')
            is_list = isinstance(self.spec, list | tuple) and jtu.all_leaves([value])
            if is_list and self.name is not None:
                hint = 'pass the specs one by one, not as a list: one for each parameter'
                error = EinshardError(**error.parts(facts={**error.facts, 'instead': hint}))
            raise error from None
        placements: list[LeafPlacement] = []
        errors: list[EinshardError] = []
        for (path, leaf), spec in zip(leaves_with_paths(value), specs, strict=True):
            placement = None
            if spec is not None:
                error = self._not_an_array(path, leaf)
                if error is not None:
                    errors.append(error)
                    continue
                try:
                    placement = resolve(spec, np.shape(leaf), context)
                except EinshardError as misfit:
                    errors.append(misfit.about(array=self.leaf_text(path, leaf)))
                    continue
            placements.append((path, leaf, placement))
        if errors:
            raise combine_errors(errors) from None
        return placements

    def shardings(self, value: Any, context: Context) -> Any:
        """Returns the shardings for `jax.jit`: a pytree prefix, or one per leaf if `needs_leaves`.

        The sharding of a value or a leaf without a spec is None.
        """
        if self.spec is None:
            return None
        if not self.needs_leaves(context):
            return jtu.tree_map(partial(self._sharding, context), self.spec, is_leaf=is_none)
        placements = self.find_placements(value, context)
        shardings = [placement and placement.sharding for _, _, placement in placements]
        return jtu.tree_unflatten(jtu.tree_structure(value), shardings)

    def named_shardings(
        self, value: Any, context: Context
    ) -> Iterator[tuple[Sequence[str], NamedSharding]]:
        """Yields the axis names and the sharding of every leaf with a spec."""
        for _, leaf, placement in self.find_placements(value, context):
            if placement is not None:
                positions = axis_positions(placement.expression, np.ndim(leaf))
                names = {i: name for name, i in positions.items()}
                # names are missing only for axes in '...', which are unsharded
                yield [names.get(i, '') for i in range(np.ndim(leaf))], placement.sharding

    def constrain(self, value: Any, context: Context) -> Any:
        def constrain_leaf(leaf: Any, placement: Placement) -> Any:
            return (constrain if isinstance(leaf, Tracer) else place_constant)(leaf, placement)

        return self.map_leaves(constrain_leaf, value, context)

    def leaf_text(self, path: Sequence[Any], leaf: Any) -> str:
        """Formats a leaf for errors: "float32[6,8], parameter 'params/w' of step"."""
        text = path_text(path)
        if self.name is None:
            suffix = f" '{text}'" if path else ''
            return f'{array_text(leaf)}, result{suffix} of {self.function}'
        return f'{array_text(leaf)}, parameter {self.leaf_name(path)!r} of {self.function}'

    def leaf_name(self, path: Sequence[Any]) -> str:
        """Returns the name of a leaf of an argument, such as 'params/w'."""
        return f'{self.name}/{path_text(path)}' if path else str(self.name)

    def _not_an_array(self, path: Sequence[Any], leaf: Any) -> EinshardError | None:
        """Returns the error for a leaf that is not an array, or None for an array."""
        try:
            check_registered_pytree(leaf)
        except EinshardError as error:
            return error.about(array=self.leaf_text(path, leaf))
        if is_array(leaf):
            return None
        facts = {'got': self.leaf_text(path, leaf)}
        if not path and self.name is not None and self.name.isidentifier():
            facts['instead'] = f"remove its spec, and set static_argnames='{self.name}'"
        return EinshardError(
            f'{reprlib.repr(leaf)} ({type(leaf).__name__}) is not an array',
            code='array',
            facts=facts,
        )

    def map_leaves(
        self, change: Callable[[Any, Placement], Any], value: Any, context: Context
    ) -> Any:
        """Replaces each leaf that has a spec with `change(leaf, placement)`."""
        if self.spec is None:
            return value
        leaves = [
            leaf if placement is None else change(leaf, placement)
            for _, leaf, placement in self.find_placements(value, context)
        ]
        return jtu.tree_unflatten(jtu.tree_structure(value), leaves)

    def _sharding(self, context: Context, spec: LeafSpec | None) -> Any:
        try:
            return None if spec is None else resolve(spec, None, context).sharding
        except EinshardError as error:
            raise error.about(function=self.function) from None


def as_struct(leaf: Any, placement: Placement) -> jax.ShapeDtypeStruct:
    aval: Any = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=placement.sharding, weak_type=aval.weak_type
    )
