"""per_device: `jax.shard_map` with specs in einshard's notation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .._errors import EinshardError, public, quoted
from .._functions.error_notes import (
    SpecLeaf,
    is_jax_error,
    sizes_that_differ,
    unbound_axis,
)
from .._functions.parameters import (
    JIT_OPTIONS,
    CallSignature,
    Parameters,
    as_list,
    copied,
    with_copied_options,
)
from .._functions.promise import Promise
from .._functions.setup import Options
from .._functions.sharded import check_traceable, no_function_error
from .._functions.sharded import decorate as decorate_sharded
from .._functions.sharded_function import ShardedFunction
from .._notation.expression import Expression
from .._notation.layout import axis_positions, mesh_text
from .._sharding.axis_rules import check_flag
from .._sharding.context import USE_MESH_IN_CONTEXT, context_on
from .._sharding.leaf_spec import LeafSpec, as_leaf_spec, unconstrained_error
from .._sharding.mesh import AnyMesh, MeshLike, has_equal_axes, mesh_fact, sizes_of, spec_axes
from .._sharding.program_mesh import with_legacy_mesh_note
from .._sharding.scopes import current_context
from .._text import array_text, first_line, name_of
from .._trees.partition import join, partition_modules, with_static_nodes
from .._trees.paths import leaf_text, leaves_with_paths, path_text
from .._trees.specs import Spec, check_specs, is_array, is_none, leaf_specs, mesh_of
from .replication import read_varying, suggest_fixes
from .resolver import Resolver, make_resolver
from .spec_axes import SpecAxes

P = ParamSpec('P')
R = TypeVar('R')


@public
def per_device(
    *in_specs: Spec,
    out: Spec,
    mesh: MeshLike | None = None,
    axis_names: Iterable[str] | None = None,
    check_vma: bool = True,
    reshard: bool = False,
    collectives: Promise | None = None,
    check_processes: bool = True,
    **named_specs_and_jit_options: Any,
) -> Callable[[Callable[P, R]], ShardedFunction[P, R]]:
    """`jax.shard_map` in einshard's notation: each device runs the function on its own shards.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import per_device
        >>> @per_device('b x*', 'x* y', out='b y -> * b y')
        ... def product(x, w):  # shards of x and w
        ...     return jax.lax.psum(x @ w, 'x')
        >>> n = jax.device_count()
        >>> y = product(np.ones((8, 3 * n)), np.ones((3 * n, 5)))
        >>> y.shape, bool((y == 3 * n).all())
        ((8, 5), True)

    Each sharded axis of the expressions becomes a mesh axis of the same name, for collectives such
    as `jax.lax.psum(z, 'x')`. An expression lists its sharded axes in device order. Its array is
    replicated over the other mesh axes. A count in one expression applies to all of them.
    `'y@x'` shards y over the devices of x, as after `psum_scatter` over 'x'. If a mesh is in
    context or passed as `mesh=`, collectives use the axis names of that mesh instead.

    Arguments are placed and checked as for `sharded`.

    Args:
        in_specs: specs by position: expressions, PartitionSpecs, NamedShardings, or pytree prefixes
            of these. '...' replicates an argument. Every argument that is not static needs a spec.
            Exception: if all manual mesh axes are explicit, None as a spec, or no specs at all,
            shards arguments as their types say. The `self` of a method is replicated.
        out: the spec of the result, or a pytree prefix of specs.
        mesh: a mesh or a sequence of devices. Default: the mesh of the NamedShardings among the
            specs, or else the mesh in context, or else all devices.
        axis_names: the mesh axes that are manual, as in `jax.shard_map`. Along the other axes the
            function sees global arrays, sharded by `einshard` or the compiler. Default: all axes.
        check_vma: whether JAX checks that results are replicated where `out` says so. JAX infers
            this for `psum`, but for `all_gather` only with `to='invarying'`.
        reshard: whether to reshard arguments that are sharded differently.
        collectives: the collectives that the compiled program may have, as for `sharded`.
        check_processes: as for `sharded`.
        named_specs_and_jit_options: specs by parameter name, and options of `jax.jit`.

    Returns:
        A decorator that turns the function into a `ShardedFunction` of global arrays.

    Raises:
        EinshardError: at decoration, for invalid specs; at the first call, if the expressions
            disagree on a count or on the device order, or do not use all devices; at any call, if
            an array does not fit, a collective uses an axis that no expression shards, or the call
            is inside a per-device function in which all mesh axes are manual.
        UnexpectedCollectives: at a call, if the program has collectives that are not allowed.
    """
    check_flag('reshard', reshard)
    check_flag('check_processes', check_processes)
    named = with_copied_options(named_specs_and_jit_options)
    mesh, axis_names = copied(mesh), copied(axis_names)
    spec_mesh = mesh_of([in_specs, out, named])
    mesh = spec_mesh if mesh is None else mesh
    in_specs, out, named = jtu.tree_map(  # PartitionSpecs and NamedShardings to expressions
        lambda x: _leaf_spec(x) if isinstance(x, NamedSharding | PartitionSpec) else x,
        (in_specs, out, named),
        is_leaf=is_none,
    )

    @public
    def decorate(*functions: Any, **unexpected: Any) -> Any:
        function = functions[0] if len(functions) == 1 and not unexpected else None
        if isinstance(function, staticmethod | classmethod):
            return type(function)(decorate(function.__func__))
        if not callable(function):
            arguments = [*functions, *unexpected.values()]
            raise no_function_error('per_device', arguments, in_specs)
        check_traceable(function)
        specs_by_name = {name: spec for name, spec in named.items() if name not in JIT_OPTIONS}
        jit_options = {name: value for name, value in named.items() if name in JIT_OPTIONS}
        on_shards = _PerDeviceFunction(
            function,
            in_specs,
            specs_by_name,
            out,
            mesh,
            spec_mesh,
            axis_names,
            check_vma,
            jit_options,
        )
        specs_by_name |= on_shards.optional_specs()
        return decorate_sharded(
            on_shards.global_function(),
            [*map(on_shards.resolved_at_call, in_specs)],
            on_shards.resolved_at_call(out),
            jit_options
            | {name: on_shards.resolved_at_call(spec) for name, spec in specs_by_name.items()},
            Options(
                spec_mesh or mesh,
                reshard,
                collectives=collectives,
                check_processes=check_processes,
                keeps_mapped_axes=bool(on_shards.manual),
                try_fixes=on_shards.try_fixes,
            ),
        )

    return decorate


def _leaf_spec(spec: Any) -> Any:
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


_REPLICATED = '...'
_TO_REPLICATE = f"'{_REPLICATED}' as the spec of {{}}, to replicate it"
_MISSING: Any = object()
_SPECS = 'an expression, a PartitionSpec, a NamedSharding, None, or a pytree of these'


class _PerDeviceFunction:
    """A per-device function and its expressions, which each call resolves on a mesh."""

    def __init__(
        self,
        function: Callable[..., Any],
        in_specs: Sequence[Spec],
        named_specs: Mapping[str, Spec],
        out: Spec,
        mesh: MeshLike | None,
        spec_mesh: AnyMesh | None,
        axis_names: Iterable[str] | None,
        check_vma: bool,
        jit_options: Mapping[str, Any],
    ):
        self.function = function
        self.name = name_of(function)
        self.parameters = Parameters(function)
        self.mesh = mesh
        self.spec_mesh = spec_mesh  # the mesh of the NamedShardings in the specs
        self.check_vma = check_vma
        try:
            names = as_list(axis_names, str, 'axis_names', 'the names of mesh axes', "('x',)")
            self.manual = frozenset(names)  # empty: all mesh axes
            specs = self.parameters.assign(in_specs, named_specs)
            self.specs: dict[str, Spec] = {}
            self.static = self.parameters.pop_labels({**jit_options}, 'static')
            self.spec_axes = tuple(self._read_specs([*specs.items(), (None, out)]))
            self.parameters.check_required(self.specs, self.static, _TO_REPLICATE)
        except EinshardError as error:
            raise error.about(function=self.name) from None

    def resolved_at_call(self, spec: Spec) -> Spec:
        """Replaces the expressions in a spec with functions that resolve them at each call."""
        return jtu.tree_map(
            lambda x: functools.partial(self._resolve, _leaf_spec(x)), spec, is_leaf=is_none
        )

    def optional_specs(self) -> dict[str, None]:
        """Returns None for each parameter that has a default and no spec, as `sharded` requires.

        `_spec_for` raises in calls that pass it, with the advice that is right for `per_device`.
        """
        own = self.parameters.names[: self.parameters.n_self]
        names = {*self.parameters.signature.parameters} - {*self.specs, *self.static, *own}
        return dict.fromkeys(sorted(names)) if self.specs else {}

    def global_function(self) -> Callable[..., Any]:
        """Returns the function of global arrays that `sharded` traces."""

        @functools.wraps(self.function)
        def on_global_arrays(*args: Any, **kwargs: Any) -> Any:
            return self._call_shard_map(args, kwargs)

        on_global_arrays.__name__ = self.name
        return on_global_arrays

    def _read_specs(self, specs: Iterable[tuple[str | None, Spec]]) -> Iterator[SpecAxes]:
        """Sets `self.specs` and `self.out`, and yields each of their expressions."""
        for label, spec in specs:
            owner = 'the result' if label is None else f"parameter '{label}'"
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
                    spec_axes = SpecAxes(owner, _leaf_spec(leaf).expression)
                    spec_axes.check_signs()
                    yield spec_axes
            leaf_specs = jtu.tree_map(_leaf_spec, spec, is_leaf=is_none)
            if label is None:
                self.out = leaf_specs
            else:
                self.specs[label] = leaf_specs

    def try_fixes(
        self, error: EinshardError, call: CallSignature, values: Sequence[Any]
    ) -> EinshardError:
        """Returns the error of a call with only those fixes that work for its arguments."""
        shapes: dict[Expression, list[tuple[int, ...]]] = {}
        try:
            for label, value in zip(self.parameters.value_labels(call), values, strict=True):
                leaves = jtu.tree_leaves(value)
                specs = leaf_specs(value, leaves, self._spec_for(label))
                for spec, leaf in zip(specs, leaves, strict=True):
                    if isinstance(spec, LeafSpec) and is_array(leaf):
                        shapes.setdefault(spec.expression, []).append(np.shape(leaf))
        except EinshardError:
            return error
        try:
            self._resolver(shapes)
        except EinshardError as tried:  # the mesh is wrong, not one of the arguments
            return tried
        is_written = any(error.expression == spec.expression.text for spec in self.spec_axes)
        return error if is_written else error.with_fix(None)  # it has the counts of all arguments

    def _resolver(
        self, shapes: Mapping[Expression, Sequence[tuple[int, ...]]] | None = None
    ) -> Resolver:
        """Returns the resolver for the mesh of the current call.

        Errors suggest only fixes that work for arrays of these `shapes`, by expression.
        """
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
            specs = self.spec_axes
            if shapes:
                specs = tuple(
                    replace(spec, shapes=tuple(shapes.get(spec.expression, ()))) for spec in specs
                )
            resolver = make_resolver(specs, mesh, is_in_context, rules, context.on_one_device)
            for axis in sorted(self.manual):
                if axis not in resolver.axes:
                    raise EinshardError(
                        f"axis_names= includes '{axis}', but the mesh has no such axis",
                        code='mesh',
                        facts={'mesh': mesh_text(resolver.axes)},
                    )
            return resolver
        except EinshardError as error:
            # the fact 'function' keeps `sharded` from blaming one parameter
            raise with_legacy_mesh_note(error, self.mesh).about(function=self.name) from None

    def _resolve(self, spec: LeafSpec | None, path: str, leaf: Any) -> LeafSpec | None:
        """Extends an expression to all devices, for `sharded`. Raises if the leaf does not fit."""
        if spec is None:
            return None
        resolver = self._resolver()
        if not is_array(leaf):
            return as_leaf_spec(_REPLICATED)  # `sharded` raises an error about the leaf
        try:
            resolver.check(spec, np.shape(leaf))
        except EinshardError as error:
            # a fix for one array may not fit the expressions of the others
            raise error.about(array=leaf_text(path, leaf)).with_fix(None) from None
        return resolver.complete(spec)

    def _call_shard_map(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if len(args) > len(self.parameters.names) and self.parameters.var_positional is None:
            return self.function(*args, **kwargs)  # raises Python's TypeError
        resolver = self._resolver()
        labels = self.parameters.value_labels(CallSignature(len(args), tuple(kwargs)))
        values = [
            value if label in self.static else partition_modules(value, label)
            for label, value in zip(labels, (*args, *kwargs.values()), strict=True)
        ]
        # does not look for tracers, because under `jax.disable_jit` there are none
        dynamic = [
            i
            for i, value in enumerate(values)
            if labels[i] not in self.static and any(map(is_array, jtu.tree_leaves(value)))
        ]
        arguments = [values[i] for i in dynamic]

        def body(*dynamic_shards: Any) -> Any:
            shards = list(values)
            for i, shard in zip(dynamic, dynamic_shards, strict=True):
                shards[i] = shard
            n, shards = len(args), join(shards)
            result = self.function(*shards[:n], **dict(zip(kwargs, shards[n:], strict=True)))
            result = partition_modules(result, 'result')
            self._result_leaves(resolver, result)  # raises clearer errors than JAX
            return result

        def body_without_scalars(*dynamic_shards: Any) -> Any:
            # the spec of a scalar could not name the mesh axes of size 1
            return jtu.tree_map(jnp.atleast_1d, body(*dynamic_shards))

        body.__name__ = body.__qualname__ = self.name
        body_without_scalars.__name__ = body_without_scalars.__qualname__ = self.name
        in_specs = tuple(self._argument_specs(resolver, labels[i], values[i]) for i in dynamic)
        shard_map = functools.partial(jax.shard_map, mesh=resolver.mesh, axis_names=self.manual)
        mapped = functools.partial(shard_map, body, in_specs=in_specs)
        try:
            out_specs, shapes = self._out_specs(resolver, mapped, arguments)
            if not resolver.size_one_axes(self.manual):
                return join(mapped(out_specs=out_specs, check_vma=self.check_vma)(*arguments))
            mapped = functools.partial(shard_map, body_without_scalars, in_specs=in_specs)
            results = mapped(out_specs=out_specs, check_vma=self.check_vma)(*arguments)
            return join(jtu.tree_map(lambda y, x: y if x.ndim else y[0], results, shapes))
        except EinshardError:
            raise
        except (NameError, AssertionError, KeyError, ValueError, TypeError) as error:
            varying = read_varying(error)
            if varying is not None:
                facts = suggest_fixes(varying, body, in_specs, arguments, shard_map)
                raise varying.error(self.name, facts) from None
            dynamic_labels = [labels[i] for i in dynamic]
            shards = self._shards(resolver, dynamic_labels, arguments, in_specs)
            different = explain_different_sizes(self.name, error, shards)
            if different is not None:
                raise different from error
            if isinstance(error, TypeError):  # JAX never raises it for an unknown axis
                raise
            unknown = explain_unknown_axis(self.name, resolver, self.manual, mapped, arguments)
            if unknown is not None:
                raise unknown from None
            raise

    def _spec_for(self, label: str) -> Spec:
        spec = self.parameters.spec_for(label, self.specs, _MISSING if self.specs else None)
        if spec is _MISSING:
            raise self.parameters.no_spec_error([label], self.specs, _TO_REPLICATE)
        if spec is None and label in self.parameters.names[: self.parameters.n_self]:
            return as_leaf_spec(_REPLICATED)
        return spec

    def _argument_specs(self, resolver: Resolver, label: str, value: Any) -> Any:
        leaves, treedef = jtu.tree_flatten(value)
        specs: list[PartitionSpec] = []
        written = leaf_specs(with_static_nodes(value), leaves, self._spec_for(label))
        for spec, leaf in zip(written, leaves, strict=True):
            if isinstance(spec, LeafSpec):
                specs.append(resolver.partition_spec(spec, np.ndim(leaf), self.manual))
            elif resolver.all_explicit(self.manual):
                specs.append(resolver.spec_of_type(leaf, self.manual))
            else:
                raise _no_spec_error(f"parameter '{label}' of {self.name}", leaf)
            self._check_explicit_axes(resolver, label, leaf)
        return jtu.tree_unflatten(treedef, specs)

    def _check_explicit_axes(self, resolver: Resolver, label: str, leaf: Any) -> None:
        """Raises if `leaf` is sharded over an explicit mesh axis that `resolver.mesh` lacks."""
        axes = {axis for entry in spec_axes(jax.typeof(leaf).sharding.spec) for axis in entry}
        mesh_axes = sizes_of(resolver.mesh)
        for axis in sorted(axes - set(mesh_axes)):
            raise EinshardError(
                f"parameter '{label}' is sharded over Explicit mesh axis '{axis}', but the mesh "
                'of per_device has no such axis',
                code='mesh',
                facts={
                    'function': self.name,
                    'array': array_text(leaf),
                    'mesh': mesh_text(mesh_axes),
                    'try': f'per_device(..., mesh={label}.sharding.mesh)',
                },
            )

    def _shards(
        self,
        resolver: Resolver,
        labels: Sequence[str],
        arguments: Sequence[Any],
        in_specs: Sequence[Any],
    ) -> Iterator[SpecLeaf]:
        """Yields the leaves of the arguments, with the shapes that the body sees."""
        for label, argument, partition_specs in zip(labels, arguments, in_specs, strict=True):
            leaves = leaves_with_paths(argument)
            tree = with_static_nodes(argument)
            specs = leaf_specs(tree, [leaf for _, leaf in leaves], self._spec_for(label))
            rows = zip(leaves, specs, jtu.tree_leaves(partition_specs), strict=True)
            for (path, leaf), spec, partition_spec in rows:
                shape = resolver.shard_shape(leaf.shape, partition_spec)
                expression = resolver.expression(spec) if isinstance(spec, LeafSpec) else None
                name = '/'.join(filter(None, [label, path_text(path)]))
                yield SpecLeaf(name, jax.ShapeDtypeStruct(shape, leaf.dtype), expression)

    def _out_specs(
        self, resolver: Resolver, mapped: Callable[..., Any], arguments: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Returns the specs of the results, and arrays of their ranks if the body was traced."""
        out = jtu.tree_leaves(self.out)
        if resolver.size_one_axes(self.manual) or any(map(resolver.needs_rank, out)):
            # traces the body for the ranks of its results; any out_specs give the same ranks
            unchecked = mapped(out_specs=PartitionSpec(), check_vma=False)
            shapes = jax.eval_shape(unchecked, *arguments)
            leaves = self._result_leaves(resolver, shapes)
            specs = [resolver.result_spec(spec, ndim, self.manual) for spec, ndim in leaves]
            return jtu.tree_unflatten(jtu.tree_structure(shapes), specs), shapes
        specs = jtu.tree_map(
            lambda spec: resolver.partition_spec(spec, None, self.manual), self.out
        )
        return specs, None

    def _result_leaves(self, resolver: Resolver, result: Any) -> list[tuple[LeafSpec, int]]:
        """Returns the spec and rank of each array. Raises if an array does not fit."""
        leaves = jtu.tree_leaves(result)
        try:
            specs = leaf_specs(with_static_nodes(result), leaves, self.out)
        except EinshardError as error:
            raise error.about(spec_of=f'the result of {self.name}') from None
        specs_and_ranks: list[tuple[LeafSpec, int]] = []
        for spec, (path, leaf) in zip(specs, leaves_with_paths(result), strict=True):
            suffix = f" '{path_text(path)}'" if path else ''
            owner = f'result{suffix} of {self.name}'
            if not isinstance(spec, LeafSpec):
                raise _no_spec_error(owner if path else f'the {owner}', leaf)
            try:
                axis_positions(resolver.expression(spec), np.ndim(leaf))
            except EinshardError as error:
                raise error.about(array=f'{array_text(leaf)} per device, {owner}') from None
            specs_and_ranks.append((spec, np.ndim(leaf)))
        return specs_and_ranks


