"""Compiles a program with changes, for as many simulated devices as the program has."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, Sharding, get_mesh

from ..._chips.table import default_chip
from ..._program.cost.bounds import Bounds
from ..._program.edits.apply import Edited, apply
from ..._program.edits.call import JittedCall
from ..._program.edits.edit import Edit, indices
from ..._program.jaxpr.graph import flatten
from ..._program.traced.propagated import Propagated
from ..._sharding.scopes import mesh_scope
from ..costs import Cost, find_costs
from ..estimate import step_of
from ..findings.facts import Facts
from ..findings.next_call import next_arguments
from ..partition import compile_in_worker, export
from ..patch.check import NotTraced
from ..patch.code import Rewriter
from ..patch.write import Change, Missing
from ..propagation import propagate
from ..reading import Reading, read, read_simulated
from ..report_rows import Figures, Tried
from .words import Words

# compiling takes a third of the time
OPTIONS = {
    'xla_backend_optimization_level': '0',
    'xla_llvm_disable_expensive_passes': True,
}
NOT_WRITTEN = 'its code cannot be changed'


@dataclass(frozen=True, eq=False)
class Trial:
    """A compiled program with changes.

    Attributes:
        bounds, figures: on the chip of the search.
        propagated: returns the program before it was partitioned, or None if that is unknown.
    """

    reading: Reading
    bounds: Bounds
    figures: Figures
    propagated: Callable[[], Propagated | None]

    @functools.cached_property
    def costs(self) -> list[Cost]:
        """What costs it most, largest first."""
        paths = [path for path, _ in self.reading.inputs]
        return find_costs(self.reading, self.bounds, self.propagated(), paths)


class Trials:
    """Compiles one program with different changes.

    Attributes:
        error: why the last program did not compile, or ''.
        is_traced: whether JAX could trace the last program.
    """

    def __init__(
        self,
        facts: Facts,
        call: JittedCall,
        trace: Callable[[], JittedCall | None] | None = None,
    ):
        """
        Args:
            trace: traces the call again. Default: traces that of `facts`.
        """
        self.facts, self.call = facts, call
        self.trace = trace or (lambda: replace(facts.stages).call)
        self.chip = facts.chip or default_chip()
        self.is_slow = importlib.util.find_spec('flatbuffers') is None
        self.error, self.is_traced = '', False
        # types in the jaxpr have shardings: what the code says is changed in the code
        self._rewriter = Rewriter(call, self.trace, facts.mesh) if facts.is_explicit else None

    def as_compiled(self) -> Trial:
        """Returns the program that the report is about."""
        facts, bounds = self.facts, self.facts.bounds_on(self.chip)
        figures = replace(facts.figures(bounds), step=facts.step)
        return Trial(facts, bounds, figures, lambda: facts.propagation.program)

    def run(self, edits: Sequence[Edit], on_target: bool = False) -> Trial | None:
        """Compiles the program with changes. Returns None if it does not compile.

        Args:
            on_target: whether for its own devices, whose schedule then gives an estimate of a step.
        """
        self.error, self.is_traced = '', False
        with mesh_scope(self.facts.stages.scope):
            try:
                edited = self._apply(edits)
                if not edited.is_complete:
                    return None
                traced = edited.function.trace(*edited.args, **edited.kwargs)
                self.is_traced = True
                reading = self._read(traced) if on_target else self._compile(traced)
                bounds = reading.bounds_on(self.chip)
            except Exception as error:  # the ShardingTypeError of a trace has no public name
                self.error = str(error).strip().partition('\n')[0] or type(error).__name__
                return None
        figures = reading.figures(bounds)
        if on_target:
            figures = replace(figures, step=step_of(reading))
        return Trial(reading, bounds, figures, lambda: self._propagate(traced))

    def _propagate(self, traced: Any) -> Propagated | None:
        facts = self.facts
        paths = ([array.path for array in arrays] for arrays in (facts.used, facts.results))
        with mesh_scope(self.facts.stages.scope):
            return propagate(replace(facts.stages, traced=traced), *paths).program

    def edited(self, edits: Sequence[Edit]) -> Edited:
        with mesh_scope(self.facts.stages.scope):
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
        if self._rewriter is None:
            return apply(self.call, edits)
        mesh = self.facts.mesh
        try:
            return apply(self.call, edits, self._rewrite)
        except ValueError:  # the code may need the mesh of a context that has ended
            if not isinstance(mesh, Mesh) or not get_mesh().empty:
                raise
        with jax.set_mesh(mesh):
            return apply(self.call, edits, self._rewrite)

    def _rewrite(self, edits: Sequence[Edit], leaves: Sequence[Any] | None) -> JittedCall:
        words, changes = Words(self.facts), dict[Edit, Change]()
        for edit in edits:
            change = words.change(edit)
            if change is None:
                raise ValueError('it is not a change of the code')
            changes[edit] = change
        assert self._rewriter is not None
        try:
            return self._rewriter.trace(changes, leaves)
        except (Missing, NotTraced) as reason:
            raise ValueError(f'{NOT_WRITTEN}: {reason}') from None

    def _compile(self, traced: Any) -> Reading:
        """Compiles for simulated devices, if the target's compiler is not needed."""
        facts, mesh = self.facts, self.facts.mesh
        assert mesh is not None
        if facts.platform == 'cpu':
            # XLA changes bf16 to f32 for CPUs, and may then send other arrays than the worker does
            return self._read(traced, OPTIONS)
        if not self.is_slow:
            axes = [(str(name), size) for name, size in mesh.shape.items()]
            try:
                request, kept = export(replace(facts.stages, traced=traced), axes, mesh.axis_types)
            except Exception:  # it has a kernel for the target, or a callback
                self.is_slow = True
            else:
                compiled = compile_in_worker(facts.n_devices, request)
                return read_simulated(compiled, **self._fields(kept, traced))
        return self._read(traced)

    def _read(self, traced: Any, options: Mapping[str, Any] | None = None) -> Reading:
        """Compiles for the target."""
        compiled = traced.lower().compile(compiler_options=options and dict(options))
        return read('the program', compiled, **self._fields(self.facts.used_arguments, traced))

    def _fields(self, kept: Sequence[int], traced: Any) -> dict[str, Any]:
        facts = self.facts
        arguments = [facts.arguments[i] for i in kept if i < len(facts.arguments)]
        return {
            'devices': facts.devices,
            'meshes': facts.meshes,
            'chip': facts.chip,
            'inputs': [(array.path, str(array.dtype)) for array in arguments],
            'outputs': {i: array.path for i, array in enumerate(facts.results)},
            'traced': flatten(traced.jaxpr),
            'kernels': facts.kernels,
        }


def as_tried(before: Figures, after: Figures, is_simulated: bool = False) -> Tried:
    costs = after.network_bytes, after.memory, after.flops, after.bound
    return Tried(*costs, before, is_simulated, after.hbm, after.step)
