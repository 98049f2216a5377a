"""Reads [tool.einshard] of pyproject.toml: the programs that `einshard check` compares."""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .._chips.table import TPUS
from .._errors import EinshardError, plural, quoted
from .._sharding.gpu_names import is_gpu_name, read_gpu_name
from .._sharding.tpu_names import split_slices, topology_name

# what `fail_on` and --fail-on may name
KINDS = {
    'bytes': 'a device sends more',
    'memory': 'a device needs more memory',
    'bound': 'the largest lower bound is larger',
    'exposed': 'the estimate of exposed communication is larger',
    'findings': 'there is a new finding',
    'does-not-fit': 'the program needs more memory than a device has',
    'versions': 'other versions made the stored report',
    'missing': 'there is no stored report',
}


@dataclass(frozen=True)
class Step:
    """A function of the project, and the targets that it is compiled for.

    Attributes:
        args, kwargs: as `einshard explain --args` reads them.
        targets: such as 'h100:4x8', or 'cpu:8' for simulated devices.
        mesh: the sizes of the mesh axes, by name; empty for the mesh of the code.
        chip: the chip that lower bounds are for; None for that of the target.
        tries: how many changes to try for suggestions.
        fail_on: see `KINDS`.
    """

    name: str
    function: str
    args: Sequence[str]
    kwargs: Mapping[str, str]
    targets: Sequence[str]
    mesh: Mapping[str, int]
    chip: str | None
    tries: int
    fail_on: frozenset[str]

    def command(self, target: str) -> str:
        """The command that explains this step."""
        kind, _, n = target.partition(':')
        mesh = ' '.join(f'{axis}={size}' for axis, size in self.mesh.items())
        where = f'--devices {n}' if kind == 'cpu' else f'--topology {shlex.quote(target)}'
        if mesh:
            where = f'--mesh {mesh}' if kind == 'cpu' else f'{where} --mesh {mesh}'
        texts = [*self.args, *(f'{name}={text}' for name, text in self.kwargs.items())]
        args = f' --args {" ".join(map(repr, texts))}' if texts else ''
        chip = f' --chip {shlex.quote(self.chip)}' if self.chip else ''
        return f'einshard explain {self.function}{args} {where}{chip}'


@dataclass(frozen=True)
class Config:
    """What [tool.einshard] says.

    Attributes:
        folder: that of pyproject.toml.
        reports: the folder of stored reports.
        threshold: the growth of a figure that counts, as a fraction of it.
    """

    folder: Path
    reports: Path
    threshold: float
    steps: Sequence[Step]

    def file(self, step: Step, target: str) -> Path:
        return self.reports / f'{file_name(step, target)}.json'


def file_name(step: Step, target: str) -> str:
    """'train@2x-v5e-4x4' for the target '2*v5e:4x4'."""
    return f'{step.name}@{target.replace("*", "x-").replace(":", "-")}'


def read_config(folder: Path) -> Config:
    """Reads the pyproject.toml of a folder, or of the nearest one above.

    Raises:
        EinshardError: there is none, or an entry is missing, unknown or of another type.
    """
    places = (folder, *folder.parents)
    file = next((path for path in (p / 'pyproject.toml' for p in places) if path.is_file()), None)
    example = '[[tool.einshard.step]]  name = "train"  function = "model:step"  targets = ["cpu:8"]'
    if file is None:
        raise _error('there is no pyproject.toml here', folder=str(folder), example=example)
    try:
        data = tomllib.loads(file.read_text(encoding='utf-8'))
    except tomllib.TOMLDecodeError as error:
        raise _error(f'{file} is not valid TOML: {error}') from None
    table = data.get('tool', {}).get('einshard')
    if table is None:
        raise _error(f'{file} has no [tool.einshard]', example=example)
    entries = _Entries(
        table, '[tool.einshard]', ('reports', 'fail_on', 'threshold', 'tries', 'step')
    )
    threshold = entries.get('threshold', (int, float), 0.03)
    if not 0 <= threshold < 1:
        raise _error(
            f'threshold = {threshold} of [tool.einshard] is not a fraction', example='0.03'
        )
    tables = entries.get('step', list, [])
    if not tables:
        raise _error(f'{file} has no [[tool.einshard.step]]', example=example)
    defaults = entries.get('tries', int, 8), entries.kinds()
    steps = [
        _step(table, f'step {i + 1} of [[tool.einshard.step]]', *defaults)
        for i, table in enumerate(tables)
    ]
    names = [step.name for step in steps]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise _error(f'two steps have the name {quoted(repeated)}', file=str(file))
    reports = file.parent / entries.get('reports', str, '.einshard')
    return Config(file.parent, reports, float(threshold), steps)


