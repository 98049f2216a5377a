"""to_jax: the text runs without einshard, and its shardings are those of einshard."""

import enum
import random
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import counting
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from command import main
from hypothesis import assume, given
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from model_rules import MESH_128, MODELS
from oracle import ANY_SPACING, cases, examples, expressible, mesh_cases
from placed import shardings
from placed import struct as f32

from einshard import (
    Rules,
    axis_rules,
    device_mesh,
    einshard,
    for_optimizer,
    make_sharding,
    shard_largest,
    sharded,
    to_jax,
    topology,
)

# private: line breaks of source text, and devices of hardware that is not here

DEVICES = jax.devices()
TYPES = [(AxisType.Auto,) * 2, (AxisType.Explicit,) * 2, (AxisType.Auto, AxisType.Explicit)]
MESH = Mesh(np.array(DEVICES[:8]).reshape(4, 2), ('data', 'tp'))
EXPLICIT = Mesh(MESH.devices, MESH.axis_names, axis_types=TYPES[1])


def run(text):
    """Runs source text where einshard cannot be imported; returns its names."""
    names = {'__name__': 'ejected'}
    with mock.patch.dict(sys.modules, einshard=None):
        with pytest.raises(ImportError):
            exec('import einshard', {})
        exec(compile(text, 'ejected', 'exec'), names)
    return names


def sharding_of(text):
    return run(text)['sharding']


# --- expressions --------------------------------------------------------------------------------


def test_the_text():
    assert to_jax('a b -> 2 a2* b*') == (
        "# 'a b -> 2 a2* b*' on 16 devices\n"
        'import jax\n'
        'import numpy as np\n'
        'from jax.sharding import AxisType, Mesh, NamedSharding\n'
        'from jax.sharding import PartitionSpec as P\n'
        '\n'
        '\n'
        'def hardware_order(device):\n'
        '    """Sort key: slice, coordinates, core for TPUs; slice, process, id for others."""\n'
        "    slice_index = getattr(device, 'slice_index', None) or 0\n"
        "    coords = getattr(device, 'coords', None)\n"
        '    if coords is None:\n'
        '        return slice_index, device.process_index, device.id\n'
        "    return slice_index, *coords, getattr(device, 'core_on_chip', None) or 0\n"
        '\n'
        '\n'
        'devices = sorted(jax.devices(), key=hardware_order)\n'
        '# one axis for each prime factor of 16\n'
        'mesh = Mesh(\n'
        '    np.array(devices).reshape(2, 2, 2, 2),\n'
        "    ('d0', 'd1', 'd2', 'd3'),\n"
        '    axis_types=(AxisType.Auto,) * 4,\n'
        ')\n'
        '\n'
        "sharding = NamedSharding(mesh, P(('d1', 'd2'), 'd3'))\n"
    )


@ANY_SPACING
@examples(60)
@given(case=cases())
def test_counts(case):
    devices = DEVICES[: case.n_devices]
    expected = make_sharding(case.text, ndim=case.n_dims, mesh=devices)
    text = to_jax(case.text, mesh=devices, shape=case.shape)
    assert sharding_of(text) == expected
    assert text == to_jax(case.text, np.ones(case.shape), mesh=devices)


@ANY_SPACING
@examples(60)
@given(case=mesh_cases())
def test_names(case):
    assume(expressible(case))
    names, sizes = zip(*case.mesh, strict=True)
    grid = np.array(DEVICES[: case.n_devices]).reshape(sizes)
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    expected = make_sharding(case.text, ndim=case.n_dims, mesh=mesh)
    assert sharding_of(to_jax(case.text, mesh=mesh, shape=case.shape)) == expected


@pytest.mark.parametrize('types', TYPES, ids=str)
@pytest.mark.parametrize('order', [range(8), range(7, -1, -1), range(8, 16), range(0, 16, 2)])
def test_device_orders_and_axis_types(order, types):
    mesh = Mesh(np.array([DEVICES[i] for i in order]).reshape(4, 2), ('x', 'y'), axis_types=types)
    with jax.set_mesh(mesh):
        text = to_jax('a b -> b@(y,x) a')
    expected = NamedSharding(mesh, P(None, ('y', 'x')))
    assert sharding_of(text) == expected
    assert ('jax.make_mesh' in text) == (order == range(8))


def test_a_mesh_of_other_factors():
    text = to_jax('a b -> a2 b6', mesh=DEVICES[:12])
    assert sharding_of(text) == make_sharding('a b -> a2 b6', mesh=DEVICES[:12])
    assert 'prime factor' not in text
    assert 'prime factor' in to_jax('a b -> a6 b2', mesh=DEVICES[:12])


