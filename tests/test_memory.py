"""The memory of programs for TPUs, those that do not fit, and the bounds of real programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from einshard import explain, sharded, topology

pytest.importorskip('libtpu', reason='libtpu compiles for TPUs, and is not installed')

GIB = 2**30


def bf16(*shape, sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)


def test_bounds_of_a_program_for_tpus():
    """The chips of a v5e 4x4 in 4 lines: each sums 4 neighbors' terms over lines of links."""
    mesh = topology('v5e:4x4', data=4, tensor=4)

    @sharded('b@data x', 'x y@tensor', 'y@tensor z', mesh=mesh)
    def mlp(x, w_in, w_out):
        return jax.nn.relu(x @ w_in) @ w_out

    report = explain(mlp, bf16(4096, 2048), bf16(2048, 8192), bf16(8192, 2048), tries=0)
    bounds = {bound.resource: bound for bound in report.bounds}
    assert report.chip == 'TPU v5e'
    flops = 2 * 2 * 1024 * 2048 * 2048
    assert bounds['compute'].seconds == pytest.approx(flops / 197e12, rel=0.01)
    held = 2 * (2 * 1024 * 2048 + 2 * 2048 * 2048)  # x and the result, and both weights
    assert bounds['HBM'].seconds == pytest.approx(held / 819e9)
    (row,) = report.collectives
    assert row.kind == 'all-reduce'
    assert bounds['network'].along == 'tensor'
    assert bounds['network'].seconds == pytest.approx(row.bytes / 50e9)
    assert bounds['network'].exposed == (0 if row.is_async else bounds['network'].seconds)
    assert report.memory.capacity == int(15.75 * GIB)
    assert '<1% of 15.8 GiB' in str(report)


@pytest.fixture
def rows():
    """A sharding by rows over four chips."""
    return NamedSharding(topology('v5e:2x2', d=4), P('d'))


@sharded('b x -> b4 x', 'x y -> 4 x y', out='b x -> b4 x')
def too_large(x, w):
    return jnp.tanh(x @ w) @ w.T


def test_a_program_that_does_not_fit():
    arguments = bf16(400_000, 40_000), bf16(40_000, 200_000)
    report = explain(too_large, *arguments, mesh=topology('v5e:2x2'), intermediates=True, tries=0)
    memory = report.memory
    assert (report.n_devices, report.device_kind) == (4, 'TPU v5 lite')
    x, w, hidden = 2e5 * 4e4 / GIB, 8e4 * 2e5 / GIB, 2e5 * 2e5 / GIB
    # the compiler pads arrays, by less than a thousandth here
    assert memory.arguments / GIB == pytest.approx(x + w, rel=1e-3)
    assert memory.results / GIB == pytest.approx(x, rel=1e-3)
    assert memory.temporaries / GIB == pytest.approx(hidden, rel=1e-3)
    assert memory.capacity == int(15.75 * GIB)
    rows = [(row.path, row.placement) for row in (*report.arguments, *report.results)]
    assert rows == [('x', 'b x -> b4 x'), ('w', 'x y -> 4 x y'), ('result', 'b x -> b4 x')]
    largest = report.temporaries[0]
    assert (largest.array, largest.op_name) == ('bf16[100000,200000]', 'jit(too_large)/dot_general')
    assert largest.source.startswith(__file__)
    assert ('bf16[400000,200000]', 'a b -> a4 b') in [
        (row.array, row.placement) for row in report.intermediates
    ]
    assert report.findings[0].kind == 'does not fit'
    assert report.findings[0].text == (
        'the program needs 67.1 GiB of memory, but a device has only 15.8 GiB, '
        'so it does not compile'
    )


