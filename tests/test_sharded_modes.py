"""sharded and einshard in every mode of JAX: transformations, meshes in context, threads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, counting, program
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of
from test_context import transformed

from einshard import (
    EinshardError,
    describe,
    device_mesh,
    einshard,
    make_sharding,
    per_device,
    sharded,
)

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
EIGHT = jax.devices()[:8]
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 16)).astype(np.float32)
W1 = RANDOM.normal(size=(16, 48)).astype(np.float32) / 4
W2 = RANDOM.normal(size=(48, 16)).astype(np.float32) / 7
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


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
    'both': ('b* x', 'x f -> * x f4', 'f x -> * f4 x', 'b f -> b* f4', 'b x -> * b x4'),
}


@pytest.mark.parametrize(
    ('n', 'layout'),
    [
        *[(1, 'data'), (2, 'tensor'), (4, 'data'), (12, 'tensor'), (16, 'data')],
        *((8, layout) for layout in LAYOUTS),
        (12, 'both'),
    ],
)
def test_forward_and_gradient_are_those_of_the_plain_function(n, layout):
    *specs, hidden, out = LAYOUTS[layout]
    f = sharded(*specs, out=out, mesh=jax.devices()[:n])(mlp_with(hidden))
    shapes = (48, 48), (48, 96), (96, 48)
    args = [RANDOM.normal(size=shape).astype(np.float32) / 7 for shape in shapes]

    def loss(function):
        def of(*args):
            result = function(*args)
            return (result**2).sum(), result

        return jax.value_and_grad(of, argnums=(0, 1, 2), has_aux=True)

    expected = jax.jit(loss(mlp))(*args)
    for ours in (jax.jit(loss(f)), *([loss(f)] if n == 8 else [])):
        jax.tree.map(functools.partial(close, rtol=1e-4, atol=1e-4), ours(*args), expected)


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


def functions(place):
    """{name: a transformed function of one matrix with `place` inside}."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    policy = jax.checkpoint(lambda x: place(np.ones((8, 8)) @ jnp.sin(x)), policy=dots)
    return {name: f for name, (f, _) in transformed(place).items()} | {'policy': policy}


PLAIN, INSIDE = functions(lambda x: x), functions(constrain)


@pytest.mark.parametrize('name', INSIDE)
@pytest.mark.parametrize('types', [AUTO, EXPLICIT], ids=str)
def test_einshard_inside(name, types):
    # explicit: the type of a carry says where it is, and it must go in as it comes out
    spec = 'a b -> * a b' if types == AUTO else 'a b -> a b*'

    def with_gradient(f):
        if name == 'while_loop':
            return jax.jit(f)  # JAX has no reverse mode for it
        return jax.jit(lambda x: (f(x), jax.grad(lambda x: f(x).sum())(x)))

    expected = with_gradient(PLAIN[name])(X)
    with jax.set_mesh(device_mesh(EIGHT, axis_types=types)):
        x = X if types == AUTO else einshard(X, spec)
        found = with_gradient(sharded(spec)(INSIDE[name]))(x)
    jax.tree.map(functools.partial(close, rtol=1e-4, atol=1e-5), found, expected)


ROWS_TO_COLUMNS = sharded('a b -> a* b', out='a b -> a b*', mesh=EIGHT)


BATCH = RANDOM.normal(size=(8, 8, 8)).astype(np.float32)


