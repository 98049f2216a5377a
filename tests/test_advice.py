"""What explain advises on planted mistakes, against the same step written right."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from mistakes import BOTH, FSDP, MEGATRON, Choices, arguments, make_step
from placed import struct

from einshard import device_mesh, einshard, explain, sharded, topology

CHIP = 'TPU v5e'
WITHOUT_DATA = {name: spec.replace('@data', '') for name, spec in FSDP.items()}


def mesh_for(c):
    """16 devices, along the mesh axes that the choices name."""
    axes = {'data': 4, 'tensor': 4} if 'tensor' in str(c) else {'data': 16}
    return device_mesh(jax.devices()[:16], **axes)


def seconds(report):
    """The sum of the lower bounds."""
    return sum(bound.seconds for bound in report.bounds)


def check_recovered(wrong, right, *values, chip=CHIP, share=0.8):
    """Checks that the advice on `wrong` wins this share of what `right` would.

    Returns the report, and the sum of the lower bounds of `right`.
    """
    report = explain(wrong, *values, chip=chip)
    best = seconds(explain(right, *values, chip=chip, tries=0))
    fixed = seconds(explain(report.fixed_function(), *values, chip=chip, tries=0))
    assert fixed <= seconds(report) - share * (seconds(report) - best)
    for finding in report.findings:
        assert finding.suggestion
        assert finding.tried.bound < finding.tried.before.bound
    return report, best


def without(*names):
    return MEGATRON | {name: MEGATRON[name].replace('@tensor', '') for name in names}


EMBED_OVER_D = MEGATRON | {'embed': 'v d@tensor'}
WRONG = {
    'no constraint after the lookup': (Choices(BOTH, embedded=None), Choices(BOTH)),
    'a weight over the wrong axis': (
        Choices(MEGATRON | {'down': 'f d@tensor'}),
        Choices(MEGATRON),
    ),
    'activations sharded like the table': (
        Choices(EMBED_OVER_D, embedded=None),
        Choices(EMBED_OVER_D),
    ),
    'attention that devices repeat': (Choices(without('q', 'k', 'v', 'o')), Choices(MEGATRON)),
    'feed-forward that devices repeat': (Choices(without('gate', 'up', 'down')), Choices(MEGATRON)),
    'a head that devices repeat': (Choices(without('head')), Choices(MEGATRON)),
    'microbatches that devices share': (
        Choices(WITHOUT_DATA, microbatches=4, in_blocks=True, embedded=None),
        Choices(WITHOUT_DATA, microbatches=4, in_blocks=True, parts='a b s -> a b@data s'),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', WRONG)
def test_a_mistake_in_a_train_step_is_recovered(name):
    wrong, right = WRONG[name]
    mesh = mesh_for(right)
    check_recovered(make_step(wrong, mesh), make_step(right, mesh), *arguments(wrong.layers))


def mlp(x, up, down):
    return jax.nn.relu(x @ up) @ down


def gated(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def residual(tokens, table, up, down):
    x = table[tokens]
    return x + mlp(x, up, down)


def trained(x, up, down):
    return jax.grad(lambda *weights: (mlp(x, *weights) ** 2).mean(), (0, 1))(up, down)


MLP = struct(16384, 512), struct(512, 2048), struct(2048, 512)
WEIGHTS = struct(512, 256), struct(256, 1024), struct(1024, 256)
LARGE = struct(512, 1024), struct(1024, 4096), struct(4096, 1024)  # of weights
# function, mesh axes, wrong and right specs, arguments, and what the first suggestion starts with
SMALL = {
    'a mesh axis that nothing uses': (
        mlp,
        {'data': 4, 'tensor': 2},
        ('b@data d', 'd@data f', 'f d@data'),
        ('b@(data,tensor) d', 'd@data f', 'f d@data'),
        MLP,
        'shard x with',
    ),
    'a weight over the wrong axis': (
        mlp,
        {'tensor': 8},
        ('b d', 'd f@tensor', 'f d@tensor'),
        ('b d', 'd f@tensor', 'f@tensor d'),
        LARGE,
        "shard down with 'f d -> f@tensor d'",
    ),
    'the other weight over the wrong axis': (
        mlp,
        {'tensor': 8},
        ('b d', 'd@tensor f', 'f@tensor d'),
        ('b d', 'd f@tensor', 'f@tensor d'),
        LARGE,
        "shard up with 'd f -> d f@tensor'",
    ),
    'two arguments, of which each alone makes it worse': (
        gated,
        {'tensor': 8},
        ('b d', 'd@tensor f', 'd@tensor f', 'f@tensor d'),
        ('b d', 'd f@tensor', 'd f@tensor', 'f@tensor d'),
        (LARGE[0], LARGE[1], *LARGE[1:]),
        "shard {gate,up} with 'd f -> d f@tensor'",
    ),
    'a batch that is not sharded': (
        residual,
        {'data': 8},
        ('b s', 'v d', 'd f', 'f d'),
        ('b@data s', 'v d', 'd f', 'f d'),
        (struct(64, 64, dtype=np.int32), *WEIGHTS),
        'shard tokens with',
    ),
    'a batch of training that is not sharded': (
        trained,
        {'data': 8},
        ('b d', 'd f', 'f d'),
        ('b@data d', 'd f', 'f d'),
        MLP,
        'shard x with',
    ),
}
TPU, GPU = 'v5e:2x4', 'h100:1x8'


@pytest.mark.parametrize(
    ('name', 'target'),
    [
        *((name, 'simulated') for name in SMALL),
        ('a batch that is not sharded', TPU),
        pytest.param('a weight over the wrong axis', TPU, marks=pytest.mark.slow),
        pytest.param('a weight over the wrong axis', GPU, marks=pytest.mark.gpu),
        pytest.param('a batch that is not sharded', GPU, marks=pytest.mark.gpu),
    ],
)
def test_a_mistake_is_recovered(name, target):
    function, axes, wrong, right, values, suggestion = SMALL[name]
    if target == TPU:
        pytest.importorskip('libtpu')
    is_simulated = target == 'simulated'
    mesh = device_mesh(jax.devices()[:8], **axes) if is_simulated else topology(target, **axes)
    wrong, right = (sharded(*specs, mesh=mesh)(function) for specs in (wrong, right))
    chip = CHIP if is_simulated else None
    report, best = check_recovered(wrong, right, *values, chip=chip, share=0.95)
    assert seconds(report) > 1.05 * best
    assert report.findings[0].suggestion.startswith(suggestion)


CORRECT = {
    'data': Choices(WITHOUT_DATA),
    'FSDP': Choices(FSDP),
    'FSDP with remat': Choices(FSDP, remat=True),
    'FSDP with microbatches': Choices(FSDP, microbatches=4),
    'ZeRO-1': Choices(WITHOUT_DATA, states=FSDP),
    'Megatron': Choices(MEGATRON),
    'FSDP and Megatron': Choices(BOTH),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', CORRECT)
def test_what_is_advised_on_correct_steps_is_cheaper(name):
    """These steps are small, so that other placements may be better: then that must be true."""
    c, values = CORRECT[name], arguments(2)
    report = explain(make_step(c, mesh_for(c)), *values, chip=CHIP)
    if report.findings:
        after = explain(report.fixed_function(), *values, chip=CHIP, tries=0)
        assert seconds(after) < 0.97 * seconds(report)


def test_what_was_ranked_and_compiled_is_said():
    mesh = device_mesh(jax.devices()[:8], tensor=8)
    wrong = sharded('b d', 'd f@tensor', 'f d@tensor', mesh=mesh)(mlp)
    report = explain(wrong, *MLP, chip=CHIP)
    assert re.fullmatch(r'\d+ changes ranked, \d+ compiled', report.total[-1])


def test_keys_of_random_numbers_are_sharded_by_their_own_axes():
    """In the compiled module, a key has one axis more."""
    mesh = device_mesh(jax.devices()[:8], data=4, tensor=2)

    def step(keys, x, w, v):
        mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
        return jnp.tanh((x * mask) @ w) @ v

    shapes = struct(1024, 1024), struct(1024, 4096), struct(4096, 1024)
    specs = '* b d', 'd f@tensor', 'f@tensor d'
    x, w, v = (einshard(x, spec, mesh=mesh) for x, spec in zip(shapes, specs, strict=True))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1024))
    report = explain(jax.jit(step), einshard(keys, '* b', mesh=mesh), x, w, v, chip=CHIP)
    assert any('shard x' in finding.suggestion for finding in report.findings)
    assert 'not possible' not in str(report)


def test_nothing_is_compiled_where_nothing_can_be_better():
    mesh = device_mesh(jax.devices()[:8], data=8)

    @sharded('b@data d', 'd f', out='b@data f', mesh=mesh)
    def forward(x, w):
        return jnp.tanh(x @ w)

    with counting() as counts:
        report = explain(forward, struct(1024, 512), struct(512, 512), chip=CHIP)
    assert not report.findings
    assert report.total[-1].endswith('nothing was tried')
    assert counts.compiled == ['jit(forward)']


def test_costs_are_notes_without_tries():
    mesh = device_mesh(jax.devices()[:8], tensor=8)

    @sharded('b d', 'd f@tensor', 'f@tensor d', mesh=mesh)
    def forward(x, up, down):
        return jnp.tanh(x @ up) @ down

    report = explain(forward, struct(1024, 512), struct(512, 2048), struct(2048, 512), tries=0)
    (note,) = [note for note in report.notes if note.kind == 'cost']
    assert note.text.startswith('all-reduce of activations along tensor sends ')
    assert 'sums over that axis' in note.reason
    assert not note.suggestion


def test_silence_says_what_was_tried():
    add = sharded('a* b', '* b')(lambda x, y: x + y)
    (nothing,) = explain(add, struct(16, 8), struct(8)).total
    assert nothing.startswith('no device sends anything')
    small = sharded('a b*', out='* a b')(jnp.sin)
    report = explain(small, struct(8, 16), chip=CHIP)
    (line,) = report.total
    assert report.findings == ()
    said = re.match(r'no change lowers the bounds by 3%: (\d+) changes? ranked, \d+ compiled', line)
    assert int(said[1])
    assert 'The program is too small: its lower bounds on ' in line
    assert line in ' '.join(str(report).split())
