"""Compares estimated timelines with XLA's own schedules, for GPUs that are not here.

    python -m benchmarks.xla_schedule                          # H100 and B200; ten minutes
    python -m benchmarks.xla_schedule h100:1x8 fsdp tensor_8   # two shardings
    python -m benchmarks.xla_schedule --calibrate b200:1x8     # what to write into chips.py

XLA's latency hiding scheduler writes when each instruction starts and ends
(xla_dump_latency_hiding_schedule). For H100 and B200 it has tables of measured times of
collectives and products. The train step of a transformer is compiled with twelve shardings; the
script compares the time in which nothing hides a collective, with einshard's times of other
operations and with XLA's. XLA's totals are not compared: they contain 5 ms for each asynchronous
copy. `--calibrate` compiles one program with collectives and products of many sizes, and fits the
constants of `Efficiency` to the times that XLA gives them. It needs JAX's CUDA plugin.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import axis_rules, einshard, make_sharding, topology
from einshard._chips.table import find_chip
from einshard._program.cost.timeline import Simulation
from einshard._program.hlo.find_collectives import count_executions, find_collectives
from einshard._program.hlo.graph import Graph
from einshard._program.hlo.text import HloModule

CHIPS = 'h100:1x8', 'b200:1x8'  # those whose collectives XLA has measured

# --- the dump -----------------------------------------------------------------------------------


@dataclass
class Schedule:
    """The schedule of a program as XLA expects it, in seconds.

    Attributes:
        seconds: what each instruction takes, by name; of asynchronous ones, what it takes to start
            them and to end them.
        exposed: {start of a collective, or fusion that is one: in one execution, the time in which
            nothing hides it}.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)


def read_schedule(text: str) -> Schedule:
    """Reads a ScheduleProto that is written as text."""
    root = _parse(text)
    (module,) = root['hlo_module']
    computations = {one['id'][0]: one['instructions'] for one in module['computations']}
    ops = {op['id'][0]: op for one in computations.values() for op in one}
    found = Schedule()
    for schedule in root['computation_schedules']:
        cycle = 1e-6 / float(schedule['cycles_per_microsecond'][0])
        rows = schedule['instructions']
        starts, ends = (
            [cycle * float(row.get(f'{at}_timestamp_cycles', '0')[0]) for row in rows]
            for at in ('start', 'end')
        )
        flying = {}  # the collectives that go on, {id of the start: its name}
        for row, start, end, following in zip(
            rows, starts, ends, [*starts[1:], ends[-1]], strict=True
        ):
            op = ops[row['id'][0]]
            name, opcode = op['name'][0], op['opcode'][0]
            found.seconds[name] = end - start
            if opcode.endswith('-start') and _is_collective(op, computations):
                found.exposed[name] = 0.0
                # The scheduler works backwards. Time is idle here if it waited for the start to be
                # possible; if there is none, something else took at least as long.
                if following > end:
                    flying[op['id'][0]] = name
            elif opcode == 'fusion' and _is_collective(op, computations):
                found.exposed[name] = end - start
            if opcode.endswith('-done'):
                flying.pop(op['operand_ids'][0], None)
            for name in flying.values():
                found.exposed[name] += (following - end) / len(flying)
    return found


def _is_collective(op, computations):
    inside = [op]
    for each in inside:  # which grows: an asynchronous operation may call a fusion
        for name in each.get('called_computation_ids', ()):
            inside += computations[name]
    return any('channel_id' in each for each in inside)


def _parse(text):
    """Parses a protobuf in text format, with one field on each line, to {field: values}."""
    stack = [defaultdict(list)]
    for line in map(str.strip, text.splitlines()):
        if line == '}':
            stack.pop()
        elif line.endswith(' {'):
            stack.append(defaultdict(list))
            stack[-2][line[:-2]].append(stack[-1])
        elif line:
            name, _, value = line.partition(': ')
            stack[-1][name].append(value.strip('"'))
    return stack[0]


def compile_with_schedule(lowered):
    """Returns the text of an optimized program, and its schedule."""
    with tempfile.TemporaryDirectory() as folder:
        options = {'xla_dump_to': folder, 'xla_dump_latency_hiding_schedule': True}
        text = lowered.compile(compiler_options=options).as_text()
        for path in Path(folder).glob('*.schedule.txt'):
            return text, read_schedule(path.read_text())
    raise SystemExit('XLA wrote no schedule; on this GPU, its scheduler does not estimate times')


# --- the train step -----------------------------------------------------------------------------

