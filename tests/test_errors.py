"""EinshardError: its name, its parts, copies, and what is shown above it."""

import ast
import copy
import pickle
import re
import traceback
from pathlib import Path

import jax
import numpy as np
import pytest
from counting import entered
from refusal import refusal

import einshard as einshard_package
from einshard import (
    EinshardError,
    Rules,
    axis_rules,
    clear_caches,
    device_mesh,
    einshard,
    make_sharding,
    sharded,
)


@pytest.fixture
def error(devices8):
    with pytest.raises(EinshardError) as caught:
        make_sharding('a b -> 2 a2* b*', mesh=devices8)
    return caught.value


def test_errors_print_their_public_name(error):
    printed = ''.join(traceback.format_exception_only(error))
    assert printed == (
        "einshard.EinshardError: 'a2*' and 'b*' cannot have counts in the ratio 2:1 on the 4 "
        'remaining devices\n'
        '    a b -> 2 a2* b*\n'
        '             ^^^ ^^\n'
        "  devices:    8 (4 left after '2')\n"
        '  works with: 4, 16, 36, 64, ... devices in total\n'
        "  try:        'a b -> 2 a2 b2'\n"
    )
    assert issubclass(EinshardError, ValueError)


def test_parts_of_an_error_are_its_attributes(error):
    assert (
        error.sentence
        == "'a2*' and 'b*' cannot have counts in the ratio 2:1 on the 4 remaining devices"
    )
    assert error.expression == 'a b -> 2 a2* b*'
    assert [error.expression[slice(*span)] for span in error.spans] == ['a2*', 'b*']
    assert error.facts == {
        'devices': "8 (4 left after '2')",
        'works with': '4, 16, 36, 64, ... devices in total',
    }
    assert error.fix == "'a b -> 2 a2 b2'"


@pytest.mark.parametrize(
    'clone', [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_errors_survive_pickling(clone, error):
    # a worker process sends them to its parent
    other = clone(error)
    assert type(other) is EinshardError
    assert str(other) == str(error)
    assert other.spans == error.spans
    assert other.facts == error.facts
    assert other.fix == error.fix
    assert other.code == error.code == 'device-count'
    assert other.fix.expression == error.fix.expression
    mesh = jax.sharding.AbstractMesh((2,), ('data',))
    with axis_rules(b='@dta'), pytest.raises(EinshardError) as caught:
        make_sharding('b d', mesh=mesh)
    fix = clone(caught.value).fix
    assert (fix, fix.name, fix.placement) == ("axis_rules(b='@data')", 'b', '@data')


PACKAGE = Path(einshard_package.__file__).parent


def codes_in(module):
    """The codes that the source of a module gives to errors."""
    for node in ast.walk(ast.parse(module.read_text(encoding='utf-8'))):
        match node:
            case ast.keyword(arg='code', value=ast.Constant(value=str(code))):
                yield code
            case ast.Assign([ast.Name('code')], ast.Constant(value=str(code))):
                yield code


def test_the_documentation_lists_the_codes():
    page = PACKAGE.parent / 'docs' / 'errors.md'
    if not page.exists():
        pytest.skip('no checkout')
    table = page.read_text(encoding='utf-8').partition('| code | error |')[2].partition('\n\n')[0]
    listed = re.findall(r'^\| `([a-z-]+)` \|', table, re.MULTILINE)
    used = {code for module in PACKAGE.rglob('*.py') for code in codes_in(module)}
    assert sorted(used) == sorted(listed)


@pytest.mark.parametrize(
    ('call', 'code'),
    [
        (lambda: make_sharding('a b -> a, b'), 'syntax'),
        (lambda: make_sharding('a b -> a* c'), 'axis-names'),
        (lambda: einshard(np.ones(4), 'a b -> a* b'), 'ndim'),
        (lambda: einshard({'w': np.ones(3), 'v': np.ones(5)}, 'a*'), 'not-divisible'),
        (lambda: make_sharding('a -> a@data'), 'mesh'),
        (lambda: einshard(np.ones(4), 3), 'spec'),
        (lambda: Rules([('(', 'a*')]), 'rules'),
        (lambda: axis_rules(b='data data'), 'axis-rules'),
        (lambda: einshard_package.topology('v9:4x4'), 'topology'),
        (lambda: make_sharding('a*', ndim=-1), 'argument'),
        (
            lambda: einshard_package.assert_collectives(
                sharded('a*', out='... -> * ...')(lambda x: x.sum()), np.ones(16), allowed=()
            ),
            'collectives',
        ),
    ],
)
def test_codes(call, code):
    """Also of errors that are raised again with more facts, or for several leaves."""
    assert refusal(call).code == code


def test_no_other_error_is_shown_above_ours():
    w = np.ones((6, 8), np.float32)
    for spec in ('x y -> x* y', {'c': '* ...'}, 'a2b', {'w': 'x y ->'}):
        with pytest.raises(EinshardError) as caught:
            einshard({'w': w}, spec, mesh=jax.devices()[:4])
        printed = ''.join(traceback.format_exception(caught.value))
        assert printed.count('Traceback') == 1
        assert 'During handling' not in printed


def test_facts_with_wide_labels_are_aligned():
    error = EinshardError('sentence', facts={'along 行': 'x', 'along b': 'x', 'n': 'x'})
    assert str(error).split('\n')[1:] == ['  along 行: x', '  along b:  x', '  n:        x']


BAD_LEAVES = {
    'einshard': lambda tree: einshard(tree, 'a b -> a* b'),
    'rules': lambda tree: einshard(tree, Rules([('layer', 'a b -> a* b')])),
    'sharded': lambda tree: sharded('a b -> a* b')(lambda tree: tree)(tree),
    'table': lambda tree: Rules([('layer', 'a b -> a* b')]).table(tree),
}


@pytest.mark.parametrize('how', BAD_LEAVES)
def test_many_leaves_that_do_not_fit(how):
    """The time is proportional to the number of leaves: few functions for each of them."""

    def functions(n):
        clear_caches()
        tree = {f'layer{i}': np.ones((7, 4), np.float32) for i in range(n)}
        errors = []
        names = entered(lambda: errors.append(refusal(BAD_LEAVES[how], tree)), einshard_package)
        (error,) = errors
        assert error.sentence.startswith("axis 'a' (size 7) is not divisible by")
        assert error.facts['also'].endswith(f'and {n - 9} more')
        return names

    once, twice = functions(100), functions(200)
    assert len(twice) - len(once) <= 100 * 45
    assert twice.count('leaf_paths') == once.count('leaf_paths')  # each takes all leaves


@pytest.mark.parametrize('n', [3, 400])
@pytest.mark.parametrize('star', ['', '*'])
def test_counts_whose_product_python_does_not_format(n, star):
    names = [chr(ord('a') + i // 20) + chr(ord('a') + i % 20) for i in range(n)]
    text = f'{" ".join(names)} -> {" ".join(f"{name}999999999989" for name in names)} {star}'
    error = refusal(make_sharding, text.strip())
    assert error.sentence.startswith(f'the counts need at least 10^{12 * n - 1} devices')
    assert refusal(device_mesh, x=10**5000).sentence.startswith('the mesh axes need at least 10^')