def test_a_jitted_program_that_does_not_fit(rows):
    """Not all arguments are used, one is donated, and the compiler chooses the result shardings."""

    def f(params, x, n):
        return {'a': jnp.tanh(x @ params['w'].T) @ params['w'], 'n': x.sum()}

    params = {'u': bf16(64, sharding=rows), 'w': bf16(200_000, 40_000, sharding=rows)}
    x, n = bf16(400_000, 40_000, sharding=rows), np.int32(1)
    report = explain(jax.jit(f, donate_argnums=1), params, x, n, tries=0)
    assert [(row.path, row.placement) for row in (*report.arguments, *report.results)] == [
        ('params/u', 'not used'),
        ('params/w', 'a b -> a@d b'),
        ('x', 'a b -> a@d b'),
        ('n', 'not used'),
        ('result/a', 'a b -> a@d b'),
        ('result/n', '... -> 4 ...'),
    ]
    assert report.collectives.counts == {'all-gather': 1, 'all-reduce': 1}
    assert 2 <= report.memory.results - report.memory.aliased <= 4096  # the sum, padded
    assert report.findings[0].kind == 'does not fit'


@pytest.mark.slow
def test_a_constraint_makes_a_program_too_large(rows):
    def f(x, w, v):
        hidden = jax.lax.with_sharding_constraint(x @ w, NamedSharding(rows.mesh, P()))
        return hidden @ v

    shapes = bf16(65_536, 1024, sharding=rows), bf16(1024, 131_072), bf16(131_072, 1024)
    report = explain(jax.jit(f), *shapes, tries=4)
    (finding,) = report.findings
    assert finding.kind == 'does not fit'
    assert 'the constraint in test_memory.py:' in finding.suggestion
    assert finding.tried.before.memory > report.memory.capacity > finding.tried.memory
    fixed = explain(report.fixed_function(), *shapes, tries=0)
    assert not fixed.findings
    assert fixed.memory.total < report.memory.capacity


def test_a_program_that_does_not_fit_on_the_mesh_in_context(rows):
    with jax.set_mesh(rows.mesh):
        report = explain(
            jax.jit(lambda x: x @ x.T, in_shardings=rows), bf16(400_000, 400_000), tries=0
        )
    assert report.arguments[0].placement == 'a b -> a@d b'
    assert report.findings[0].kind == 'does not fit'


def test_one_device_is_too_small(rows):
    one = NamedSharding(Mesh(rows.mesh.devices[:1], 'd'), P())
    report = explain(jax.jit(lambda x: x @ x), bf16(100_000, 100_000, sharding=one), tries=0)
    assert report.memory.total > report.memory.capacity
    assert [row.placement for row in report.results] == ['a b -> a b']


def add_rows(x):
    return jnp.cumsum(x[::-1], 0) + x


@sharded('b@d x', mesh=topology('v5e:2x2', d=4))
def add_rows_on_own_mesh(x):
    return add_rows(x)


def devices_known_from(place, rows):
    """Returns a function and its argument. Only `place` says on which devices the function runs."""
    x = bf16(400_000, 100_000)
    spec = P('d')
    by_rows = NamedSharding(rows.mesh, P('d'))
    if place == 'in_shardings':
        return jax.jit(add_rows, in_shardings=by_rows), x
    if place == 'out_shardings':
        return jax.jit(add_rows, out_shardings=by_rows), x
    if place == 'constraint':
        constrain = jax.lax.with_sharding_constraint
        return jax.jit(lambda x: constrain(add_rows(constrain(x, by_rows)), by_rows)), x
    if place == 'shard_map':
        add = jax.shard_map(add_rows, mesh=rows.mesh, in_specs=spec, out_specs=spec)
        return jax.jit(add), x
    if place == 'sharded':
        return add_rows_on_own_mesh, x
    if place == 'nested sharded':
        return jax.jit(lambda x: add_rows_on_own_mesh(x)), x
    one = SingleDeviceSharding(rows.mesh.devices.flat[0])
    return jax.jit(add_rows, in_shardings=one), x


PLACES = ['in_shardings', 'out_shardings', 'constraint', 'shard_map', 'sharded', 'nested sharded']


