"""Suggestions that `explain` tries: what they change, and that applying them gives the figures."""

import importlib.util
import inspect
import re
import subprocess
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mistakes import BOTH, MEGATRON, Choices, arguments, make_step

from einshard import EinshardError, device_mesh, einshard, explain, sharded, topology
from einshard._cli.main import main
from einshard._explain.fixes import trials


def mesh_of(**axes):
    n = int(np.prod([*axes.values()]))
    return device_mesh(jax.devices()[:n], **axes)


def struct(shape, spec, mesh, dtype=jnp.float32):
    return einshard(jax.ShapeDtypeStruct(shape, dtype), spec, mesh=mesh)


MESH = mesh_of(data=4, tensor=2)
X = struct((2048, 512), 'b d -> b@data d', MESH)
IN, OUT = (
    struct((512, 2048), 'd f -> d f@tensor', MESH),
    struct((2048, 512), 'f d -> f@tensor d', MESH),
)


def drops_batch(x, w_in, w_out):
    x = jnp.tanh(x)
    x = einshard(x, 'b d -> b d', mesh=MESH)
    h = jax.nn.silu(x @ w_in)
    return einshard(h @ w_out, 'b d -> b@data d', mesh=MESH)


def drops_batch_of_hidden(x, w_in, w_out):
    h = jax.nn.silu(x @ w_in)
    h = einshard(h, 'b f -> b f@tensor', mesh=MESH)
    return einshard(h @ w_out, 'b d -> b@data d', mesh=MESH)


def drops_batch_in_jax(x, w_in, w_out):
    h = jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(MESH, P(None, None)))
    return einshard(jax.nn.silu(h @ w_in) @ w_out, 'b d -> b@data d', mesh=MESH)


def layers(weights, table, tokens):
    x = table[tokens]
    for w in weights:
        x = x + jax.nn.relu(x @ w['up']) @ w['down']
    return jnp.mean(x**2)


def train(loss, *states):
    def step(weights, *rest):
        grads = jax.grad(loss)(weights, *rest)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    return step


FSDP = mesh_of(fsdp=8)
WEIGHTS = [
    {
        'up': struct((256, 1024), 'd f -> d f@fsdp', FSDP),
        'down': struct((1024, 256), 'f d -> f d@fsdp', FSDP),
    }
] * 3
TABLE = struct((1024, 256), 'v d -> v d@fsdp', FSDP)
TOKENS = struct((64, 128), 'b t -> b@fsdp t', FSDP, jnp.int32)
REPLICATED = struct((64, 128), 'b t -> b t', FSDP, jnp.int32)


@pytest.mark.parametrize('function', [drops_batch, drops_batch_of_hidden, drops_batch_in_jax])
def test_constraint_that_drops_an_axis(function, tmp_path):
    report = explain(jax.jit(function), X, IN, OUT, tries=4)
    (finding,) = report.findings
    assert '@data' in finding.suggestion
    assert finding.suggestion.startswith('change the constraint in test_fixes.py:')
    tried = finding.tried
    assert tried.before.network_bytes == report.network_bytes
    assert tried.network_bytes < 0.4 * report.network_bytes
    assert tried.bound < tried.before.bound
    after = explain(report.fixed_function(), X, IN, OUT, tries=0)
    assert after.network_bytes == tried.network_bytes
    # the function computes the same
    rng = np.random.default_rng(0)
    values = [
        jax.device_put(rng.standard_normal(s.shape).astype(np.float32), s.sharding)
        for s in (X, IN, OUT)
    ]
    np.testing.assert_allclose(
        report.fixed_function()(*values), jax.jit(function)(*values), rtol=1e-3, atol=1e-2
    )
    # the patch is what was tried
    patched = apply_patch(report, tmp_path)
    by_hand = explain(jax.jit(getattr(patched, function.__name__)), X, IN, OUT, tries=0)
    assert by_hand.network_bytes == tried.network_bytes


