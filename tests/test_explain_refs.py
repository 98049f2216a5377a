"""explain of programs with values that are not plain arrays: `jax.Ref`s and partial sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of

from einshard import assert_collectives, einshard, explain, sharded


def ref(shape, spec):
    return jax.new_ref(einshard(np.ones(shape, np.float32), spec))


@pytest.fixture
def refs():
    return {'a': ref(16, '* a'), 'b': ref(16, 'a*')}


def accumulate(unused, refs, x):
    refs['a'][...] += jnp.sum(x)
    return x * 2, refs['b'][...]


X = np.ones(16, np.float32)
PLACED = [('x', 'a -> a16'), ('refs/a', 'a -> 16 a'), ('refs/b', 'a -> a16')]


@pytest.mark.parametrize('decorate', [lambda f: f, jax.jit, sharded(None, None, 'a*')])
def test_arguments_may_be_refs(refs, decorate):
    x = einshard(X, 'a*')
    report = explain(decorate(accumulate), x, refs, x, tries=0)
    found = {row.path: row.placement for row in report.arguments}
    assert {path: found[path] for path, _ in PLACED} == dict(PLACED)
    assert found['unused'] == 'not used'
    results = [(row.path, row.placement) for row in report.results]
    assert results == [('result/0', 'a -> a16'), ('result/1', 'a -> a16')]
    assert report.collectives.counts == {'all-reduce': 1}
    assert 'refs/a' in str(report)
    assert_collectives(decorate(accumulate), x, refs, x, allowed='all-reduce')


def test_stages(refs):
    x = einshard(X, 'a*')
    traced = jax.jit(accumulate).trace(x, refs, x)
    paths = [row.path for row in explain(traced, tries=0).arguments]
    assert paths == ['unused', 'refs/a', 'refs/b', 'x']
    paths = [
        row.path for row in explain(traced.lower(), tries=0).arguments
    ]  # JAX calls them Arg_0, ..
    assert paths == ['args[0]', 'args[1]/a', 'args[1]/b', 'args[2]']


def test_static_arguments_do_not_shift_names(refs):
    def scaled(n, r, x):
        r[...] = r[...] * n
        return x + r[...]

    x = einshard(X, 'a*')
    report = explain(jax.jit(scaled, static_argnums=0), 3, refs['b'], x, tries=0)
    assert [row.path for row in report.arguments] == ['r', 'x']


def test_refs_that_a_function_closes_over():
    weights = ref((32, 32), 'a* b')

    def layer(unused, x):
        weights[...] = weights[...] * 2
        return x @ einshard(weights[...], '* a b')

    x = einshard(np.ones((16, 32), np.float32), 'b* d')
    report = explain(layer, x, x, tries=0)
    arguments = [(row.path, row.placement) for row in report.arguments]
    assert arguments == [('unused', 'not used'), ('x', 'a b -> a16 b')]
    (row,) = report.collectives
    assert (row.kind, row.arrays) == ('all-gather', 'f32[32,32]')
    assert row.of == ()  # it gathers none of the arguments


def test_a_sum_may_end_in_a_ref():
    total = ref(16, '* a')

    def step(total, x):
        total[...] += jnp.sum(x, 0)
        return jnp.zeros(3)

    report = explain(step, total, einshard(np.ones((32, 16), np.float32), 'b* a'), tries=0)
    (row,) = report.collectives
    assert (row.kind, row.of) == ('all-reduce', ('total',))


# --- partial sums -------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    mesh = mesh_of(types=AxisType.Explicit, x=2, y=4)
    with jax.set_mesh(mesh):
        yield mesh


@jax.jit
def partial(a, b):
    out = P('x', None, unreduced={'y'})
    return jnp.einsum('ij,jk->ik', a, b, out_sharding=out)


def test_partial_sums_are_described(mesh):
    a = jax.device_put(np.ones((8, 16), np.float32), P('x', 'y'))
    b = jax.device_put(np.ones((16, 32), np.float32), P('y', None))
    report = explain(partial, a, b, tries=0)
    (row,) = report.results
    assert row.placement == 'a b -> a@x b +@y'
    assert (row.bytes, row.sharded) == (4 * 4 * 32, True)
    assert report.collectives == ()


def test_partial_sums_may_be_arguments(mesh):
    out = NamedSharding(mesh, P(None, None, unreduced={'y'}))
    x = jax.ShapeDtypeStruct((8, 32), np.float32, sharding=out)
    report = explain(jax.jit(lambda x: x + x), x, replicated_above=0, tries=0)
    assert [row.placement for row in (*report.arguments, *report.results)] == ['a b -> a b +@y'] * 2
    assert report.findings == ()  # each device has its own term, not a copy
