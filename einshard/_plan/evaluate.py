"""Evaluates candidates by compiling them, for simulated CPU devices or for the target."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._chips.chip import Chip
from .._errors import EinshardError
from .._explain.collectives import Collectives
from .._explain.explain import explain_stages, read_facts
from .._explain.partition import (
    Compiled,
    Worker,
    check_flatbuffers,
    compile_in_worker,
    export,
)
from .._explain.reading import Reading, read_simulated
from .._explain.report import Report
from .._explain.stages import Stages
from .._explain.trace_call import trace_call
from .._functions.bound_method import BoundMethod
from .._functions.sharded_function import ShardedFunction
from .._sharding.mesh import partition_spec
from .._trees.axis_names import MetadataNames
from .._trees.paths import leaves_with_paths, path_text
from .candidate import Candidate, CostSource, Evaluation

_T = TypeVar('_T')


@dataclass(frozen=True)
class Function:
    """A function and the arguments of a call, to be compiled for each candidate.

    Attributes:
        devices: the devices of the target. Each candidate arranges them in its own mesh.
        chip: the chip whose speeds set the lower bounds on time, or None if it is unknown.
        metadata_names: see `Model.metadata_names`.
        had_rules: whether the user's function has `axis_rules` of its own, which `fn` has not.
    """

    fn: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    devices: Mesh
    chip: Chip | None
    metadata_names: Sequence[MetadataNames | None] = ()
    had_rules: bool = False

    def mesh_of(self, candidate: Candidate) -> Mesh:
        return candidate.mesh_of(self.devices)

    def scope(self, candidate: Candidate) -> AbstractContextManager[Mesh]:
        """The context in which a candidate is traced and lowered."""
        return candidate.scope(self.mesh_of(candidate))

    def trace(self, candidate: Candidate) -> Stages:
        with self.scope(candidate) as mesh:
            # a copy, so that candidates do not fill the cache of the original
            return trace_call(copy_sharded(self.fn), *self._structs(candidate, mesh), mesh=None)

    def export(self, stages: Stages, candidate: Candidate) -> tuple[dict[str, Any], Sequence[int]]:
        return export(stages, candidate.mesh, self.mesh_of(candidate).axis_types)

    def report(self, candidate: Candidate) -> Report:
        """Compiles the function for the target, and reports on it as `explain` does."""
        return self._compiled(candidate, explain_stages)

    def _compiled(self, candidate: Candidate, read: Callable[..., _T]) -> _T:
        """Compiles the function for the target, and reads it.

        For CPUs, what XLA's partitioner makes of it for the chip is read, as plans are ranked.
        """
        stages, simulated = self.trace(candidate), None
        with self.scope(candidate):
            if self.devices.devices.flat[0].platform == 'cpu':
                # the program may have a host callback, or be one that the partitioner fails on
                with suppress(Exception):
                    request, _ = self.export(stages, candidate)
                    simulated = compile_in_worker(self.devices.size, request)
            return read(stages, self.chip, simulated=simulated)

    def evaluate(self, candidate: Candidate) -> Evaluation:
        try:
            facts = self._compiled(candidate, read_facts)
        except EinshardError as error:
            says = error.facts.get('the compiler says', '')
            text = f'{str(error).splitlines()[0]}: {says}'.strip(': ')
            return _failed(candidate, 'compiler', text)
        return _evaluation(candidate, 'compiler', facts, facts.step)

    def evaluate_all(self, candidates: Iterable[Candidate]) -> Generator[Evaluation, None, None]:
        yield from map(self.evaluate, candidates)

    def _structs(self, candidate: Candidate, mesh: Mesh) -> Any:
        """Replaces arrays with ShapeDtypeStructs, sharded by the axis names in their metadata."""
        leaves, treedef = jtu.tree_flatten((tuple(self.args), dict(self.kwargs)))
        axes = {axis: (axis,) for axis in mesh.axis_names} | dict(candidate.axes)
        structs: list[Any] = []
        for x, array_names in itertools.zip_longest(leaves, self.metadata_names):
            sharding = None
            if array_names is not None:
                entries = [[axis for name in names for axis in axes[name]] for names in array_names]
                sharding = NamedSharding(mesh, partition_spec(map(tuple, entries)))
            elif hasattr(x, 'dtype') and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                # JAX 0.10 and 0.12 export a key without a sharding with one on an empty mesh
                sharding = NamedSharding(mesh, PartitionSpec())
            is_array = hasattr(x, 'shape')
            structs.append(
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if is_array else x
            )
        return treedef.unflatten(structs)


def as_sharded(fn: Any) -> ShardedFunction[..., Any] | None:
    """Returns the ShardedFunction of a `sharded` function or method. Returns None for others."""
    function = fn.func if isinstance(fn, BoundMethod) else fn
    return function if isinstance(function, ShardedFunction) else None


def has_rules(fn: Any) -> bool:
    """Whether a function is `sharded(axis_rules=...)`."""
    function = as_sharded(fn)
    return bool(function and function._setup.axis_rules)  # type: ignore[reportPrivateUsage]


def copy_sharded(fn: Any, **options: Any) -> Any:
    """Copies a `sharded` function or method, with other options. Returns others as is."""
    function = as_sharded(fn)
    if function is None:
        return fn
    setup = function._setup  # type: ignore[reportPrivateUsage]
    setup = replace(setup, options=setup.options._replace(**options))
    copy = ShardedFunction[..., Any](setup)
    return BoundMethod(copy, *fn.args) if isinstance(fn, BoundMethod) else copy


class Partitioner:
    """Evaluates candidates by compiling them for simulated CPU devices, with XLA's partitioner.

    Programs that cannot be lowered for CPU are compiled for the target instead.
    """

    def __init__(self, function: Function, worker: Worker | None = None):
        check_flatbuffers()
        self._function = function
        self._worker = worker or Worker(function.devices.size)

    def close(self) -> None:
        self._worker.close()

    def evaluate_all(self, candidates: Iterable[Candidate]) -> Generator[Evaluation, None, None]:
        """Evaluates candidates in order. Traces the next one while the worker compiles."""
        pending: deque[_SentProgram | Evaluation] = deque()
        try:
            for candidate in candidates:
                pending.append(self._send(candidate))
                if len(pending) > 1:
                    yield self._receive(pending)
            while pending:
                yield self._receive(pending)
        finally:
            if pending:  # the caller stopped early, so responses of the worker may be unread
                self.close()

    def _send(self, candidate: Candidate) -> _SentProgram | Evaluation:
        """Traces a candidate, and sends its program to the worker.

        Returns an evaluation if the program fails to trace, or cannot be lowered for CPU.
        """
        function = self._function
        try:
            stages = function.trace(candidate)
            try:
                with function.scope(candidate):
                    request, kept = function.export(stages, candidate)
            except Exception:  # the program may have a TPU kernel or a host callback
                return function.evaluate(candidate)
            self._worker.submit(request)
        except EinshardError as error:
            return _failed(candidate, 'partitioner', str(error))
        traced: Any = stages.traced
        arguments = leaves_with_paths(traced.args_info)
        used = [arguments[i] for i in kept]
        results = enumerate(leaves_with_paths(traced.out_info))
        return _SentProgram(
            candidate,
            [(f'{path[1]}/{path_text(path[2:])}', str(leaf.dtype)) for path, leaf in used],
            {i: f'result/{path_text(path)}' for i, (path, _) in results},
            request,
        )

    def _receive(self, pending: deque[_SentProgram | Evaluation]) -> Evaluation:
        program = pending.popleft()
        if isinstance(program, Evaluation):
            return program
        try:
            compiled = self._worker.result()
        except EinshardError as error:  # XLA aborts on some programs: another process compiles on
            for later in pending:
                if isinstance(later, _SentProgram):
                    self._worker.submit(later.request)
            return _failed(program.candidate, 'partitioner', error.sentence)
        if isinstance(compiled, str):
            return _failed(program.candidate, 'partitioner', compiled)
        return program.evaluate(compiled, self._function)


@dataclass(frozen=True)
class _SentProgram:
    """A program that was sent to the worker.

    Attributes:
        inputs: the path and the dtype of each argument that the program uses.
        outputs: the path of each result, keyed by position.
        request: as it was sent.
    """

    candidate: Candidate
    inputs: Sequence[tuple[str, str]]
    outputs: Mapping[int, str]
    request: dict[str, Any]

    def evaluate(self, compiled: Compiled, function: Function) -> Evaluation:
        mesh = function.mesh_of(self.candidate)
        reading = read_simulated(
            compiled,
            devices=list(mesh.devices.flat),
            meshes=[mesh],
            chip=function.chip,
            inputs=self.inputs,
            outputs=self.outputs,
        )
        return _evaluation(self.candidate, 'partitioner', reading)


def _evaluation(
    candidate: Candidate, costs_from: CostSource, reading: Reading, step: float | None = None
) -> Evaluation:
    collectives = Collectives(reading.collectives)
    return Evaluation(
        candidate,
        costs_from,
        bounds=reading.bounds,
        memory=reading.memory and reading.memory.total,
        sent=collectives.bytes_by('along'),
        sent_by=collectives.bytes_by('kind', 'role'),
        counts=collectives.counts,
        step=step,
    )


def _failed(candidate: Candidate, costs_from: CostSource, error: str) -> Evaluation:
    return Evaluation(candidate, costs_from, error=error.strip().partition('\n')[0])