def test_an_abstract_mesh():
    text = to_jax('a b -> a@data b@tp', mesh=MESH.abstract_mesh)
    assert sharding_of(text) == NamedSharding(MESH, P('data', 'tp'))
    canonical = device_mesh(AbstractMesh((16,), ('d0',)))
    assert to_jax('a* b', mesh=canonical) == to_jax('a* b')


@pytest.mark.parametrize('types', [AxisType.Auto, AxisType.Explicit])
def test_canonical_meshes(types, devices):
    mesh = device_mesh(devices, axis_types=types)
    partial_sums = ['a b +*'] if types == AxisType.Explicit else []
    for text in ('a b -> b* a', 'a b -> * a b', '... -> * ...', *partial_sums):
        assert sharding_of(to_jax(text, mesh=mesh)) == make_sharding(text, mesh=mesh)


@pytest.mark.parametrize(
    'text', ['a b +@tp', 'a b +@(data,tp)', 'a b =@data', 'a@data b +@tp', 'a b +@data =@tp']
)
def test_partial_sums(text):
    found, expected = sharding_of(to_jax(text, mesh=EXPLICIT)), make_sharding(text, mesh=EXPLICIT)
    assert found == expected
    axes = [(spec.unreduced, spec.reduced) for spec in (found.spec, expected.spec)]
    assert axes[0] == axes[1] != (frozenset(), frozenset())


def test_memory_kinds():
    text = to_jax('a b -> a@data b (in pinned_host)', mesh=MESH)
    assert sharding_of(text) == NamedSharding(MESH, P('data'), memory_kind='pinned_host')
    assert 'memory_kind' not in to_jax('a b -> a@data b (in device)', mesh=MESH)


@pytest.mark.parametrize('spec', [P('data', None), NamedSharding(MESH, P(None, ('tp', 'data')))])
def test_specs_of_jax(spec):
    expected = spec if isinstance(spec, NamedSharding) else NamedSharding(MESH, spec)
    sharding = sharding_of(to_jax(spec, f32(8, 8), mesh=MESH))
    assert sharding.is_equivalent_to(expected, 2)
    assert sharding.mesh == MESH


def test_axis_rules_are_expanded():
    with axis_rules(batch='@data', mlp='@tp'):
        text = to_jax('batch mlp', mesh=MESH)
    assert sharding_of(text) == NamedSharding(MESH, P('data', 'tp'))


@pytest.mark.parametrize('n_slices', [1, 2])
def test_hardware_order_is_that_of_the_canonical_mesh(n_slices):
    device = SimpleNamespace
    devices = {
        (n, x, y, 0, core): device(
            coords=(x, y, 0), core_on_chip=core, slice_index=n, id=x, process_index=y
        )
        for core in range(2) for y in range(2) for n in range(n_slices) for x in range(3)
    }  # fmt: skip
    for i in range(8):
        found = {'process_index': i % 2, 'id': 9 - i}
        devices[0, i % 2, 9 - i] = device(**found)
        devices[i % n_slices, i % 2, 9 - i] = device(**found, slice_index=i % n_slices)
    devices[0, 1, 0, 2, 0] = device(coords=(1, 0, 2), id=3)
    order = run(to_jax('a*'))['hardware_order']
    assert [*map(order, devices.values())] == [*devices]


def test_a_tpu_slice():
    pytest.importorskip('libtpu')
    mesh = topology('v5e:4x4')
    shuffled = [*mesh.devices.flat][::-1]
    for there in (mesh, topology('v5e:4x4', data=8, tp=2)):
        text = to_jax('a b*', mesh=there)
        with mock.patch.object(jax, 'devices', return_value=shuffled):
            assert sharding_of(text) == make_sharding('a b*', mesh=there)


# --- pytrees ------------------------------------------------------------------------------------


def check_tree(spec, tree, mesh=None, with_tree=True):
    """Compares the shardings of the text with those of einshard; returns the text."""
    text = to_jax(spec, tree, mesh=mesh) if with_tree else to_jax(spec, mesh=mesh)
    names = run(text)
    expected = shardings(einshard(tree, spec, mesh=mesh))
    found = names['shardings'](names['RULES'], tree)
    assert jtu.tree_structure(found) == jtu.tree_structure(expected)
    assert jtu.tree_leaves(found) == jtu.tree_leaves(expected)
    return text


def layer():
    return {'kernel': f32(8, 16), 'bias': f32(16), 'scale': f32(), 'tiny': f32(2)}


