"""docs/examples/transformer.py: training in every placement, and decoding."""

import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import einshard

sys.path.append(str(Path(__file__).parents[1] / 'docs' / 'examples'))
import transformer
from transformer import PLACEMENTS, UNSHARDED, Config

UNTIED = Config(
    n_layers=2, d_model=32, n_heads=16, n_kv_heads=8, d_head=4, d_ff=64,
    sequence=12, batch=8, learning_rate=0.02, warm_up=4,
)  # fmt: skip
TIED = Config(**{**vars(UNTIED), 'tied': True})
STEPS = 8
PROMPT, LENGTH = 6, 12
RUNS = {'none': UNTIED, 'none, tied': TIED, 'tensor, tied': TIED, 'both': UNTIED}
SHARDED = [name for name in RUNS if not name.startswith('none')]


def placement_of(name):
    return PLACEMENTS.get(name.partition(',')[0], UNSHARDED)


@pytest.fixture(scope='module')
def runs():
    """Models and their training by name, cached."""

    @functools.cache
    def run(name):
        model = transformer.make_model(RUNS[name], placement_of(name), mesh=jax.devices()[:8])
        return model, transformer.train(model, RUNS[name], STEPS)

    with jax.default_matmul_precision('float32'):
        yield run


@pytest.mark.slow
@pytest.mark.parametrize('name', ['none', 'none, tied'])
def test_loss_falls(runs, name):
    _, run = runs(name)
    assert run.losses.shape == (STEPS,)
    assert run.losses[0] > np.log(256)  # no better than chance
    assert run.losses[-1] < run.losses[0] - 1


@pytest.mark.slow
@pytest.mark.parametrize('name', SHARDED)
def test_sharded_is_unsharded(runs, name):
    one_device, expected = runs('none, tied' if RUNS[name].tied else 'none')
    model, run = runs(name)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-5, atol=0)
    # sums in another order: without sharding, the losses would be equal bit by bit
    assert 0 < transformer.difference(run, expected) < 1e-5
    for weight, other in zip(*map(jax.tree.leaves, (run.weights, expected.weights)), strict=True):
        # by norm: Adam amplifies single gradients that are zero up to rounding
        weight, other = np.asarray(weight), np.asarray(other)
        assert np.linalg.norm(weight - other) < 1e-4 * np.linalg.norm(other)

    tokens = next(transformer.batches(RUNS[name]))[:, :PROMPT]
    written = transformer.generate(model, run.weights, tokens, LENGTH)
    assert np.array_equal(
        written, transformer.generate(one_device, expected.weights, tokens, LENGTH)
    )


# shard shapes: embedding, query heads, output projection of attention, cache for a batch of 8
SHARDS = {
    'none': [(256, 32), (2, 32, 16, 4), (2, 16, 4, 32), (2, 8, 18, 8, 4)],
    'tensor, tied': [(32, 32), (2, 32, 2, 4), (2, 2, 4, 32), (2, 8, 18, 1, 4)],
    'both': [(128, 32), (2, 32, 8, 4), (2, 8, 4, 32), (2, 2, 18, 4, 4)],
}


@pytest.mark.slow
@pytest.mark.parametrize('name', SHARDS)
def test_shardings(runs, name):
    model, run = runs(name)
    state = model.init(jax.random.key(0))
    cache = model.empty_cache(8, PROMPT + LENGTH)
    for weights in (state.weights, state.mean, state.square, run.weights):
        parts = [weights.embed, weights.layers.q, weights.layers.o, cache.k]
        assert [shard_shape(x) for x in parts] == SHARDS[name]
    assert cache.v.sharding == cache.k.sharding
    n_devices = 1 if name == 'none' else 8
    assert {len(x.addressable_shards) for x in jax.tree.leaves((run.weights, cache))} == {n_devices}
    placement = placement_of(name)
    for tree, spec in ((run.weights, placement.weights), (cache, placement.cache)):
        there = einshard.einshard(tree, spec, mesh=jax.devices()[:8])
        assert all(map(lambda x, y: x is y, *map(jax.tree.leaves, (tree, there))))


def shard_shape(x):
    (shape,) = {shard.data.shape for shard in x.addressable_shards}
    return shape


