"""Specs for pytrees: prefixes, functions of the path, missing mesh axes, and errors."""

import collections
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from placed import mesh_of, struct
from refusal import refusal

from einshard import EinshardError, Rules, einshard, make_sharding


class Layer(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    up: Any
    down: Any
    name: str = dataclasses.field(default='block', metadata={'static': True})


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A node whose children have no names."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


W, B = struct(16, 16), struct(16)
ROWS, COLUMNS, VECTOR = 'i o -> i* o', 'i o -> i o*', 'o -> o*'
LETTER = {
    make_sharding(ROWS): 'R',
    make_sharding(COLUMNS): 'C',
    make_sharding(VECTOR): 'R',  # the same sharding
    None: '-',
}


def placed(tree, specs):
    """Each leaf as R, C or -: rows, columns or no spec."""
    result = einshard(tree, specs)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(result), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
    return ''.join(LETTER[leaf.sharding] for leaf in jax.tree.leaves(result))


@pytest.mark.parametrize(
    ('tree', 'specs', 'letters'),
    [
        (W, ROWS, 'R'),
        (W, None, '-'),
        ({'a': W, 'b': W}, ROWS, 'RR'),
        ({'a': W, 'b': W}, None, '--'),
        ({'a': W, 'b': W}, {'a': ROWS, 'b': COLUMNS}, 'RC'),
        ({'a': W, 'b': W}, {'b': COLUMNS, 'a': ROWS}, 'RC'),
        ({'a': W, 'b': [W, W]}, {'a': ROWS, 'b': COLUMNS}, 'RCC'),
        ({'a': W, 'b': [W, W]}, {'a': None, 'b': [COLUMNS, ROWS]}, '-CR'),
        ({'a': W, 'b': [W, W]}, {'a': ROWS, 'b': None}, 'R--'),
        ({'a': W, 'b': [W, B]}, {'a': ROWS, 'b': [None, VECTOR]}, 'R-R'),
        ([W, (W, W)], [ROWS, (COLUMNS, None)], 'RC-'),
        ([W, (W, W)], [ROWS, COLUMNS], 'RCC'),
        ((W, W), (None, ROWS), '-R'),
        (Layer(W, B), Layer(COLUMNS, VECTOR), 'CR'),
        ([Layer(W, B), Layer(W, B)], [Layer(COLUMNS, VECTOR), None], 'CR--'),
        (Block(W, [W]), Block(ROWS, COLUMNS), 'RC'),
        ({'x': Block(W, W), 'y': W}, {'x': ROWS, 'y': COLUMNS}, 'RRC'),
        (Keyless(W, W), Keyless(ROWS, COLUMNS), 'RC'),
        (collections.OrderedDict(a=W, b=W), collections.OrderedDict(a=ROWS, b=None), 'R-'),
        # None in the tree is an empty subtree: its spec is ignored
        ({'a': None, 'b': W}, ROWS, 'R'),
        ({'a': None, 'b': W}, {'a': None, 'b': ROWS}, 'R'),
        ({'a': None, 'b': W}, {'a': ROWS, 'b': COLUMNS}, 'C'),
        ({'a': {}, 'b': (), 'c': W}, {'a': ROWS, 'b': ROWS, 'c': COLUMNS}, 'C'),
        ({}, {}, ''),
        ({}, ROWS, ''),
        ([], None, ''),
        # one expression for axes that leaves have in common
        ([W, B], '... o -> ... o*', 'CR'),
    ],
)
def test_prefixes(tree, specs, letters):
    assert placed(tree, specs) == letters


def test_prefixes_agree_with_jit():
    """The same prefixes as `in_shardings` takes."""
    tree = {'a': np.ones((16, 16)), 'b': [np.ones((16, 16)), np.ones((16, 16))]}
    for specs in ({'a': ROWS, 'b': COLUMNS}, {'a': ROWS, 'b': [COLUMNS, ROWS]}, ROWS):
        shardings = jax.tree.map(make_sharding, specs)
        expected = jax.jit(lambda tree: tree, in_shardings=(shardings,))(tree)
        found = einshard(tree, specs)
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            assert one.sharding == other.sharding


# --- functions of the path --------------------------------------------------------------------


def test_functions_get_the_full_path():
    tree = {'layers': [Layer(W, B), Block(W, {'b': B})], 'keyless': Keyless(W), 'none': None}
    seen = []

    def look(path, leaf):
        seen.append((path, leaf))

    assert einshard(tree, look) is not None
    assert [path for path, _ in seen] == [
        'keyless/0', 'layers/0/w', 'layers/0/b', 'layers/1/up', 'layers/1/down/b',
    ]  # fmt: skip
    assert [leaf for _, leaf in seen] == jax.tree.leaves(tree)
    # also in a prefix
    seen.clear()
    einshard(tree, {'layers': [None, look], 'keyless': ROWS, 'none': look})
    assert [path for path, _ in seen] == ['layers/1/up', 'layers/1/down/b']


def test_functions_of_one_array_get_the_empty_path():
    seen = []
    einshard(W, lambda path, leaf: seen.append((path, leaf)))
    assert seen == [('', W)]


def test_functions_give_specs():
    def by_rank(path, leaf):
        if path.startswith('frozen'):
            return None
        return {2: COLUMNS, 1: VECTOR}[leaf.ndim]

    assert placed({'frozen': W, 'w': W, 'x': B}, by_rank) == '-CR'
    assert placed({'w': W, 'x': W}, {'w': by_rank, 'x': ROWS}) == 'CR'
    assert placed({'w': W}, lambda path, leaf: by_rank) == 'C'


@pytest.mark.parametrize('bad', [3, {'w': ROWS}, [ROWS], b'a*'])
def test_functions_that_return_no_spec(bad):
    error = refusal(einshard, {'net': {'w': W}}, lambda path, leaf: bad)
    assert error.sentence == f'the spec function returned {bad!r}, which is not a spec'
    assert error.facts['array'] == "float32[16,16], leaf 'net/w'"


def test_errors_in_functions_are_the_users():
    def fails(path, leaf):
        raise KeyError(path)

    with pytest.raises(KeyError, match='net/w'):
        einshard({'net': {'w': W}}, fails)


def test_functions_see_leaves_that_are_no_arrays():
    seen = {}
    tree = {'f': jnp.sin, 'w': W, 's': 'text'}
    result = einshard(
        tree, lambda path, leaf: seen.update({path: leaf}) or ROWS if leaf is W else None
    )
    assert result['f'] is jnp.sin
    assert result['s'] == 'text'


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('tree', 'specs', 'difference', 'specs_fact', 'tree_fact'),
    [
        ({'a': W}, {'b': ROWS}, "no spec for 'a' at the root", 'dict with b', 'dict with a'),
        ({'a': W, 'b': W}, {'a': ROWS}, "no spec for 'b' at the root", 'dict with a',
         'dict with a, b'),
        ({'a': W}, {'a': ROWS, 'b': ROWS}, "the tree has no 'b' at the root", 'dict with a, b',
         'dict with a'),
        ({'a': W}, [ROWS], 'list instead of dict at the root', 'list of length 1', 'dict with a'),
        ([W], (ROWS,), 'tuple instead of list at the root', 'tuple of length 1',
         'list of length 1'),
        ([W, W], [ROWS], "no spec for element 1 at the root", 'list of length 1',
         'list of length 2'),
        (W, {'a': ROWS}, 'dict instead of a leaf at the root', 'dict with a', 'float32[16,16]'),
        ({'net': [W, {'w': W}]}, {'net': [ROWS, {'v': ROWS}]}, "no spec for 'w' at 'net/1'",
         'dict with v', 'dict with w'),
        ({'net': [W, W]}, {'net': [ROWS, {'w': ROWS}]}, "dict instead of a leaf at 'net/1'",
         'dict with w', 'float32[16,16]'),
        ({'net': Layer(W, B)}, {'net': (ROWS, VECTOR)}, "tuple instead of Layer at 'net'",
         'tuple of length 2', 'Layer with w, b'),
        ({'x': None}, {'x': {'a': ROWS}}, "dict instead of NoneType at 'x'", 'dict with a',
         'NoneType'),
        ([Keyless(W, W)], [Keyless(ROWS)], "no spec for '1' at '0'", 'Keyless', 'Keyless'),
        ({'net': {'w': W}}, {'net': {'v': lambda path, leaf: None}}, "no spec for 'w' at 'net'",
         'dict with v', 'dict with w'),
        (collections.OrderedDict(a=W), {'a': ROWS}, 'dict instead of OrderedDict at the root',
         'dict with a', 'OrderedDict with a'),
    ],
)  # fmt: skip
def test_mismatch_says_where(tree, specs, difference, specs_fact, tree_fact):
    error = refusal(einshard, tree, specs)
    assert error.sentence == f'spec tree does not match: {difference}'
    assert error.facts['specs'].startswith(specs_fact)
    assert error.facts['tree'].startswith(tree_fact)