TREE = {'layers': [layer(), layer()], 'head': {'kernel': f32(4, 8, 16)}, 'step': f32(8)}


def test_rules_keep_their_patterns():
    rules = Rules(
        [(r'layers/\d+/kernel$', 'i o -> i@data o'), ('head', 'a i o -> a i o@tp'), ('x', 'd@tp')],
        default='... -> * ...',
        min_size=3,
    )
    text = check_tree(rules, TREE, MESH)
    by_pattern = "(r'layers/\\d+/kernel$', P('data')), ('head', P(None, None, 'tp')), ('', P())"
    assert f'RULES = [{by_pattern}]' in text
    small = 'if not leaf.shape or leaf.size < 3:\n            return NamedSharding(mesh, P())'
    assert small in text
    assert "('x', P('tp'))" in check_tree(rules, TREE, MESH, with_tree=False)


@pytest.mark.parametrize('with_tree', [True, False])
@pytest.mark.parametrize(
    'rules',
    [
        Rules([('kernel', P('data')), ("b'", 'd'), ('', '... -> * ...')]),
        Rules([('kernel', 'i ... -> i@missing ...')], default=P(), missing='replicate'),
        Rules([('head', None), ('kernel', NamedSharding(MESH, P('tp')))], default='a ... -> a ...'),
        Rules([('head', '... -> ... (in pinned_host)')], default='a ... -> a@tp ...'),
    ],
    ids=str,
)
def test_rules_without_a_tree(rules, with_tree):
    tree = {'a': {'kernel': f32(8, 16), 'none': None}, 'head': {'kernel': f32(4, 8)}, 'n': f32()}
    check_tree(rules, tree, MESH, with_tree)


@pytest.mark.parametrize(
    'rules',
    [
        Rules([('kernel', '... o -> ... o@tp')], default='... -> * ...'),  # by rank
        Rules([('', 'a ... -> a@data ...')], indivisible='replicate'),
        Rules([('kernel', lambda path, leaf: P('data') if '0' in path else P())], default=P()),
        Rules([('layers', Rules([('kernel', 'i o -> i o@tp')], default=P()))], default=P()),
        shard_largest,
        shard_largest('data', min_bytes=64),
        {'layers': '... -> ...', 'head': P('data'), 'step': None},
        lambda: for_optimizer(TREE, Rules([('', '... -> ...')]), zero='data'),
    ],
)
def test_specs_that_depend_on_the_tree(rules):
    check_tree(rules() if getattr(rules, '__name__', '') == '<lambda>' else rules, TREE, MESH)


def test_paths_that_differ_in_numbers_have_one_pattern():
    text = check_tree(shard_largest, TREE, DEVICES[:8])
    assert text.count(r"'^layers/\d+/kernel$'") == 1
    # unless their shardings differ
    tree = {'layer_1': f32(8, 2), 'layer_2': f32(2, 8), 'a.b': f32(1), 'axb': f32(8)}
    text = check_tree(shard_largest, tree, DEVICES[:8])
    assert "('^layer_1$', P(('d0', 'd1', 'd2')))" in text
    assert r"(r'^a\.b$', P())" in text


@pytest.mark.parametrize(
    ('names', 'pattern'),
    [
        (['w\na', 'w\nb'], r"('^w\\\na\\Z', "),
        (['w\ta', 'w\tb'], r"('^w\\\ta$', "),
        (['a', 'a\n'], r"(r'^a\Z', "),
        (['a\\b', 'a\\'], r"(r'^a\\b$', "),
    ],
)
def test_paths_with_special_characters(names, pattern):
    tree = dict.fromkeys(names, f32(8, 8))
    specs = dict(zip(names, ['x y -> x@data y', 'x y -> x y@tp'], strict=True))
    assert pattern in check_tree(specs, tree, MESH)


@pytest.mark.parametrize('n', [4, 32])
def test_paths_with_two_numbers(n):
    """A number that does not change the sharding is a pattern; one that does, a list of values."""
    first, second = 'd f -> d f@tp', 'f d -> f@tp d'
    dense = {'Dense_0': first, 'Dense_1': second, 'Dense_2': first}
    specs = {f'h_{i}': dense for i in range(n)}
    text = check_tree(specs, jtu.tree_map(lambda _: f32(8, 8), specs), MESH)
    assert [*run(text)['RULES']] == [
        (r'^h_\d+/Dense_(?:0|2)$', P(None, 'tp')), (r'^h_\d+/Dense_1$', P('tp')),
    ]  # fmt: skip
    ends = {f'h_{i}': {'w': first if i in (0, n - 1) else second} for i in range(n)}
    rules = run(check_tree(ends, jtu.tree_map(lambda _: f32(8, 8), ends), MESH))['RULES']
    assert (f'^h_(?:0|{n - 1})/w$', P(None, 'tp')) in rules
    assert len(rules) == 2


