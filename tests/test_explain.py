"""explain: reports of programs whose collectives and placements are known by theory."""

import copy
import dataclasses
import functools
import gc
import inspect
import io
import json
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from modules import line_of
from placed import mesh_of, struct
from refusal import refusal

from einshard import (
    EinshardError,
    Sharded,
    assert_collectives,
    check_same,
    device_mesh,
    einshard,
    explain,
    make_sharding,
    plan,
    profile,
    sharded,
    show,
    to_jax,
)
from einshard._explain.explain import _devices
from einshard._explain.findings.slow_network import slow_network
from einshard._explain.fold_layers import fold, fold_paths
from einshard._explain.golden_files import golden_text
from einshard._explain.oversized import newest_dump, read_shardings
from einshard._explain.report_rows import Finding
from einshard._program.hlo.graph import Graph
from einshard._program.hlo.queries import output_uses
from einshard._program.hlo.text import HloModule
from einshard._sharding.collective_axes import (
    along_text,
    axes_text,
    mesh_axes_between,
    mesh_axes_of,
    sharding_of_blocks,
)
from einshard._sharding.describe import describe_named

sys.path.append(str(Path(__file__).parents[1] / 'docs' / 'examples'))
import transformer

EIGHT = jax.devices()[:8]
MLP_SHAPES = struct(16, 32), struct(32, 64), struct(64, 32)


def short(source):
    return source and Path(source).name


# --- collectives known by theory ----------------------------------------------------------------

X, Y, Z = 32, 64, 48  # divisible by 16
PRODUCT = 4 * X * Z  # bytes


@pytest.mark.parametrize('n', [4, 8, 16])
@pytest.mark.parametrize(
    ('specs', 'out', 'collectives', 'sent'),
    [
        (['x* y', '* y z'], 'x* z', [], 0),
        (['* x y', 'y z*'], 'x z*', [], 0),
        (['x* y', 'y z*'], 'x* z', [('all-gather', 'f32[64,48]', 4 * Y * Z, 'x|z')], 4 * Y * Z),
        (['x y*', 'y* z'], '* x z', [('all-reduce', 'f32[32,48]', PRODUCT, 'y')], 2 * PRODUCT),
    ],
)
def test_matrix_products(n, specs, out, collectives, sent):
    product = sharded(*specs, out=out, mesh=jax.devices()[:n])(lambda x, w: x @ w)
    report = explain(product, struct(X, Y), struct(Y, Z))
    rows = report.collectives
    assert (report.n_devices, report.network_bytes) == (n, sent * (n - 1) // n)
    assert [(row.kind, row.arrays, row.bytes, row.along) for row in rows] == collectives
    assert all((row.group_size, row.groups, row.executions) == (n, 1, 1) for row in rows)
    assert rows.counts == {kind: 1 for kind, *_ in collectives}
    assert rows.network_bytes == {kind: report.network_bytes for kind, *_ in collectives}


def test_groups_are_named_by_the_axes_that_they_are_along():
    @sharded('b x -> b4 2 x', 'x y -> 4 x y2', 'y x -> 4 y2 x', out='b x -> b4 2 x')
    def mlp(x, w_in, w_out):
        return jax.nn.relu(x @ w_in) @ w_out

    report = explain(mlp, *MLP_SHAPES, mesh=EIGHT)
    (row,) = report.collectives
    assert (row.kind, row.groups, row.group_size, row.along) == ('all-reduce', 4, 2, 'y')
    assert row.arrays == 'f32[4,32]'
    assert report.network_bytes == 2 * row.bytes // 2

    def loss(x, w_in, w_out):
        return jnp.mean(mlp.__wrapped__(x, w_in, w_out) ** 2)

    step = sharded('b x -> b4 2 x', 'x y -> 4 x y2', 'y x -> 4 y2 x')(jax.grad(loss, (1, 2)))
    report = explain(step, *MLP_SHAPES, mesh=EIGHT)
    # the gradients of the weights, over the devices that share the batch
    over_batch = [row for row in report.collectives if row.along == 'b']
    assert {(row.groups, row.group_size) for row in over_batch} == {(2, 4)}
    arrays = ', '.join(row.arrays for row in over_batch)
    assert sorted(re.findall(r'f32\[[\d,]*\]', arrays)) == ['f32[32,32]', 'f32[32,32]']


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
def test_a_function_without_shardings_is_compiled_for_all_devices_of_the_mesh(types):
    mesh = mesh_of(types=types, data=4, tp=2)

    def product(x, w, scale=2.0):
        return x @ w * scale

    def constrained(x):
        return einshard(x + 1, 'a@data b')

    for function in (product, sharded(None, None, None)(product)):
        for arguments in (struct(8, 8), struct(8, 8)), (np.ones((8, 8)), jnp.ones((8, 8))):
            report = explain(function, *arguments, mesh=mesh)
            assert report.n_devices == 8
            rows = (*report.arguments[:2], *report.results)
            assert {row.placement for row in rows} == {'a b -> 8 a b'}
            assert_collectives(function, *arguments, mesh=mesh, allowed=())
    (result,) = explain(constrained, struct(8, 8), mesh=mesh).results
    assert result.placement == 'a b -> a@data b'
    others = NamedSharding(device_mesh(jax.devices()[8:12], x=4), P('x'))
    error = refusal(
        explain, lambda x: jax.lax.with_sharding_constraint(x, others), struct(8), mesh=mesh
    )
    assert 'incompatible devices' in error.facts['the compiler says']


def test_loops_are_multiplied():
    @sharded('l x y -> l x y*', 'l y x -> l y* x', 'b x -> * b x', out='b x -> * b x')
    def layers(w_in, w_out, x):
        def layer(x, w):
            return jnp.tanh(x @ w[0]) @ w[1], None

        return jax.lax.scan(layer, x, (w_in, w_out))[0]

    arguments = (struct(12, 32, 64), struct(12, 64, 32), struct(16, 32))
    report = explain(layers, *arguments, mesh=EIGHT)
    (row,) = report.collectives
    assert (row.kind, row.executions, row.along) == ('all-reduce', 12, 'y')
    assert report.collectives.counts == {'all-reduce': 1}
    assert report.network_bytes == 12 * 2 * (16 * 32 * 4) * 7 // 8
    assert '\n  1 x 12  all-reduce' in str(report)


def test_two_meshes_are_both_named_and_drawn():
    first, second = mesh_of(data=4, tp=2), mesh_of(x=8)
    report = explain(
        jax.jit(lambda a, b, c: (a + 1, b + 1, c + 1)),
        einshard(struct(8, 4), 'a b -> a@data b@tp', mesh=first),
        einshard(struct(8, 4), 'a b -> a@x b', mesh=second),
        einshard(struct(8, 4), 'a b -> a2 b4', mesh=EIGHT),
    )
    assert report.meshes == ((('data', 4), ('tp', 2)), (('x', 8),))
    assert report.mesh == report.meshes[0]
    assert str(report).startswith('<lambda> on 8 devices (cpu; data=4, tp=2; x=8)\n')
    assert golden_text(report).startswith('<lambda> on 8 devices: data=4, tp=2; x=8\n')
    parts = [picture.blocks.parts for _, picture in show(report).pictures]
    assert parts == [(4, 2), (8, 1), (2, 4)]


def test_loops_of_unknown_length_count_as_one_iteration():
    @sharded('x y -> x y*', 'y x -> y* x', out='b x -> * b x')
    def until(w_in, w_out):
        x = jnp.ones((8, 32))
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w_in @ w_out, x)

    report = explain(until, struct(32, 64), struct(64, 32), mesh=EIGHT)
    assert False in {row.is_exact for row in report.collectives}
    assert {row.executions for row in report.collectives} == {1}
    assert report.network_bytes == sum(row.network_bytes for row in report.collectives)
    assert 'sent in one run: at least ' in str(report)


