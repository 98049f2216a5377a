"""sharded functions in programs and transformations, against jax.jit, shard shapes and numpy.

Specs apply, arrays are refused or moved as in a plain call, and meshes are not confused.
"""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import EIGHT, MOVED, REFUSED, REPLICATED, mesh_of
from refusal import refusal

import einshard as package
from einshard import device_mesh, einshard, make_sharding, per_device, sharded

DEVICES = jax.devices()
LOW, HIGH = DEVICES[:4], DEVICES[4:8]
X = np.arange(128, dtype=np.float32).reshape(8, 16) / 128
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ON_COLUMNS = 'float32[8,16@(d0,d1,d2)]'

on_eight = sharded('a* b', out='a b*', mesh=EIGHT)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def as_method(decorate, function):
    """A bound method with the function as its body."""

    class Holder:
        @decorate
        def method(self, x):
            return function(x)

    jax.tree_util.register_pytree_node(Holder, lambda _: ((), None), lambda *_: Holder())
    return Holder().method


# a sharded function in a transformation, for values, with the same values as a plain call
PLACES = {
    'call': lambda f: f(X),
    'jit': lambda f: jax.jit(lambda x: f(x))(X),
    'jit in jit': lambda f: jax.jit(jax.jit(lambda x: f(x)))(X),
    'cond in jit': lambda f: jax.jit(lambda x: jax.lax.cond(x[0, 0] < 1, f, f, x))(X),
    'cond': lambda f: jax.lax.cond(True, f, f, X),
    'switch': lambda f: jax.lax.switch(1, [f, f], X),
    'remat': lambda f: jax.jit(lambda x: jax.checkpoint(f)(x))(X),
    'scan': lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, X[None])[1][0],
    'map': lambda f: jax.lax.map(f, X[None])[0],
    'while': lambda f: jax.lax.fori_loop(0, 1, lambda i, x: f(x) * 1.0, f(X)) - 1,
    'grad': lambda f: jax.value_and_grad(lambda x: (f(x).sum(), f(x)), has_aux=True)(X)[0][1],
    'vmap': lambda f: jax.vmap(f)(X[None])[0],
    'vmap in jit': lambda f: jax.jit(jax.vmap(f))(X[None])[0],
    'jvp': lambda f: jax.jvp(f, (X,), (X,))[0],
    'vjp in jit': lambda f: jax.jit(lambda x: jax.vjp(f, x)[0])(X),
    'sharded': lambda f: sharded(lambda x: f(x))(X),
}

# ------------------------------------------------------------------------- out= on explicit axes


def add(x):
    return x + 1


# the same function in several ways, for a mesh in context
KINDS = {
    'function': lambda mesh: sharded('a* b', out='a b*')(add),
    'by rank': lambda mesh: sharded('... b -> ... b*', out='... b -> ... b*')(add),
    'method': lambda mesh: as_method(sharded(x='a* b', out='a b*'), add),
    'mesh given': lambda mesh: sharded('a* b', out='a b*', mesh=mesh)(add),
    'tree': lambda mesh: (
        lambda x: sharded('a* b', out={'y': 'a b*', 'z': None})(lambda x: {'y': x + 1, 'z': x})(x)[
            'y'
        ]
    ),
}


@pytest.mark.parametrize(
    ('place', 'kind', 'called_before'),
    [(place, [*KINDS][i % 5], i % 2) for i, place in enumerate(PLACES)],
)
def test_out_is_honoured_on_explicit_axes(place, kind, called_before):
    mesh = device_mesh(EIGHT, axis_types=EXPLICIT)
    f = KINDS[kind](mesh)
    seen = []

    def noted(x):
        y = f(x)
        seen.append(str(jax.typeof(y)))
        return y

    with jax.set_mesh(mesh):
        if called_before:
            f(X)
            f(einshard(X, 'a b*') if kind == 'by rank' else einshard(X, 'a* b'))
        close(PLACES[place](noted), X + 1)
    assert seen
    assert all(text.endswith('16@(d0,d1,d2)]') for text in seen), seen