def test_paths_with_numbers_that_all_matter():
    choose = random.Random(0).choice
    for values in ([0, 1], [0, 1, 10]):
        grid = [(i, j, k) for i in values for j in (1, 2) for k in (3,)]
        for _ in range(20):
            specs = {f'{i}/a{j}': {f'{k}.': choose([P(), P('tp')])} for i, j, k in grid}
            check_tree(specs, jtu.tree_map(lambda _: f32(8), specs), MESH)


def test_a_function_keeps_the_patterns_of_its_rules():
    rules = Rules([('Dense_0', 'd f -> d f@tp'), ('Dense', 'f d -> f@tp d')], min_size=4)
    one = {'Dense_0': f32(8, 8), 'Dense_1': f32(8, 8), 'scale': f32(), 'Dense_2': f32(3)}
    tree = {f'h_{i}': one for i in range(9)}
    f = sharded(rules, out=rules, mesh=MESH)(lambda tree: tree)
    names = run(to_jax(f, tree))
    assert names['TREE_RULES'] == [
        (r'^h_\d+/Dense_2$', P()), (r'^h_\d+/scale$', P()),
        ('Dense_0', P(None, 'tp')), ('Dense', P('tp')),
    ]  # fmt: skip
    lowered = names['jit_lambda'](lambda tree: tree, tree, tree).lower(tree)
    assert lowered.compile().input_shardings == f.lower(tree).compile().input_shardings


UNSAFE = [
    'f\nran = True\n#',
    '<lambda>"""x',
    '"',
    'a\\',
    "''''",
    'x\rran = True',
    '²',
    'a\0b',
    '{x}',
    'ﬁ',
]


@pytest.mark.parametrize('name', UNSAFE)
def test_names_are_text_and_not_code(name):
    def f(x, **kwargs):
        return einshard(x, 'a b*')

    f.__name__ = name
    kwargs = {name: f32(16, 16), 'fi': f32(16, 16)}
    for call in (jax.jit(f), sharded('a b -> a* b')(f)):
        names = run(to_jax(call, f32(16, 16)))
        assert 'ran' not in names
    named = sharded('a b -> a* b', kwargs=None)(f)
    names = run(to_jax(named, f32(16, 16), **kwargs))
    [jit] = [value for key, value in names.items() if key.startswith('jit_')]
    received = {}
    jit(lambda x, **kwargs: received.update(kwargs)).lower(f32(16, 16), f32(16, 16), f32(16, 16))
    assert received.keys() == kwargs.keys()
    rules = Rules([(re.escape(name), 'a -> a*')], default='... -> * ...')
    assert run(to_jax(rules))['RULES'][0][0] == re.escape(name)


def test_names_of_mesh_axes_may_be_of_a_subclass_of_str():
    class Axis(enum.StrEnum):
        DATA = 'data\n'

    mesh = AbstractMesh((8,), (Axis.DATA,))
    sharding = sharding_of(to_jax(P(Axis.DATA), mesh=mesh, shape=(8,)))
    assert sharding.mesh.axis_names == tuple(sharding.spec) == ('data\n',)


def test_two_meshes():
    tree = {'a': f32(12, 12), 'b': f32(12, 12)}
    rules = Rules([('a', 'x y -> x6 y2'), ('b', 'x y -> x2 y6')])
    for with_tree in (True, False):
        text = check_tree(rules, tree, DEVICES[:12], with_tree)
        assert 'mesh_2 = Mesh(' in text
        assert text.count('sorted(jax.devices()') == 1


@pytest.mark.parametrize('with_tree', [True, False])
def test_leaves_that_are_not_arrays(with_tree):
    tree = {'w': f32(8), 'f': jax.nn.relu, 'rate': 0.1}
    names = run(to_jax(Rules([('w', 'd@tp')]), *[tree] * with_tree, mesh=MESH))
    found = names['shardings'](names['RULES'], tree)
    assert found == {'w': NamedSharding(MESH, P('tp')), 'f': None, 'rate': None}


@pytest.mark.parametrize('name', MODELS)
def test_published_models(name):
    shapes, rules, _ = MODELS[name]
    with mock.patch.object(jax, 'make_mesh', lambda *axes, **types: AbstractMesh(*axes, **types)):
        text = check_tree(rules, shapes, MESH_128)
    assert text.count('P(') < 30


