"""Checks the reasons of collectives: without what they name, is the collective gone, or smaller?

    python -m benchmarks.reasons module            # on 8 simulated devices
    python -m benchmarks.reasons module v5e:2x4    # or h100:1x8

The module has PROGRAMS, {name: make}: make(mesh_of) returns a jitted function and its arguments,
with meshes of mesh_of(data=2, tensor=4). For each inserted collective, the mesh axis is dropped
from the arguments and constraints that its reason names, and the program is compiled again. The
control drops as many mesh axes of others. Rows are counted by operation: a collective is smaller
if the collectives of its `op_name` send fewer bytes.
"""

import importlib
import os
import random
import sys
from collections import Counter
from functools import partial

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')

from jax.sharding import NamedSharding

from einshard import EinshardError, device_mesh, explain, topology
from einshard._explain.search.advice import make_trials
from einshard._program.edits.edit import PlaceArguments, ReplaceConstraint
from einshard._sharding.mesh import partition_spec, spec_axes
from einshard._text import short_source

FEWER = 0.99  # of the bytes


def without(sharding, axis):
    """The sharding without a mesh axis."""
    entries = [tuple(a for a in entry if a != axis) for entry in spec_axes(sharding.spec)]
    return NamedSharding(sharding.mesh, partition_spec(entries))


def sent(collectives):
    by_operation = Counter()
    for c in collectives:
        by_operation[c.op_name] += c.total_bytes
    return by_operation


def places(facts):
    """{name of an argument or a constraint, as reasons have it: (edit, sharding)}."""
    found = {}
    for i, array in enumerate(facts.arguments):
        found[f'argument {array.path}'] = partial(place, i), array.sharding
    for op in facts.traced.ops:
        if op.primitive == 'sharding_constraint' and op.site.frames:
            span = op.site.frames[0]
            name = f'your constraint at {short_source(span.source)}'
            # of all calls
            found.setdefault(name, (partial(ReplaceConstraint, (span,)), op.eqn.params['sharding']))
    return {name: each for name, each in found.items() if isinstance(each[1], NamedSharding)}


def place(i, sharding):
    return PlaceArguments({i: sharding}, {})


def drop(found, pairs):
    """The edits that drop mesh axes from arguments and constraints: (mesh axis, name) pairs."""
    shardings = {}
    for axis, name in pairs:
        shardings[name] = without(shardings.get(name, found[name][1]), axis)
    return tuple(found[name][0](sharding) for name, sharding in shardings.items())


def rows(report, rng):
    """Yields for each inserted collective whether it is smaller, and whether in the control."""
    facts = report.reading
    trials = make_trials(facts)
    if isinstance(trials, str):
        return
    found = places(facts)
    placed = [
        (axis, name)
        for name, (_, sharding) in found.items()
        for axes in spec_axes(sharding.spec)
        for axis in axes
        if isinstance(axis, str)
    ]
    compiled = {}

    def smaller(pairs, row):
        key = frozenset(pairs)
        if key not in compiled:
            trial = trials.run(drop(found, key))
            compiled[key] = None if trial is None else sent(trial.reading.collectives)
        after = compiled[key]
        return None if after is None else after[row.op_name] < FEWER * before[row.op_name]

    base = trials.run(())
    if base is None:
        return
    before, seen = sent(base.reading.collectives), set()
    for reason in facts.reasons.values():
        row = reason.row
        if reason.cause != 'inserted' or row.op_name in seen or not before[row.op_name]:
            continue
        seen.add(row.op_name)
        origins = ((axis, origin.partition(', called at')[0]) for axis, origin in reason.origins)
        named = {pair for pair in origins if pair[1] in found}
        named &= {*placed}
        others = [pair for pair in placed if pair not in named]
        if not named:
            yield reason, 'nothing named', None
        elif len(others) < len(named):
            yield reason, smaller(named, row), None
        else:
            yield reason, smaller(named, row), smaller(rng.sample(others, len(named)), row)


def main():
    module = importlib.import_module(sys.argv[1])
    target = sys.argv[2] if len(sys.argv) > 2 else None
    rng = random.Random(0)

    def mesh_of(**axes):
        return topology(target, **axes) if target else device_mesh(**axes)

    total, control, causes = Counter(), Counter(), Counter()
    for name, make in module.PROGRAMS.items():
        function, args = make(mesh_of)
        try:
            report = explain(function, *args, tries=0)
        except EinshardError as error:
            print(f'{name}: {error}')
            continue
        causes.update(reason.cause for reason in report.reading.reasons.values())
        found = Counter()
        for _, is_smaller, is_smaller_in_control in rows(report, rng):
            found[is_smaller] += 1
            if is_smaller_in_control is not None:
                control[is_smaller_in_control] += 1
        total += found
        print(f'{name}: smaller {found[True]} of {found[True] + found[False]}', flush=True)
    print(f'causes: {dict(causes)}')
    print(f'without what the reason names: {total[True]} of {total[True] + total[False]} smaller')
    print(f'without as many others: {control[True]} of {control[True] + control[False]} smaller')
    print(f'nothing named: {total["nothing named"]}; not compiled: {total[None]}')


if __name__ == '__main__':
    main()