# --- names and placements -----------------------------------------------------------------------


def test_arguments_and_results_are_placed_and_named():
    @sharded(
        {'w': 'i o -> i o4 2', 'b': None},
        None,
        rest=None,
        scale=None,
        more=None,
        out=('b o -> b8 o', None),
    )
    def layer(params, x, *rest, scale=1.0, **more):
        y = x @ params['w'] * scale + rest[1] * more['shift']
        return y, {'sum': y.sum(), 'square': y.T @ y}

    params = {'w': struct(8, 16), 'b': struct(3)}
    report = explain(layer, params, struct(8, 8), 1.0, 2.0, scale=3.0, shift=4.0, mesh=EIGHT)
    assert [(row.path, row.array, row.placement, row.bytes) for row in report.arguments] == [
        ('params/b', 'float32[3]', 'not used', 0),
        ('params/w', 'float32[8,16]', 'i o -> i o4 2', 4 * 8 * 4),
        ('x', 'float32[8,8]', report.arguments[2].placement, report.arguments[2].bytes),
        ('rest[0]', 'float32[]', 'not used', 0),
        ('rest[1]', 'float32[]', '... -> 8 ...', 4),
        ('scale', 'float32[]', '... -> 8 ...', 4),
        ('shift', 'float32[]', '... -> 8 ...', 4),
    ]
    paths = [row.path for row in report.results]
    assert paths == ['result/0', 'result/1/square', 'result/1/sum']
    first = report.results[0]
    assert (first.placement, first.bytes, first.sharded) == ('b o -> b8 o', 4 * 16, True)


class Model:
    @sharded('b x -> b* x', None)
    def forward(self, x, scale):
        return x * scale


jax.tree_util.register_static(Model)


@sharded
def annotated(x: Sharded[Float[Array, 'rows cols'], 'rows cols*']):  # noqa: F722
    return x + 1


@functools.partial(jax.jit, static_argnums=1)
def static(unused, power, x, *several):
    return x**power + several[0] + several[1]


ONE = f'on one device: {jax.devices()[0]}'
# a function, its arguments, and the rows of the arguments
ARGUMENTS = {
    'letters that are free': (
        sharded('b ... -> b8 ...', mesh=EIGHT)(lambda x: x + 1),
        (struct(8, 4, 8),),
        [('x', 'b a c -> b8 a c', 4 * 4 * 8)],
    ),
    'annotations': (annotated, (struct(4, 16),), [('x', 'rows cols -> rows cols16', 4 * 4)]),
    'a method': (
        Model().forward,
        (struct(16, 2), 3.0),
        [('x', 'b x -> b16 x', 4 * 2), ('scale', '... -> 16 ...', 4)],
    ),
    'arrays in hand': (lambda x: x * 2, (np.ones((2, 3), np.float32),), [('x', ONE, 24)]),
    'a key and a number': (
        lambda key, n: jax.random.bits(key) + n,
        (jax.random.key(0), 1),
        [('key', ONE, 8), ('n', ONE, 4)],
    ),
    'static and unused arguments': (
        static,
        (1.0, 2, struct(3), 4.0, 5.0),
        [('unused', 'not used', 0), ('x', ONE, 12), ('args[2]', ONE, 4), ('args[3]', ONE, 4)],
    ),
}


@pytest.mark.parametrize('case', ARGUMENTS)
def test_rows_of_arguments(case):
    function, arguments, rows = ARGUMENTS[case]
    report = explain(function, *arguments)
    assert [(row.path, row.placement, row.bytes) for row in report.arguments] == rows
    if rows[-1][1] == ONE:
        assert (report.n_devices, report.mesh, report.collectives) == (1, (), ())


def step(w, x, *, rate=1.0):
    return {'y': (x @ w) * rate}


jitted = jax.jit(step)
on_eight = sharded('... -> * ...', None, out='a b -> a8 b', mesh=EIGHT)
KINDS = {
    'function': lambda w, x: explain(step, w, x),
    'jitted': lambda w, x: explain(jitted, w, x),
    'traced': lambda w, x: explain(jitted.trace(w, x)),
    'lowered': lambda w, x: explain(jitted.lower(w, x)),
    'compiled': lambda w, x: explain(jitted.lower(w, x).compile()),
    'sharded': lambda w, x: explain(on_eight(step), w, x),
    'partial': lambda w, x: explain(functools.partial(step, np.ones((4, 2))), x),
    'keywords': lambda w, x: explain(jitted, x=x, w=w),
}


@pytest.mark.parametrize('kind', KINDS)
def test_every_kind_of_function(kind):
    w, x = einshard((struct(4, 2), struct(8, 4)), ('* ...', 'a* b'), mesh=EIGHT)
    report = KINDS[kind](w, x)
    rows = [(row.path, row.placement) for row in (*report.arguments, *report.results)]
    expected = [('w', 'a b -> 8 a b'), ('x', 'a b -> a8 b'), ('result/y', 'a b -> a8 b')]
    assert rows == (expected[1:] if kind == 'partial' else expected)
    assert (report.name, report.collectives) == ('step', ())


# --- memory, flops, compilations ----------------------------------------------------------------


def test_memory_and_flops_agree_with_the_compiler():
    @sharded('x y -> x* y', 'y z -> y z*', donate_argnums=0)
    def f(x, w):
        return jnp.tanh(x) @ w, x + 1

    report = explain(f, struct(64, 64), struct(64, 32))
    compiled = f.lower(struct(64, 64), struct(64, 32)).compile()
    figures, memory = compiled.memory_analysis(), report.memory
    assert memory.arguments == figures.argument_size_in_bytes
    assert memory.results == figures.output_size_in_bytes
    assert memory.temporaries == figures.temp_size_in_bytes
    assert memory.code == figures.generated_code_size_in_bytes
    assert memory.aliased == figures.alias_size_in_bytes > 0
    assert memory.arguments == sum(row.bytes for row in report.arguments)
    assert memory.total == (
        memory.arguments + memory.results + memory.temporaries + memory.code - memory.aliased
    )
    # the compiler also counts the 256 operations of `x + 1`
    assert report.flops == compiled.cost_analysis()['flops'] - 4 * 64 == 2 * 4 * 64 * 32