@pytest.mark.parametrize('place', [*PLACES, 'one device'])
@pytest.mark.parametrize('stage', ['function', 'traced', 'lowered'])
def test_programs_that_do_not_fit_on_devices_that_arguments_do_not_name(place, stage, rows):
    f, x = devices_known_from(place, rows)
    if stage == 'function':
        report = explain(f, x, tries=0)
    else:
        report = explain(f.trace(x) if stage == 'traced' else f.lower(x), tries=0)
    assert report.findings[0].kind == 'does not fit'
    n = 1 if place == 'one device' else 4
    assert (report.n_devices, report.device_kind) == (n, 'TPU v5 lite')
    assert report.memory.capacity == int(15.75 * GIB)
    names = ('b', 'x') if place == 'sharded' and stage == 'function' else ('a', 'b')
    on_d = '@d' * (n > 1)
    assert report.arguments[0].placement == '{0} {1} -> {0}{2} {1}'.format(*names, on_d)
    assert report.memory.arguments >= 2 * 400_000 * 100_000 / n


def test_lowered_programs_that_do_not_fit_and_drop_an_argument(rows):
    f = jax.jit(lambda unused, x: x @ x.T, in_shardings=rows)
    report = explain(f.lower(bf16(64), bf16(400_000, 400_000)), tries=0)
    placements = [row.placement for row in report.arguments]
    assert placements == ['not used', 'a b -> a@d b']
    assert report.findings[0].kind == 'does not fit'


def test_replicated_programs_that_do_not_fit(rows):
    """The compiler leaves out the shardings of the results."""
    replicated = NamedSharding(rows.mesh, P())
    f = jax.jit(lambda x: (x @ x, x.sum()), in_shardings=replicated)
    report = explain(f, bf16(100_000, 100_000), tries=0)
    assert [row.placement for row in report.results] == ['a b -> 4 a b', '... -> 4 ...']
    assert report.findings[0].kind == 'does not fit'


def scanned(w, x):
    def layer(x, w):
        return x + (jnp.sin(x @ w[0]) * jnp.cos(x @ w[1])) @ w[2], None

    return jax.lax.scan(layer, x, w)[0].sum()


def unrolled(w, x):
    for i in range(8):
        x = x + (jnp.sin(x @ w[0][i]) * jnp.cos(x @ w[1][i])) @ w[2][i]
    return x.sum()


def microbatches(w, x):
    def add(total, x):
        return total + scanned(w, x), None

    return jax.lax.scan(add, 0.0, x.reshape(2, 256, 64))[0]


@pytest.mark.parametrize('loss', [scanned, unrolled, microbatches])
def test_equal_temporaries(loss):
    """Compared with the memory that XLA allocates, which nearly all is residuals here."""
    w = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 64, 1024)] * 2]
    w.append(jax.ShapeDtypeStruct((8, 1024, 64), jnp.float32))
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    report = explain(jax.jit(jax.grad(loss)), w, x, tries=0)
    assert report.memory is not None
    assert sum(row.bytes for row in report.temporaries) == pytest.approx(
        report.memory.temporaries, rel=0.15
    )
    row = report.temporaries[0]
    line = (unrolled if loss is unrolled else scanned).__code__.co_firstlineno + 2
    assert row.source == f'{__file__}:{line}'
    if loss is unrolled:
        assert row.kept == 'residuals of the forward pass'
    else:
        at, shape = line + 2, '8,512,1024'
        if loss is microbatches:
            at, shape = microbatches.__code__.co_firstlineno + 4, '2,8,256,1024'
        assert row.kept == f'residuals of the loop in test_memory.py:{at}'
        assert (row.count, row.array) == (5, f'f32[{shape}]')
        assert f'5 x f32[{shape}]' in str(report)


def test_arrays_that_take_turns_count_once():
    """Each product replaces the one before."""

    def f(x, w):
        for _ in range(6):
            x = jnp.sort(x @ w)
        return x.sum()

    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    report = explain(jax.jit(f), x, x, tries=0)
    assert report.memory is not None
    total = sum(row.bytes for row in report.temporaries)
    assert 2**20 <= total <= 4 * 2**20
    assert max(row.count for row in report.temporaries) <= 2
    assert {row.kept for row in report.temporaries} == {''}
