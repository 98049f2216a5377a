"""sharded and einshard in every mode of JAX: transformations, meshes in context, threads."""

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting, program
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of

from einshard import EinshardError, device_mesh, einshard, make_sharding, sharded

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
EIGHT = jax.devices()[:8]
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 16)).astype(np.float32)
W1 = RANDOM.normal(size=(16, 48)).astype(np.float32) / 4
W2 = RANDOM.normal(size=(48, 16)).astype(np.float32) / 7
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def equals(sharding, other, n_dims):
    return sharding.is_equivalent_to(other, n_dims)


# ------------------------------------------------------------- results against the plain function


def mlp(x, w1, w2):
    return jnp.tanh(x @ w1) @ w2


def mlp_with(h_spec):
    def with_constraint(x, w1, w2):
        return einshard(jnp.tanh(x @ w1), h_spec) @ w2

    return with_constraint


LAYOUTS = {
    'replicated': ('... -> * ...', '... -> * ...', '... -> * ...', 'b f -> * b f', '... -> * ...'),
    'data': ('b x*', 'x y -> * x y', 'x y -> * x y', 'b f -> * b f', 'b x*'),
    'tensor': ('b x -> * b x', 'x f*', 'f* x', 'b f*', 'b x -> * b x'),
    'rows': (None, 'x* f', 'f x*', 'b f -> b f*', None),
    'unspecified inside': (None, None, None, 'b f*', 'b x*'),
}


