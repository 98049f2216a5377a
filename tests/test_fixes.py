"""Suggestions that `explain` tries: what they change, and that applying them gives the figures."""

import importlib.util
import inspect
import re
import subprocess
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mistakes import BOTH, MEGATRON, Choices, arguments, make_step
from modules import line_of

from einshard import (
    Chip,
    EinshardError,
    Rules,
    device_mesh,
    einshard,
    explain,
    for_optimizer,
    per_device,
    sharded,
    topology,
)
from einshard._explain.report_rows import Figures, Finding, Tried
from einshard._explain.search import trials
from einshard._explain.stages import Stages


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
# its rows do not divide, so only a constraint helps without new memory
TABLE = struct((1023, 256), 'v d -> v d@fsdp', FSDP)
TOKENS = struct((64, 128), 'b t -> b@fsdp t', FSDP, jnp.int32)
REPLICATED = struct((64, 128), 'b t -> b t', FSDP, jnp.int32)


@pytest.mark.parametrize('function', [drops_batch, drops_batch_of_hidden, drops_batch_in_jax])
def test_constraint_that_drops_an_axis(function, tmp_path):
    report = explain(jax.jit(function), X, IN, OUT, tries=4)
    first, tried = report.findings[0], report.findings[-1].tried
    assert first.kind in ('wrong constraint', 'needless constraint')
    assert first.suggestion.startswith(
        ('change the constraint in test_fixes.py:', 'remove the constraint in test_fixes.py:')
    )
    assert first.tried.before.network_bytes == report.network_bytes
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


def is_summary(total):
    """Whether the only line says how many changes were ranked and compiled."""
    (line,) = total
    return re.fullmatch(r'\d+ changes? ranked, \d+ compiled', line) is not None


def test_batch_of_a_lookup():
    step = train(layers)
    report = explain(jax.jit(step), WEIGHTS, TABLE, TOKENS, tries=4)
    finding = report.findings[0]
    assert finding.suggestion.startswith('constrain `table[tokens]` in test_fixes.py:')
    assert 'a@fsdp b c' in finding.suggestion
    assert finding.tried.network_bytes < 0.5 * report.network_bytes
    assert f'Tried: {finding.tried}.' in ' '.join(str(report).split())
    assert '+    x = einshard(table[tokens], ' in report.patch()
    assert is_summary(report.total)  # the costs are those of the only finding


def test_batch_that_is_not_sharded():
    report = explain(jax.jit(train(layers)), WEIGHTS, TABLE, REPLICATED, tries=4)
    suggestions = ' '.join(finding.suggestion for finding in report.findings)
    assert '@fsdp' in suggestions
    fixed = explain(report.fixed_function(), WEIGHTS, TABLE, REPLICATED, tries=0)
    assert len(report.findings) == 1 or 'changes, together, compiled for cpu' in report.total[0]
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
    suggestion, _, other = finding.suggestion.partition('. Or: ')
    placement = "'f d -> f@tensor d@data'"
    assert (
        suggestion == f'shard weights/down with {placement}, and shard result/down with {placement}'
    )
    assert other.startswith('shard weights/up with ')  # the next best
    right = {**spec, 'down': 'f@tensor d@data'}
    correct = sharded(right, 'b@data d', out=right, mesh=on)(train(loss))
    assert finding.tried.network_bytes == explain(correct, weights, x, tries=0).network_bytes
    assert '# shard weights/down with' in report.patch()


def correct(x, w_in, w_out):
    h = einshard(jax.nn.silu(x @ w_in), 'b f -> b@data f@tensor', mesh=MESH)
    return einshard(h @ w_out, 'b d -> b@data d', mesh=MESH)


@pytest.mark.parametrize('by_name', [False, True])
def test_weight_of_all_layers_of_a_train_state(by_name):
    """Layers are named as in lists or as by Flax; states are in another subtree."""
    mesh = mesh_of(data=2, tensor=4)
    n, up = 3, struct((512, 2048), 'd f -> d f@tensor', mesh)
    x = struct((1024, 512), 'b d -> b@data d', mesh)

    def state(down):
        params = [{'mlp': {'up': up, 'down': struct((2048, 512), down, mesh)}}] * n
        tree = {f'layer_{i}': p for i, p in enumerate(params)} if by_name else params
        return {'params': tree, 'opt_state': ({'mu': tree, 'nu': tree},)}

    def loss(params, x):
        for i in range(n):
            w = params[f'layer_{i}' if by_name else i]['mlp']
            x = x + jax.nn.relu(x @ w['up']) @ w['down']
        return jnp.mean(x**2)

    @jax.jit
    def step(state, x):
        grads = jax.grad(loss)(state['params'], x)
        (old,) = state['opt_state']
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, old['mu'], grads)
        nu = jax.tree.map(lambda v, g: 0.9 * v + g**2, old['nu'], grads)
        params = jax.tree.map(lambda w, m, v: w - m / (1 + v), state['params'], mu, nu)
        return {'params': params, 'opt_state': ({'mu': mu, 'nu': nu},)}

    report = explain(step, state('f d -> f d@tensor'), x, tries=2)
    (finding,) = report.findings
    layers = 'layer_0-2' if by_name else '0-2'
    for path in (
        f'state/params/{layers}/mlp/down',
        f'state/opt_state/0/{{mu,nu}}/{layers}/mlp/down',
    ):
        assert path in finding.suggestion
    by_hand = explain(step, state('f d -> f@tensor d'), x, tries=0)
    assert finding.tried.network_bytes == by_hand.network_bytes < report.network_bytes


def test_values_inside_a_library_call_are_not_constrained():
    """Code that calls a module of Flax can constrain what goes in, not its queries and keys."""
    linen = pytest.importorskip('flax.linen')
    mesh = mesh_of(data=8)
    attend = linen.MultiHeadDotProductAttention(num_heads=8)
    x = struct((64, 32, 512), 'b t d -> b@data t d', mesh)
    layer = jax.eval_shape(lambda: attend.init(jax.random.key(0), jnp.ones(x.shape)))['params']

    def loss(weights, x, by_hand=False):
        @jax.checkpoint
        def block(x, params):
            y = jnp.tanh(x) + 1
            y = einshard(y, 'b t d -> b@data t d', mesh=mesh) if by_hand else y
            return x + attend.apply({'params': params}, y), None

        x = x @ weights['patches']
        return jnp.mean(jax.lax.scan(block, x, weights['layers'])[0] ** 2)

    def stack(path, leaf):
        of_kernel = 'n a b* c' if path[0].key == 'out' else 'n a* b c'
        spec = of_kernel if path[-1].key == 'kernel' else None
        return struct((4, *leaf.shape), spec, mesh)

    weights = {
        'layers': jax.tree_util.tree_map_with_path(stack, layer),
        'patches': struct((512, 512), 'p d*', mesh),
    }
    report = explain(jax.jit(train(loss)), weights, x, tries=3)
    (finding,) = report.findings
    by_hand = explain(jax.jit(train(partial(loss, by_hand=True))), weights, x, tries=0)
    assert finding.tried.network_bytes <= by_hand.network_bytes < report.network_bytes
    constrained = re.findall(r'constraint? (?:of )?(\S+) in (\S+)', finding.suggestion)
    assert all(place.startswith('test_fixes.py') for _, place in constrained)