@pytest.mark.slow
@pytest.mark.parametrize('name', ['none', 'none, tied', 'both'])
def test_decoding_with_the_cache_is_the_full_forward_pass(runs, name):
    model, run = runs(name)
    tokens = next(transformer.batches(RUNS[name]))[:, :11]
    full, nothing = transformer.forward(jax.device_get(run.weights), tokens, UNSHARDED)
    assert nothing is None
    assert full.shape == (8, 11, 256)
    cache = model.empty_cache(8, PROMPT + LENGTH)  # with room to spare
    for start, end in ((0, 6), (6, 7), (7, 8), (8, 11)):
        logits, cache = model.decode_step(run.weights, cache, tokens[:, start:end], start)
        np.testing.assert_allclose(logits, full[:, end - 1], rtol=0, atol=1e-5)
    written = np.abs(cache.k).sum(axis=(0, 1, 3, 4)) > 0
    assert written.tolist() == [True] * 11 + [False] * 7


def test_generation_takes_the_likeliest_token_each_time(runs):
    model, run = runs('none')
    prompts = next(transformer.batches(UNTIED))[:, :PROMPT]
    written = transformer.generate(model, run.weights, prompts, LENGTH)
    assert written.shape == (8, PROMPT + LENGTH)
    assert np.array_equal(written[:, :PROMPT], prompts)
    logits, _ = transformer.forward(jax.device_get(run.weights), written, UNSHARDED)
    assert np.array_equal(written[:, PROMPT:], np.argmax(logits, axis=-1)[:, PROMPT - 1 : -1])


def test_rotary_embeddings_depend_on_distances_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.float32(rng.normal(size=(1, 1, 1, 8))) for _ in range(2))

    def score(at, other):
        at, other = jnp.array([at]), jnp.array([other])
        return float(jnp.sum(transformer.rotate(q, at) * transformer.rotate(k, other)))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


def test_text_comes_with_python():
    text = transformer.text()
    assert len(text) > 50_000
    assert abs.__doc__.encode() in text
    batches = transformer.batches(UNTIED)
    first = next(batches)
    assert first.shape == (8, 13)
    assert all(bytes(row.astype(np.uint8)) in text for row in first)
    assert np.array_equal(first, next(transformer.batches(UNTIED)))
    assert not np.array_equal(first, next(batches))


@pytest.fixture
def quick_main(runs, monkeypatch):
    """`main` with the cached models."""
    monkeypatch.setattr(transformer, 'Config', lambda tied: TIED if tied else UNTIED)
    models = {placement_of(name): runs(name)[0] for name in ('none', 'both')}
    monkeypatch.setattr(transformer, 'make_model', lambda c, placement: models[placement])
    return transformer.main


def test_main_output(quick_main, capsys):
    unsharded, sharded = quick_main(['--steps', '2'])
    printed = capsys.readouterr().out
    assert printed.startswith('Devices: 16 simulated. Text: ')
    first, last = (f'{loss:.4f}' for loss in unsharded.losses)
    for name in ('none', 'both'):
        assert f'Parallelism: {name}\nstep    0  loss {first}\nlast       loss {last}' in printed
    assert len(re.findall(r'^prompt: b.{6,}\nwrites: b.{12,}$', printed, re.MULTILINE)) == 2
    apart = np.max(np.abs(sharded.losses / unsharded.losses - 1))
    told = float(re.search(r'between the losses of the two: (\S+)', printed)[1])
    assert told == pytest.approx(apart, rel=0.1)


def test_main_fails_if_losses_differ(quick_main, monkeypatch):
    monkeypatch.setattr(transformer, 'TOLERANCE', -1.0)  # losses may be equal
    with pytest.raises(SystemExit, match='That is more than'):
        quick_main(['--steps', '2'])


@pytest.mark.parametrize(
    ('argument', 'value', 'message'),
    [
        ('--parallelism', 'pipeline', "invalid choice: 'pipeline'"),
        ('--steps', '0', '--steps must be at least 1'),
    ],
)
def test_main_rejects_bad_arguments(capsys, argument, value, message):
    with pytest.raises(SystemExit):
        transformer.main([argument, value])
    assert message in capsys.readouterr().err