B, T, D, F, V, H, K, L, E = 32, 2048, 4096, 14336, 32768, 32, 128, 4, 8
SIZES = {'vocab': V, 'embed': D, 'heads': H, 'head': K, 'mlp': F, 'layers': L, 'expert': E}
LAYER = dict.fromkeys('qkv', 'layers embed heads head') | {'o': 'layers heads head embed'}
DENSE = {'gate': 'layers embed mlp', 'up': 'layers embed mlp', 'down': 'layers mlp embed'}
EXPERTS = {
    'router': 'layers embed expert',
    'up': 'layers expert embed mlp',
    'down': 'layers expert mlp embed',
}
TOP = {'table': 'vocab embed', 'out': 'embed vocab'}
_TENSOR = {'heads': '@tensor', 'mlp': '@tensor', 'vocab': '@tensor'}
_SEQUENCE = {**_TENSOR, 'seq': '@tensor'}
_FSDP = {'batch': '@data', 'embed': '@data'}
# name: (sizes of mesh axes, placements of axes); those of moments differ for 'zero 1'
SHARDINGS = {
    'data': ({'data': 8}, {'batch': '@data'}),
    'zero_1': ({'data': 8}, {'batch': '@data'}),
    'fsdp': ({'data': 8}, _FSDP),
    'data_fsdp': ({'pod': 2, 'data': 4}, {'batch': '@(pod,data)', 'embed': '@data'}),
    'tensor_2': ({'data': 4, 'tensor': 2}, {'batch': '@data', **_TENSOR}),
    'tensor_8': ({'tensor': 8}, _TENSOR),
    'fsdp_tensor_2': ({'data': 4, 'tensor': 2}, {**_FSDP, **_TENSOR}),
    'fsdp_tensor_4': ({'data': 2, 'tensor': 4}, {**_FSDP, **_TENSOR}),
    'sequence_8': ({'tensor': 8}, _SEQUENCE),
    'fsdp_sequence_2': ({'data': 4, 'tensor': 2}, {**_FSDP, **_SEQUENCE}),
    'context_4': ({'data': 2, 'context': 4}, {**_FSDP, 'seq': '@context', 'queries': '@context'}),
    'experts': ({'data': 8}, {'batch': '@data', 'expert': '@data', 'vocab': '@data'}),
}


def norm(x):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(x, w):
    q, k, v = (jnp.einsum('btd,dhk->bthk', x, w[name]) for name in 'qkv')
    q = einshard(q, 'batch queries heads head')
    k, v = (einshard(one, 'batch keys heads head') for one in (k, v))
    scores = jnp.einsum('bthk,bshk->bhts', q, k).astype(jnp.float32) * K**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    mixed = jnp.einsum('bhts,bshk->bthk', jax.nn.softmax(scores).astype(x.dtype), v)
    return jnp.einsum('bthk,hkd->btd', mixed, w['o'])


def dense(x, w):
    return (jax.nn.silu(x @ w['gate']) * (x @ w['up'])) @ w['down']


def experts(x, w):
    """Each token goes to one expert, unless that has its share of tokens already."""
    capacity = 2 * T // E
    gates = jax.nn.softmax((x @ w['router']).astype(jnp.float32))
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), E)
    place = (jnp.cumsum(chosen, 1) * chosen - 1).astype(jnp.int32)
    slots = jax.nn.one_hot(place, capacity, dtype=x.dtype)
    sent = einshard(jnp.einsum('btd,btec->becd', x, slots), 'rows expert slot width')
    h = jax.nn.silu(jnp.einsum('becd,edf->becf', sent, w['up']))
    y = einshard(jnp.einsum('becf,efd->becd', h, w['down']), 'rows expert slot width')
    y = einshard(y, 'batch slots slot width')
    return jnp.einsum('becd,btec->btd', y, (gates.max(-1)[..., None, None] * slots).astype(x.dtype))


def loss(params, tokens, mlp):
    def layer(x, w):
        x = einshard(x + attention(norm(x), w), 'batch seq width')
        return einshard(x + mlp(norm(x), w), 'batch seq width'), None

    x = einshard(params['table'][tokens], 'batch seq width')
    weights = {name: w for name, w in params.items() if name not in TOP}
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
    logits = (norm(x) @ params['out']).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def step(params, m, v, tokens, mlp):
    value, gradients = jax.value_and_grad(loss)(params, tokens, mlp)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(m.dtype), m, gradients)
    v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * jnp.square(g.astype(v.dtype)), v, gradients)
    params = jax.tree.map(
        lambda p, m, v: p - (1e-4 * m / (jnp.sqrt(v) + 1e-8)).astype(p.dtype), params, m, v
    )
    return params, m, v, value


