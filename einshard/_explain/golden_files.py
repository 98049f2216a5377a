"""Golden files: text files with the placements and collectives that a test expects."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .._errors import EinshardError, plural, printable
from .._program.hlo.collective import Collective, runs_text
from .._sharding.describe import Description
from .._text import short_source
from .fold_layers import fold
from .report import Report, meshes_text
from .report_rows import ArrayRow

_SUFFIX = '.golden'
# before 0.6: pytest takes 'test_*.txt' for doctests, and a merge conflict in one ends the run
_OLD_SUFFIX = '.txt'
_MAX_LENGTH = 120  # characters of a test name in a file name; file systems allow 255 bytes


def golden_text(report: Report) -> str:
    """Formats the placements and collectives of a program.

    Omits memory, device names and source lines, which may change although the program does not.
    Sorts the collectives, because the compiler chooses their order. Does not align columns, because
    a longer path would then change every line.
    """
    devices, meshes = plural(report.n_devices, 'device'), meshes_text(report)
    head = f'{report.name} on {devices}{": " * bool(meshes)}{meshes}'
    alike: dict[str, list[Collective]] = {}
    for row in report.collectives:
        alike.setdefault(_collective_text(row), []).append(row)
    collectives = [
        f'  {runs_text(sum(c.executions for c in same), all(c.is_exact for c in same))} x {text}'
        for text, same in sorted(alike.items())
    ]
    lines = [head, '']
    for title, rows in [
        ('arguments', _array_lines(report.arguments)),
        ('results', _array_lines(report.results)),
        ('collectives', collectives),
    ]:
        lines += [title, *(rows or ['  none'])]
    return '\n'.join(map(printable, lines)) + '\n'


def _array_lines(rows: Sequence[ArrayRow]) -> list[str]:
    values = [f'{row.array}  {_without_device_names(row.placement)}' for row in rows]
    folded = fold([row.path for row in rows], values)
    return [f'  {path}: {values[indices[0]]}' for path, indices in folded]


def _without_device_names(placement: str) -> str:
    return placement.portable if isinstance(placement, Description) else placement


def _collective_text(row: Collective) -> str:
    counts = Counter(re.findall(r'\w+\[[^\]]*\]', row.arrays))
    arrays = ', '.join(f'{n} x {a}' if n > 1 else a for a, n in sorted(counts.items()))
    along = f' along {row.along}' if row.along else ''
    return f'{row.kind} {arrays}, {plural(row.groups or 1, "group")} of {row.group_size}{along}'


@dataclass
class Goldens:
    """The golden files of one test.

    Attributes:
        test: the name of the test, with which file names start.
        shown_from: the folder that paths in messages are relative to.
        update: whether to write files that differ.
        written: messages such as 'wrote golden/test_model/test_step.golden'.
    """

    folder: Path
    test: str
    shown_from: Path
    update: bool
    written: list[str] = field(default_factory=list[str], init=False)
    _used: set[Path] = field(default_factory=set[Path], init=False)

    def find_difference(self, report: Report, name: str | None = None) -> str | None:
        """Returns a message if a report differs from its golden file or there is none, else None.

        If `self.update`, writes the file and returns None. `name` is added to the file name.
        """
        if not isinstance(report, Report):
            raise EinshardError(
                f'einshard_golden takes a Report, not {type(report).__name__}',
                facts={'example': 'einshard_golden(explain(step, x))'},
            )
        path = self._path(name)
        old = path.with_name(f'{path.name.removesuffix(_SUFFIX)}{_OLD_SUFFIX}')
        found = next((each for each in (path, old) if each.exists()), None)
        shown_path = self._shown(found or path)
        golden = None if found is None else found.read_text(encoding='utf-8')
        text = golden_text(report)
        if self.update and (text != golden or found != path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding='utf-8', newline='\n')
            verb = 'wrote' if found is None else 'rewrote' if text != golden else 'renamed'
            self.written.append(f'{verb} {self._shown(path)}')
        if self.update:
            old.unlink(missing_ok=True)
            return None
        if text == golden:
            return None
        if golden is not None:
            return _difference(report, golden, text, shown_path)
        return (
            f'no golden file {shown_path} for {report.name}\n'
            '  to write it: pytest --einshard-update'
        )

    def _shown(self, path: Path) -> str:
        is_inside = path.is_relative_to(self.shown_from)
        return (path.relative_to(self.shown_from) if is_inside else path).as_posix()

    def _path(self, name: str | None) -> Path:
        """Returns the golden file for `name`, or the next numbered file if `name` is None.

        Raises if the test has already used the name.
        """
        if name is None:
            endings = ['', *(f'+{n}' for n in range(2, len(self._used) + 2))]
        elif isinstance(name, str) and name:  # type: ignore[reportUnnecessaryIsInstance]
            endings = [f'+{file_name(name)}']
        else:
            raise EinshardError(
                f'name= must be a non-empty string, not {name!r}',
                facts={'example': "name='forward'"},
            )
        paths = [self.folder / f'{file_name(self.test)}{ending}{_SUFFIX}' for ending in endings]
        path = next((path for path in paths if path not in self._used), None)
        if path is None:
            raise EinshardError(
                f'{self.test} uses the golden file name {name!r} twice',
                facts={'file': paths[0].name},
            )
        self._used.add(path)
        return path


def _difference(report: Report, golden: str, text: str, shown_path: str) -> str:
    before, after = golden.splitlines(), text.splitlines()
    lines = list(difflib.unified_diff(before, after, shown_path, 'this program', lineterm=''))
    added = {line.partition(' x ')[2] for line in lines[2:] if line.startswith('+')}
    rows = [row for row in report.collectives if _collective_text(row) in added]
    sources = sorted({short_source(row.source) for row in rows if row.source})
    origin = [f'  new or changed collectives: from {", ".join(sources)}'] if sources else []
    update = '  to accept the difference: pytest --einshard-update'
    return '\n'.join([f'{report.name} differs from {shown_path}', *origin, update, *lines])


def file_name(name: str) -> str:
    """Makes a portable file name.

    Adds a hash if the name is too long, or contains special characters other than the brackets
    that pytest adds.

    >>> from einshard._explain.golden_files import file_name
    >>> file_name('test_step[8-float32]')
    'test_step-8-float32'
    >>> file_name('test_step[a b -> a* b]')
    'test_step-a-b-a-b-8ff2f975'
    """
    plain = re.sub(r'[^\w.]+', '-', name, flags=re.ASCII).strip('-')
    if plain == name.replace('[', '-', 1).removesuffix(']') and len(plain) <= _MAX_LENGTH:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f'{plain[:_MAX_LENGTH]}-{digest}'
