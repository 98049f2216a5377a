"""The findings of explain: each planted mistake is found, and fixed as suggested."""

import functools
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import mistakes
import modules
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from mistakes import BOTH, FSDP, MEGATRON, Choices, arguments, make_step
from placed import mesh_of, struct, struct_on

from einshard import (
    axis_rules,
    device_mesh,
    einshard,
    explain,
    per_device,
    sharded,
    topology,
)

PLATFORMS = ['cpu', pytest.param('tpu', marks=pytest.mark.slow)]
ALONG_S = 'b s d -> b@data s@tensor d'
WITHOUT_DATA = {name: spec.replace('@data', '') for name, spec in FSDP.items()}


def mesh_for(c, platform='cpu'):
    """16 devices, along the mesh axes that the choices name."""
    axes = {'data': 4, 'tensor': 4} if 'tensor' in str(c) else {'data': 16}
    if platform == 'tpu':
        pytest.importorskip('libtpu')
        return topology('v5e:4x4', **axes)
    return device_mesh(jax.devices()[:16], **axes)


REPORTS = {}


def report_of(c, mesh=None):
    """The report of a step with these choices, cached: fixed programs are often correct ones."""
    mesh = mesh or mesh_for(c)
    key = re.sub("'[^']* -> ", "'", str(c)), mesh  # in the short form
    if key not in REPORTS:
        REPORTS[key] = explain(make_step(c, mesh), *arguments(c.layers), tries=0)
    return REPORTS[key]


def sized_for(platform, c):
    """The choices and the layers in paths: one for TPU, where two take seconds to compile."""
    return (c._replace(layers=1), '0') if platform == 'tpu' else (c, '0-1')


def found_in(report):
    return [finding.kind for finding in report.findings]


# --- correct programs ---------------------------------------------------------------------------

CORRECT = {
    'data': Choices(WITHOUT_DATA),
    'FSDP': Choices(FSDP),
    'FSDP with remat': Choices(FSDP, remat=True),
    'FSDP with microbatches': Choices(FSDP, microbatches=4),
    'ZeRO-1': Choices(WITHOUT_DATA, states=FSDP),
    'Megatron': Choices(MEGATRON),
    'FSDP and Megatron': Choices(BOTH),
    'sequence parallel': Choices(MEGATRON, embedded=ALONG_S, attended=ALONG_S, after=ALONG_S),
}


@pytest.mark.parametrize(
    'name',
    [
        *('FSDP with remat', 'FSDP with microbatches', 'FSDP and Megatron', 'sequence parallel'),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ('data', 'FSDP', 'ZeRO-1', 'Megatron')
        ),
    ],
)
def test_correct_programs_have_no_findings(name):
    report = report_of(CORRECT[name])
    assert found_in(report) == []
    assert report.network_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize('name', ['FSDP and Megatron', 'sequence parallel', 'ZeRO-1'])
def test_correct_programs_for_tpus_have_no_findings(name):
    c, _ = sized_for('tpu', CORRECT[name])
    assert found_in(report_of(c, mesh_for(c, 'tpu'))) == []


# --- planted mistakes ---------------------------------------------------------------------------


def line_of(text):
    """The line of the model that has this text."""
    lines = Path(mistakes.__file__).read_text(encoding='utf-8').split('\n')
    (found,) = [i for i, line in enumerate(lines, 1) if text in line]
    return f'mistakes.py:{found}'


@pytest.mark.parametrize('n_channels', [8, 64])
def test_grouped_convolutions_are_not_replicated_compute(n_channels):
    """XLA for CPU makes a dense convolution of the gradient."""

    @sharded('h w i o', 'b@data h w c', mesh=mesh_for('data'))
    def gradient(kernel, x):
        def loss(kernel):
            options = {'dimension_numbers': ('NHWC', 'HWIO', 'NHWC'), 'padding': 'SAME'}
            y = lax.conv_general_dilated(
                x, kernel, (1, 1), feature_group_count=n_channels, **options
            )
            return jnp.sum(y**2)

        return jax.grad(loss)(kernel)

    report = explain(gradient, struct(3, 3, 1, n_channels), struct(32, 16, 16, n_channels), tries=0)
    assert found_in(report) == []


