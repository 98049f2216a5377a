"""Makes a Plan from a finished search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .._errors import EinshardError, plural, quoted
from .._explain.partition import ENDED
from .._text import first_of, format_bytes
from .._trees.axis_names import invalid_names, misfits
from .._trees.paths import leaf_text
from .candidate import Evaluation
from .evaluate import Function
from .model import Model
from .result import Plan
from .search import PlanSearch
from .source import spec_lines
from .step_function import StepFunction


def make_plan(search: PlanSearch, model: Model, function: Function) -> Plan:
    choices = search.ranking()
    if not choices:
        raise EinshardError(
            f'plan {search.stopped}, before it compiled a candidate',
            code='plan',
            facts={'instead': 'pass a larger seconds='},
        )
    if choices[0].error:
        ((error, n_plans),) = Counter(one.error for one in choices).most_common(1)
        example = next(one.candidate for one in choices if one.error == error)
        raise EinshardError(
            f'{model.name} does not compile with any of the {plural(len(choices), "plan")} tried',
            code='does-not-compile',
            facts={
                'the compiler says': error,
                'plans with this error': f'{n_plans} of {len(choices)}, such as {example}',
            },
        )
    best = choices[0].candidate
    if isinstance(function, StepFunction):
        code = tuple(function.code(best))
    else:
        program = function.trace(best).program
        arguments = [] if program is None else program.arguments
        specs = [(str(argument.name), argument.spec) for argument in arguments]
        code = spec_lines(specs, best)
    return Plan(
        name=model.name,
        devices=function.devices,
        chip=function.chip.name if function.chip else None,
        objective=search.objective,
        limit=search.limit,
        sizes=model.sizes,
        choices=tuple(choices),
        code=code,
        n_candidates=len(search.candidates),
        stopped=search.stopped,
        notes=tuple(_notes(choices, search, model, function)),
        warnings=tuple(_warnings(choices[0], search, model)),
        _function=function,
    )


def _notes(
    choices: Sequence[Evaluation], search: PlanSearch, model: Model, function: Function
) -> Iterator[str]:
    yield from model.asked
    unused = misfits((function.args, function.kwargs))
    if unused:
        path, leaf, names = unused[0]
        more = f', and {len(unused) - 1} more' if len(unused) > 1 else ''
        path = path.partition('/')[2]  # without the container of all arguments
        yield (
            f'metadata names {plural(len(names), "axis")} of {leaf_text(path, leaf)}{more}: these '
            'names are not used. To name the axis of stacked layers, pass its name to nnx.vmap or '
            "nn.scan: {nnx.PARTITION_NAME: 'layers'}"
        )
    if invalid := invalid_names((function.args, function.kwargs)):
        yield f'names in metadata that are not valid axis names are not used: {quoted(invalid)}'
    read = [name for names in model.metadata_names for axis in names or () for name in axis]
    if names := [name for name in model.sizes if name in read]:
        yield (
            f'metadata names axes of arguments: {quoted(names)}. Place these arguments before the '
            'call, by Rules.from_axis_names(argument)'
        )
    if ended := [one for one in choices if one.error.startswith(ENDED)]:
        yield f'{plural(len(ended), "plan")} dropped: {ended[0].error}'
    n = _n_indistinguishable(choices) if search.objective == 'bound' else 1
    if n > 1:
        yield (
            f"plans 0 to {n - 1} are about equal: their ranges in column 'bound' overlap that "
            'of plan 0'
        )
    if search.compiler and not any(one.costs_from == 'compiler' for one in choices):
        yield (
            'no plan was compiled for the target; the memory is that of the partitioned program '
            'for CPUs, and may be 40% too high'
        )


def _n_indistinguishable(choices: Sequence[Evaluation]) -> int:
    """Counts the plans at the start of `choices` whose range of times overlaps that of plan 0.

    The time of a plan is at least its largest bound, and about the sum of its bounds if compute and
    communication do not overlap.
    """
    if not choices[0].bounds:
        return 1
    least, most = choices[0].seconds
    for i, one in enumerate(choices):
        # the last case: a plan that was not compiled for the target may be faster than plan 0
        if one.error or one.seconds[0] > most or one.seconds[1] < least:
            return i
    return len(choices)


def _warnings(best: Evaluation, search: PlanSearch, model: Model) -> Iterator[str]:
    if unnamed := model.unnamed_data:
        have = 'argument' if len(unnamed) == 1 else 'arguments'
        yield (
            f'no axis names for {have} {first_of(unnamed, 4)}: the axes of this data, such as the '
            "batch, are not sharded. Name them, in a spec of sharded or with einshard(x, 'batch "
            "...') at the start of the function"
        )
    if best.memory is None or search.limit is None or best.fits(search.limit):
        return
    state = sum(array.bytes for array in model.arrays if array.is_state)
    yield (
        f'no plan fits into memory: the closest one needs {format_bytes(best.memory)} per device, '
        f'more than {format_bytes(search.limit)}. To fit, use a smaller batch or more accumulation '
        'steps, jax.checkpoint around each layer, or more chips. Weights and other state take '
        f'{format_bytes(state)} before sharding'
    )