def test_mismatch_in_static_fields():
    error = refusal(einshard, Block(W, W, 'one'), Block(ROWS, ROWS, 'other'))
    assert error.sentence.startswith('spec tree does not match: ')


@pytest.mark.parametrize('bad', [3, 2.5, b'a*', jax.devices()[0], object(), np.ones(3)])
def test_bad_spec_leaves(bad):
    assert " at '" not in refusal(einshard, W, bad).sentence
    for first in (ROWS, lambda path, leaf: ROWS):
        error = refusal(einshard, {'net': [W, W]}, {'net': [first, bad]})
        assert error.sentence.endswith(" at 'net/1' is not a spec")


@pytest.mark.parametrize(
    ('tree', 'specs', 'array'),
    [
        ({'net': [W, {'b': B}]}, ROWS, "float32[16], leaf 'net/1/b'"),
        ({'net': [W, B]}, {'net': ['i o -> i3 o', None]}, "float32[16,16], leaf 'net/0'"),
        ({'net': [W, B]}, lambda path, leaf: 'i o -> i o', "float32[16,16], leaf 'net/0'"),
        (struct(6, 16), ROWS, 'float32[6,16]'),
    ],
)
def test_a_bad_expression_says_which_leaf(tree, specs, array):
    assert refusal(einshard, tree, specs).facts['array'] == array


