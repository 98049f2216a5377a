"""jax.Ref: its sharding is fixed, so einshard checks it and never moves it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of
from refusal import refusal

from einshard import (
    Rules,
    describe,
    einshard,
    for_optimizer,
    from_local,
    gather,
    shard_largest,
    sharded,
    show,
)

X = np.arange(16, dtype=np.float32)
STAYS = "a jax.Ref cannot be resharded, and this one is sharded as 'on one device: "
UNCONSTRAINED = 'a jax.Ref cannot be constrained: its sharding is fixed when it is created'


def ref(expression='a*'):
    return jax.new_ref(einshard(X, expression))


@pytest.mark.parametrize('spec', ['a*', 'i -> i16', Rules([('', 'x*')]), shard_largest])
def test_a_placed_ref_is_returned(spec):
    x = ref()
    assert einshard(x, spec) is x
    tree = {'r': x, 'x': X}
    placed = einshard(tree, {'r': spec, 'x': 'a*'})
    assert placed['r'] is x
    assert placed['x'].sharding == x.sharding


def test_another_sharding_is_an_error():
    x = jax.new_ref(jnp.asarray(X))
    before = x.sharding
    error = refusal(einshard, x, 'a*')
    assert error.sentence.startswith(STAYS)
    assert error.facts['instead'] == "jax.new_ref(einshard(ref[...], 'a*'))"
    assert x.sharding == before
    placed = jax.new_ref(einshard(x[...], 'a*'))  # as the error suggests
    assert einshard(placed, 'a*') is placed
    np.testing.assert_array_equal(placed[...], X)


def test_a_ref_in_another_memory():
    error = refusal(einshard, ref(), 'a*', memory_kind='pinned_host')
    assert error.facts == {'array': 'float32[16]', 'expected': "'a* (in pinned_host)'"}


def test_the_error_names_the_leaf_of_a_tree():
    tree = {'layers': [{'w': jax.new_ref(jnp.asarray(X)), 'b': X}]}
    for spec in ('x*', Rules([('w', 'x*')], default=None), for_optimizer(tree, 'x*')):
        error = refusal(einshard, tree, spec)
        assert error.sentence.startswith(STAYS)
        assert error.facts['array'] == "float32[16], leaf 'layers/0/w'"


def test_a_spec_that_does_not_fit_is_an_error():
    assert 'names 2 axes' in refusal(einshard, ref(), 'a b*').sentence
    assert 'size 3' in refusal(einshard, jax.new_ref(jnp.zeros(3)), 'a*').sentence


def in_jit(x):
    jax.jit(lambda r: einshard(r, 'a*'))(x)


def in_scan(x):
    def body(carry, _):
        einshard(r_of[0], 'a*')
        return carry, None

    r_of = []

    @jax.jit
    def step(r):
        r_of[:] = [r]
        jax.lax.scan(body, 0, None, length=2)

    step(x)


def created_in_jit(x):
    def step(value):
        return einshard(jax.new_ref(value), 'a*')[...]

    jax.jit(step)(x[...])


@pytest.mark.parametrize('trace', [in_jit, in_scan, created_in_jit])
def test_a_traced_ref_cannot_be_constrained(trace):
    error = refusal(trace, ref())
    assert error.sentence == UNCONSTRAINED
    assert error.facts['instead'] == "constrain its value: einshard(ref[...], 'a*')"


def test_the_value_of_a_traced_ref_is_constrained():
    @jax.jit
    def step(r):
        r[...] = einshard(r[...], 'a*') + 1

    x = ref()
    step(x)
    assert describe(x) == 'a -> a16'
    np.testing.assert_array_equal(x[...], X + 1)


def test_a_ref_that_a_traced_function_closes_over():
    x = ref()

    @jax.jit
    def step():
        r = einshard(x, 'a*')

        def body(carry, _):
            r[...] = einshard(r, 'a*')[...] * 2
            return carry, None

        jax.lax.scan(body, 0, None, length=3)

    step()
    np.testing.assert_array_equal(x[...], X * 8)
    assert describe(x) == 'a -> a16'


def test_refs_on_explicit_axes():
    mesh = mesh_of(types=AxisType.Explicit, d=8, t=2)
    x = jax.new_ref(jax.device_put(X, NamedSharding(mesh, P('d'))))

    @jax.jit
    def step(r):
        assert einshard(r, 'a@d') is r
        r[...] = r[...] + 1
        assert refusal(einshard, r, 'a@t').sentence == UNCONSTRAINED

    with jax.set_mesh(mesh):
        step(x)
        assert einshard(x, 'a@d') is x
        assert refusal(einshard, x, 'a@t').sentence.endswith("sharded as 'a -> a@d'")
    np.testing.assert_array_equal(x[...], X + 1)


def test_as_an_argument_of_sharded():
    @sharded('a*', 'a*')
    def step(r, x):
        r[...] = r[...] + x
        return r[...].sum()

    x = ref()
    for n in (1, 2, 3):
        step(x, X)
        np.testing.assert_array_equal(x[...], X * (n + 1))
    assert describe(x) == 'a -> a16'


@pytest.mark.parametrize('reshard', [False, True])
def test_sharded_names_the_parameter_of_a_misplaced_ref(reshard):
    @sharded({'w': 'a*'}, None, reshard=reshard)
    def step(params, x):
        params['w'][...] = params['w'][...] + x

    for x in (jax.new_ref(jnp.asarray(X)), ref('* a')):
        error = refusal(step, {'w': x}, 1.0)
        assert 'a jax.Ref cannot be resharded' in error.sentence
        assert error.facts['array'] == "float32[16], parameter 'params/w' of step"
        placed = jax.new_ref(einshard(x[...], 'a*'))
        step({'w': placed}, 1.0)
        np.testing.assert_array_equal(placed[...], X + 1)
    error = refusal(step, {'w': jax.new_ref(jnp.asarray(X))}, 1.0)  # after a call that worked
    assert error.facts['array'] == "float32[16], parameter 'params/w' of step"


def test_describe_show_and_gather():
    x = ref('a -> 2 a8')
    assert describe(x) == 'a -> 2 a8'
    assert describe({'r': x, 'n': 3})['r'] == 'a -> 2 a8'
    assert str(show(x)) == str(show(x[...]))
    host = gather({'r': x})['r']
    assert type(host) is np.ndarray
    np.testing.assert_array_equal(host, X)
    x[...] = x[...] + 1
    np.testing.assert_array_equal(host, X)  # a copy
    scalar = jax.new_ref(jnp.float32(3))
    assert gather(scalar) == 3
    assert describe(scalar).startswith('on one device: ')


def test_from_local_returns_a_placed_ref():
    x = ref()
    assert from_local(x, 'a*') is x
    assert refusal(from_local, jax.new_ref(jnp.asarray(X)), 'a*').sentence.startswith(STAYS)


def test_refs_in_a_table_of_rules():
    (row,) = Rules([('w', 'a*')]).table({'w': jax.new_ref(jnp.asarray(X))}).rows
    assert (row.shape, row.dtype, row.shard_shape) == ((16,), 'float32', (1,))
