"""The context in effect where einshard is called: its own scopes, and the mesh of JAX.

JAX caches the trace of a function passed to `scan`, `cond`, `checkpoint` or a nested `jit` by the
identity of the function. A cached trace is wrong for another mesh or other rules, so einshard adds
both to JAX's cache key, with `jax.make_user_context`. JAX's cache key is per thread, but
`innermost_scope`, a ContextVar, is per asyncio task. The two differ if a task holds axis rules
across an `await`, and in a thread that runs in a copied `contextvars` context.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, get_abstract_mesh, get_mesh

from .._cache import cached
from .._errors import EinshardError
from .context import (
    NO_CONTEXT,
    USE_MESH_IN_CONTEXT,
    AxisRule,
    AxisRules,
    Context,
    ContextKey,
    make_context,
    with_rules,
)
from .mesh import AnyMesh, MeshLike, check_mesh, device_mesh, has_equal_axes, mesh_fact, shrink_mesh
from .tracing import is_tracing


def current_context(mesh: MeshLike | None = None) -> Context:
    """Returns the context: `mesh` or the default mesh, and the axis rules in effect.

    The default mesh is the first of these that exists: the mesh of an enclosing `shard_map` or
    `per_device`, of an enclosing `sharded` function, or of `jax.set_mesh`. Call this once per
    pytree, not per leaf: finding the mesh takes 1 us, hashing a sequence of devices takes longer.
    """
    enclosing = _enclosing_context()
    ambient = get_abstract_mesh()
    if mesh is None:
        if ambient.empty:
            return enclosing
        if AxisType.Manual in ambient.axis_types:
            mesh_in_context: AnyMesh | None = ambient
        else:
            mesh_in_context = enclosing.mesh or ambient_mesh()
        rules, on_one_device = enclosing.axis_rules, enclosing.on_one_device
        return make_context(mesh_in_context, True, rules, on_one_device)
    check_mesh(mesh)
    given_mesh = mesh if isinstance(mesh, Mesh | AbstractMesh) else device_mesh(mesh)
    if enclosing.on_one_device:
        given_mesh = shrink_mesh(given_mesh, enclosing.lowering_mesh)
    if AxisType.Manual in ambient.axis_types and not (
        isinstance(given_mesh, AbstractMesh) and has_equal_axes(given_mesh, ambient)
    ):
        raise EinshardError(
            'inside shard_map, mesh= must match the mesh in context',
            code='mesh',
            facts={
                'mesh=': mesh_fact(given_mesh),
                'mesh in context': mesh_fact(ambient),
                'instead': 'shard arrays before shard_map'
                if {*ambient.axis_types} == {AxisType.Manual}
                else USE_MESH_IN_CONTEXT,
            },
        )
    return make_context(given_mesh, False, enclosing.axis_rules, enclosing.on_one_device)


def ambient_mesh() -> AnyMesh | None:
    """Returns the mesh of `jax.set_mesh`, or None. While tracing, returns its abstract mesh."""
    abstract = get_abstract_mesh()
    if abstract.empty:
        return None
    try:
        concrete = get_mesh()
    except ValueError:  # while tracing: see is_tracing
        return abstract
    if concrete.empty:
        return abstract
    return concrete if concrete.abstract_mesh == abstract else _retyped(concrete, abstract)


def is_mesh_in_context(mesh: AnyMesh) -> bool:
    """Whether `mesh`, the `lowering_mesh` of a context, is the mesh of `jax.set_mesh`.

    While tracing, JAX exposes only the abstract mesh of `jax.set_mesh`. There, a mesh with
    devices comes from `jax.set_mesh`, unless an enclosing scope has a mesh.
    """
    ambient = get_abstract_mesh()
    if isinstance(mesh, AbstractMesh):
        return has_equal_axes(mesh, ambient)
    return not ambient.empty and _enclosing_context().mesh is None


@cached
def _retyped(concrete: Mesh, abstract: AbstractMesh) -> AnyMesh:
    """Returns `concrete` with the axis types of `abstract`.

    Returns `abstract` if axis names or sizes differ. The axis types of the two meshes differ inside
    `jax.sharding.auto_axes`.
    """
    if concrete.axis_names != abstract.axis_names or concrete.axis_sizes != abstract.axis_sizes:
        return abstract
    return Mesh(concrete.devices, concrete.axis_names, axis_types=abstract.axis_types)


# created once, at import: creation is not thread-safe, and makes JAX retrace everything
_in_cache_keys: Any = jax.make_user_context(default_value=None)


class ContextScope:
    """Sets the context in a `with` block, both in `innermost_scope` and in JAX's cache keys.

    Interleaved tasks and generators may exit an outer scope before an inner one. When the inner
    one exits, it restores what the outer one would have restored, not the exited scope.
    """

    __slots__ = ('_cache_keys', '_outer', 'context', 'is_leaving', 'is_program', 'key', 'owner')

    def __init__(self, context: Context, owner: object = None, is_program: bool = False):
        self.context = context
        self.key = context.key()
        self.owner = owner  # the axis_rules object that entered the scope
        self.is_program = is_program  # see `mesh_scope`
        self.is_leaving = False  # whether `leave` has begun, and perhaps was interrupted
        self._cache_keys: Any = _in_cache_keys(self.key)

    def __enter__(self) -> None:
        self._outer = innermost_scope.get()
        _thread.open_scopes.append(self)  # first, so that `leave_rules_since` finds it
        self._cache_keys.__enter__()
        innermost_scope.set(self)

    def __exit__(self, *_: object) -> None:
        self.leave()

    def program_mesh(self) -> AnyMesh | None:
        """Returns the mesh of the innermost scope with `is_program`, or None."""
        if self.is_program:
            return self.context.mesh
        return self._outer and self._outer.program_mesh()

    def leave(self) -> bool:
        """Exits the scope. Returns whether it was the innermost one of this task and thread.

        If it is interrupted, a second call completes it.
        """
        is_current = innermost_scope.get() is self
        self.is_leaving = True
        if is_current:
            innermost_scope.set(self._outer)
        scopes = _thread.open_scopes
        i = scopes.index(self)
        inner = scopes[i + 1 :]
        for scope in inner:
            if scope._outer is self:
                scope._outer = self._outer
        if inner:
            inner[0]._cache_keys = self._cache_keys
        else:
            try:
                self._cache_keys.__exit__(None, None, None)
            except AttributeError:  # JAX was interrupted while it entered this context
                _in_cache_keys(self._outer and self._outer.key).__enter__()
        scopes.pop(i)  # last, so that a second call finds it
        return is_current and not inner


innermost_scope: ContextVar[ContextScope | None] = ContextVar('innermost_scope', default=None)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open_scopes: list[ContextScope] = []  # of all tasks, in the order entered


_thread = _Thread()


def mesh_scope(
    mesh: AnyMesh | None, is_program: bool = False, rules: Sequence[AxisRule] = ()
) -> AbstractContextManager[Any]:
    """Makes `mesh`, unless it is None, the default mesh in a `with` block, and adds axis rules.

    With `is_program`, the block traces a program that runs on the devices of `mesh`.
    """
    if mesh is None:
        return nullcontext()
    outer = _enclosing_context()
    context = make_context(mesh, False, outer.axis_rules, outer.on_one_device)
    return ContextScope(with_rules(context, rules), is_program=is_program)


@contextmanager
def only_mesh_scope(mesh: AnyMesh) -> Generator[None]:
    """Makes `mesh` the default mesh in a `with` block, also in place of that of `jax.set_mesh`."""
    has_ambient = not get_abstract_mesh().empty
    with mesh_scope(mesh), ExitStack() as stack:
        if has_ambient and isinstance(mesh, Mesh):
            stack.enter_context(jax.set_mesh(mesh))
        elif isinstance(mesh, AbstractMesh):  # traced values can only have that in context
            if has_ambient:  # JAX enters no abstract mesh of another size
                stack.enter_context(jax.set_mesh(Mesh(np.empty((), object), ())))
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def one_device_scope(mesh: Mesh) -> AbstractContextManager[Any]:
    """Makes `mesh`, which has one device, the default mesh in a `with` block.

    In the block, every count is 1. Any other mesh is replaced by a mesh on that device, with the
    same axes, each of size 1.
    """
    return ContextScope(make_context(mesh, False, _enclosing_context().axis_rules, True))


def _enclosing_context() -> Context:
    """Returns the innermost context. While tracing, raises if JAX's cache keys do not match."""
    scope = innermost_scope.get()
    # most threads have no scopes, and the first check saves 0.1 us there
    if (scope is not None or _thread.open_scopes) and not matches_cache_keys() and is_tracing():
        raise _mismatch_error()
    return NO_CONTEXT if scope is None else scope.context