def test_unsharded_states():
    wrong = report_of(Choices(FSDP, states=WITHOUT_DATA))
    (finding,) = wrong.findings
    assert finding.kind == 'unsharded states'
    assert 'are replicated, but their parameters state/w/{embed,head}' in finding.text
    right = report_of(CORRECT['FSDP'])
    states = [sum(row.bytes for row in r.arguments if '/m/' in row.path) for r in (wrong, right)]
    # but for the scales, which are replicated in both
    assert finding.bytes == states[0] - 2 * mistakes.D * 4


def test_a_replicated_result_that_feeds_the_next_step():
    wrong, right = report_of(Choices(FSDP, out=WITHOUT_DATA)), report_of(CORRECT['FSDP'])
    (finding,) = wrong.findings
    assert finding.kind == 'replicated result'
    assert finding.text.startswith('result/w/{embed,head}, result/w/layers/0-1/')
    assert right.network_bytes < wrong.network_bytes


# --- loops and sums -----------------------------------------------------------------------------


def varying(w):
    """The weight as varying over data, so that each device keeps its own gradients."""
    return jax.lax.pcast(w, 'data', to='varying')


@pytest.mark.parametrize(
    'update',
    [
        lambda x, i: x.at[i].add(1.0).T,
        lambda x, i: x.at[i].multiply(2.0)[:, :8],
        lambda x, i: x.at[i].min(0.0) @ x.T,
        lambda x, i: x.at[i].apply(jnp.sin).T,
        lambda x, i: jax.ops.segment_max(x, i, 8).T,
        lambda x, i: jax.grad(lambda x: x[i].sum())(x).T,
        lambda x, i: jnp.histogram(x[:, 0])[0][:3],
        lambda x, i: jax.lax.reduce(x, -jnp.inf, jnp.logaddexp, (1,))[:8],
    ],
)
def test_results_of_scatters_and_reductions_have_axes(update):
    """Their jaxprs combine two scalars."""
    update = sharded('b@data d', 'b@data', mesh=mesh_for(FSDP))(update)
    assert found_in(explain(update, struct(64, 64), struct(64, dtype=np.int32), tries=0)) == []


def test_gradients_that_are_reduced_for_each_microbatch():
    c, mesh = Choices(WITHOUT_DATA, microbatches=4), mesh_for(FSDP)
    wrong = report_of(c)
    (finding,) = wrong.findings
    assert finding.kind == 'summed in a loop'
    assert finding.text.startswith('the gradients for result/')
    assert 'along data in each of 4 iterations of a loop that only adds them up' in finding.text
    line = line_of('jax.lax.scan(accumulate')
    assert Path(finding.source).name == line
    weights = mistakes.tree(c.weights)

    @sharded({'w': weights, 'm': weights}, c.tokens, mesh=mesh)
    def step(state, tokens):
        @per_device('...', 'b@data s', out='...', mesh=mesh)
        def local_gradients(w, tokens):
            w = jax.tree.map(varying, w)
            g = mistakes.gradients(w, tokens, c._replace(embedded=None))
            return jax.lax.pmean(g, 'data')

        return mistakes.update(state['w'], state['m'], local_gradients(state['w'], tokens))

    fixed = explain(step, *arguments(), tries=0)
    assert found_in(fixed) == []
    assert fixed.network_bytes < wrong.network_bytes / 3


@pytest.mark.parametrize('platform', PLATFORMS)
def test_an_all_reduce_of_which_devices_keep_a_slice(platform):
    def build(expression):
        @sharded('b f@tensor', 'f@tensor d', out='b@tensor d', mesh=mesh)
        def scores(x, w):
            y = einshard(x @ w, expression)
            return jax.nn.softmax(y, axis=-1)

        return explain(scores, struct(512, 1024), struct(1024, 256), tries=0)

    mesh = mesh_for('tensor', platform)
    wrong = build('b d -> b d')
    (finding,) = [f for f in wrong.findings if f.kind == 'sliced all-reduce']
    assert finding.text == (
        'f32[512,256] is all-reduced along tensor, and each device keeps only a slice: the '
        'all-reduce sends 768.0 KiB, a reduce-scatter would send half of that'
    )
    fixed = build('b d -> b@tensor d')
    assert 'sliced all-reduce' not in found_in(fixed)
    if platform == 'tpu':  # on CPU, XLA makes no reduce-scatter
        assert fixed.network_bytes <= wrong.network_bytes // 2


