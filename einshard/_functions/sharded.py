"""`jax.jit` with shardings in the notation: the decorator `sharded`, and what it makes."""

from __future__ import annotations

import functools
import inspect
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .._errors import EinshardError, hide_inner_frames, plural
from .._sharding.context import entered, in_step, is_tracing, same_in_thread
from .._sharding.mesh import MeshLike, check_mesh, mesh_fact
from .._text import deferred_kind, name_of
from .._trees.specs import Spec, is_function
from .call import CallSignature, declare
from .place_arguments import place_arguments
from .program import OtherShardings, Program, Setup, TracedFunction
from .program_cache import ProgramCache
from .promise import Allowed, Budget, Promise, UnexpectedCollectives, read_promise

P = ParamSpec('P')
Q = ParamSpec('Q')
R = TypeVar('R')

# what takes the arguments of a call
CALLED = ('lower', 'trace', 'eval_shape', 'in_shardings', 'out_shardings')

_Act: TypeAlias = Callable[[Program], Callable[..., Any]]  # what of a program takes the arguments


class ShardedFunction(Generic[P, R]):
    """A function that `sharded` has decorated. It is called as before."""

    # What wrappers copy from `__dict__` is what the function itself has there. Besides, a slot is
    # read faster.
    __slots__ = (
        '__dict__',
        '__weakref__',
        '_fast',
        '_programs',
        '_setup',
    )

    def __init__(self, setup: Setup):
        functools.update_wrapper(self, setup.function)
        self._setup = setup
        self._programs = ProgramCache(setup)
        # by the number of arguments, or that and the keywords as written: the jitted function of a
        # call, the order in which it takes what is given by keyword, and whether it is another one
        # in a trace, for constants too
        self._fast: dict[Any, tuple[Any, tuple[str, ...], bool]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # Beside `jax.jit` alone, 4.3 us on one device, all of this takes 0.5. So what a program
        # depends on is not compared here: it does that while it is traced, or jit refuses.
        try:
            how = self._fast.get((len(args), *kwargs) if kwargs else len(args))
            if how is None or entered_scope() is not None:
                return self._call(args, kwargs, _run)
            jitted, order, traced_differs = how
            if traced_differs and is_tracing():
                return self._call(args, kwargs, _run)
            values = (*args, *map(kwargs.__getitem__, order)) if kwargs else args
            for value in values:
                if type(value) not in _concrete_types:  # it may be traced: 0.3 us to ask
                    if is_tracing():
                        return self._call(args, kwargs, _run)
                    break
            try:
                return jitted(*values)
            except (ValueError, RuntimeError, TypeError) as error:
                # ValueError: shardings or the mesh differ; RuntimeError: no mesh is in context;
                # TypeError: a leaf is not an array
                call, _, row = self._setup.declaration.flatten_call(args, kwargs)
                return self._again(error, jitted, call, row, _run)
        except Exception as error:
            hide_inner_frames(error)
            raise

    @overload
    def __get__(self, instance: None, owner: Any = None) -> ShardedFunction[P, R]: ...
    @overload
    def __get__(
        self: ShardedFunction[Concatenate[Any, Q], R], instance: object, owner: Any = None
    ) -> ShardedFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)

    def __repr__(self) -> str:
        return f'<sharded function {self._setup.name}>'

    def __reduce__(self) -> str:
        return vars(self)['__qualname__']  # as functions are pickled and copied

    @property
    def __globals__(self) -> dict[str, Any]:
        function = inspect.unwrap(self._setup.function)
        return function.__globals__  # jaxtyped reads annotations by them

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """The lowered program of a call, as `jax.jit(f).lower`; no promise is checked."""
        if kwargs or self._setup.declaration.has_defaults:
            return self._trace_as_called(args, kwargs).lower()
        return self._call(args, kwargs, lambda program: program.jitted.lower)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """The traced program of a call, as `jax.jit(f).trace`."""
        if kwargs or self._setup.declaration.has_defaults:
            return self._trace_as_called(args, kwargs)
        return self._call(args, kwargs, lambda program: program.jitted.trace)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The shapes and dtypes of the result of a call, as `jax.jit(f).eval_shape`."""
        return self._call(args, kwargs, lambda program: program.jitted.eval_shape)

    def in_shardings(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """The shardings that a call asks of its arguments, by parameter; None: not specified."""
        traced, values = self._exact_program(args, kwargs)
        return dict(zip(traced.names, traced.argument_shardings(values), strict=True))

    def out_shardings(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The sharding, or tree of shardings, of the result of a call; None: not specified."""
        traced, values = self._exact_program(args, kwargs)
        return traced.result_shardings(values)

    @property
    def promised(self) -> Allowed | None:
        """The collectives that its programs may have; None where it promises nothing."""
        return self._setup.budget and self._setup.budget.allowed

    def clear_cache(self) -> None:
        """Forgets what was resolved, traced and compiled."""
        self._fast = {}
        self._programs.clear()

    def _trace_as_called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> jax.stages.Traced:
        _, order, _ = self._setup.declaration.flatten_call(args, kwargs)

        def act(program: Program) -> Callable[..., Any]:
            def trace(*values: Any) -> jax.stages.Traced:
                placed = place_arguments(program.traced, values, running=False)
                return program.trace_as_called(len(args), kwargs, order, placed)

            return trace

        return self._call(args, kwargs, act)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any], act: _Act) -> Any:
        if entered_scope() and not (in_step() or is_tracing()):
            with same_in_thread():
                return self._call(args, kwargs, act)
        call, order, values = self._setup.declaration.flatten_call(args, kwargs)
        program = self._programs.find(call, values)
        if act is _run and program.is_abstract and not is_tracing():
            raise EinshardError(
                f'{self._setup.name} cannot run on an abstract mesh, which has no devices',
                facts={
                    'mesh': mesh_fact(program.traced.mesh),
                    'try': f'{self._setup.name}.eval_shape(...) or {self._setup.name}.trace(...)',
                },
            )
        if act is _run and program.must_be_placed():
            values = place_arguments(program.traced, values, running=False)
        elif not (program.args_checked or is_tracing()):
            # jit takes an array on the same devices in another order, and then fails on the next
            values = place_arguments(program.traced, values, act is _run)
            program.args_checked = True
        try:
            result = act(program)(*values)
        except (ValueError, RuntimeError) as error:
            return self._again(error, program.called, call, values, act)
        as_written = len(values) == len(args) + len(kwargs)
        several = self._programs.need_full_lookup
        if act is _run and as_written and not (several or entered_scope() or is_tracing()):
            key = (len(args), *kwargs) if kwargs else len(args)
            self._fast[key] = program.called, order, program.traced.constrains_result
            _concrete_types.update(type(x) for x in values if isinstance(x, jax.Array))
        return result

    def _again(
        self, error: Exception, failed: Any, call: CallSignature, values: Sequence[Any], act: _Act
    ) -> Any:
        """Calls the right program, or with arguments that jit accepts; else raises `error`."""
        if isinstance(error, UnexpectedCollectives):
            self._fast = {}  # the next one is read before it runs
        if isinstance(error, EinshardError):
            raise error
        program = self._programs.find(call, values)
        # jit compares shardings and meshes before it traces: those of another program may not fit
        other = isinstance(error, OtherShardings) or program.called is not failed
        if other or not program.traced.takes(values):
            self._fast = {}
            program = self._programs.find(call, values, failed)
            try:
                return act(program)(*values)
            except EinshardError:
                raise
            except (ValueError, RuntimeError) as second:
                error = second
        placed = place_arguments(program.traced, values, act is _run)
        if placed is values:
            raise error
        return act(program)(*placed)

    def _exact_program(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[TracedFunction, Sequence[Any]]:
        """The program of a call that is not made: nothing else tells that it is the right one."""
        call, _, values = self._setup.declaration.flatten_call(args, kwargs)
        program = self._programs.find(call, values)
        program.traced.check(values)
        if not program.is_for(values):
            program = self._programs.find(call, values, program.called)
        return program.traced, values


entered_scope = entered.get  # 0.04 us less than to look up the method in each call

# of values that are not traced; arrays are added once they are met
_concrete_types: set[type] = {np.ndarray, bool, int, float, complex}


def _run(program: Program) -> Callable[..., Any]:
    return program.run


class BoundMethod(functools.partial[Any]):
    """A sharded method with its instance: called, lowered, traced without naming it.

    To call a partial is C: beside a method of `jax.jit` it takes 1.13 of the time, where an object
    with a `__call__` of its own takes 1.21.
    """

    @property
    def __func__(self) -> Any:
        return self.func

    @property
    def __self__(self) -> Any:
        return self.args[0]

    # so that the signature is that without the instance
    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(self.__func__.__wrapped__, self.__self__)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__func__.__doc__

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__func__.__name__)  # as methods are pickled

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.__func__, name)
        if name in CALLED:
            return functools.partial(attribute, self.__self__)
        return attribute