def apply_patch(report, folder):
    """Applies a patch to a copy of this file, and returns the copy as a module."""
    copy = folder / 'patched.py'
    copy.write_text(inspect.getsource(inspect.getmodule(apply_patch)))
    patch = folder / 'fix.patch'
    patch.write_text(report.patch())
    subprocess.run(['patch', str(copy), str(patch)], check=True, capture_output=True)
    spec = importlib.util.spec_from_file_location('patched', copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_batch_of_a_lookup():
    step = train(layers)
    report = explain(jax.jit(step), WEIGHTS, TABLE, TOKENS, tries=4)
    finding = report.findings[0]
    assert finding.suggestion.startswith('constrain `table[tokens]` in test_fixes.py:')
    assert 'a@fsdp b c' in finding.suggestion
    assert finding.tried.network_bytes < 0.5 * report.network_bytes
    assert f'Tried: {finding.tried}.' in ' '.join(str(report).split())
    assert '+    x = einshard(table[tokens], ' in report.patch()
    assert report.total == ()  # that of the only finding


def test_batch_that_is_not_sharded():
    report = explain(jax.jit(train(layers)), WEIGHTS, TABLE, REPLICATED, tries=4)
    suggestions = ' '.join(finding.suggestion for finding in report.findings)
    assert '@fsdp' in suggestions
    fixed = explain(report.fixed_function(), WEIGHTS, TABLE, REPLICATED, tries=0)
    assert len(report.findings) == 1 or report.total[0].startswith('all together, compiled for cpu')
    assert report.findings[-1].tried.network_bytes < 0.2 * report.network_bytes
    assert fixed.network_bytes == report.findings[-1].tried.network_bytes


def test_weight_sharded_over_its_other_axis():
    on = mesh_of(data=4, tensor=2)
    spec = {'up': 'd@data f@tensor', 'down': 'f@data d@tensor'}
    weights = {
        'up': jax.ShapeDtypeStruct((512, 4096), jnp.float32),
        'down': jax.ShapeDtypeStruct((4096, 512), jnp.float32),
    }

    def loss(w, x):
        h = jax.nn.gelu(x @ w['up'])
        return jnp.mean(einshard(h @ w['down'], 'b@data d') ** 2)

    step = sharded(spec, 'b@data d', out=spec, mesh=on)(train(loss))
    x = jax.ShapeDtypeStruct((8192, 512), jnp.float32)
    report = explain(step, weights, x, tries=4)
    (finding,) = report.findings
    assert finding.suggestion == "shard w/down with 'f d -> f@tensor d@data'".replace(
        'w/', 'weights/'
    )
    right = {**spec, 'down': 'f@tensor d@data'}
    correct = sharded(right, 'b@data d', out=right, mesh=on)(train(loss))
    assert finding.tried.network_bytes == explain(correct, weights, x, tries=0).network_bytes
    assert '# shard weights/down with' in report.patch()


def correct(x, w_in, w_out):
    h = einshard(jax.nn.silu(x @ w_in), 'b f -> b@data f@tensor', mesh=MESH)
    return einshard(h @ w_out, 'b d -> b@data d', mesh=MESH)


def test_correct_program_has_no_suggestion():
    report = explain(jax.jit(correct), X, IN, OUT, tries=8)
    assert report.findings == ()
    assert report.patch() == ''
    with pytest.raises(EinshardError, match='no change of the program was found that helps'):
        report.fixed_function()


def test_nothing_is_compiled_without_a_cost(monkeypatch):
    def run(*_):
        raise AssertionError('compiled')

    monkeypatch.setattr(trials.Trials, 'run', run)
    report = explain(jax.jit(lambda x: 2 * x), X, tries=8)
    assert report.findings == ()
    with pytest.raises(AssertionError, match='compiled'):
        explain(jax.jit(drops_batch), X, IN, OUT, tries=8)
    report = explain(jax.jit(drops_batch), X, IN, OUT, tries=0)
    assert all(finding.tried is None for finding in report.findings)


def test_interrupted_search_keeps_what_helps(monkeypatch):
    run, calls = trials.Trials.run, []

    def interrupted(self, edits):
        calls.append(edits)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run(self, edits)

    monkeypatch.setattr(trials.Trials, 'run', interrupted)
    report = explain(jax.jit(train(layers)), WEIGHTS, TABLE, REPLICATED, tries=8)
    assert len(calls) == 4
    assert 'interrupted' in report.total[-1]
    monkeypatch.undo()
    more = report.try_more(3)
    assert len(more.findings) >= len(report.findings)


def test_seconds_are_said(monkeypatch):
    report = explain(jax.jit(train(layers)), WEIGHTS, TABLE, REPLICATED, tries=8, seconds=0)
    assert report.findings == ()
    assert report.total == ('0 changes tried (seconds: the search was stopped)',)


def test_static_arguments_and_keywords():
    def step(w, x, scale, *, name):
        assert name == 'model'
        x = einshard(jnp.tanh(x), 'b d -> b d', mesh=MESH)
        return einshard(scale * (x @ w), 'b f -> b@data f@tensor', mesh=MESH)

    jitted = jax.jit(step, static_argnames='name')
    report = explain(jitted, IN, X, 2.0, name='model', tries=3)
    assert report.findings[0].tried is not None
    fixed = report.fixed_function()
    w, x = (jax.device_put(np.ones(s.shape, np.float32), s.sharding) for s in (IN, X))
    np.testing.assert_allclose(
        fixed(w, x, 3.0, name='model'), jitted(w, x, 3.0, name='model'), rtol=1e-5
    )


def test_mapped_axes_are_left_out_of_the_patch(tmp_path):
    on = mesh_of(data=8)
    source = textwrap.dedent(
        """
        import jax
        import jax.numpy as jnp
        from einshard import einshard

        def one(table, w, tokens):
            x = table[tokens]
            return jnp.sum(jax.nn.relu(x @ w))

        def step(table, w, tokens):
            return jax.grad(lambda w: jnp.sum(jax.vmap(one, (None, None, 0))(table, w, tokens)))(w)
        """
    )
    (tmp_path / 'mapped.py').write_text(source)
    spec = importlib.util.spec_from_file_location('mapped', tmp_path / 'mapped.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments = (
        struct((1024, 256), 'v d -> v d@data', on),
        struct((256, 1024), 'd f -> d f@data', on),
        struct((64, 128), 'b t -> b@data t', on, jnp.int32),
    )
    report = explain(jax.jit(module.step), *arguments, tries=4)
    for finding in report.findings:
        if 'b@data' in finding.suggestion and 'table[tokens]' in finding.suggestion:
            assert 'with the axes that jax.vmap adds' in finding.suggestion


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason='programs of a newer libtpu have no lines'
)
def test_on_a_topology():
    on = topology('v5e:2x4', fsdp=8)
    weights = [
        {
            'up': struct((512, 2048), 'd f -> d f@fsdp', on, jnp.bfloat16),
            'down': struct((2048, 512), 'f d -> f d@fsdp', on, jnp.bfloat16),
        }
    ]
    table = struct((1024, 512), 'v d -> v d@fsdp', on, jnp.bfloat16)
    tokens = struct((64, 128), 'b t -> b@fsdp t', on, jnp.int32)
    report = explain(jax.jit(train(layers)), weights, table, tokens, tries=2)
    assert 'a@fsdp b c' in report.findings[0].suggestion
    assert report.total[0].startswith('compiled for TPU v5')