@pytest.mark.parametrize('platform', PLATFORMS)
def test_an_all_reduce_of_which_devices_keep_a_slice_as_suggested(platform):
    """On TPU, XLA does not reduce-scatter here, with or without the constraint."""

    def build(expression):
        specs = ['b s x -> b@data s x', 'x f -> x f@tensor', 'f x -> f@tensor x', 'x@tensor y']

        @sharded(*specs, mesh=mesh_for('tensor', platform))
        def products(x, w, v, u):
            h = jax.nn.relu(jnp.einsum('bsx,xf->bsf', x, w))
            y = einshard(jnp.einsum('bsf,fx->bsx', h, v), expression)
            return jnp.einsum('bsx,xy->bsy', jax.nn.relu(y), u)

        shapes = (32, 128, 512), (512, 1024), (1024, 512), (512, 1024)
        return explain(products, *(struct(*s, dtype=jnp.bfloat16) for s in shapes), tries=0)

    before, after = build('b@data s x'), build('b@data s x@tensor')
    assert before.network_bytes == after.network_bytes
    assert 'sliced all-reduce' not in found_in(before) + found_in(after)


def decoder(before, tree=lambda w: w):
    """A loop over steps with one weight, as in inference. `tree` makes the argument of it."""

    @sharded('d@data f', 'b@data d', mesh=mesh_for('', 'tpu'))
    def decode(w, x):
        (w,) = jax.tree.leaves(w)
        w = w if before is None else einshard(w, before)

        def step(x, _):
            return jnp.tanh(einshard(x @ w, 'b d -> b@data d')), None

        return jax.lax.scan(step, x, length=8)[0]

    return explain(decode, tree(struct(2048, 2048)), struct(1024, 2048), tries=0)


def test_a_gather_in_a_loop_that_does_not_change_the_array():
    """On CPU, XLA moves it out of the loop."""
    wrong = decoder(None)
    (note,) = [note for note in wrong.notes if note.kind == 'cost']
    assert note.text.startswith('all-gather of w along data sends 60.0 MiB: ')
    assert note.reason.startswith('w has data on axis 0, and the carry of the loop ')
    fixed = decoder('d f -> 16 d f')
    assert found_in(fixed) == []
    assert fixed.network_bytes <= wrong.network_bytes // 4  # f32, where the loop had bf16


@pytest.mark.parametrize('platform', PLATFORMS)
def test_activations_that_checkpoint_sends_again(platform):
    """Two matrices per layer; the sum of the first product is needed again, that of the second not.

    Two microbatches: a device keeps results of all layers, for one microbatch at a time.
    """
    layers, microbatches, batch, d, f = 6, 2, 256, 64, 256
    specs = {'a': 'l d f@tensor', 'b': 'l f@tensor d', 'c': 'l d f@tensor', 'e': 'l f@tensor d'}
    weights = {name: struct(layers, *((d, f) if name in 'ac' else (f, d))) for name in specs}
    mesh = mesh_for('tensor', platform)

    def report_for(policy):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, w):
            x = x + checkpoint_name(jax.nn.relu(x @ w['a']) @ w['b'], 'sum')
            return einshard(x + jax.nn.relu(x @ w['c']) @ w['e'], 'b@data d'), None

        @sharded(specs, 'm b@data d', out=specs, mesh=mesh)
        def gradients(w, batches):
            def add(total, x):
                gradient = jax.grad(lambda w: jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2))(w)
                return jax.tree.map(jnp.add, total, gradient), None

            return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), batches)[0]

        return explain(gradients, weights, struct(microbatches, batch, d), tries=0)

    before = report_for(jax.checkpoint_policies.nothing_saveable)
    (note,) = [note for note in before.notes if note.kind == 'sent again']
    shard = batch // 4 * d * 4
    assert note.text.endswith(f'; to save it takes {layers * shard / 2**10:.1f} KiB')
    assert note.bytes == microbatches * layers * 2 * shard * 3 // 4

    after = report_for(jax.checkpoint_policies.save_only_these_names('sum'))
    assert 'sent again' not in [note.kind for note in after.notes]
    assert after.network_bytes == before.network_bytes - note.bytes