def test_correct_program_has_no_suggestion():
    """Or one that is cheaper: this program is so small that its collectives count most."""
    report = explain(jax.jit(correct), X, IN, OUT)
    for finding in report.findings:
        assert finding.tried.bound < 0.97 * finding.tried.before.bound
    # its products are split over all devices, and send nothing
    split = struct((2048, 512), 'b d -> b@(data,tensor) d', MESH), struct((512, 512), '...', MESH)
    report = explain(jax.jit(lambda x, w: jnp.tanh(x @ w)), *split)
    assert report.findings == ()
    assert report.patch() == ''
    with pytest.raises(EinshardError, match='no change of the program was found that helps'):
        report.fixed_function()


def test_nothing_is_compiled_without_a_cost(monkeypatch):
    def run(*_):
        raise AssertionError('compiled')

    monkeypatch.setattr(trials.Trials, 'run', run)
    report = explain(jax.jit(lambda x: 2 * x), X)
    assert report.findings == ()
    with pytest.raises(AssertionError, match='compiled'):
        explain(jax.jit(drops_batch), X, IN, OUT)
    report = explain(jax.jit(drops_batch), X, IN, OUT, tries=0)
    assert all(finding.tried is None for finding in report.findings)


def test_costs_are_notes_where_no_change_can_be_tried(monkeypatch):
    step = jax.jit(train(layers))
    expected = explain(step, WEIGHTS, TABLE, REPLICATED, tries=0)
    assert any(note.kind == 'cost' for note in expected.notes)
    # it does not compile for simulated devices, or is not a call that can be edited
    for owner, name, value in (trials.Trials, 'run', lambda *_: None), (Stages, 'call', None):
        monkeypatch.setattr(owner, name, value)
        report = explain(step, WEIGHTS, TABLE, REPLICATED)
        assert report.findings == expected.findings
        *others, note = report.notes
        assert tuple(others) == expected.notes
        assert note.kind == 'not tried'
        assert note.text.startswith('no change of the program could be tried: ')
        assert report.patch() == ''


def test_the_way_out_where_a_call_of_nnx_cannot_be_traced_again(monkeypatch):
    pytest.importorskip('flax')
    from flax import nnx
    from test_flax import call, contracted

    model, x, mesh = contracted(AxisType.Explicit, 'f d@tensor')
    graphdef, state = nnx.split(model)
    with jax.set_mesh(mesh):
        with monkeypatch.context() as patch:
            patch.setattr(Stages, 'call', None)
            report = explain(nnx.jit(call), model, x)
        (note,) = [note for note in report.notes if note.kind == 'not tried']
        assert 'graphdef, state = nnx.split(...)' in note.text
        of_state = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
        report = explain(of_state, state, x)
    assert "down/kernel with 'a b -> a@tensor b'" in report.findings[0].suggestion


def test_interrupted_search_keeps_what_helps(monkeypatch):
    run, calls = trials.Trials.run, []

    def interrupted(self, edits):
        calls.append(edits)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run(self, edits)

    monkeypatch.setattr(trials.Trials, 'run', interrupted)
    report = explain(jax.jit(train(layers)), WEIGHTS, TABLE, REPLICATED)
    assert len(calls) == 4
    assert 'interrupted' in report.total[-1]
    monkeypatch.undo()
    more = report.try_more(3)
    assert len(more.findings) >= len(report.findings)


def test_what_the_compiler_of_the_target_refuses_is_said(monkeypatch):
    read = trials.Trials._read

    def refusing(self, traced, options=None):
        if options is None:  # for the target
            raise RuntimeError('INTERNAL: refused')
        return read(self, traced, options)

    monkeypatch.setattr(trials.Trials, '_read', refusing)
    report = explain(jax.jit(train(layers)), WEIGHTS, TABLE, REPLICATED, tries=4)
    assert report.total == ()
    (note,) = [note for note in report.notes if note.kind == 'not tried']
    assert note.text == 'a change that helps does not compile for cpu: INTERNAL: refused'


def test_seconds_are_said(monkeypatch):
    report = explain(jax.jit(train(layers)), WEIGHTS, TABLE, REPLICATED, seconds=0)
    assert report.findings == ()
    assert report.total == ('0 changes ranked, 0 compiled (seconds: the search was stopped)',)


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


def mlp(x, w_in, w_out):
    return jax.nn.relu(x @ w_in) @ w_out


def by_columns(mesh=MESH, dtype=jnp.float32):
    """The arguments of the program of the README: w_out is sharded over its other axis."""
    return (
        struct((512, 256), 'b d -> b@data d', mesh, dtype),
        struct((256, 1024), 'd f -> d f@tensor', mesh, dtype),
        struct((1024, 256), 'f d -> f d@tensor', mesh, dtype),
    )


@sharded('b d -> b@data d', 'd f -> d f@tensor', 'f d -> f d@tensor', mesh=MESH)
def sharded_mlp(x, w_in, w_out):
    return jax.nn.relu(x @ w_in) @ w_out


@pytest.mark.parametrize('function', [jax.jit(mlp), sharded_mlp], ids=['jit', 'sharded'])
def test_fixed_function_takes_the_arguments_of_the_report(function):
    structs = by_columns()
    report = explain(function, *structs, tries=4)
    tried = report.findings[-1].tried
    promised, fixed = tried.network_bytes, report.fixed_function()
    rng = np.random.default_rng(0)
    host = [rng.standard_normal(s.shape).astype(np.float32) for s in structs]
    placed = [jax.device_put(x, s.sharding) for x, s in zip(host, structs, strict=True)]
    for given in (structs, placed, [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in structs]):
        after = explain(fixed, *given, tries=0)
        assert after.network_bytes == promised
        assert after.memory.total == tried.memory
    # the suggestion is found in the fixed function, and nothing more
    assert explain(fixed, *structs, tries=4).findings == ()
    correct = np.maximum(host[0] @ host[1], 0) @ host[2]
    for given in (placed, host):
        np.testing.assert_allclose(fixed(*given), correct, rtol=1e-3, atol=1e-2)
        np.testing.assert_allclose(jax.jit(fixed.__call__)(*given), correct, rtol=1e-3, atol=1e-2)
    assert fixed.lower(*placed).compile().input_shardings[0][2].spec[0] == 'tensor'
    assert not any(x.is_deleted() for x in placed)


def test_fixed_function_of_keywords_and_partials():
    structs = by_columns()
    report = explain(partial(jax.jit(mlp), structs[0]), w_out=structs[2], w_in=structs[1], tries=4)
    fixed = report.fixed_function()
    after = explain(fixed, w_in=structs[1], w_out=structs[2], tries=0)
    assert after.network_bytes == report.findings[-1].tried.network_bytes