@pytest.mark.parametrize('decorate', [jax.jit, sharded('a b -> a* b')], ids=['jit', 'sharded'])
def test_a_later_call_reuses_the_compilation(decorate):
    @decorate
    def reused(x):
        return x * 3

    x = np.ones((16, 2), np.float32)
    with counting() as counts:
        explain(reused, x)
        assert counts.of('reused') == (1, 1)
        reused(x)
        explain(reused, struct(16, 2))
        assert counts.of('reused') == (1, 1)


# --- findings -----------------------------------------------------------------------------------


def findings_of(report):
    return [(finding.kind, finding.text, short(finding.source)) for finding in report.findings]


def test_large_arrays_on_every_device():
    @sharded('a b -> * a b', 'a b -> a* b')
    def f(x, y):
        return x.sum() + y, x * 2

    arguments = (struct(512, 513), struct(512, 513))
    report = explain(f, *arguments)
    assert report.results[1].placement == 'a b -> 16 a b'
    text = 'x, result/1, float32[512,513], are replicated on 16 devices: 1.0 MiB per array on each'
    assert [(note.kind, note.text) for note in report.notes] == [('replicated', text)]
    assert report.findings == ()  # as in data parallelism
    assert not explain(f, *arguments, replicated_above=4 * 512 * 513).notes
    assert not explain(jax.jit(lambda x: x * 2), struct(512, 513)).notes  # on one device


@sharded('a b -> a8 b')
def moving(x):
    y = jnp.tanh(x)
    y = einshard(y, 'a b -> 2 a b4')
    return y @ y.T


def test_a_full_rematerialization():
    report = explain(moving, struct(64, 64), mesh=EIGHT, tries=0)
    costs = {short(note.source): note.text for note in report.notes if note.kind == 'cost'}
    assert costs[line_of(moving, 'tanh')].startswith(
        "f32[64,64] is resharded from 'a b -> a8 b' to 'a b -> 2 a b4' via a full all-gather "
        '(involuntary full rematerialization): 16.0 KiB: '
    )
    # which the partitioner reports on standard error only
    assert 'all-gather' in report.collectives.counts


def test_a_gathered_array_with_other_uses_is_not_a_full_rematerialization():
    @sharded('a b -> a8 b', None, out='a b -> 8 a b')
    def sliced(x, i):
        x = einshard(x, '... -> * ...')
        return jax.lax.dynamic_slice(x, (i, 0), (4, 64))

    report = explain(sliced, struct(64, 64), 3, mesh=EIGHT)
    assert report.collectives.counts == {'all-gather': 1}
    assert report.findings == ()


@sharded('x y -> x* y', 'i y -> i* y')
def rematerialized(w, x):
    @jax.checkpoint
    def layer(w, x):
        return jnp.tanh(x @ w)

    return jax.grad(lambda w: layer(w, layer(w, x)).sum())(w)


def test_a_weight_that_is_gathered_several_times():
    report = explain(rematerialized, struct(64, 64), struct(64, 64), mesh=EIGHT, tries=0)
    n = report.collectives.counts['all-gather']
    assert n > 1
    assert report.findings == ()
    (note,) = report.notes  # weights are gathered again in the backward pass
    assert (note.kind, note.text) == ('gathered again', f'w is gathered {n} times')
    lines = [line_of(rematerialized, text) for text in ('tanh', 'jax.grad')]
    assert short(note.source) in lines


@sharded('x y -> x* y')
def idle(x):
    einshard(x, 'a b -> a b*')
    x = einshard(x, 'a b -> a* b')
    y = einshard(jnp.tanh(x), 'a b -> a2 b2 4')
    y = jax.device_put(einshard(y, 'a b -> a2 b2 *'), jax.devices()[0])
    return jax.device_put(y, make_sharding('a b -> a b*'))


def test_constraints_without_effect():
    report = explain(idle, struct(16, 16))
    assert [(finding.text, short(finding.source)) for finding in report.findings] == [
        (
            'the result of this constraint is not used; assign it: x = einshard(x, ...)',
            line_of(idle, "einshard(x, 'a b -> a b*')"),
        ),
        (
            'jax.device_put has no effect in a jitted function; use einshard or '
            'jax.lax.with_sharding_constraint',
            line_of(idle, 'return'),
        ),
    ]
    already = "the value is already '{}', so this constraint has no effect"
    notes = [note for note in report.notes if note.kind != 'cost']
    assert [(note.text, short(note.source)) for note in notes] == [
        (already.format('a b -> a16 b'), line_of(idle, "'a b -> a* b'")),
        (already.format('a b -> a2 b2 4'), line_of(idle, 'b2 *')),
    ]
    assert {finding.kind for finding in (*report.findings, *notes)} == {'no effect'}


@pytest.mark.parametrize('kinds', [('pinned_host', 'device'), ('device', 'pinned_host')])
def test_device_put_to_other_memory_has_an_effect(kinds):
    old, new = (make_sharding('a* b', memory_kind=kind) for kind in kinds)
    x = jax.ShapeDtypeStruct((16, 16), np.float32, sharding=old)
    report = explain(jax.jit(lambda x: jax.device_put(x, new)), x)
    assert [finding.text for finding in report.findings] == []


@pytest.mark.parametrize('specify', ['in_shardings', 'struct', 'keyword', None])
def test_a_constraint_repeats_only_shardings_that_the_user_specified(specify):
    """The compiler chooses the sharding of other arguments because of the constraint."""
    rows = make_sharding('b x -> b* x')
    x, w = struct(64, 128), struct(128, 32)

    def repeated(unused, x, w):
        return jax.lax.with_sharding_constraint(x, rows) @ w

    if specify == 'keyword':
        report = explain(sharded(None, 'b* x', None)(repeated), 0.0, x=x, w=w)
    elif specify == 'in_shardings':
        report = explain(jax.jit(repeated, in_shardings=(None, rows, None)), 0.0, x, w)
    else:
        placed = einshard(x, 'b* x') if specify else x
        report = explain(jax.jit(repeated), 0.0, placed, w)
        assert report.flops < explain(lambda x, w: x @ w, x, w).flops
    assert [note.kind for note in report.notes] == ['no effect'] * bool(specify)


def test_an_argument_that_the_compiler_shards():
    """JAX returns no NamedSharding for an argument without a sharding."""
    mesh = mesh_of(data=8, tensor=2)
    placed = make_sharding('a b -> a@data b@tensor', mesh=mesh)
    f = jax.jit(lambda x, y: 2 * jax.lax.with_sharding_constraint(x, placed) + y)
    report = explain(f, struct(16, 16), struct())
    assert [row.placement for row in report.arguments] == [
        'a b -> a@data b@tensor',
        '... -> 16 ...',
    ]
    assert [row.placement for row in report.results] == ['a b -> a@data b@tensor']