@pytest.mark.parametrize('batch', [2**10, 900_000])
def test_nothing_is_saved_that_does_not_fit(batch):
    """For the backward pass, the loop keeps the input of each layer: 7 of 16 GiB."""
    layers, d = 8, 1024
    specs = {'a': 'l d f@tensor', 'b': 'l f@tensor d'}

    @jax.checkpoint
    def layer(x, w):
        x = x + jax.nn.relu(jax.nn.relu(x @ w['a']) @ w['b'])
        return einshard(x, 'b@data d'), None

    @sharded(specs, 'b@data d', out=specs, mesh=mesh_for('tensor'))
    def gradients(w, x):
        return jax.grad(lambda w: jnp.mean(lax.scan(layer, x, w)[0] ** 2))(w)

    weights = {name: struct(layers, d, d) for name in specs}
    report = explain(gradients, weights, struct(batch, d), chip='TPU v5e', tries=0)
    saved = layers * (batch // 4) * d * 4  # as much again, for the sums
    free = report.memory.capacity - report.memory.total
    assert free > 0
    assert ('sent again' in [note.kind for note in report.notes]) == (saved <= free)
    assert (saved <= free) == (batch == 2**10)


# --- constraints --------------------------------------------------------------------------------


def ruled(**rules):
    @sharded('b@data s', 'v d', mesh=mesh_for(FSDP))
    def embed(tokens, table):
        with axis_rules(d='', **rules):
            x = einshard(table[tokens], 'batch sequence d')
        return jnp.tanh(x)

    return explain(embed, struct(64, 32, dtype=np.int32), struct(256, 64), tries=0)


def test_names_without_a_rule():
    wrong = ruled(other='@data')
    (finding,) = [f for f in wrong.findings if f.kind == 'names without a rule']
    assert finding.text == (
        "'batch' has no axis rule, so this constraint gathers this axis of a value that is sharded "
        "as 'batch sequence d -> batch@data sequence d'"
    )
    fixed = ruled(batch='@data')
    assert found_in(fixed) == []
    assert fixed.network_bytes == 0


@pytest.mark.parametrize(
    ('rules', 'suggested'),
    [
        ({'embed': '@tensor'}, {'d': '@tensor'}),  # embed: d by another name
        ({'d': ''}, None),
        ({'sequence': '@tensor'}, None),  # instead of d
    ],
)
def test_names_without_a_rule_if_another_name_has_one(rules, suggested):
    def build(**rules):
        @sharded('b@data s x', 'x d@tensor', mesh=mesh_for('tensor'))
        def product(x, w):
            with axis_rules(batch='@data', **rules):
                return jnp.tanh(einshard(x @ w, 'batch sequence d'))

        return explain(product, struct(64, 32, 64), struct(64, 256), tries=0)

    wrong = build(**rules)
    assert ('names without a rule' in found_in(wrong)) == (suggested is not None)
    if suggested is not None:
        assert build(**rules, **suggested).network_bytes < wrong.network_bytes


# --- meshes -------------------------------------------------------------------------------------


def test_explicit_axes_have_findings_that_types_do_not_prevent():
    mesh = mesh_of(types=AxisType.Explicit, data=4, tensor=4)

    @sharded({'w': 'd f', 'm': 'd f'}, 'b@data d', mesh=mesh)
    def step(state, x):
        g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state['w'])
        m = 0.9 * state['m'] + g
        return {'w': state['w'] - m, 'm': m}

    state = {'w': struct(512, 1024), 'm': struct(512, 1024)}
    report = explain(step, state, struct(4096, 512), tries=0)
    notes = [note for note in report.notes if note.kind == 'cost']
    assert any('4 devices repeat the products in this line' in note.text for note in notes)


def test_a_cost_is_printed_with_its_line():
    report = report_of(Choices(MEGATRON | {'down': 'f d@tensor'}))
    page = ' '.join(str(report).partition('\nnotes\n')[2].split())
    note = next(note for note in report.notes if note.kind == 'cost')
    assert note.source is not None
    assert f'- {note.source.rpartition("/")[2]}: {note.text}' in page
    assert ' of the lower bounds of ' in note.text
    assert {note['suggestion'] for note in report.to_dict()['notes']} == {''}


# --- requested or inserted ----------------------------------------------------------------------


def product(x, w):
    return x @ w


def nested_product(**options):
    columns = PartitionSpec(None, 'tensor')
    return jax.shard_map(product, in_specs=(PartitionSpec(), columns), out_specs=columns, **options)


def recurrent(x, w):
    def step(h, x):
        return jnp.tanh(h @ w + x), None

    return jax.lax.scan(step, jnp.zeros(x.shape[1:]), x)[0]


def causes(report):
    return {(row.kind, row.cause) for row in report.collectives}


