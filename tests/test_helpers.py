"""What the sharding helpers of large code bases do, as docs/helpers.md has it, against values by
hand: one test for each row of the page."""

import json
import math
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_map_with_path
from placed import mesh_of

from einshard import (
    DECODING_AXES,
    TRAINING_AXES,
    EinshardError,
    Rules,
    axis_rules,
    describe,
    einshard,
    gather,
    make_sharding,
    shard_largest,
)

DOCS = Path(__file__).parents[1] / 'docs'
MESH = mesh_of(dp=2, fsdp=2, tp=4)
HOST = {
    'wte': np.arange(96.0, dtype=np.float32).reshape(24, 4),
    'h': [
        {'kernel': np.arange(64.0, dtype=np.float32).reshape(8, 8) + i, 'bias': np.ones(8)}
        for i in range(2)
    ],
}
PAIRS = [('wte', P('tp', 'fsdp')), ('h/0/kernel', P('fsdp', 'tp')), ('kernel', P()), ('bias', P())]
BY_HAND = {
    'wte': P('tp', 'fsdp'),
    'h': [{'kernel': P('fsdp', 'tp'), 'bias': P()}, {'kernel': P(), 'bias': P()}],
}


def shapes_of(tree):
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))


def test_partition_rules_to_specs():
    shapes = einshard(shapes_of(HOST), Rules(PAIRS), mesh=MESH)
    assert jax.tree.map(lambda x: x.sharding.spec, shapes) == BY_HAND


def test_shard_and_gather_functions():
    shapes = einshard(shapes_of(HOST), Rules(PAIRS), mesh=MESH)
    shard_fns = jax.tree.map(lambda text: partial(einshard, spec=text, mesh=MESH), describe(shapes))
    gather_fns = jax.tree.map(lambda _: gather, shapes)
    sharded = jax.tree.map(lambda f, x: f(x), shard_fns, HOST)
    assert jax.tree.map(lambda x: x.sharding.spec, sharded) == BY_HAND
    # device 5 is dp 0, fsdp 1, tp 1
    (shard,) = [s for s in sharded['wte'].addressable_shards if s.device == jax.devices()[5]]
    np.testing.assert_array_equal(shard.data, HOST['wte'][6:12, 2:4])
    gathered = jax.tree.map(lambda f, x: f(x), gather_fns, sharded)
    for before, after in zip(jax.tree.leaves(HOST), jax.tree.leaves(gathered), strict=True):
        assert type(after) is np.ndarray
        np.testing.assert_array_equal(before, after)


def test_rules_from_strings():
    text = json.dumps({'h/0/': 'a@fsdp ...', 'bias': '* a', '': 'a b@tp'})
    placed = einshard(shapes_of(HOST), Rules(json.loads(text).items()), mesh=MESH)
    assert jax.tree.map(lambda x: x.sharding.spec, placed) == {
        'wte': P(None, 'tp'),
        'h': [{'kernel': P('fsdp'), 'bias': P('fsdp')}, {'kernel': P(None, 'tp'), 'bias': P()}],
    }


def test_rules_by_size():
    tree = {'a': np.ones((16, 48)), 'b': np.ones((32, 5)), 'c': np.ones(7)}
    placed = einshard(shapes_of(tree), shard_largest, mesh=MESH)
    everything = ('dp', 'fsdp', 'tp')
    assert jax.tree.map(lambda x: x.sharding.spec, placed) == {
        'a': P(None, everything),
        'b': P(everything),
        'c': P(),
    }


def test_specs_made_to_fit():
    pairs = [('', P(('pod', 'dp'), 'tp'))]
    rules = Rules(pairs, missing='replicate', indivisible='replicate')
    table = rules.table({'w': jax.ShapeDtypeStruct((8, 10), np.float32)}, mesh=MESH)
    (row,) = table.rows
    assert row.shard_shape == (4, 10)
    assert (row.missing_axes, row.replicated_axes) == (('pod',), (1,))
    with pytest.raises(EinshardError, match="no axis 'pod'"):
        einshard(np.ones((8, 8)), Rules(pairs), mesh=MESH)


def test_analysis():
    table = Rules(PAIRS).table(shapes_of(HOST), mesh=MESH)
    assert sum(math.prod(row.shape) for row in table.rows) == 96 + 2 * (64 + 8)
    assert table.bytes_per_device == 4 * (96 / 8 + 64 / 8 + 64 + 8 + 8)
    assert table.whole_bytes == 4 * (96 + 2 * (64 + 8))
    assert table.copies == 16 * (12 + 8 + 64 + 8 + 8) / (96 + 2 * (64 + 8))
    assert [row.path for row in table.largest_replicated(1)] == ['h/1/kernel']


def test_the_mesh_in_context():
    with jax.set_mesh(MESH):
        assert jax.sharding.get_mesh() == MESH
        assert jax.sharding.get_abstract_mesh().axis_names == ('dp', 'fsdp', 'tp')
        assert jax.jit(lambda: len(jax.sharding.get_abstract_mesh().axis_names))() == 3
        assert einshard(np.ones(8), 'a@(dp,tp)').sharding == NamedSharding(MESH, P(('dp', 'tp')))


