"""Judges candidates: by XLA's partitioner for simulated devices, or by the target's compiler."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding

from .._errors import EinshardError
from .._functions.bound_method import BoundMethod
from .._functions.sharded import ShardedFunction
from .._hlo.collectives import Collective, find_collectives
from .._hlo.hardware import Chip
from .._hlo.module import Module
from .._hlo.target_collectives import target_collectives
from .._inspect.bounds import NO_BOUNDS, find_bounds
from .._inspect.collective_axes import axes_text, mesh_axes_of
from .._inspect.explain import explain_stages
from .._inspect.lowered import Stages, trace_call
from .._inspect.payloads import find_payloads, find_weights
from .._inspect.totals import product_rows
from .._sharding.mesh import partition_spec
from .._trees.paths import path_text
from .candidate import Candidate
from .compile import Compiled, Worker, check_flatbuffers, export
from .judgement import Judge, Judgement
from .metadata import metadata_names


@dataclass(frozen=True)
class Function:
    """A function with the arguments of a call, to be compiled for candidates.

    Attributes:
        devices: the devices of the target, which each candidate arranges in a mesh of its own.
        chip: the chip of the devices; None if unknown, as for CPUs.
    """

    fn: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    devices: Mesh
    chip: Chip | None

    def trace(self, candidate: Candidate) -> Stages:
        """Traces the function on the candidate's mesh, with its axis rules."""
        with candidate.scope(self.devices) as mesh:
            return trace_call(self._copy(), *self._shapes(candidate, mesh), mesh=None)

    def compile_all(self, candidates: Iterable[Candidate]) -> Generator[Judgement, None, None]:
        """Judges candidates in order by the compiler of the target."""
        for candidate in candidates:
            yield compile_on_target(self, candidate)

    def _shapes(self, candidate: Candidate, mesh: Mesh) -> Any:
        """The shapes of the arguments; those with Flax axis names are sharded by them."""
        given = tuple(self.args), dict(self.kwargs)
        leaves, treedef = jtu.tree_flatten(given)
        axes = dict(candidate.axes)
        # the specs of a sharded function say how its arguments are sharded
        of_flax = [None] * len(leaves) if self._is_sharded else metadata_names(given)
        shapes: list[Any] = []
        for x, names in zip(leaves, of_flax, strict=True):
            sharding = None
            if names is not None:
                entries = (
                    tuple(a for name in one or () for a in axes.get(name, ())) for one in names
                )
                sharding = NamedSharding(mesh, partition_spec(entries))
            is_array = hasattr(x, 'shape')
            shapes.append(
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if is_array else x
            )
        return treedef.unflatten(shapes)

    @property
    def _is_sharded(self) -> bool:
        function = self.fn.func if isinstance(self.fn, BoundMethod) else self.fn
        return isinstance(function, ShardedFunction)

    def _copy(self) -> Any:
        """A copy of a `sharded` function, which would otherwise keep the candidates' programs."""
        made, bound = self.fn, ()
        if isinstance(made, BoundMethod):
            made, bound = made.func, made.args
        if not isinstance(made, ShardedFunction):
            return self.fn
        fresh = ShardedFunction[..., Any](made._setup)  # type: ignore[reportPrivateUsage]
        return BoundMethod(fresh, *bound) if bound else fresh


class Partitioner:
    """Judges candidates by compiling them for simulated CPU devices, with XLA's partitioner.

    `submit` traces a candidate while the worker compiles those before; `result` judges them in
    order. A program that cannot be lowered for CPU is judged by the target's compiler.
    """

    def __init__(self, function: Function, worker: Worker | None = None):
        check_flatbuffers()
        self._function = function
        self._worker = worker or Worker(function.devices.size)
        self._waiting: deque[tuple[Candidate, _Program | Judgement]] = deque()

    def __enter__(self) -> Partitioner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._waiting.clear()
        self._worker.close()

    def judge(self, candidates: Iterable[Candidate]) -> Generator[Judgement, None, None]:
        """Judges candidates in order, tracing each while the one before compiles."""
        try:
            for candidate in candidates:
                self.submit(candidate)
                if len(self._waiting) > 1:
                    yield self.result()
            while self._waiting:
                yield self.result()
        finally:
            if self._waiting:  # the caller has stopped early
                self.close()

    def submit(self, candidate: Candidate) -> None:
        """Traces a candidate, and sends it to the worker."""
        self._waiting.append((candidate, self._send(candidate)))

    def result(self) -> Judgement:
        """Waits for the first candidate that has been submitted, and judges it."""
        candidate, program = self._waiting.popleft()
        if isinstance(program, Judgement):
            return program
        compiled = self._worker.result()
        if isinstance(compiled, str):
            return _failed(candidate, 'partitioner', compiled)
        return program.judge(candidate, compiled, self._function)

    def _send(self, candidate: Candidate) -> _Program | Judgement:
        function = self._function
        try:
            stages = function.trace(candidate)
            axes = candidate.mesh
            try:
                with candidate.scope(function.devices):
                    request, kept = export(stages, axes)
            except Exception:  # such as a kernel for another platform, or a host callback
                return compile_on_target(function, candidate)
            self._worker.submit(request)
            return _Program.of(stages, kept)
        except EinshardError as error:
            return _failed(candidate, 'partitioner', str(error))