def test_collectives_of_a_shard_map_are_requested():
    @per_device('b d@tensor', 'd@tensor f', out='b f', mesh=mesh_for('tensor'))
    def product(x, w):
        return jax.lax.psum(x @ w, 'tensor')

    report = explain(product, struct(64, 64), struct(64, 64), tries=0)
    assert causes(report) == {('all-reduce', 'requested')}


def test_collectives_without_a_constraint_are_inserted():
    @sharded('b d@tensor', 'd@tensor f', mesh=mesh_for('tensor'))
    def product(x, w):
        return jnp.sum(x @ w)

    assert causes(explain(product, struct(64, 64), struct(64, 64), tries=0)) == {
        ('all-reduce', 'inserted')
    }
    rows = report_of(CORRECT['FSDP']).collectives
    gathers = {row.cause for row in rows if row.role == 'weights'}
    if jax.__version_info__ < (0, 12):  # later, they have only the name of the argument
        assert 'inserted' in gathers
    assert 'requested' not in gathers


def test_the_cause_is_unknown_if_a_constraint_may_have_lost_its_name():
    @sharded('b@data d', mesh=mesh_for(FSDP))
    def gathered(x):
        return jnp.tanh(einshard(jnp.cos(x), 'b d -> b d'))

    x = struct(64, 64)
    for report in (explain(gathered, x, tries=0), explain(gathered.lower(x), tries=0)):
        (row,) = report.collectives
        assert row.kind == 'all-gather'
        assert row.cause in ('requested', 'unknown')


@pytest.mark.parametrize('platform', PLATFORMS)
def test_a_constraint_of_an_argument_is_not_the_choice_of_the_compiler(platform):
    @sharded('b@data d', mesh=mesh_for(FSDP, platform))
    def gathered(x):
        return jnp.tanh(einshard(x, 'b d -> b d'))

    rows = explain(gathered, struct(64, 64), tries=0).collectives
    assert {row.cause for row in rows} <= {'requested', 'unknown'}


# --- several slices, and a real model -----------------------------------------------------------


def between_slices(**axes):
    pytest.importorskip('libtpu')

    @sharded('b@data d', 'd f@tensor', 'f@tensor d', mesh=topology('v5e:2x4', n_slices=2, **axes))
    def gradients(x, w_in, w_out):
        def loss(w):
            y = einshard(jnp.tanh(x @ w[0]) @ w[1], 'b d -> b@data d')
            return jnp.mean(jnp.tanh(y) ** 2)

        return jax.grad(loss)((w_in, w_out))

    return explain(gradients, struct(4096, 256), struct(256, 256), struct(256, 256), tries=0)


def test_a_mesh_axis_between_slices_that_sends_more_than_another():
    wrong = between_slices(tensor=2, data=2, unused=4)
    (finding,) = [f for f in wrong.findings if f.kind == 'slow network']
    assert 'are sent along tensor between slices, and ' in finding.text
    fixed = between_slices(data=2, tensor=2, unused=4)
    assert 'slow network' not in found_in(fixed)
    assert fixed.network_bytes == wrong.network_bytes


def test_the_same_constraint_twice_under_vmap():
    """Their shardings have no devices."""

    def twice(row):
        row = einshard(2 * row, 'd -> d@model')
        return einshard(row, 'd -> d@model')

    with jax.set_mesh(device_mesh(data=8, model=2)):
        report = explain(jax.jit(jax.vmap(twice, spmd_axis_name='data')), jnp.ones((8, 8)), tries=0)
    assert 'no effect' in {finding.kind for finding in (*report.findings, *report.notes)}


# --- what findings explain ----------------------------------------------------------------------


def apply(f, specs, *shapes, out=None, replicated_above=0, **axes):
    """The report of f on CPUs; notes speak of all replicated arrays."""
    options = {} if out is None else {'out': out}
    f = sharded(*specs, mesh=mesh_of(**axes), **options)(f)
    return explain(
        f, *[struct(*shape) for shape in shapes], replicated_above=replicated_above, tries=0
    )


def step_of(c):
    c = c._replace(layers=1)
    return explain(make_step(c, mesh_for(c)), *arguments(c.layers), replicated_above=0, tries=0)


def stacked(w, x):
    def loss(w, x):
        return jnp.sum(lax.scan(lambda x, w: (einshard(x @ w, 'b@data d'), None), x, w)[0])

    return w - jax.grad(loss)(w, x)


def moved(x):
    x = einshard(jnp.tanh(x), 'a b@q')
    return x @ x.T


