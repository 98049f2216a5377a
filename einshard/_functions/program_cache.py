"""The programs of a `sharded` function, each for one call signature and mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.tree_util as jtu

from .._sharding.context import AxisRules, Context
from .._sharding.mesh import AnyMesh
from .._sharding.scopes import without_fresh
from .parameters import CallSignature, Declaration
from .program import Program, shardings_of
from .setup import Setup

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
        # programs that are being jitted, by keys and the shardings of arguments without specs
        self._in_progress: dict[Any, Program] = {}
        self.need_full_lookup = False

    def find(
        self, call: CallSignature, values: Sequence[Any], context: Context, rejected: Any = None
    ) -> Program:
        """Finds or makes the program for a call.

        Until `need_full_lookup` is set, returns any program for the call signature, mesh and axis
        rules, without comparing `values`. If that program fails, call `find` again with its
        `runnable` as `rejected`, which sets `need_full_lookup`.
        """
        mesh_key = self._setup.mesh_key(context)
        # JAX itself traces a program again in `fresh_traces`
        rules = without_fresh(context.axis_rules)
        outer_key = call, mesh_key, rules, context.on_one_device
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
            # for a thread that calls this function. Threads that make the same program share it,
            # so that JAX traces once.
            new = Program(self._setup, call, values, context)
            key = outer_key, inner_key, new.shardings_without_spec
            new = self._in_progress.setdefault(key, new)
            try:
                for program in list(programs.values()):
                    if program.runnable is not rejected and program.is_for(values, context):
                        break
                else:
                    program = new
                    program.jit(values, context)
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
