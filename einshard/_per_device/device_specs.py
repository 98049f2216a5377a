"""Reads the specs of a per-device function, and finds the mesh of each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from .._errors import EinshardError
from .._functions.parameters import Parameters, as_list
from .._sharding.context import USE_MESH_IN_CONTEXT, context_on
from .._sharding.leaf_spec import LeafSpec, as_leaf_spec, unconstrained_error
from .._sharding.mesh import AnyMesh, MeshLike, has_equal_axes, mesh_fact
from .._sharding.program_mesh import with_legacy_mesh_note
from .._sharding.scopes import current_context
from .._text import name_of
from .._trees.paths import leaf_text, path_text
from .._trees.specs import Spec, check_specs, is_array, is_none
from .resolver import Resolver, make_resolver
from .spec_axes import SpecAxes

REPLICATED = '...'
_TO_REPLICATE = f"'{REPLICATED}' as the spec of {{}}, to replicate it"
_MISSING: Any = object()
_SPECS = 'an expression, a PartitionSpec, a NamedSharding, None, or a pytree of these'


def expression_of(spec: Any) -> Any:
    """Returns the expression of a spec without a mesh, or None for None."""
    if spec is None:
        return None
    leaf_spec = as_leaf_spec(spec)
    if leaf_spec.unconstrained:
        raise unconstrained_error()
    if leaf_spec.memory_kind is not None:
        raise EinshardError(
            f'per_device does not move arrays to {leaf_spec.memory_kind} memory',
            code='spec',
            facts={
                'spec': repr(spec),
                'instead': 'move them before the call: einshard(x, ..., memory_kind=...)',
            },
        )
    return leaf_spec if leaf_spec.partition is None else LeafSpec(leaf_spec.expression)


def _read(spec: Spec, owner: str, label: str | None, found: list[SpecAxes]) -> Spec:
    """Reads the spec of a parameter, or of the result, and adds its expressions to `found`."""
    try:
        check_specs(spec, expected=_SPECS)
    except EinshardError as error:
        raise error.about(spec_of=owner) from None
    for path, leaf in jtu.tree_leaves_with_path(spec, is_leaf=is_none):
        if label is not None:
            owner = f"parameter '{'/'.join([label, path_text(path)]).rstrip('/')}'"
        elif path:
            owner = f"the result '{path_text(path)}'"
        if callable(leaf):
            raise EinshardError(
                'per_device takes expressions, not callables or Rules',
                code='spec',
                facts={'spec of': owner, 'got': repr(leaf)},
            )
        if leaf is not None:
            spec_axes = SpecAxes(owner, expression_of(leaf).expression)
            spec_axes.check_signs()
            found.append(spec_axes)
    return jtu.tree_map(expression_of, spec, is_leaf=is_none)


class DeviceSpecs:
    """The specs of a per-device function, whose expressions each call resolves on a mesh.

    Attributes:
        specs: the specs by parameter.
        out: the specs of the result.
        spec_axes: the expressions of all specs.
        spec_mesh: the mesh of the NamedShardings among the specs.
        manual: the mesh axes in `axis_names=`; empty for all.
        static: the parameters that are static.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        in_specs: Sequence[Spec],
        named_specs: Mapping[str, Spec],
        out: Spec,
        mesh: MeshLike | None,
        spec_mesh: AnyMesh | None,
        axis_names: Iterable[str] | None,
        jit_options: Mapping[str, Any],
    ):
        self.name = name_of(function)
        self.parameters = Parameters(function)
        self.mesh = mesh
        self.spec_mesh = spec_mesh
        try:
            names = as_list(axis_names, str, 'axis_names', 'the names of mesh axes', "('x',)")
            self.manual = frozenset(names)
            specs = self.parameters.assign(in_specs, named_specs)
            self.specs: dict[str, Spec] = {}
            self.static = self.parameters.pop_labels({**jit_options}, 'static')
            spec_axes: list[SpecAxes] = []
            for label, spec in specs.items():
                self.specs[label] = _read(spec, f"parameter '{label}'", label, spec_axes)
            self.out = _read(out, 'the result', None, spec_axes)
            self.spec_axes = tuple(spec_axes)
            self.parameters.check_required(self.specs, self.static, _TO_REPLICATE)
        except EinshardError as error:
            raise error.about(function=self.name) from None

    def optional(self) -> dict[str, None]:
        """Returns None for each parameter that has a default and no spec, as `sharded` requires.

        `spec_for` raises in calls that pass it, with the advice that is right for `per_device`.
        """
        own = self.parameters.names[: self.parameters.n_self]
        names = {*self.parameters.signature.parameters} - {*self.specs, *self.static, *own}
        return dict.fromkeys(sorted(names)) if self.specs else {}

    def spec_for(self, label: str) -> Spec:
        spec = self.parameters.spec_for(label, self.specs, _MISSING if self.specs else None)
        if spec is _MISSING:
            raise self.parameters.no_spec_error([label], self.specs, _TO_REPLICATE)
        if spec is None and label in self.parameters.names[: self.parameters.n_self]:
            return as_leaf_spec(REPLICATED)
        return spec

    # --- at a call --------------------------------------------------------------------------------

    def resolved_at_call(self, spec: Spec) -> Spec:
        """Replaces the expressions in a spec with functions that resolve them at each call."""
        return jtu.tree_map(
            lambda x: functools.partial(self._resolve, expression_of(x)), spec, is_leaf=is_none
        )

    def _resolve(self, spec: LeafSpec | None, path: str, leaf: Any) -> LeafSpec | None:
        """Extends an expression to all devices, for `sharded`. Raises if the leaf does not fit."""
        if spec is None:
            return None
        resolver = self.resolver()
        if not is_array(leaf):
            return as_leaf_spec(REPLICATED)  # `sharded` raises an error about the leaf
        try:
            resolver.check(spec, np.shape(leaf))
        except EinshardError as error:
            # a fix for one array may not fit the expressions of the others
            raise error.about(array=leaf_text(path, leaf)).with_fix(None) from None
        return resolver.complete(spec)

    def resolver(self) -> Resolver:
        """Returns the resolver for the mesh of the current call."""
        try:
            ambient = jax.sharding.get_abstract_mesh()
            if {*ambient.axis_types} == {AxisType.Manual}:
                raise EinshardError(
                    'the enclosing per-device function uses all mesh axes, so none are left for '
                    f'{self.name}',
                    code='mesh',
                    facts={
                        'mesh in context': mesh_fact(ambient),
                        'instead': f'leave a mesh axis for {self.name}: list only the others in '
                        'axis_names= of the enclosing function',
                    },
                )
            context = current_context(self.mesh)
            if self.spec_mesh is not None:
                context = context_on(self.spec_mesh, context)
            mesh, rules = context.lowering_mesh, context.axis_rules
            if not ambient.empty and not has_equal_axes(mesh, ambient):
                raise EinshardError(
                    'mesh= must match the mesh in context',
                    code='mesh',
                    facts={
                        'mesh=': mesh_fact(mesh),
                        'mesh in context': mesh_fact(ambient),
                        'instead': USE_MESH_IN_CONTEXT,
                    },
                )
            is_in_context = not ambient.empty
            if is_in_context and isinstance(mesh, AbstractMesh):
                mesh = ambient  # it may have another `abstract_device`, see has_equal_axes
            return make_resolver(
                self.spec_axes, mesh, is_in_context, rules, context.on_one_device, self.manual
            )
        except EinshardError as error:
            # the fact 'function' keeps `sharded` from blaming one parameter
            raise with_legacy_mesh_note(error, self.mesh).about(function=self.name) from None