# programs by the kind of a finding that accounts for collectives or arrays, or by their cost
EXPLAINING = {
    'no constraint after the lookup': lambda: step_of(Choices(BOTH, embedded=None)),
    'a weight over the wrong axis': lambda: step_of(Choices(MEGATRON | {'down': 'f d@tensor'})),
    'a loop over a sharded axis': lambda: apply(
        stacked, ['l@data d e', 'b@data d'], (16, 256, 256), (64, 256), out='l@data d e', data=16
    ),
    'a slice of a sharded axis': lambda: apply(
        lambda x, w: jnp.multiply(*jnp.split(x @ w, 2, -1)),
        ['b@data d', 'd f@tensor'],
        *((256, 512), (512, 1024)),
        data=2,
        tensor=8,
    ),
    'sliced all-reduce': lambda: apply(
        lambda x, w: jax.nn.softmax(einshard(x @ w, 'b d -> b d'), axis=-1),
        ['b f@tensor', 'f@tensor d'],
        *((512, 1024), (1024, 256)),
        out='b@tensor d',
        data=4,
        tensor=4,
    ),
    'summed in a loop': lambda: step_of(Choices(WITHOUT_DATA, microbatches=4)),
    'a full rematerialization': lambda: apply(moved, ['a@(p,q) b'], (64, 64), p=2, q=4),
    'gathered again': lambda: decoder(None),
    'names without a rule': lambda: ruled(other='@data'),
    'products that devices repeat': lambda: step_of(
        Choices(MEGATRON | dict.fromkeys('qkv', 'd h e'))
    ),
    'unsharded states': lambda: step_of(Choices(FSDP, states=WITHOUT_DATA)),
    'replicated result': lambda: step_of(Choices(FSDP, out=WITHOUT_DATA)),
}


@pytest.mark.parametrize('kind', EXPLAINING)
def test_notes_do_not_speak_of_what_a_finding_explains(kind):
    report = EXPLAINING[kind]()
    shown = {note.kind for note in report.notes} | {*found_in(report)}
    assert shown & {kind, 'cost', 'gathered again', 'moved elements'}, shown
    collectives = {c.name: c for c in report.collectives}
    arrays = {row.path: row for row in (*report.arguments, *report.results)}
    lines = {product.source for product in report.products}
    for finding in report.findings:
        assert finding.explains, finding
        assert {*finding.explains} <= {*collectives, *arrays, *lines}
        sent = sum(c.total_bytes for c in report.collectives if c.name in finding.explains)
        if sent:
            assert finding.bytes == sent
    named = Counter(name for finding in report.findings for name in finding.explains)
    assert all(named[name] <= 1 for name in collectives)  # not two findings about one
    # the bytes of notes are those of what is left
    of_notes = Counter()
    for note in report.notes:
        of_notes[note.kind] += note.bytes
    left = [c for c in report.collectives if c.name not in named]
    gathered = sum(c.total_bytes for c in left if c.kind == 'all-gather')
    assert of_notes['gathered again'] <= gathered
    assert of_notes['sent again'] <= sum(c.total_bytes for c in left if c.role == 'activations')
    replicated = sum(
        row.bytes for path, row in arrays.items() if not row.sharded and path not in named
    )
    assert of_notes['replicated'] <= replicated


@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('n', [1, 3])
def test_weights_that_each_call_of_a_module_gathers(platform, n):
    """A tower for `n` cameras. Stacking the images, as written here by hand, gathers once."""
    if platform == 'tpu':
        pytest.importorskip('libtpu')
    mesh = topology('v5e:2x4', fsdp=8) if platform == 'tpu' else mesh_of(fsdp=8)

    def placed(x):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec('fsdp')))

    def tower(w, x):
        def layer(x, w):
            return placed(x + jnp.tanh(x @ w[0]) @ w[1]), None

        return lax.scan(layer, x, w)[0]

    def apart(w, images):
        return sum((tower(w, image) ** 2).mean() for image in images)

    def stacked(w, images):
        return (tower(w, placed(jnp.concatenate(images))) ** 2).mean()

    def f32(shape, *spec):
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    w = f32((4, 128, 512), None, 'fsdp'), f32((4, 512, 128), None, 'fsdp')
    images = [f32((64, 128), 'fsdp')] * n
    report = explain(jax.jit(apart), w, images, tries=0)
    assert found_in(report) == ['gathered again'] * (n > 1)
    once = explain(jax.jit(stacked), w, images, tries=0)
    assert found_in(once) == []

    def gathered(report):
        return sum(c.total_bytes for c in report.collectives if c.of and c.of[0].startswith('w/'))

    assert gathered(report) == n * gathered(once)
    if n > 1:
        (finding,) = report.findings
        assert finding.text.startswith('w/0-1 are gathered 3 times in the forward pass, once for')
        assert finding.bytes == gathered(report)


