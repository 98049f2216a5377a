"""Notes about recomputation that free memory makes unnecessary."""

import jax
import jax.numpy as jnp

from einshard import Chip, device_mesh, einshard, explain

MESH = device_mesh(jax.devices()[:8], data=4, tensor=2)
B, D, F, LAYERS = 512, 64, 512, 4
WEIGHTS = {
    'up': einshard(jax.ShapeDtypeStruct((LAYERS, D, F), 'float32'), 'l d f@tensor', mesh=MESH),
    'down': einshard(jax.ShapeDtypeStruct((LAYERS, F, D), 'float32'), 'l f@tensor d', mesh=MESH),
}
X = einshard(jax.ShapeDtypeStruct((B, D), 'float32'), 'b@data d', mesh=MESH)


def chip(memory):
    rates = {'f32': 1e12, 'bf16': 1e12}
    return Chip('ours', rates, memory=memory, memory_bandwidth=1e11, link=1e11)


def step_with(checkpoint, scan=True):
    def layer(x, w):
        return x + jnp.tanh(x @ w['up']) @ w['down'], None

    @jax.jit
    def step(weights, x):
        def loss(weights):
            body = checkpoint(layer)
            h = x
            if scan:
                h, _ = jax.lax.scan(body, x, weights)
            else:
                for i in range(LAYERS):
                    h, _ = body(h, {name: w[i] for name, w in weights.items()})
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    return step


def note_of(function, memory=2**34):
    report = explain(function, WEIGHTS, X, tries=0, chip=chip(memory))
    notes = [note for note in report.notes if note.kind == 'recomputation']
    return report, notes


def saving_dots(f):
    return jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)


def test_note_is_what_the_policy_gives():
    report, (note,) = note_of(step_with(jax.checkpoint))
    laxer, none = note_of(step_with(saving_dots))
    assert not none
    assert report.flops > laxer.flops
    # the gradient of x @ up needs its result, that of the second product does not
    again = LAYERS * 2 * B * D * F // 8
    assert report.flops - laxer.flops == again
    assert f'{again / 1e6:.3g} Mflop of ' in note.text
    assert 'jax.checkpoint_policies.dots_saveable keeps them (not tried)' in note.text
    assert note.bytes == LAYERS * B * F * 4 // 8
    assert note.suggestion == ''
    grown = laxer.memory.total - report.memory.total
    assert grown < 1.5 * note.bytes


def test_unrolled_loop():
    """Depending on its version, XLA for CPUs merges the passes, and recomputes nothing."""
    report, notes = note_of(step_with(jax.checkpoint, scan=False))
    least = note_of(step_with(lambda f: f, scan=False))[0].flops
    assert bool(notes) == (report.flops > least)


def test_no_note_where_nothing_is_recomputed_or_memory_is_short():
    assert not note_of(step_with(lambda f: f))[1]
    step = step_with(jax.checkpoint)
    report, (note,) = note_of(step)
    least = report.memory.total + note.bytes
    assert not note_of(step, least)[1]
    assert note_of(step, int(1.2 * least))[1]
    # simulated devices have no memory of their own
    kinds = [note.kind for note in explain(step, WEIGHTS, X, tries=0).notes]
    assert 'recomputation' not in kinds


def test_matmuls_with_batch_axes_that_do_not_fit():
    def layer(x, w):
        scores = jnp.einsum('bsd,btd->bst', x, x)
        x = x + jnp.einsum('bst,btd->bsd', jnp.tanh(scores), x)
        return x + jnp.tanh(x @ w['up']) @ w['down'], None

    x = einshard(jax.ShapeDtypeStruct((8, 1024, D), 'float32'), 'b@data s d', mesh=MESH)

    @jax.jit
    def step(weights, x):
        def loss(weights):
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    def notes(memory):
        found = explain(step, WEIGHTS, x, tries=0, chip=chip(memory)).notes
        return [note for note in found if note.kind == 'recomputation']

    (note,) = notes(2**34)
    # of the scores, the products with x, and those with w['up'] and w['down'] if they are needed
    scores = LAYERS * 2 * 1024 * 1024 * 4
    others = LAYERS * 2 * 1024 * F * 4 // 2
    assert note.bytes >= scores + others
    report = explain(step, WEIGHTS, x, tries=0, chip=chip(2**34))
    (note,) = notes(int(1.2 * (report.memory.total + others)))
    assert 'dots_with_no_batch_dims_saveable' in note.text
    assert others <= note.bytes < scores