@pytest.mark.parametrize('given', [False, True])
def test_arguments_have_the_types_of_their_specs_inside(given):
    mesh = device_mesh(EIGHT, axis_types=EXPLICIT)
    seen = set()

    @sharded('a b*', mesh=mesh if given else None)
    def f(x):
        seen.add(str(jax.typeof(x)))
        return x * 2

    with jax.set_mesh(mesh):
        for x in (X, jnp.asarray(X), einshard(X, 'a b*')):
            close(f(x), 2 * X)
            close(jax.jit(lambda x: f(x))(x), 2 * X)
            close(jax.grad(lambda x: f(x).sum())(x), np.full_like(X, 2))
    assert seen == {ON_COLUMNS}


def test_gradients_and_maps_on_explicit_axes_are_those_of_jit():
    with jax.set_mesh(device_mesh(EIGHT, axis_types=EXPLICIT)):
        f = sharded('a* b', out='a b*')(jnp.sin)
        x, batch = einshard(X, 'a* b'), np.stack([X, 2 * X])
        gradient = jax.grad(lambda x: f(x).sum())(x)
        close(gradient, np.cos(X))
        assert gradient.sharding.is_equivalent_to(x.sharding, 2)
        mapped = jax.vmap(f)(batch)
        close(mapped, np.sin(batch))
        assert str(jax.typeof(mapped)) == 'float32[2,8,16@(d0,d1,d2)]'
        transposed = jax.vmap(f, in_axes=2, out_axes=1)(batch.transpose(1, 2, 0))
        close(transposed, np.sin(batch).swapaxes(0, 1))
        close(jax.jit(jax.vmap(jax.grad(lambda x: f(x).sum())))(batch), np.cos(batch))


def test_nested_on_automatic_axes_it_is_a_constraint_of_jit():
    mesh = mesh_of(p=8)
    by_hand = jax.jit(
        add,
        in_shardings=NamedSharding(mesh, P('p')),
        out_shardings=NamedSharding(mesh, P(None, 'p')),
    )
    for f in (on_eight(add), by_hand):
        y = jax.jit(lambda x, f=f: f(x))(X)
        assert {shard.data.shape for shard in y.addressable_shards} == {(8, 2)}
        close(y, X + 1)
    text = str(jax.make_jaxpr(lambda x: on_eight(add)(x))(X))
    assert 'neg' not in text
    assert text.count('sharding_constraint') == 1


# ------------------------------------------------------------------------------------- two meshes


@pytest.mark.parametrize('types', [AUTO, EXPLICIT])
def test_meshes_with_the_same_names_and_sizes_take_turns(types):
    """While tracing, JAX distinguishes meshes only by their axis names and sizes."""
    f = sharded('a@p b', out='a b@p')(lambda x: einshard(2 * x, 'a b@p'))
    for place in ['call', 'jit', 'cond', 'remat', 'grad', 'vmap', 'scan', 'sharded']:
        for devices in (LOW, HIGH):
            with jax.set_mesh(mesh_of(devices, types, p=4)):
                result = PLACES[place](f)
            close(result, 2 * X)
            assert result.sharding.device_set == set(devices), place


def test_a_mesh_that_is_given_wins_over_one_that_looks_the_same():
    inner = sharded('a b@p', out='a@p b')(lambda x: x + 1)
    outer = sharded('a@p b', out='a@p b', mesh=mesh_of(LOW, p=4))(lambda x: inner(x) * 2)
    for _ in range(2):
        with jax.set_mesh(mesh_of(HIGH, p=4)):
            assert inner(X).sharding.device_set == set(HIGH)
        assert outer(X).sharding.device_set == set(LOW)


# ----------------------------------------------- eager transformations of arrays placed differently


def sum_of(f):
    return lambda x: f(x).sum()


EAGER = {
    'grad': (lambda f, x: jax.grad(sum_of(f))(x), np.cos),
    'vmap': (lambda f, x: jax.vmap(f)(x[None])[0], np.sin),
    'vmap of the last axis': (lambda f, x: jax.vmap(f, in_axes=2)(jnp.stack([x, x], 2))[1], np.sin),
    'jvp': (lambda f, x: jax.jvp(f, (x,), (x,))[1], lambda x: np.cos(x) * x),
    'vmap of grad': (lambda f, x: jax.vmap(jax.grad(sum_of(f)))(x[None])[0], np.cos),
}
WAYS = ['before', 'after', 'keyword', 'method', 'in context']


def sine(x, y=0.0):
    return jnp.sin(x) + 0 * y