@pytest.mark.parametrize('where', ['function', 'scan', 'cond', 'while', 'nested jit', 'gradient'])
def test_constraints_of_python_scalars(where):
    """JAX keeps the scalars as literals of the jaxpr, which have no hash."""
    everywhere = make_sharding('... -> * ...')

    def one():
        return jax.lax.with_sharding_constraint(1.0, everywhere)

    programs = {
        'function': lambda x: x.sum() + one(),
        'scan': lambda x: jax.lax.scan(lambda c, row: (c + one() + row.sum(), one()), 0.0, x),
        'cond': lambda x: jax.lax.cond(x.sum() > 0, one, lambda: 2 * one()),
        'while': lambda x: jax.lax.while_loop(lambda c: c < x.sum(), lambda c: c + one(), one()),
        'nested jit': lambda x: jax.jit(lambda a, b: (a, b * one(), 2.0))(one(), x),
        'gradient': jax.grad(lambda x: (x * one()).sum() * one()),
    }
    report = explain(jax.jit(programs[where]), einshard(struct(64, 16), 'x y -> x* y'))
    assert 'no effect' not in {finding.kind for finding in (*report.findings, *report.notes)}


def test_constraints_in_loops_are_seen():
    @sharded('x y -> x* y')
    def loop(x):
        def body(x, _):
            einshard(x, 'a b -> a b*')
            return einshard(x + 1, 'a b -> a b*'), None

        return jax.lax.scan(body, x, length=2)[0]

    report = explain(loop, struct(16, 16))
    found = [short(finding.source) for finding in report.findings if finding.kind == 'no effect']
    assert found == [line_of(loop, "einshard(x, 'a b -> a b*')")]


def in_rows(x):
    return einshard(x, 'a b -> a@data b')


def forgotten(x):
    _, x = einshard(x, 'a b -> a b@data'), einshard(jnp.tanh(x), 'a b -> a b@data')
    in_rows(x)
    x = in_rows(jnp.tanh(x))
    return jax.lax.scan(lambda x, _: (in_rows(jnp.sin(x)), None), x, length=3)[0].sum()


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('transform', [lambda f: f, jax.grad])
def test_each_unused_constraint_is_found(types, transform):
    """Also if the same line or the same helper function has constraints that are used."""
    f = sharded('a@data b', mesh=mesh_of(types=types, data=8))(transform(forgotten))
    found = [f for f in explain(f, struct(16, 16)).findings if 'is not used' in f.text]
    lines = [line_of(forgotten, text) for text in ('einshard(x', '    in_rows')]
    assert [short(finding.source) for finding in found] == lines


# --- a wrong sharding in a program of several hundred lines -------------------------------------


def transformer_report(placement):
    c = transformer.Config(
        n_layers=2, d_model=32, n_heads=16, n_kv_heads=8, d_head=4, d_ff=64, sequence=16, batch=8
    )
    state = jax.eval_shape(lambda: transformer.init_state(jax.random.key(0), c))
    tokens = struct(8, c.sequence + 1, dtype=np.int32)
    model = transformer.make_model(c, placement, mesh=EIGHT)
    return explain(model.train_step, state, tokens, tries=0)


@pytest.fixture(scope='module')
def right():
    return transformer_report(transformer.BOTH)


def test_the_transformer_only_sums(right):
    assert set(right.collectives.counts) == {'all-reduce'}
    assert {(row.groups, row.group_size) for row in right.collectives} == {(4, 2), (2, 4)}
    assert {row.along for row in right.collectives if row.group_size == 4} == {'b'}
    assert all(row.along.startswith('v|h|') for row in right.collectives if row.group_size == 2)
    assert right.findings == ()
    assert right.memory.arguments == sum(row.bytes for row in right.arguments)


def test_a_wrong_sharding_in_the_transformer_is_found_with_its_line(right):
    """The hidden units are sharded along positions instead of the axis that the weights shard."""
    wrong = transformer_report(transformer.BOTH._replace(hidden='b* s2 f'))
    assert wrong.network_bytes > right.network_bytes
    line = line_of(transformer.feed_forward, 'einshard(hidden, p.hidden)')
    others = [row for row in wrong.collectives if row.kind != 'all-reduce']
    near = {line, line_of(transformer.feed_forward, 'hidden = jax.nn.silu')}
    assert near & {short(row.source) for row in others}
    diff = right.diff(wrong)
    assert diff.arrays == ()
    added = [row for row, before, after in diff.collectives if not before]
    assert any(row.startswith(tuple(other.kind for other in others)) for row in added)


# --- intermediates --------------------------------------------------------------------------------


@sharded('b x -> b4 x 2', 'x y -> 4 x y2', 'y x -> 4 y2 x')
def between(x, w_in, w_out):
    def layer(x, _):
        with jax.named_scope('hidden'):
            y = jnp.tanh(x @ w_in)
        return einshard(y @ w_out, 'b x -> b8 x'), None

    return jax.lax.scan(layer, x, length=3)[0]


def test_the_newest_dump(tmp_path):
    for number in (9998, 10000, 9999):  # XLA pads numbers to four digits
        path = tmp_path / f'module_{number}.jit_f.0003.before_spmd-partitioning.txt'
        path.write_text(str(number))
    assert newest_dump(str(tmp_path), 'before_*spmd-partitioning*') == '10000'
    assert newest_dump(str(tmp_path), '.after_optimizations') == ''


def test_intermediates():
    report = explain(between, *MLP_SHAPES, mesh=EIGHT, intermediates=True, tries=0)
    found = {(row.path.split('/')[-1], row.array, row.placement) for row in report.intermediates}
    assert found == {
        ('dot_general', 'f32[16,64]', 'a b -> a4 b2'),
        ('tanh', 'f32[16,64]', 'a b -> a4 b2'),
        ('dot_general', 'f32[16,32]', 'a b -> a8 b'),
    }
    (tanh,) = [row for row in report.intermediates if row.path.endswith('tanh')]
    assert (tanh.path.split('/')[-2], tanh.bytes, tanh.sharded) == ('hidden', 4 * 4 * 32, True)
    assert short(tanh.source) == line_of(between, 'tanh')
    assert report == dataclasses.replace(
        explain(between, *MLP_SHAPES, mesh=EIGHT, tries=0), intermediates=report.intermediates
    )
    text = str(report)
    assert '\nintermediates\n  name ' in text
    assert 'hidden/tanh' in text
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


@pytest.mark.parametrize(
    ('text', 'expression'),
    [
        ('replicated', 'a b -> 8 a b'),
        ("mesh['d0'=2,'d1'=2,'d2'=2], replicated", 'a b -> 8 a b'),
        ('devices=[4,2]<=[8]', 'a b -> a4 b2'),
        ('devices=[2,4]<=[4,2]T(1,0)', 'a b -> b4 a2'),
        ('devices=[4,1,2]<=[8] last_tile_dim_replicate', 'a b -> a4 b 2'),
        ('devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate', 'a b -> 4 a b2'),
        ('devices=[8,1]0,1,2,3,4,5,6,7', 'a b -> a8 b'),
        ("mesh['d0'=2,'d1'=2,'d2'=2], [{'d0', 'd1'}, {'d2'}]", 'a b -> a4 b2'),
        ("mesh['d0'=2,'d1'=2,'d2'=2], [{}, {'d2'}]", 'a b -> 4 a b2'),
        ("mesh['axis_0'=8], [{'axis_0':(2)4}, {'axis_0':(1)2}]", 'a b -> b2 a4'),
        ("mesh['x'=2,'y'=4], device_ids=(0,2,4,6,1,3,5,7), [{'y'}, {'x'}]", 'a b -> a4 b2'),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)), [{'y'}, {}]", 'a b -> a4 b 2'),
        ('manual', None),
        ('devices=[8,1]0,1,2,3,4,5,7,6', None),
    ],
)
def test_shardings_as_xla_writes_them(text, expression):
    mesh = make_sharding('a -> a*', mesh=EIGHT).mesh
    (sharding,) = read_shardings(SimpleNamespace(attributes=f'sharding={{{text}}}'), [2], mesh)
    assert (sharding and describe_named(sharding, 2)) == expression