@pytest.mark.parametrize('mesh', [MESH, MESH.abstract_mesh])
def test_axis_sizes(mesh):
    assert mesh.shape['tp'] == 4
    assert math.prod(mesh.shape[axis] for axis in ('dp', 'tp')) == 8
    assert math.prod(mesh.shape[axis] for axis in ()) == 1
    assert mesh.shape.get('pod', 1) == 1


@pytest.mark.parametrize(
    ('expression', 'used'),
    [
        ('a@dp b', {'dp'}),
        ('a b@(tp,dp) c@fsdp', {'dp', 'fsdp', 'tp'}),
        ('* a', set()),
        ('a*', {'dp', 'fsdp', 'tp'}),
    ],
)
def test_names_used_by_a_spec(expression, used):
    spec = make_sharding(expression, mesh=MESH).spec
    assert set(jax.tree.leaves(tuple(spec))) == used


def test_parts_of_an_axis():
    assert make_sharding('a@(dp,tp) b@fsdp c', mesh=MESH).shard_shape((64, 6, 5)) == (8, 3, 5)


def test_size_and_index_of_a_submesh():
    @partial(jax.shard_map, mesh=MESH, in_specs=(), out_specs=P(('dp', 'fsdp', 'tp')))
    def size_and_index():
        axes = ('dp', 'tp')
        return jnp.array([[jax.lax.axis_size(axes), jax.lax.axis_index(axes)]])

    by_hand = [[8, dp * 4 + tp] for dp in range(2) for _ in range(2) for tp in range(4)]
    assert size_and_index().tolist() == by_hand


def test_a_constraint_on_a_value_in_between():
    @jax.jit
    def f(x):
        return einshard(x + 1, 'a@dp b@tp')

    with jax.set_mesh(MESH):
        assert f(np.ones((8, 8))).sharding.spec == P('dp', 'tp')
        assert einshard(np.ones((8, 8)), 'a@dp b@tp').sharding.spec == P('dp', 'tp')


def test_a_constraint_only_where_the_mesh_has_the_axes():
    x = np.ones((8, 8))
    placed = einshard(x, 'a@(pod,dp) b@tensor', mesh=MESH, missing='replicate')
    assert placed.sharding.spec == P('dp')
    alone = einshard(x, 'a@(pod,dp) b@tensor', mesh=jax.devices()[:1], missing='replicate')
    assert alone.sharding.device_set == {jax.devices()[0]}
    assert jax.jit(lambda x: einshard(x, 'a@pod b', missing='replicate'))(x).is_fully_replicated


def test_logical_axes():
    mesh = AbstractMesh((8, 2), ('data', 'sequence'))
    specs = []
    for axes in (TRAINING_AXES, DECODING_AXES):
        with axis_rules(axes, missing='replicate'):
            specs.append(make_sharding('batch sequence heads head_dim', mesh=mesh).spec)
    assert specs == [P('data', 'sequence'), P('data')]


def test_shardings_specs_and_expressions_of_a_tree():
    placed = einshard(HOST, Rules(PAIRS), mesh=MESH)
    assert jax.tree.map(lambda x: x.sharding, placed)['wte'] == NamedSharding(MESH, P('tp', 'fsdp'))
    assert jax.tree.map(lambda x: x.sharding.spec, placed) == BY_HAND
    assert describe(placed)['h'][0] == {'bias': 'a -> 16 a', 'kernel': 'a b -> a@fsdp b@tp'}
    again = einshard(HOST, describe(placed), mesh=MESH)
    assert jax.tree.map(lambda x: x.sharding.spec, again) == BY_HAND


def test_names_of_leaves():
    names = tree_map_with_path(lambda path, _: keystr(path, simple=True, separator='/'), HOST)
    assert names['h'][1] == {'bias': 'h/1/bias', 'kernel': 'h/1/kernel'}
    seen = []
    einshard(HOST, lambda path, leaf: seen.append(path))
    assert seen == jax.tree.leaves(names)


def test_the_page_has_a_cell_that_checks_itself_for_every_row():
    page = (DOCS / 'helpers.md').read_text(encoding='utf-8')
    rows = re.findall(r'^\*\*', page, re.MULTILINE)
    cells = re.findall(r'^```\{code-cell\}\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    checking = [cell for cell in cells if 'assert ' in cell]
    assert len(rows) == len(checking) > 12


def test_the_table_of_ready_axes_is_theirs():
    page = (DOCS / 'functions.md').read_text(encoding='utf-8')
    listed = {}
    for names, training, decoding in re.findall(
        r'^\| (`[^|]*`) \| ([^|]*)\| ([^|]*)\|', page, re.MULTILINE
    ):
        for name in re.findall(r'`(\w+)`', names):
            listed[name] = tuple(text.strip().strip('`') for text in (training, decoding))
    assert listed == {axis: (TRAINING_AXES[axis], DECODING_AXES[axis]) for axis in TRAINING_AXES}