@pytest.mark.parametrize('types', [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize(
    ('transform', 'placed', 'spec', 'text'),
    [
        (jax.vmap, 'c@p a b', 'a@p b', "'c a b -> c@p a b', whose first axis is"),
        (jax.vmap, 'c a b@p', 'a@p b', "'c a b -> c a b@p', whose first axis is"),
        (jax.vmap, 'c@p a b', '... b@q', "'a b c -> a@p b c', whose first axis is"),
        (functools.partial(jax.vmap, in_axes=1), 'a c b@q', 'a@p b', "'c a b -> c a b@q', whose"),
        (functools.partial(jax.vmap, in_axes=2), 'a b c@q', 'a b@p', "'c a b -> c@q a b', whose"),
        (lambda f: jax.vmap(jax.vmap(f)), 'a@p b c', 'a@q', "'b c a -> b@p c a', whose first 2"),
        (lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())), 'c@p a b', 'a@q b', "'c a b -> c@p "),
        (lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()), 'c@p a b', 'a@q b', "'c a b -> c@p "),
    ],
)
def test_an_argument_that_is_sharded_differently_under_vmap(transform, placed, spec, text, types):
    with jax.set_mesh(mesh_of(p=4, q=2, types=types)):
        x = einshard(BATCH, placed)
        with pytest.raises(EinshardError) as caught:
            transform(sharded(spec)(jnp.sin))(x)
        assert caught.value.sentence.startswith(
            f'the argument is already sharded differently, as {text}'
        )
        fix = 'reshard=True in the decorator' if types == AUTO else None
        assert caught.value.facts.get('try') == fix
        if fix:
            close(transform(sharded(spec, reshard=True)(jnp.sin))(x), transform(jnp.sin)(BATCH))


@pytest.mark.parametrize('decorator', [sharded, per_device])
@pytest.mark.parametrize(
    ('placed', 'expected'), [('c@p a b', 'c@p a b@q'), ('c a b@p', 'c a b@q'), ('c@q a b', None)]
)
def test_reshard_on_a_given_mesh_under_vmap(placed, expected, decorator):
    mesh = mesh_of(p=4, q=2)
    x = einshard(BATCH, placed, mesh=mesh)
    f = decorator('a b@q', out='a b@q', reshard=True, mesh=mesh)(jnp.sin)
    y = jax.vmap(f)(x)
    close(y, np.sin(BATCH))
    if expected and decorator is sharded:  # jax.shard_map gathers an axis that it maps
        assert y.sharding.is_equivalent_to(make_sharding(expected, mesh=mesh), 3)
    gradient = jax.vmap(jax.grad(lambda x: f(x).sum()))(x)
    close(gradient, np.cos(BATCH))


def test_vmap_over_named_mesh_axes():
    mesh = mesh_of(p=2, q=4)
    f = sharded('a b@q', out='a b@q', mesh=mesh)(lambda x: einshard(jnp.sin(x), 'a@q b'))
    batch = RANDOM.normal(size=(4, 8, 16)).astype(np.float32)
    g = jax.jit(jax.vmap(f, spmd_axis_name='p'))
    result = g(batch)
    close(result, np.sin(batch))
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P('p', None, 'q')), 3)
    assert result.addressable_shards[0].data.shape == (2, 8, 4)


def test_einshard_alone_under_vmap_and_spmd_axis_name():
    mesh = mesh_of(p=2, q=4)
    batch = np.ones((4, 8, 16), np.float32)

    def by_hand(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P(None, 'q')))

    def ours(x):
        return einshard(jnp.sin(x), 'a b@q', mesh=mesh)

    for options in ({}, {'spmd_axis_name': 'p'}):
        expected, found = (
            program(jax.jit(jax.vmap(f, **options)).lower(batch).compile()) for f in (by_hand, ours)
        )
        assert found == expected


def test_derivatives():
    f = ROWS_TO_COLUMNS(lambda x: constrain(jnp.sin(x)))
    value, tangent = jax.jvp(f, (X,), (X,))
    close(value, np.sin(X))
    close(tangent, np.cos(X) * X)
    close(jax.vjp(f, X)[1](jnp.ones_like(value))[0], np.cos(X))
    close(jax.linearize(f, X)[1](X), np.cos(X) * X)
    _, second = jax.jvp(jax.grad(lambda x: f(x).sum()), (X,), (X,))
    close(second, -np.sin(X) * X)


# ------------------------------------------------------------------------------- bad input inside