def test_intermediates_compile_nothing():
    explain(between, *MLP_SHAPES, mesh=EIGHT, tries=0)
    with counting() as counts:
        report = explain(between, *MLP_SHAPES, mesh=EIGHT, intermediates=True, tries=0)
    assert len(report.intermediates) == 3
    assert counts.compiled == []


def test_a_program_without_intermediates():
    assert explain(lambda x: x + 1, struct(3), intermediates=True).intermediates == ()


def test_nothing_of_a_program_is_kept():
    def kept():
        gc.collect()
        modules = [str(getattr(type(o), '__module__', '')) for o in gc.get_objects()]
        return [name for name in modules if name.startswith('einshard._program')]

    explain(between, *MLP_SHAPES, mesh=EIGHT, tries=0)
    before = len(kept())
    explain(between, *MLP_SHAPES, mesh=EIGHT, tries=0)
    explain(rematerialized, struct(16, 16), struct(16, 16), mesh=EIGHT, tries=0)
    assert len(kept()) == before


# --- text, HTML and differences -----------------------------------------------------------------


def product(x, w):
    return x @ w


@pytest.fixture(scope='module')
def small():
    decorate = sharded('x y -> x* y', 'y z -> y z4 *', out='x z -> x* z', mesh=EIGHT)
    return explain(decorate(product), struct(64, 32), struct(32, 16))


def test_text(small):
    memory, line = small.memory, line_of(product, 'x @ w')
    assert memory.arguments == 8 * 32 * 4 + 32 * 4 * 4
    shown = str(small)
    known, _, resources = shown.partition('\non each device\n')
    expected = f"""\
product on 8 devices (cpu)

arguments
  path  array           placement      on a device
  x     float32[64,32]  x y -> x8 y        1.0 KiB
  w     float32[32,16]  y z -> y z4 2        512 B

results
  path    array           placement    on a device
  result  float32[64,16]  x z -> x8 z        512 B

collectives
  runs  kind        array       groups  along     sent  line
     1  all-gather  f32[32,16]  2 of 4  z      1.5 KiB  {line}
        of w
"""
    assert known == expected
    assert resources.startswith('  sent in one run: 1.5 KiB\n  memory: ')
    temporaries = f'temporaries {memory.temporaries / 1024:.1f} KiB'
    assert f'arguments 1.5 KiB, results 512 B, {temporaries}' in resources
    assert repr(small) == shown


def test_collectives_are_shown_as_in_the_report(small):
    text = str(small.collectives)
    assert text == repr(small.collectives)
    assert f'\n\n{text}\n\n' in str(small)
    assert text.startswith('collectives\n  runs  kind ')
    assert small.collectives._repr_html_().count('<table') == 1
    assert str(type(small.collectives)()) == 'collectives\n  none'


def test_collectives_of_both_passes_in_one_row():
    def product(x, w):
        return x @ w

    @sharded('* b d', 'd f*', 'f* d', mesh=EIGHT)
    def gradient(x, up, down):
        def mlp(x):
            return product(jax.nn.relu(product(x, up)), down)

        return jax.grad(lambda x: mlp(mlp(x)).sum())(x)

    collectives = explain(gradient, struct(64, 32), struct(32, 64), struct(64, 32)).collectives
    assert [row.is_backward for row in collectives if row.role == 'activations'] == [False, True]
    assert '     2  all-reduce' in str(collectives)
    assert 'of activations (1 of 2 backward)' in str(collectives)


def test_to_dict_is_json(small, right):
    for report in (small, right):
        plain = report.to_dict()
        assert json.loads(json.dumps(plain)) == plain
    plain = small.to_dict()
    assert plain['arguments'][0] == {
        'path': 'x',
        'shape': [64, 32],
        'dtype': 'float32',
        'placement': 'x y -> x8 y',
        'bytes': 4 * 8 * 32,
        'sharded': True,
        'source': None,
    }
    assert plain['counts'] == dict(small.collectives.counts)
    assert plain['network_bytes'] == small.network_bytes
    assert plain['memory']['arguments'] == small.memory.arguments


def test_html(small):
    html = small._repr_html_()
    assert html.count('<table') == html.count('</table>') == 3
    assert 'x y -&gt; x8 y' in html
    assert '-> ' not in html
    for text in ('product on 8 devices (cpu)', 'all-gather', 'float32[64,32]', 'memory: '):
        assert text in html


def test_rich_has_the_text_in_color(small):
    console_module = pytest.importorskip('rich.console')
    plain, colored = io.StringIO(), io.StringIO()
    console_module.Console(file=plain, width=120).print(small)
    console_module.Console(file=colored, width=120, force_terminal=True).print(small)
    assert [line.rstrip() for line in plain.getvalue().splitlines()] == str(small).splitlines()
    assert '\x1b[1m' in colored.getvalue()


def test_no_line_is_wider_than_a_hundred_columns(right):
    assert max(map(len, str(right).splitlines())) <= 100


def test_a_model_is_shown_in_few_lines(right):
    """Layers are folded into one line, and so are weights with their moments."""
    assert len(right.arguments) == 38
    text = str(right)
    assert 'state/{weights,mean,square}/layers/q ' in text
    assert len(text.splitlines()) < 55


def test_diff():
    before, after = (
        explain(sharded('x y*', w, out='* x z')(product), struct(16, 32), struct(32, 16))
        for w in ('y z -> y* z', 'y z -> y z*')
    )
    same, diff = before.diff(before), before.diff(after)
    assert (bool(same), str(same)) == (False, 'no difference')
    assert diff
    assert diff.arrays == (('w', "float32[32,16] 'y z -> y16 z'", "float32[32,16] 'y z -> y z16'"),)
    lines = str(diff).splitlines()
    assert lines[0] == "  w: float32[32,16] 'y z -> y16 z'  =>  float32[32,16] 'y z -> y z16'"
    line = line_of(product, 'x @ w')
    sent = f'{before.network_bytes / 1024:.1f} KiB'
    assert f'- all-reduce f32[16,16], 1 of 16 along y: 1 (-{sent}, at {line})' in lines
    assert ('sent in one run', before.network_bytes, after.network_bytes) in diff.numbers


