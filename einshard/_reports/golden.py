"""A report -> a golden file: text that stays until a placement or a collective changes."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from .._errors import EinshardError, plural
from .._words import short_source
from .fold import fold
from .report import Report
from .rows import ArrayRow, CollectiveRow

_LONGEST = 120  # of what a name becomes in the name of a file; systems allow 255 bytes


def golden_text(report: Report) -> str:
    """What a golden file says: where everything is, and each collective with how often it runs.

    Nothing that differs between machines, between versions of JAX that make the same program, or
    after an edit elsewhere in the source: no bytes of memory, no devices by name, no lines; and
    collectives in alphabetical order, as their order is the compiler's.

        >>> from einshard._reports.golden import golden_text
        >>> @sharded('x y -> x y*', 'y z -> y* z', mesh=jax.devices()[:8])
        ... def product(x, w):
        ...     return x @ w
        >>> print(golden_text(explain(product, np.ones((8, 64)), np.ones((64, 8)))), end='')
        product on 8 devices
        <BLANKLINE>
        arguments
          x: float32[8,64]  x y -> x y8
          w: float32[64,8]  y z -> y8 z
        results
          result: float32[8,8]  a b -> 8 a b
        collectives
          1 x all-reduce f32[8,8], 1 group of 8 along y
    """
    mesh = ', '.join(f'{name}={size}' for name, size in report.mesh)
    devices = plural(report.n_devices, 'device')
    lines = [
        f'{report.name} on {devices}{": " * bool(mesh)}{mesh}',
        '',
        'arguments',
        *_array_lines(report.arguments),
        'results',
        *_array_lines(report.results),
        'collectives',
        *_collective_lines(report.collectives),
    ]
    return '\n'.join(lines) + '\n'


def _array_lines(rows: Sequence[ArrayRow]) -> Iterator[str]:
    """Not in columns: a longer path would change every line."""
    things = [f'{row.array}  {_placement(row)}' for row in rows]
    for path, numbers in fold([row.path for row in rows], things):
        yield f'  {path}: {things[numbers[0]]}'
    if not rows:
        yield '  none'


def _placement(row: ArrayRow) -> str:
    """Without the name of the device, which platforms give."""
    words = 'on one device'
    return words if row.placement.startswith(f'{words}: ') else row.placement


def _collective_lines(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    times: dict[str, list[int | None]] = {}
    for row in rows:
        times.setdefault(_collective_text(row), []).append(row.times)
    for text, runs in sorted(times.items()):
        known = [n for n in runs if n is not None]
        yield f'  {sum(known) if known == runs else "?"} x {text}'
    if not rows:
        yield '  none'


def _collective_text(row: CollectiveRow) -> str:
    counts = Counter(re.findall(r'\w+\[[^\]]*\]', row.arrays))
    arrays = ', '.join(f'{n} x {a}' if n > 1 else a for a, n in sorted(counts.items()))
    along = f' along {row.along}' if row.along else ''
    return f'{row.kind} {arrays}, {plural(row.groups, "group")} of {row.parties}{along}'


class Goldens:
    """The golden files of one test, which it writes or compares with.

    Attributes:
        folder: where they are.
        test: the name of the test, which is theirs too.
        shown_from: the folder from which messages show paths.
        update: whether to write.
        written: what was: 'wrote golden/test_model/test_step.txt'.
    """

    def __init__(self, folder: Path, test: str, shown_from: Path, update: bool):
        self.folder = folder
        self.test = test
        self.shown_from = shown_from
        self.update = update
        self.written: list[str] = []
        self._used: set[Path] = set()
        self._unnamed = 0

    def differs(self, report: Report, name: str | None = None) -> str | None:
        """Writes the file of a report, or says how the report differs from it."""
        if not isinstance(report, Report):
            raise EinshardError(
                f'a golden file is made of a Report, and this is of type {type(report).__name__}',
                facts={'give': 'what explain(function, *arguments) returns'},
            )
        path = self._path(name)
        shown = path.relative_to(self.shown_from) if path.is_relative_to(self.shown_from) else path
        there = path.read_text(encoding='utf-8') if path.exists() else None
        text = golden_text(report)
        if text == there:
            return None
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding='utf-8', newline='\n')
            self.written.append(f'{"wrote" if there is None else "rewrote"} {shown.as_posix()}')
            return None
        if there is None:
            return (
                f'there is no {shown.as_posix()} to compare {report.name} with\n'
                '  to write it: pytest --einshard-update'
            )
        return _difference(report, there, text, shown.as_posix())

    def _path(self, name: str | None) -> Path:
        if name is None:
            self._unnamed += 1
            ending = f'+{self._unnamed}' if self._unnamed > 1 else ''
        elif isinstance(name, str) and name:  # type: ignore[reportUnnecessaryIsInstance]
            ending = f'+{file_name(name)}'
        else:
            raise EinshardError(
                f'{name!r} is no name for a golden file',
                facts={'give': "text, as in name='forward'"},
            )
        path = self.folder / f'{file_name(self.test)}{ending}.txt'
        if path in self._used:
            raise EinshardError(
                f'{self.test} has two golden files of the name {name!r}',
                facts={'file': path.name, 'give': 'another name='},
            )
        self._used.add(path)
        return path


def _difference(report: Report, there: str, text: str, shown: str) -> str:
    before, after = there.splitlines(), text.splitlines()
    lines = list(difflib.unified_diff(before, after, shown, 'this program', lineterm=''))
    added = {line.partition(' x ')[2] for line in lines[2:] if line.startswith('+')}
    rows = [row for row in report.collectives if _collective_text(row) in added]
    sources = sorted({short_source(row.source) for row in rows if row.source})
    by = [f'  collectives: added by {", ".join(sources)}'] if sources else []
    update = '  if meant so: pytest --einshard-update'
    return '\n'.join([f'{report.name} is not as {shown} has it', *by, update, *lines])


def file_name(name: str) -> str:
    """A name that every file system takes; where letters are lost, with a mark of its own.

    >>> from einshard._reports.golden import file_name
    >>> file_name('test_step[8-float32]')
    'test_step-8-float32'
    >>> file_name('test_step[a b -> a* b]')
    'test_step-a-b-a-b-8ff2f975'
    """
    plain = re.sub(r'[^\w.]+', '-', name, flags=re.ASCII).strip('-')
    if plain == name.replace('[', '-', 1).removesuffix(']') and len(plain) <= _LONGEST:
        return plain
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f'{plain[:_LONGEST]}-{mark}'
