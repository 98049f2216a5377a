"""axis_rules: logical names take a placement from the code around them."""

import asyncio
import contextvars
import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from einshard import EinshardError, axis_rules, describe, einshard, make_sharding, sharded

MESH = Mesh(
    np.array(jax.devices()[:8]).reshape(2, 2, 2),
    ('data', 'fsdp', 'tp'),
    axis_types=(AxisType.Auto,) * 3,
)
X = np.zeros((8, 8, 8), np.float32)


def spec(expression, mesh=MESH):
    return make_sharding(expression, mesh=mesh).spec


def test_names_take_the_placement_of_their_rule():
    with axis_rules(batch='@(data,fsdp)', heads='@tp'):
        assert spec('batch heads d') == P(('data', 'fsdp'), 'tp')
        assert spec('heads d') == P('tp')
        # without a rule an axis is not sharded, and the mesh replicates
        assert spec('a b') == P()
        # nor is an axis with a placement of its own, or an expression with an arrow, changed
        assert spec('batch@data heads') == P('data', 'tp')
        assert spec('batch d -> batch@tp d') == P('tp')
        assert spec('batch ...') == P(('data', 'fsdp'))
    with pytest.raises(EinshardError, match='nothing is sharded'):
        spec('a b')


@pytest.mark.parametrize(
    ('rule', 'expression', 'same'),
    [
        ('*', 'batch d', 'batch d -> batch* d'),
        ('4', 'batch d', 'batch d -> * batch4 d'),
        ('2*', 'batch d*', 'batch d -> batch2* d*'),
        ('8', 'batch d', 'batch d -> batch8 d'),
        ('', 'batch d', 'batch d -> * batch d'),
    ],
)
def test_counts_and_stars(rule, expression, same, devices8):
    with axis_rules(batch=rule):
        given = make_sharding(expression, mesh=devices8) if rule != '2*' else None
    if rule == '2*':
        devices8 = jax.devices()[:2]
        with axis_rules(batch=rule):
            given = make_sharding(expression, mesh=devices8)
    assert given == make_sharding(same, mesh=devices8)


def test_rules_nest():
    with axis_rules(batch='@data', heads='@tp'):
        with axis_rules(batch='@fsdp', d='@data'):
            assert spec('batch heads d') == P('fsdp', 'tp', 'data')
            with axis_rules(heads=''):
                assert spec('batch heads d') == P('fsdp', None, 'data')
        assert spec('batch heads d') == P('data', 'tp')


def test_on_arrays_and_in_traced_functions():
    with axis_rules(batch='@data', heads='@tp'):
        placed = einshard(X, 'batch heads d', mesh=MESH)
        made = jax.jit(lambda x: einshard(x * 2, 'heads batch d', mesh=MESH))(X)
    assert describe(placed) == 'a b c -> a@data b@tp c'
    assert describe(made) == 'a b c -> a@tp b@data c'


def test_as_a_decorator_also_of_a_recursion():
    @axis_rules(batch='@data')
    def specs(n):
        return [spec('batch'), *(specs(n - 1) if n else [])]

    assert specs(2) == [P('data')] * 3
    assert specs.__name__ == 'specs'
    with pytest.raises(EinshardError):
        spec('batch')


def test_sharded_has_a_program_for_each_set_of_rules():
    traced = []

    @sharded('batch d', out='batch d', mesh=MESH)
    def f(x):
        traced.append(1)
        return einshard(x + 1, 'batch d')

    x = np.zeros((8, 8), np.float32)
    for _ in range(3):
        with axis_rules(batch='@data'):
            assert f(x).sharding.spec == P('data')
        with axis_rules(batch='@(tp,fsdp)'):
            assert f(x).sharding.spec == P(('tp', 'fsdp'))
    assert len(traced) == 2
    with pytest.raises(EinshardError, match='nothing is sharded'):
        f(x)


def test_seen_by_tasks_and_in_copied_contexts():
    seen = {}

    def note(name):
        try:
            seen[name] = spec('batch')
        except EinshardError:
            seen[name] = None

    async def task():
        note('task')

    async def main():
        await asyncio.create_task(task())

    with axis_rules(batch='@data'):
        asyncio.run(main())
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=[note, 'copied'])
        thread.start()
        thread.join()
    assert seen['task'] == seen['copied'] == P('data')
    note('after')
    assert seen['after'] is None


def test_two_names_that_claim_one_mesh_axis():
    rules = axis_rules(batch='@(data,fsdp)', embed='@fsdp')
    with rules, pytest.raises(EinshardError) as caught:
        spec('batch embed')
    assert str(caught.value) == (
        "mesh axis 'fsdp' is used 2 times, but it can shard only one place\n"
        '    batch@(data,fsdp) embed@fsdp\n'
        '    ^^^^^^^^^^^^^^^^^ ^^^^^^^^^^'
    )


def test_a_rule_for_a_mesh_axis_that_is_not_there():
    with axis_rules(batch='@dta'), pytest.raises(EinshardError) as caught:
        spec('batch d')
    assert str(caught.value) == (
        "the mesh has no axis 'dta'\n"
        '    batch@dta d\n'
        '    ^^^^^^^^^\n'
        "  mesh: 'data': 2, 'fsdp': 2, 'tp': 2\n"
        "  here: 'batch@data d'"
    )


@pytest.mark.parametrize('placement', ['data', '@', 'x*', '0', '* *', ' *', None, 4, '...'])
def test_placements_that_are_none(placement):
    with pytest.raises(EinshardError, match='which is no placement of an axis'):
        axis_rules(batch=placement)


def test_a_name_that_is_none():
    with pytest.raises(EinshardError, match='which is no placement'):
        axis_rules(b1='@data')