# --- functions ----------------------------------------------------------------------------------

MLP = """
def mlp(x, w, scale=1.0, power=1):
    hidden = jax.nn.relu(x @ w['in'])
    hidden = {constraint}
    return scale * (hidden @ w['out']) ** power
"""


def mlp_with(constraint, **names):
    exec(MLP.format(constraint=constraint), names | {'jax': jax, 'einshard': einshard}, names)
    return names['mlp']


def constraints_in(text, line=r'\S+:\d+'):
    """The calls in the comment, by the line above each."""
    return re.findall(rf'^# ({line}, .*)\n#     x = (.*)$', text, re.MULTILINE)


@pytest.mark.parametrize('mesh', [None, MESH, DEVICES[:8]], ids=['all', 'named', 'eight'])
def test_a_jitted_function_compiles_to_the_same_program(mesh):
    options = {'static_argnames': 'power', 'donate_argnums': 0, 'keep_unused': True}
    f = sharded(
        'batch x -> batch* x 2', {'in': 'x y -> * x y2', 'out': 'y z -> * y2 z'}, None,
        out='batch z -> batch* z 2', mesh=mesh, **options,
    )(mlp_with("einshard(hidden, 'batch y -> batch* y2')"))  # fmt: skip
    args = f32(32, 64), {'in': f32(64, 128), 'out': f32(128, 64)}, 2.0, 3
    text = to_jax(f, *args)
    names = run(text)
    [(where, call)] = constraints_in(text)
    assert where == "<string>:4, float32[32,128] 'batch y'"
    plain = mlp_with(call.replace('(x,', '(hidden,'), **names)
    ours, theirs = f.lower(*args), names['jit_mlp'](plain).lower(*args)
    assert counting.program(ours.compile()) == counting.program(theirs.compile())
    assert ours.args_info == theirs.args_info


class State(NamedTuple):
    params: dict
    moments: dict


def test_trees_of_other_types_are_found_by_path():
    rules = Rules([('w$', 'i o -> i@data o@tp')], default='... -> ...')

    others = Rules([('w$', 'i o -> i@data o')], default='... -> ...')

    @sharded(rules, others, 'b i -> b@data i', out=(rules, None), mesh=MESH)
    def step(mesh, Mesh, x):  # names that the text uses itself
        return mesh, x.sum()

    state = State({'w': f32(8, 8), 'b': f32(8)}, {'w': f32(8, 8), 'b': f32(8)})
    args = state, {'w': (f32(8, 8),), 'b': {'w': f32(4, 2), 'b': f32(1)}}, f32(8, 8)
    args[1]['more'] = [f32(1), *[f32(4, 2)] * 8]
    text = to_jax(step, *args)
    assert re.findall(r'^\w+_RULES\w*(?= = )', text, re.MULTILINE) == [
        'MESH__RULES', 'MESH__RULES_2', 'RESULT_RULES',
    ]  # fmt: skip
    names = run(text)
    result = jax.eval_shape(step, *args)
    with mock.patch.object(jax, 'jit', lambda f, **options: options):
        options = names['jit_step'](None, state, args[1], result)
    assert options['in_shardings'] == tuple(step.in_shardings(*args).values())
    assert options['out_shardings'] == step.out_shardings(*args)


def test_parameters_named_like_lists_of_rules():
    rules = Rules([('w', 'd@tp')], default='... -> ...')
    f = sharded(rules, rules, mesh=MESH)(lambda x, X_RULES: x)
    args = State({'w': f32(8), 'b': f32(8)}, {}), State({'b': f32(8)}, {'w': f32(8)})
    names = run(to_jax(f, *args))
    with mock.patch.object(jax, 'jit', lambda f, **options: options):
        options = names['jit_lambda'](None, *args)
    assert options['in_shardings'] == tuple(f.in_shardings(*args).values())


def test_specs_for_many_subtrees():
    names = 'abcdefghi'
    spec = dict.fromkeys(names, 'i o -> i@data o') | {'n': None, 'z': '... -> ...'}
    tree = {name: [f32(8, 2), f32(4, 2)] for name in names} | {'n': None, 'z': (f32(3), f32())}
    f = sharded(spec, mesh=MESH)(lambda tree: tree['z'])
    names = run(to_jax(f, tree))
    found, expected = names['jit_lambda'](lambda tree: tree['z'], tree).lower(tree), f.lower(tree)
    assert found.args_info == expected.args_info
    assert found.compile().input_shardings == expected.compile().input_shardings


