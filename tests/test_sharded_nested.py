"""sharded functions in programs and transformations, beside jax.jit, shard shapes and numpy.

Specs are honoured, arrays are refused or moved as in a plain call, and meshes are not confused.
"""

import warnings
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import EinshardError, device_mesh, einshard, per_device, sharded

DEVICES = jax.devices()
EIGHT = DEVICES[:8]
X = np.arange(128, dtype=np.float32).reshape(8, 16) / 128
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(devices, types=AUTO, names='p'):
    return Mesh(np.array(devices), (names,), axis_types=(types,))


def typed(x):
    return str(jax.typeof(x))


def shards(x):
    return {shard.data.shape for shard in x.addressable_shards}


def close(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------- out= on explicit axes

PLACES = {
    'jit': lambda f: jax.jit(f)(X),
    'jit in jit': lambda f: jax.jit(jax.jit(f))(X),
    'cond in jit': lambda f: jax.jit(lambda x: jax.lax.cond(x[0, 0] < 1, f, f, x))(X),
    'cond': lambda f: jax.lax.cond(True, f, f, X),
    'switch': lambda f: jax.lax.switch(1, [f, f], X),
    'remat': lambda f: jax.jit(jax.checkpoint(f))(X),
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


KINDS = ['function', 'by rank', 'method', 'mesh given', 'tree']


@pytest.mark.parametrize(
    ('place', 'kind', 'called_before'),
    [(place, KINDS[i % 5], i % 2) for i, place in enumerate(PLACES)],
)
def test_out_is_honoured_on_explicit_axes(place, kind, called_before):
    mesh = device_mesh(EIGHT, axis_types=EXPLICIT)
    seen = []
    add = lambda x: x + 1  # noqa: E731
    if kind == 'by rank':
        f = sharded('... b -> ... b*', out='... b -> ... b*')(add)
    elif kind == 'mesh given':
        f = sharded('a* b', out='a b*', mesh=mesh)(add)
    elif kind == 'tree':
        inner = sharded('a* b', out={'y': 'a b*', 'z': None})(lambda x: {'y': x + 1, 'z': x})
        f = lambda x: inner(x)['y']  # noqa: E731
    elif kind == 'method':

        class Adder:
            @sharded(x='a* b', out='a b*')
            def add(self, x):
                return x + 1

        jax.tree_util.register_pytree_node(Adder, lambda _: ((), None), lambda *_: Adder())
        f = Adder().add
    else:
        f = sharded('a* b', out='a b*')(add)

    def noted(x):
        y = f(x)
        seen.append(typed(y))
        return y

    with jax.set_mesh(mesh):
        if called_before:
            f(X)
            f(einshard(X, 'a b*') if kind == 'by rank' else einshard(X, 'a* b'))
        result = PLACES[place](noted)
    close(result, X + 1)
    assert seen
    assert {text[text.index('16') :] for text in seen} == {'16@(d0,d1,d2)]'}


@pytest.mark.parametrize('given', [False, True])
def test_arguments_have_the_types_of_their_specs_inside(given):
    mesh = device_mesh(EIGHT, axis_types=EXPLICIT)
    seen = []

    @sharded('a b*', **({'mesh': mesh} if given else {}))
    def f(x):
        seen.append(typed(x))
        return x * 2

    with jax.set_mesh(mesh):
        for x in (X, jnp.asarray(X), einshard(X, 'a b*')):
            close(f(x), 2 * X)
            close(jax.jit(lambda x: f(x))(x), 2 * X)
            close(jax.grad(lambda x: f(x).sum())(x), np.full_like(X, 2))
    assert set(seen) == {'float32[8,16@(d0,d1,d2)]'}


def test_gradients_and_maps_on_explicit_axes_are_those_of_jit():
    mesh = device_mesh(EIGHT, axis_types=EXPLICIT)
    with jax.set_mesh(mesh):
        f = sharded('a* b', out='a b*')(jnp.sin)
        x = einshard(X, 'a* b')
        gradient = jax.grad(lambda x: f(x).sum())(x)
        close(gradient, np.cos(X))
        assert gradient.sharding.is_equivalent_to(x.sharding, 2)
        batch = np.stack([X, 2 * X])
        mapped = jax.vmap(f)(batch)
        close(mapped, np.sin(batch))
        assert typed(mapped) == 'float32[2,8,16@(d0,d1,d2)]'
        close(
            jax.vmap(f, in_axes=2, out_axes=1)(batch.transpose(1, 2, 0)),
            np.sin(batch).swapaxes(0, 1),
        )
        close(jax.jit(jax.vmap(jax.grad(lambda x: f(x).sum())))(batch), np.cos(batch))


def test_out_of_a_nested_function_is_a_constraint_on_automatic_axes():
    f = sharded('a* b', out='a b*', mesh=EIGHT)(lambda x: x + 1)
    by_hand = jax.jit(
        lambda x: x + 1,
        in_shardings=NamedSharding(mesh_of(EIGHT), P('p')),
        out_shardings=NamedSharding(mesh_of(EIGHT), P(None, 'p')),
    )
    for one in (f, by_hand):
        y = jax.jit(lambda x, one=one: one(x))(X)
        assert shards(y) == {(8, 2)}
        close(y, X + 1)


# ------------------------------------------------------------------------------------- two meshes

LOW, HIGH = DEVICES[:4], DEVICES[4:8]
INSIDE = {
    'plain': lambda f: f(X),
    'jit': lambda f: jax.jit(lambda x: f(x))(X),
    'cond': lambda f: jax.lax.cond(True, f, f, X),
    'checkpoint': lambda f: jax.jit(lambda x: jax.checkpoint(f)(x))(X),
    'grad': lambda f: jax.grad(lambda x: f(x).sum())(X),
    'vmap': lambda f: jax.vmap(f)(X[None])[0],
    'scan': lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, X[None])[1][0],
    'sharded': lambda f: sharded('a@p b')(lambda x: f(x))(X),
}


@pytest.mark.parametrize(
    ('first', 'second', 'types'),
    [
        (('plain', 'jit', 'grad')[(i + j) % 3], second, types)
        for i, second in enumerate(INSIDE)
        for j, types in enumerate((AUTO, EXPLICIT))
    ],
)
def test_meshes_with_the_same_names_and_sizes_take_turns(first, second, types):
    """While tracing, JAX knows a mesh by its names and sizes alone."""
    f = sharded('a@p b', out='a b@p')(lambda x: einshard(2 * x, 'a b@p'))
    for _ in range(2):
        for devices, how in ((LOW, first), (HIGH, second), (HIGH, 'plain'), (LOW, second)):
            with jax.set_mesh(mesh_of(devices, types)):
                result = INSIDE[how](f)
            close(result, np.full_like(X, 2) if how == 'grad' else 2 * X)
            assert result.sharding.device_set == set(devices)


def test_a_mesh_that_is_given_wins_over_one_that_looks_the_same():
    low, high = mesh_of(LOW), mesh_of(HIGH)
    inner = sharded('a b@p', out='a@p b')(lambda x: x + 1)
    outer = sharded('a@p b', out='a@p b', mesh=low)(lambda x: inner(x) * 2)
    for _ in range(2):
        with jax.set_mesh(high):
            assert inner(X).sharding.device_set == set(HIGH)
        assert outer(X).sharding.device_set == set(LOW)


def test_meshes_that_differ_in_names_or_sizes_take_turns():
    f = sharded('a* b', out='a b*')(lambda x: 2 * x)
    meshes = [mesh_of(LOW), mesh_of(LOW, names='q'), mesh_of(EIGHT), mesh_of(DEVICES[8:12]), None]
    x = np.ones((16, 16), np.float32)
    for how in ('plain', 'jit', 'grad', 'plain'):
        for mesh in meshes:
            if mesh is None:
                assert f(x).sharding.mesh == device_mesh()
                continue
            with jax.set_mesh(mesh):
                y = f(x) if how == 'plain' else jax.jit(lambda x: f(x))(x)
                if how == 'grad':
                    y = jax.value_and_grad(lambda x: (f(x).sum(), f(x)), has_aux=True)(x)[0][1]
            assert y.sharding.device_set == set(mesh.devices.flat)
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(None, mesh.axis_names)), 2)