def test_fixed_function_donates():
    def step(x, w_in, w_out):
        return mlp(x, w_in, w_out), w_out * 2

    structs = by_columns()
    report = explain(jax.jit(step, donate_argnums=2), *structs, tries=4)
    assert "'a b -> a@tensor b'" in ' '.join(each.suggestion for each in report.findings)
    placed = [jax.device_put(np.ones(s.shape, np.float32), s.sharding) for s in structs]
    fixed = report.fixed_function()
    assert explain(fixed, *structs, tries=0).in_place
    x, w_in, _ = placed
    y, doubled = fixed(*placed)
    np.testing.assert_array_equal(doubled, np.full((1024, 256), 2, np.float32))
    again, _ = fixed(x, w_in, doubled)
    np.testing.assert_allclose(again, 2 * y)
    assert doubled.is_deleted()  # it was placed as suggested already


def test_fixed_function_has_its_static_arguments():
    @partial(jax.jit, static_argnames='scale')
    def scaled(x, w_in, w_out, scale):
        return scale * mlp(x, w_in, w_out)

    structs = by_columns()
    fixed = explain(scaled, *structs, scale=2, tries=4).fixed_function()
    fixed.trace(*structs, scale=2)
    with pytest.raises(EinshardError, match='cannot take these arguments') as error:
        fixed(*structs, scale=3)
    assert 'constant of the report: 2' in str(error.value)
    with pytest.raises(EinshardError, match='cannot take these arguments'):
        fixed(*structs, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    'change',
    [
        lambda x: x[:256],
        lambda x: np.concatenate([x, x]),
        lambda x: np.asarray(x)[:8],
        lambda x: np.arange(x.size, dtype=np.int32).reshape(x.shape) % 7,
        lambda x: x.astype(jnp.float16),
    ],
    ids=['fewer', 'more', 'NumPy', 'int32', 'float16'],
)
@pytest.mark.parametrize('is_sharded', [False, True], ids=['jit', 'sharded'])
def test_fixed_function_is_traced_again_for_arrays_of_other_types(change, is_sharded):
    def loss(batch, weights):
        return jnp.mean(mlp(batch['x'], *weights))

    structs = by_columns()
    function = sharded()(loss) if is_sharded else jax.jit(loss)
    report = explain(function, {'x': structs[0]}, [*structs[1:]], tries=4)
    promised, fixed = report.findings[0].tried.network_bytes, report.fixed_function()
    rng = np.random.default_rng(0)
    x, *weights = (
        jax.device_put(rng.standard_normal(s.shape).astype(np.float32), s.sharding) for s in structs
    )

    def expected(x):
        x, w_in, w_out = (np.asarray(array, np.float64) for array in (x, *weights))
        return np.mean(np.maximum(x @ w_in, 0) @ w_out)

    np.testing.assert_allclose(fixed({'x': x}, weights), expected(x), rtol=1e-3)
    other = change(x)
    np.testing.assert_allclose(fixed({'x': other}, weights), expected(other), rtol=2e-2)
    grad = jax.grad(lambda w: fixed({'x': other}, w))(weights)
    by_jax = jax.grad(lambda w: loss({'x': other}, w))(weights)
    for one, two in zip(grad, by_jax, strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-2, atol=1e-4)
    # it has the edits
    if len(other) == len(x) and other.dtype == x.dtype:
        assert explain(fixed, {'x': other}, weights, tries=0).network_bytes == promised


def test_fixed_function_refuses_what_its_suggestions_do_not_fit():
    structs = by_columns()
    report = explain(jax.jit(lambda x, w_in, w_out: mlp(x, w_in, w_out)), *structs, tries=4)
    fixed = report.fixed_function()
    weights = [jnp.ones(s.shape) for s in structs[1:]]
    with pytest.raises(EinshardError, match='cannot take these arguments') as error:
        fixed(jnp.ones((512, 256)), jnp.ones((256, 1025)), jnp.ones((1025, 256)))
    assert error.value.facts['in the report'] == 'float32[256,1024]'
    assert error.value.facts['got'] == 'float32[256,1025]'
    # the function's own error, not one of the suggestions
    with pytest.raises(TypeError, match='contracting dimensions'):
        fixed(jnp.ones((512, 128)), *weights)


