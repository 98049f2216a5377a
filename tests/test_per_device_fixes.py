"""Operations whose batch axis is gathered: `explain` tries to run them on the shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo.read import batch_axes_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import device_mesh, explain, make_sharding, per_device

lax, linalg = jax.lax, jax.lax.linalg


def random(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def symmetric(*shape):
    x = random(*shape)
    return x @ np.swapaxes(x, -1, -2) + 4 * np.eye(shape[-1], dtype=np.float32)


def convolve(x, w, groups, **options):
    numbers = ('NHWC', 'HWIO', 'NHWC')
    options = {'dimension_numbers': numbers, 'feature_group_count': groups, **options}
    return lax.conv_general_dilated(x, w, (1, 1), 'SAME', **options)


def loss(x, w):
    return jnp.sum(convolve(x, w, 4) ** 2)


IMAGES, KERNEL = random(4, 6, 6, 8), random(3, 3, 2, 16)


@pytest.mark.parametrize(
    ('function', 'arguments', 'n_axes'),
    [
        (lambda x: linalg.eigh(x), (symmetric(4, 2, 3, 3),), 2),
        (lambda x: linalg.cholesky(x), (symmetric(4, 3, 3),), 1),
        (lambda x: linalg.lu(x), (random(4, 3, 5),), 1),
        (lambda x: linalg.qr(x, full_matrices=False), (random(4, 5, 3),), 1),
        (lambda x: linalg.svd(x, compute_uv=False), (random(4, 5, 3),), 1),
        (
            lambda a, b: linalg.triangular_solve(a, b, lower=True),
            (symmetric(4, 3, 3), random(4, 2, 3)),
            1,
        ),
        (lambda x: lax.fft(x, 'RFFT', (4, 6)), (random(4, 2, 4, 6),), 2),
        (lambda x, y: lax.sort((x, y), dimension=1), (random(4, 6, 2), random(4, 6, 2)), 2),
        (lambda x: lax.top_k(x, 3), (random(4, 2, 8),), 2),
        (lambda x: lax.cumsum(x, axis=0), (random(5, 4, 2),), 2),
        (lambda x, w: convolve(x, w, 4), (IMAGES, KERNEL), 2),
        (lambda x, w: jax.grad(loss, 0)(x, w), (IMAGES, KERNEL), 2),
        (lambda x, w: jax.grad(loss, 1)(x, w), (IMAGES, KERNEL), 2),
    ],
)
def test_shards_of_a_batch_axis_give_the_shards_of_the_result(function, arguments, n_axes):
    closed = jax.make_jaxpr(function)(*arguments)
    assert check_equations(closed.jaxpr, [*closed.consts, *arguments])[1] >= n_axes


def check_equations(jaxpr, inputs):
    """Runs a jaxpr, each equation in full and in halves of its batch axes."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    n_checked = 0
    for eqn in jaxpr.eqns:
        ins = [v.val if hasattr(v, 'val') else values[v] for v in eqn.invars]
        if eqn.primitive.name in ('jit', 'pjit', 'custom_jvp_call'):
            inner = eqn.params.get('jaxpr', eqn.params.get('call_jaxpr'))
            results, n = check_equations(inner.jaxpr, [*inner.consts, *ins])
            values.update(zip(eqn.outvars, results, strict=True))
            n_checked += n
            continue

        def run(values, params, eqn=eqn):
            results = eqn.primitive.bind(*values, **params)
            return results if eqn.primitive.multiple_results else [results]

        results = run(ins, eqn.params)
        values.update(zip(eqn.outvars, results, strict=True))
        for axis in batch_axes_of(eqn, ins, results):
            n_checked += 1
            params = dict(eqn.params)
            if axis.groups:
                params[axis.groups] //= 2
            one, other = (
                run(
                    [
                        v if d is None else jnp.split(v, 2, d)[half]
                        for v, d in zip(ins, axis.ins, strict=True)
                    ],
                    params,
                )
                for half in range(2)
            )
            for result, first, second, d in zip(results, one, other, axis.outs, strict=True):
                found = first + second if d is None else jnp.concatenate([first, second], d)
                np.testing.assert_allclose(found, result, rtol=1e-4, atol=1e-4)
    return [v.val if hasattr(v, 'val') else values[v] for v in jaxpr.outvars], n_checked