def test_keywords_without_specs():
    @sharded(out='... -> * ...', static_argnames='power', donate_argnames='y')
    def f(x, *, power, y):
        return x**power + y

    names = run(to_jax(f, f32(8), power=3, y=f32(8)))
    lowered = names['jit_f'](f.__wrapped__).lower(f32(8), power=3, y=f32(8))
    assert [x.donated for x in jtu.tree_leaves(lowered.args_info)] == [False, True]
    assert lowered.compile().output_shardings == make_sharding('... -> * ...')


def keyword_only(x, *, w, power=1):
    return (x @ w) ** power


def rest(x, *args, **kwargs):
    return x @ args[0] @ kwargs['in'] @ kwargs['function']


def skipped_default(x, w, power=1, scale=1.0):
    return (x @ w) ** power * scale


class Model(NamedTuple):
    w: object

    def step(self, x, *, scale):
        return x @ self.w * scale


W = f32(16, 16)


@pytest.mark.parametrize(
    ('function', 'specs', 'args', 'kwargs', 'options'),
    [
        (keyword_only, {'x': 'a* b', 'w': 'b c*'}, [W], {'w': W}, {}),
        (
            keyword_only,
            {'x': None, 'w': 'b c*'},
            [W],
            {'w': W, 'power': 3},
            {'static_argnames': 'power'},
        ),
        (rest, {'x': None, 'args': 'b c*', 'kwargs': 'c* d'}, [W, W], {'in': W, 'function': W}, {}),
        (
            skipped_default,
            {'x': 'a* b', 'w': None, 'scale': None},
            [W, W],
            {'scale': W},
            {'donate_argnames': 'scale'},
        ),
        (Model.step, {'x': 'a* b', 'scale': None}, [Model(W), W], {'scale': W}, {}),
    ],
)
def test_keywords_with_specs(function, specs, args, kwargs, options):
    f = sharded(**specs, **options)(function)
    text = to_jax(f, *args, **kwargs)
    found = run(text)[f'jit_{function.__name__}'](function)
    ours = f.lower(*args, **kwargs).compile()
    # sharded passes the other arguments in this order too
    theirs = found.lower(*args, *(kwargs[name] for name in sorted(kwargs))).compile()
    assert counting.program(ours) == counting.program(theirs)
    assert jtu.tree_leaves(ours.input_shardings) == jtu.tree_leaves(theirs.input_shardings)
    assert [x.donated for x in jtu.tree_leaves(ours.args_info)] == [
        x.donated for x in jtu.tree_leaves(theirs.args_info)
    ]


def test_explicit_axes():
    @sharded('b d -> b@data d', 'd f -> d@tp f', out='b f -> b@data f')
    def f(x, w):
        x = einshard(x, 'b d -> b@data d@tp')
        y = jnp.einsum('bd,df->bf', x, w, out_sharding=P('data', unreduced={'tp'}))
        y = einshard(y, 'b f -> b@data f')
        return y + jax.grad(lambda y: jnp.sum(y**2))(y)

    x, w = np.ones((8, 4), np.float32), np.ones((4, 2), np.float32)
    with jax.set_mesh(EXPLICIT):
        text = to_jax(f, x, w)
        expected = f(x, w)
    assert [call for _, call in constraints_in(text)] == [
        "jax.sharding.reshard(x, NamedSharding(mesh, P('data', 'tp')))",
        "jax.sharding.reshard(x, NamedSharding(mesh, P('data', None)))",
    ]
    names = run(text)
    (_, first), (_, second) = constraints_in(text)

    def plain(x, w):
        x = eval(first, names, {'x': x})
        y = jnp.einsum('bd,df->bf', x, w, out_sharding=P('data', unreduced={'tp'}))
        y = eval(second, names, {'x': y})
        return y + jax.grad(lambda y: jnp.sum(y**2))(y)

    placed = (NamedSharding(EXPLICIT, P('data')), NamedSharding(EXPLICIT, P('tp')))
    with jax.set_mesh(names['mesh']):
        found = names['jit_f'](plain)(*jax.device_put((x, w), placed))
    assert found.sharding == expected.sharding
    np.testing.assert_array_equal(found, expected)


def test_explicit_axes_on_the_line_that_calls_to_jax():
    inner = sharded('a b -> a b@tp')(lambda x: x * 2)
    with jax.set_mesh(EXPLICIT):
        for jit in (jax.jit, sharded(out='a b -> a b@tp'), sharded('a b -> a@data b')):
            for text in (
                to_jax(jit(lambda x: einshard(x, 'a b -> a b@tp')), f32(8, 8)),
                to_jax(jit(lambda x: inner(x)), f32(8, 8)),
            ):
                [(_, call)] = constraints_in(text, '[^,]+')
                assert call == "jax.sharding.reshard(x, NamedSharding(mesh, P(None, 'tp')))"