def test_fixed_function_takes_python_numbers_for_arrays():
    def scaled(x, w_in, w_out, scale):
        return mlp(x, w_in, w_out) * scale

    structs, scale = by_columns(dtype=jnp.bfloat16), np.float32(2)
    placed = [jax.device_put(np.ones(s.shape, jnp.bfloat16), s.sharding) for s in structs]
    for given, other in ((scale, 2.0), (2.0, scale)):
        fixed = explain(jax.jit(scaled), *structs, given, tries=4).fixed_function()
        for one in (given, other, given):
            result, expected = fixed(*placed, one), jax.jit(scaled)(*placed, one)
            assert result.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ('length', 'is_nested'), [(60, False), (60, True), (64, False)], ids=['', 'nested', 'length']
)
def test_a_constraint_that_a_function_under_vmap_can_have(length, is_nested):
    """`spmd_axis_name=` is the sharding of the mapped axis, which the function does not see.

    An axis of the function that the devices divide needs none.
    """
    on = mesh_of(data=8)

    def one(weights, tokens, constrain):
        table, position, up, down = weights
        x = constrain(table[tokens]) + position
        for _ in range(2):
            h = jax.nn.gelu(jax.vmap(lambda x: up @ x)(x))
            x = x + jax.vmap(lambda h: down @ h)(h)
        return x

    def step(weights, tokens, constrain=lambda x: x, **options):
        def loss(weights):
            run = lambda tokens: one(weights, tokens, constrain)  # noqa: E731
            run = jax.vmap(jax.vmap(run) if is_nested else run, **options)
            return jnp.mean(run(tokens) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    def by_hand(weights, tokens):
        def constrain(x):
            return einshard(x, placement, mesh=on)

        return step(weights, tokens, constrain, **options)

    weights = (
        struct((16383, 256), 'v d -> v d@data', on),
        struct((length, 256), 't d -> t d@data', on),
        struct((1024, 256), 'f d -> f@data d', on),
        struct((256, 1024), 'd f -> d f@data', on),
    )
    tokens = struct((128, length), 'b t -> b@data t', on, jnp.int32)
    if is_nested:
        tokens = struct((32, 4, length), 'b g t -> b@data g t', on, jnp.int32)
    report = explain(jax.jit(step), weights, tokens, chip='H100')
    finding = report.findings[0]
    which = 'the outermost jax.vmap' if is_nested else 'the jax.vmap'
    placement, options = '... -> ...', {'spmd_axis_name': 'data'}
    said = f", and spmd_axis_name='data' in {which} around it"
    if length == 64:
        placement, options, said = 'a b -> a@data b', {}, ''
    expected = f"einshard(..., '{placement}', mesh=mesh){said}"
    assert finding.suggestion.partition('. Or:')[0].endswith(expected)
    assert expected in report.patch() or not said
    fixed = explain(jax.jit(by_hand), weights, tokens, tries=0)
    assert fixed.network_bytes == finding.tried.network_bytes < 0.5 * report.network_bytes


@pytest.mark.slow
def test_on_a_topology():
    on = topology('v5e:2x4', fsdp=8)
    weights = [
        {
            'up': struct((512, 2048), 'd f -> d f@fsdp', on, jnp.bfloat16),
            'down': struct((2048, 512), 'f d -> f d@fsdp', on, jnp.bfloat16),
        }
    ]
    table = struct((1023, 512), 'v d -> v d@fsdp', on, jnp.bfloat16)
    tokens = struct((64, 128), 'b t -> b@fsdp t', on, jnp.int32)
    report = explain(jax.jit(train(layers)), weights, table, tokens, tries=2)
    assert 'a@fsdp b c' in report.findings[0].suggestion
    (finding,) = report.findings
    # what was tried on simulated CPUs has the costs on the target, as the rest of the report
    assert not finding.tried.is_simulated
    assert finding.tried.before.network_bytes == report.network_bytes
    assert finding.tried.before.memory == report.memory.total
    fixed = explain(report.fixed_function(), weights, table, tokens, tries=0)
    assert finding.tried.network_bytes == fixed.network_bytes
    assert finding.tried.memory == fixed.memory.total
    assert report.total[0].startswith('lower bounds with the change: ')
    assert is_summary(report.total[1:])
    assert all(str(bound) in report.total[0] for bound in fixed.bounds)


def test_costs_on_simulated_devices_are_marked():
    report = explain(jax.jit(drops_batch), X, IN, OUT, tries=0)
    before = Figures(4 * 2**20, 2**20, 10**9, 165.1e-6)
    tried = Tried(2**20, 2**20, 10**9, 100e-6, before, is_simulated=True)
    finding = Finding('reshard', 'text', suggestion='shard x', tried=tried)
    assert 'Shard x. Tried on simulated CPUs: sends 1.0 MiB instead of 4.0 MiB.' in ' '.join(
        str(replace(report, findings=(finding,))).split()
    )


def test_costs_that_print_alike_are_left_out():
    before = Figures(2**20, 1030 * 2**20, 10**9, 165.1e-6)
    assert str(Tried(2**20, 1030 * 2**20, 10**9, 165.2e-6, before)) == 'the same costs'
    shown = 'sum of the lower bounds 100 us instead of 165 us'
    assert str(Tried(2**20, 1030 * 2**20, 10**9, 100e-6, before)) == shown
    assert str(Tried(2**20, 1047 * 2**20, 10**9, 165.1e-6, before)) == 'the same costs'


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
    assert "-    x = einshard(jax.numpy.tanh(x), 'b d -> b d')" in patch
    assert '+    x = jax.numpy.tanh(x)' in patch
    assert '--- a/model.py' in patch


# --- reshards -------------------------------------------------------------------------------------

AXES = mesh_of(x=4, y=2)
BEFORE, BETWEEN, AFTER = P('y', None, 'x'), P('y', 'x'), P(None, ('x', 'y'))
FLAT = 2, 2**16, 4  # y can shard the first axis, x the last; sorts need their axis unsharded


def on(spec, mesh=AXES):
    return NamedSharding(mesh, spec)


def cube(spec=BEFORE, mesh=AXES, shape=(64, 64, 64)):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on(spec, mesh))


def returned(mesh, through=None):
    """The argument in another placement, as `out_shardings` says."""

    def move(a):
        return a if through is None else jax.lax.with_sharding_constraint(a, on(through, mesh))

    return jax.jit(move, out_shardings=on(AFTER, mesh))


def constrained(mesh, through=None):
    """Sorts along the second axis and then along the others, each without communication."""

    def sort(a):
        h = jax.lax.with_sharding_constraint(jnp.sort(a, 1), on(BEFORE, mesh))
        if through is not None:
            h = jax.lax.with_sharding_constraint(h, on(through, mesh))
        h = jax.lax.with_sharding_constraint(h, on(AFTER, mesh))
        return jnp.sort(jnp.sort(h, 0), 2)

    return jax.jit(sort)


def read_by_product(mesh, through=None):
    """An argument that is used in another placement than its own."""

    def product(w, a):
        if through is not None:
            a = jax.lax.with_sharding_constraint(a, on(through, mesh))
        return jax.lax.with_sharding_constraint(jnp.sin(a) @ w, on(AFTER, mesh))

    return jax.jit(product)


def read_twice(mesh, through=None):
    """A state that is sorted along its first and last axes and, in another placement, the second.

    It stays in its own placement, which the next call needs.
    """

    def step(state):
        x = state
        if through is not None:
            x = jax.lax.with_sharding_constraint(x, on(through, mesh))
        x = jax.lax.with_sharding_constraint(jnp.sort(x, 1), on(BEFORE, mesh))
        return jnp.sort(jnp.sort(state, 0), 2), x

    return jax.jit(step, donate_argnums=0, out_shardings=(on(AFTER, mesh), on(BEFORE, mesh)))


def finding_of(function, *arguments, tries=4):
    report = explain(function, *arguments, tries=tries, chip='H100')
    (finding,) = [each for each in report.findings if each.kind == 'full rematerialization']
    return report, finding


def square(mesh, size=64):
    return jax.ShapeDtypeStruct((size, size), jnp.float32, sharding=on(P(), mesh))


def bound_of(report):
    return sum(bound.seconds for bound in report.bounds)


def test_reshard_of_a_value_in_two_steps(tmp_path):
    a = cube(shape=FLAT)
    report, finding = finding_of(constrained(AXES), a)
    assert "from 'a b c -> a@y b c@x' to 'a b c -> a b@(x,y) c'" in finding.text
    assert 'via a full all-gather' in finding.text
    assert len(report.findings) == 1
    line = line_of(constrained, 'on(AFTER, mesh)')
    assert finding.suggestion.startswith(
        f"reshard in two steps, before {line}: h = einshard(h, 'a b c -> a@y b@x c', mesh=mesh)"
    )
    by_hand = explain(constrained(AXES, BETWEEN), a, tries=0)
    assert finding.tried.before.network_bytes == report.network_bytes
    assert finding.tried.network_bytes == by_hand.network_bytes < report.network_bytes / 5
    fixed = report.fixed_function()
    after = explain(fixed, a, tries=0)
    assert after.collectives.counts == by_hand.collectives.counts
    value = np.random.default_rng(0).standard_normal(FLAT).astype(np.float32)
    moved = fixed(jax.device_put(value, on(BEFORE)))
    assert moved.sharding.is_equivalent_to(on(AFTER), 3)
    np.testing.assert_array_equal(moved, np.sort(np.sort(np.sort(value, 1), 0), 2))
    patched = apply_patch(report, tmp_path)
    after = explain(patched.constrained(patched.AXES), a, tries=0)
    assert after.network_bytes == by_hand.network_bytes