@pytest.mark.parametrize(
    ('argument', 'paths'),
    [
        (struct(16, 16), ['result']),
        ({'result': struct(16, 16)}, ['result/result']),
        ({'a/b': struct(16, 16), 'a': {'b': struct(16, 16)}}, ['result/a/b'] * 2),
    ],
)
def test_diff_of_arrays_with_the_same_path(argument, paths):
    def double(result):
        return jax.tree.map(lambda x: 2 * x, result)

    before, after = (
        explain(sharded(spec, out='x16 y')(double), argument) for spec in ('x16 y', 'x y16')
    )
    changes = "float32[16,16] 'x y -> x16 y'", "float32[16,16] 'x y -> x y16'"
    assert before.diff(after).arrays == tuple((path, *changes) for path in paths)


# --- bad input ----------------------------------------------------------------------------------


def failing(function, *args, **kwargs):
    error = refusal(explain, function, *args, **kwargs)
    return str(error), str(error.__cause__)


def test_arguments_that_do_not_match():
    text, _ = failing(step, struct(3, 4))
    assert text.endswith('  parameters: w, x, *, rate=1.0\n  arguments:  float32[3,4]')
    text, _ = failing(jax.jit(step), 1, 2, 3)
    assert text.startswith('the arguments do not match the parameters of step: too many')


def test_functions_that_cannot_be_traced():
    text, cause = failing(step, struct(3, 4), struct(3, 5))
    assert text.startswith('tracing step with these arguments failed\n  JAX says:  ')
    line = line_of(step, 'x @ w')
    assert f'\n  arguments: float32[3,4], float32[3,5]\n  line:      {line}' in text
    assert 'dot_general' in cause
    assert 'truth value' in failing(jax.jit(lambda x: 1 if x else 2), struct(3))[1]


def test_specs_that_do_not_fit_are_errors_as_in_a_call():
    f = sharded('a b -> a* b')(lambda x: x)
    assert failing(f, struct(15, 2))[0].startswith("axis 'a' (size 15) is not divisible by 16")
    assert failing(f, struct(16, 2), mesh=3)[0].startswith('mesh= must be a Mesh, an AbstractMesh')


def test_functions_that_do_not_compile():
    f = jax.jit(lambda x: x, compiler_options={'xla_no_such_option': 1})
    text, cause = failing(f, struct(2))
    assert text.startswith('<lambda> does not compile\n  the compiler says: ')
    assert 'xla_no_such_option' in text
    assert 'xla_no_such_option' in cause


def test_a_compiler_that_does_not_show_its_program(monkeypatch):
    """A report must not say 'no collectives'."""
    monkeypatch.setattr(jax.stages.Compiled, 'as_text', lambda self: None)
    arguments = struct(2, 2), struct(2, 2)
    compiled = jax.jit(step).lower(*arguments).compile()
    for name, error in (
        ('step', refusal(explain, step, *arguments)),
        ('the program', refusal(explain, compiled)),
        # not an error about collectives that are not allowed
        ('step', refusal(assert_collectives, step, *arguments, allowed=())),
    ):
        reason = 'the backend does not expose the compiled program'
        assert str(error) == f'cannot read the collectives of {name}: {reason}'


# --- parts --------------------------------------------------------------------------------------


def oracle_groups(sizes, along):
    """The groups of devices whose coordinates differ only along these mesh axes."""
    groups = {}
    for device, coordinates in enumerate(np.ndindex(*sizes)):
        key = tuple(i for axis, i in enumerate(coordinates) if axis not in along)
        groups.setdefault(key, []).append(device)
    return tuple(map(tuple, groups.values()))


@pytest.mark.parametrize('sizes', [(2, 2, 2), (4, 2), (3, 2, 2), (2, 1, 4), (16,)])
def test_groups_along_mesh_axes(sizes):
    mesh = AbstractMesh(sizes, tuple('abcd'[: len(sizes)]))
    long_axes = [i for i, size in enumerate(sizes) if size > 1]
    for bits in range(1, 2 ** len(long_axes)):
        along = [axis for i, axis in enumerate(long_axes) if bits >> i & 1]
        groups = oracle_groups(sizes, along)
        expected = tuple('abcd'[axis] for axis in along)
        for same in (groups, groups[::-1], tuple(group[::-1] for group in groups)):
            assert mesh_axes_of(same, mesh) == expected
    assert mesh_axes_of((), mesh) == tuple('abcd'[axis] for axis in long_axes)


def test_groups_along_no_mesh_axes():
    mesh = AbstractMesh((4, 2), ('a', 'b'))
    half_of_a = (0, 2), (1, 3), (4, 6), (5, 7)
    for groups in (half_of_a, ((0, 3), (1, 2), (4, 7), (5, 6)), ((0,), (1,))):
        assert mesh_axes_of(groups, mesh) is None


@pytest.mark.parametrize(
    ('pairs', 'expected'),
    [
        (((0, 1), (2, 3)), ('b',)),
        (((0, 2), (2, 4)), ('a',)),  # device 6 sends nothing
        (((0, 1), (2, 4)), ('a', 'b')),
        (((0, 3),), ('a', 'b')),
        (((5, 5),), ()),
    ],
)
def test_mesh_axes_between_the_devices_of_a_permute(pairs, expected):
    assert mesh_axes_between(pairs, AbstractMesh((4, 1, 2), ('a', 'one', 'b'))) == expected


@pytest.mark.parametrize(
    ('before', 'after', 'expected'),
    [
        ('a b -> a@(x,y) b', 'a b -> a@(y,x) b', 'x,y'),
        ('a b -> a4 b4', 'a b -> b4 a4', 'all'),
    ],
)
def test_permute_that_transposes_the_devices(before, after, expected):
    """The devices of the diagonal stay; the other twelve are six pairs."""
    mesh = device_mesh(x=4, y=4) if '@' in before else device_mesh()
    [row] = explain(sharded(before, out=after, mesh=mesh)(jnp.copy), struct(16, 16)).collectives
    assert (row.kind, row.groups, row.group_size) == ('collective-permute', 6, 2)
    assert row.along == expected


def test_mesh_axes_in_words():
    every = ('d0', 'd1', 'd2')
    mesh = AbstractMesh((2, 2, 2), every, axis_types=(AxisType.Auto,) * 3)
    array_axes = {'b': [('d0', 'd1')], 'h': [('d2',)], 'k': [('d2',)]}  # and what shards each
    many = {name: [('d2',)] for name in 'vwxyz'}
    for mesh_axes, sharded_axes, text in (
        (('d2',), array_axes, 'h|k'),
        (('d0', 'd1'), array_axes, 'b'),
        (every, array_axes, 'b,h'),
        (('d1',), array_axes, 'd1'),
        (every, {}, 'all'),
        (None, array_axes, ''),
        (('d2',), many, 'v|w|x|..'),
    ):
        assert axes_text(mesh_axes, mesh, sharded_axes) == text


