"""The command `einshard compare`: each target in a process of its own, as XLA may end it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._errors import EinshardError
from .._explain.compare import Compared, ComparedProgram, compare
from .._progress import progress
from .arguments import load, mesh_of, read_arguments
from .options import ARGUMENT_HELP, Parser, mesh_axis, text_of

_EXAMPLES = """\
examples:
  {prog} compare model:step --args model:state 'i32[SIZE,64]' --targets v5e:4x4 --sizes 8 64
  {prog} compare model:step --args model:shapes --targets cpu:8 --mesh data=4 tensor=2
a function in --args is given the mesh of the target, if it has a parameter `mesh`
"""


def run(arguments: Sequence[str]) -> str:
    parser = Parser(
        'compare',
        'Compiles a function for several targets and sizes, and prints one table.',
        _EXAMPLES,
    )
    parser.add_argument('function', metavar='module:function')
    parser.add_args(f'{ARGUMENT_HELP}; SIZE is the size')
    parser.option('--targets', 'NAME', 'such as h100:4x8, v5e:4x4, cpu:8', nargs='+', required=True)
    parser.option('--sizes', 'N', 'what SIZE stands for', nargs='+', type=int)
    parser.add_argument('--mesh', nargs='+', type=mesh_axis, metavar='AXIS=SIZE')
    parser.add_json()
    options = parser.parse_args(arguments)
    return text_of(_compare_targets(options), options)


def _compare_targets(options: argparse.Namespace) -> Compared:
    """Returns the table of all targets, ordered by size.

    A target whose process ends has an error in its rows.
    """
    names_size = any('SIZE' in text for text in options.args)
    if names_size != (options.sizes is not None):
        what = '--args has SIZE, but there are no --sizes' if names_size else '--args has no SIZE'
        raise EinshardError(what, code='command', facts={'example': "'i32[SIZE,64]' --sizes 8 64"})
    rows: list[ComparedProgram] = []
    name = options.function.partition(':')[2]
    sizes: list[int | None] = options.sizes or [None]
    for target in options.targets:
        request = {
            'function': options.function,
            'args': options.args,
            'sizes': sizes,
            'target': target,
            'mesh': dict(options.mesh or ()),
        }
        with tempfile.TemporaryDirectory() as folder, progress(f'{name} on {target}'):
            result = Path(folder) / 'rows.json'
            done = subprocess.run(
                [sys.executable, '-m', 'einshard._cli.compare_command', str(result)],
                input=json.dumps(request),
                text=True,
                errors='replace',
                capture_output=True,
                check=False,
            )
            found: Any = json.loads(result.read_text()) if result.is_file() else None
        if found is None:
            last = (done.stderr.strip().splitlines() or ['nothing on standard error'])[-1]
            says = f'the process ended with status {done.returncode}: {last}'
            found = [{'target': target, 'size': size, 'error': says} for size in sizes]
        rows += [ComparedProgram(**row) for row in found]
    rows.sort(key=lambda row: sizes.index(row.size))
    return Compared(name, tuple(rows))


def _rows(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compares the sizes of one target, in this process."""
    target, mesh = request['target'], request['mesh']
    kind, _, count = target.partition(':')
    if kind == 'cpu' and count.isdecimal():
        mesh_of(int(count), None, None)  # simulates the devices
    try:
        function = load(request['function'])
    except EinshardError as error:
        says = error.sentence
        return [{'target': target, 'size': size, 'error': says} for size in request['sizes']]

    def arguments(size: int | None = None, mesh: Any = None) -> tuple[Any, ...]:
        texts = [text.replace('SIZE', str(size)) for text in request['args']]
        args, kwargs = read_arguments(texts, mesh)
        if kwargs:
            raise EinshardError('compare takes no arguments by keyword', code='command')
        return tuple(args)

    table = compare(function, arguments, [target], request['sizes'], mesh)
    return table.to_dict()['rows']


if __name__ == '__main__':
    made = _rows(json.loads(sys.stdin.read()))
    Path(sys.argv[1]).write_text(json.dumps(made), encoding='utf-8')