@pytest.mark.parametrize(
    ('n', 'layout'),
    [
        *((n, layout) for n in (1, 2, 4, 16) for layout in ('data', 'tensor')),
        *((8, layout) for layout in LAYOUTS),
    ],
)
def test_forward_and_gradient_are_those_of_the_plain_function(n, layout):
    *specs, hidden, out = LAYOUTS[layout]
    f = sharded(*specs, out=out, mesh=jax.devices()[:n])(mlp_with(hidden))

    def loss(function):
        def of(*args):
            result = function(*args)
            return (result**2).sum(), result

        return jax.value_and_grad(of, argnums=(0, 1, 2), has_aux=True)

    (value, result), gradient = jax.jit(loss(mlp))(X, W1, W2)
    transformed = [jax.jit(loss(f)), *([loss(f)] if n == 8 else [])]
    for one in transformed:
        (our_value, our_result), our_gradient = one(X, W1, W2)
        close(our_value, value)
        close(our_result, result)
        for ours, theirs in zip(our_gradient, gradient, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('layout', ['data 12', 'tensor 12', 'both 12'])
def test_twelve_devices(layout):
    x = RANDOM.normal(size=(12, 24)).astype(np.float32)
    w1 = RANDOM.normal(size=(24, 48)).astype(np.float32) / 5
    w2 = RANDOM.normal(size=(48, 24)).astype(np.float32) / 7
    specs = {
        'data 12': ('b* x', '... -> * ...', '... -> * ...', 'b* f', 'b* x'),
        'tensor 12': ('b x -> * b x', 'x f*', 'f* x', 'b f*', '... -> * ...'),
        'both 12': ('b x -> b3 4 x', 'x f -> 3 x f4', 'f x -> 3 f4 x',
                    'b f -> b3 f4', 'b x -> b3 4 x'),
    }[layout]  # fmt: skip
    f = sharded(*specs[:3], out=specs[4], mesh=jax.devices()[:12])(mlp_with(specs[3]))
    close(f(x, w1, w2), mlp(x, w1, w2))
    ours = jax.jit(jax.grad(lambda w: (f(x, w, w2) ** 2).sum()))(w1)
    theirs = jax.grad(lambda w: (mlp(x, w, w2) ** 2).sum())(w1)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_constraint_inside_is_in_the_program():
    def by_hand(x, w1, w2):
        h = jax.lax.with_sharding_constraint(jnp.tanh(x @ w1), NamedSharding(mesh, P(None, 'p')))
        return h @ w2

    mesh = mesh_of(p=8)
    f = sharded(out='... -> * ...', mesh=EIGHT)(mlp_with('b f*'))
    g = jax.jit(by_hand, out_shardings=NamedSharding(mesh, P()))
    assert program(f.lower(X, W1, W2).compile()) == program(g.lower(X, W1, W2).compile())
    plain = jax.jit(mlp, out_shardings=NamedSharding(mesh, P()))
    assert program(f.lower(X, W1, W2).compile()) != program(plain.lower(X, W1, W2).compile())


# --------------------------------------------------------------------------------- transformations

constrain = functools.partial(einshard, spec='a b -> a b*')


def transformed():
    """Name, function with einshard inside, and the same without; all of one matrix."""

    def scan(wrap):
        return lambda x: jax.lax.scan(lambda c, row: (wrap(c * 2 + row), c.sum()), x, x[:3, None])

    def loop(wrap):
        return lambda x: jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, wrap(jnp.sin(c[1]))), (0, x)
        )[1]

    def fori(wrap):
        return lambda x: jax.lax.fori_loop(0, 3, lambda i, c: wrap(c * 1.5), x)

    def cond(wrap):
        return lambda x: jax.lax.cond(x.sum() > 0, lambda x: wrap(x) + 1, lambda x: wrap(x) - 1, x)

    def switch(wrap):
        return lambda x: jax.lax.switch(1, [lambda x: x, lambda x: wrap(x) * 2], x)

    def remat(wrap):
        return lambda x: jax.checkpoint(lambda x: jnp.sin(wrap(jnp.sin(x))))(x)

    def policy(wrap):
        saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return lambda x: jax.remat(lambda x: wrap(np.ones((8, 8)) @ jnp.sin(x)), policy=saved)(x)

    def custom_vjp(wrap):
        @jax.custom_vjp
        def double(x):
            return 2 * wrap(x)

        double.defvjp(lambda x: (2 * wrap(x), None), lambda _, g: (wrap(2 * g),))
        return lambda x: double(jnp.cos(x))

    def custom_jvp(wrap):
        @jax.custom_jvp
        def double(x):
            return 2 * wrap(x)

        double.defjvp(lambda primals, tangents: (double(*primals), 2 * wrap(tangents[0])))
        return lambda x: double(jnp.cos(x))

    def nested_jit(wrap):
        return lambda x: jax.jit(lambda y: wrap(y) + 1)(jnp.sin(x))

    def inner_grad(wrap):
        return jax.grad(lambda x: (wrap(jnp.sin(x)) ** 2).sum())

    def map_(wrap):
        return lambda x: jax.lax.map(lambda row: wrap(row[None] * x), x[:3])

    return [scan, loop, fori, cond, switch, remat, policy, custom_vjp, custom_jvp, nested_jit,
            inner_grad, map_]  # fmt: skip


@pytest.mark.parametrize('make', transformed(), ids=lambda make: make.__name__)
@pytest.mark.parametrize('types', [AUTO, EXPLICIT], ids=str)
def test_einshard_inside(make, types):
    # explicit: the type of a carry says where it is, and it must go in as it comes out
    f = sharded('a b -> * a b' if types == AUTO else 'a b -> a b*')(make(constrain))

    def with_gradient(f):
        def both(x):
            if make.__name__ == 'loop':
                return f(x), x  # JAX has no reverse mode for it
            return f(x), jax.grad(lambda x: sum(leaf.sum() for leaf in jax.tree.leaves(f(x))))(x)

        return jax.jit(both)

    expected = with_gradient(make(lambda x: x))(X)
    with jax.set_mesh(device_mesh(EIGHT, axis_types=types)):
        x = X if types == AUTO else einshard(X, 'a b -> a b*')
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
            with_gradient(f)(x),
            expected,
        )