def _no_spec_error(owner: str, leaf: Any) -> EinshardError:
    return EinshardError(
        f'{owner} has no spec',
        code='spec',
        facts={'array': array_text(leaf), 'try': f"'{_REPLICATED}' as its spec, to replicate it"},
    )


_MAX_ARGUMENTS = 4  # listed in an error


def explain_different_sizes(
    function: str, error: Exception, shards: Iterable[SpecLeaf]
) -> EinshardError | None:
    """Rewrites a JAX error about an axis that has different sizes in two arguments.

    Returns None for other errors.

    Args:
        shards: the leaves of the arguments, with the shapes that the body sees.
    """
    if not is_jax_error(error):
        return None
    shards = list(shards)
    sizes = '; '.join(sizes_that_differ(shards, str(error)))
    if not sizes:
        return None
    facts = {'function': function}
    for name, shard, expression in shards[:_MAX_ARGUMENTS]:
        spec = f", '{expression.text}'" if expression else ''
        facts[f"parameter '{name}'"] = f'{array_text(shard)} per device{spec}'
    facts['JAX says'] = first_line(error)
    return EinshardError(f'the shards of the arguments do not match: {sizes}', facts=facts)


def explain_unknown_axis(
    function: str,
    resolver: Resolver,
    manual: Collection[str],
    mapped: Callable[..., Any],
    arguments: Sequence[Any],
) -> EinshardError | None:
    """Returns an error if a collective uses a mesh axis that does not exist or is not manual.

    Returns None otherwise.

    Args:
        manual: the mesh axes in `axis_names=`, or an empty collection for all mesh axes.
        mapped: a partial of `jax.shard_map` that lacks only `out_specs` and `check_vma`.
        arguments: the arguments of the function, as global arrays.
    """
    try:
        # with check_vma, JAX raises AssertionError or KeyError instead of NameError
        unchecked = mapped(out_specs=PartitionSpec(), check_vma=False)
        jax.eval_shape(unchecked, *arguments)
    except NameError as error:
        axis = unbound_axis(error)
        return _unknown_axis_error(function, resolver, manual, axis) if axis else None
    except Exception:
        return None  # the caller reraises JAX's error
    return None


def _unknown_axis_error(
    function: str, resolver: Resolver, manual: Collection[str], axis: str
) -> EinshardError:
    facts = {'mesh axes': mesh_text(resolver.axes) or 'none'}
    if manual:
        facts['axis_names='] = quoted(sorted(manual))
    sentence = f"{function} uses mesh axis '{axis}', but the mesh has no such axis"
    if axis in resolver.axes:
        sentence = f"{function} uses mesh axis '{axis}', which is not in axis_names="
    elif resolver.uses_array_names:
        sentence = f"{function} uses axis '{axis}', but no expression shards an axis of that name"
    else:
        facts['note'] = 'if a mesh is passed or in context, collectives use its axis names'
        if axis in resolver.joint.named_sizes:
            facts[f"'{axis}' is sharded over"] = resolver.mesh_axes_of(axis)
    return EinshardError(sentence, facts={'function': function, **facts})
