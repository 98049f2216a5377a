"""Finds needless all-gathers: repeated ones, and those whose result is only sliced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ..._program.hlo.collective import Collective
from ..._program.hlo.find_collectives import count_executions
from ..._program.hlo.graph import Loop
from ..._program.hlo.queries import Origins
from ..._program.hlo.slices import Gather, Reshard
from ..._sharding.collective_axes import sharding_of_blocks
from ..._sharding.describe import describe_named
from ..._sharding.mesh import AnyMesh
from ..._text import first_of, format_bytes, short_source
from ..fold_layers import fold_paths
from ..report_rows import Finding
from .facts import Facts


def reshard_text(reshard: Reshard, meshes: Sequence[AnyMesh]) -> str:
    """Describes the reshard of an array."""
    n_blocks = prod(len(set(indices)) for indices in reshard.before)
    # whether the result is the global array, not a shard of it
    is_full = n_blocks == len(reshard.before[0])
    change, ndim = '', len(reshard.array.shape)
    for mesh in meshes if is_full else ():
        ends = [sharding_of_blocks(blocks, mesh) for blocks in (reshard.before, reshard.after)]
        if None not in ends:
            before, after = (describe_named(each, ndim) for each in ends if each is not None)
            change = f" from '{before}' to '{after}'"
            if before == after:
                change = f" from '{before}' back to '{before}'"
            break
    via = 'a full all-gather' if is_full else f'an all-gather among {n_blocks} devices'
    return (
        f'{reshard.array} is resharded{change} via {via} (involuntary full rematerialization): '
        f'{format_bytes(reshard.array.bytes)}'
    )


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
        rows = [*dict.fromkeys(c for several in by_parameter.values() for c in several)]
        n_bytes = sum(c.total_bytes for c in rows)
        if n_bytes * (n - 1) / n < _MIN_SHARED * sum(c.total_bytes for c in facts.collectives):
            continue
        paths = first_of(fold_paths(facts.used[i].path for i in by_parameter), 3)
        are, them = ('is', 'it') if len(by_parameter) == 1 else ('are', 'them')
        calls = list(dict.fromkeys(c.called_at for c in rows if c.called_at))
        at = f' in {first_of([*map(short_source, calls)], 3)}' if calls else ''
        yield Finding.about(
            'gathered again',
            f'{paths} {are} gathered {n} times in the forward pass, once for each call of the '
            f'function that uses {them}{at}: {format_bytes(n_bytes)} sent',
            rows,
        )


_MIN_SHARED = 0.05  # of the bytes of all collectives


def weights_gathered_again(facts: Facts) -> Iterator[Finding]:
    """Notes weights that are gathered several times, or in a loop that does not change them.

    The gathers of the forward and the backward pass count together. In training that is the price
    of the memory that sharding saves, so it is a note.
    """
    gathers: dict[object, list[tuple[Gather, Collective]]] = {}
    for c in facts.unexplained if facts.is_training else ():
        gather = facts.gathers.get(c.name)
        if gather is not None and c.role == 'weights':
            key = gather.origin, gather.dimension, c.device_groups
            gathers.setdefault(key, []).append((gather, c))
    # one note for all weights that are gathered as often
    groups: dict[str, list[tuple[str, Sequence[Collective]]]] = {}
    for repeats in gathers.values():
        gather, first = repeats[0]
        if len(repeats) > 1:
            how_often = f'gathered {len(repeats)} times'
        elif gather.is_invariant:
            n = first.executions
            iterations = f'each of {n} iterations' if first.is_exact else 'every iteration'
            how_often = f'gathered in {iterations} of a loop, always with the same values'
        else:
            continue
        parameter = gather.parameter
        what = str(gather.array) if parameter is None else facts.used[parameter].path
        groups.setdefault(how_often, []).append((what, [c for _, c in repeats]))
    for how_often, weights in groups.items():
        rows = [c for _, several in weights for c in several]
        paths = first_of(fold_paths(what for what, _ in weights), 3)
        verb = 'is' if len({what for what, _ in weights}) == 1 else 'are'
        yield Finding.about('gathered again', f'{paths} {verb} {how_often}', rows)