@pytest.mark.parametrize('make', transformed(), ids=lambda make: make.__name__)
def test_a_constraint_reaches_the_program_through(make):
    """Every transformation leaves a constraint on two dimensions, the last over all devices."""
    f = sharded('a b -> * a b', mesh=EIGHT)(make(constrain))
    text = f.lower(X).as_text()
    assert 'sdy.sharding_constraint' in text or '@Sharding' in text
    assert '"d0", "d1", "d2"' in text.partition('sharding_constraint')[2]
    without = sharded('a b -> * a b', mesh=EIGHT)(make(lambda x: x)).lower(X).as_text()
    assert 'sharding_constraint' not in without


def test_vmap_adds_an_unsharded_axis():
    f = sharded('a b -> a* b', out='a b -> a b*', mesh=EIGHT)(lambda x: constrain(jnp.sin(x)))
    batch = RANDOM.normal(size=(3, 8, 16)).astype(np.float32)
    close(jax.vmap(f)(batch), np.sin(batch))
    close(jax.jit(jax.vmap(f))(batch), np.sin(batch))
    close(
        jax.vmap(f, in_axes=2, out_axes=1)(np.moveaxis(batch, 0, 2)),
        np.moveaxis(np.sin(batch), 0, 1),
    )
    close(jax.vmap(jax.vmap(f))(batch[None]), np.sin(batch)[None])
    close(jax.vmap(jax.grad(lambda x: f(x).sum()))(batch), np.cos(batch))


def test_vmap_over_named_mesh_axes():
    mesh = mesh_of(p=2, q=4)
    f = sharded('a b@q', out='a b@q', mesh=mesh)(lambda x: einshard(jnp.sin(x), 'a@q b'))
    batch = RANDOM.normal(size=(4, 8, 16)).astype(np.float32)
    g = jax.jit(jax.vmap(f, spmd_axis_name='p'))
    result = g(batch)
    close(result, np.sin(batch))
    assert equals(result.sharding, NamedSharding(mesh, P('p', None, 'q')), 3)
    # the plain vmap may leave the batched axis anywhere, but not split the others otherwise
    assert result.addressable_shards[0].data.shape == (2, 8, 4)


def test_einshard_alone_under_vmap_and_spmd_axis_name():
    mesh = mesh_of(p=2, q=4)
    batch = np.ones((4, 8, 16), np.float32)

    def by_hand(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P(None, 'q')))

    def ours(x):
        return einshard(jnp.sin(x), 'a b@q', mesh=mesh)

    for options in ({}, {'spmd_axis_name': 'p'}):
        programs = [
            program(jax.jit(jax.vmap(one, **options)).lower(batch).compile())
            for one in (by_hand, ours)
        ]
        assert programs[0] == programs[1]


def test_jvp_vjp_linearize_and_second_derivatives():
    f = sharded('a b -> a* b', out='a b -> a b*', mesh=EIGHT)(lambda x: constrain(jnp.sin(x)))
    value, tangent = jax.jvp(f, (X,), (X,))
    close(value, np.sin(X))
    close(tangent, np.cos(X) * X)
    value, pull = jax.vjp(f, X)
    close(pull(jnp.ones_like(value))[0], np.cos(X))
    _, push = jax.linearize(f, X)
    close(push(X), np.cos(X) * X)
    _, second = jax.jvp(jax.grad(lambda x: f(x).sum()), (X,), (X,))
    close(second, -np.sin(X) * X)


def test_eager_transformations_of_sharded_arguments():
    f = sharded('a b -> a* b', out='a b -> a b*', mesh=EIGHT)(jnp.sin)
    x = einshard(X, 'a b -> a* b', mesh=EIGHT)
    close(jax.grad(lambda x: f(x).sum())(x), np.cos(X))
    batch = einshard(np.stack([X, X]), 'n a b -> n a* b', mesh=EIGHT)
    close(jax.vmap(f)(batch), np.sin(np.stack([X, X])))
    value, gradient = jax.value_and_grad(lambda x: f(x).sum())(x)
    close(value, np.sin(X).sum(), rtol=1e-4)
    assert equals(gradient.sharding, x.sharding, 2)