@overload
def sharded(function: Callable[P, R], /) -> ShardedFunction[P, R]: ...
@overload
def sharded(
    *in_specs: Spec,
    out: Spec = None,
    mesh: MeshLike | None = None,
    reshard: bool = False,
    collectives: Promise | None = None,
    **named_specs_and_jit_options: Any,
) -> Callable[[Callable[P, R]], ShardedFunction[P, R]]: ...
def sharded(
    *in_specs: Spec,
    out: Spec = None,
    mesh: MeshLike | None = None,
    reshard: bool = False,
    collectives: Promise | None = None,
    **named_specs_and_jit_options: Any,
) -> Any:
    """`jax.jit` with the placement of arguments and result in the notation.

        >>> @sharded('b x -> * b x', 'x y -> * x y2', out='b y -> * b y2')
        ... def layer(x, w):
        ...     return jax.nn.relu(x @ w)
        >>> describe(layer(np.ones((4, 8)), np.ones((8, 16))))
        'a b -> 8 a b2'

    The i-th spec is for the i-th positional parameter (the instance of a method has none), and
    `name=spec` for the parameter of that name. Parameters without a spec, and the result without
    `out=`, are placed as the compiler likes. Used bare, as `@sharded`, it reads `Sharded[...]`
    annotations.

    Arguments that are not placed as their spec says are placed if they are host data, or held by
    one device or replicated. An array that is sharded differently is an error, since to move it
    is communication that nobody wrote; `reshard=True` allows it.

    Expressions are resolved at the first call and kept; a call then is that of `jax.jit`, behind
    one Python frame. Inside other transformations it is a nested jit, and `out=` a constraint. In
    the function, `einshard` uses the same mesh.

    `collectives=` is a promise: the collectives of every program that a call compiles are read, of
    the first before it runs, of one for other shapes before its result is given. Any other call is
    one Python frame more; and where arguments without a spec are is looked at. A nested jit has no
    program of its own, and is not read; those of `jax.grad` and `jax.vmap` outside of `jax.jit`
    cannot be read, which is a warning. `lower` is as without a promise: a call after it compiles.

    Args:
        in_specs: specs by position: expressions, None, `Rules`, functions `(path, leaf) -> spec`,
            or trees of those that are prefixes of the argument. A function that stands alone, as
            in `@sharded`, is not a spec but what is decorated.
        out: the spec of the result.
        mesh: as for `make_sharding`; where left out, the mesh in context at each call.
        reshard: whether arguments that are partitioned otherwise may be moved.
        collectives: those that there may be: `()` for none, 'all-reduce' or a collection of kinds,
            or the most of each kind, as in `{'all-reduce': 1}`. Each counts once, also in a loop.
        named_specs_and_jit_options: specs by parameter name, and every option of `jax.jit`:
            `static_argnames`, `donate_argnums`, `inline`, `keep_unused`, `compiler_options`, ...

    Returns:
        A `ShardedFunction` with the parameters and the result of the one decorated; and with
        `lower`, `trace`, `eval_shape`, `in_shardings`, `out_shardings`, `clear_cache` and
        `__wrapped__`.

    Raises:
        EinshardError: at decoration, for a spec too many, one for a name that is no parameter or
            for a static parameter, a wrong expression, an unknown option; at a call, for arrays
            that do not fit their spec.
        UnexpectedCollectives: at a call, for a program that breaks the promise.
    """
    named = named_specs_and_jit_options
    bare = not (named or reshard) and out is None and mesh is None and collectives is None
    if bare and len(in_specs) == 1 and _is_function(in_specs[0]):
        return _decorate(in_specs[0], (), None, None, False, None, {})

    def decorate(*functions: Any, **unexpected: Any) -> Any:
        if len(functions) != 1 or unexpected or not _is_function(functions[0]):
            raise called_too_early('sharded', [*functions, *unexpected.values()], in_specs)
        return _decorate(functions[0], in_specs, out, mesh, reshard, collectives, named)

    return decorate