MESH = device_mesh(jax.devices()[:8], data=2, tensor=4)


def struct(shape, *spec, mesh=MESH):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def grouped(x, w):
    return convolve(x, w, 8)


def layer(x, w):
    return jax.nn.relu(grouped(x, w))


def layer_by_hand(x, w):
    run = per_device('b@data h w i@tensor', 'h w i o@tensor', out='b@data h w o@tensor', mesh=MESH)(
        lambda x, w: convolve(x, w, 8 // 4)
    )
    return jax.nn.relu(run(x, w))


def step(layer):
    def step(x, w):
        return jax.grad(lambda w: jnp.mean(layer(x, w) ** 2))(w)

    return step


SHARDED = (
    struct((16, 8, 8, 32), 'data', None, None, 'tensor'),
    struct((3, 3, 4, 32), None, None, None, 'tensor'),
)
BATCH = struct((16, 8, 8, 32), ('data', 'tensor')), struct((3, 3, 4, 32))


@pytest.mark.parametrize('train', [False, True])
def test_grouped_convolution(train):
    function, by_hand = (step(layer), step(layer_by_hand)) if train else (layer, layer_by_hand)
    report = explain(jax.jit(function), *SHARDED, tries=4)
    finding = report.findings[0]
    assert finding.kind == 'gathered for an operation'
    assert 'of which data, tensor shards only batch axes' in finding.text
    expected = (
        "per_device('a@data b c d@tensor', 'a b c d@tensor', out='a@data b c d@tensor'), "
        'with feature_group_count=8 // 4'
    )
    assert finding.suggestion.endswith(expected)
    by_hand = explain(jax.jit(by_hand), *SHARDED, tries=0)
    assert finding.tried.network_bytes == by_hand.network_bytes < 0.1 * report.network_bytes
    assert finding.tried.flops == by_hand.flops < report.flops
    fixed = explain(report.fixed_function(), *SHARDED, tries=0)
    assert fixed.network_bytes == finding.tried.network_bytes
    check_values(report.fixed_function(), function, SHARDED)
    assert expected in report.patch()


def test_gradient_of_a_kernel_in_a_scan():
    def step(x, ws):
        def loss(ws):
            return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)

        return jax.grad(loss)(ws)

    x = BATCH[0]
    ws = struct((3, 3, 3, 4, 32))
    report = explain(jax.jit(step), x, ws, tries=2)
    finding = report.findings[0]
    assert finding.kind == 'gathered for an operation'
    assert "per_device('a@(data,tensor) b c d', 'a b c d', out='a@(data,tensor) ...')" in (
        finding.suggestion
    )
    assert finding.tried.network_bytes < 0.5 * report.network_bytes
    check_values(report.fixed_function(), step, (x, ws))


def test_top_k_of_several_batch_axes():
    def best(x):
        return jax.lax.top_k(x, 4)[0]

    x = struct((16, 32, 32), 'data', mesh=device_mesh(jax.devices()[:8], data=8))
    report = explain(jax.jit(best), x, tries=1)
    (finding,) = report.findings
    assert "per_device('a@data b c', out='a@data ...')" in finding.suggestion
    assert finding.tried.before.network_bytes == report.network_bytes > 0
    assert finding.tried.network_bytes == 0
    check_values(report.fixed_function(), best, (x,))