# ----------------------------------------------- eager transformations of arrays placed differently

EAGER = {
    'grad': (lambda f: jax.grad(lambda x: f(x).sum()), lambda x: np.cos(x)),
    'vmap': (lambda f: lambda x: jax.vmap(f)(x[None])[0], np.sin),
    'vmap of the last axis': (
        lambda f: lambda x: jax.vmap(f, in_axes=2)(jnp.stack([x, x], 2))[1],
        np.sin,
    ),
    'jvp': (lambda f: lambda x: jax.jvp(f, (x,), (x,))[1], lambda x: np.cos(x) * x),
    'vmap of grad': (
        lambda f: lambda x: jax.vmap(jax.grad(lambda x: f(x).sum()))(x[None])[0],
        np.cos,
    ),
}
WHOLE = {
    'host': lambda: X,
    'uncommitted': lambda: jnp.asarray(X),
    'one device': lambda: jax.device_put(X, EIGHT[5]),
    'a device beyond the mesh': lambda: jax.device_put(X, DEVICES[12]),
    'replicated': lambda: einshard(X, '* a b', mesh=EIGHT),
    'replicated on more devices': lambda: einshard(X, '* a b', mesh=DEVICES),
    'as asked': lambda: einshard(X, 'a* b', mesh=EIGHT),
}
PARTITIONED = {
    'by columns': lambda: einshard(X, 'a b*', mesh=EIGHT),
    'on fewer devices': lambda: einshard(X, 'a* b', mesh=EIGHT[:4]),
}