def test_eager_transformations_of_host_arguments():
    f = sharded('a b -> a* b', out='a b -> a b*', mesh=EIGHT)(jnp.sin)
    for x in (X, jnp.asarray(X)):
        close(jax.grad(lambda x: f(x).sum())(x), np.cos(X))
        close(jax.vmap(f)(x[None]), np.sin(X)[None])


def test_export_and_make_jaxpr():
    f = sharded('a b -> a* b', out='a b -> a b*', mesh=EIGHT)(lambda x: constrain(jnp.sin(x)))
    assert 'sharding_constraint' in str(jax.make_jaxpr(f)(X))
    assert jax.eval_shape(f, X).shape == X.shape


# ------------------------------------------------------------------------------- bad input inside


@pytest.mark.parametrize('types', [AUTO, EXPLICIT], ids=str)
def test_indivisible_inside_is_our_error(types):
    """JAX replicates such a constraint in silence (tests/test_jax_facts.py)."""
    with jax.set_mesh(device_mesh(EIGHT, axis_types=types)):
        for wrap in (sharded, jax.jit):
            f = wrap(lambda x: einshard(x[:6], 'a* b'))
            with pytest.raises(EinshardError, match=r"axis 'a' \(size 6\) is not divisible by 8"):
                f(X)


@pytest.mark.parametrize(
    'around', [jax.grad, jax.vmap, jax.checkpoint, jax.jit], ids=lambda f: f.__name__
)
def test_errors_of_einshard_inside_come_out_of_transformations(around):
    f = sharded(mesh=EIGHT)(lambda x: einshard(x, 'a b c -> a b c*').sum())
    with pytest.raises(EinshardError, match='3 axes'):
        around(f)(X)


# --------------------------------------------------------------------------------- mesh in context


def test_the_mesh_in_context_is_that_of_each_call():
    f = sharded('a b -> a* b', out='a b -> a b*')(jnp.sin)
    for mesh in (mesh_of(p=8), mesh_of(p=2, q=4), mesh_of(u=4, v=2), mesh_of(p=2, q=2, r=2)):
        with jax.set_mesh(mesh):
            result = f(X)
        assert result.sharding.mesh == mesh
        assert equals(result.sharding, NamedSharding(mesh, P(None, mesh.axis_names)), 2)
    with pytest.raises(EinshardError, match='is not divisible by 16'):
        f(X)
    with jax.set_mesh(mesh_of(p=2, q=4)):
        assert f.out_shardings(X).mesh == mesh_of(p=2, q=4)


def test_meshes_that_differ_only_in_devices_share_a_trace():
    low, high = (mesh_of(p=2, q=2, devices=jax.devices()[i : i + 4]) for i in (0, 4))
    runs = []

    @sharded('a b -> a* b', out='a b -> a b*')
    def f(x):
        runs.append(1)
        return einshard(2 * x, 'a b -> a2 b2')

    def both():
        for mesh in (low, high, low, high):
            with jax.set_mesh(mesh):
                result = f(X)
            assert result.sharding.device_set == set(mesh.devices.flat)
            assert result.sharding.mesh == mesh
            np.testing.assert_array_equal(result, 2 * X)

    both()
    assert len(runs) == 1
    with counting() as counts:
        both()
        both()
    assert len(runs) == 1
    assert counts.of('f')[1] == 0


def test_alternating_with_and_without_a_mesh():
    runs = []

    @sharded('a b -> a* b', out='a b -> a b*')
    def doubled(x):
        runs.append(1)
        return 2 * x

    x = np.ones((16, 16), np.float32)
    mesh = mesh_of(p=4, devices=jax.devices()[:4])
    expected = [
        (None, make_sharding('a b -> a b*')),
        (mesh, NamedSharding(mesh, P(None, 'p'))),
    ]
    for i in range(3):
        with counting() as counts:
            for around, sharding in expected:
                if around is None:
                    assert doubled(x).sharding == sharding
                else:
                    with jax.set_mesh(around):
                        assert doubled(x).sharding == sharding
        assert i == 0 or counts.of('doubled')[1] == 0
    assert len(runs) == 2