def check_kinds(kinds: Sequence[str], where: str) -> frozenset[str]:
    for kind in kinds:
        if kind not in KINDS:
            raise _unknown(kind, where, KINDS)
    return frozenset(kinds)


def _step(table: Any, where: str, tries: int, fail_on: frozenset[str]) -> Step:
    known = 'name', 'function', 'args', 'kwargs', 'targets', 'mesh', 'chip', 'tries', 'fail_on'
    entries = _Entries(table, where, known)
    name, function = entries.get('name', str), entries.get('function', str)
    if not name or any(character in name for character in '/\\:@'):
        raise _error(f'name = {name!r} of {where} cannot be part of a file name')
    mesh = entries.get('mesh', dict, {})
    for axis, size in mesh.items():
        if type(size) is not int or size < 1:
            raise _error(
                f'mesh axis {axis!r} of {where} has the size {size!r}', example='{data = 4}'
            )
    targets = entries.strings('targets')
    for target in targets:
        kind, _, n = target.partition(':')
        if not n or (kind == 'cpu' and not (n.isdecimal() and int(n))):
            raise _error(f'{target!r} of {where} is not a target', example='"h100:4x8", "cpu:8"')
        n_devices = _numbers_of_devices(target)
        if mesh and prod(mesh.values()) not in n_devices:
            raise EinshardError(
                f'the mesh of {where} has {plural(prod(mesh.values()), "device")}, and '
                f'{target!r} has {" or ".join(map(str, n_devices))}',
                code='check',
                facts={
                    'mesh': ' '.join(f'{axis}={size}' for axis, size in mesh.items()),
                    'instead': f'another step, with another name and mesh, for {target!r}',
                },
            )
    if not targets:
        raise _error(f'{where} has no targets', example='targets = ["h100:4x8", "cpu:8"]')
    return Step(
        name,
        function,
        entries.strings('args'),
        {key: str(value) for key, value in entries.get('kwargs', dict, {}).items()},
        targets,
        mesh,
        entries.get('chip', str, '') or None,
        entries.get('tries', int, tries),
        entries.kinds() or fail_on,
    )


def _numbers_of_devices(target: str) -> tuple[int, ...]:
    kind, _, n = target.partition(':')
    if kind == 'cpu':
        return (int(n),)
    if is_gpu_name(target):
        return (prod(map(int, read_gpu_name(target)[1].split('x'))),)
    n_slices, name = split_slices(target)
    generation, _, sizes = topology_name(name).partition(':')
    n_chips = n_slices * prod(map(int, re.findall(r'\d+', sizes)))
    # chips of two TensorCores have one device, as v5p, or two, as v4
    return tuple(n_chips * n for n in range(1, TPUS[generation].cores + 1))


class _Entries:
    """The entries of a table, whose names and types are checked."""

    def __init__(self, table: Any, where: str, known: Sequence[str]):
        if not isinstance(table, dict):
            raise _error(f'{where} is not a table, but {table!r}')
        self.table: dict[str, Any] = table
        self.where = where
        for name in self.table:
            if name not in known:
                raise _unknown(name, where, known)

    def get(self, name: str, kind: Any, default: Any = None) -> Any:
        value = self.table.get(name, default)
        if value is None:
            raise _error(f'{self.where} has no {name}', example=f'{name} = {_EXAMPLES.get(name)}')
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _error(
                f'{name} = {value!r} of {self.where} has another type',
                example=f'{name} = {_EXAMPLES.get(name)}',
            )
        return value

    def strings(self, name: str) -> list[str]:
        values = self.get(name, list, [])
        return [value if isinstance(value, str) else repr(value) for value in values]

    def kinds(self) -> frozenset[str]:
        return check_kinds(self.strings('fail_on'), f'fail_on of {self.where}')


_EXAMPLES = {
    'name': '"train"',
    'function': '"model:step"',
    'args': '["model:state", "i32[16,64]"]',
    'kwargs': '{rate = "0.1"}',
    'targets': '["h100:4x8", "cpu:8"]',
    'mesh': '{data = 4, tensor = 8}',
    'chip': '"H100"',
    'tries': '8',
    'threshold': '0.03',
    'reports': '".einshard"',
    'fail_on': '["bytes", "memory"]',
    'step': '[...]',
}


def _error(sentence: str, **facts: object) -> EinshardError:
    return EinshardError(sentence, code='check', facts=facts)


def _unknown(name: str, where: str, known: Any) -> EinshardError:
    nearest = difflib.get_close_matches(name, [*known], 1, 0.5)
    return EinshardError(
        f"'{name}' of {where} is unknown",
        code='check',
        facts={'known': quoted([*known])},
        fix=nearest[0] if nearest else None,
    )