def test_command_writes_a_patch(tmp_path, monkeypatch, capsys):
    (tmp_path / 'model.py').write_text(
        textwrap.dedent(
            """
            import jax
            from einshard import einshard

            def step(x, w):
                x = einshard(jax.numpy.tanh(x), 'b d -> b d')
                return einshard(x @ w, 'b f -> b@data f@tensor')

            def shapes(mesh):
                shape = jax.ShapeDtypeStruct((1024, 512), 'float32')
                return einshard(shape, 'b d -> b@data d', mesh=mesh)
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    command = ['explain', 'model:step', '--args', 'model:shapes', 'f32[512,1024]']
    mesh = ['--mesh', 'data=4', 'tensor=2']
    assert main([*command, *mesh, '--tries', '3', '--patch', 'fix.patch']) == 0
    assert 'Tried: sends' in ' '.join(capsys.readouterr().out.split())
    patch = Path('fix.patch').read_text()
    assert "+    x = einshard(jax.numpy.tanh(x), 'b d -> b@data d')" in patch
    assert '--- a/model.py' in patch


# --- Explicit axes ------------------------------------------------------------------------------

EXPLICIT = device_mesh(jax.devices()[:8], axis_types=AxisType.Explicit, data=4, tensor=2)


def dense(x, w):
    return jax.nn.silu(x @ w)


def test_on_explicit_axes_arguments_are_moved():
    """The function is traced again: its values have the types that follow from the arguments."""

    def report_for(x_spec, tries):
        x, w = struct((2048, 512), x_spec, EXPLICIT), struct((512, 2048), 'd f@tensor', EXPLICIT)
        return explain(jax.jit(dense), x, w, tries=tries)

    report = report_for('b d -> b d', 8)
    (finding,) = report.findings
    assert finding.kind == 'replicated compute'
    (expression,) = re.findall("shard x with '([^']*)'", finding.suggestion)
    assert finding.tried.flops == report.flops / 4
    by_hand = report_for(expression, 0)
    assert by_hand.flops == finding.tried.flops
    assert by_hand.network_bytes == finding.tried.network_bytes


def test_on_explicit_axes_values_are_not_constrained():
    def gated(x, w):
        gate, up = jnp.split(x @ w, 2, -1)
        return gate * up

    x, w = (
        struct((2048, 512), 'b d -> b@data d', EXPLICIT),
        struct((512, 2048), 'd f@tensor', EXPLICIT),
    )
    report = explain(jax.jit(gated), x, w, tries=8)
    assert 'sliced axis' in [finding.kind for finding in report.findings]
    assert not any('constrain' in finding.suggestion for finding in report.findings)


# --- planted mistakes ---------------------------------------------------------------------------

ON_BOTH = mesh_of(data=4, tensor=4)
PLANTED = {
    'missing constraint': (Choices(BOTH, embedded=None), Choices(BOTH)),
    'contracted axis': (Choices(MEGATRON | {'down': 'f d@tensor'}), Choices(MEGATRON)),
}


@pytest.mark.parametrize('kind', PLANTED)
def test_tried_suggestions_send_no_more_than_the_correct_program(kind):
    wrong, right = (make_step(c, ON_BOTH) for c in PLANTED[kind])
    found = explain(wrong, *arguments(), tries=8).findings
    assert all(finding.suggestion for finding in found)
    correct = explain(right, *arguments(), tries=0)
    assert found[-1].tried.network_bytes <= correct.network_bytes


def test_nothing_is_suggested_that_was_not_compiled():
    for c, _ in PLANTED.values():
        report = explain(make_step(c, ON_BOTH), *arguments(), tries=0)
        assert report.findings
        assert {each.suggestion for each in (*report.findings, *report.notes)} == {''}
