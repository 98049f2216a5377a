"""What surrounds a call of einshard: a mesh, and axis rules.

JAX caches the trace of a function that is given to `scan`, `cond`, `checkpoint` or a nested `jit`
by the function's identity. What expressions in that function look up must be in the cache key:
`jax.make_user_context` adds it there. JAX's value belongs to a thread, a ContextVar to a task. They
differ where a task holds axis rules across an `await`, and in a thread that got a copied context.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, get_mesh

from .._cache import cached
from .._errors import EinshardError
from .mesh import AnyMesh, MeshLike, check_mesh, device_mesh, mesh_fact

# (axis name, placement, whether mesh axes that the mesh lacks are left out of it), sorted
AxisRules: TypeAlias = tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What an expression means depends on this, beside its text and the array's shape.

    `make_context` makes one object of equal parts, so that contexts are compared by identity: a
    look-up by a dataclass's own hash takes 0.3 us more, of 1.0 for an array that stays.
    """

    mesh: AnyMesh | None = None  # None: the canonical mesh of all devices
    mesh_is_ambient: bool = False  # whether `jax.set_mesh` has entered one, which fixes the axes
    axis_rules: AxisRules = ()

    @property
    def lowering_mesh(self) -> AnyMesh:
        """The mesh that expressions are lowered onto."""
        return self.mesh or device_mesh()

    def key(self) -> tuple[AnyMesh | None, AxisRules] | None:
        """What JAX's cache keys hold of it: a small value, compared by equality."""
        return (self.mesh, self.axis_rules) if self.mesh or self.axis_rules else None


@cached
def make_context(
    mesh: AnyMesh | None, mesh_is_ambient: bool = False, axis_rules: AxisRules = ()
) -> Context:
    return Context(mesh, mesh_is_ambient, axis_rules)


_NO_CONTEXT = Context()


def current_context(mesh: MeshLike | None = None) -> Context:
    """The context of a call: the mesh given, else that around it, and the axis rules.

    Around it is what a per-device function leaves of its mesh, else the mesh of the enclosing
    `sharded`, else that of `jax.set_mesh`. Looked up once for a tree, not for every leaf: to find
    the mesh in context takes a microsecond, to hash a sequence of devices one for each few.
    """
    enclosing = _enclosing()
    ambient = jax.sharding.get_abstract_mesh()
    if mesh is None:
        if ambient.empty:
            return enclosing
        if AxisType.Manual in ambient.axis_types:
            found: AnyMesh | None = ambient
        else:
            found = enclosing.mesh or ambient_mesh()
        return make_context(found, True, enclosing.axis_rules)
    check_mesh(mesh)
    given = mesh if isinstance(mesh, Mesh | AbstractMesh) else device_mesh(mesh)
    if AxisType.Manual in ambient.axis_types and given != ambient:
        raise EinshardError(
            'in a per-device function another mesh cannot be used: each device has its own array',
            facts={'mesh around': mesh_fact(ambient), 'mesh given': mesh_fact(given)},
        )
    return make_context(given, False, enclosing.axis_rules)