def test_reshard_of_an_argument_in_two_steps():
    """Another placement of the argument is cheaper still."""
    state = cube(AFTER, shape=FLAT)
    report, finding = finding_of(read_twice(AXES), state)
    by_hand = explain(read_twice(AXES, BETWEEN), state, chip='H100', tries=0)
    assert finding.suggestion.startswith('shard state with ')
    assert finding.tried.bound < bound_of(by_hand) < bound_of(report)
    fixed = explain(report.fixed_function(), state, chip='H100', tries=0)
    assert bound_of(fixed) == pytest.approx(finding.tried.bound)


@pytest.mark.parametrize(
    ('make', 'arguments'), [(returned, (cube(),)), (read_by_product, (square(AXES), cube()))]
)
def test_what_is_placed_as_it_is_used_needs_no_reshard(make, arguments):
    """Both placements can be changed: that sends nothing, where two steps send a part."""
    report = explain(make(AXES), *arguments, chip='H100', tries=4)
    (finding,) = report.findings
    assert 'via a full all-gather' in finding.text
    by_hand = explain(make(AXES, BETWEEN), *arguments, chip='H100', tries=0)
    assert 'in two steps' not in finding.suggestion.partition('. Or: ')[0]
    assert finding.tried.network_bytes == 0 < by_hand.network_bytes < report.network_bytes / 5
    assert finding.tried.bound < bound_of(by_hand)
    fixed = explain(report.fixed_function(), *arguments, tries=0)
    assert fixed.network_bytes == 0
    if make is returned:  # a cost without a line has that of the function
        assert finding.source.endswith(line_of(returned, 'def move'))


def test_no_reshard_in_two_steps_where_the_direct_one_is_as_good():
    swapped = jax.jit(lambda a: a, out_shardings=on(P('x', None, 'y')))
    assert explain(swapped, cube(P('y', None, 'x')), tries=0).findings == ()
    report = explain(returned(AXES, BETWEEN), cube(), tries=0)
    assert report.findings == ()


def test_no_time_for_reshards():
    report = explain(returned(AXES), cube(), tries=4, seconds=0)
    assert not any(finding.suggestion for finding in report.findings)


@pytest.mark.parametrize(
    ('target', 'length'),  # TPU compiles long sorts for minutes
    [
        pytest.param('h100:1x8', 2**15, marks=pytest.mark.gpu),
        pytest.param('v5e:2x4', 2**11, marks=pytest.mark.slow),
    ],
)
def test_reshards_in_two_steps_on_topologies(target, length):
    mesh = topology(target, x=4, y=2)
    a = cube(mesh=mesh, shape=(2, length, 4))
    report = explain(constrained(mesh), a, tries=4)
    (finding,) = [each for each in report.findings if each.kind == 'full rematerialization']
    assert "'a b c -> a@y b c@x' to 'a b c -> a b@(x,y) c' via a full" in finding.text
    assert "'a b c -> a@y b@x c'" in finding.suggestion
    by_hand = explain(constrained(mesh, BETWEEN), a, tries=0)
    fixed = explain(report.fixed_function(), a, tries=0)
    assert fixed.network_bytes == by_hand.network_bytes < 0.7 * report.network_bytes


def dense(x, w):
    return x @ w


def tagger(weights, x):
    for w in weights['layers']:
        x = x + dense(jax.nn.gelu(dense(x, w['up'])), w['down'])
    return dense(x, weights['head'])


@pytest.mark.parametrize('head', ['d v', 'd v -> d v@tensor'])
def test_repeated_matmuls_of_a_helper_that_others_use(head):
    """One line computes all matmuls. Those of the head are 3 of 27, and run on 2 devices each."""
    layer = {'up': IN, 'down': OUT}
    is_repeated = head == 'd v'
    head = struct((512, 2048), head if '->' in head else 'd v -> 8 d v', MESH)
    weights = {'layers': [layer] * 4, 'head': head}
    y = struct((2048, 2048), 'b v -> b@data v', MESH)

    def loss(weights, x, y):
        return jnp.mean((tagger(weights, x) - y) ** 2)

    report = explain(jax.jit(train(loss)), weights, X, y, tries=0)
    # before partitioning: 2 * 2048 * 512 * 2048 flops a matmul, in 4 * 6 + 3 of them, less 1
    each = 2 * 2048 * 512 * 2048
    n_of_head, n_of_layers = 3, 4 * 6 - 1
    split = n_of_layers * each // 8 + n_of_head * each // (4 if is_repeated else 8)
    assert report.flops == split


def held(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(WIDE, P(*spec)))


WIDE = mesh_of(data=2, tensor=4)


def test_constraints_of_a_helper_are_changed_by_call():
    """The second constraint drops an axis. Its line also constrains an array of one axis."""

    def scaled(x, n, w_in, w_out):
        n = held(jnp.exp(n), 'data')
        h = held(jax.nn.relu(x @ w_in), 'data')
        return held((h @ w_out) * n[:, None], 'data')

    x, n = struct((4096, 1024), 'b d -> b@data d', WIDE), struct((4096,), 'b -> b@data', WIDE)
    w_in = struct((1024, 8192), 'd f -> d f@tensor', WIDE)
    w_out = struct((8192, 1024), 'f d -> f@tensor d', WIDE)
    report = explain(jax.jit(scaled), x, n, w_in, w_out, chip='H100')
    assert ', called at test_fixes.py:' in report.findings[0].suggestion
    fixed = explain(report.fixed_function(), x, n, w_in, w_out, tries=0)
    assert fixed.network_bytes == report.findings[-1].tried.network_bytes < report.network_bytes


def test_a_constraint_is_changed_in_a_helper_as_in_line():
    """The line of the constraint is that of a helper, which two expressions call."""

    def by_helper(x, w_in, w_out):
        h = held(jax.nn.relu(x @ w_in), 'data')
        return held(h @ w_out, 'data')

    def inline(x, w_in, w_out):
        at = NamedSharding(WIDE, P('data'))
        h = jax.lax.with_sharding_constraint(jax.nn.relu(x @ w_in), at)
        return jax.lax.with_sharding_constraint(h @ w_out, at)

    args = (
        struct((4096, 1024), 'b d -> b@data d', WIDE),
        struct((1024, 8192), 'd f -> d f@tensor', WIDE),
        struct((8192, 1024), 'f d -> f@tensor d', WIDE),
    )
    found = [
        explain(jax.jit(function), *args, chip='H100').findings[-1].tried
        for function in (by_helper, inline)
    ]
    assert found[0].network_bytes == found[1].network_bytes
    assert found[0].bound == pytest.approx(found[1].bound, rel=0.03)