def test_callback_is_not_known_to_be_independent():
    def center(x):
        return x - x.mean()

    def normalize(x):
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jnp.tanh(jax.pure_callback(center, struct, x))

    report = explain(jax.jit(normalize), struct((64, 128), 'data'), tries=2)
    (note,) = [n for n in report.notes if n.kind == 'gathered for an operation']
    assert 'If it computes each element of this axis on its own' in note.text
    assert "per_device('a@data b', out='a@data ...')" in note.text
    assert (note.suggestion, note.tried) == ('', None)


@pytest.mark.parametrize(
    'function',
    [
        lambda x: jnp.sort(x, axis=1),
        lambda x: jnp.cumsum(x, 1),
        lambda x: jnp.linalg.eigh(x @ x.mT)[1],
        lambda x: jax.nn.relu(x),
    ],
)
def test_nothing_is_said_where_nothing_is_gathered(function):
    mesh = device_mesh(jax.devices()[:8], data=8)
    report = explain(jax.jit(function), struct((16, 32, 32), 'data', mesh=mesh), tries=2)
    assert not report.findings
    assert 'gathered for an operation' not in {note.kind for note in report.notes}


def test_gather_that_moves_to_the_next_operation():
    """XLA gathers the batch of an FFT on JAX 0.10, but not on 0.12."""

    def low_pass(x):
        modes = jnp.fft.rfft2(x, axes=(1, 2))
        return jnp.fft.irfft2(modes.at[:, 4:].set(0), axes=(1, 2))

    x = struct((16, 32, 32), ('data', 'tensor'))
    report = explain(jax.jit(low_pass), x, tries=2)
    if report.network_bytes:
        assert report.findings[-1].tried.network_bytes == 0
        line = "per_device('a@(data,tensor) b c', out='a@(data,tensor) ...')"
        assert ' '.join(f.suggestion for f in report.findings).count(line) == 2
        assert explain(report.fixed_function(), x, tries=0).network_bytes == 0
        check_values(report.fixed_function(), low_pass, (x,))
    assert 'gathered for an operation' not in {note.kind for note in report.notes}


@pytest.mark.parametrize('x_spec', [P('data'), P(('data', 'tensor'))])
def test_gradient_is_summed_over_the_mesh_axes_of_the_batch(x_spec):
    """Also if other mesh axes replicate the batch, where XLA itself sums too often."""
    arguments = struct((16, 8, 8, 32), *x_spec), struct((3, 3, 4, 32), None, None, None, 'data')
    report = explain(jax.jit(step(layer)), *arguments, tries=2)
    assert report.findings[0].kind == 'gathered for an operation'
    check_values(report.fixed_function(), step(layer), arguments)


