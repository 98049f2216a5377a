"""Rules.table: its rows, totals, notes, text and HTML."""

import math
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from placed import mesh_of, struct
from refusal import refusal

from einshard import Rules, axis_rules, device_mesh, einshard, shard_largest

REPLICATED = '... -> * ...'
TREE = {
    'embed': np.ones((50, 16), np.float32),
    'mlp': {'kernel': np.ones((16, 64), np.float32), 'bias': np.ones(64, np.float16)},
    'norm': np.ones(16, np.float32),
    'step': np.int32(3),
    'activation': jax.nn.relu,
    'none': None,
}
RULES = Rules(
    [
        ('embed', 'v d -> v* d2'),
        ('kernel$', 'i o -> * i o2'),
        ('mlp/kernel', 'i* o'),
        ('bias$', '... -> * ...'),
        ('attention', 'i o -> i o*'),
    ],
    default=None,
    indivisible='replicate',
    min_size=20,
)


def test_rows():
    # the text has the rest
    rows = RULES.table(TREE).rows
    assert [(row.dtype, row.total_bytes, row.sharded, row.replicated_axes) for row in rows] == [
        ('float32', 50 * 16 * 4, True, (0,)),
        ('float16', 64 * 2, False, ()),
        ('float32', 16 * 64 * 4, True, ()),
        ('float32', 16 * 4, False, ()),
        ('int32', 4, False, ()),
    ]
    for rules in (Rules([('w', None)]), Rules([], default=None)):
        (row,) = rules.table({'w': struct(8, 4), 'f': len}).rows
        assert (row.expression, row.shard_shape, row.bytes) == (None, (8, 4), 128)


def test_totals():
    table = RULES.table(TREE)
    total = 50 * 16 * 4 + 16 * 64 * 4 + 64 * 2 + 16 * 4 + 4
    held = 50 * 8 * 4 + 16 * 32 * 4 + 64 * 2 + 16 * 4 + 4
    assert (table.n_devices, table.total_bytes, table.bytes_per_device) == (16, total, held)
    assert table.sharded_share == (50 * 16 * 4 + 16 * 64 * 4) / total
    assert table.copies == held * 16 / total
    assert [row.path for row in table.largest_replicated()] == ['mlp/bias', 'norm', 'step']
    assert [row.path for row in table.largest_replicated(1)] == ['mlp/bias']


def test_arrays_without_a_spec_are_not_listed_as_replicated():
    tree = {name: struct(16, 4) for name in 'abcdefgh'}
    table = Rules([('a', 'i* o'), ('b', REPLICATED)], default=None).table(tree)
    assert [row.path for row in table.largest_replicated()] == ['b']
    assert 'largest replicated arrays: b (256 B)\n' in str(table)
    note = 'no spec, so counted as replicated: c, d, e, f, g, and 1 more (1.5 KiB)'
    assert note in str(table).splitlines()
    assert table.bytes_per_device == 16 + 7 * 256


def test_totals_at_the_ends():
    replicated = Rules([], default=REPLICATED).table({'w': struct(16, 4)})
    assert (replicated.sharded_share, replicated.copies) == (0, 16)
    sharded = Rules([], default='a* b').table({'w': struct(16, 4)})
    assert (sharded.sharded_share, sharded.copies) == (1, 1)
    empty = Rules([]).table({})
    assert (empty.rows, empty.bytes_per_device, empty.total_bytes) == ((), 0, 0)
    assert (empty.sharded_share, empty.copies) == (0, 1)
    assert '0 B per device on 16 devices' in str(empty)


MESH = mesh_of(data=2, fsdp=4, tp=2)
PLACED = [
    (Rules([], default=REPLICATED), None),
    (Rules([], default=shard_largest), None),
    (Rules([], default=shard_largest), jax.devices()[:6]),
    (Rules([('kernel', P('fsdp', 'tp'))], default=REPLICATED), MESH),
    (Rules([('', '... o -> ... o@(data,fsdp)')], indivisible='replicate'), MESH),
    (Rules([('', 'o ... -> o* ...')], indivisible='replicate', min_size=30), jax.devices()[:3]),
    (Rules([('', 'o ... -> o4 * ...')], indivisible='replicate'), jax.devices()[:12]),
]


