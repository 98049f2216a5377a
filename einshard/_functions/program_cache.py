"""The programs of a `sharded` function, and the look-up of the one for a call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.tree_util as jtu

from .._sharding.context import AxisRules, Context, is_tracing
from .._sharding.mesh import AnyMesh
from .parameters import CallSignature, Declaration
from .program import Program, Setup, make_program, shardings_of


class ProgramCache:
    """Programs by call signature, mesh and axis rules, then by what specs read of the arguments.

    Attributes:
        need_full_lookup: whether one call signature may have several programs.
    """

    def __init__(self, setup: Setup):
        self._setup = setup
        self._programs: dict[tuple[CallSignature, AnyMesh, AxisRules], dict[Any, Program]] = {}
        self._lock = threading.Lock()
        self.need_full_lookup = False

    def find(self, call: CallSignature, values: Sequence[Any], wrong: Any = None) -> Program:
        """The program of a call; made if there is none.

        Without the full look-up it is the first program of the signature. `wrong` is the
        `called` of a program that turned out to be wrong; it turns the full look-up on.
        """
        context = self._setup.context()
        where = call, self._setup.mesh_key(context), context.axis_rules
        programs = self._programs.setdefault(where, {})
        known = list(programs.values())
        self.need_full_lookup |= wrong is not None
        if known and not self.need_full_lookup:
            return known[0]
        unplaced = sorted({i for program in known for i in program.unplaced})
        leaves = _leaves_key(self._setup.declaration, call, values, context)
        seen = leaves, shardings_of(values, unplaced)
        program = programs.get(seen)
        if program is None or program.called is wrong:
            # One thread at a time makes a program, which may trace. Inside a trace there is no
            # lock: another thread may hold it while it traces a function that calls this one.
            with nullcontext() if is_tracing() else self._lock:
                for program in list(programs.values()):
                    if program.called is not wrong and program.is_for(values):
                        break
                else:
                    program = make_program(self._setup, call, values)
                programs[seen] = program
        # The fast path cannot tell meshes, axis rules, or shardings under a budget apart.
        several = len({key[1:] for key in self._programs}) > 1
        self.need_full_lookup |= several or bool(program.unplaced)
        return program

    def clear(self) -> None:
        """Drops everything resolved, traced and compiled."""
        forgotten, self._programs = self._programs, {}
        self.need_full_lookup = False
        for programs in forgotten.values():
            for program in programs.values():
                program.clear_cache()


def _leaves_key(
    declaration: Declaration, call: CallSignature, values: Sequence[Any], context: Context
) -> Any:
    """What shardings depend on: structure, shapes and dtypes of arguments whose specs read them."""
    arguments = declaration.arguments(call)
    all_of_them = declaration.result.needs_leaves(context)
    key: list[Any] = []
    for argument, value in zip(arguments, values, strict=True):
        if all_of_them and argument.name in declaration.static:
            key.append(value)
        elif all_of_them or argument.needs_leaves(context):
            leaves, treedef = jtu.tree_flatten(value)
            key.append((treedef, tuple(map(_shape_and_dtype, leaves))))
    return tuple(key)


def _shape_and_dtype(leaf: Any) -> Any:
    """The same for a value and for its tracer."""
    try:
        aval: Any = jax.typeof(leaf)
    except TypeError:  # not an array: jit raises
        return type(leaf)
    return aval.shape, aval.dtype