def test_mesh_takes_precedence_over_the_mesh_in_context():
    f = sharded('a b -> a* b', out='a b -> a b*', mesh=EIGHT)(lambda x: constrain(2 * x))
    expected = make_sharding('a b -> a b*', mesh=EIGHT)
    for mesh in (mesh_of(p=8), mesh_of(p=2, q=4)):
        with jax.set_mesh(mesh):
            assert f(X).sharding == expected
    assert f(X).sharding == expected


# ----------------------------------------------------------------------------------- explicit axes


@pytest.fixture
def explicit():
    mesh = device_mesh(EIGHT, axis_types=EXPLICIT)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize('host', [False, True], ids=['arrays as asked', 'host arrays'])
def test_types_show_the_sharding(host, explicit):
    seen = []

    @sharded('b x -> b2 4 x', 'x f -> 2 x f4', out='b f -> b2 f4')
    def f(x, w):
        h = x @ w
        seen.extend(str(jax.typeof(one)) for one in (x, w, h))
        h = einshard(jnp.sin(h), 'b f -> 2 b f4')
        seen.append(str(jax.typeof(h)))
        return h

    x, w = (X, W1) if host else (einshard(X, 'b x -> b2 4 x'), einshard(W1, 'x f -> 2 x f4'))
    result = f(x, w)
    assert seen == [
        'float32[8@d0,16]',
        'float32[16,48@(d1,d2)]',
        'float32[8@d0,48@(d1,d2)]',
        'float32[8,48@(d1,d2)]',
    ]
    close(result, np.sin(X @ W1))
    assert str(jax.typeof(result)) == 'float32[8@d0,48@(d1,d2)]'


def test_expressions_of_different_lines_meet_in_one_explicit_program(explicit):
    def f(x, w1, w2):
        h = jnp.tanh(einshard(x, 'b x -> b2 4 x') @ einshard(w1, 'x f -> 2 x f4'))
        h = einshard(h, 'b f -> b8 f')
        h = einshard(h, 'rows columns -> 2 rows2 columns2')
        return einshard(h, 'b f -> * b f') @ w2

    g = sharded('... -> * ...', 'a b -> a b*', 'a b -> * a b', out='b x -> b4 x2')(f)
    result = g(X, W1, W2)
    close(result, mlp(X, W1, W2))
    assert equals(result.sharding, make_sharding('b x -> b4 x2'), 2)
    gradient = jax.jit(jax.grad(lambda w: (g(X, w, W2) ** 2).sum()))(W1)
    expected = jax.grad(lambda w: (mlp(X, w, W2) ** 2).sum())(W1)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_explicit_arguments_of_one_are_results_of_another(explicit):
    first = sharded('a b -> a2 b4', out='a b -> b8 a')(jnp.sin)
    second = sharded('a b -> a b8', out='a b -> a2 b4')(jnp.cos)
    both = jax.jit(lambda x: second(first(x)))
    x = einshard(X, 'a b -> a2 b4')
    close(both(x), np.cos(np.sin(X)))
    close(second(first(x)), np.cos(np.sin(X)))
    assert second(first(x)).sharding == x.sharding


def test_one_text_in_both_modes():
    f = sharded('b* x', 'x f -> * x f', '... -> * ...', out='b* x')(mlp_with('b* f'))
    results = []
    for types in (AUTO, EXPLICIT):
        with jax.set_mesh(device_mesh(EIGHT, axis_types=types)):
            results.append(f(X, W1, W2))
            assert str(jax.typeof(results[-1])) == (
                'float32[8,16]' if types == AUTO else 'float32[8@(d0,d1,d2),16]'
            )
    np.testing.assert_array_equal(*results)