def add_to_cache_keys() -> AbstractContextManager[Any]:
    """Adds the context to JAX's cache keys in a `with` block.

    For a thread with a copied `contextvars` context, which does not include JAX's cache keys.
    """
    scope = innermost_scope.get()
    return ContextScope(NO_CONTEXT if scope is None else scope.context)


def matches_cache_keys() -> bool:
    scope = innermost_scope.get()
    return (None if scope is None else scope.key) == _in_cache_keys.value


def enter_rules(owner: object, rules: Sequence[AxisRule]) -> None:
    """Adds the rules of `owner`, an `axis_rules` object, to the current axis rules.

    Raises if another asyncio task of this thread is suspended in a block with other rules.
    """
    if _thread.open_scopes and not matches_cache_keys():
        raise _mismatch_error()
    scope = innermost_scope.get()
    outer = NO_CONTEXT if scope is None else scope.context
    inner = with_rules(
        make_context(outer.mesh, False, outer.axis_rules, outer.on_one_device), rules
    )
    ContextScope(inner, owner).__enter__()


_numbers = itertools.count()
_FRESH = ' '  # begins a name that no expression can have


def fresh_traces() -> ContextScope:
    """Makes JAX trace functions again that it has traced, in a `with` block.

    A rule for a name of its own is in JAX's cache keys, also in scopes inside.
    """
    rule = AxisRule(f'{_FRESH}{next(_numbers)}', '')
    return ContextScope(with_rules(_enclosing_context(), [rule]))


