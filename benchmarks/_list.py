"""The benchmarks, by the names of the command line."""

from __future__ import annotations

import ast
import pathlib

# The order in which `all` runs them. `memory` starts processes of its own, so it comes first,
# before this process takes the accelerator.
MODULES = {
    'memory': 'memory',
    'placement': 'placement',
    'dispatch': 'dispatch',
    'per_device': 'per_device',
    'expressions': 'expressions',
    'rules': 'rules',
    'programs': 'programs',
    'layouts': 'layouts',
    'collectives': 'collectives',
    'scaling': 'scaling',
    'tpu': 'tpu',
    'import': 'importing',
}


def about(name: str) -> str:
    """The first line of the benchmark's docstring, read without importing JAX."""
    path = pathlib.Path(__file__).with_name(f'{MODULES[name]}.py')
    text = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
    return text.partition('\n')[0]
