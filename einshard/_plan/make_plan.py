"""Makes a Plan from a finished search."""

from __future__ import annotations

from collections.abc import Iterator

from jax.sharding import Mesh

from .._errors import EinshardError, plural
from .._inspect.explain import explain_stages
from .._inspect.report import Report
from .._text import format_bytes
from .candidate import Candidate
from .candidates import Candidates
from .judge import Function
from .judgement import Judgement
from .model import Model
from .result import Plan, indistinguishable
from .search import Search
from .source import spec_lines


def is_simulated(devices: Mesh) -> bool:
    """Whether the devices are CPUs, for which the partitioner's programs are the real ones."""
    return devices.devices.flat[0].platform == 'cpu'


def make_plan(search: Search, found: Candidates, model: Model, function: Function) -> Plan:
    """Makes the plan; raises if no candidate compiles."""
    choices = search.ranking()
    if not choices:
        raise EinshardError(
            f'no candidate was compiled: {search.stopped or "none is left after pruning"}',
            facts={'pruned': ', '.join(f'{n} {why}' for why, n in found.pruned.items()) or 'none'},
        )
    if choices[0].error:
        raise EinshardError(
            f'{model.name} does not compile with any of the {plural(len(choices), "plan")} tried',
            facts={'plan': choices[0].candidate, 'the compiler says': choices[0].error},
        )
    best = choices[0].candidate
    stages = function.trace(best)
    arguments = [] if stages.program is None else stages.program.arguments
    specs = [(str(argument.name), argument.spec) for argument in arguments]
    return Plan(
        name=model.name,
        devices=function.devices,
        chip=function.chip.name if function.chip else None,
        objective=search.objective,
        limit=search.limit,
        sizes=model.names,
        choices=tuple(choices),
        code=spec_lines(specs, best),
        n_candidates=len(search.estimates),
        pruned=found.pruned,
        stopped=search.stopped,
        notes=tuple(_notes(choices, search)),
        warnings=tuple(_warnings(choices[0], search, model)),
        _explain=lambda candidate: _explain(function, candidate),
        _trace=function.trace,
    )


def _explain(function: Function, candidate: Candidate) -> Report:
    stages = function.trace(candidate)
    with candidate.scope(function.devices) as mesh:
        return explain_stages(stages, mesh, function.chip)


def _notes(choices: list[Judgement], search: Search) -> Iterator[str]:
    alike = indistinguishable(choices)
    if alike > 1:
        yield (
            f'the bounds do not tell plans 0 to {alike - 1} apart: the ranges between their two '
            'numbers intersect, so these plans are ordered by the larger number'
        )
    by_target = [one for one in choices if one.judge == 'compiler']
    if search.by_compiler is not None and not by_target:
        yield "the target's compiler was not used; by the partitioner, memory may be 40 % too high"


def _warnings(best: Judgement, search: Search, model: Model) -> Iterator[str]:
    if search.fits(best) or search.limit is None:
        return
    needs = best.memory or 0
    state = sum(array.bytes for array in model.arrays if array.role == 'state')
    yield (
        f'no plan fits: this one is closest, and needs {format_bytes(needs)}, more than '
        f'{format_bytes(search.limit)}. To fit, use a smaller batch or more accumulation steps, '
        f'jax.checkpoint around each layer, or more chips (weights and other state take '
        f'{format_bytes(state)} in total)'
    )