def lower(name, chip):
    """Lowers the step with one of SHARDINGS."""
    axes, rules = SHARDINGS[name]
    mesh = topology(chip, **axes)
    is_moe = 'expert' in rules
    shapes = TOP | LAYER | (EXPERTS if is_moe else DENSE)

    def struct(spec, dtype, rules):
        with axis_rules(**rules):
            sharding = make_sharding(spec, ndim=len(spec.split()), mesh=mesh)
        return jax.ShapeDtypeStruct(
            [SIZES[axis] for axis in spec.split()], dtype, sharding=sharding
        )

    of_moments = rules if name != 'zero_1' else {**rules, 'embed': '@data'}
    params = {key: struct(spec, jnp.bfloat16, rules) for key, spec in shapes.items()}
    moments = {key: struct(spec, jnp.float32, of_moments) for key, spec in shapes.items()}
    with jax.set_mesh(mesh), axis_rules(**rules):
        tokens = jax.ShapeDtypeStruct(
            (B, T), jnp.int32, sharding=make_sharding('batch tokens', ndim=2, mesh=mesh)
        )
        out = jax.tree.map(lambda one: one.sharding, (params, moments, moments))
        jitted = jax.jit(
            partial(step, mlp=experts if is_moe else dense),
            out_shardings=(*out, None),
            donate_argnums=(0, 1, 2),
        )
        return list(mesh.devices.flat), jitted.lower(params, moments, moments, tokens)


# --- the comparison -----------------------------------------------------------------------------


_NAME = re.compile(r'scheduling_name="([^"]*)"')


def scheduled_name(op):
    """The name of an instruction when it was scheduled; some are renamed later."""
    match = _NAME.search(op.config)
    return match[1] if match else op.name


def exposed(row, schedule):
    """Yields the executions of each node of a row, and XLA's exposed seconds of one of them."""
    for node in row.nodes:
        names = {scheduled_name(op) for op in (node.op, *node.scope.calls)}
        (name,) = names & schedule.exposed.keys()
        yield count_executions(node)[0], schedule.exposed[name]


class WithTimes(Simulation):
    """A simulation in which operations take given times."""

    def __init__(self, *args):
        super().__init__(*args)
        self.times: dict[str, float] = {}

    def op_seconds(self, op, types):
        given = self.times.get(scheduled_name(op))
        return super().op_seconds(op, types) if given is None else given


def compare(name, chip):
    """Returns the exposed seconds: estimated, with XLA's times of other operations, and XLA's."""
    devices, lowered = lower(name, chip)
    simulation, schedule = simulate(devices, lowered)
    own = simulation.run().total('exposed')
    simulation.runs, simulation.times = {}, schedule.seconds
    theirs = sum(n * seconds for row in simulation.rows for n, seconds in exposed(row, schedule))
    return own, simulation.run().total('exposed'), theirs


def simulate(devices, lowered):
    """Returns a simulation of a lowered program, and XLA's schedule of it."""
    text, schedule = compile_with_schedule(lowered)
    graph = Graph(HloModule(text))
    rows = find_collectives(graph, [device.id for device in devices])
    chip = find_chip(devices[0].device_kind)
    return WithTimes(graph, rows, [row.name for row in rows], devices, chip), schedule


def print_comparison(chip, names):
    print(f"\n| {chip} | estimated | with XLA's compute times | XLA | ratio |")
    print('| --- | --- | --- | --- | --- |')
    found = []
    for name in names:
        found.append(compare(name, chip))
        own, mixed, theirs = found[-1]
        row = f'{1e3 * own:.2f} ms | {1e3 * mixed:.2f} ms | {1e3 * theirs:.2f} ms'
        print(f'| {name} | {row} | {mixed / theirs:.2f} |', flush=True)
    pairs = list(itertools.combinations(found, 2))
    for k, what in enumerate(('estimated', "with XLA's compute times")):
        same = sum((a[k] < b[k]) == (a[2] < b[2]) for a, b in pairs)
        print(f'pairs in the order of XLA, {what}: {same} of {len(pairs)}')


# --- the constants of a chip --------------------------------------------------------------------

SIZES_OF_COLLECTIVES = [2**n for n in range(20, 31)]  # bytes of the unsharded array in a group
KINDS = {
    'all-gather': lambda x: jax.lax.all_gather(x, 'x', tiled=True),
    'reduce-scatter': lambda x: jax.lax.psum_scatter(x, 'x', tiled=True),
    'all-reduce': lambda x: jax.lax.psum(x, 'x'),
    'all-to-all': lambda x: jax.lax.all_to_all(x, 'x', 0, 0, tiled=True),
}
MIDDLE, LARGE = range(4 * 2**20, 256 * 2**20), 256 * 2**20


def one_after_another(functions, *arrays):
    results = []
    for function, array in zip(functions, arrays, strict=True):
        if results:
            array, _ = jax.lax.optimization_barrier((array, results[-1]))
        results.append(function(array))
    return tuple(results)