def sharded_sine(way, **options):
    """sharded(..) of a sine, before or after its first plain call; or on the mesh in context."""
    mesh = None if way == 'in context' else EIGHT
    others = {} if way == 'method' else {'y': None}
    decorate = sharded(x='a* b', out='a b*', mesh=mesh, **others, **options)
    f = as_method(decorate, jnp.sin) if way == 'method' else decorate(sine)
    if way in ('after', 'keyword'):
        f(X), f(X, 1.0), f(x=X)
    return (lambda x, y=0.0: f(y=y, x=x)) if way == 'keyword' else f


def in_turns(kinds):
    """Each kind of array in every other transformation, with a way to make the function."""
    for i, kind in enumerate(kinds):
        for j, how in enumerate(EAGER):
            if (i + j) % 2 == 0:
                # JAX's own x[None] fails before in a context of other devices
                ways = WAYS[:-1] if 'vmap' in how and 'device' in kind else WAYS
                yield kind, how, ways[(i + j) // 2 % len(ways)]


@pytest.mark.parametrize(('kind', 'how', 'way'), [*in_turns(MOVED)])
def test_unsharded_arrays_are_moved_in_eager_transformations(kind, how, way):
    transformed, expected = EAGER[how]
    x = MOVED[kind](X)
    with jax.set_mesh(device_mesh(EIGHT)) if way == 'in context' else nullcontext():
        f = sharded_sine(way)
        for _ in range(2):
            close(transformed(f, x), expected(X))


@pytest.mark.parametrize(('kind', 'how', 'way'), [*in_turns(REFUSED)])
def test_arrays_sharded_differently_are_refused_in_eager_transformations(kind, how, way):
    transformed, expected = EAGER[how]
    x = REFUSED[kind](X)
    with jax.set_mesh(device_mesh(EIGHT)) if way == 'in context' else nullcontext():
        error = refusal(transformed, sharded_sine(way), x)
        assert error.sentence.startswith('the argument is already sharded differently')
        assert error.facts['array'].startswith("float32[8,16], parameter 'x' of ")
        if 'jvp' not in how:  # tangents of other devices are JAX's matter
            close(transformed(sharded_sine(way, reshard=True), x), expected(X))


@pytest.mark.parametrize('how', ['grad', 'vmap'])
def test_captured_arrays_in_eager_transformations_on_a_mesh_in_context(how):
    """The transformation hides the devices of the mesh, and the array is not traced."""
    transformed, expected = EAGER[how]
    with jax.set_mesh(device_mesh(EIGHT)):
        same, other = (einshard(X, spec) for spec in ('a* b', 'a b*'))
        f, resharding = (sharded('a* b', 'a* b', reshard=on)(sine) for on in (False, True))
        for g, y in ((f, same), (f, jax.device_put(X, DEVICES[9])), (resharding, other)):
            close(transformed(lambda x, g=g, y=y: g(x, y), X), expected(X))
        error = refusal(transformed, lambda x: f(x, other), X)
    assert error.sentence.startswith('the argument is already sharded differently')


def test_leaves_are_named_by_their_path_in_transformations():
    f = sharded(None, {'u': 'a* b', 'v': 'a* b'}, mesh=EIGHT)(
        lambda s, w: s * (w['u'] + w['v']).sum()
    )
    good, bad = einshard(X, 'a* b', mesh=EIGHT), einshard(X, 'a b*', mesh=EIGHT)
    for wrong in ({'u': good, 'v': bad}, {'u': X, 'v': bad}):
        for call in (
            lambda w: jax.grad(f)(2.0, w),
            lambda w: jax.grad(f, argnums=1)(2.0, w),
            lambda w: jax.grad(lambda w: f(2.0, w))(w),
        ):
            assert refusal(call, wrong).facts['array'].endswith("parameter 'w/v' of <lambda>")
    close(jax.grad(f)(2.0, {'u': good, 'v': good}), 2 * X.sum())


@pytest.mark.parametrize('call', [lambda f, x: f(x), lambda f, x: f(x=x)])
def test_cotangents_may_be_sharded_differently(call):
    """`out=` does not constrain cotangents, before and after eager calls."""
    f = on_eight(lambda x: jnp.sin(x))
    rows = einshard(X, 'a* b', mesh=EIGHT)
    for x in (rows, X, rows, X):
        y, pull = jax.vjp(lambda x: call(f, x), x)
        for cotangent in (y, rows, einshard(X, REPLICATED, mesh=EIGHT), jnp.asarray(X), X):
            close(pull(cotangent)[0], np.cos(X) * np.asarray(cotangent))
        call(f, x)
    with jax.set_mesh(device_mesh(EIGHT)):
        g = sharded('a* b', out='a b*')(lambda x: jnp.sin(x))
        for x in (X, rows, X, rows):
            close(jax.grad(lambda x: call(g, x).sum())(x), np.cos(X))
            call(g, x)


@pytest.mark.parametrize('called_before', [False, True])
@pytest.mark.parametrize('out', [None, '... b -> ... b*'])
@pytest.mark.parametrize('error', [ValueError('mine'), RuntimeError('mine'), KeyError('mine')])
def test_an_error_of_the_function_passes_through_after_one_run(error, out, called_before):
    @counted
    def body(x, y=0.0):
        if x.shape[-1] > 8:
            raise error
        return x + y

    f = sharded('... b -> ... b*', None, out=out, mesh=EIGHT)(body)
    for call in (
        lambda x: f(x),
        lambda x: f(x=x),
        lambda x: f(y=1.0, x=x),
        lambda x: jax.grad(sum_of(f))(x),
        lambda x: jax.grad(f)(jnp.asarray(x)),
        lambda x: jax.vmap(f)(x[None]),
        lambda x: jax.jit(lambda x: f(x))(x),
    ):
        if called_before:
            f(X[:, :8])
        body.runs = 0
        with pytest.raises(type(error), match='mine') as caught:
            call(X)
        assert caught.value is error
        assert body.runs == 1
        folder = package.__path__[0]
        ours = [entry for entry in caught.traceback if str(entry.path).startswith(folder)]
        assert not ours
        error.__traceback__ = None


def test_nested_and_on_its_own_it_is_traced_once():
    body = counted(add)
    f = on_eight(body)
    f(X)
    jax.jit(lambda x: f(x))(X)
    jax.jit(lambda x: f(2 * x))(X)
    f(X)
    assert body.runs == 1


def test_per_device_in_transformations():
    f = per_device('a* b', out='a* b', mesh=EIGHT)(jnp.sin)
    for make in [*MOVED.values()] * 2:
        close(jax.grad(sum_of(f))(make(X)), np.cos(X))
        close(f(make(X)), np.sin(X))
    error = refusal(jax.grad(sum_of(f)), REFUSED['by columns'](X))
    assert error.sentence.startswith('the argument is already sharded differently')


# --- the devices of a program --------------------------------------------------------------------


@pytest.mark.parametrize('types', [AUTO, EXPLICIT])
def test_a_mesh_of_the_same_devices(types):
    """It may have other names, sizes and orders."""
    x = einshard(X, 'a* b', mesh=mesh_of(types=types, p=8))
    for mesh in (mesh_of(data=4, tp=2), EIGHT, EIGHT[::-1]):
        if types == AUTO:
            constrain = jax.jit(lambda x, mesh=mesh: einshard(x, 'a* b', mesh=mesh))
            np.testing.assert_array_equal(constrain(x), X)
        inner = sharded('a* b', out='a b*', mesh=mesh, reshard=True)(jnp.copy)
        np.testing.assert_array_equal(inner(x), X)
    one = mesh_of(data=1)
    f = sharded('a* b', mesh=one)(lambda x: einshard(x, 'a@data b', mesh=one))
    np.testing.assert_array_equal(f(X), X)


def test_without_specs_a_function_runs_on_the_devices_of_its_arguments():
    x = einshard(X, 'a* b', mesh=LOW)
    body = sharded('a* b', out='a b*', mesh=LOW)(jnp.copy)
    for inner in (body, lambda x: einshard(x, 'a b*', mesh=LOW)):
        for f in (sharded(inner), sharded(mesh=EIGHT)(inner), jax.jit(inner)):
            assert f(x).sharding.is_equivalent_to(make_sharding('a b*', mesh=LOW), 2)


def test_arrays_on_more_devices_are_resharded_in_each_call():
    f = sharded('a* b', out='a b*', mesh=LOW, reshard=True)(lambda x: einshard(2 * x, 'a b*'))
    for x in (X, einshard(X, 'a b*'), X, einshard(X, 'a* b', mesh=EIGHT)):
        close(f(x), 2 * X)
        close(jax.grad(sum_of(f))(jnp.asarray(x)), np.full(X.shape, 2.0))
