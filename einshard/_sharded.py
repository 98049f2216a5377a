"""`jax.jit` with shardings in the notation: the decorator `sharded`."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload

import jax
from jax.sharding import AbstractMesh

from ._annotations import read_annotations
from ._errors import EinshardError
from ._mesh import (
    AnyMesh,
    AxisRules,
    MeshLike,
    around,
    check_mesh,
    is_tracing,
    mesh_fact,
    resolve_mesh,
)
from ._parameters import Form, Parameters, name_of
from ._program import Program, Stale, Untyped, looks_at_leaves, signature
from ._rules import Rules
from ._specs import Spec, check_specs

P = ParamSpec('P')
Q = ParamSpec('Q')
R = TypeVar('R')

_JIT_OPTIONS = frozenset(inspect.signature(jax.jit).parameters) - {'fun'}


@overload
def sharded(function: Callable[P, R], /) -> ShardedFunction[P, R]: ...
@overload
def sharded(
    *in_specs: Spec,
    out: Spec = None,
    mesh: MeshLike | None = None,
    reshard: bool = False,
    **named_specs_and_jit_options: Any,
) -> Callable[[Callable[P, R]], ShardedFunction[P, R]]: ...
def sharded(
    *in_specs: Spec,
    out: Spec = None,
    mesh: MeshLike | None = None,
    reshard: bool = False,
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

    Arguments that are not placed as their spec says are placed if they are host data, or whole on
    one device or on every one. An array that is partitioned otherwise is an error, since to move it
    is communication that nobody wrote; `reshard=True` allows it.

    Expressions are resolved at the first call and kept; a call then is that of `jax.jit`, behind
    one Python frame. Inside other transformations it is a nested jit. In the function, `einshard`
    uses the same mesh.

    Args:
        in_specs: specs by position: expressions, None, `Rules`, functions `(path, leaf) -> spec`,
            or trees of those that are prefixes of the argument. A function that stands alone, as
            in `@sharded`, is not a spec but what is decorated.
        out: the spec of the result.
        mesh: as for `make_sharding`; where left out, the mesh in context at each call.
        reshard: whether arguments that are partitioned otherwise may be moved.
        named_specs_and_jit_options: specs by parameter name, and every option of `jax.jit`:
            `static_argnames`, `donate_argnums`, `inline`, `keep_unused`, `compiler_options`, ...

    Returns:
        A function with the parameters and the result of the one decorated; and with `lower`,
        `trace`, `eval_shape`, `in_shardings`, `out_shardings`, `clear_cache` and `__wrapped__`.

    Raises:
        EinshardError: at decoration, for a spec too many, one for a name that is no parameter or
            for a static parameter, a wrong expression, an unknown option; at a call, for arrays
            that do not fit their spec.
    """
    named = named_specs_and_jit_options
    bare = not (named or reshard) and out is None and mesh is None
    if bare and len(in_specs) == 1 and _is_function(in_specs[0]):
        return _decorate(in_specs[0], (), None, None, False, {})

    def decorate(function: Callable[P, R]) -> ShardedFunction[P, R]:
        return _decorate(function, in_specs, out, mesh, reshard, named)

    return decorate


def _is_function(x: Any) -> bool:
    return isinstance(x, staticmethod | classmethod) or (callable(x) and not isinstance(x, Rules))


def _decorate(
    function: Any,
    in_specs: Sequence[Spec],
    out: Spec,
    mesh: MeshLike | None,
    reshard: bool,
    named: Mapping[str, Any],
) -> Any:
    if isinstance(function, staticmethod | classmethod):
        inner = _decorate(function.__func__, in_specs, out, mesh, reshard, named)
        return type(function)(inner)
    if not callable(function):
        raise EinshardError(f'sharded decorates a function, not {function!r}')
    for kind, what in (
        (inspect.isgeneratorfunction, 'a generator'),
        (inspect.iscoroutinefunction, 'a coroutine'),
        (inspect.isasyncgenfunction, 'an asynchronous generator'),
    ):
        if kind(function):
            raise EinshardError(
                f'{name_of(function)} is {what}, which JAX cannot trace: sharded decorates '
                'functions that return arrays'
            )
    made = ShardedFunction(function, in_specs, out, mesh, reshard, named)
    return made if made.is_method else _as_function(made)


def _as_function(made: ShardedFunction[..., Any]) -> Any:
    """A plain function that calls `made`, with its methods as attributes.

    Beside `jax.jit` alone, 3.5 to 5 us on one device, it takes 1.07 of the time where the call of
    an object takes 1.13. So what a program depends on is not compared here: the program does it
    while it is traced, and raises Stale, or jit refuses the mesh.
    """
    surroundings = around.get

    def call(*args: Any, **kwargs: Any) -> Any:
        n_args, jitted = made.fast
        if kwargs or len(args) != n_args or surroundings() is not None:
            return made(*args, **kwargs)
        try:
            return jitted(*args)
        except (Stale, Untyped, ValueError) as error:
            return made.call_again(error, jitted, args, kwargs)

    functools.update_wrapper(call, made.__wrapped__)
    for name in (*_CALLED, 'clear_cache'):
        setattr(call, name, getattr(made, name))
    return call