def test_a_jitted_function_has_constraints_only():
    @jax.jit
    def f(x):
        def body(x, _):
            return einshard(x * 2, 'a b -> a* b'), None

        return jax.lax.scan(jax.checkpoint(body), einshard(x, 'a b -> a* b'), None, 3)[0].sum()

    text = to_jax(jax.grad(f), f32(16, 4))
    assert 'jit_' not in text
    [(_, call), _] = constraints_in(text)
    with mock.patch.object(jax.lax, 'with_sharding_constraint', lambda x, sharding: sharding):
        assert eval(call, run(text), {'x': None}) == make_sharding('a b -> a* b')
    lines = f.__wrapped__.__code__.co_firstlineno
    assert [where.partition(',')[0] for where, _ in constraints_in(text)] == [
        f'test_eject.py:{lines + 5}', f'test_eject.py:{lines + 3}',
    ]  # fmt: skip


@pytest.mark.parametrize('types', TYPES, ids=str)
@pytest.mark.parametrize(
    ('vmap', 'array'),
    [
        (jax.vmap, 'float32[8,4]'),
        (partial(jax.vmap, in_axes=1), 'float32[16,4]'),
        (lambda f: jax.vmap(jax.vmap(f)), 'float32[4]'),
    ],
)
def test_a_constraint_under_vmap(types, vmap, array):
    def ours(x):
        return einshard(x * 2, '... d -> ... d@tp')

    mesh, x = Mesh(MESH.devices, MESH.axis_names, axis_types=types), f32(16, 8, 4)
    with jax.set_mesh(mesh):
        text = to_jax(vmap(ours), x)
        expected = jax.jit(vmap(ours)).lower(x).compile()
    arrays = {where.split()[1] for where, _ in constraints_in(text)}
    if AxisType.Explicit in types and array == 'float32[16,4]':
        # a reshard does not show which axis is mapped, so it is taken to be the first
        arrays = {array if found == 'float32[8,4]' else found for found in arrays}
    assert arrays == {array}
    names = run(text)

    def plain(x):
        x = x * 2
        for _, call in constraints_in(text):
            x = eval(call, names, {'x': x})
        return x

    with jax.set_mesh(names['mesh']):
        found = jax.jit(vmap(plain)).lower(x).compile()
    assert counting.program(found) == counting.program(expected)
    assert found.output_shardings == expected.output_shardings


@pytest.mark.parametrize('transform', [lambda f: f, jax.grad, jax.vmap])
def test_two_constraints_on_one_line(transform):
    """Each keeps its names."""

    def f(x, y):
        x, y = einshard(x, 'a b -> a b@tp'), einshard(y, 'c d -> c@tp d')
        return jnp.sum(x @ y)

    n = (3,) if transform is jax.vmap else ()
    text = to_jax(transform(f), f32(*n, 8, 4), f32(*n, 4, 8), mesh=MESH)
    found = {
        (where.split(', ')[1], call[call.index('P(') :]) for where, call in constraints_in(text)
    }
    assert found == {("float32[8,4] 'a b'", "P(None, 'tp')))"), ("float32[4,8] 'c d'", "P('tp')))")}


def test_a_constraint_with_and_without_vmap():
    def f(x):
        return einshard(x, '... d -> ... d@tp')

    text = to_jax(lambda x: f(x) + jax.vmap(f, spmd_axis_name='data')(x), f32(8, 4), mesh=MESH)
    found = {where.split()[1]: call[call.index('P(') :] for where, call in constraints_in(text)}
    assert found == {'float32[8,4]': "P(None, 'tp')))", 'float32[4]': "P('tp')))"}


def test_a_sharded_function_in_another():
    @sharded('a b -> a* b', out='a b -> a b*')
    def inner(x):
        return einshard(x * 2, 'a b -> a4* b*')

    @sharded('a b -> a* b')
    def outer(x):
        return inner(x)

    for function in (outer, jax.jit(lambda x: outer(x)).trace(f32(16, 16))):
        text = to_jax(function, *[f32(16, 16)] * (function is outer))
        assert [call[call.index('P(') :] for _, call in constraints_in(text, '[^,]+')] == [
            "P(('d0', 'd1', 'd2'), 'd3')))", "P(None, ('d0', 'd1', 'd2', 'd3'))))",
        ]  # fmt: skip