@pytest.mark.parametrize(('rules', 'mesh'), PLACED)
def test_bytes_of_placed_arrays(rules, mesh):
    tree = {
        'kernel': np.ones((24, 12), np.float32),
        'layers': [{'kernel': np.ones((8, 6), np.int8), 'bias': np.ones(6)} for _ in range(2)],
        'half': jnp.ones((5, 16), jnp.bfloat16),
        'complex': np.ones((4, 4), np.complex64),
        'bits': np.ones((4, 6), bool),
        'step': np.int32(3),
        'rate': np.float32(0.5),
    }
    table = rules.table(tree, mesh=mesh)
    placed = jax.tree.leaves(einshard(tree, rules, mesh=mesh))
    assert len(table.rows) == len(placed)
    for row, x in zip(table.rows, placed, strict=True):
        assert (row.shape, row.dtype) == (x.shape, str(x.dtype))
        assert len(x.addressable_shards) == table.n_devices
        for shard in x.addressable_shards:
            assert shard.data.shape == row.shard_shape
            assert shard.data.nbytes == row.bytes
    held = [sum(s.data.nbytes for s in x.addressable_shards) for x in placed]
    assert table.bytes_per_device * table.n_devices == sum(held)
    assert table.total_bytes == sum(x.nbytes for x in placed)
    assert math.isclose(table.copies, sum(held) / table.total_bytes)
    # the same from shapes
    assert rules.table(jax.eval_shape(lambda: tree), mesh=mesh) == table


def test_the_mesh_is_that_of_einshard():
    rules, tree = Rules([('w', P('fsdp', 'tp'))]), {'w': struct(8, 4)}
    with jax.set_mesh(MESH):
        assert rules.table(tree).rows[0].shard_shape == (2, 2)
        assert rules.table(tree) == rules.table(tree, mesh=MESH)
    abstract = AbstractMesh((8, 4), ('fsdp', 'tp'), axis_types=(AxisType.Auto,) * 2)
    assert rules.table(tree, mesh=abstract).rows[0].shard_shape == (1, 1)
    assert rules.table(tree, mesh=abstract).n_devices == 32


@pytest.mark.parametrize(
    ('rules', 'tree'),
    [
        (Rules([('w', 'a b -> a4 b3')]), {'w': struct(4, 3)}),
        (Rules([('w', P('fsdp'))]), {'w': struct(8, 4)}),
        (Rules([('x', REPLICATED)]), {'w': struct(4)}),
        (Rules([('k', 'a*')]), {'mlp': {'kernel': struct(4)}}),
        (Rules([], default=REPLICATED), {'names': np.array(['a', 'b']), 'w': struct(16)}),
    ],
)
def test_errors_are_those_of_einshard(rules, tree):
    with jax.set_mesh(device_mesh(jax.devices()[:12])):
        ours, theirs = refusal(rules.table, tree), refusal(einshard, tree, rules)
    assert (ours.sentence, ours.facts) == (theirs.sentence, theirs.facts)


def test_arrays_without_a_spec_may_have_any_dtype():
    tree = {'names': np.array(['a', 'b']), 'w': struct(16)}
    assert [row.path for row in Rules([], default=None).table(tree).rows] == ['w']


def test_keys_have_bytes():
    keys = jax.random.split(jax.random.key(0), 16)
    (row,) = Rules([('', 'n*')]).table(keys).rows
    assert (row.shard_shape, row.bytes, row.total_bytes) == ((1,), 8, 128)


def test_a_function_is_asked_once_for_each_leaf():
    asked = []

    def ask(path, leaf):
        asked.append(path)
        return REPLICATED

    Rules([], default=ask).table({'a': struct(4), 'b': struct(4)})
    assert asked == ['a', 'b']


# ---------------------------------------------------------------------------------------- notes


@pytest.mark.parametrize(
    ('patterns', 'paths', 'unused', 'shadowed', 'unneeded'),
    [
        (['a', 'b'], ['a', 'b'], (), (), ()),
        (['a', 'c'], ['a', 'b'], ('c',), (), ()),
        (['a', 'a'], ['a'], (), (('a', 'a'),), ()),
        (['', 'a'], ['a'], (), (('a', ''),), ()),
        (['a', ''], ['a', 'b'], (), (), ()),
        (['a', ''], ['a'], (), (('', 'a'),), ()),
        (['a', 'ab'], ['ab', 'ac'], (), (('ab', 'a'),), ()),
        (['ab', 'a'], ['ab', 'ac'], (), (), ()),
        (['a', 'b', 'a|b', 'a|b|c'], ['a', 'b'], (), (), ('a|b', 'a|b|c')),
        (['b', 'a', 'a|b', 'x', 'y'], ['a', 'b'], ('x', 'y'), (), ('a|b',)),
        ([], ['a'], (), (), ()),
    ],
)
def test_rules_never_used(patterns, paths, unused, shadowed, unneeded):
    rules = Rules([(pattern, REPLICATED) for pattern in patterns], default=REPLICATED)
    table = rules.table({path: struct(16) for path in paths})
    assert (table.unused, table.shadowed, table.unneeded) == (unused, shadowed, unneeded)
    notes = [f"rule never matches: '{pattern}'" for pattern in unused]
    notes += [f"rule never applies: '{a}', because '{b}' matches first" for a, b in shadowed]
    notes += [f"rule never applies: '{a}', because earlier rules match first" for a in unneeded]
    assert [line for line in str(table).splitlines() if line.startswith('rule never')] == notes