def test_axes_of_both_types_in_one_mesh():
    mesh = mesh_of(p=2, q=4, types=(EXPLICIT, AUTO))
    seen = []

    def f(x):
        y = einshard(jnp.sin(x), 'a@p b@q')
        seen.append(str(jax.typeof(y)))
        return y

    with jax.set_mesh(mesh):
        result = sharded('a b -> * a b', out='a@p b@q')(f)(X)
    close(result, np.sin(X))
    assert seen == ['float32[8@p,16]']
    assert equals(result.sharding, NamedSharding(mesh, P('p', 'q')), 2)


# ------------------------------------------------------------------------------------- manual axes


def test_partly_manual_axes_are_left_out():
    mesh = mesh_of(p=2, q=4)
    seen = []

    def body(x):  # each half of the rows, over 'q' as the compiler likes
        y = einshard(jnp.sin(x), 'a b -> a b*')
        seen.append(make_sharding('a b -> a b*').spec)
        return y * jax.lax.axis_index('p')

    with jax.set_mesh(mesh):
        f = jax.shard_map(body, in_specs=P('p'), out_specs=P('p'), axis_names={'p'})
        result = sharded(out='a@p b@q')(f)(X)
    expected = np.sin(X) * np.repeat([0, 1], 4)[:, None]
    close(result, expected)
    assert seen[0] == P(None, 'q')


def test_partly_manual_constraints_are_those_by_hand():
    mesh = mesh_of(p=2, q=4)

    def by_hand(x):
        here = NamedSharding(jax.sharding.get_abstract_mesh(), P(None, 'q'))
        return jax.lax.with_sharding_constraint(jnp.sin(x), here)

    def ours(x):
        return einshard(jnp.sin(x), 'a b*')

    with jax.set_mesh(mesh):
        programs = [
            program(
                jax.jit(jax.shard_map(one, in_specs=P('p'), out_specs=P('p'), axis_names={'p'}))
                .lower(X)
                .compile()
            )
            for one in (by_hand, ours)
        ]
    assert programs[0] == programs[1]


def test_partly_manual_inside_a_sharded_with_a_mesh_of_its_own():
    mesh = mesh_of(p=2, q=4)

    def body(x):
        return einshard(2 * x, 'a b*')

    @sharded('a@p b', out='a@p b', mesh=mesh)
    def f(x):
        return jax.shard_map(body, mesh=mesh, in_specs=P('p'), out_specs=P('p'), axis_names={'p'})(
            x
        )

    np.testing.assert_array_equal(f(X), 2 * X)


def test_fully_manual_is_an_error():
    mesh = mesh_of(p=2, q=4)

    def body(x):
        return einshard(x, 'a b -> * a b')

    f = jax.shard_map(body, mesh=mesh, in_specs=P('p', 'q'), out_specs=P('p', 'q'))
    for g in (jax.jit(f), sharded(f), sharded('a@p b@q', mesh=mesh)(f)):
        with pytest.raises(EinshardError, match='and no mesh axis is left'):
            g(X)


@pytest.mark.parametrize('given', [{}, {'mesh': EIGHT}])
def test_a_sharded_function_in_a_per_device_body_is_an_error(given):
    mesh = mesh_of(p=8)
    inner = sharded('a b -> * a b', **given)(lambda x: x + 1)

    f = jax.shard_map(inner, mesh=mesh, in_specs=P('p'), out_specs=P('p'))
    with pytest.raises(EinshardError) as caught:
        jax.jit(f)(X)
    assert '<lambda>' in str(caught.value)
    assert 'per-device function' in str(caught.value)


# ------------------------------------------------------------------------------------------ nested


def test_nested_sharded_functions():
    inner = sharded('a b -> a b*', out='a b -> a b*')(jnp.sin)
    runs = []

    @sharded('a b -> a* b', out='a b -> a* b', mesh=EIGHT)
    def outer(x):
        runs.append(1)
        return inner(x) + inner(2 * x)

    close(outer(X), np.sin(X) + np.sin(2 * X))
    close(outer(X), np.sin(X) + np.sin(2 * X))
    assert len(runs) == 1
    close(jax.jit(jax.grad(lambda x: outer(x).sum()))(X), np.cos(X) + 2 * np.cos(2 * X), rtol=1e-4)


