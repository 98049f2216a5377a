"""Compiles a program with changes, for as many simulated devices as the program has."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from jax.sharding import Sharding

from ..._program.cost.bounds import Bounds
from ..._program.cost.chips import Chip, find_chip
from ..._program.edits.apply import Edited, apply
from ..._program.edits.call import JittedCall
from ..._program.edits.edit import Edit, indices, placements
from ..._program.jaxpr.graph import Program as TracedProgram
from ..._program.jaxpr.graph import flatten
from ..._sharding.context import mesh_scope
from ..findings.facts import Facts
from ..findings.next_call import next_arguments
from ..findings.trace import argument_values, propagate
from ..findings.values import Value
from ..partition import Compiled, Worker, export
from ..reading import Reading, read, read_simulated
from ..report_rows import Figures

# compiling takes a third of the time
OPTIONS = {
    'xla_backend_optimization_level': '0',
    'xla_llvm_disable_expensive_passes': True,
}
# simulated devices have no rates of their own
_DEFAULT_CHIP = 'TPU v5 lite'
_lock = threading.Lock()
_workers: dict[int, Worker] = {}


@dataclass(frozen=True)
class Trial:
    """A program with changes, before and after partitioning.

    Attributes:
        reading: the compiled program.
        traced, values: the operations of the function, and the shardings of its values as far as
            those of arguments and constraints imply them.
        bounds, figures: of the chip of the search.
    """

    edited: Edited | None
    reading: Reading
    traced: TracedProgram
    values: Sequence[Value]
    arguments: Sequence[Any]
    bounds: Bounds
    figures: Figures


class Trials:
    """Compiles one program with different changes.

    Attributes:
        error: why the last program did not compile, or ''.
    """

    def __init__(self, facts: Facts, call: JittedCall):
        self.facts, self.call = facts, call
        self.chip = facts.chip or default_chip()
        self.is_slow = importlib.util.find_spec('flatbuffers') is None
        self.error = ''

    def as_compiled(self) -> Trial:
        """Returns the program that the report is about."""
        facts = self.facts
        assert facts.traced is not None
        assert facts.trace is not None
        bounds = facts.bounds_on(self.chip)
        return Trial(
            None,
            facts,
            facts.traced,
            facts.trace.values,
            facts.arguments,
            bounds,
            facts.figures(bounds),
        )

    def run(self, edits: Sequence[Edit]) -> Trial | None:
        """Compiles the program with changes. Returns None if it does not compile."""
        facts, self.error = self.facts, ''
        with self._scope():
            try:
                edited = self._apply(edits)
                if not edited.is_complete:
                    return None
                traced = edited.function.trace(*edited.args, **edited.kwargs)
                program = flatten(traced.jaxpr, keep_unused=True)
                reading = self._compile(traced, program)
                bounds = reading.bounds_on(self.chip)
            except Exception as error:  # the ShardingTypeError of a trace has no public name
                self.error = str(error).strip().partition('\n')[0] or type(error).__name__
                return None
        placed = placements(edits)[0]
        arguments = [
            SimpleNamespace(
                shape=array.shape,
                names=array.names,
                sharding=placed.get(i, array.sharding),
            )
            for i, array in enumerate(facts.arguments)
        ]
        is_data = {i: value.is_data for i, value in enumerate(facts.values)}
        assert facts.mesh is not None
        starts = argument_values(arguments, is_data, facts.mesh)
        values = propagate(program, starts, facts.mesh)
        figures = reading.figures(bounds)
        return Trial(edited, reading, program, values, arguments, bounds, figures)

    def on_target(self, edits: Sequence[Edit]) -> Figures | None:
        """Compiles the program with changes for its own devices."""
        found = self.bounds_on_target(edits)
        return None if found is None else found[0]

    def bounds_on_target(self, edits: Sequence[Edit]) -> tuple[Figures, Bounds] | None:
        with self._scope():
            try:
                edited = self._apply(edits)
                if not edited.is_complete:
                    return None
                reading = self._read(edited.function.trace(*edited.args, **edited.kwargs))
                bounds = reading.bounds_on(self.chip)
            except Exception:
                return None
        return reading.figures(bounds), bounds

    def _scope(self) -> Any:
        scope = self.facts.stages.scope
        return nullcontext() if scope is None else mesh_scope(scope)

    def edited(self, edits: Sequence[Edit]) -> Edited:
        with self._scope():
            return self._apply(edits)

    def _apply(self, edits: Sequence[Edit]) -> Edited:
        given, moved = self.call.eqn.params['out_shardings'], indices(edits, 'argument')
        # suggestions name the arguments that these results replace; the compiler shards the results
        # likewise, and temporaries may take more memory if they are pinned
        implied = frozenset(
            ('result', i)
            for i, argument in next_arguments(self.facts).items()
            if argument in moved and not isinstance(given[i], Sharding)
        )
        if not self.facts.is_explicit:
            left = (edit.without(implied) for edit in edits)
            edits = [edit for edit in left if edit is not None]
        return apply(self.call, edits)

    def _compile(self, traced: Any, program: TracedProgram) -> Reading:
        facts, mesh = self.facts, self.facts.mesh
        assert mesh is not None
        if facts.platform == 'cpu':
            # XLA changes bf16 to f32 for CPUs, and may then send other arrays than the worker does
            return self._read(traced, program, OPTIONS)
        if not self.is_slow:
            axes = [(str(name), size) for name, size in mesh.shape.items()]
            try:
                request, kept = export(replace(facts.stages, traced=traced), axes, mesh.axis_types)
            except Exception:  # it has a kernel for the target, or a callback
                self.is_slow = True
            else:
                compiled = compile_in_worker(facts.n_devices, request)
                return read_simulated(compiled, **self._fields(kept, program))
        return self._read(traced, program)

    def _read(
        self,
        traced: Any,
        program: TracedProgram | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Reading:
        """Compiles for the target."""
        compiled = traced.lower().compile(compiler_options=options and dict(options))
        return read('the program', compiled, **self._fields(self.facts.used_arguments, program))

    def _fields(self, kept: Sequence[int], program: TracedProgram | None) -> dict[str, Any]:
        facts = self.facts
        arguments = [facts.arguments[i] for i in kept if i < len(facts.arguments)]
        return {
            'devices': facts.devices,
            'meshes': facts.meshes,
            'chip': facts.chip,
            'inputs': [(array.path, str(array.dtype)) for array in arguments],
            'outputs': {i: array.path for i, array in enumerate(facts.results)},
            'traced': program,
        }


def compile_in_worker(n_devices: int, request: dict[str, Any]) -> Compiled:
    """Compiles for simulated devices, in a process of its own.

    Raises an EinshardError if the process ends, and a ValueError if the compiler raises.
    """
    with _lock:
        worker = _workers.setdefault(n_devices, Worker(n_devices))
        worker.submit(request)
        compiled = worker.result()
    if isinstance(compiled, str):
        raise ValueError(compiled)
    return compiled


def default_chip() -> Chip:
    chip = find_chip(_DEFAULT_CHIP)
    assert chip is not None
    return chip