class ShardedFunction(Generic[P, R]):
    """A function that `sharded` has decorated. It is called as before."""

    __slots__ = ('__dict__', '__weakref__', 'fast')  # a slot is read faster than the dict

    def __init__(
        self,
        function: Callable[P, R],
        in_specs: Sequence[Spec],
        out: Spec,
        mesh: MeshLike | None,
        reshard: bool,
        named: Mapping[str, Any],
    ):
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self._name = name_of(function)
        self._parameters = Parameters(function, sorted(_JIT_OPTIONS))
        self.is_method = bool(self._parameters.instance)
        self._mesh = mesh
        self._reshard = reshard
        # by form, mesh and axis rules, then by what the specs see of the arguments
        self._programs: dict[tuple[Form, AnyMesh, AxisRules], dict[Any, Program]] = {}
        self._lock = threading.Lock()
        # the number of arguments and the jitted function of a call that needs no look-up
        self.fast: tuple[int, Any] = _NOT_FAST
        # whether calls have met several meshes or signatures, and are told apart beforehand
        self._careful = False
        try:
            self._options = _jit_options(named)
            specs = {name: spec for name, spec in named.items() if name not in self._options}
            if not (in_specs or specs) and out is None:
                specs, out = read_annotations(function)
            self._specs = self._parameters.assign(in_specs, specs)
            self._out = out
            self._static = self._chosen('static')
            self._donated = self._chosen('donate')
            self._check_specs()
            check_mesh(mesh)
            # whether programs differ by the shapes and structure of the arguments
            self._looks = any(map(looks_at_leaves, [*self._specs.values(), self._out]))
        except EinshardError as error:
            raise error.about(function=self._name) from None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(args, kwargs, _jitted)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> ShardedFunction[P, R]: ...
    @overload
    def __get__(
        self: ShardedFunction[Concatenate[Any, Q], R], instance: object, owner: Any = None
    ) -> ShardedFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _BoundMethod(self, instance)

    def __repr__(self) -> str:
        return f'<sharded function {self._name}>'

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """The lowered program of a call, as `jax.jit(f).lower`."""
        return self._call(args, kwargs, lambda program: program.jitted.lower)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """The traced program of a call, as `jax.jit(f).trace`."""
        return self._call(args, kwargs, lambda program: program.jitted.trace)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The shapes and dtypes of the result of a call, as `jax.jit(f).eval_shape`."""
        return self._call(args, kwargs, lambda program: program.jitted.eval_shape)

    def in_shardings(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """The shardings that a call asks of its arguments, by parameter; None: not specified."""
        form, values = self._parameters.form(args, kwargs)
        program = self._program(form, values)
        return dict(zip(program.labels, program.in_shardings, strict=True))

    def out_shardings(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The sharding, or tree of shardings, of the result of a call; None: not specified."""
        return self._program(*self._parameters.form(args, kwargs)).out_shardings

    def clear_cache(self) -> None:
        """Forgets what was resolved, traced and compiled."""
        forgotten, self._programs = self._programs, {}
        self.fast = _NOT_FAST
        self._careful = False
        for programs in forgotten.values():
            for program in programs.values():
                program.jitted.clear_cache()

    def _chosen(self, kind: str) -> frozenset[str]:
        """The labels that options like `static_argnums` and `static_argnames` name."""
        numbers = self._options.pop(f'{kind}_argnums', None)
        names = self._options.pop(f'{kind}_argnames', None)
        chosen = self._parameters.indices(numbers, names, f'{kind}_argnames')
        # a class is no pytree, but it is constant
        of_class = (
            kind == 'static' and self._parameters.instance and 'cls' in self._parameters.names
        )
        return chosen | {'cls'} if of_class else chosen

    def _check_specs(self) -> None:
        both = sorted(self._static & self._donated)
        if both:
            raise EinshardError(
                f"parameter '{both[0]}' is static: it is no array and has no memory to donate"
            )
        for label, spec in [*self._specs.items(), ('out=', self._out)]:
            if label in self._static and spec is not None:
                raise EinshardError(
                    f"parameter '{label}' is static: it is no array and takes no spec",
                    facts={'spec': spec},
                )
            try:
                check_specs(spec)
            except EinshardError as error:
                where = {'spec of': 'the result'} if label == 'out=' else {'parameter': label}
                raise error.about(**where) from None

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any], act: _Act) -> Any:
        form, values = self._parameters.form(args, kwargs)
        program = self._program(form, values)
        if act is _jitted and isinstance(program.mesh, AbstractMesh) and not is_tracing():
            raise EinshardError(
                f'{self._name} cannot run: its mesh is abstract, and has no devices',
                facts={'mesh': mesh_fact(program.mesh), 'instead': 'its eval_shape, or its trace'},
            )
        if not program.tried:
            # jit takes an array on the same devices in another order, and then fails on the next
            values = program.place(values, self._reshard) or values
            program.tried = True
        try:
            return act(program)(*values)
        except (Stale, Untyped, ValueError) as error:
            return self._again(error, program.jitted, form, values, act)

    def call_again(
        self, error: Exception, failed: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a call is that raised `error` when it took the program `failed` unseen."""
        return self._again(error, failed, *self._parameters.form(args, kwargs), _jitted)

    def _again(
        self, error: Exception, failed: Any, form: Form, values: list[Any], act: _Act
    ) -> Any:
        """Calls the right program, or with arguments that jit accepts; else raises `error`."""
        if isinstance(error, EinshardError):
            raise error
        program = self._program(form, values)
        # jit compares shardings and meshes before it traces: those of a stale program may not fit
        stale = isinstance(error, Stale) or program.jitted is not failed
        if stale or not program.is_for(values):
            self._careful = True
            self.fast = _NOT_FAST
            program = self._program(form, values)
            try:
                return act(program)(*values)
            except EinshardError:
                raise
            except (Untyped, ValueError) as other:
                error = other
        placed = program.place(values, self._reshard, uncommitted=isinstance(error, Untyped))
        if placed is None:
            raise error
        return act(program)(*placed)

    def _program(self, form: Form, values: Sequence[Any]) -> Program:
        """The program for a form of call, a mesh and, where specs look at them, the arguments."""
        try:
            mesh = resolve_mesh(self._mesh)
        except EinshardError as error:
            raise error.about(function=self._name) from None
        surroundings = around.get()
        rules = surroundings.axis_rules if surroundings else ()
        labels = self._parameters.labels(form)
        static = [i for i, label in enumerate(labels) if label in self._static]
        specs = [self._parameters.spec_for(label, self._specs) for label in labels]
        programs = self._programs.setdefault((form, mesh, rules), {})
        known = list(programs.values())
        if known and not self._careful:
            program = known[0]
        else:
            seen = signature(specs, self._out, values, static) if self._looks else ()
            program = programs.get(seen)
            # One thread makes it, which may trace. Inside a trace none waits for another, which
            # may be tracing a function that calls this one.
            with nullcontext() if program is not None or is_tracing() else self._lock:
                if seen not in programs:
                    programs[seen] = self._make_program(form, labels, specs, values)
                program = programs[seen]
            # several meshes or rules: the fast way would take one for the other
            self._careful = self._careful or len({key[1:] for key in self._programs}) > 1
        if program.tried and not (form.keywords or self._careful or surroundings):
            self.fast = (form.positional, program.jitted)
        return program

    def _make_program(
        self, form: Form, labels: Sequence[str], specs: Sequence[Spec], values: Sequence[Any]
    ) -> Program:
        donated = tuple(i for i, label in enumerate(labels) if label in self._donated)
        options = {**self._options, 'donate_argnums': donated} if donated else self._options
        return Program(
            self.__wrapped__,
            self._name,
            form,
            labels,
            specs,
            self._out,
            self._static,
            values,
            self._mesh,
            options,
        )


_CALLED = ('lower', 'trace', 'eval_shape', 'in_shardings', 'out_shardings')
_NOT_FAST = (-1, None)
_Act: TypeAlias = Callable[[Program], Any]  # what of a program is called: itself, its lower, ...


def _jitted(program: Program) -> Any:
    return program.jitted


def _jit_options(named: Mapping[str, Any]) -> dict[str, Any]:
    for option in ('in_shardings', 'out_shardings'):
        if option in named:
            raise EinshardError(
                f'sharded makes {option} of the specs and does not take them as an option',
                facts={'give': 'specs by position or by parameter name, and out='},
            )
    return {name: value for name, value in named.items() if name in _JIT_OPTIONS}


class _BoundMethod:
    """A sharded method with its instance: called, lowered, traced without naming it."""

    def __init__(self, function: ShardedFunction[..., Any], instance: Any):
        self.__func__ = function
        self.__self__ = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    # so that the signature is that without the instance
    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(self.__func__.__wrapped__, self.__self__)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__func__.__doc__

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.__func__, name)
        if name in _CALLED:
            return functools.partial(attribute, self.__self__)
        return attribute
