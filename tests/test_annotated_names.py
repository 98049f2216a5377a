# ruff: noqa: F722, F821, UP037
"""sharded(axis_rules=...): jaxtyping annotations as specs, compared with the specs by hand."""

from __future__ import annotations

import dataclasses
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree, TypeCheckError, jaxtyped
from placed import mesh_of, struct

from einshard import (
    EinshardError,
    Sharded,
    axis_rules,
    describe,
    einshard,
    explain,
    plan,
    sharded,
    to_jax,
)

MESH = mesh_of(data=4, tensor=2)
RULES = {'batch': '@data', 'f': '@tensor'}
X, W = np.ones((8, 6), np.float32), np.ones((6, 4), np.float32)
read = sharded(axis_rules=RULES, mesh=MESH)


def specs(shardings):
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def same(sharding, spec, ndim):
    return sharding.is_equivalent_to(NamedSharding(MESH, spec), ndim)


def layer(
    x: Float[Array, 'batch d'], w: Float[Array, 'd f'], scale: float
) -> Float[Array, 'batch f']:
    return einshard(x @ w, 'batch f') * scale


def test_as_with_specs_and_rules():
    with axis_rules(RULES):
        by_hand = sharded('batch d', 'd f', None, out='batch f', mesh=MESH)(layer)
        expected = by_hand.in_shardings(X, W, 2.0), by_hand.out_shardings(X, W, 2.0)
        text = by_hand.lower(X, W, 2.0).as_text()
    f = read(layer)
    assert (f.in_shardings(X, W, 2.0), f.out_shardings(X, W, 2.0)) == expected
    assert f.lower(X, W, 2.0).as_text() == text
    for _ in range(2):
        y = f(X, W, 2.0)
        assert same(y.sharding, P('data', 'tensor'), 2)
        np.testing.assert_array_equal(y, X @ W * 2)
    rows = explain(f, X, W, 2.0).arguments
    assert [row.placement for row in rows[:2]] == ['batch d -> batch@data d', 'd f -> d f@tensor']
    assert "P('data', 'tensor')" in to_jax(f, X, W, 2.0)


@pytest.mark.parametrize('rules', [RULES, [('batch', 'data'), ('f', 'tensor')], axis_rules(RULES)])
def test_forms_of_rules(rules):
    f = sharded(axis_rules=rules, mesh=MESH)(layer)
    assert same(f(X, W, 1.0).sharding, P('data', 'tensor'), 2)


@pytest.mark.parametrize(
    ('text', 'shape', 'spec'),
    [
        ('batch d', (8, 3), P('data')),
        ('b=4 batch', (4, 8), P(None, 'data')),
        ('batch=8 f', (8, 4), P(None, 'tensor')),
        ('batch n+1 _ _x 3 d4', (8, 1, 2, 3, 3, 5), P('data')),
        ('#batch ?f', (8, 4), P('data', 'tensor')),
        ('*batch f', (8, 3, 4), P(None, None, 'tensor')),
        ('... batch', (3, 8), P(None, 'data')),
        ('batch ...', (8,), P('data')),
        ('*#batch f', (4,), P('tensor')),
        ('n n batch', (3, 3, 8), P(None, None, 'data')),
    ],
)
def test_dimensions(text, shape, spec):
    def f(x):
        return x

    f.__annotations__ = {'x': Float[Array, text]}
    sharding = read(f).in_shardings(struct(*shape))['x']
    assert same(sharding, spec, len(shape))


def test_a_repeated_name_with_a_rule():
    def f(x: Float[Array, 'batch batch']):
        return x

    with pytest.raises(EinshardError, match="'batch batch' names several axes 'batch'"):
        read(f)
    assert specs(sharded('batch d', axis_rules=RULES, mesh=MESH)(lambda x: x).in_shardings(X)) == {
        'x': P('data')
    }


def test_scalars_and_other_types_have_no_spec():
    def f(a: Float[Array, ''], b: Array, c: float, d: np.ndarray, *, n: int = 1):
        return a

    assert read(f).in_shardings(1.0, X, 2.0, W) == dict.fromkeys('abcd')


def test_without_rules_annotations_are_documentation():
    with axis_rules(RULES):
        assert sharded(mesh=MESH)(layer).in_shardings(X, W, 1.0) == dict.fromkeys(
            ('x', 'w', 'scale')
        )


def test_explicit_specs_and_sharded_win():
    def f(
        x: Float[Array, 'batch d'],
        w: Sharded[Float[Array, 'd g'], 'd@tensor g'],
        v: Float[Array, 'batch d'],
    ) -> Float[Array, 'batch f']:
        return x @ w

    f = sharded(v='batch d -> batch d', out='batch f -> batch f', axis_rules=RULES, mesh=MESH)(f)
    assert specs(f.in_shardings(X, W, X)) == {'x': P('data'), 'w': P('tensor'), 'v': P()}
    assert specs(f.out_shardings(X, W, X)) == P()
    g = sharded('batch d -> batch d', None, axis_rules=RULES, mesh=MESH)(layer)
    assert g.in_shardings(X, W, 1.0)['w'] is None
    assert specs(g.in_shardings(X, W, 1.0)['x']) == P()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Params:
    w: Float[Array, 'd f']
    bias: Float[Array, 'f'] | None
    step: int


class Module(eqx.Module):
    w: Float[Array, 'd f']
    inner: list[Params]
    activation: object = jax.nn.relu


class Pair(typing.NamedTuple):
    x: Float[Array, 'batch d']
    y: Int[Array, 'batch']


PARAMS = Params(W, np.ones(4, np.float32), 3)


