"""Compiles a program with changes, for as many simulated devices as the program has."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from jax.sharding import NamedSharding, Sharding

from ..._functions.promise import program_text
from ..._program.cost.bounds import Bounds, find_bounds
from ..._program.cost.chips import Chip, find_chip
from ..._program.hlo.collective import Collective
from ..._program.hlo.find_collectives import find_collectives
from ..._program.hlo.flops import ProductRow, product_rows
from ..._program.hlo.graph import Graph
from ..._program.hlo.memory import Memory, read_memory
from ..._program.hlo.slices import Reshard, find_reshards
from ..._program.hlo.target_collectives import target_collectives
from ..._program.hlo.text import Program
from ..._program.jaxpr.edits import Edited, JittedCall, PerDevice, ValueEdit, apply
from ..._program.jaxpr.graph import Program as TracedProgram
from ..._program.jaxpr.graph import flatten
from ..._sharding.collective_axes import along_text, mesh_axes_of
from ..._sharding.context import mesh_scope
from ..findings.facts import Facts
from ..findings.next_call import next_arguments
from ..findings.trace import argument_values, propagate
from ..findings.values import Value
from ..partition import WORKER_FILE, Worker, export
from ..payloads import Payloads
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
class Edits:
    """Changes of a program.

    Attributes:
        values: constraints on values.
        arguments, results: new shardings, by index.
        entering, leaving: shardings of arguments and results on the way to the values that the
            program computes with, by index.
        per_device: operations that each device runs on its shard.
    """

    values: tuple[ValueEdit, ...] = ()
    arguments: Mapping[int, NamedSharding] = field(default_factory=dict)
    results: Mapping[int, NamedSharding] = field(default_factory=dict)
    entering: Mapping[int, NamedSharding] = field(default_factory=dict)
    leaving: Mapping[int, NamedSharding] = field(default_factory=dict)
    per_device: tuple[PerDevice, ...] = ()

    def paths(self, facts: Facts) -> set[str]:
        """The arguments and results that get new shardings."""
        arguments = {facts.arguments[i].path for i in self.arguments}
        return arguments | {facts.results[i].path for i in self.results}

    def __or__(self, later: Edits) -> Edits:
        edited = {(edit.span, edit.of_operand) for edit in later.values}
        kept = (edit for edit in self.values if (edit.span, edit.of_operand) not in edited)
        return Edits(
            (*kept, *later.values),
            {**self.arguments, **later.arguments},
            {**self.results, **later.results},
            {**self.entering, **later.entering},
            {**self.leaving, **later.leaving},
            (*self.per_device, *later.per_device),
        )


@dataclass(frozen=True)
class Trial:
    """A program with changes, before and after partitioning.

    Attributes:
        traced, values: the operations of the function, and the shardings of its values as far as
            those of arguments and constraints imply them.
        collectives, products, bounds: of the compiled program.
        reshards: as in `Facts`.
        is_simulated: whether it is compiled for CPUs that simulate the devices.
    """

    edited: Edited | None
    traced: TracedProgram
    values: Sequence[Value]
    arguments: Sequence[Any]
    collectives: Sequence[Collective]
    products: Sequence[ProductRow]
    bounds: Bounds
    figures: Figures
    reshards: Mapping[str, Reshard]
    graph: Graph
    is_simulated: bool = False


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
        facts, devices = self.facts, list(self.facts.devices)
        assert facts.traced is not None
        assert facts.mesh is not None
        bounds = find_bounds(self.chip, devices, facts.graph, facts.products, facts.collectives)
        return Trial(
            None,
            facts.traced,
            propagate(facts.traced, facts.values, facts.mesh),
            facts.arguments,
            facts.collectives,
            facts.products,
            bounds,
            _figures(facts.collectives, facts.memory, facts.products, bounds),
            facts.reshards,
            facts.graph,
        )

    def run(self, edits: Edits) -> Trial | None:
        """Compiles the program with changes. Returns None if it does not compile."""
        facts, self.error = self.facts, ''
        with self._scope():
            try:
                edited = self._apply(edits)
                if not all((*(n for n, _ in edited.applied), *edited.n_per_device)):
                    return None
                traced = edited.function.trace(*edited.args, **edited.kwargs)
                collectives, graph, memory, is_cpu = self._compile(traced)
            except Exception as error:  # the ShardingTypeError of a trace has no public name
                self.error = str(error).strip().partition('\n')[0] or type(error).__name__
                return None
        products = product_rows(graph)
        devices = list(facts.devices)
        bounds = find_bounds(self.chip, devices, graph, products, collectives, is_cpu=is_cpu)
        program = flatten(traced.jaxpr, keep_unused=True)
        arguments = [
            SimpleNamespace(
                shape=array.shape,
                names=array.names,
                sharding=edits.arguments.get(i, array.sharding),
            )
            for i, array in enumerate(facts.arguments)
        ]
        is_data = {i: value.is_data for i, value in enumerate(facts.values)}
        assert facts.mesh is not None
        starts = argument_values(arguments, is_data, facts.mesh)
        values = propagate(program, starts, facts.mesh)
        return Trial(
            edited,
            program,
            values,
            arguments,
            collectives,
            products,
            bounds,
            _figures(collectives, memory, products, bounds),
            find_reshards(graph, collectives),
            graph,
            is_cpu,
        )

    def on_target(self, edits: Edits) -> Figures | None:
        """Compiles the program with changes for its own devices."""
        found = self.bounds_on_target(edits)
        return None if found is None else found[0]

    def bounds_on_target(self, edits: Edits) -> tuple[Figures, Bounds] | None:
        with self._scope():
            try:
                edited = self._apply(edits)
                if not all(edited.n_per_device):
                    return None
                traced = edited.function.trace(*edited.args, **edited.kwargs)
                collectives, graph, memory, _ = self._compile_for_target(traced)
            except Exception:
                return None
        products, devices = product_rows(graph), list(self.facts.devices)
        bounds = find_bounds(self.chip, devices, graph, products, collectives)
        return _figures(collectives, memory, products, bounds), bounds

    def _scope(self) -> Any:
        scope = self.facts.stages.scope
        return nullcontext() if scope is None else mesh_scope(scope)

    def edited(self, edits: Edits) -> Edited:
        with self._scope():
            return self._apply(edits)

    def _apply(self, edits: Edits) -> Edited:
        leaves = self.call.dynamic
        arguments = {leaves[i]: sharding for i, sharding in edits.arguments.items()}
        entering = {leaves[i]: sharding for i, sharding in edits.entering.items()}
        through = entering, edits.leaving
        given = self.call.eqn.params['out_shardings']
        # suggestions name the arguments that these results replace; the compiler shards the results
        # likewise, and temporaries may take more memory if they are pinned
        implied = {
            i
            for i, argument in next_arguments(self.facts).items()
            if argument in edits.arguments and not isinstance(given[i], Sharding)
        }
        is_auto = not self.facts.is_explicit
        results = {i: s for i, s in edits.results.items() if not (is_auto and i in implied)}
        shardings = arguments, results
        return apply(self.call, edits.values, *shardings, through, edits.per_device)

    def _compile(self, traced: Any) -> tuple[Sequence[Collective], Graph, Memory | None, bool]:
        facts, mesh = self.facts, self.facts.mesh
        assert mesh is not None
        if facts.platform == 'cpu':
            # XLA changes bf16 to f32 for CPUs, and may then send other arrays than the worker does
            return self._compile_for_target(traced, OPTIONS)
        if not self.is_slow:
            axes = [(str(name), size) for name, size in mesh.shape.items()]
            try:
                request, kept = export(replace(facts.stages, traced=traced), axes, mesh.axis_types)
            except Exception:  # it has a kernel for the target, or a callback
                self.is_slow = True
            else:
                graph, found, memory = compile_in_worker(facts.n_devices, request)
                return self._described(graph, found, kept), graph, memory, True
        return self._compile_for_target(traced)

    def _compile_for_target(
        self, traced: Any, options: Mapping[str, Any] | None = None
    ) -> tuple[Sequence[Collective], Graph, Memory | None, bool]:
        compiled = traced.lower().compile(compiler_options=options and dict(options))
        graph = Graph(Program(program_text('the program', compiled)))
        found = find_collectives(graph, [device.id for device in self.facts.devices])
        memory = read_memory(compiled, None)
        return self._described(graph, found, self.facts.used_arguments), graph, memory, False

    def _described(
        self, graph: Graph, collectives: Sequence[Collective], kept: Sequence[int]
    ) -> Sequence[Collective]:
        facts, mesh = self.facts, self.facts.mesh
        assert mesh is not None
        inputs = [
            (facts.arguments[i].path, str(facts.arguments[i].dtype))
            for i in kept
            if i < len(facts.arguments)
        ]
        outputs = {i: array.path for i, array in enumerate(facts.results)}
        payloads = Payloads(graph, inputs, outputs)
        return [
            replace(
                payloads.of(c),
                along=along_text(c.device_groups, c.pairs, [mesh], {}),
                mesh_axes=frozenset(
                    (mesh_axes_of(c.device_groups, mesh) if c.device_groups else None) or ()
                ),
            )
            for c in collectives
        ]


def compile_in_worker(
    n_devices: int, request: dict[str, Any]
) -> tuple[Graph, Sequence[Collective], Memory | None]:
    """Compiles for simulated devices, in a process of its own.

    Raises an EinshardError if the process ends, and a ValueError if the compiler raises.
    """
    with _lock:
        worker = _workers.setdefault(n_devices, Worker(n_devices))
        worker.submit(request)
        compiled = worker.result()
    if isinstance(compiled, str):
        raise ValueError(compiled)
    graph = Graph(Program(compiled.text))
    # what has no line gets that of the call in the worker
    found = [
        replace(c, source=None, column=0) if (c.source or '').startswith(WORKER_FILE) else c
        for c in target_collectives(graph, find_collectives(graph))
    ]
    return graph, found, compiled.memory


def default_chip() -> Chip:
    chip = find_chip(_DEFAULT_CHIP)
    assert chip is not None
    return chip


def _figures(
    collectives: Sequence[Collective],
    memory: Memory | None,
    products: Sequence[ProductRow],
    bounds: Bounds,
) -> Figures:
    return Figures(
        sum(c.total_bytes for c in collectives),
        memory and memory.total,
        sum(row.flops for row in products),
        sum(bound.seconds for bound in bounds),
        next((bound.seconds for bound in bounds if bound.resource == 'HBM'), 0.0),
    )