def ambient_mesh() -> AnyMesh | None:
    """The mesh of `jax.set_mesh`, if one is entered; while tracing, its abstract mesh."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None
    try:
        concrete = get_mesh()
    except ValueError:  # as in is_tracing
        return abstract
    if concrete.empty:
        return abstract
    return concrete if concrete.abstract_mesh == abstract else _retyped(concrete, abstract)


def is_mesh_in_context(mesh: AnyMesh) -> bool:
    """Whether a mesh that was not given is that of `jax.set_mesh`: no enclosing function has one.

    While tracing, the devices of a mesh in context are not known.
    """
    ambient = jax.sharding.get_abstract_mesh()
    if isinstance(mesh, AbstractMesh):
        return mesh == ambient
    return not ambient.empty and _enclosing().mesh is None


@cached
def _retyped(concrete: Mesh, abstract: AbstractMesh) -> AnyMesh:
    """The devices of a mesh, with the axis types that `auto_axes` and the like have in context."""
    if concrete.axis_names != abstract.axis_names or concrete.axis_sizes != abstract.axis_sizes:
        return abstract
    return Mesh(concrete.devices, concrete.axis_names, axis_types=abstract.axis_types)


# Made at import, once: to make one is not thread-safe, and JAX traces everything again after it.
_in_cache_keys: Any = jax.make_user_context(default_value=None)


class Scope:
    """The code inside has this context, in our ContextVar and in JAX's cache keys.

    Scopes may be left in another order than they were entered, by tasks and generators that take
    turns. What each restores is handed on, so that nothing of a scope that was left comes back.
    """

    __slots__ = ('_cache_keys', '_outer', 'context', 'key', 'owner')

    def __init__(self, context: Context, owner: object = None):
        self.context = context
        self.key = context.key()
        self.owner = owner  # the axis_rules that it is of
        self._cache_keys: Any = _in_cache_keys(self.key)

    def __enter__(self) -> None:
        self._outer = entered.get()
        entered.set(self)
        self._cache_keys.__enter__()
        _thread.scopes.append(self)

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> bool:
        """Leaves the scope; returns whether it was the last that was entered, and by this task."""
        mine = entered.get() is self
        if mine:
            entered.set(self._outer)
        scopes = _thread.scopes
        i = scopes.index(self)
        scopes.pop(i)
        later = scopes[i:]
        for scope in later:
            if scope._outer is self:
                scope._outer = self._outer
        if later:
            later[0]._cache_keys = self._cache_keys
        else:
            self._cache_keys.__exit__(None, None, None)
        return mine and not later


# the scope that this task has entered last; most code is in none
entered: ContextVar[Scope | None] = ContextVar('entered', default=None)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []  # that are entered and not left, by any task


_thread = _Thread()


def mesh_scope(mesh: AnyMesh | None) -> AbstractContextManager[Any]:
    """Inside, `mesh` is that of an enclosing `sharded`, which functions of the path find too."""
    if mesh is None:
        return nullcontext()
    return Scope(make_context(mesh, False, _enclosing().axis_rules))


def _enclosing() -> Context:
    """The context that scopes have left; raises where a trace would be kept for others.

    Eager code needs no check: nothing of it is cached by JAX.
    """
    scope = entered.get()
    # without a scope, a thread is in step unless a task has entered some: 0.1 us less to ask
    if (scope is not None or _thread.scopes) and not in_step() and is_tracing():
        raise _out_of_step()
    return _NO_CONTEXT if scope is None else scope.context


def same_in_thread() -> AbstractContextManager[Any]:
    """Makes a copied context that of JAX's cache keys in this thread, too."""
    scope = entered.get()
    return Scope(_NO_CONTEXT if scope is None else scope.context)


def in_step() -> bool:
    """Whether expressions and JAX's cache keys see the same context."""
    scope = entered.get()
    return (None if scope is None else scope.key) == _in_cache_keys.value


def enter_rules(owner: object, rules: Iterable[tuple[str, str, bool]]) -> None:
    """Adds axis rules to those around; raises where another task holds its own across an await."""
    if _thread.scopes and not in_step():
        raise _out_of_step()
    scope = entered.get()
    outer = _NO_CONTEXT if scope is None else scope.context
    merged = {rule[0]: rule for rule in (*outer.axis_rules, *rules)}
    rules = tuple(sorted(merged.values()))
    Scope(make_context(outer.mesh, False, rules), owner).__enter__()


def leave_rules(owner: object) -> bool:
    """Leaves what `owner` entered last in this task; returns whether that was in order."""
    scopes = [scope for scope in _thread.scopes if scope.owner is owner]
    here = [scope for scope in scopes if scope is entered.get()]
    return bool(scopes) and (here or scopes)[-1].leave()


def is_tracing() -> bool:
    """Whether a function is being traced.

    JAX has no public question for it; that `get_mesh` refuses while tracing is its documented
    behaviour, and tests/test_jax_facts.py notices if that ends.
    """
    try:
        get_mesh()
    except ValueError:
        return True
    return False


def is_staging() -> bool:
    """Whether operations become part of a program, as in `jax.jit`, instead of running now.

    In `jax.grad` and `jax.vmap` alone they run. Leaves one unused equation in a jaxpr, which JAX
    drops when it lowers; so it is asked only where a user is warned, or after an error.
    """
    return isinstance(jax.lax.neg(np.float32(0)), Tracer)


def _out_of_step() -> EinshardError:
    scope, held = entered.get(), _rules_text(_in_cache_keys.value)
    ours = _rules_text(None if scope is None else scope.key)
    if _thread.scopes:
        return EinshardError(
            'axis_rules must not be held across an await: another task in this thread holds others',
            facts={
                'rules in this task': ours,
                'held by the other': held,
                'instead': 'enter axis_rules in a function that does not await',
            },
        )
    return EinshardError(
        'this thread has the axis_rules of a copied context, and JAX traces here without them',
        facts={
            'rules': ours,
            'instead': 'enter axis_rules in the function that the thread runs',
        },
    )


def _rules_text(key: tuple[AnyMesh | None, AxisRules] | None) -> str:
    rules = key[1] if key else ()
    return ', '.join(f'{name}={placement!r}' for name, placement, _ in rules) or 'none'