def measure_collectives(chip, n):
    """Yields (kind, bytes, bound in seconds, XLA's seconds) of collectives between groups of n."""
    size = topology(chip).size
    mesh = topology(chip, y=size // n, x=n)
    rows = list(itertools.product(KINDS, SIZES_OF_COLLECTIVES))
    functions = [KINDS[kind] for kind, _ in rows]
    arrays = [  # two bytes for each element
        jax.ShapeDtypeStruct(
            (n_bytes // 2 * (size // n if kind == 'all-gather' else size),), 'bfloat16'
        )
        for kind, n_bytes in rows
    ]
    spec = P(('y', 'x'))
    mapped = jax.shard_map(
        partial(one_after_another, functions),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    simulation, schedule = simulate(list(mesh.devices.flat), jax.jit(mapped).lower(*arrays))
    for row, (kind, n_bytes) in zip(simulation.rows, rows, strict=True):
        assert row.kind == kind
        if row.sent is None:  # not a kernel of XLA's own, for small all-reduces
            ((_, seconds),) = exposed(row, schedule)
            yield kind, n_bytes, simulation.network.seconds(replace(row, executions=1)), seconds


def measure_operations(chip):
    """Yields (kind, bound in seconds, XLA's seconds) of products and of additions."""
    mesh = topology(chip)
    everywhere = NamedSharding(mesh, P())
    shapes = [(m, k, n) for m in (4096, 8192) for k in (4096, 8192) for n in (4096, 8192)]

    def step(products, additions, sharded):
        # XLA schedules, and writes the schedule, only if there is a collective
        gathered = jax.lax.with_sharding_constraint(sharded, everywhere)
        return [a @ b for a, b in products], [x + y for x, y in additions], gathered

    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=everywhere)

    products = [(struct(m, k), struct(k, n)) for m, k, n in shapes]
    additions = [(struct(n), struct(n)) for n in (2**29, 2**28, 1024)]
    rows = NamedSharding(mesh, P(mesh.axis_names))
    sharded = jax.ShapeDtypeStruct((2**20,), jnp.bfloat16, sharding=rows)
    devices = list(mesh.devices.flat)
    simulation, schedule = simulate(devices, jax.jit(step).lower(products, additions, sharded))
    chip = simulation.chip
    ideal = replace(simulation.efficiency, products=1.0, hbm=1.0, launch=0.0)
    simulation.efficiency = ideal
    program = simulation.program
    ops = program.computations[program.entry]
    types = {op.name: op.type for op in ops}
    for op in ops:
        seconds = schedule.seconds.get(scheduled_name(op), 0.0)
        if op.name in simulation.flops:
            yield 'product', simulation.op_seconds(op, types), seconds
        elif op.opcode == 'fusion':
            yield 'addition', simulation.op_seconds(op, types), seconds


def calibrate(chip):
    """Prints the constants of a chip that are closest to XLA's times."""
    size = topology(chip).size
    print('| collective | group | part of the bound, 256 MiB and more | seconds, 4 to 128 MiB |')
    print('| --- | --- | --- | --- |')
    for n in (n for n in (2, 4, 8) if n <= size):
        found = defaultdict(list)
        for kind, *row in measure_collectives(chip, n):
            found[kind].append(row)
        for kind, rows in found.items():
            if rows[-1][-1] < 10 * rows[0][-1]:  # 1 GiB and 1 MiB
                raise SystemExit(f'XLA has no measured times of collectives on {chip}')
            part = np.median(
                [bound / seconds for n_bytes, bound, seconds in rows if n_bytes >= LARGE]
            )
            rest = [s - bound / part for n_bytes, bound, s in rows if n_bytes in MIDDLE]
            constant = f'{1e6 * np.median(rest):.0f} us' if rest else ''
            print(f'| {kind} | {n} | {part:.2f} | {constant} |', flush=True)
    found = list(measure_operations(chip))
    for kind in ('product', 'addition'):
        rows = [(bound, seconds) for each, bound, seconds in found if each == kind]
        parts = ', '.join(f'{bound / seconds:.2f}' for bound, seconds in rows if bound > 1e-5)
        print(f'parts of the peak that a {kind} reaches: {parts}')
    smallest = min(seconds for kind, _, seconds in found if kind == 'addition')
    print(f'the smallest addition takes {1e6 * smallest:.2f} us')


if __name__ == '__main__':
    chips = [name for name in sys.argv[1:] if ':' in name] or CHIPS
    names = [name for name in sys.argv[1:] if name in SHARDINGS] or SHARDINGS
    if unknown := set(sys.argv[1:]) - {*chips, *names, '--calibrate'}:
        raise SystemExit(f'not a sharding: {", ".join(sorted(unknown))}')
    for chip in chips:
        if '--calibrate' in sys.argv:
            calibrate(chip)
        else:
            print_comparison(chip, names)
