"""Finds what makes the next call of a step compile again, and donations that free nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import jax.tree_util as jtu
from jax.sharding import NamedSharding

from ..._program.hlo.hbm_traffic import Copied, find_copied, min_hbm_bytes
from ..._program.jaxpr.flops import eqn_flops
from ..._text import first_of, format_bytes
from ..fold_layers import fold_paths
from ..report_rows import ArrayRow, Finding
from .facts import Facts

_LARGE = 2**23  # bytes on a device, of all arrays of a note
_MIN_COPIED = 0.05  # of the bytes that the program at least reads from and writes to HBM
_MIN_COPIED_BYTES = 2**20  # copies of small states do not matter


def next_arguments(facts: Facts) -> dict[int, int]:
    """Returns {result: the argument that it replaces in the next call}, by index."""
    return _pairs(facts, facts.replaced)


def weights_of_gradients(facts: Facts) -> dict[int, int]:
    """Returns {result: the argument of which it is the gradient}, by index."""
    return _pairs(facts, facts.gradients)


def _pairs(facts: Facts, replaced: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Results that fit the same arguments, as weights and their momentum, are in their order."""
    candidates: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for result, parameters in sorted(replaced.items()):
        arguments = sorted({facts.used_arguments[n] for n in parameters})
        shape = facts.results[result].shape
        candidates[tuple(i for i in arguments if facts.arguments[i].shape == shape)].append(result)
    return {
        result: argument
        for arguments, results in candidates.items()
        if len(arguments) == len(results)
        for result, argument in zip(results, arguments, strict=True)
    }


def results_to_pin(facts: Facts, pairs: Mapping[int, int]) -> dict[int, NamedSharding]:
    """Returns the results that are sharded differently from their arguments in `pairs`.

    Maps the index of each result to the sharding of the argument.
    """
    found: dict[int, NamedSharding] = {}
    for result, argument in pairs.items():
        old, new = facts.arguments[argument].sharding, facts.results[result].sharding
        if isinstance(old, NamedSharding) and isinstance(new, NamedSharding):
            ndim = len(facts.results[result].shape)
            if old.mesh == new.mesh and not new.is_equivalent_to(old, ndim):
                found[result] = old
    return found


def compiles_again(facts: Facts) -> Iterator[Finding]:
    """Reports results whose sharding makes the next call compile another program."""
    explained = facts.explained
    arguments = next_arguments(facts)
    by_placement: dict[tuple[str, str], list[tuple[ArrayRow, ArrayRow]]] = defaultdict(list)
    for result in results_to_pin(facts, arguments):
        row, argument = facts.result_rows[result], facts.argument_rows[arguments[result]]
        if row.path not in explained:
            by_placement[row.placement, argument.placement].append((row, argument))
    for (new, old), pairs in by_placement.items():
        results, replaced = (
            first_of(fold_paths(pair[i].path for pair in pairs), 3) for i in (0, 1)
        )
        are, they = ('is', 'it replaces') if len(pairs) == 1 else ('are', 'they replace')
        yield Finding(
            'second compile',
            f"{results} {are} sharded as '{new}', but {replaced}, which {they} in the next call, "
            f"as '{old}': the next call compiles again",
            None,
            sum(row.bytes for row, _ in pairs),
            explains=tuple(row.path for row, _ in pairs),
        )


def other_types(facts: Facts) -> Iterator[Finding]:
    """Notes results whose dtype differs from that of the argument that they replace."""
    jaxpr = facts.stages.jaxpr
    for result, argument in next_arguments(facts).items():
        old, new = facts.arguments[argument], facts.results[result]
        types = [str(old.dtype), str(new.dtype)]
        if jaxpr is not None and len(jaxpr.invars) == len(facts.arguments):
            avals = jaxpr.invars[argument].aval, jaxpr.outvars[result].aval
            for i, aval in enumerate(avals):
                types[i] += ' (weakly typed)' * bool(getattr(aval, 'weak_type', False))
        if types[0] != types[1]:
            yield Finding(
                'second compile',
                f'{new.path} is {types[1]}, but {old.path}, which it replaces in the next call, is '
                f'{types[0]}: the next call traces and compiles again',
            )