def sine(x, y=0.0):
    return jnp.sin(x) + 0 * y


MADE = ['before', 'after', 'keyword', 'method', 'in context']


def made(how, **options):
    """sharded(..) of a sine, before or after its first plain call; or on the mesh in context."""
    options = {'mesh': EIGHT, **options}
    if how == 'in context':
        del options['mesh']
    decorate = sharded(x='a* b', out='a b*', **options)
    if how == 'method':

        class Sine:
            @decorate
            def __call__(self, x, y=0.0):
                return sine(x, y)

            at = __call__

        jax.tree_util.register_pytree_node(Sine, lambda _: ((), None), lambda *_: Sine())
        f = Sine().at
        f(X)
        return f
    f = decorate(sine)
    if how in ('after', 'keyword'):
        f(X)
        f(X, 1.0)
        f(x=X)
    return (lambda x, y=0.0: f(y=y, x=x)) if how == 'keyword' else f


def in_pairs(kinds):
    """Each pair of a transformation, a kind of array, and a way to make the function."""
    for i, kind in enumerate(kinds):
        for j, how in enumerate(EAGER):
            # JAX's own x[None] fails before in a context of other devices
            ways = MADE[:-1] if 'vmap' in how and 'device' in kind else MADE
            yield kind, how, ways[(i + j) % len(ways)]


@pytest.mark.parametrize(('kind', 'how', 'made_how'), [*in_pairs(WHOLE)])
def test_whole_arrays_are_moved_in_eager_transformations(kind, how, made_how):
    transform, expected = EAGER[how]
    x = WHOLE[kind]()
    with jax.set_mesh(device_mesh(EIGHT)) if made_how == 'in context' else nullcontext():
        f = made(made_how)
        for _ in range(2):
            close(transform(f)(x), expected(X))


@pytest.mark.parametrize(('kind', 'how', 'made_how'), [*in_pairs(PARTITIONED)])
def test_arrays_partitioned_differently_are_refused_in_eager_transformations(kind, how, made_how):
    transform, expected = EAGER[how]
    x = PARTITIONED[kind]()
    with jax.set_mesh(device_mesh(EIGHT)) if made_how == 'in context' else nullcontext():
        with pytest.raises(EinshardError, match='already sharded differently') as caught:
            transform(made(made_how))(x)
        assert "float32[8,16], parameter 'x' of " in str(caught.value)
        if 'jvp' not in how:  # tangents of other devices are JAX's matter
            close(transform(made(made_how, reshard=True))(x), expected(X))