def compile_on_target(function: Function, candidate: Candidate) -> Judgement:
    """Judges a candidate by the compiler of the target."""
    try:
        mesh = candidate.mesh_of(function.devices)
        stages = function.trace(candidate)
        with candidate.scope(function.devices):
            report = explain_stages(stages, mesh, function.chip)
    except EinshardError as error:
        says = error.facts.get('the compiler says', '')
        return _failed(candidate, 'compiler', f'{str(error).splitlines()[0]}: {says}'.strip(': '))
    return Judgement(
        candidate,
        'compiler',
        bounds=report.bounds,
        memory=report.memory and report.memory.total,
        sent=report.collectives.bytes_by('along'),
        sent_by=_sum(((row.kind, row.role), row.total_bytes) for row in report.collectives),
        counts=dict(report.collectives.counts),
    )


def _failed(candidate: Candidate, judge: Judge, error: str) -> Judgement:
    return Judgement(candidate, judge, error=error.strip().partition('\n')[0])


def _sum(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    total: Counter[Any] = Counter()
    for key, n in pairs:
        total[key] += n
    return dict(total.most_common())


@dataclass(frozen=True)
class _Program:
    """The arguments and results of a program that the worker compiles.

    Attributes:
        inputs: the path and the dtype of each argument that it uses.
        outputs: the paths of its results.
    """

    inputs: Sequence[tuple[str, str]]
    outputs: Mapping[int, str]

    @staticmethod
    def of(stages: Stages, kept: Sequence[int]) -> _Program:
        traced: Any = stages.traced
        leaves = jtu.tree_leaves_with_path(traced.args_info)
        results = jtu.tree_leaves_with_path(traced.out_info)
        return _Program(
            [
                (f'{path[1]}/{path_text(path[2:])}', str(leaf.dtype))
                for path, leaf in (leaves[i] for i in kept)
            ],
            {i: f'result/{path_text(path)}' for i, (path, _) in enumerate(results)},
        )

    def judge(self, candidate: Candidate, compiled: Compiled, function: Function) -> Judgement:
        module = Module(compiled.text)
        mesh = candidate.mesh_of(function.devices)
        collectives = target_collectives(module, find_collectives(module))
        weights = find_weights(module, self.inputs, self.outputs)
        payloads = find_payloads(module, collectives, weights, self.inputs, self.outputs)
        axes = [axes_text(mesh_axes_of(one.groups, mesh), mesh, {}) for one in collectives]
        sent = [_sent(one) for one in collectives]
        bounds, chip = NO_BOUNDS, function.chip
        if chip is not None:
            devices = list(mesh.devices.flat)
            rows = list(zip(collectives, axes, strict=True))
            bounds = find_bounds(chip, devices, module, product_rows(module), rows, is_cpu=True)
        return Judgement(
            candidate,
            'partitioner',
            bounds=bounds,
            memory=compiled.memory and compiled.memory.total,
            sent=_sum(zip(axes, sent, strict=True)),
            sent_by=_sum(
                ((one.kind, payload.role), n)
                for one, payload, n in zip(collectives, payloads, sent, strict=True)
            ),
            counts=Counter(one.kind for one in collectives),
        )


def _sent(one: Collective) -> int:
    """Returns the bytes that a device sends in one run; unknown ones count as 0."""
    return (one.network_bytes or 0) * (1 if one.executions is None else one.executions)