def copied_donations(facts: Facts) -> Iterator[Finding]:
    """Reports donated arguments that the program copies, where it should only update slices."""
    found = [c for c in find_copied(facts.graph) if c.parameter < len(facts.used_arguments)]
    n_bytes = sum(copied.bytes for copied in found)
    if n_bytes < max(_MIN_COPIED_BYTES, _MIN_COPIED * min_hbm_bytes(facts.graph)):
        return
    by_line: dict[str | None, list[Copied]] = defaultdict(list)
    for copied in found:
        by_line[facts.graph.program.source(copied.update.op)].append(copied)
    for line, several in by_line.items():
        shards = dict.fromkeys(str(facts.graph.parameters[one.parameter].array) for one in several)
        paths = first_of(fold_paths(facts.used[one.parameter].path for one in several), 3)
        written = sum(one.bytes for one in several)
        is_ = 'is' if len(several) == 1 else 'are'
        how = 'written anew' if several[0].update.opcode == 'select' else 'copied in full'
        yield Finding(
            'copied donation',
            f'{paths}, {first_of([*shards], 3)} on a device, {is_} donated, but {how} and '
            f'not updated in place: {format_bytes(written)} written',
            line,
            written,
        )


def unused_donations(facts: Facts) -> Iterator[Finding]:
    """Notes large donated arguments whose memory no result reuses, and why."""
    reasons: dict[str, list[int]] = defaultdict(list)
    aliased = facts.graph.program.aliases.values()
    reused = {facts.used_arguments[n] for n in aliased if n < len(facts.used_arguments)}
    for i in _donated(facts):
        argument = facts.arguments[i]
        if i in reused or argument.sharding is None:
            continue
        same_shape = [r for r in facts.results if r.shape == argument.shape]
        same_type = [r for r in same_shape if r.dtype == argument.dtype]
        if not same_shape:
            reason = 'no result has its shape'
        elif not same_type:
            reason = f'the result of its shape is {same_shape[0].dtype}'
        else:
            reason = 'the results of its shape are sharded differently, or reuse other arguments'
        reasons[reason].append(i)
    for reason, arguments in reasons.items():
        text = f'donated, which frees nothing: {reason}; {{}} on each device'
        yield from _if_large(facts, arguments, text)


def not_donated(facts: Facts) -> Iterator[Finding]:
    """Notes large arguments that results replace, and that are not donated."""
    if facts.stages.traced is None and facts.stages.lowered is None:
        return
    replaced = next_arguments(facts)
    donated, pinned = {*_donated(facts)}, results_to_pin(facts, replaced)
    arguments = sorted(
        argument
        for result, argument in replaced.items()
        if argument not in donated
        and facts.arguments[argument].dtype == facts.results[result].dtype
        and result not in pinned
    )
    is_equinox = facts.stages.is_equinox
    change = "eqx.filter_jit(..., donate='all')" if is_equinox else 'donate_argnums='
    text = (
        'replaced by results, and not donated: {} on each device are in memory twice; '
        f'{change} frees them'
    )
    yield from _if_large(facts, arguments, text)


def _if_large(facts: Facts, arguments: Sequence[int], text: str) -> Iterator[Finding]:
    """Yields a note about arguments, unless they are small. `text` has a place for their size."""
    n_bytes = sum(facts.argument_rows[i].bytes for i in arguments)
    if n_bytes >= _LARGE:
        paths = first_of(fold_paths(facts.arguments[i].path for i in arguments), 3)
        are = 'is' if len(arguments) == 1 else 'are'
        yield Finding(
            'donation', f'{paths} {are} {text.format(format_bytes(n_bytes))}', bytes=n_bytes
        )


def _donated(facts: Facts) -> list[int]:
    stage = facts.stages.traced or facts.stages.lowered
    leaves = [] if stage is None else jtu.tree_leaves(stage.args_info)
    return [i for i, leaf in enumerate(leaves) if leaf.donated and i < len(facts.arguments)]


def dense_groups(facts: Facts) -> Iterator[Finding]:
    """Notes ragged products that the compiler runs as dense ones over all groups."""
    compiled: dict[str, int] = defaultdict(int)
    for row in facts.products:
        compiled[row.source or ''] += row.flops
    needed: dict[str, int] = defaultdict(int)
    groups: dict[str, int] = {}
    for op in facts.traced.ops if facts.traced else ():
        if op.primitive == 'ragged_dot_general' and op.site.frames:
            line = op.site.frames[0].source
            flops = eqn_flops(op.eqn) * (op.site.runs or 1) * max(op.site.n_shards, 1)
            needed[line] += flops // facts.n_devices
            groups[line] = op.eqn.invars[2].aval.shape[-1]
    for line, flops in needed.items():
        if compiled[line] > 1.5 * flops:
            ratio = f'{compiled[line] / 1e9:.3g} Gflop per device where {flops / 1e9:.3g} are'
            yield Finding(
                'dense groups',
                f'ragged_dot runs as a dense product over {groups[line]} groups: {ratio} needed',
                line,
            )
