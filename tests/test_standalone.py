"""The notation and the pictures run without numpy and JAX, as in a browser."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import einshard
from einshard import EinshardError, show

PACKAGE = Path(einshard.__file__).parent
MODULES = [
    '_cache',
    '_errors',
    '_suggestions',
    '_text',
    '_notation',
    *(f'_notation.{path.stem}' for path in PACKAGE.glob('_notation/[!_]*.py')),
    '_pictures',
    *(f'_pictures.{path.stem}' for path in PACKAGE.glob('_pictures/[!_]*.py')),
]
PROGRAM = """
import importlib, json, sys, types

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('jax', 'jaxlib', 'numpy', 'jaxtyping', 'beartype'):
            raise ImportError(f'{name} is blocked')

sys.meta_path.insert(0, Blocked())
# a package of the same name, without the __init__.py that imports JAX
sys.modules['einshard'] = types.ModuleType('einshard')
sys.modules['einshard'].__path__ = [sys.argv[1]]
modules = [f'einshard.{name}' for name in sys.argv[2:]]
for name in modules:
    importlib.import_module(name)
assert 'numpy' not in sys.modules and 'jax' not in sys.modules
assert {name for name in sys.modules if name.startswith('einshard.')} == set(modules)

from einshard._errors import EinshardError
from einshard._notation.expression import parse
from einshard._pictures.draw import draw_expression

drawn = []
for text, shape, n in json.load(sys.stdin):
    try:
        picture = draw_expression(parse(text), None if shape is None else tuple(shape), n)
        drawn.append([str(picture), picture.svg])
    except EinshardError as error:
        drawn.append(str(error))
json.dump(drawn, sys.stdout)
"""
CASES = [
    ('a b -> 2 a2* b*', (4, 8), 16),
    ('a b -> b2 a4', None, None),
    ('a b c d -> a* b* c* d*', (16, 16, 16, 16), 256),
    ('... -> * ...', (), 8),
    ('a b -> a* b*', (8, 8), 8),  # equal counts are impossible
    ('a b -> a4 c', (8, 8), 8),
    ('a b -> a4 b', (6, 8), 4),
]


def drawn(text, shape, n):
    try:
        picture = show(text, shape, n)
    except EinshardError as error:
        return str(error)
    return [str(picture), picture.svg]


@pytest.fixture(scope='module')
def alone():
    run = subprocess.run(
        [sys.executable, '-I', '-W', 'error', '-c', PROGRAM, str(PACKAGE), *MODULES],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(CASES, json.loads(run.stdout), strict=True))


@pytest.mark.parametrize('case', CASES, ids=lambda case: case[0])
def test_pictures_and_errors_are_those_of_show(alone, case):
    assert alone[case] == drawn(*case)


def test_errors_have_carets(alone):
    assert [case for case in CASES if isinstance(alone[case], str)] == CASES[4:]
    assert alone[CASES[5]].splitlines()[:3] == [
        "'c' is not on the left side",
        '    a b -> a4 c',
        '              ^',
    ]