def test_fields_and_containers():
    def f(module: Module, params: Params, pair: Pair, more: dict[str, Float[Array, 'batch d']]):
        return module

    f = read(f)
    module, pair = Module(W, [PARAMS]), Pair(X, np.ones(8, np.int32))
    found = f.in_shardings(module, PARAMS, pair, {'a': X})
    for params in (found['params'], found['module'].inner[0]):
        assert (params.w.spec, params.bias.spec) == (P(None, 'tensor'), P('tensor'))
    assert (found['params'].step, found['module'].inner[0].step) == (
        None,
        3,
    )  # the latter is static
    assert found['module'].w.spec == P(None, 'tensor')
    assert found['module'].activation is jax.nn.relu
    assert specs(found['pair']) == Pair(P('data'), P('data'))
    assert specs(found['more']) == {'a': P('data')}
    assert describe(f(module, PARAMS, pair, {'a': X}).inner[0].bias) == 'a -> a@tensor'


def test_unions_and_pytrees():
    def f(
        x: Float[Array, 'batch d'] | Int[Array, 'batch d'] | None,
        tree: PyTree[Float[Array, 'batch d']],
    ) -> tuple[Float[Array, 'batch d'], Float[Array, 'f']]:
        return tree['a'], jnp.ones(4)

    f = read(f)
    for x, spec in [(X, P('data')), (None, None)]:
        found = f.in_shardings(x, {'a': X, 'b': [X]})
        assert (found['x'] and found['x'].spec) == spec
        assert found['tree'].spec == P('data')  # of all its leaves
    assert specs(f.out_shardings(X, {'a': X})) == (P('data'), P('tensor'))

    def g(x: Float[Array, 'batch d'] | Float[Array, 'batch t f']):
        return x

    with pytest.raises(EinshardError, match='union cannot have different specs'):
        read(g)


@pytest.mark.parametrize('above', [False, True])
@pytest.mark.parametrize('check', [beartype, jaxtyped(typechecker=beartype)])
def test_type_checkers(above, check):
    def f(x: Float[Array, 'batch d'], w: Float[Array, 'd f']) -> Float[Array, 'batch f']:
        return x @ w

    f = check(read(f)) if above else read(check(f))
    for _ in range(2):
        y = f(jnp.asarray(X), jnp.asarray(W))
        assert same(y.sharding, P('data', 'tensor'), 2)
    if not above:  # it sees traced arrays; above, it sees those of the caller
        f(X, W)
    elif check is not beartype:
        with pytest.raises(TypeCheckError):
            f(X, W)


def test_the_body_has_the_rules():
    """Also bodies of loops, whose traces JAX caches by the function."""

    def step(carry, _):
        return einshard(carry * 2, 'batch d'), None

    def f(x):
        return jax.lax.scan(step, x, None, length=2)[0]

    for rules, spec in [
        ({'batch': '@data'}, P('data')),
        ({'d': '@tensor'}, P(None, 'tensor')),
        ({'batch': '@data'}, P('data')),
    ]:
        g = sharded(axis_rules=rules, mesh=MESH)(f)
        for _ in range(2):
            assert same(g(X).sharding, spec, 2)


def test_ambient_rules_are_merged():
    def f(x: Float[Array, 'batch d']):
        return x

    f = read(f)
    assert specs(f.in_shardings(X)['x']) == P('data')
    with axis_rules(d='@tensor', batch=''):  # the inner rule of 'batch' wins
        assert specs(f.in_shardings(X)['x']) == P('data', 'tensor')
        assert describe(f(X)) == 'a b -> a@data b@tensor'
    assert same(f(X).sharding, P('data'), 2)


def test_methods():
    class Model(eqx.Module):
        w: Float[Array, 'd f']
        activation: object = jax.nn.relu

        @read
        def __call__(self, x: Float[Array, 'batch d']) -> Float[Array, 'batch f']:
            return self.activation(x @ self.w)

    model = Model(jnp.asarray(W))
    for _ in range(2):
        assert same(model(X).sharding, P('data', 'tensor'), 2)


def test_names_after_an_ellipsis_in_rules():
    """The ndim of the array decides which axis the rule shards."""
    f = sharded('... f', mesh=MESH)(lambda x: x)
    with axis_rules(RULES):
        for shape in ((4,), (3, 4), (2, 3, 4)):
            spec = P(*(None,) * (len(shape) - 1), 'tensor')
            assert same(f(np.ones(shape)).sharding, spec, len(shape))


def test_wrong_rules():
    for rules in (3, {'a b': '@data'}):
        with pytest.raises(EinshardError, match='axis_rules'):
            sharded(axis_rules=rules)


@pytest.mark.parametrize('rules', [{'batch': '@data', 'f': '@tensor'}, {'batch': '2'}, {}])
def test_plan_replaces_the_rules(rules):
    def decorated(rules):
        class Mlp:
            @sharded(axis_rules=rules, static_argnames='self')
            def apply(self, x: Float[Array, 'batch d'], w: Float[Array, 'd f']) -> Array:
                return einshard(x @ w, 'batch f')

        return Mlp().apply

    x, w = struct(512, 256), struct(256, 1024)
    pin = {'batch': '@x', 'd': '', 'f': '@y'}
    found = plan(
        decorated(rules), x, w, mesh=jax.devices()[:8], objective='memory', pin=pin, compilations=1
    )
    size = dict(found.best.candidate.mesh)
    placements = [row.placement for row in found.explain().arguments]
    assert placements == ['batch d -> batch@x d', 'd f -> d f@y']
    assert size.keys() == {'x', 'y'}
    # with what it prints, the function has these placements
    assert ('axis_rules(rules):' in str(found)) == (not rules)
    with jax.set_mesh(found.mesh):
        report = explain(decorated(found.rules), x, w, tries=0)
    assert [row.placement for row in report.arguments] == placements
