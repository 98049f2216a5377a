"""Every example in the docstrings of the package runs, and every public name has one."""

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import einshard

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PUBLIC = {name: getattr(einshard, name) for name in einshard.__all__}


def modules():
    names = [module.name for module in pkgutil.walk_packages(einshard.__path__, 'einshard.')]
    for name in ['einshard', *sorted(names)]:
        if name != 'einshard.__main__':
            yield importlib.import_module(name)


def examples():
    """{name: doctest} of every module, and of its functions, classes and methods."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = {}
    for module in modules():
        names = {'jax': jax, 'jnp': jnp, 'np': np} | PUBLIC  # as if by 'from einshard import *'
        for test in finder.find(module, module.__name__, globs=names):
            if test.examples:
                tests[test.name] = test
    return tests


EXAMPLES = examples()


@pytest.mark.parametrize('name', EXAMPLES)
def test_example(name):
    if name.startswith('einshard._sharding.topology.'):
        pytest.importorskip('libtpu')
    if name == 'einshard._explain.profile.profile':
        # in a process with libtpu, as this one, the profiler of JAX 0.10 crashes
        code = 'import doctest, einshard._explain.profile as m; print(doctest.testmod(m))'
        done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
        assert done.stdout.startswith('TestResults(failed=0, attempted=5'), done
        return
    said = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    result = runner.run(EXAMPLES[name], out=said.append, clear_globs=False)
    assert result.failed == 0, ''.join(said)
    assert result.attempted > 0


@pytest.mark.parametrize('name', [name for name, value in PUBLIC.items() if callable(value)])
def test_public_names_have_a_docstring_and_an_example(name):
    value = PUBLIC[name]
    doc = inspect.getdoc(value)
    assert doc
    assert doc.splitlines()[0].endswith(('.', ':'))
    if isinstance(value, type) and issubclass(value, Exception):
        assert value.__module__ == 'einshard'  # what errors show is in tests/test_errors.py
    elif name != 'clear_caches':
        home = f'{inspect.unwrap(value).__module__}.{value.__name__}'
        assert home in EXAMPLES, f'{name} has no example that runs'
