"""Finds needless all-gathers: repeated ones, and those whose result is only sliced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from jax.sharding import NamedSharding

from ..._program.hlo.collective import Collective
from ..._program.hlo.find_collectives import count_executions
from ..._program.hlo.graph import Loop
from ..._program.hlo.queries import Origins
from ..._program.hlo.slices import Gather, Reshard
from ..._sharding.collective_axes import sharding_of_blocks
from ..._sharding.describe import describe_named
from ..._sharding.mesh import AnyMesh
from ..._text import first_of, format_bytes, short_source
from ..arrays import ProgramArray
from ..fold_layers import fold_paths
from ..report_rows import Finding
from .facts import Facts


def fully_rematerialized(facts: Facts) -> Iterator[Finding]:
    """Reports arrays that are all-gathered although each device keeps only a slice."""
    program, unexplained = facts.graph.program, facts.unexplained
    for first in unexplained:
        reshard = facts.reshards.get(first.name)
        if reshard is None:
            continue
        gathers = [c for c in unexplained if {*c.nodes} & {*reshard.gathers}]
        parameter = facts.gathers[first.name].parameter
        array = None if parameter is None else facts.used[parameter]
        # the line that asks for the slice, where the all-gather may have that of the array
        spans = [program.span(node.op) for node in reshard.slices]
        sources = [span.text for span in spans if span is not None]
        yield Finding(
            'full rematerialization',
            reshard_text(reshard, facts.meshes, array),
            sources[0] if sources else first.source or facts.function_source,
            sum(c.total_bytes for c in gathers),
            explains=tuple(c.name for c in gathers),
        )


def reshard_text(
    reshard: Reshard, meshes: Sequence[AnyMesh], argument: ProgramArray | None = None
) -> str:
    """Describes the reshard of an argument, or of another array."""
    n_blocks = prod(len(set(indices)) for indices in reshard.before)
    # is_full: whether the result is the global array, not a shard of it
    what, is_full = str(reshard.array), n_blocks == len(reshard.before[0])
    names: tuple[str, ...] | None = None
    if argument is not None:
        same_shape = argument.shape == reshard.array.shape
        names = argument.names if same_shape else None
        what, is_full = f'{argument.path}, {what},', is_full or same_shape
    change = ''
    if is_full and (placements := before_and_after(reshard, meshes)):
        ndim = len(reshard.array.shape)
        before, after = (describe_named(each, ndim, names) for each in placements)
        change = f" from '{before}' to '{after}'"
        if before == after:
            change = f" from '{before}' back to '{before}'"
    via = 'a full all-gather' if is_full else f'an all-gather among {n_blocks} devices'
    return (
        f'{what} is resharded{change} via {via} (involuntary full rematerialization): '
        f'{format_bytes(reshard.array.bytes)}'
    )


def before_and_after(
    reshard: Reshard, meshes: Sequence[AnyMesh]
) -> tuple[NamedSharding, NamedSharding] | None:
    """Returns the shardings of an array before it is all-gathered, and after it is sliced again.

    Returns None if no mesh fits both shardings.
    """
    for mesh in meshes:
        before = sharding_of_blocks(reshard.before, mesh)
        after = sharding_of_blocks(reshard.after, mesh)
        if before is not None and after is not None:
            return before, after
    return None


class _RepeatedGather(NamedTuple):
    """An array that is gathered several times, or in every iteration of a loop.

    Attributes:
        gather: its first all-gather.
        how_often: for example 'gathered 2 times'.
        lines: the source lines of all its all-gathers.
        bytes: the bytes that a device sends in all its all-gathers.
        names: the names of its all-gathers.
        is_weight: whether the array is a weight. Always false in inference.
    """

    gather: Gather
    how_often: str
    lines: Sequence[str]
    bytes: int
    names: tuple[str, ...]
    is_weight: bool


def gathered_again(facts: Facts) -> Iterator[Finding]:
    """Reports arrays that are gathered several times, or in a loop that does not change them.

    Weights are not reported in training: they are gathered again in the backward pass, and for each
    microbatch, because keeping them would take the memory that sharding saves.
    """
    # these report wrong shardings, which may be the reason that activations are gathered twice
    has_cause = facts.has_found('missing constraint', 'contracted axis', 'sharded loop axis')
    for repeated in _repeated_gathers(facts):
        line = repeated.lines[0] if repeated.lines else None
        if repeated.is_weight or (has_cause and line in facts.product_lines):
            continue
        what, parameter = str(repeated.gather.array), repeated.gather.parameter
        if parameter is not None:
            what = f'{facts.used[parameter].path}, {what},'
        other_lines = ', '.join(map(short_source, repeated.lines[1:]))
        also = f', also at {other_lines}' if other_lines else ''
        text = f'{what} is {repeated.how_often}{also}'
        yield Finding('gathered again', text, line, repeated.bytes, explains=repeated.names)


def gathered_for_each_call(facts: Facts) -> Iterator[Finding]:
    """Reports weights that are gathered once for each call of a shared module in a pass.

    XLA merges equal gathers, but not those in different loops over the layers of the module.
    """
    # {(parameter, line, column, groups): {loop: (collective, part of the weight that it gathers)}}
    gathers: dict[tuple[object, ...], dict[Loop, tuple[Collective, float]]] = {}
    origins = Origins()
    for c in facts.unexplained:
        if c.kind != 'all-gather' or c.role != 'weights' or c.is_backward or not c.source:
            continue
        for node in c.nodes:
            if not (node.opcode.startswith('all-gather') and node.loops):
                continue
            for operand in node.inputs:
                parameters, _ = origins.of(operand)
                if len(parameters) == 1:
                    (number,) = parameters
                    part = prod(operand.array.shape) * count_executions(node)[0]
                    part /= prod(facts.graph.parameters[number].array.shape)
                    key = number, c.source, c.column, c.device_groups
                    gathers.setdefault(key, {})[node.loops[-1]] = c, part
    # by the number of calls; microbatches gather in each call, and layers only a part each
    shared: dict[int, dict[int, list[Collective]]] = {}
    for (parameter, *_), by_loop in gathers.items():
        several = [*by_loop.values()]
        n = round(sum(part for _, part in several) / max(1, *(part for _, part in several)))
        if n > 1 and isinstance(parameter, int) and parameter < len(facts.used):
            shared.setdefault(n, {})[parameter] = [c for c, _ in several]
    for n, by_parameter in shared.items():
        rows = {c.name: c for several in by_parameter.values() for c in several}
        n_bytes = sum(c.total_bytes for c in rows.values())
        if n_bytes * (n - 1) / n < _MIN_SHARED * sum(c.total_bytes for c in facts.collectives):
            continue
        paths = first_of(fold_paths(facts.used[i].path for i in by_parameter), 3)
        are, them = ('is', 'it') if len(by_parameter) == 1 else ('are', 'them')
        calls = list(dict.fromkeys(c.called_at for c in rows.values() if c.called_at))
        at = f' in {first_of([*map(short_source, calls)], 3)}' if calls else ''
        yield Finding(
            'gathered again',
            f'{paths} {are} gathered {n} times in the forward pass, once for each call of the '
            f'function that uses {them}{at}: {format_bytes(n_bytes)} sent',
            next(c.source for c in rows.values()),
            n_bytes,
            explains=tuple(rows),
        )


_MIN_SHARED = 0.05  # of the bytes of all collectives


def weights_gathered_again(facts: Facts) -> Iterator[Finding]:
    """Notes weights that are gathered again, with one note for each value of `how_often`."""
    groups: dict[str, list[tuple[str, _RepeatedGather]]] = {}
    for repeated in _repeated_gathers(facts):
        if repeated.is_weight:
            parameter = repeated.gather.parameter
            what = str(repeated.gather.array) if parameter is None else facts.used[parameter].path
            groups.setdefault(repeated.how_often, []).append((what, repeated))
    for how_often, weights in groups.items():
        paths = first_of(fold_paths(what for what, _ in weights), 3)
        verb = 'is' if len({what for what, _ in weights}) == 1 else 'are'
        first = next((weight.lines[0] for _, weight in weights if weight.lines), None)
        n_bytes = sum(weight.bytes for _, weight in weights)
        text = f'{paths} {verb} {how_often}'
        names = tuple(name for _, weight in weights for name in weight.names)
        yield Finding('gathered again', text, first, n_bytes, explains=names)


def _repeated_gathers(facts: Facts) -> Iterator[_RepeatedGather]:
    """Finds repeated all-gathers of each array.

    For weights, those of the forward and the backward pass count together.
    """
    gathers: dict[object, list[tuple[Gather, Collective]]] = {}
    weight_keys: set[object] = set()
    for collective in facts.unexplained:
        gather = facts.gathers.get(collective.name)
        if gather is not None:
            is_weight = facts.is_training and collective.role == 'weights'
            in_backward = collective.is_backward and not is_weight
            key = (gather.origin, gather.dimension, collective.device_groups, in_backward)
            gathers.setdefault(key, []).append((gather, collective))
            if is_weight:
                weight_keys.add(key)
    for key, repeats in gathers.items():
        gather, first = repeats[0]
        lines = list(dict.fromkeys(c.source for _, c in repeats if c.source))
        # not reported: activations that XLA gathers twice on one source line, to save memory
        if len(repeats) > 1 and (len(lines) > 1 or key in weight_keys):
            how_often = f'gathered {len(repeats)} times'
        elif gather.is_invariant:
            n = first.executions
            iterations = f'each of {n} iterations' if first.is_exact else 'every iteration'
            how_often = f'gathered in {iterations} of a loop, always with the same values'
        else:
            continue
        sent = sum(c.total_bytes for _, c in repeats)
        names = tuple(c.name for _, c in repeats)
        yield _RepeatedGather(gather, how_often, lines, sent, names, key in weight_keys)