def test_a_later_argument_and_a_tree_are_named_by_their_path():
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
            with pytest.raises(EinshardError, match="parameter 'w/v' of <lambda>"):
                call(wrong)
    close(jax.grad(f)(2.0, {'u': good, 'v': good}), 2 * X.sum())


@pytest.mark.parametrize('call', [lambda f, x: f(x), lambda f, x: f(x=x)])
def test_cotangents_may_be_sharded_differently(call):
    """`out=` does not constrain cotangents, before and after eager calls."""
    f = sharded('a* b', out='a b*', mesh=EIGHT)(lambda x: jnp.sin(x))
    rows = einshard(X, 'a* b', mesh=EIGHT)
    for x in (rows, X, rows, X):
        y, pull = jax.vjp(lambda x: call(f, x), x)
        for cotangent in (y, rows, einshard(X, '* a b', mesh=EIGHT), jnp.asarray(X), X):
            close(pull(cotangent)[0], np.cos(X) * np.asarray(cotangent))
        call(f, x)
    with jax.set_mesh(device_mesh(EIGHT)):
        g = sharded('a* b', out='a b*')(lambda x: jnp.sin(x))
        for x in (X, rows, X, rows):
            close(jax.grad(lambda x: call(g, x).sum())(x), np.cos(X))
            call(g, x)


def test_an_error_of_the_function_passes_through_transformations():
    def body(x):
        runs.append(1)
        raise error

    f = sharded('a* b', mesh=EIGHT)(body)
    for error in (ValueError('mine'), RuntimeError('mine'), KeyError('mine')):
        for call in (
            lambda: f(X),
            lambda: f(x=X),
            lambda: jax.grad(f)(X),
            lambda: jax.vmap(f)(X[None]),
            lambda: jax.jit(lambda x: f(x))(X),
            lambda: jax.grad(lambda x: f(x))(jnp.asarray(X)),
        ):
            runs = []
            with pytest.raises(type(error), match='mine') as caught:
                call()
            assert caught.value is error
            assert len(runs) == 1


@pytest.mark.parametrize('error', [ValueError('mine'), KeyError('mine')], ids=repr)
def test_the_traceback_of_an_error_of_the_function_has_one_frame_of_ours(error):
    def body(x, y=0.0):
        if x.shape[1] > 4:
            raise error
        return x + y

    f = sharded('a* b', mesh=EIGHT)(body)
    calls = [
        lambda x: f(x),
        lambda x: f(y=1.0, x=x),
        jax.grad(lambda x: f(x).sum()),
        jax.jit(lambda x: f(x)),
    ]
    for called_before in (False, True):
        for call in calls:
            if called_before:
                call(X[:, :4])
            with pytest.raises(type(error)) as caught:
                call(X)
            assert caught.value is error
            ours = [one for one in caught.traceback if 'einshard/_' in str(one.path)]
            assert [one.name for one in ours] == ['__call__']
            error.__traceback__ = None


def test_nested_and_on_its_own_it_is_traced_once():
    runs = []

    @sharded('a* b', out='a b*', mesh=EIGHT)
    def f(x):
        runs.append(1)
        return x + 1

    f(X)
    jax.jit(lambda x: f(x))(X)
    jax.jit(lambda x: f(2 * x))(X)
    f(X)
    assert len(runs) == 1


def test_nothing_of_ours_is_left_in_a_jaxpr():
    f = sharded('a* b', out='a b*', mesh=EIGHT)(lambda x: x + 1)
    text = str(jax.make_jaxpr(lambda x: f(x))(X))
    assert 'neg' not in text
    assert text.count('sharding_constraint') == 1


def test_per_device_in_transformations():
    f = per_device('a* b', out='a* b', mesh=EIGHT)(jnp.sin)
    for _ in range(2):
        for make in WHOLE.values():
            close(jax.grad(lambda x: f(x).sum())(make()), np.cos(X))
            close(f(make()), np.sin(X))
        with pytest.raises(EinshardError, match='already sharded differently'):
            jax.grad(lambda x: f(x).sum())(PARTITIONED['by columns']())


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        jax.grad(lambda x: sharded('a* b', mesh=EIGHT)(jnp.sin)(x).sum())(X)
