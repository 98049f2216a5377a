"""The jitted programs of a `sharded` function, each for one call signature and mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh

from .._sharding.context import AxisRules, Context, is_staging, is_tracing
from .._sharding.mesh import AnyMesh, is_partial
from .._trees.specs import is_none
from .parameters import CallSignature, Declaration
from .promise import CheckedJit
from .traced_function import Setup, TracedFunction, has_partial_axes
from .value_spec import as_struct


class Program:
    """A function jitted with the shardings of its specs.

    Attributes:
        options: options of jit, without shardings.
        jitted: the jitted function, to run and to lower.
        nested: the version for calls inside a trace.
        constrained: `nested` for arguments that are placed: constraints instead of in_shardings,
            which would reject an argument of jax.vmap whose mapped axis is sharded.
        runnable: the function that a call runs: `jitted`, or `checked.call`.
        checked: checks the limits on collectives and memory. None if there are no limits.
        without_spec: the positions of arguments that have leaves without a spec. Empty if there are
            no limits.
        shardings_without_spec: the shardings of those arguments. Other shardings need another
            program: JAX would recompile this one without a trace, so limits would not be checked.
        args_checked: whether `place_arguments` has run for a call.
    """

    def __init__(self, traced: TracedFunction, values: Sequence[Any]):
        """Traces the function if its out_shardings depend on the shapes of the result."""
        setup = traced.setup
        traced.out_shardings = traced.result_shardings(values)
        options: dict[str, Any] = {**setup.jit_options, 'static_argnums': tuple(traced.static)}
        donated = traced.positions(setup.declaration.donated)
        if donated:
            options['donate_argnums'] = tuple(donated)
        in_shardings: dict[str, Any] = {}
        budget = setup.budget
        dynamic = [s for i, s in enumerate(traced.in_shardings) if i not in traced.static]
        if jtu.tree_leaves(dynamic):
            in_shardings['in_shardings'] = tuple(map(traced.for_jit, dynamic))
            if traced.mesh.size == 1:  # the in_shardings keep the program on this device
                budget = budget and budget.on_one_device()
        with_shardings = options | in_shardings
        if traced.out_shardings is not None:
            with_shardings['out_shardings'] = traced.for_jit(traced.out_shardings)
        self.traced = traced
        self.options = options
        self.jitted: Any = jax.jit(traced.wrapper, **with_shardings)
        self.constrained = _constrained(traced, options, constrain_arguments=True)
        self.nested = _make_nested(traced, self.jitted, self.constrained, options, in_shardings)
        self.runnable, self.checked = self.jitted, None
        self.without_spec: Sequence[int] = ()
        if budget is not None:
            self.checked = CheckedJit(
                budget,
                traced.wrapper,
                traced.sharded_by,
                lambda: traced.setup.context().lowering_mesh,
                with_shardings,
                self.nested,
            )
            self.runnable = self.checked.call
            rows = enumerate(traced.in_shardings)
            self.without_spec = [
                i
                for i, x in rows
                if i not in traced.static and None in jtu.tree_leaves(x, is_leaf=is_none)
            ]
        self.shardings_without_spec = shardings_of(values, self.without_spec)
        self.args_checked = False

    @property
    def is_abstract(self) -> bool:
        """Whether the mesh has no devices, so that the program can be traced but not run."""
        traced = self.traced
        return isinstance(traced.mesh, AbstractMesh) and not traced.mesh_is_ambient

    def run(self, *values: Any) -> Any:
        if self.checked is None and is_tracing():
            return self.nested(*values)
        return self.runnable(*values)

    def is_for(self, values: Sequence[Any]) -> bool:
        """Whether the shardings of this program are right for a call with these values."""
        return (
            self.traced.matches_arguments(values)
            and shardings_of(values, self.without_spec) == self.shardings_without_spec
            and self.traced.matches_result(values)
        )

    def must_place_arguments(self) -> bool:
        """Whether `place_arguments` must run in each call.

        Under jax.grad or jax.vmap outside jit, `nested` accepts any sharding if it has no
        in_shardings. Jit cannot place host data as a partial sum: it raises.
        """
        if is_tracing():
            return self.nested is self.constrained and not is_staging()
        return has_partial_axes(self.traced.in_shardings)

    @property
    def compared(self) -> Sequence[int]:
        """The positions of arguments whose host data the processes must compare in each call."""
        setup, mesh = self.traced.setup, self.traced.mesh
        if not (setup.options.check_processes and isinstance(mesh, Mesh) and mesh.is_multi_process):
            return ()
        rows = enumerate(self.traced.arguments)
        return [i for i, x in rows if i not in self.traced.static and x.spec is not None]

    def clear_cache(self) -> None:
        self.jitted.clear_cache()
        self.nested.clear_cache()
        if self.checked is not None:
            self.checked.clear_cache()

    def trace_as_called(
        self, n_args: int, keywords: Collection[str], order: Sequence[str], values: Sequence[Any]
    ) -> jax.stages.Traced:
        """Traces a call with keyword arguments.

        `jax.jit` with in_shardings rejects keyword arguments, so ShapeDtypeStructs have the
        shardings instead. `order` has the names of the last `values`: the keywords, and omitted
        parameters whose defaults contain arrays. Values between these and the first `n_args` are
        such defaults of positional-only parameters.
        """
        n_positional = len(values) - len(order)
        traced, names = self.traced, dict(enumerate(order, n_positional))
        context = traced.setup.context()
        structs = [
            value if i in traced.static else argument.map_leaves(as_struct, value, context)
            for i, (argument, value) in enumerate(zip(traced.arguments, values, strict=True))
        ]

        def as_called(*args: Any, **kwargs: Any) -> Any:
            def default(i: int) -> Any:
                return traced.arguments[i].constrain(values[i], context)

            omitted = {name: default(i) for i, name in names.items() if name not in keywords}
            by_keyword = map({**omitted, **kwargs}.__getitem__, order)
            return traced.wrapper(*args, *map(default, range(n_args, n_positional)), *by_keyword)

        as_called.__name__ = as_called.__qualname__ = traced.setup.name
        as_called.__wrapped__ = traced.setup.function  # type: ignore[attr-defined]
        donated = self.options.get('donate_argnums', ())
        options: dict[str, Any] = {
            **self.options,
            'static_argnums': tuple(i for i in traced.static if i < n_args),
            'static_argnames': tuple(names[i] for i in traced.static if i in names),
            'donate_argnums': tuple(i for i in donated if i < n_args),
            'donate_argnames': tuple(names[i] for i in donated if i in names),
        }
        if traced.out_shardings is not None:
            options['out_shardings'] = traced.for_jit(traced.out_shardings)
        by_keyword = {name: structs[i] for i, name in names.items() if name in keywords}
        return jax.jit(as_called, **options).trace(*structs[:n_args], **by_keyword)


def _make_nested(
    traced: TracedFunction,
    jitted: Any,
    constrained: Any,
    options: Mapping[str, Any],
    in_shardings: Mapping[str, Any],
) -> Any:
    """Returns `Program.nested`, which if possible has constraints instead of out_shardings.

    In a nested jit, JAX ignores out_shardings on explicit axes. In the backward pass, it uses them
    as in_shardings, which reject cotangents with other shardings.
    """
    if traced.mesh_is_ambient:
        # in_shardings would tie the trace to these devices, but JAX reuses it on other devices
        return constrained
    # constraints would fail on an abstract mesh that is not in context
    can_constrain = not isinstance(traced.mesh, AbstractMesh)
    if traced.setup.options.keeps_mapped_axes and can_constrain:
        # in_shardings replicate a mapped axis; constraints leave it as it is, as shard_map does
        return constrained
    nested = jitted
    if traced.out_shardings is not None and can_constrain:
        with_shardings = {**options, **in_shardings}
        nested = _constrained(traced, with_shardings, constrain_arguments=False)
    if has_partial_axes(traced.in_shardings):
        without_shardings = _constrained(traced, options, constrain_arguments=False)
        nested = _choose_by_type(nested, without_shardings)
    return nested


def _constrained(
    traced: TracedFunction, options: Mapping[str, Any], constrain_arguments: bool
) -> Any:
    """Jits the function with constraints on the result and, if asked, on the arguments."""
    # jits the same function as `Program.jitted`, so that JAX reuses its trace
    inner: dict[str, Any] = {**options, 'in_shardings': None, 'inline': True}
    inner.pop('compiler_options', None)  # JAX rejects them in a nested jit
    inlined = jax.jit(traced.wrapper, **inner)

    def constrained(*values: Any) -> Any:
        if constrain_arguments:
            values = tuple(traced.constrain_arguments(values))
        context, result = traced.setup.context(), inlined(*values)
        with traced.scope(context.lowering_mesh):
            return traced.result.constrain(result, context)

    return jax.jit(traced.set_names(constrained), **options)


def _choose_by_type(nested: Any, without_shardings: Any) -> Callable[..., Any]:
    """Returns a function that calls `without_shardings` if an argument is unreduced or reduced.

    The gradient of a reduced argument is unreduced, but JAX gives it the reduced in_sharding of the
    argument, and raises an error.
    """

    def call(*values: Any) -> Any:
        arrays = (x for x in jtu.tree_leaves(values) if isinstance(x, jax.Array))
        partial = any(is_partial(jax.typeof(x).sharding) for x in arrays)
        return (without_shardings if partial else nested)(*values)

    def clear_cache() -> None:
        nested.clear_cache()
        without_shardings.clear_cache()

    call.clear_cache = clear_cache  # type: ignore[attr-defined]
    return call


def shardings_of(values: Sequence[Any], positions: Sequence[int]) -> tuple[Any, ...]:
    """Returns the sharding of each leaf of `values[i]` for `i` in `positions`, or () in a trace.

    For host data, the sharding is None.
    """
    if not positions or is_tracing():
        return ()
    # Does not read `leaf.committed`, which would double the time. It matters only for arrays on a
    # part of the mesh, and jit rejects those if they are committed.
    leaves = [leaf for i in positions for leaf in jtu.tree_leaves(values[i])]
    return tuple([getattr(leaf, 'sharding', None) for leaf in leaves])


# call signature, `Setup.mesh_key`, axis rules, `Context.on_one_device`
_OuterKey: TypeAlias = tuple[CallSignature, tuple[AnyMesh, bool], AxisRules, bool]


class ProgramCache:
    """The programs of a `sharded` function.

    The keys contain the call signature, mesh, axis rules, and the shapes on which shardings depend.
    Under limits on collectives or memory, they also contain the shardings of arguments without
    specs.

    Attributes:
        need_full_lookup: whether callers must call `find` for every call, because calls with the
            same signature may need different programs.
    """

    def __init__(self, setup: Setup):
        self._setup = setup
        self._programs: dict[_OuterKey, dict[Any, Program]] = {}
        # what is being traced for new programs, by outer and inner key
        self._in_progress: dict[Any, TracedFunction] = {}
        self.need_full_lookup = False

    def find(self, call: CallSignature, values: Sequence[Any], rejected: Any = None) -> Program:
        """Finds or makes the program for a call.

        Until `need_full_lookup` is set, returns any program for the call signature, mesh and axis
        rules, without comparing `values`. If that program fails, call `find` again with its
        `runnable` as `rejected`, which sets `need_full_lookup`.
        """
        context = self._setup.context()
        mesh_key = self._setup.mesh_key(context)
        outer_key = call, mesh_key, context.axis_rules, context.on_one_device
        programs = self._programs.setdefault(outer_key, {})
        candidates = list(programs.values())
        self.need_full_lookup |= rejected is not None
        if candidates and not self.need_full_lookup:
            return candidates[0]
        without_spec = sorted({i for program in candidates for i in program.without_spec})
        leaves_key = _leaves_key(self._setup.declaration, call, values, context)
        inner_key = leaves_key, shardings_of(values, without_spec)
        program = programs.get(inner_key)
        if program is None or program.runnable is rejected:
            # No lock, because this runs user code (the function, spec functions), which may wait
            # for a thread that calls this function. Threads that make the same program share
            # `traced`, so that JAX traces once.
            key, traced = (outer_key, inner_key), TracedFunction(self._setup, call, values)
            traced = self._in_progress.setdefault(key, traced)
            try:
                for program in list(programs.values()):
                    if program.runnable is not rejected and program.is_for(values):
                        break
                else:
                    program = Program(traced, values)
                    # another thread may have made it at the same time
                    shardings = program.shardings_without_spec
                    for other in list(programs.values()):
                        if other.traced is traced and other.shardings_without_spec == shardings:
                            program = other
                programs[inner_key] = program
            finally:
                self._in_progress.pop(key, None)
        # the fast path of ShardedFunction does not compare meshes, axis rules or shardings
        has_several_contexts = len({key[1:] for key in self._programs}) > 1
        self.need_full_lookup |= has_several_contexts or bool(program.without_spec)
        return program

    def clear(self) -> None:
        """Drops all programs, and what JAX has traced and compiled for them."""
        old, self._programs = self._programs, {}
        self.need_full_lookup = False
        for programs in old.values():
            for program in programs.values():
                program.clear_cache()


def _leaves_key(
    declaration: Declaration, call: CallSignature, values: Sequence[Any], context: Context
) -> Any:
    """Returns the structures, shapes and dtypes of the arguments on which shardings depend.

    If the result's shardings depend on its leaves, includes all arguments, static ones by value.
    """
    arguments = declaration.arguments(call)
    uses_all = declaration.result.needs_leaves(context)
    key: list[Any] = []
    for argument, value in zip(arguments, values, strict=True):
        if uses_all and argument.name in declaration.static:
            try:
                hash(value)
            except TypeError:  # jit raises
                value = type(value)
            key.append(value)
        elif uses_all or argument.needs_leaves(context):
            leaves, treedef = jtu.tree_flatten(value)
            key.append((treedef, tuple(map(_shape_and_dtype, leaves))))
    return tuple(key)


def _shape_and_dtype(leaf: Any) -> Any:
    """Returns a cache key for a leaf, equal for a value and its tracer."""
    try:
        aval: Any = jax.typeof(leaf)
    except (TypeError, ValueError):  # not an array, or a masked array: a later check raises
        return type(leaf)
    return aval.shape, aval.dtype