@pytest.mark.parametrize(
    'around', [lambda f: f, jax.grad, jax.vmap, jax.checkpoint, jax.jit], ids=lambda f: f.__name__
)
@pytest.mark.parametrize('types', [AUTO, EXPLICIT], ids=str)
def test_errors_inside_come_out_of_transformations(around, types):
    """JAX replicates an indivisible constraint in silence (tests/test_jax_facts.py)."""
    with jax.set_mesh(device_mesh(EIGHT, axis_types=types)):
        for wrap in (sharded, jax.jit):
            f = wrap(lambda x: einshard(x.reshape(-1)[:6], 'a*').sum())
            with pytest.raises(EinshardError, match=r"axis 'a' \(size 6\) is not divisible by 8"):
                around(f)(X)


# --------------------------------------------------------------------------------- mesh in context


def test_the_mesh_in_context_is_that_of_each_call():
    @counted
    def doubled(x):
        return 2 * x

    f, x = sharded('a b -> a* b', out='a b -> a b*')(doubled), np.ones((16, 16), np.float32)
    sizes = [{'p': 8}, {'p': 2, 'q': 4}, {'u': 4, 'v': 2}, {'p': 2, 'q': 2, 'r': 2}]
    for i in range(3):
        with counting() as counts:
            assert f(x).sharding == make_sharding('a b -> a b*')
            for mesh in (mesh_of(**axes) for axes in sizes):
                with jax.set_mesh(mesh):
                    assert f.out_shardings(x).mesh == mesh
                    found = f(x).sharding
                assert found.mesh == mesh
                assert found.is_equivalent_to(NamedSharding(mesh, P(None, mesh.axis_names)), 2)
        assert i == 0 or counts.of('doubled')[1] == 0
    assert doubled.runs == 5


def test_meshes_that_differ_only_in_devices_share_a_trace():
    meshes = [mesh_of(p=2, q=2, devices=jax.devices()[i : i + 4]) for i in (0, 4)]

    @counted
    def doubled(x):
        return einshard(2 * x, 'a b -> a2 b2')

    f = sharded('a b -> a* b', out='a b -> a b*')(doubled)
    for i in range(3):
        with counting() as counts:
            for mesh in meshes * 2:
                with jax.set_mesh(mesh):
                    result = f(X)
                assert result.sharding.mesh == mesh
                np.testing.assert_array_equal(result, 2 * X)
        assert i == 0 or counts.of('doubled')[1] == 0
    assert doubled.runs == 1


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
        seen.extend(str(jax.typeof(array)) for array in (x, w, h))
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
    assert result.sharding.is_equivalent_to(make_sharding('b x -> b4 x2'), 2)
    gradient = jax.jit(jax.grad(lambda w: (g(X, w, W2) ** 2).sum()))(W1)
    expected = jax.grad(lambda w: (mlp(X, w, W2) ** 2).sum())(W1)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


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
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P('p', 'q')), 2)


# ------------------------------------------------------------------------------------- manual axes


def manual_over_p(body, **options):
    return jax.shard_map(body, in_specs=P('p'), out_specs=P('p'), axis_names={'p'}, **options)


def test_partly_manual_constraints_are_those_by_hand():
    def by_hand(x):
        here = NamedSharding(jax.sharding.get_abstract_mesh(), P(None, 'q'))
        return jax.lax.with_sharding_constraint(jnp.sin(x), here)

    def ours(x):
        return einshard(jnp.sin(x), 'a b*')

    with jax.set_mesh(mesh_of(p=2, q=4)):
        expected, found = (
            program(jax.jit(manual_over_p(f)).lower(X).compile()) for f in (by_hand, ours)
        )
    assert found == expected


def test_partly_manual_inside_a_sharded_with_a_mesh_of_its_own():
    mesh = mesh_of(p=2, q=4)

    def body(x):
        return einshard(2 * x, 'a b*')

    @sharded('a@p b', out='a@p b', mesh=mesh)
    def f(x):
        return manual_over_p(body, mesh=mesh)(x)

    np.testing.assert_array_equal(f(X), 2 * X)