# --- missing mesh axes ------------------------------------------------------------------------

MESH = mesh_of(data=2, fsdp=2, tp=2)
MISSING = [
    # expression, and the same without missing mesh axes
    ('b@(data,pod) d', 'b@data d'),
    ('b@(pod,data) d', 'b@data d'),
    ('b@(tp,pod,data) d@seq', 'b@(tp,data) d'),
    ('b@pod d', '* b d'),
    ('b@pod d@(seq,expert)', '* b d'),
    ('b@pod ...', '* ...'),
    ('b d -> d@pod b@tp', 'b@tp d'),
    ('b d -> d@(pod,tp) b@tq', 'b d@tp'),
    # counts use the mesh axes that exist
    ('b@pod d*', 'b d*'),
    ('b@pod d8', 'b d8'),
    ('b@(pod,tp) d4', 'b@tp d4'),
    ('b d -> b@pod d2 b*', 'b d -> d2 b*'),
    ('b d -> 2 b@pod d*', 'b d -> 2 b d*'),
    ('* b@pod d', '* b d'),
    # nothing is missing
    ('b@data d@(fsdp,tp)', 'b@data d@(fsdp,tp)'),
    ('b* d', 'b* d'),
    ('b d -> 2 b4 d', 'b d -> 2 b4 d'),
]
X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@pytest.mark.parametrize(('expression', 'same'), MISSING)
def test_missing_mesh_axes_replicate_if_asked(expression, same):
    expected = make_sharding(same, mesh=MESH, ndim=2)
    for x in (X, jnp.asarray(X), struct(8, 8)):
        placed = einshard(x, expression, mesh=MESH, missing='replicate')
        assert placed.sharding == expected
        again = einshard(placed, expression, mesh=MESH, missing='replicate')
        assert isinstance(x, jax.ShapeDtypeStruct) or again is placed
    tree = einshard({'w': X, 'f': len}, expression, mesh=MESH, missing='replicate')
    assert tree['w'].sharding == expected
    made = jax.jit(lambda x: einshard(2 * x, expression, mesh=MESH, missing='replicate'))(X)
    assert made.sharding.is_equivalent_to(expected, 2)
    with jax.set_mesh(MESH):
        assert einshard(X, expression, missing='replicate').sharding == expected
    if expression != same:
        with pytest.raises(EinshardError, match='the mesh has no axis'):
            einshard(X, expression, mesh=MESH)


def test_missing_mesh_axes_of_explicit_and_abstract_meshes():
    explicit = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(explicit):
        y = jax.jit(lambda x: einshard(2 * x, 'b@(data,pod) d@seq', missing='replicate'))(X)
        assert jax.typeof(y).sharding.spec == P('data', None)
    sizes, names = (2, 512), ('data', 'model')
    shape = struct(1024, 16)
    mesh = AbstractMesh(sizes, names)
    placed = einshard(shape, 'b@(data,model) d@tp', mesh=mesh, missing='replicate')
    assert placed.sharding.spec == P(('data', 'model'))


