"""lower, trace and compile of sharded functions, called as they were lowered; memory kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from refusal import refusal

from einshard import device_mesh, einshard, make_sharding, sharded

EIGHT = jax.devices()[:8]
X = np.arange(128, dtype=np.float32).reshape(8, 16) / 128
W = np.ones((8, 16), np.float32)


def add(x, w=2.0, *rest, n=1, scale=1.0, **more):
    return n * scale * (x + w) + sum(rest) + sum(more.values())


CALLS = {
    'by position': lambda f: f(X, W),
    'by keyword': lambda f: f(x=X, w=W),
    'in another order': lambda f: f(w=W, x=X),
    'both': lambda f: f(X, w=W),
    'keyword only': lambda f: f(X, scale=3.0),
    'all of it': lambda f: f(X, W, W, scale=3.0, z=W),
    'placed': lambda f: f(einshard(X, 'a* b', mesh=EIGHT), w=einshard(W, 'a* b', mesh=EIGHT)),
}


@pytest.mark.parametrize('how', CALLS)
@pytest.mark.parametrize('out', [None, 'a b*', '... b -> ... b*'])
def test_compiled_programs_are_called_as_they_were_lowered(how, out):
    w = None if how == 'keyword only' else 'a* b'
    f = sharded('a* b', w=w, scale=None, rest=None, more=None, out=out, mesh=EIGHT)(add)
    by_hand, call = jax.jit(add), CALLS[how]
    expected = call(by_hand)
    for lowered in (call(f.lower), call(lambda *args, **kw: f.trace(*args, **kw).lower())):
        assert type(lowered) is jax.stages.Lowered
        assert lowered.in_tree == call(by_hand.lower).in_tree
        compiled = lowered.compile()
        np.testing.assert_allclose(call(compiled), expected, rtol=1e-6)
        assert call(compiled).sharding.is_equivalent_to(call(f).sharding, 2)
        ours, theirs = (call(g.trace).jaxpr.in_avals for g in (f, by_hand))
        assert [a.str_short() for a in ours] == [a.str_short() for a in theirs]


def test_static_and_donated_arguments():
    f = sharded('a* b', out='a* b', mesh=EIGHT, static_argnames='n', donate_argnames=('x', 'w'))(
        add
    )
    for call in (
        lambda f, x, n: f(x, n=n) if n else f(x),
        lambda f, x, n: f(x=x, n=n) if n else f(x=x),
    ):
        x = einshard(X, 'a* b', mesh=EIGHT)
        compiled = call(f.lower, x, 3).compile()
        np.testing.assert_allclose(call(compiled, x, None), 3 * (X + 2), rtol=1e-6)
        assert x.is_deleted()


def test_defaults_that_are_arrays():
    @sharded('a* b', w='a b*', out='a b*', mesh=EIGHT)
    def f(x, w=W):
        return x + w

    for call in (lambda f: f(X), lambda f: f(x=X), lambda f: f(X, w=2 * W)):
        np.testing.assert_array_equal(call(call(f.lower).compile()), call(f))


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
def test_meshes_in_context(types):
    f = sharded('a* b', w='a* b', out='a b*')(add)
    with jax.set_mesh(device_mesh(EIGHT, axis_types=types)):
        compiled = f.lower(X, w=W).compile()
        np.testing.assert_allclose(compiled(X, w=W), X + W, rtol=1e-6)


def test_an_abstract_mesh():
    mesh = AbstractMesh((4,), ('p',), axis_types=(AxisType.Auto,))
    f = sharded('a@p b', w=None, out='a b@p', mesh=mesh)(add)
    lowered = f.trace(X, w=W).lower(lowering_platforms=('cpu',))
    assert lowered.as_text().count('stablehlo.add') >= 1
    assert f.out_shardings(X, w=W).spec == P(None, 'p')


@pytest.mark.parametrize('spec', ['a* b', 'a b*', '* a b'])
@pytest.mark.parametrize('method', ['eval_shape', 'trace'])
def test_placed_arrays_on_an_abstract_mesh(method, spec):
    mesh = AbstractMesh((8,), ('p',), axis_types=(AxisType.Auto,))
    f = sharded('a@p b', mesh=mesh)(add)
    for x in (einshard(X, spec, mesh=EIGHT), einshard(X, spec, mesh=EIGHT[:1])):
        out = getattr(f, method)(x)
        assert (out if method == 'eval_shape' else out.out_info).shape == X.shape


# -------------------------------------------------------------------------------- memory kinds


@pytest.mark.parametrize('later', [False, True])
def test_the_memory_kind_is_named(later):
    f = sharded('a* b', mesh=EIGHT)(add)
    if later:
        f(X)
        f(einshard(X, 'a* b', mesh=EIGHT))
    x = einshard(X, 'a* b', mesh=EIGHT, memory_kind='pinned_host')
    gradient = jax.grad(lambda x: f(x).sum())
    for call in (f, f.lower, lambda x: f(x=x), lambda x: f.lower(x=x), gradient):
        error = refusal(call, x)
        assert "parameter 'x' of add" in error.facts['array']
        assert error.sentence == (
            'the argument is in pinned_host memory, but its spec expects device memory'
        )


def test_the_fix_names_the_memory_kind_and_the_mesh():
    call = sharded('a* b (in pinned_host)', mesh=EIGHT)(add)
    error = refusal(call, einshard(X, 'a* b', mesh=EIGHT))
    spec = 'a b -> a* b (in pinned_host)'
    assert error.facts['try'] == (
        f"reshard=True in the decorator, or einshard(x, '{spec}', mesh=...) before the call"
    )
    call.trace(einshard(X, spec, mesh=EIGHT))
    in_context = sharded('a* b')(add)
    with jax.set_mesh(device_mesh(EIGHT)):
        error = refusal(in_context, einshard(X, 'a b*'))
        in_context(einshard(X, 'a b -> a* b'))
    assert error.facts['try'] == (
        "reshard=True in the decorator, or einshard(x, 'a b -> a* b') before the call"
    )


def test_reshard_brings_it_to_the_device():
    f = sharded('a* b', out='a* b', mesh=EIGHT, reshard=True)(add)
    for expression in ('a* b', 'a b*', '* a b'):
        x = einshard(X, expression, mesh=EIGHT, memory_kind='pinned_host')
        for _ in range(2):
            result = f(x)
            np.testing.assert_allclose(result, X + 2, rtol=1e-6)
            assert result.sharding == make_sharding('a* b', mesh=EIGHT)


def test_replicated_arrays_are_moved_to_the_device():
    f = sharded('a* b', mesh=EIGHT)(add)
    for _ in range(2):
        x = einshard(X, '* a b', mesh=EIGHT, memory_kind='pinned_host')
        np.testing.assert_allclose(f(x), X + 2, rtol=1e-6)
        f(jnp.asarray(X))