@pytest.mark.parametrize('tries', [0, 4])
def test_an_interpreted_pallas_kernel_needs_per_device(tries):
    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    def step(x):
        block = pl.BlockSpec((128, x.shape[1]), lambda i: (i, 0))
        call = pl.pallas_call(
            double,
            grid=(x.shape[0] // 128,),
            in_specs=[block],
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            interpret=True,
        )
        return call(x + 1)

    mesh = mesh_of(jax.devices()[:8], data=8)
    x = einshard(jax.ShapeDtypeStruct((2048, 256), jnp.float32), 'b d -> b@data d', mesh=mesh)
    report = explain(step, x, tries=tries)
    assert report.network_bytes > 2**20
    for finding in report.findings:  # such as whole rows on each device
        assert finding.tried.bound < 0.97 * finding.tried.before.bound
    (note,) = [n for n in report.notes if n.kind == 'gathered for an operation']
    assert 'use per_device, which runs the kernel on the shards' in note.text
    # what the note says to write
    by_device = per_device('b d -> b@data d', out='b d -> b@data d', mesh=mesh, check_vma=False)
    assert (
        explain(by_device(step), jax.ShapeDtypeStruct(x.shape, x.dtype), tries=0).network_bytes == 0
    )


@pytest.mark.parametrize('tries', [0, 12])
def test_a_split_of_a_sharded_axis_is_noted_whatever_was_tried(tries):
    """No sharding makes the split cheaper; an axis of their own for the parts does."""
    mesh = mesh_of(data=2, tensor=4)
    shape = struct_on(mesh)

    def attend(x, parts, out):
        q, k, v = parts(x)
        return (jax.nn.relu(q) * k + v) @ out

    def by_split(x, w, out):
        return attend(x, lambda x: jnp.split(x @ w, 3, axis=-1), out)

    def by_axis(x, w, out):
        return attend(x, lambda x: jnp.moveaxis(jnp.einsum('bi,ipo->bpo', x, w), 1, 0), out)

    x, out = shape((4096, 2048), 'data'), shape((2048, 2048), 'tensor')
    w = shape((2048, 3 * 2048), None, 'tensor')
    report = explain(by_split, x, w, out, tries=tries)
    (note, *others) = [
        note
        for note in report.notes
        if note.kind in ('moved elements', 'gathered for an operation')
    ]
    assert not others
    permutes = [c for c in report.collectives if c.kind == 'collective-permute']
    assert len({c.mesh_axes for c in permutes}) == 2  # some steps involve only some devices
    assert note.bytes == sum(c.total_bytes for c in permutes)
    assert note.source.endswith(modules.line_of(by_split, 'jnp.split'))
    assert 'collective-permute of activations along tensor' in note.text
    assert 'the split at' in note.reason
    assert note.reason.endswith('give the parts an axis of their own')
    w = shape((2048, 3, 2048), None, None, 'tensor')
    report = explain(by_axis, x, w, out, tries=tries)
    assert 'moved elements' not in {note.kind for note in report.notes}
    assert {c.kind for c in report.collectives} == {'all-reduce'}


def test_a_suggestion_has_the_reason_of_what_it_lowers():
    """The line of the split also has the larger sum of the gradient of x."""
    mesh = mesh_of(data=2, tensor=4)
    shape = struct_on(mesh)

    def loss(params, x):
        def layer(x, w):
            q, k, v = jnp.split(x @ w['qkv'], 3, axis=-1)
            return x + (jax.nn.relu(q) * k + v) @ w['out'], None

        return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    qkv, out = shape((4, 128, 384), None, None, 'tensor'), shape((4, 128, 128), None, 'tensor')
    jitted = jax.jit(step, donate_argnums=0)
    report = explain(jitted, {'qkv': qkv, 'out': out}, shape((1024, 128), 'data'))
    [finding] = report.findings
    assert 'collective-permute' in finding.text
    assert 'the split at' in finding.reason