def without_fresh(rules: AxisRules) -> AxisRules:
    """Returns axis rules without those of `fresh_traces`, which shard nothing."""
    return tuple(rule for rule in rules if not rule.name.startswith(_FRESH))


def leave_rules(owner: object) -> bool:
    """Exits the innermost scope if `owner` entered it.

    Otherwise exits the last scope that `owner` entered in this thread. Returns whether the exited
    scope was the innermost one of this task and thread.
    """
    scopes = [scope for scope in _thread.open_scopes if scope.owner is owner]
    current = [scope for scope in scopes if scope.is_leaving or scope is innermost_scope.get()]
    return bool(scopes) and (current or scopes)[-1].leave()


def n_open_scopes() -> int:
    return len(_thread.open_scopes)


def leave_rules_since(n_open: int) -> None:
    """Exits the scopes that an interrupted `enter_rules` or `leave_rules` has left open."""
    while len(_thread.open_scopes) > n_open:
        _thread.open_scopes[-1].leave()


def _mismatch_error() -> EinshardError:
    scope, jax_rules = innermost_scope.get(), _rules_text(_in_cache_keys.value)
    task_rules = _rules_text(None if scope is None else scope.key)
    if _thread.open_scopes:
        return EinshardError(
            'axis_rules cannot span an await: another task in this thread has entered different '
            'rules',
            code='axis-rules',
            facts={
                'rules in this task': task_rules,
                'rules in the other task': jax_rules,
                'instead': 'enter axis_rules in a function that does not await',
            },
        )
    return EinshardError(
        'this thread runs in a copied contextvars context, whose axis_rules are not in the cache '
        'keys of JAX',
        code='axis-rules',
        facts={
            'rules': task_rules,
            'instead': 'enter axis_rules in the function that the thread runs',
        },
    )


def _rules_text(key: ContextKey | None) -> str:
    rules = key[1] if key else ()
    return ', '.join(f'{name}={placement!r}' for name, placement, *_ in rules) or 'none'