@pytest.mark.parametrize(
    'expression', ['a b -> a4 b2', 'a b -> b2 a4', 'a b -> a2 b2 a2', 'a b -> 2 a b4']
)
def test_shardings_of_blocks(expression):
    sharding = make_sharding(expression, mesh=EIGHT)
    indices = sharding.devices_indices_map((8, 8))
    blocks = []
    for axis, step in enumerate(sharding.shard_shape((8, 8))):
        starts = [indices[device][axis].start or 0 for device in sharding.mesh.devices.flat]
        blocks.append([start // step for start in starts])
    found = sharding_of_blocks(blocks, sharding.mesh)
    assert found.is_equivalent_to(sharding, 2)
    assert sharding_of_blocks([[0, 1, 1, 0, 2, 2, 3, 3], [0] * 8], sharding.mesh) is None


def test_paths_of_equal_arrays_are_folded():
    paths = [f'{i}/{name}' for i in range(12) for name in ('q', 'k', 'b')] + ['embed', '12/q']
    arrays = ['matrix', 'matrix', 'vector'] * 12 + ['matrix', 'other']
    patterns = fold(paths, arrays)
    assert [pattern for pattern, _ in patterns] == ['0-11/{q,k}', '0-11/b', 'embed', '12/q']
    assert sorted(i for _, numbers in patterns for i in numbers) == list(range(len(paths)))
    for pattern, numbers in patterns:
        assert len({arrays[i] for i in numbers}) == 1, pattern
    assert [pattern for pattern, _ in fold(paths[:5], arrays[:5])] == paths[:5]


@pytest.mark.parametrize(
    ('paths', 'pattern'),
    [
        (['block_1/w', 'block_0/w', 'block_2/w'], 'block_0-2/w'),  # as Flax names layers
        (['block_0/q', 'block_0/k', 'block_1/q', 'block_1/k'], 'block_0-1/{q,k}'),
        (['norm/w', 'block_0/w', 'block_1/w', '2/w', '3/w'], '{norm,block_0-1,2-3}/w'),
        (['block_0/w', 'block_2/w'], '{block_0,block_2}/w'),
        (['block_/w', 'block_0/w', 'block_1/w'], '{block_,block_0-1}/w'),
        (['block_00/w', 'block_01/w'], '{block_00,block_01}/w'),
        (['linear1/w', 'linear2/w'], '{linear1,linear2}/w'),
    ],
)
def test_folded_numbers(paths, pattern):
    assert fold_paths(paths) == [pattern]


def test_reports_are_frozen(small):
    with pytest.raises(dataclasses.FrozenInstanceError):
        small.name = 'other'


# --- arrays named by collectives ----------------------------------------------------------------


def train(params, x, clip):
    def loss(params):
        y = x
        for layer in params['layers']:
            y = jnp.tanh(y @ layer['w'])
        return (y**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1, clip / norm)
    return value, jax.tree.map(lambda p, g: p - scale * g, params, grads)


@pytest.mark.parametrize('weights', ['i o -> * i o', 'i o -> i* o'])
def test_collectives_name_the_weights_and_results(weights):
    params = {'layers': [{'w': struct(32, 64)}, {'w': struct(64, 16)}]}
    step = sharded(weights, 'b d -> b* d', None, out=('... -> * ...', weights), mesh=jax.devices())
    report = explain(step(train), params, struct(64, 32), struct())
    paths = {}
    for row in report.collectives:
        paths.setdefault(row.kind, set()).update(row.of)
    given, updated = ({f'{at}/layers/{i}/w' for i in (0, 1)} for at in ('params', 'result/1'))
    if weights == 'i o -> * i o':  # data parallelism: sums gradients, and 4 B of loss
        assert paths == {'all-reduce': updated}
        assert 'of result/1/layers/0-1/w (gradients)' in str(report)
    else:
        assert paths['all-gather'] == given
        assert updated <= paths.get('reduce-scatter', set()) | paths['all-reduce']
        assert re.search(r'\n        of params/layers/(0|1|0-1)/w\n', str(report))
        html = report._repr_html_().replace('<wbr>', '')
        assert re.search(r'>params/layers/(0|1|0-1)/w</td>', html)


def test_the_sum_for_a_norm_of_gradients_names_no_gradient():
    text = """HloModule jit_f, num_partitions=4

%scaled (g: f32[8], n: f32[]) -> (f32[8], f32[8]) {
  %g = f32[8]{0} parameter(0)
  %n = f32[] parameter(1)
  %each = f32[8]{0} broadcast(%n), dimensions={}
  %by = f32[8]{0} multiply(%g, %each)
  ROOT %two = (f32[8]{0}, f32[8]{0}) tuple(%by, %each)
}

ENTRY %main (g: f32[8], h: f32[8], m: f32[]) -> (f32[8], f32[8]) {
  %g = f32[8]{0} parameter(0)
  %h = f32[8]{0} parameter(1)
  %m = f32[] parameter(2)
  %sums = (f32[8]{0}, f32[8]{0}) all-reduce(%g, %h), replica_groups={{0,1,2,3}}, to_apply=%add
  %sum = f32[8]{0} get-tuple-element(%sums), index=0
  %norm = f32[] all-reduce(%m), replica_groups={{0,1,2,3}}, to_apply=%add
  %fused = (f32[8]{0}, f32[8]{0}) fusion(%sum, %norm), kind=kLoop, calls=%scaled
  %first = f32[8]{0} get-tuple-element(%fused), index=0
  %second = f32[8]{0} get-tuple-element(%fused), index=1
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%second, %first)
}
"""
    uses = output_uses(Graph(HloModule(text)))
    assert {node.name: set(found) for node, found in uses.items() if 'all' in node.opcode} == {
        'sums': {1}
    }


def test_a_broken_promise_is_a_finding():
    f = sharded('x y -> x y*', 'y z -> y* z', mesh=jax.devices(), collectives='all-gather')(product)
    arguments = struct(16, 16), struct(16, 16)
    text = 'collectives= allows any number of all-gathers, but the program has 1 all-reduce'
    assert findings_of(explain(f, *arguments)) == [('promise broken', text, line_of(product, '@'))]
    kept = sharded('x y -> x y*', 'y z -> y* z', mesh=jax.devices(), collectives='all-reduce')
    assert not explain(kept(product), *arguments).findings


def test_equal_findings_are_printed_once():
    report = explain(lambda x: x, 1.0)
    twice = Finding('no effect', 'this changes nothing', 'a.py:1')
    report = dataclasses.replace(report, findings=(twice, Finding('replicated', 'x'), twice))
    end = '\nfindings\n  - a.py:1: this changes nothing (2 times)\n  - x'
    assert str(report).endswith(end)


def test_numbers_with_the_same_text_are_not_a_difference():
    report = explain(lambda x: x, 1.0)
    flops = [dataclasses.replace(report, flops=n) for n in (776208384.0, 776306688.0, 8e8)]
    assert not flops[0].diff(flops[1])
    assert str(flops[0].diff(flops[2])) == '  flops: 776 Mflop => 800 Mflop (x 1.03)'


def test_paths_of_string_keys():
    """As in seqax, whose dataclasses are registered with plain strings as keys."""

    class Pair:
        def __init__(self, up, down):
            self.up, self.down = up, down

    jax.tree_util.register_pytree_with_keys(
        Pair,
        lambda pair: ([('up', pair.up), ('down', pair.down)], None),
        lambda _, children: Pair(*children),
    )
    state = Pair({'w': [struct(16, 32)]}, Pair(struct(32, 16), struct(8, 4)))

    def step(state, x, *, other):
        return jax.tree.map(lambda a: a * 2, (state, other)), x

    leaves = jax.tree_util.tree_leaves_with_path(state)
    keys = [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves]
    assert keys == ['up/w/0', 'down/up', 'down/down']
    expected = [*(f'state/{key}' for key in keys), 'x', 'other/up', 'other/down']
    given = {'other': Pair(struct(4, 4), struct(2, 2))}
    jitted = jax.jit(step)
    lowered = jitted.lower(state, struct(8), **given)
    for report in (
        explain(jitted, state, struct(8), **given),
        explain(lowered),
        explain(lowered.compile()),
    ):
        assert [row.path for row in report.arguments] == expected
    assert [row.path for row in report.results[:3]] == [f'result/0/0/{key}' for key in keys]


def test_control_characters_in_paths_are_replaced():
    rich = pytest.importorskip('rich.console')
    tree = {'\x1b[2Jw\r\n': np.ones((16, 4), np.float32), 'b\nc': np.ones(4, np.float32)}

    def report_of(spec, mesh):
        f = sharded({'\x1b[2Jw\r\n': spec, 'b\nc': None}, mesh=mesh)
        return explain(f(lambda params: jax.tree.map(jnp.sum, params)), tree)

    report, other = report_of('a* b', EIGHT), report_of('a b*', EIGHT[:4])
    console = rich.Console(record=True, width=100, file=io.StringIO())
    console.print(report)
    shown = (str(report), report._repr_html_(), console.export_text(), golden_text(report))
    for text in (*shown, str(report.diff(other))):
        assert not re.search(r'[\x00-\x09\x0b-\x1f\x7f-\x9f]', text)
        assert '\ufffd[2Jw' in text
        assert 'b c' in text or text not in shown
    assert [row.path for row in report.arguments] == ['params/\x1b[2Jw\r\n', 'params/b\nc']


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    w: jax.Array

    @sharded(x='batch* d', out='batch* f')
    def __call__(self, x):
        return x @ self.w


@dataclasses.dataclass
class NotSharded(Linear):
    def __call__(self, x):
        return x @ self.w


def test_modules():
    x, linear = np.ones((32, 8), np.float32), Linear(jnp.ones((8, 4)))
    report = explain(linear, x)
    assert report.name == 'Linear'
    assert [row.path for row in report.arguments] == ['self/w', 'x']
    assert explain(linear.__call__, x).arguments == report.arguments
    compared = [row.path for row in check_same(linear, x).rows]
    assert compared == ['result', 'gradient of self/w', 'gradient of x']
    error = refusal(explain, NotSharded(linear.w), x)
    assert error.facts['instead'] == 'pass NotSharded as an argument: lambda f, *args: f(*args)'


def test_parameters_with_names_of_options():
    """Arguments bound by functools.partial are those of the call, with its specs and options."""

    @sharded('b x -> b* x', '... -> * ...', static_argnames='chip', donate_argnames='x')
    def step(x, mesh, chip='a'):
        return (x * mesh if chip == 'b' else x).sum()

    x, scale = jax.ShapeDtypeStruct((16, 8), 'float32'), jax.ShapeDtypeStruct((), 'float32')
    call = functools.partial(step, mesh=scale, chip='b')
    assert str(explain(call, x)) == str(explain(step, x, scale, 'b'))
    assert_collectives(call, x, allowed={'all-reduce': 1})
    assert 'donate_argnums=(0,)' in to_jax(call, x)
    # jit makes constants of what a partial of another function binds, but not of shapes
    plain = functools.partial(lambda x, mesh, chip: x * mesh * len(chip), mesh=scale, chip='b')
    assert [row.path for row in explain(plain, x).arguments] == ['x', 'mesh']


@pytest.mark.parametrize(
    ('command', 'given'),
    [
        (assert_collectives, {'allowed': ()}),
        (check_same, {}),
        (explain, {}),
        (plan, {'chip': 'TPU v5e'}),
        (profile, {}),
        (to_jax, {}),
    ],
)
def test_errors_name_parameters_that_are_options(command, given):
    """A parameter with the name of an option is missing, as the option has taken its value."""
    parameters = inspect.signature(command).parameters.values()
    for name in (each.name for each in parameters if each.kind is each.KEYWORD_ONLY):

        def step(*_):
            raise AssertionError

        one = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        step.__signature__ = inspect.Signature([one])
        error = refusal(command, step, **given)
        assert error.facts[f'parameter {name}'].startswith(f'functools.partial(step, {name}=')
    step.__signature__ = inspect.Signature([one.replace(name='other')])
    assert 'parameter other' not in refusal(command, step, **given).facts


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'copied',
    [copy.copy, copy.deepcopy, lambda report: pickle.loads(pickle.dumps(report))],
    ids=['copy', 'deepcopy', 'pickle'],
)
@pytest.mark.parametrize('tries', [0, 2])
def test_reports_are_data(copied, tries):
    mesh = jax.make_mesh((8,), ('data',), devices=jax.devices()[:8], axis_types=(AxisType.Auto,))

    def local(x, w):  # pickle refuses it
        return einshard(x, '... -> ...', mesh=mesh) @ w

    x = einshard(jax.ShapeDtypeStruct((512, 512), jnp.float32), 'b d -> b@data d', mesh=mesh)
    report = explain(
        local, x, jax.ShapeDtypeStruct((512, 512), jnp.float32), tries=tries, chip='v5e'
    )
    other = copied(report)
    assert other == report
    assert str(other) == str(report)
    assert other.to_dict() == report.to_dict()
    if tries:
        assert report.patch()
        for method in (other.patch, other.fixed_function, other.try_more):
            with pytest.raises(EinshardError, match='has its data, but not its function'):
                method()


def test_all_lines_of_an_error_that_lists_something():
    def wrong(x):
        raise ValueError('these sizes differ:\n  a: 1\n  b: 2')

    def short(x):
        raise ValueError('these sizes differ\n  a: 1')

    for function, says in (
        (wrong, 'these sizes differ:\n  a: 1\n  b: 2'),
        (short, 'these sizes differ'),
    ):
        with pytest.raises(EinshardError) as error:
            explain(function, np.ones(3))
        assert error.value.facts['JAX says'] == says


def test_axes_of_groups_that_the_program_does_not_list():
    assert along_text((), (), [mesh_of(data=16)], {}) == ''


# --- sets, whose order differs between processes --------------------------------------------------


def test_findings_about_the_network_between_slices():
    names = 'abcdefghij'  # a set of these has their order once in 3 million processes
    mesh = AbstractMesh((2,) * 11, (*names, 'inner'))
    collectives = [
        SimpleNamespace(device_groups=((0, 1),), total_bytes=8, mesh_axes=frozenset([name]))
        for name in names
    ]
    facts = SimpleNamespace(mesh=mesh, slices=[0, 1], collectives=collectives)
    texts = [finding.text for finding in slow_network(facts)]
    assert texts == [
        f'8 B are sent along {name} between slices, and 0 B along inner within them'
        for name in names
    ]


def test_devices_of_a_sharding_without_a_mesh():
    devices = jax.devices()
    assert _devices([SimpleNamespace(device_set={*devices})]) == devices
