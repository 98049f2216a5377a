"""Explains one step for one target: `python -m einshard._cli.check_step`."""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._errors import EinshardError
from .._explain.estimate import refusal
from .._explain.findings.facts import Facts
from .._explain.patch.files import read_source
from .explain_command import explain_call
from .options import package_version

_PLUGINS = 'libtpu', 'jax-cuda13-plugin', 'jax-cuda12-plugin'


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the report as a dictionary, with what `einshard check` adds to it.

    Args:
        request: the step, its target, and `root`, the folder that its sources are in; `other` and
            `tracked`: the folder and the files of the other side, none of which may be imported.
    """
    options = argparse.Namespace(
        function=request['function'],
        args=request['args'],
        mesh=[*request['mesh'].items()] or None,
        chip=request['chip'],
        devices=None,
        topology=None,
    )
    kind, _, n = request['target'].partition(':')
    if kind == 'cpu':
        options.devices = None if options.mesh else int(n)
    else:
        options.topology = request['target']
    report = explain_call(options, tries=request['tries'])
    _check_modules(request)
    reading = report.reading
    if isinstance(reading, Facts) and refusal(reading) is None:
        _ = report.timeline  # from now on, the report has it
    if request['save']:
        report.save(request['save'])
    root = Path(request['root'])
    prefix, text, sources = str(root) + os.sep, json.dumps(report.to_dict()), set[str]()

    def add_sources(each: dict[str, Any]) -> None:
        sources.update(s for key in ('source', 'called_at') if isinstance(s := each.get(key), str))

    json.loads(text, object_hook=add_sources)
    return {
        **json.loads(text.replace(json.dumps(prefix)[1:-1], '')),
        'functions': {
            source.removeprefix(prefix): name
            for source in sorted(sources)
            if (name := function_at(source))
        },
        'versions': versions(),
        'command': request['command'],
        'patch': report.patch() if request['tries'] else '',
    }


def versions() -> dict[str, str]:
    found = {name: package_version(name) for name in ('einshard', 'jax', 'jaxlib', *_PLUGINS)}
    python = '.'.join(map(str, sys.version_info[:2]))
    return {'python': python, **{name: v for name, v in found.items() if v}}


def function_at(source: str) -> str:
    """Returns the name of the function that a line such as 'model.py:12' is in, or ''."""
    file, _, line = source.rpartition(':')
    return next((name for start, end, name in _functions(file) if start <= int(line) <= end), '')


@functools.cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    """Returns (first line, last line, name) of each function in a file, inner ones first."""
    found, source = list[tuple[int, int, str]](), read_source(file)
    if source is None:
        return []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            around = [each for each in source.around(node) if isinstance(each, _NAMED)]
            name = '.'.join(each.name for each in reversed([node, *around]))
            found.append((node.lineno, node.end_lineno or node.lineno, name))
    return sorted(found, key=lambda each: each[1] - each[0])


_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _check_modules(request: Mapping[str, Any]) -> None:
    """Raises an error if a module is that of the other side, as an editable install makes it."""
    other = request['other']
    tracked = {os.path.join(other, file) for file in request['tracked']} if other else set[str]()
    for name, module in [*sys.modules.items()]:
        file = getattr(module, '__file__', None)
        if file and os.path.realpath(file) in tracked:
            raise EinshardError(
                f"module '{name}' is not that of the base, but {file}, as of the change",
                code='check',
                facts={
                    'instead': 'do not install the project with --editable; run einshard check in '
                    'the folder of its modules'
                },
            )


def _use_own_modules(request: Mapping[str, Any]) -> None:
    """Moves folders of the other side that are on `sys.path`, such as its src, to this side."""
    other, root = request['other'], request['root']
    for i, folder in enumerate(sys.path if other else ()):
        real = os.path.realpath(folder)
        own = os.path.join(root, os.path.relpath(real, other))
        if (real == other or real.startswith(other + os.sep)) and os.path.isdir(own):
            sys.path[i] = own


def main() -> None:
    request = json.loads(sys.stdin.read())
    _use_own_modules(request)
    try:
        found = run(request)
    except EinshardError as error:
        found = {'error': str(error), 'is_missing': error.code == 'missing'}
    except Exception as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith('<frozen')  # of imports
        ]
        lines = ''.join(traceback.format_list(frames)).splitlines()
        found = {'error': f'{type(error).__name__}: {error}', 'traceback': lines[-12:]}
    Path(request['result']).write_text(json.dumps(found, indent=1), encoding='utf-8')


if __name__ == '__main__':
    main()
