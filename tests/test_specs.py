"""Specs for pytrees: prefixes, functions of the path, missing mesh axes, and errors."""

import contextlib
import dataclasses
import functools
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from placed import mesh_of, shardings, struct
from refusal import refusal

from einshard import Rules, einshard, make_sharding


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
    unsharded = [struct(*leaf.shape, dtype=leaf.dtype) for leaf in jax.tree.leaves(result)]
    assert unsharded == jax.tree.leaves(tree)
    return ''.join(LETTER[leaf.sharding] for leaf in jax.tree.leaves(result))


@pytest.mark.parametrize(
    ('tree', 'specs', 'letters'),
    [
        (W, ROWS, 'R'),
        (W, None, '-'),
        ({'a': W, 'b': W}, ROWS, 'RR'),
        ({'a': W, 'b': W}, {'b': COLUMNS, 'a': ROWS}, 'RC'),
        ({'a': W, 'b': [W, W]}, {'a': ROWS, 'b': COLUMNS}, 'RCC'),
        ({'a': W, 'b': [W, B]}, {'a': ROWS, 'b': [None, VECTOR]}, 'R-R'),
        ({'a': W, 'b': [W, W]}, {'a': ROWS, 'b': None}, 'R--'),
        ([W, (W, W)], [ROWS, (COLUMNS, None)], 'RC-'),
        ([Layer(W, B), Layer(W, B)], [Layer(COLUMNS, VECTOR), None], 'CR--'),
        ({'x': Block(W, [W]), 'y': W}, {'x': Block(ROWS, COLUMNS), 'y': COLUMNS}, 'RCC'),
        (Keyless(W, W), Keyless(ROWS, COLUMNS), 'RC'),
        (OrderedDict(a=W, b=W), OrderedDict(a=ROWS, b=None), 'R-'),
        # None in the tree is an empty subtree: its spec is ignored
        ({'a': None, 'b': W}, {'a': None, 'b': ROWS}, 'R'),
        ({'a': None, 'b': W}, {'a': ROWS, 'b': COLUMNS}, 'C'),
        ({'a': {}, 'b': (), 'c': W}, {'a': ROWS, 'b': ROWS, 'c': COLUMNS}, 'C'),
        ({}, {}, ''),
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
        in_shardings = (jax.tree.map(make_sharding, specs),)
        expected = jax.jit(lambda tree: tree, in_shardings=in_shardings)(tree)
        assert shardings(einshard(tree, specs)) == shardings(expected)


# --- functions of the path --------------------------------------------------------------------


def test_functions_get_the_full_path():
    tree = {'layers': [Layer(W, B), Block(W, {3: B})], 'keyless': Keyless(W), 'none': None}
    paths = ['keyless/0', 'layers/0/w', 'layers/0/b', 'layers/1/up', 'layers/1/down/3']
    seen = []

    def look(path, leaf):
        seen.append((path, leaf))

    einshard(tree, look)
    assert seen == list(zip(paths, jax.tree.leaves(tree), strict=True))
    # also in a prefix
    seen.clear()
    einshard(tree, {'layers': [None, look], 'keyless': ROWS, 'none': look})
    assert [path for path, _ in seen] == ['layers/1/up', 'layers/1/down/3']
    # one array has the empty path
    seen.clear()
    einshard(W, look)
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


# --- errors -----------------------------------------------------------------------------------

IS_DICT = 'the spec is of type dict, but the tree'


@pytest.mark.parametrize(
    ('tree', 'specs', 'difference'),
    [
        ({'a': W}, {'b': ROWS}, "at the root, no spec for 'a'"),
        ({'a': W}, {'a': ROWS, 'b': ROWS}, "at the root, the tree has no 'b'"),
        ({'a': W}, [ROWS], 'at the root, the spec is of type list, but the tree is of type dict'),
        (W, {'a': ROWS}, f'at the root, {IS_DICT} has a leaf'),
        ({'net': [W, {'w': W}]}, {'net': [ROWS, {'v': ROWS}]}, "at 'net/1', no spec for 'w'"),
        ({'net': [W, W]}, {'net': [ROWS, {'w': ROWS}]}, f"at 'net/1', {IS_DICT} has a leaf"),
        (
            {'net': Layer(W, B)},
            {'net': (ROWS, VECTOR)},
            "at 'net', the spec is of type tuple, but the tree is of type Layer",
        ),
        ({'x': None}, {'x': {'a': ROWS}}, f"at 'x', {IS_DICT} is of type NoneType"),
        ([Keyless(W, W)], [Keyless(ROWS)], "at '0', no spec for '1'"),
        ({'w': W}, {'v': lambda path, leaf: None}, "at the root, no spec for 'w'"),
        (OrderedDict(a=W), {'a': ROWS}, f'at the root, {IS_DICT} is of type OrderedDict'),
        (Block(W, W, 'one'), Block(ROWS, ROWS, 'other'), ''),
    ],
)
def test_mismatches_are_located(tree, specs, difference):
    sentence = refusal(einshard, tree, specs).sentence
    assert sentence.startswith(f'the specs do not match the tree: {difference}')


@pytest.mark.parametrize('bad', [3, 2.5, b'a*', jax.devices()[0], object(), np.ones(3)])
def test_bad_spec_leaves(bad):
    assert 'path in spec' not in refusal(einshard, W, bad).facts
    for first in (ROWS, lambda path, leaf: ROWS):
        error = refusal(einshard, {'net': [W, W]}, {'net': [first, bad]})
        assert error.sentence.endswith(' is not a spec')
        assert error.facts['path in spec'] == "'net/1'"


@pytest.mark.parametrize(
    ('tree', 'specs', 'array'),
    [
        ({'net': [W, {'b': B}]}, ROWS, "float32[16], leaf 'net/1/b'"),
        ({'net': [W, B]}, {'net': ['i o -> i3 o', None]}, "float32[16,16], leaf 'net/0'"),
        ({'net': [W, B]}, lambda path, leaf: 'i o -> i o', "float32[16,16], leaf 'net/0'"),
        (struct(6, 16), ROWS, 'float32[6,16]'),
    ],
)
def test_the_error_for_a_bad_expression_names_the_leaf(tree, specs, array):
    assert refusal(einshard, tree, specs).facts['array'] == array


# --- missing mesh axes ------------------------------------------------------------------------

MESH = mesh_of(data=2, fsdp=2, tp=2)
X = np.arange(256, dtype=np.float32).reshape(16, 16)


@pytest.mark.parametrize(
    ('mesh', 'expression', 'same'),
    [
        # the same expression without missing mesh axes
        (MESH, 'b@(data,pod) d', 'b@data d'),
        (MESH, 'b@(tp,pod,data) d@seq', 'b@(tp,data) d'),
        (MESH, 'b@pod d@(seq,expert)', '* b d'),
        (MESH, 'b@pod ...', '* ...'),
        (MESH, 'b d -> d@(pod,tp) b@tq', 'b d@tp'),
        # counts use the mesh axes that exist
        (MESH, 'b@pod d*', 'b d*'),
        (MESH, 'b@pod d8', 'b d8'),
        (MESH, 'b@(pod,tp) d4', 'b@tp d4'),
        (MESH, 'b d -> 2 b@pod d*', 'b d -> 2 b d*'),
        (MESH, '* b@pod d', '* b d'),
        # nothing is missing
        (MESH, 'b@data d@(fsdp,tp)', 'b@data d@(fsdp,tp)'),
        (MESH, 'b d -> 2 b4 d', 'b d -> 2 b4 d'),
        # without a mesh every name is missing; axes of the canonical mesh have no public names
        (None, 'b@d0 d', '* b d'),
        (None, 'b@data ...', '* ...'),
        (None, 'b@data d*', 'b d*'),
        (None, 'b2* d@tp 2', 'b d -> b2* d 2'),
    ],
)
def test_missing_mesh_axes_replicate_if_asked(mesh, expression, same):
    expected = make_sharding(same, mesh=mesh, ndim=2)
    place = functools.partial(einshard, spec=expression, mesh=mesh, missing='replicate')
    for x in (X, jnp.asarray(X), struct(16, 16)):
        placed = place(x)
        assert placed.sharding == place({'w': x, 'f': len})['w'].sharding == expected
        assert isinstance(x, jax.ShapeDtypeStruct) or place(placed) is placed
    assert jax.jit(lambda x: place(2 * x))(X).sharding.is_equivalent_to(expected, 2)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        assert einshard(X, expression, missing='replicate').sharding == expected
    if expression != same:
        sentence = refusal(einshard, X, expression, mesh=mesh).sentence
        assert ('the mesh has no axis' if mesh else 'there is no mesh') in sentence


def test_missing_mesh_axes_of_explicit_and_abstract_meshes():
    explicit = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(explicit):
        y = jax.jit(lambda x: einshard(2 * x, 'b@(data,pod) d@seq', missing='replicate'))(X)
        assert jax.typeof(y).sharding.spec == P('data', None)
    mesh = AbstractMesh((2, 512), ('data', 'model'))
    placed = einshard(struct(1024, 16), 'b@(data,model) d@tp', mesh=mesh, missing='replicate')
    assert placed.sharding.spec == P(('data', 'model'))


def test_missing_mesh_axes_in_every_kind_of_spec():
    tree = {'a': X, 'b': [X, X], 'c': X}
    specs = {'a': 'x@pod y@tp', 'b': lambda path, leaf: 'x@(pod,data) y', 'c': P(('pod', 'data'))}
    rules = Rules([('a', P('pod', 'tp')), ('', P(('pod', 'data')))])
    for spec in (specs, rules):
        placed = einshard(tree, spec, mesh=MESH, missing='replicate')
        found = [leaf.sharding.spec for leaf in jax.tree.leaves(placed)]
        assert found == [P(None, 'tp'), *[P('data')] * 3]


@pytest.mark.parametrize(
    ('x', 'expression', 'sentence', 'fix'),
    [
        (X, 'b@(data,pod) d@tp', None, "einshard(..., missing='replicate')"),
        (X, 'b@pod d', None, "einshard(..., missing='replicate')"),
        (X, 'b@dta d', None, "'b@data d'"),  # a typo
        # replicating leads to another error, so it is not suggested
        (X, 'b@(pod,data) d d', 'it can appear only once', None),
        (X, 'b@pod d@pod', "mesh axis 'pod' is used 2 times", None),
        (X, 'b@(pod,data) d -> b d', 'the left side lists only the names', None),
        (X, 'b@pod d4', "'d4' uses only 4 of 8 devices", None),
        (X, 'b@pod', 'names 1 axis, but the array has 2 dimensions', None),
        (np.ones((3, 2)), 'b@(pod,data) d', 'is not divisible by 2', None),
        # unrelated errors
        (np.ones((3, 8)), 'b@data d', 'is not divisible by 2', None),
        (np.ones((8, 8), object), 'b@data d', 'JAX does not support dtype object', None),
    ],
)
def test_only_fixes_that_work_are_offered(x, expression, sentence, fix):
    assert refusal(einshard, x, expression, mesh=MESH).fix == fix
    assert refusal(einshard, [x], expression, mesh=MESH).fix == fix
    if sentence:
        error = refusal(einshard, x, expression, mesh=MESH, missing='replicate')
        assert sentence in error.sentence
    else:
        assert einshard(x, expression, mesh=MESH, missing='replicate').shape == x.shape


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


def test_error_about_static_fields_omits_the_value():
    error = refusal(einshard, Block(np.ones(16), B, 'first'), Block(VECTOR, None, 'second'))
    assert "('second',) != ('first',)" in error.sentence
    assert 'array' not in error.sentence
