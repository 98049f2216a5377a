"""Warnings about expressions that are valid, but were probably meant differently."""

import inspect
import warnings

import jax
import numpy as np
import pytest
from placed import mesh_of, struct

from einshard import Rules, axis_rules, einshard, make_sharding, sharded

X = np.ones((16, 16), np.float32)
MESH = mesh_of(data=4, model=2)


def warnings_of(call, action='always'):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        call()
    assert all(w.category is UserWarning for w in caught)
    return caught


@pytest.mark.parametrize(
    ('text', 'sentence', 'to_shard', 'to_replicate'),
    [
        ('x 16 y', "'16' only replicates", 'x16 y', '16 x y'),
        ('a * b', "'*' only replicates", 'a* b', '* a b'),
        ('a  2 b 8', "'2' and '8' only replicate", 'a2 b8', '2 8 a b'),
        ('a b->a b  *', "'*' only replicates", 'a b->a b*', 'a b -> * a b'),
        ('a ... -> 2 ... a 8', "'8' only replicates", 'a ... -> 2 ... a8', 'a ... -> 2 8 ... a'),
        ('a 2 * b', "'2' only replicates", 'a2 * b', '2 * a b'),
        ('a b -> b 1* a', "'1*' only replicates", 'a b -> b1* a', 'a b -> 1* b a'),
    ],
)
def test_a_count_or_star_after_a_space(text, sentence, to_shard, to_replicate):
    (caught,) = warnings_of(lambda: einshard(X, text))
    assert str(caught.message) == (
        f"in '{text}', {sentence}, and nothing is sharded; write '{to_shard}' to shard, "
        f"or '{to_replicate}' to replicate without this warning"
    )
    assert make_sharding(to_replicate).is_fully_replicated
    assert not make_sharding(to_shard, ndim=2).is_fully_replicated


def test_only_valid_expressions_are_suggested(devices8):
    (caught,) = warnings_of(lambda: einshard(np.ones((6, 8)), 'a 8 b', mesh=devices8))
    assert str(caught.message) == (
        "in 'a 8 b', '8' only replicates, and nothing is sharded; "
        "write '8 a b' to replicate without this warning"
    )


@pytest.mark.parametrize(
    'text',
    [
        '* a b', 'a b -> * a b', '... -> * ...', '... -> ... *', '... *', '2 8 a b', '16 ...',
        'a2 8 b', 'a 8 b2', 'a b -> b a* 1', 'a 1 b*', 'a b -> 2 a2 2 b2', 'a1 16 b', '16 a 1 b',
    ],
)  # fmt: skip
def test_replicas_on_purpose(text):
    assert warnings_of(lambda: einshard(X, text)) == []


def test_mesh_axes_shard():
    assert warnings_of(lambda: einshard(X, 'a@data 2 b', mesh=MESH)) == []
    assert len(warnings_of(lambda: einshard(X, 'a 8 b', mesh=MESH))) == 1


def test_axis_rules_shard():
    def place():
        einshard(X, 'batch * d', mesh=MESH)

    with axis_rules(batch='@data'):
        assert warnings_of(place) == []
    with axis_rules(batch='@pod', missing='replicate'):
        assert warnings_of(place) == []
    with axis_rules(batch='', heads='@model'):
        assert len(warnings_of(place)) == 1
    with axis_rules(batch='@data'):  # rules are for the short form
        assert len(warnings_of(lambda: einshard(X, 'batch d -> batch * d', mesh=MESH))) == 1


def scanned(x):
    return jax.lax.scan(lambda carry, _: (einshard(carry, 'a * b'), None), x, None, length=2)


CALLS = {
    'host data': lambda: einshard(X, 'a * b'),
    'a placed array': lambda: einshard(einshard(X, '* a b'), 'a * b'),
    'a scalar in a tree': lambda: einshard({'x': 1.0, 'y': X}, {'x': '*', 'y': 'a * b'}),
    'shapes': lambda: einshard(struct(16, 16), 'a * b'),
    'rules': lambda: einshard({'w': X}, Rules([('w', 'a * b')])),
    'make_sharding': lambda: make_sharding('a * b'),
    'an argument': lambda: sharded('a * b')(lambda x: x)(X),
    'a result': lambda: sharded(out='a * b')(lambda x: x)(X),
    'a traced value': lambda: jax.jit(lambda x: einshard(x, 'a * b'))(X),
    'a scan': lambda: jax.jit(scanned)(X),
}


@pytest.mark.parametrize('name', CALLS)
def test_the_warning_names_a_line_of_the_user(name):
    caught = warnings_of(CALLS[name])
    assert {w.filename for w in caught} == {__file__}
    lines, start = inspect.getsourcelines(scanned if name == 'a scan' else CALLS[name])
    assert {w.lineno for w in caught} <= {*range(start, start + len(lines))}


def test_once_for_each_line():
    def calls():
        for _ in range(3):
            einshard(X, 'c * d')
        return einshard(X, 'c * d')

    # Python shows a warning once for each line; the expression is parsed and placed only once
    assert len(warnings_of(calls, 'default')) == 2
    assert len(warnings_of(calls, 'always')) == 4


@pytest.mark.parametrize(
    ('text', 'sentence', 'to_shard'),
    [
        ('data model', "'data' and 'model' are array axes", 'data@data model@model axes'),
        ('model d', "'model' is an array axis", 'model@model d axis'),
        ('... data', "'data' is an array axis", '... data@data axis'),
    ],
)
def test_array_axes_named_like_mesh_axes(text, sentence, to_shard):
    named, _, axes = to_shard.rpartition(' ')
    calls = lambda: einshard(X, text, mesh=MESH), lambda: inside(text)
    for call in calls:
        (caught,) = warnings_of(call)
        assert caught.filename == __file__
        assert str(caught.message) == (
            f"in '{text}', {sentence}, and nothing is sharded; write '{named}' to shard over the "
            f"mesh {axes}, or '{text} -> {text}' to replicate without this warning"
        )
    assert warnings_of(lambda: einshard(X, f'{text} -> {text}', mesh=MESH)) == []
    assert not einshard(X, named, mesh=MESH).is_fully_replicated


def inside(text):
    with jax.set_mesh(MESH):
        jax.jit(lambda x: einshard(x, text))(X)


@pytest.mark.parametrize(
    ('text', 'shape'),
    [
        ('data d', (6, 8)),  # 'data@data d' does not work
        ('pod d', (8, 8)),  # 'pod' has size 1
        ('data@data model', (8, 8)),
        ('* data model', (8, 8)),
        ('d e', (8, 8)),
    ],
)
def test_other_names_and_sizes(text, shape):
    mesh = mesh_of(pod=1, data=4, model=2)
    assert warnings_of(lambda: einshard(np.ones(shape), text, mesh=mesh)) == []


def test_names_with_axis_rules_are_not_mesh_axes():
    with axis_rules(batch='@data'):
        assert warnings_of(lambda: einshard(X, 'data d', mesh=MESH)) == []
