"""Runs `einshard check`: each step and target in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import EinshardError, quoted
from .._progress import progress
from .base import Base, merge_base, repository, tracked_files
from .compare import Change, ReportDict, compare, with_suggestions
from .config import Config, Step, file_name, read_config
from .text import as_json, as_markdown, as_text


class Checked(NamedTuple):
    """What `einshard check` has found.

    Attributes:
        text: what it prints.
        status: its exit status: 0; 2 if a step could not be compiled; 3 if a kind of `fail_on`
            holds.
    """

    text: str
    status: int


@dataclass(frozen=True)
class Options:
    """The options of the command; see `einshard check --help`."""

    names: Sequence[str] = ()
    targets: Sequence[str] = ()
    update: bool = False
    base: str | None = None
    json: bool = False
    markdown: str | None = None
    save: str | None = None
    fail_on: frozenset[str] = frozenset()


def check(options: Options, folder: Path) -> Checked:
    ignored = {
        '--base': options.base,
        '--json': options.json,
        '--markdown': options.markdown,
        '--fail-on': options.fail_on,
    }
    if options.update and (given := [name for name, value in ignored.items() if value]):
        raise EinshardError(
            f'--update writes stored reports and compares nothing, so it takes no {given[0]}',
            code='check',
            facts={'to compare': 'leave --update out'},
        )
    config = read_config(folder)
    jobs = [*_jobs(config, options)]
    if options.update:
        return _update(config, jobs, options)
    with merge_base(config.folder, options.base) if options.base else nullcontext() as base:
        changes = [_change(config, step, target, base, options) for step, target in jobs]
        text = json.dumps(as_json(changes, base), indent=2) if options.json else as_text(changes)
        if options.markdown is not None:
            Path(options.markdown).write_text(as_markdown(changes, base), encoding='utf-8')
    if any(change.status == 'error' for change in changes):
        return Checked(text, 2)
    return Checked(text, 3 if any(c.fails & c.step.fail_on for c in changes) else 0)


def _jobs(config: Config, options: Options) -> Iterator[tuple[Step, str]]:
    known = [step.name for step in config.steps]
    for name in options.names:
        if name not in known:
            raise EinshardError(
                f"no step is named '{name}'", code='check', facts={'steps': quoted(known)}
            )
    steps = [step for step in config.steps if not options.names or step.name in options.names]
    for target in options.targets:
        if all(target not in step.targets for step in steps):
            raise EinshardError(
                f"no {'selected ' * bool(options.names)}step has the target '{target}'",
                code='check',
                facts={f"targets of '{step.name}'": quoted(step.targets) for step in steps},
            )
    for step in steps:
        step = replace(step, fail_on=step.fail_on | options.fail_on)
        for target in step.targets:
            if not options.targets or target in options.targets:
                yield step, target


def _change(config: Config, step: Step, target: str, base: Base | None, options: Options) -> Change:
    tries = 0 if base else step.tries
    save = _page(options, step, target)
    try:
        after = _explain(config, step, target, tries, save=save)
        before, new_line = _before(config, step, target, base)
    except _Failed as error:
        return Change(step, target, None, None, str(error))
    change = compare(step, target, before, after, config.threshold, new_line)
    if base is not None and change.is_changed and step.tries:
        try:
            return with_suggestions(change, _explain(config, step, target, step.tries, save=save))
        except _Failed as error:
            return replace(change, error=str(error))
    return change


def _before(
    config: Config, step: Step, target: str, base: Base | None
) -> tuple[ReportDict | None, Callable[[str], str]]:
    if base is None:
        file = config.file(step, target)
        if not file.is_file():
            return None, str
        try:
            return json.loads(file.read_text(encoding='utf-8')), str
        except ValueError as error:
            raise _Failed(f'{file} is not a stored report: {error}') from None
    folder = base.tree / config.folder.resolve().relative_to(base.root)
    if not folder.is_dir():
        return None, base.new_line
    try:
        return _explain(config, step, target, 0, base, folder), base.new_line
    except _Missing:
        return None, base.new_line
    except _Failed as error:
        raise _Failed(f'at the merge base: {error}') from None


def _update(config: Config, jobs: Sequence[tuple[Step, str]], options: Options) -> Checked:
    """Writes the stored reports, and removes those of no step."""
    lines: list[str] = []
    status = 0
    for step, target in jobs:
        file = config.file(step, target)
        try:
            report = _explain(config, step, target, step.tries, save=_page(options, step, target))
        except _Failed as error:
            lines.append(f'{step.name} on {target}: error: {error}')
            status = 2
            continue
        del report['patch']
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + '\n', encoding='utf-8')
        lines.append(f'wrote {os.path.relpath(file)}')
    known = {config.file(step, target) for step in config.steps for target in step.targets}
    for file in sorted(config.reports.glob('*@*.json')):
        if file not in known:
            file.unlink()
            lines.append(f'removed {os.path.relpath(file)}, which is of no step')
    return Checked('\n'.join(lines), status)


def _page(options: Options, step: Step, target: str) -> str:
    if options.save is None:
        return ''
    folder = Path(options.save)
    folder.mkdir(parents=True, exist_ok=True)
    return str((folder / f'{file_name(step, target)}.html').resolve())


class _Failed(Exception):
    """Why a report could not be made."""


class _Missing(_Failed):
    """The base lacks the function, or its module."""


def _explain(
    config: Config,
    step: Step,
    target: str,
    tries: int,
    base: Base | None = None,
    folder: Path | None = None,
    save: str = '',
) -> dict[str, Any]:
    """Explains a step in a process of its own.

    Args:
        base: if the base's function is explained; then `folder` is where.
    """
    folder = folder or config.folder
    own = base.tree if base else repository(config.folder) or config.folder
    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary) / 'report.json'
        request = {
            'function': step.function,
            'args': [*step.args, *(f'{name}={text}' for name, text in step.kwargs.items())],
            'mesh': dict(step.mesh),
            'chip': step.chip,
            'target': target,
            'tries': tries,
            'save': save,
            'root': str(own.resolve()),
            'other': str(base.root) if base else '',
            'tracked': tracked_files(base.root) if base else [],
            'command': step.command(target),
            'result': str(result),
        }
        with progress(f'{step.name} on {target}{" at the merge base" * (base is not None)}'):
            done = subprocess.run(
                [sys.executable, '-m', 'einshard._cli.check_step'],
                input=json.dumps(request),
                cwd=folder,
                capture_output=True,
                text=True,
                errors='replace',
                check=False,
            )
        found = json.loads(result.read_text(encoding='utf-8')) if result.is_file() else None
    if found is None:
        last = '\n'.join(done.stderr.strip().splitlines()[-5:])
        raise _Failed(f'the process ended with status {done.returncode}: {last}')
    if 'error' in found:
        kind = _Missing if base is not None and found.get('is_missing') else _Failed
        raise kind('\n'.join([found['error'], *found.get('traceback', ())]))
    return found
