"""The shardings of a program's values, as the compiler's own propagation gives them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.stages import Lowered

from .._program.traced.propagated import Propagated
from .._program.traced.read import read_program
from .._program.traced.shardy import NotPropagated, is_gspmd
from .._sharding.scopes import mesh_scope
from .stages import Stages

_GSPMD = (
    'the program is partitioned by GSPMD; reasons are those of Shardy, and XLA may decide '
    'differently'
)
# the option is read when a function is lowered, and is global to all threads
_option_lock = threading.Lock()


class Propagation(NamedTuple):
    """A propagated program, or why there is none.

    Attributes:
        program: None if the program could not be propagated.
        note: why not, or what may differ from the compiled program; or ''.
    """

    program: Propagated | None
    note: str = ''


def propagate(stages: Stages, arguments: Sequence[str], results: Sequence[str]) -> Propagation:
    """Runs Shardy on a program, which compiles nothing.

    Args:
        arguments: the paths of the arguments that the program uses.
        results: the paths of the results.
    """
    if stages.compiled is not None:
        return Propagation(None, 'a compiled function no longer has the values before partitioning')
    lowered, note = stages.lower(), ''
    try:
        if is_gspmd(lowered.compiler_ir('stablehlo')):
            if stages.traced is None:
                return Propagation(None, 'a function that was lowered for GSPMD is not propagated')
            lowered, note = _lower_for_shardy(stages), _GSPMD
        program = read_program(lowered.compiler_ir('stablehlo'), dict(enumerate(arguments)))
    except NotPropagated as error:
        return Propagation(None, str(error))
    for value, path in zip(program.results, results, strict=False):  # Refs come last
        value.name = path
    return Propagation(program, note)


def _lower_for_shardy(stages: Stages) -> Lowered:
    with _option_lock, mesh_scope(stages.scope):
        before = jax.config.jax_use_shardy_partitioner  # type: ignore[reportAttributeAccessIssue]
        jax.config.update('jax_use_shardy_partitioner', True)
        try:
            return stages.lower()
        finally:
            jax.config.update('jax_use_shardy_partitioner', before)