# --- the text, and the command ------------------------------------------------------------------


def texts():
    names = ('long_name_of_an_axis', "it's")
    mesh = Mesh(MESH.devices, names, axis_types=TYPES[2])
    yield to_jax('a ... d -> a ... d@long_name_of_an_axis', mesh=mesh, shape=(8, 8, 8))
    yield to_jax('a b', mesh=Mesh(MESH.devices[::-1], names))
    yield to_jax('a b', mesh=Mesh(MESH.devices.ravel(), names[:1], axis_types=TYPES[2][:1]))
    yield to_jax(Rules([('a' * 50, 'd@tp'), ('b', 'd@tp')]), mesh=MESH)
    yield to_jax(shard_largest, TREE)
    yield to_jax(Rules([('"\'', 'd@tp')] * 5, min_size=8), mesh=MESH)
    weights = {'in': f32(32, 2), 'out': [f32(2, 2)]}

    @sharded({'in': 'x y -> * x y2', 'out': ['y z -> * y2 z']}, out=shard_largest)
    def f(w):
        return {str(i): w['in'] * w['out'][0][0, i % 2] for i in range(9)} | {'x': w['out']}

    yield to_jax(f, weights)
    kwargs = {'long_name_of_an_argument': f32(2, 2), 'x' * 50: f32(2, 2)}
    yield to_jax(sharded('a b -> * a b', kwargs=None)(lambda x, **kwargs: x), f32(2, 2), **kwargs)
    yield to_jax(
        sharded('a b -> * a b', kwargs=None)(lambda x, **kwargs: x), f32(2, 2), **{'in': f32(2, 2)}
    )


def test_format_is_that_of_ruff():
    ruff = shutil.which('ruff', path=Path(sys.executable).parent)
    if ruff is None:
        pytest.skip('ruff is not installed')
    for text in texts():
        command = [ruff, 'format', '--isolated', '--config', "format.quote-style='single'", '-']
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
        assert done.stdout == text


def test_texts_run_and_are_equal_each_time():
    assert [*map(run, texts())]
    assert [*texts()] == [*texts()]


def test_another_process_without_einshard(tmp_path):
    expression = 'a b -> 2 a2* b*'
    (tmp_path / 'plain.py').write_text(
        f"import sys\nsys.modules['einshard'] = None\n{to_jax(expression)}\n"
        'for device, index in sharding.devices_indices_map((8, 8)).items():\n'
        '    print(device.id, index)\n'
    )
    done = subprocess.run(
        [sys.executable, 'plain.py'], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    expected = make_sharding(expression).devices_indices_map((8, 8))
    printed = [f'{device.id} {index}' for device, index in expected.items()]
    assert done.stdout.splitlines() == printed, done.stderr


MODEL = """
import jax.numpy as jnp
from einshard import Rules, einshard, sharded

rules = Rules([('kernel', 'i o -> i o@tp')], default='... -> ...')


def init(n=64):
    return {'kernel': jnp.zeros((32, n)), 'bias': jnp.zeros(n)}


@sharded(rules, 'b i -> b@data i')
def layer(params, x):
    return einshard(x @ params['kernel'], 'b o -> b@data o@tp')
"""


RULES, INIT = 'model_to_eject:rules', 'model_to_eject:init'
ON_MESH = ['--mesh', 'data=8', 'tp=2']


@pytest.mark.parametrize(
    ('arguments', 'last'),
    [
        (['a b -> a4* b*', '--devices', '16'], "NamedSharding(mesh, P(('d0', 'd1', 'd2'), 'd3'))"),
        (['a@x b', '--shape', '4', '4', '--mesh', 'x=2', 'y=4'], "NamedSharding(mesh, P('x'))"),
        ([RULES, *ON_MESH], 'tree_map_with_path(find, tree)'),
        ([RULES, '--args', INIT, *ON_MESH], 'tree_map_with_path(find, tree)'),
        (
            ['model_to_eject:layer', '--args', INIT, 'f32[8,32]', *ON_MESH],
            "with_sharding_constraint(x, NamedSharding(mesh, P('data', 'tp')))",
        ),
    ],
)
def test_the_command(arguments, last, tmp_path, monkeypatch, capsys):
    (tmp_path / 'model_to_eject.py').write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv('XLA_FLAGS', '')  # the command adds the flag that simulates devices
    assert main(['eject', *arguments]) == 0
    text = capsys.readouterr().out
    sys.modules.pop('model_to_eject', None)
    run(text)
    assert text.endswith(f'{last}\n')