@pytest.mark.parametrize('around', [jax.jit, sharded, sharded('a@p b@q', mesh=mesh_of(p=2, q=4))])
def test_einshard_in_a_per_device_body_is_an_error(around):
    specs, mesh = P('p', 'q'), mesh_of(p=2, q=4)
    f = jax.shard_map(lambda x: einshard(x, '* a b'), mesh=mesh, in_specs=specs, out_specs=specs)
    with pytest.raises(EinshardError, match='all mesh axes Manual'):
        around(f)(X)


# ----------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize('out', ['a b -> a b*', '... b -> ... b*'])
def test_first_calls_in_threads_trace_and_compile_once(out, in_threads):
    @counted
    def threaded(x, y):
        return einshard(jnp.sin(x), 'a b -> a2 b4') * y

    f = sharded('... b -> ... b*', None, out=out, mesh=EIGHT)(threaded)
    with counting() as counts:
        results = in_threads(16, lambda i: f(X + i, y=float(i)) if i % 2 else f(X + i, float(i)))
    for i, result in enumerate(results):
        close(result, np.sin(X + i) * i)
    assert counts.of('threaded')[1] == 1
    assert threaded.runs == 1


def test_first_calls_in_threads_with_meshes_of_their_own(in_threads):
    meshes = [mesh_of(p=4, devices=jax.devices()[i : i + 4]) for i in (0, 4, 8, 12)]
    f = sharded('a b -> a* b', out='a b -> a b*')(lambda x: constrain(2 * x))

    def call(i):
        with jax.set_mesh(meshes[i % 4]):
            return [f(X + i) for _ in range(3)]

    for i, results in enumerate(in_threads(16, call)):
        for result in results:
            np.testing.assert_array_equal(result, 2 * (X + i))
            assert result.sharding.device_set == set(meshes[i % 4].devices.flat)


def test_first_calls_in_threads_with_several_shapes(in_threads):
    f = sharded('... b -> ... b*', out='... b -> ... b*', mesh=EIGHT)(lambda x: 2 * x)

    def call(i):
        x = np.full((2,) * (i % 3) + (8,), i, np.float32)
        return x, f(x)

    for x, result in in_threads(16, call):
        np.testing.assert_array_equal(result, 2 * x)
        assert result.sharding.is_equivalent_to(
            make_sharding('... b -> ... b*', ndim=x.ndim, mesh=EIGHT), x.ndim
        )


def test_functions_that_call_each_other_do_not_lock_each_other_out(in_threads):
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


@pytest.mark.parametrize(
    'options',
    [{'out': 'a b -> a* b'}, {'out': '... b -> ... b*'}, {'collectives': ()}, {'memory': '1 GB'}],
    ids=str,
)
@pytest.mark.parametrize('rest', [{}, {'out': '... b -> ... b*'}], ids=['', 'ranks'])
def test_another_thread_calls_the_function_while_it_is_traced(options, rest, in_threads):
    def body(x, n):
        if n == 0:
            return x + 1
        (constant,) = in_threads(1, lambda _: f(X, 0))
        return x + constant

    f = sharded('a b -> a b*', mesh=EIGHT, static_argnums=1, **{**rest, **options})(body)
    for _ in range(2):
        close(in_threads(1, lambda _: f(X, 1))[0], 2 * X + 1)


def test_a_spec_function_calls_its_own_function():
    def spec(path, leaf):
        return 'a b -> a b*' if leaf.shape[0] < 8 or f(leaf[:4]).shape == (4, 16) else None

    f = sharded(spec, mesh=EIGHT)(lambda x: 2 * x)
    result = f(X)
    np.testing.assert_array_equal(result, 2 * X)
    assert describe(result) == 'a b -> a b8'
