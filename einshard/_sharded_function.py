"""A function that `sharded` has decorated, and which of its programs a call takes."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ._annotations import read_annotations
from ._bound_method import CALLED, BoundMethod
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
from ._program import Program
from ._promises import Promise, UnexpectedCollectives, read_promise
from ._signals import Signal, Stale, Untyped
from ._signature import looks_at_leaves, placements, signature
from ._specs import Spec, check_specs

P = ParamSpec('P')
Q = ParamSpec('Q')
R = TypeVar('R')

JIT_OPTIONS = frozenset(inspect.signature(jax.jit).parameters) - {'fun'}


class ShardedFunction(Generic[P, R]):
    """A function that `sharded` has decorated. It is called as before."""

    # a slot is read faster than the dict
    __slots__ = ('__dict__', '__weakref__', 'fast', 'function')

    def __init__(
        self,
        function: Callable[P, R],
        in_specs: Sequence[Spec],
        out: Spec,
        mesh: MeshLike | None,
        reshard: bool,
        collectives: Promise | None,
        named: Mapping[str, Any],
    ):
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self._name = name_of(function)
        self._parameters = Parameters(function, sorted(JIT_OPTIONS))
        self.is_method = bool(self._parameters.instance)
        self._mesh = mesh
        self._reshard = reshard
        # by form, mesh and axis rules, then by what the specs see of the arguments
        self._programs: dict[tuple[Form, AnyMesh, AxisRules], dict[Any, Program]] = {}
        self._lock = threading.Lock()
        # whether calls need several programs of one form, and are told apart beforehand
        self._careful = False
        self._forget_calls()
        try:
            self._options = _jit_options(named)
            specs = {name: spec for name, spec in named.items() if name not in self._options}
            if not (in_specs or specs) and out is None:
                specs, out = read_annotations(function)
            self._specs = self._parameters.assign(in_specs, specs)
            self._out = out
            self._static = self._chosen('static')
            self._donated = self._chosen('donate')
            self._defaults = self._placed_defaults()
            self._check_specs()
            check_mesh(mesh)
            if not isinstance(mesh, Mesh | AbstractMesh | None):
                self._mesh = tuple(mesh)  # as it is now
            self._promise = None if collectives is None else read_promise(collectives)
            # whether programs differ by the shapes and structure of the arguments
            self._looks = any(map(looks_at_leaves, [*self._specs.values(), self._out]))
        except EinshardError as error:
            raise error.about(function=self._name) from None
        self.function = _as_function(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        known = self._known.get((len(args), *kwargs))
        if known is None or around.get() is not None:
            return self._call(args, kwargs, _run)
        jitted, order = known
        try:
            return jitted(*args, *map(kwargs.__getitem__, order))
        except Signal as signal:
            again = type(signal)()
        except ValueError as error:
            return self.call_again(error, jitted, args, kwargs)
        return self.call_again(again, jitted, args, kwargs)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> ShardedFunction[P, R]: ...
    @overload
    def __get__(
        self: ShardedFunction[Concatenate[Any, Q], R], instance: object, owner: Any = None
    ) -> ShardedFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundMethod(self.function, instance)

    def __repr__(self) -> str:
        return f'<sharded function {self._name}>'

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """The lowered program of a call, as `jax.jit(f).lower`; no promise is checked."""
        return self._call(args, kwargs, lambda program: program.jitted.lower)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """The traced program of a call, as `jax.jit(f).trace`."""
        return self._call(args, kwargs, lambda program: program.jitted.trace)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The shapes and dtypes of the result of a call, as `jax.jit(f).eval_shape`."""
        return self._call(args, kwargs, lambda program: program.jitted.eval_shape)

    def in_shardings(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """The shardings that a call asks of its arguments, by parameter; None: not specified."""
        program = self._exact_program(args, kwargs)
        return dict(zip(program.labels, program.in_shardings, strict=True))

    def out_shardings(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The sharding, or tree of shardings, of the result of a call; None: not specified."""
        return self._exact_program(args, kwargs).out_shardings

    def clear_cache(self) -> None:
        """Forgets what was resolved, traced and compiled."""
        forgotten, self._programs = self._programs, {}
        self._careful = False
        self._forget_calls()
        for programs in forgotten.values():
            for program in programs.values():
                program.clear_cache()

    def _forget_calls(self) -> None:
        # the number of arguments and the jitted function of a call that needs no look-up
        self.fast: tuple[int, Any] = (-1, None)
        # by the number of arguments and the keywords as written: the jitted function of a call, and
        # the order in which it takes what is given by keyword
        self._known: dict[tuple[int | str, ...], tuple[Any, tuple[str, ...]]] = {}

    def _chosen(self, kind: str) -> frozenset[str]:
        """The labels that options like `static_argnums` and `static_argnames` name."""
        numbers = self._options.pop(f'{kind}_argnums', None)
        names = self._options.pop(f'{kind}_argnames', None)
        chosen = self._parameters.chosen(numbers, names, f'{kind}_argnames')
        # a class is no pytree, but it is constant
        of_class = (
            kind == 'static' and self._parameters.instance and 'cls' in self._parameters.names
        )
        return chosen | {'cls'} if of_class else chosen

    def _placed_defaults(self) -> dict[str, Any]:
        """Arrays that are defaults of parameters with a spec; a call gives them, too."""
        return {
            name: parameter.default
            for name, parameter in self._parameters.signature.parameters.items()
            if self._specs.get(name) is not None
            and name not in self._parameters.positional_only
            and any(
                isinstance(x, jax.Array | np.ndarray) for x in jtu.tree_leaves(parameter.default)
            )
        }

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
        form, order, values = self._row(args, kwargs)
        program = self._program(form, values)
        if act is _run and isinstance(program.mesh, AbstractMesh) and not is_tracing():
            raise EinshardError(
                f'{self._name} cannot run: its mesh is abstract, and has no devices',
                facts={'mesh': mesh_fact(program.mesh), 'instead': 'its eval_shape, or its trace'},
            )
        if not program.tried:
            # jit takes an array on the same devices in another order, and then fails on the next
            values = program.place(values, self._reshard, act is _run) or values
            program.tried = True
        try:
            result = act(program)(*values)
            as_written = len(values) == len(args) + len(kwargs)
            if act is _run and as_written and not (self._careful or around.get()):
                self._known[(len(args), *kwargs)] = (program.called, order)
                if not kwargs:
                    self.fast = (len(args), program.called)
            return result
        except Signal as signal:
            again = type(signal)()
        except ValueError as error:
            return self._again(error, program.called, form, values, act)
        return self._again(again, program.called, form, values, act)

    def call_again(
        self, error: Exception, failed: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a call is that raised `error` when it took the program `failed` unseen."""
        form, _, values = self._row(args, kwargs)
        return self._again(error, failed, form, values, _run)

    def _again(
        self, error: Exception, failed: Any, form: Form, values: list[Any], act: _Act
    ) -> Any:
        """Calls the right program, or with arguments that jit accepts; else raises `error`."""
        if isinstance(error, UnexpectedCollectives):
            self._forget_calls()  # the next one is read before it runs
        if isinstance(error, EinshardError):
            raise error
        program = self._program(form, values)
        # jit compares shardings and meshes before it traces: those of a stale program may not fit
        stale = isinstance(error, Stale) or program.called is not failed
        if stale or not program.places(values):
            self._careful = True
            self._forget_calls()
            program = self._program(form, values, not_this=failed)
            try:
                return act(program)(*values)
            except EinshardError:
                raise
            except (Untyped, ValueError) as other:
                error = other
        untyped = isinstance(error, Untyped)
        placed = program.place(values, self._reshard, act is _run, uncommitted=untyped)
        if placed is None:
            raise error
        return act(program)(*placed)

    def _exact_program(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        """The program of a call that is not made: nothing else tells that it is the right one."""
        form, _, values = self._row(args, kwargs)
        program = self._program(form, values)
        if program.is_for(values):
            return program
        return self._program(form, values, not_this=program.called)

    def _row(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Form, tuple[str, ...], list[Any]]:
        """The form of a call, the order of what is given by keyword, and all values in one row."""
        if self._defaults:
            taken = self._parameters.names[: len(args)]
            left = {name: x for name, x in self._defaults.items() if name not in taken}
            kwargs = {**left, **kwargs}
        form, order = self._parameters.form(len(args), kwargs)
        return form, order, [*args, *map(kwargs.__getitem__, order)]

    def _program(self, form: Form, values: Sequence[Any], not_this: Any = None) -> Program:
        """The program for a form of call, a mesh and, where specs look at them, the arguments.

        Unless calls are told apart it is the first that was made; not so if `not_this` is given,
        what calls of a program take that has turned out to be for others.
        """
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
        if known and not (self._careful or not_this):
            return known[0]
        unplaced = sorted({i for program in known for i in program.unplaced})
        seen = (
            signature(specs, self._out, values, static) if self._looks else (),
            placements(values, unplaced),
        )
        program = programs.get(seen)
        if program is None or program.called is not_this:
            # One thread makes it, which may trace. Inside a trace none waits for another, which
            # may be tracing a function that calls this one.
            with nullcontext() if is_tracing() else self._lock:
                for program in list(programs.values()):
                    if program.called is not not_this and program.is_for(values):
                        break
                else:
                    program = self._make_program(form, labels, specs, values)
                programs[seen] = program
        # several meshes or rules, or placements under a promise: the fast way would take one for
        # the other
        several = len({key[1:] for key in self._programs}) > 1
        self._careful = self._careful or several or bool(program.unplaced)
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
            self._promise,
        )


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
        except Signal as signal:
            # what comes of it is not an error in handling it; and its traceback holds the arguments
            again = type(signal)()
        except ValueError as error:
            return made.call_again(error, jitted, args, kwargs)
        return made.call_again(again, jitted, args, kwargs)

    functools.update_wrapper(call, made.__wrapped__)
    for name in (*CALLED, 'clear_cache'):
        setattr(call, name, getattr(made, name))
    return call


_Act: TypeAlias = Callable[[Program], Any]  # what of a program is called: itself, its lower, ...


def _run(program: Program) -> Any:
    return program.run


def _jit_options(named: Mapping[str, Any]) -> dict[str, Any]:
    for option in ('in_shardings', 'out_shardings'):
        if option in named:
            raise EinshardError(
                f'sharded makes {option} of the specs and does not take them as an option',
                facts={'give': 'specs by position or by parameter name, and out='},
            )
    return {name: value for name, value in named.items() if name in JIT_OPTIONS}