def test_a_nested_function_on_several_meshes():
    inner = sharded('a b -> a b*', out='a b -> a b*')(lambda x: constrain(2 * x))
    outers = [
        sharded('a b -> a* b', out='a b -> a b*', mesh=devices)(lambda x: inner(x))
        for devices in (EIGHT, jax.devices()[:4], jax.devices()[4:8], jax.devices()[:2])
    ]
    for _ in range(2):
        for outer, n in zip(outers, (8, 4, 4, 2), strict=True):
            result = outer(X)
            np.testing.assert_array_equal(result, 2 * X)
            assert len(result.sharding.device_set) == n
    # on its own it has the sixteen devices
    assert len(inner(X).sharding.device_set) == 16
    np.testing.assert_array_equal(outers[0](X), 2 * X)


# ----------------------------------------------------------------------------------------- threads


def in_threads(n, function):
    """The results of n calls that begin together."""
    barrier = threading.Barrier(n)
    results = {}

    def call(i):
        barrier.wait(60)
        results[i] = function(i)

    # daemons: threads that wait for each other for ever must not keep pytest from ending
    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(n)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), 'threads wait for each other'
    return [results[i] for i in range(n)]


@pytest.mark.parametrize('out', ['a b -> a b*', '... b -> ... b*'])
def test_first_calls_in_threads_trace_and_compile_once(out):
    runs = []

    def threaded(x, y):
        runs.append(1)
        return einshard(jnp.sin(x), 'a b -> a2 b4') * y

    f = sharded('... b -> ... b*', out=out, mesh=EIGHT)(threaded)
    with counting() as counts:
        results = in_threads(16, lambda i: f(X + i, y=float(i)) if i % 2 else f(X + i, float(i)))
    for i, result in enumerate(results):
        close(result, np.sin(X + i) * i)
    assert len(runs) == 1
    assert counts.of('threaded')[1] == 1


def test_first_calls_in_threads_with_meshes_of_their_own():
    meshes = [mesh_of(p=4, devices=jax.devices()[i : i + 4]) for i in (0, 4, 8, 12)]
    f = sharded('a b -> a* b', out='a b -> a b*')(lambda x: constrain(2 * x))

    def call(i):
        with jax.set_mesh(meshes[i % 4]):
            return [f(X + i) for _ in range(3)]

    for i, results in enumerate(in_threads(16, call)):
        for result in results:
            np.testing.assert_array_equal(result, 2 * (X + i))
            assert result.sharding.device_set == set(meshes[i % 4].devices.flat)


def test_first_calls_in_threads_with_several_shapes():
    f = sharded('... b -> ... b*', out='... b -> ... b*', mesh=EIGHT)(lambda x: 2 * x)

    def call(i):
        x = np.full((2,) * (i % 3) + (8,), i, np.float32)
        return x, f(x)

    for x, result in in_threads(16, call):
        np.testing.assert_array_equal(result, 2 * x)
        assert result.sharding.is_equivalent_to(
            make_sharding('... b -> ... b*', ndim=x.ndim, mesh=EIGHT), x.ndim
        )


def test_functions_that_call_each_other_do_not_lock_each_other_out():
    """Each is traced inside the other, in two threads at once."""

    @sharded('a b -> a* b', out='... b -> ... b*', mesh=EIGHT, static_argnames='depth')
    def ping(x, depth):
        return x + 1 if depth == 0 else pong(x, depth=depth - 1)

    @sharded('a b -> a b*', out='... b -> ... b*', mesh=EIGHT, static_argnames='depth')
    def pong(x, depth):
        return x + 1 if depth == 0 else ping(x, depth=depth - 1)

    results = in_threads(8, lambda i: (ping, pong)[i % 2](X, depth=3 + i // 2 % 2))
    for result in results:
        np.testing.assert_array_equal(result, X + 1)
