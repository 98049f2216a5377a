"""Modules that tests write to files and patch, and lines of functions."""

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

from einshard._explain.patch.files import read_source  # private: spans of expressions
from einshard._program.jaxpr.spans import Span


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def applied(patch, folder, path):
    """Applies a patch with both tools, in copies of a folder, and returns the patched file."""
    results = []
    for tool in (['git', 'apply'], ['patch', '-p1', '-s', '-i']):
        copy = folder.parent / f'{folder.name}_{tool[0]}'
        subprocess.run(['cp', '-a', folder, copy], check=True)
        (copy / 'fix.patch').write_bytes(patch.encode('utf-8', 'surrogateescape'))
        done = subprocess.run([*tool, 'fix.patch'], cwd=copy, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(copy / path.relative_to(folder))
    assert results[0].read_bytes() == results[1].read_bytes()
    return results[1]


def spans(path, text):
    """Returns the spans of the expressions with a text."""
    source = read_source(str(path))
    nodes = [n for n in ast.walk(source.tree) if isinstance(n, ast.expr | ast.AugAssign)]
    found = [n for n in nodes if source.segment(n) == text]
    assert found, text
    return [Span(str(path), n.lineno, n.col_offset, n.end_lineno, n.end_col_offset) for n in found]


def line_of(function, text):
    """'test_explain.py:12', the line of a function that has this text."""
    function = inspect.unwrap(function)
    lines, first = inspect.getsourcelines(function)
    (found,) = [i for i, line in enumerate(lines) if text in line]
    return f'{Path(inspect.getsourcefile(function)).name}:{first + found}'