def test_no_constraint_where_a_helper_computes_values_of_several_ndims():
    mesh = mesh_of(data=8)
    m = struct((8, 256, 256), 'l i o -> 8 l i o', mesh)
    x = struct((8192, 256), 'b i -> b@data i', mesh)

    def step(w, m, x):
        for i in range(4):
            x = jnp.tanh(dense(x, w[i]))
        for _ in range(3):
            m = dense(m, dense(m.mT, m))
        return x, m

    report = explain(jax.jit(step), m, m, x, tries=4)
    assert 'constrain' not in ' '.join(finding.suggestion for finding in report.findings)


# --- Explicit axes ------------------------------------------------------------------------------

EXPLICIT = device_mesh(jax.devices()[:8], axis_types=AxisType.Explicit, data=4, tensor=2)


def silu_of_product(x, w):
    return jax.nn.silu(x @ w)


def test_on_explicit_axes_arguments_are_moved():
    """The function is traced again: its values have the types that follow from the arguments."""

    def report_for(x_spec, tries):
        x, w = struct((2048, 512), x_spec, EXPLICIT), struct((512, 2048), 'd f@tensor', EXPLICIT)
        return explain(jax.jit(silu_of_product), x, w, tries=tries)

    report = report_for('b d -> b d', 8)
    (finding,) = report.findings
    assert finding.kind == 'placement'
    # of x or of the result: its products are shared by all devices
    by_hand = report_for('b d -> b@data d', 0)
    assert finding.tried.flops == by_hand.flops == report.flops / 4
    assert finding.tried.network_bytes <= by_hand.network_bytes


def test_on_explicit_axes_values_are_not_constrained():
    def gated(x, w):
        gate, up = jnp.split(x @ w, 2, -1)
        return gate * up

    x, w = (
        struct((32768, 512), 'b d -> b@data d', EXPLICIT),
        struct((512, 2048), 'd f@tensor', EXPLICIT),
    )
    report = explain(jax.jit(gated), x, w)
    assert report.findings
    assert not any('constrain' in finding.suggestion for finding in report.findings)


# --- inference ----------------------------------------------------------------------------------

BF16 = jnp.bfloat16
AXIS_TYPES = pytest.mark.parametrize('axis_types', [AxisType.Auto, AxisType.Explicit])


def inference_mesh(axis_types):
    return device_mesh(jax.devices()[:8], axis_types=axis_types, data=2, tensor=4)


def spec_on(mesh, *entries):
    """For `out_sharding=`, which Explicit axes need and Auto axes do not allow."""
    is_explicit = AxisType.Explicit in mesh.axis_types
    return NamedSharding(mesh, P(*entries)) if is_explicit else None


def next_token(mesh, weight='d v@tensor', n=32, dtype=BF16):
    """The logits of `n` tokens."""
    rows, out = NamedSharding(mesh, P('data', None)), NamedSharding(mesh, P('data', 'tensor'))

    def step(table, w, tokens):
        if AxisType.Explicit in mesh.axis_types:
            x = table.at[tokens].get(out_sharding=rows)
            return jnp.einsum('bd,dv->bv', jnp.tanh(x), w, out_sharding=out)
        x = jax.lax.with_sharding_constraint(table[tokens], rows)
        return jax.lax.with_sharding_constraint(jnp.tanh(x) @ w, out)

    return jax.jit(step), (
        struct((16384, 1024), 'v@tensor d', mesh, dtype),
        struct((1024, 16384), weight, mesh, dtype),
        struct((n,), 'b@data', mesh, jnp.int32),
    )


@pytest.mark.parametrize('chip', ['H100', None])
def test_weights_that_inference_gathers_are_replicated(chip):
    mesh = inference_mesh(AxisType.Explicit)
    step, arguments = next_token(mesh, 'd v -> d@data v@tensor')
    report = explain(step, *arguments, chip=chip)
    first, tried = report.findings[0], report.findings[-1].tried
    assert "shard w with 'a b -> a b@tensor'" in first.suggestion
    by_hand = explain(*flat(next_token(mesh)), chip=chip or 'TPU v5e', tries=0)
    # more than by hand: `out_sharding=` may shard the columns over both axes
    assert max(tried.network_bytes, by_hand.network_bytes) < 0.03 * report.network_bytes
    assert tried.bound < 1.03 * sum(bound.seconds for bound in by_hand.bounds)
    assert is_summary(report.total[-1:])
    assert len(report.total) == (1 if chip is None else 2)


@pytest.mark.slow
def test_explicit_axes_of_a_topology():
    """The program is compiled in another process, where all axes are Auto."""
    mesh = topology('v5e:2x4', axis_types=AxisType.Explicit, data=2, tensor=4)
    step, arguments = next_token(mesh, 'd v -> d@data v@tensor')
    report = explain(step, *arguments)
    by_hand = explain(*flat(next_token(mesh)), tries=0)
    best = sum(bound.seconds for bound in by_hand.bounds)
    assert report.findings[-1].tried.bound < 1.03 * best


def test_weights_are_not_replicated_if_another_placement_is_as_good():
    """Auto axes: the activations, which are smaller, can be sent in place of the weights."""
    mesh = inference_mesh(AxisType.Auto)
    step, arguments = next_token(mesh, 'd v -> d@data v@tensor')
    report = explain(step, *arguments, chip='H100')
    by_hand = explain(*flat(next_token(mesh)), chip='H100', tries=0)
    assert report.findings[-1].tried.bound < 1.05 * sum(b.seconds for b in by_hand.bounds)


def flat(pair):
    function, arguments = pair
    return function, *arguments


@pytest.mark.slow
def test_weights_that_do_not_fit_stay_sharded():
    mesh = inference_mesh(AxisType.Explicit)
    rows, hidden = NamedSharding(mesh, P('data', None)), NamedSharding(mesh, P('data', 'tensor'))

    def layer(x, w):
        h = jnp.einsum('bd,df->bf', x, w['up'], out_sharding=hidden)
        return jnp.einsum('bf,fd->bd', jnp.tanh(h), w['down'], out_sharding=rows), None

    def step(table, weights, tokens):
        return jax.lax.scan(layer, table.at[tokens].get(out_sharding=rows), weights)[0]

    def call(d):
        weights = {
            'up': struct((12, 512, 2048), f'l {d} f@tensor', mesh),
            'down': struct((12, 2048, 512), f'l f@tensor {d}', mesh),
        }
        table, tokens = struct((4096, 512), 'v d', mesh), struct((32,), 'b@data', mesh, jnp.int32)
        return jax.jit(step), table, weights, tokens

    sharded, replicated = (explain(*call(d), tries=0).memory.total for d in ('d@data', 'd'))
    assert replicated > sharded
    for memory in (replicated, sharded):
        chip = Chip('ours', {'bf16': 1e15}, memory=memory, memory_bandwidth=3e12, link=450e9)
        found = explain(*call('d@data'), chip=chip, tries=16).findings
        assert found or memory == sharded
        assert all(finding.tried.memory <= memory for finding in found)