def check_values(fixed, function, structs):
    """Compares a function on sharded arrays with another one on one device."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s.shape).astype(np.float32) for s in structs]
    placed = [jax.device_put(v, s.sharding) for v, s in zip(values, structs, strict=True)]
    expected = jax.jit(function)(*(jax.device_put(v, jax.devices()[0]) for v in values))
    np.testing.assert_allclose(np.asarray(fixed(*placed)), expected, rtol=1e-3, atol=1e-5)


def code_of(suggestion):
    return suggestion.partition('where x is its operand: ')[2]


FLAT = device_mesh(jax.devices()[:8], data=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('function', 'argument', 'mesh'),
    [
        (lambda x: lax.cumsum(x, 0), ((256, 64), 'data'), FLAT),
        (lambda x: lax.cumsum(x, 0, reverse=True), ((256, 64), 'data'), FLAT),
        (lambda x: lax.cumsum(x, 1), ((16, 256, 8), 'data', 'tensor'), MESH),
        (lambda x: lax.cumsum(x, 1), ((4, 256, 8), None, ('data', 'tensor')), MESH),
        (lambda x: lax.cumlogsumexp(x, 0), ((256, 64), 'data'), FLAT),
        (lambda x: lax.top_k(x, 5), ((16, 256), 'data', 'tensor'), MESH),
        (lambda x: lax.top_k(x, 3), ((16, 128), None, 'data'), FLAT),
    ],
)
def test_operation_along_a_sharded_axis_in_two_levels(function, argument, mesh):
    shape, *spec = argument
    x = struct(shape, *spec, mesh=mesh)
    report = explain(jax.jit(function), x, tries=1)
    finding = report.findings[0]
    assert finding.kind == 'gathered for an operation'
    assert finding.tried.network_bytes < 0.5 * report.network_bytes
    # the edit and the code of the suggestion give what numpy gives
    values = np.random.default_rng(0).integers(-4, 4, shape).astype(np.float32)  # with ties
    placed = jax.device_put(values, x.sharding)
    fixed = report.fixed_function()(placed)
    names = {'x': placed, 'jax': jax, 'jnp': jnp}
    with jax.set_mesh(mesh):
        exec(code_of(finding.suggestion), {**names, 'per_device': per_device}, names)
    found = (names['best'], names['at']) if 'best' in names else names['y']
    for each in (fixed, found):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-4),
            tuple(each) if isinstance(each, list | tuple) else each,
            expected_of(function, values),
        )


def expected_of(function, values):
    """What numpy computes."""
    eqn = jax.make_jaxpr(function)(values).eqns[0]
    params, axis = eqn.params, eqn.params.get('axis', -1)
    if eqn.primitive.name == 'top_k':
        order = np.argsort(-values, axis, kind='stable')[..., : params['k']]
        return np.take_along_axis(values, order, axis), order
    flipped = np.flip(values, axis) if params['reverse'] else values
    if eqn.primitive.name == 'cumsum':
        result = np.cumsum(flipped, axis)
    else:
        result = np.log(np.cumsum(np.exp(flipped), axis))
    return np.flip(result, axis) if params['reverse'] else result


def test_note_says_what_two_levels_send():
    x = struct((256, 64), 'data', mesh=FLAT)
    report = explain(jax.jit(lambda x: jnp.cumsum(x, 0)), x, tries=0)
    (note,) = [n for n in report.notes if n.kind == 'gathered for an operation']
    # 64 totals of 4 bytes, to 7 others
    assert note.text.endswith(
        'In two levels, with per_device, each device sends 1.8 KiB (computed, not tried)'
    )
    by_hand = explain(jax.jit(lambda x: jnp.cumsum(x, 0)), x, tries=1).findings[0].tried
    assert by_hand.network_bytes == 7 * 64 * 4


def test_operand_that_another_line_computes():
    """There, JAX 0.12 gives the gather the line of the operand."""

    def places(x):
        chosen = jax.nn.one_hot(jnp.argmax(x, -1), 64, dtype=jnp.int32)
        place = jnp.cumsum(chosen, axis=0) - 1
        return jnp.sum(place * chosen, -1)

    x = struct((4096, 64), 'data', mesh=FLAT)
    out = NamedSharding(FLAT, P('data'))
    report = explain(jax.jit(places, out_shardings=out), x, tries=1)
    (finding,) = report.findings
    assert 'run `jnp.cumsum(chosen, axis=0)`' in finding.suggestion
    assert finding.tried.network_bytes == 7 * 64 * 4  # the totals of a shard, to 7 others
    check_values(report.fixed_function(), places, (x,))


def test_operation_along_a_sharded_axis_moves_to_another_axis():
    def low(x):
        return jnp.fft.fft(jnp.tanh(x)).real

    x = struct((512, 512), None, 'data', mesh=FLAT)
    jitted = jax.jit(low, out_shardings=x.sharding)
    report = explain(jitted, x, tries=1)
    finding = report.findings[0]
    assert finding.kind == 'gathered for an operation'
    assert "sharded: per_device('a@data b', out='a@data b')" in finding.suggestion
    assert finding.tried.network_bytes < 0.5 * report.network_bytes
    check_values(report.fixed_function(), low, (x,))


def test_sort_whose_axis_the_compiler_moves_itself():
    def ranked(x):
        return jnp.tanh(jnp.sort(jnp.tanh(x), axis=1))

    x = struct((512, 512), None, 'data', mesh=FLAT)
    report = explain(jax.jit(ranked, out_shardings=x.sharding), x, tries=1)
    assert 'gathered for an operation' not in {finding.kind for finding in report.findings}


CANONICAL = make_sharding('a8 b c', mesh=device_mesh(jax.devices()[:8]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('function', 'by_hand', 'shape', 'sharding'),
    [
        (jnp.fft.fftn, np.fft.fftn, (64, 32, 16), NamedSharding(FLAT, P('data'))),
        (jnp.fft.fftn, np.fft.fftn, (32, 64, 16), NamedSharding(FLAT, P(None, 'data'))),
        (jnp.fft.ifftn, np.fft.ifftn, (32, 16, 64), NamedSharding(FLAT, P(None, None, 'data'))),
        (jnp.fft.fft2, np.fft.fft2, (64, 64), NamedSharding(MESH, P(('data', 'tensor')))),
        (jnp.fft.rfftn, np.fft.rfftn, (64, 32, 18), NamedSharding(FLAT, P('data'))),
        (jnp.fft.fftn, np.fft.fftn, (64, 32, 16), NamedSharding(MESH, P('tensor'))),
    ],
)
def test_fft_of_all_axes_in_two_steps(function, by_hand, shape, sharding):
    x = jax.ShapeDtypeStruct(shape, jnp.complex64, sharding=sharding)
    if by_hand is np.fft.rfftn:
        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def f(x):
        return function(x)

    report = explain(jax.jit(f), x, tries=2)
    finding = report.findings[0]
    assert finding.kind == 'gathered for an operation'
    # each device sends its shard of the transform but for its own part
    values = np.random.default_rng(0).standard_normal((2, *shape))
    values = values[0] if x.dtype == np.float32 else values[0] + 1j * values[1]
    values = values.astype(x.dtype)
    expected = by_hand(values)
    n = x.size // np.prod(sharding.shard_shape(shape))
    assert finding.tried.network_bytes == expected.size * 8 // n * (n - 1) // n
    placed = jax.device_put(values, sharding)
    names = {'x': placed, 'jax': jax, 'jnp': jnp, 'per_device': per_device}
    with jax.set_mesh(sharding.mesh):
        exec(code_of(finding.suggestion), names)
    for found in (report.fixed_function()(placed), names['y']):
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ('function', 'shape', 'sharding'),
    [
        # the last step is along the real axis
        (jnp.fft.irfftn, (64, 32, 18), NamedSharding(FLAT, P('data'))),
        # no other axis is divisible
        (jnp.fft.fftn, (64, 9, 9), NamedSharding(FLAT, P('data'))),
        # the expression also scales
        (lambda x: jnp.fft.fftn(x, norm='ortho'), (64, 32, 16), NamedSharding(FLAT, P('data'))),
        # 'a8 b c' and 'a b8 c' would need 64 devices
        (jnp.fft.fftn, (64, 32, 16), CANONICAL),
    ],
)
def test_fft_that_has_no_two_steps(function, shape, sharding):
    x = jax.ShapeDtypeStruct(shape, jnp.complex64, sharding=sharding)
    report = explain(jax.jit(lambda x: function(x)), x, tries=0)
    (note,) = [n for n in report.notes if n.kind == 'gathered for an operation']
    assert note.text.endswith(' sent')


def test_note_says_what_an_fft_in_two_steps_sends():
    x = struct((64, 32, 16), 'data', mesh=FLAT)
    report = explain(jax.jit(lambda x: jnp.fft.fftn(x)), x, tries=0)
    (note,) = [n for n in report.notes if n.kind == 'gathered for an operation']
    assert note.text.endswith('each device sends 28.0 KiB (computed, not tried)')