def test_indivisible_axes():
    rules = Rules([('', 'a b -> a4 b4')], indivisible='replicate')
    tree = {'w': struct(4, 4), 'x': struct(3, 4), 'y': struct(4, 3), 'z': struct(3, 3)}
    table = rules.table(tree)
    assert [row.replicated_axes for row in table.rows] == [(), (0,), (1,), (0, 1)]
    assert [row.shard_shape for row in table.rows] == [(1, 1), (3, 1), (1, 3), (3, 3)]
    listed = [line for line in str(table).splitlines() if line.startswith('not divisible')]
    axes = ['axis 0 of x', 'axis 1 of y', 'axis 0 of z', 'axis 1 of z']
    assert listed == [f'not divisible, so replicated: {axis}, size 3' for axis in axes]


def test_missing_mesh_axes():
    rules = Rules(
        [('w', P(('data', 'pod'), 'seq')), ('x', 'a b@(pod,tp)'), ('y', '* a b')],
        missing='replicate',
    )
    table = rules.table({'w': struct(4, 4), 'x': struct(4, 4), 'y': struct(4, 4)}, mesh=MESH)
    assert [row.missing_axes for row in table.rows] == [('pod', 'seq'), ('pod',), ()]
    assert [row.shard_shape for row in table.rows] == [(2, 4), (4, 2), (4, 4)]
    notes = [line for line in str(table).splitlines() if 'not in the mesh' in line]
    assert notes == ["not in the mesh, so replicated: 'pod' and 'seq'"]
    with axis_rules({'rows': '@(data,pod)'}, missing='replicate'):
        (row,) = Rules([('', 'rows b')]).table({'w': struct(4, 4)}, mesh=MESH).rows
    assert (row.shard_shape, row.missing_axes) == ((2, 4), ('pod',))
    assert 'not in the mesh' not in str(Rules([('', 'a@data')]).table(struct(4), mesh=MESH))


# --------------------------------------------------------------------------------- text and HTML

TEXT = """
path        array           rule     placement      shard    per device
----------  --------------  -------  -------------  -------  ----------
embed       float32[50,16]  embed    v d -> v* d2   [50,8]      1.6 KiB
mlp/bias    float16[64]     bias$    ... -> * ...   [64]          128 B
mlp/kernel  float32[16,64]  kernel$  i o -> * i o2  [16,32]     2.0 KiB
norm        float32[16]     small    ... -> * ...   [16]           64 B
step        int32[]         scalar   ... -> * ...   []              4 B

3.8 KiB per device on 16 devices, 7.3 KiB in total; 97.4% of the bytes are sharded; 8.21 \
copies of each byte on average
largest replicated arrays: mlp/bias (128 B), norm (64 B), step (4 B)
not divisible, so replicated: axis 0 of embed, size 50
rule never matches: 'attention'
rule never applies: 'mlp/kernel', because 'kernel$' matches first
"""


def test_the_text():
    table = RULES.table(TREE)
    assert str(table) == repr(table) == TEXT.strip('\n')


def page(text):
    """The cells of each row of a page, and its items; its elements must nest."""
    root = ElementTree.fromstring(f'<div>{text}</div>')
    rows = [[''.join(cell.itertext()) for cell in row] for row in root.iter('tr')]
    return rows, [''.join(item.itertext()) for item in root.iter('li')]


def test_html():
    text = RULES.table(TREE)._repr_html_()
    assert 'monospace' in text
    table, notes = TEXT.strip().split('\n\n')
    head, dashes, *lines = table.splitlines()
    columns = [found.span() for found in re.finditer('-+', dashes)]
    cells = [[line[start:end].strip() for start, end in columns] for line in [head, *lines]]
    assert page(text) == (cells, notes.splitlines())


def test_the_html_is_escaped():
    tree = {'<script>alert(1)</script>&amp;': struct(16, 5), 'w': struct(16)}
    rules = Rules(
        [('^<script>.*&', 'a b -> a b*'), ('<i>', 'a*')], default='a*', indivisible='replicate'
    )
    text = rules.table(tree)._repr_html_()
    assert '<script>' not in text
    assert '<i>' not in text
    rows, items = page(text)
    assert rows[1][0] == '<script>alert(1)</script>&amp;'
    assert rows[1][2] == '^<script>.*&'
    assert "rule never matches: '<i>'" in items


def test_control_characters_in_paths_and_patterns_are_replaced():
    tree = {'\x1b[31mw\r\n': np.ones((3, 4)), 'b\x07': np.ones(16)}
    rules = Rules([('\x1b', 'a* b'), ('b', 'a*'), ('\x1b\x1b', None)], indivisible='replicate')
    table = rules.table(tree)
    lines = str(table).splitlines()
    assert all(line.isprintable() for line in lines)
    assert lines[2].startswith('\ufffd[31mw  ')
    assert lines[3].startswith('b\ufffd ')
    assert "rule never matches: '\ufffd\ufffd'" in lines
    assert '\x1b' not in table._repr_html_()
    assert {row.path for row in table.rows} == set(tree)