def test_weights_are_not_replicated_for_many_tokens():
    """These take longer than a gather of the weights."""
    mesh = inference_mesh(AxisType.Explicit)
    report = explain(*flat(next_token(mesh, 'd v -> d@data v@tensor', n=2**17)), chip='H100')
    assert any(c.kind == 'all-gather' and c.of == ('w',) for c in report.collectives)
    assert not any('shard w ' in finding.suggestion for finding in report.findings)
    by_hand = explain(*flat(next_token(mesh, n=2**17)), chip='H100', tries=0)
    assert bound_of(by_hand) > 0.97 * bound_of(report)


def decode(mesh, batch, updates, n_kv=8, kv='', length=2048):
    """A decode step of attention. Returns the function and its arguments."""
    b, h = ('b', 'b@data')[batch], ('h', 'h@tensor')[n_kv == 8]

    def step(w, cache, x, n):
        q = jnp.einsum('bd,dhge->bhge', x, w['q'])
        keys, values = cache['k'], cache['v']
        if updates:
            k, v = (jnp.einsum('bd,dhe->bhe', x, w[name])[:, None] for name in 'kv')
            keys = jax.lax.dynamic_update_slice(keys, k, (0, n, 0, 0))
            values = jax.lax.dynamic_update_slice(values, v, (0, n, 0, 0))
        scores = jnp.einsum('bhge,bshe->bhgs', q, keys).astype(jnp.float32)
        scores = jnp.where(jnp.arange(length) <= n, scores, -1e30)
        read = jnp.einsum('bhgs,bshe->bhge', jax.nn.softmax(scores).astype(BF16), values)
        out = spec_on(mesh, *(('data',) if batch else ()))
        y = jnp.einsum('bhge,hged->bd', read, w['o'], **({'out_sharding': out} if out else {}))
        return y, ({'k': keys, 'v': values} if updates else None)

    g = ('g@tensor', 'g')[n_kv == 8]
    w = {
        'q': struct((256, n_kv, 32 // n_kv, 64), f'd {h} {g} e', mesh, BF16),
        'k': struct((256, n_kv, 64), f'd {h} e', mesh, BF16),
        'v': struct((256, n_kv, 64), f'd {h} e', mesh, BF16),
        'o': struct((n_kv, 32 // n_kv, 64, 256), f'{h} {g} e d', mesh, BF16),
    }
    one = struct((16, length, n_kv, 64), kv or f'{b} s {h} e', mesh, BF16)
    cache, x = {'k': one, 'v': one}, struct((16, 256), f'{b} d', mesh, BF16)
    n = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return jax.jit(step, donate_argnums=1 if updates else ()), w, cache, x, n


def hbm_of(report):
    return next(bound.seconds for bound in report.bounds if bound.resource == 'HBM')


# not an update on Auto axes: JAX leaves to XLA which result is in the place of a donated cache, so
# the score counts both
READS_AND_UPDATES = [(AxisType.Auto, False), (AxisType.Explicit, False), (AxisType.Explicit, True)]


@pytest.mark.slow
@pytest.mark.parametrize(('axis_types', 'updates'), READS_AND_UPDATES)
def test_a_cache_that_several_devices_read_is_sharded(axis_types, updates):
    mesh = inference_mesh(axis_types)
    report = explain(*decode(mesh, False, updates), chip='H100')
    by_hand = explain(*decode(mesh, True, updates), chip='H100', tries=0)
    assert hbm_of(by_hand) < 0.6 * hbm_of(report)
    tried = report.findings[-1].tried
    assert tried.bound < 1.03 * sum(bound.seconds for bound in by_hand.bounds)
    assert 'HBM at least' in str(tried)
    assert explain(*decode(mesh, True, updates), chip='H100').findings == ()


def test_a_cache_with_fewer_heads_than_devices_is_sharded_along_another_axis():
    mesh = inference_mesh(AxisType.Auto)
    report = explain(*decode(mesh, True, True, n_kv=2), chip='H100')
    sharded_length = decode(mesh, True, True, n_kv=2, kv='b@data s@tensor h e')
    by_hand = explain(*sharded_length, chip='H100', tries=0)
    found = report.findings[-1].tried.bound
    assert found < 1.05 * sum(bound.seconds for bound in by_hand.bounds)


def test_changes_that_do_not_compile_are_said():
    """The placement that sends least needs `out_sharding=`; an unsharded weight does not fit."""
    both = NamedSharding(EXPLICIT, P('data', 'tensor'))
    chip = Chip('ours', {'f32': 2e14}, memory=8 * 2**20, memory_bandwidth=8e11, link=45e9)

    @jax.jit
    def product(x, w):
        return jax.nn.silu(jax.sharding.reshard(jnp.tanh(x), both) @ w)

    @jax.jit
    def with_out_sharding(x, w):
        x = jax.sharding.reshard(jnp.tanh(x), both)
        return jax.nn.silu(jnp.einsum('bd,df->bf', x, w, out_sharding=both))

    x = struct((256, 4096), 'b d -> b@data d@tensor', EXPLICIT)
    w, right = (struct((4096, 512), spec, EXPLICIT) for spec in ('d f@tensor', 'd@tensor f'))
    report = explain(product, x, w, chip=chip)
    assert report.findings == ()
    (note,) = report.notes
    assert note.kind == 'not tried'
    # what the note names, and what JAX says then
    assert "shard w with 'a b -> a@tensor b'" in note.text
    with pytest.raises(Exception, match='the output sharding via the `out_sharding` parameter'):
        product.trace(x, right)
    assert 'the output sharding via the `out_sharding` parameter' in note.text
    # with what JAX says, the change is tried
    report = explain(with_out_sharding, x, w, chip=chip)
    (finding,) = report.findings
    assert finding.suggestion == "shard w with 'a b -> a@tensor b'"
    by_hand = explain(with_out_sharding, x, right, tries=0)
    assert finding.tried.network_bytes == by_hand.network_bytes < report.network_bytes / 3
    assert 'not tried' not in [note.kind for note in report.notes]


def test_a_traced_program_is_not_changed():
    traced = jax.jit(drops_batch).trace(X, IN, OUT)
    assert 'not tried' not in [note.kind for note in explain(traced, tries=0).notes]
    (note,) = [note for note in explain(traced).notes if note.kind == 'not tried']
    assert note.text.endswith('pass the function instead of the traced program')


def test_a_program_with_values_on_several_meshes_is_not_changed():
    on = jax.devices()[:8]
    gathered = per_device('a -> a*', out='a -> 8 a', mesh=on, check_vma=False)(
        lambda x: jax.lax.all_gather(x, 'a', tiled=True)
    )
    x = einshard(jnp.arange(1024.0), 'a -> a*', mesh=on)
    report = explain(jax.jit(lambda x: gathered(x) + 1), x, tries=4)
    assert report.network_bytes == 7 * 1024 * 4 // 8
    (note,) = [note for note in report.notes if note.kind == 'not tried']
    assert note.text.endswith('its values are on several meshes')


# --- planted mistakes, of which test_advice.py tests the advice -----------------------------------

ON_BOTH = mesh_of(data=4, tensor=4)
PLANTED = Choices(BOTH, embedded=None), Choices(MEGATRON | {'down': 'f d@tensor'})


def test_nothing_is_suggested_that_was_not_compiled():
    for c in PLANTED:
        report = explain(make_step(c, ON_BOTH), *arguments(), tries=0)
        assert report.notes
        assert {each.suggestion for each in (*report.findings, *report.notes)} == {''}


def momentum(weights, m, x, y):
    def loss(w):
        return jnp.mean((jax.nn.relu(x @ w['up']) @ w['down'] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, grads)
    return jax.tree.map(lambda w, m: w - 0.01 * m, weights, m), m, value


def with_adam(weights, state, x, y):
    optax = pytest.importorskip('optax')

    def loss(w):
        return jnp.mean((jax.nn.relu(x @ w['up']) @ w['down'] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    updates, state = optax.adam(1e-3).update(grads, state, weights)
    return optax.apply_updates(weights, updates), state, value


@pytest.mark.parametrize('step', [momentum, with_adam])
def test_replicated_states_are_sharded_as_their_weights(step):
    weights = {'up': IN, 'down': OUT}
    state = {k: struct(w.shape, 'a b -> a b', MESH) for k, w in weights.items()}
    if step is with_adam:
        optax = pytest.importorskip('optax')
        empty = jax.eval_shape(optax.adam(1e-3).init, state)
        state = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(MESH, P())),
            empty,
        )
    report = explain(jax.jit(step), weights, state, X, X, tries=2)
    (finding,) = [f for f in report.findings if f.kind == 'unsharded states']
    assert "'a b -> a b@tensor'" in finding.suggestion
    assert "'a b -> a@tensor b'" in finding.suggestion
    assert finding.tried.memory < 0.95 * finding.tried.before.memory
    after = explain(report.fixed_function(), weights, state, X, X, tries=0)
    assert 'unsharded states' not in {f.kind for f in after.findings}
    assert 'second compile' not in {f.kind for f in after.findings}
    assert after.memory.total == finding.tried.memory or len(report.findings) > 1


# --- states -------------------------------------------------------------------------------------


def test_replicated_states_of_sharded_parameters():
    n_layers, rules = 4, Rules([('up', 'l d f -> l d@data f@tensor'), ('b', 'd -> d')])

    def update(params, state, x):
        def loss(params):
            x_out, _ = jax.lax.scan(
                lambda x, w: (jnp.tanh(x @ w), None), x + params['b'], params['up']
            )
            return jnp.mean(x_out**2)

        grads = jax.grad(loss)(params)
        state = {
            'mu': jax.tree.map(lambda m, g: 0.9 * m + g, state['mu'], grads),
            'nu': jax.tree.map(lambda v, g: 0.9 * v + g * g, state['nu'], grads),
        }
        change = jax.tree.map(lambda m, v: m / jnp.sqrt(v + 1e-6), state['mu'], state['nu'])
        return jax.tree.map(lambda w, c: w - 0.1 * c, params, change), state

    def step(states):
        specs = rules, states, 'b d -> b@data d'
        return sharded(*specs, out=(rules, states), donate_argnums=(0, 1), mesh=MESH)(update)

    shape = jax.ShapeDtypeStruct
    params = {'up': shape((n_layers, 256, 256), jnp.float32), 'b': shape((256,), jnp.float32)}
    arguments = params, {'mu': params, 'nu': params}, shape((64, 256), jnp.float32)
    report = explain(step('... -> ...'), *arguments, tries=4)
    (finding,) = [each for each in report.findings if each.kind == 'unsharded states']
    assert 'state/{mu,nu}/up are replicated' in finding.text
    placement = "'l d f -> l d@data f@tensor'"
    assert finding.suggestion == f'shard state/{{mu,nu}}/up with {placement}, as for_optimizer does'
    # nothing repeats what the finding says
    assert not any('{mu,nu}' in note.text for note in report.notes)
    by_hand = explain(step(for_optimizer(params, rules)), *arguments, tries=0)
    assert finding.tried.network_bytes == by_hand.network_bytes < 0.5 * report.network_bytes
    assert finding.tried.memory == by_hand.memory.total
    fixed = explain(report.fixed_function(), *arguments, tries=0)
    assert fixed.network_bytes <= by_hand.network_bytes  # other changes help too
    assert placement in report.patch()


def test_changes_are_compiled_with_the_options_of_the_function():
    options = {'xla_disable_hlo_passes': 'fusion'}

    def memory_of(function, tries, **kwargs):
        jitted = jax.jit(function, static_argnames='scale', donate_argnames='x', **kwargs)
        report = explain(jitted, X, w_out=OUT, w_in=IN, scale=2, tries=tries)
        return report, report.memory.total

    def wrong(x, w_in, w_out, scale):
        return drops_batch(x, w_in, w_out) * scale

    def right(x, w_in, w_out, scale):
        return correct(x, w_in, w_out) * scale

    assert memory_of(right, 0, compiler_options=options)[1] > memory_of(right, 0)[1]
    report, _ = memory_of(wrong, 8, compiler_options=options)
    tried = report.findings[-1].tried
    without, _ = memory_of(wrong, 8)
    assert tried.memory > without.findings[-1].tried.memory
    fixed = explain(report.fixed_function(), X, w_out=OUT, w_in=IN, scale=2, tries=0)
    assert fixed.memory.total == tried.memory


def test_changes_of_a_sharded_function_with_compiler_options():
    options = {'xla_disable_hlo_passes': 'fusion'}

    def fixed(**kwargs):
        step = sharded('b@data d', 'd f@tensor', 'f@tensor d', mesh=MESH, **kwargs)(drops_batch)
        report = explain(step, X, IN, OUT)
        return report.findings[0].tried

    assert fixed(compiler_options=options).memory > fixed().memory


def test_results_are_not_pinned_where_the_program_does_not():
    mesh = mesh_of(data=2, tensor=4)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, momentum, x):
        @jax.checkpoint
        def layer(w, x):
            return x + jax.nn.gelu(x @ w['up']) @ w['down']

        def loss(weights):
            h = x
            for w in weights:
                h = layer(w, h)
            return jnp.mean((h - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum, value

    def layers(down):
        up = struct((512, 2048), 'd f@tensor', mesh)
        return [{'up': up, 'down': struct((2048, 512), down, mesh)}] * 4

    x = struct((2048, 512), 'b@data d', mesh)
    wrong, right = layers('f d@tensor'), layers('f@tensor d')
    finding = explain(step, wrong, wrong, x, tries=4).findings[0]
    by_hand = explain(step, right, right, x, tries=0)
    assert finding.tried.network_bytes == by_hand.network_bytes
    assert finding.tried.memory == by_hand.memory.total