def _is_function(x: Any) -> bool:
    # specs that see all leaves at once, as Rules do, are callable too
    is_spec = hasattr(x, 'for_leaves')
    return isinstance(x, staticmethod | classmethod) or (is_function(x) and not is_spec)


def called_too_early(
    decorator: str, given: Sequence[Any], in_specs: Sequence[Spec]
) -> EinshardError:
    """For what `sharded(...)` and the like give, called with other things than a function."""
    found = reprlib.repr(given[0]) if len(given) == 1 else plural(len(given), 'argument')
    facts: dict[str, Any] = {}
    if len(in_specs) == 1 and _is_function(in_specs[0]):
        name = name_of(in_specs[0])
        facts['note'] = f'{name} was taken as a spec, because {decorator} has options too'
        facts['try'] = f'{decorator}(...)({name})'
    return EinshardError(f'{decorator} decorates a function, not {found}', facts=facts)


def _decorate(
    function: Any,
    in_specs: Sequence[Spec],
    out: Spec,
    mesh: MeshLike | None,
    reshard: bool,
    collectives: Promise | None,
    named: Mapping[str, Any],
) -> Any:
    if isinstance(function, staticmethod | classmethod):
        inner = _decorate(function.__func__, in_specs, out, mesh, reshard, collectives, named)
        return type(function)(inner)
    kind = deferred_kind(function)
    if kind:
        raise EinshardError(
            f'{name_of(function)} is {kind}, which JAX cannot trace; use a function that '
            'returns arrays'
        )
    name = name_of(function)
    try:
        options, declaration = declare(function, in_specs, out, named)
        check_mesh(mesh)
        if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
            mesh = tuple(mesh)  # as it is now
        budget = None if collectives is None else Budget(name, read_promise(collectives))
    except EinshardError as error:
        raise error.about(function=name) from None
    return ShardedFunction(Setup(function, name, declaration, mesh, reshard, options, budget))