@pytest.mark.parametrize(
    ('expression', 'same'),
    [
        ('b@data d', '* b d'),
        ('b@(data,fsdp) d@tp', '* b d'),
        ('b@data ...', '* ...'),
        ('b@d0 d', '* b d'),  # axes of the canonical mesh have no public names
        ('b@data d*', 'b d*'),
        ('b2* d@tp 2', 'b d -> b2* d 2'),
    ],
)
def test_without_a_mesh_every_name_is_missing(expression, same):
    x = np.ones((16, 16))
    placed = einshard(x, expression, missing='replicate')
    assert placed.sharding == make_sharding(same, ndim=2)
    assert placed.sharding.device_set == set(jax.devices())


def test_missing_mesh_axes_in_every_kind_of_spec():
    tree = {'a': X, 'b': [X, X], 'c': X}
    specs = {'a': 'x@pod y@tp', 'b': lambda path, leaf: 'x@(pod,data) y', 'c': None}
    placed = einshard(tree, specs, mesh=MESH, missing='replicate')
    assert placed['a'].sharding.spec == P(None, 'tp')
    assert [leaf.sharding.spec for leaf in placed['b']] == [P('data')] * 2
    assert placed['c'] is X
    rules = Rules([('a', P('pod', 'tp')), ('', P(('pod', 'data')))])
    placed = einshard(tree, rules, mesh=MESH, missing='replicate')
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(placed)] == [
        P(None, 'tp'),
        *[P('data')] * 3,
    ]


@pytest.mark.parametrize(
    ('expression', 'sentence'),
    [
        ('b@(pod,data) d d', "appears 2 times in an expression without '->'"),
        ('b@pod d@pod', "mesh axis 'pod' is used 2 times"),
        ('b@(pod,data) d -> b d', 'the left side lists only the names'),
        ('b@pod d4', "'d4' uses only 4 of 8 devices"),
        ('b@pod', 'names 1 axis, but the array has 2 dimensions'),
        ('b@(pod,data) d', 'is not divisible by 2'),
    ],
)
def test_other_errors_where_mesh_axes_may_be_missing(expression, sentence):
    x = struct(3, 2) if 'divisible' in sentence else X
    error = refusal(einshard, x, expression, mesh=MESH, missing='replicate')
    assert sentence in error.sentence


@pytest.mark.parametrize(
    ('x', 'expression', 'fix'),
    [
        (X, 'b@(data,pod) d@tp', "missing='replicate'"),
        (X, 'b@pod d', "missing='replicate'"),
        (X, 'b@dta d', "'b@data d'"),  # a typo
        (X, 'b@pod d4', None),  # replicating leads to another error
        (X, 'b@pod', None),
        (np.ones((3, 8)), 'b@(data,pod) d', None),
        (np.ones((8, 8), object), 'b@data d', None),  # an unrelated error
        (np.ones((3, 8)), 'b@data d', None),
    ],
)
def test_only_fixes_that_work_are_offered(x, expression, fix):
    assert refusal(einshard, x, expression, mesh=MESH).fix == fix
    assert refusal(einshard, [x], expression, mesh=MESH).fix == fix


@pytest.mark.parametrize('missing', ['drop', None, True, 0, ['replicate'], b'error'])
@pytest.mark.parametrize('spec', ['a* b', None, [None]])
def test_invalid_missing(missing, spec):
    x = np.ones((16, 2))
    error = refusal(einshard, [x] if spec == [None] else x, spec, missing=missing)
    assert error.sentence.startswith('missing= ')
    assert error.sentence.endswith(f"must be 'error' or 'replicate', not {missing!r}")


# --- nothing to place ---------------------------------------------------------------------------


@pytest.mark.parametrize('tree', [{}, [], (), None, {'a': None, 'b': {'c': []}}])
@pytest.mark.parametrize(
    'spec', ['a* b', None, Rules([('w', 'a* b')]), Rules([]), lambda path, leaf: 1 / 0]
)
def test_empty_trees(tree, spec):
    assert einshard(tree, spec) == tree
    assert einshard(tree, spec, missing='replicate') == tree
