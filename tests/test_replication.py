"""Replication on a user's mesh: axes that no term names hold replicas."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of
from refusal import refusal

from einshard import (
    EinshardError,
    Rules,
    axis_rules,
    device_mesh,
    einshard,
    make_sharding,
    per_device,
    sharded,
)

X = np.arange(64, dtype=np.float32).reshape(8, 8)
AUTO, EXPLICIT, MIXED = (
    mesh_of(types=types, data=4, tensor=2)
    for types in (AxisType.Auto, AxisType.Explicit, (AxisType.Explicit, AxisType.Auto))
)
REPLICATED = [
    ('d -> d', 1),
    ('batch seq', 2),
    ('a b -> b a', 2),
    ('... -> ...', 3),
    ('...', 0),
    ('a ... b -> a ... b', 4),
    ('a1 b', 2),
    ('1 a', 1),
]


def is_replicated(x, mesh):
    """Whether every device of a mesh has all of an array, by its shards."""
    shards = [shard.data for shard in x.addressable_shards]
    full = all(np.array_equal(shard, x) for shard in shards)
    return full and {shard.device for shard in x.addressable_shards} == set(mesh.devices.flat)


@pytest.mark.parametrize('mesh', [AUTO, EXPLICIT, MIXED, AUTO.abstract_mesh], ids=str)
@pytest.mark.parametrize(('expression', 'ndim'), REPLICATED)
def test_expressions_that_replicate(mesh, expression, ndim):
    assert make_sharding(expression, ndim=ndim, mesh=mesh) == NamedSharding(mesh, P())
    abstract = isinstance(mesh, AbstractMesh)
    with (jax.sharding.use_abstract_mesh if abstract else jax.set_mesh)(mesh):
        assert make_sharding(expression, ndim=ndim).spec == P()


@pytest.mark.parametrize('mesh', [AUTO, EXPLICIT, MIXED], ids=str)
def test_eager_and_traced(mesh):
    def step(x):
        return einshard(x + 1, 'a b -> a b')

    sharded_step = sharded('a@data b', out='a b -> a b', mesh=mesh)(lambda x: x + 1)
    assert is_replicated(einshard(X, 'a b -> a b', mesh=mesh), mesh)
    assert is_replicated(sharded_step(X), mesh)
    with jax.set_mesh(mesh):
        x = einshard(X, 'a@data b')
        assert is_replicated(einshard(X, 'a b'), mesh)
        assert is_replicated(jax.jit(step)(x), mesh)
        assert np.array_equal(jax.jit(step)(x), X + 1)
        assert np.array_equal(jax.jit(jax.grad(lambda x: (step(x) ** 2).sum()))(x), 2 * X + 2)
        assert is_replicated(per_device('a b', out='a b')(lambda x: x + 1)(X), mesh)


def test_two_meshes_in_turn():
    other = mesh_of(x=2, y=4)
    f = jax.jit(lambda x: einshard(x + 1, 'a b -> a b'))
    for _ in range(2):
        for mesh in (AUTO, other):
            with jax.set_mesh(mesh):
                assert f(X).sharding.mesh == mesh
                assert is_replicated(f(X), mesh)


def test_trees_and_rules():
    tree = {'w': X, 'b': X[0]}
    specs = {'w': 'x y@tensor', 'b': 'y -> y'}
    placed = einshard(tree, specs, mesh=AUTO)
    assert is_replicated(placed['b'], AUTO)
    assert placed['w'].sharding.spec == P(None, 'tensor')
    placed = einshard(tree, Rules([('w', 'x@data y'), ('b', 'y')]), mesh=AUTO)
    assert is_replicated(placed['b'], AUTO)


@pytest.mark.parametrize('mesh', [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize('expression', ['a b -> a2 b', 'a4 b', '2 a b', 'a2 b@tensor'])
def test_counts_still_use_every_device(mesh, expression):
    with pytest.raises(EinshardError):
        make_sharding(expression, mesh=mesh)


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
def test_the_canonical_mesh_needs_a_replica(kind):
    mesh = device_mesh(axis_types=kind)
    abstract = AbstractMesh((2, 2), ('d0', 'd1'))
    for given in ({}, *({'mesh': one} for one in (mesh, abstract, jax.devices()[:8]))):
        with pytest.raises(EinshardError, match='nothing is sharded'):
            make_sharding('a b -> a b', **given)
    with jax.set_mesh(mesh), pytest.raises(EinshardError, match='nothing is sharded'):
        make_sharding('a b -> a b')


# --- a short form without placements in a trace ----------------------------------------------


@pytest.mark.parametrize('mesh', [AUTO, EXPLICIT], ids=str)
def test_a_warning_names_the_line(mesh):
    def step(x):
        return einshard(x, 'batch seq')  # this line

    with jax.set_mesh(mesh), pytest.warns(UserWarning, match='has no placement') as caught:
        jax.jit(lambda x: jax.lax.scan(lambda c, y: (c, step(c) + y), x, x)[0])(X)
    (text,) = {str(warning.message) for warning in caught}
    assert text.startswith("'batch seq' has no placement, and no axis_rules apply")
    assert text.endswith("to replicate it on purpose, write 'batch seq -> batch seq'")
    with open(__file__) as file:
        lines = file.read().splitlines()
    assert {(warning.filename, lines[warning.lineno - 1]) for warning in caught} == {
        (__file__, "        return einshard(x, 'batch seq')  # this line")
    }


def test_nothing_to_warn_of():
    def step(x):
        x = einshard(x, 'batch seq -> batch seq')
        x = einshard(x, 'batch seq@tensor')
        with axis_rules(heads='@tensor'):
            return einshard(x, 'batch seq')

    with jax.set_mesh(AUTO):
        jax.jit(step)(X)  # warnings are errors
        einshard(X, 'batch seq')


# --- names that are close to a rule -------------------------------------------------------------


@pytest.mark.parametrize(
    ('name', 'listed'),
    [
        ('bacth', 'batch'),
        ('batchs', 'batch'),
        ('bach', 'batch'),
        ('badch', 'batch'),
        ('embeed', 'embed'),
        ('Batch', 'batch'),
        ('kv_head', 'kv_heads'),
        ('mpl', 'mlp'),
    ],
)
@pytest.mark.parametrize('given', [{'mesh': AUTO}, {'mesh': EXPLICIT}])
def test_a_misspelled_name(name, listed, given):
    with axis_rules({listed: '@data'}):
        error = refusal(einshard, X, f'{name} d', **given)
        assert error.sentence == f"axis '{name}' has no rule, but '{listed}' has one"
        assert error.fix == f"'{listed} d'"
        assert einshard(X, f'{listed} d', **given).sharding.spec == P('data')
        assert einshard(X, f'{name}@tensor d', **given).sharding.spec == P('tensor')
        with axis_rules({name: ''}):
            assert einshard(X, f'{name} d', **given).sharding.spec == P()


@pytest.mark.parametrize(
    ('name', 'listed'),
    [
        ('seq', 'sea'),
        ('q_heads', 'kv_heads'),
        ('x_dim', 'y_dim'),
        ('activation_length', 'activation_q_length'),
        ('embed', 'embedding'),
        ('head', 'header'),
    ],
)
def test_names_that_are_different_on_purpose(name, listed):
    with axis_rules({listed: '@data'}):
        assert einshard(X, f'{name} d', mesh=AUTO).sharding.spec == P()


def test_a_name_next_to_the_one_it_is_close_to():
    with axis_rules(heads='@tensor'):
        assert einshard(X, 'heads head', mesh=AUTO).sharding.spec == P('tensor')
