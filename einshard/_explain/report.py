"""Report: placements, collectives and memory of a compiled function, as plain data."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .._display import Display, as_json
from .._errors import EinshardError, plural
from .._page import Column, Page, Section
from .._profile.measured import Measured, measured_sections
from .._program.cost.bounds import NO_BOUNDS, Bounds, bounds_section
from .._program.hlo.collective import Collective
from .._program.hlo.flops import ProductRow
from .._program.hlo.memory import Memory
from .._program.hlo.temporaries import Temporary
from .._text import format_bytes, format_seconds, short_source
from .._trees.paths import common_suffix_length
from .answer import Why, answer
from .collectives import Collectives, collective_section
from .diff import Diff, DiffInput, make_diff
from .estimate import refusal
from .fold_layers import fold
from .kinds import URGENT
from .report_html import report_document
from .report_rows import ArrayRow, Finding
from .temporaries import temporaries_section
from .timeline import Timeline, measured_timeline, timeline_sections
from .totals import compute_line, network_lines

_MAX_ROWS = 40  # in a printed table
_LIVE = ('fixes', 'reading')  # fields that are not data


@dataclass(frozen=True, repr=False)
class Report(Display):
    """A report on a compiled function, made by `explain`.

    It prints as text, and notebooks show it as HTML. Text shows only the first rows of long tables.
    HTML shows all rows. `report.save('report.html')` writes it to a file.

    Attributes:
        name: the name of the function.
        n_devices: the number of devices that run the program.
        device_kind: such as 'cpu' or 'TPU v5 lite'.
        mesh: (axis, size) pairs of the first of `meshes`, or empty if there are no meshes.
        arguments, results: one row per array, in order.
        collectives: one row per collective. `collectives.counts` and `collectives.network_bytes`
            have totals by kind.
        memory: bytes per device, or None if the compiler does not report them.
        flops: flops of a device in one run, in matmuls, convolutions, and custom kernels that
            declare their flops. All loop iterations count, or one if the trip count is unknown.
            None if the program has no flops.
        findings: likely mistakes and what to write instead. Mistakes that keep the program from
            running come first. The others are sorted by the time in which nothing hides what they
            send, if that can be estimated, and then by bytes, most first.
        intermediates: one row per intermediate value with a source line. None unless requested by
            `intermediates=True`.
        temporaries: the largest intermediate arrays in the memory of a device.
        chip: the name of the chip that `bounds` are for, or None if it is unknown, as for CPUs.
        bounds: lower bounds on the time of one run, for compute, HBM, and the network along each
            mesh axis. `bounds.largest` is the largest. Empty without a chip.
        step: the seconds of one run, an estimate: that of `timeline`. None if there is none.
        products: the flops of each source line.
        in_place: (result path, argument path) for each result that reuses the memory of a donated
            argument and has its shape, dtype and sharding.
        notes: facts that are worth knowing but often intended, such as large replicated arrays.
        meshes: (axis, size) pairs of the user's meshes. Omits the mesh of expressions with counts.
        total: what the suggestions of all findings together do, and with a chip, which lower bounds
            they leave, in words.
        profile: what a run has measured, with a row for each collective and for each source line
            that computes. None unless `with_profile` or `einshard.profile` made the report.
        fixes: what `fixed_function`, `patch` and `try_more` need; not data, so that copies and
            pickles of a report do not have it.
        reading: what `why` needs; not data, either.
    """

    name: str
    n_devices: int
    device_kind: str
    mesh: tuple[tuple[str, int], ...]
    arguments: tuple[ArrayRow, ...]
    results: tuple[ArrayRow, ...]
    collectives: Collectives
    memory: Memory | None
    flops: float | None
    findings: tuple[Finding, ...]
    intermediates: tuple[ArrayRow, ...] | None = None
    temporaries: tuple[Temporary, ...] = ()
    chip: str | None = None
    bounds: Bounds = NO_BOUNDS
    step: float | None = None
    products: tuple[ProductRow, ...] = ()
    in_place: tuple[tuple[str, str], ...] = ()
    notes: tuple[Finding, ...] = ()
    meshes: tuple[tuple[tuple[str, int], ...], ...] = ()
    total: tuple[str, ...] = ()
    profile: Measured | None = None
    fixes: Any = field(default=None, repr=False, compare=False)
    reading: Any = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the data that a copy, or a report from a file, has. The function stays behind."""
        fixes = None if self.fixes is None else _NoFunction()
        return {**self.__dict__, 'fixes': fixes, 'reading': None}

    @functools.cached_property
    def timeline(self) -> Timeline:
        """Estimates what a device does when in a step, and which communication nothing hides.

        The optimized program of GPUs and TPUs is scheduled, and says what may run at the same time.
        `print(report.timeline)` has a bar for each source line; `report.save('step.svg')`
        draws it. It is computed when it is first asked for, in tenths of a second. From then on,
        the report's page and `to_dict` have it, too.

        With a profile, it is not estimated, but measured, and `timeline.estimate` is the estimate,
        or None where there is none.

        Raises:
            EinshardError: the program is compiled for CPUs; the chip is unknown; or the report was
                loaded or copied before its timeline was asked for.
        """
        if self.profile is None:
            return self._program().timeline
        reading = self.reading
        estimate = None
        if reading is not None and refusal(reading) is None:
            estimate = reading.timeline
        on = 'simulated CPUs' if self.profile.platform == 'cpu' else self.chip or self.device_kind
        return measured_timeline(self.profile, on, estimate)

    def with_profile(self, path: str | os.PathLike[str], program: int | None = None) -> Report:
        """Returns the report with the times of a run, from a trace of `jax.profiler.trace`.

        The trace holds the programs that ran. The one that is equal to that of the report, apart
        from metadata, is joined; its name proves nothing. If none is equal, but one has the same
        collectives, so that only its kernels differ, rows are joined by order within kind, shape
        and groups, and the report says so. `einshard.profile` traces and joins in one call.

        The report then has `profile`, prints it, and orders findings by the exposed time of the
        collectives that they explain, `Finding.seconds`; `timeline` is the measured one.

        Args:
            path: the folder of the trace, of which the newest run is read, or an `.xplane.pb` file.
            program: the number of a program of the trace, 2 for 'jit_step(2)', if several are
                equal.

        Raises:
            EinshardError: there is no trace; it is not complete, or has no programs; none of them
                is that of the report, or several are; it did not run in the trace; or the report
                was loaded or copied without its program.
        """
        if self.reading is None:
            raise EinshardError(
                'this report no longer has its program, with which those of a trace are compared',
                code='profile',
                facts={'instead': 'call explain on the function'},
            )
        from .measure import measure  # also reads the events, which few reports need

        measured = measure(self.reading, path, program)
        findings, notes = (timed_findings(measured, rows) for rows in (self.findings, self.notes))
        return replace(self, profile=measured, findings=findings, notes=notes)

    def _program(self) -> Any:
        if self.reading is None:
            raise EinshardError(
                'this report no longer has its program',
                code='argument',
                facts={'instead': 'call this of the report that explain has returned'},
            )
        return self.reading

    @property
    def network_bytes(self) -> int:
        """Bytes that each device sends in one run.

        A loop with an unknown trip count counts as one iteration. Custom calls are not included.
        """
        return sum(self.collectives.network_bytes.values())

    def fixed_function(self) -> Any:
        """Returns the function with the suggestions of all findings applied.

        It is jitted, has `trace` and `lower`, and takes the arguments of the report, with the same
        static arguments. Arguments that suggestions place otherwise are moved before each call. To
        avoid that, create them as suggested. Compiler options of the original function are lost.

        Raises:
            EinshardError: there are no tried suggestions, or the function was jitted by Flax or
                Equinox, which keep its arguments in a form of their own.
        """
        if self.fixes is None:
            raise EinshardError('this report has no suggestions that were tried', code='argument')
        return self.fixes.function()

    def patch(self) -> str:
        """Returns the suggestions of all findings as a unified diff of the source files.

        Before it is returned, the program is traced with the patched functions, without running
        modules again; the first line says what that gives, or why it was not done. Changes of
        arguments and results are comments at the top, with code to paste, and written into
        `in_shardings=` and `out_shardings=`. A change that code cannot say, because no expression
        there has the mesh, is a comment. Encode the text with `errors='surrogateescape'` if files
        are not in UTF-8. Empty if there are no tried suggestions.
        """
        return '' if self.fixes is None else self.fixes.patch()

    def try_more(self, tries: int = 8, seconds: float | None = None) -> Report:
        """Tries further changes, on top of those that help, and returns a new report."""
        return self if self.fixes is None else self.fixes.more(tries, seconds)

    def why(self, where: Collective | str) -> Why:
        """Says why the program has a collective, or why a value is sharded as it is.

            >>> import jax
            >>> import jax.numpy as jnp
            >>> from einshard import explain, sharded
            >>> @sharded('x* y', 'y z -> * y z')
            ... def product(x, w):
            ...     return x @ w
            >>> x = jax.ShapeDtypeStruct((8 * jax.device_count(), 32), jnp.float32)
            >>> w = jax.ShapeDtypeStruct((32, 8), jnp.float32)
            >>> report = explain(product, x, w, tries=0)
            >>> why = report.why('x')  # or report.why(report.collectives[0]), or 'model.py:34'
            >>> why.values[0].axes[0].origin
            'argument x'

        The compiler propagates the shardings of arguments, constraints and results through the
        program. Where operands and results of an operation then disagree about a mesh axis, it
        adds a collective. The answer names both sides, where the mesh axis of each comes from, and
        the lines through which it came. Where the propagated shardings do not explain a
        collective, it says so.

        Args:
            where: a row of `collectives`; or a source line, such as 'model.py:34', for all
                collectives and values there; or the path of an argument or result.

        Raises:
            EinshardError: nothing is there, or the report was loaded or copied without its program.
        """
        return answer(self._program(), where)

    def diff(self, after: Report) -> Diff:
        """Compares this report with a later one: `before.diff(after)`."""
        return make_diff(self._diff_input(), after._diff_input())

    def _diff_input(self) -> DiffInput:
        memory = self.memory
        numbers = {
            'sent in one run': self.network_bytes,
            'memory': memory.total if memory else 0,
            'temporaries': memory.temporaries if memory else 0,
            'flops': int(self.flops or 0),
        }
        return DiffInput(self.arguments, self.results, self.collectives, numbers)

    def to_dict(self) -> dict[str, Any]:
        """Converts the report to dictionaries, lists, strings and numbers, for JSON."""
        names = [each.name for each in dataclasses.fields(self) if each.name not in _LIVE]
        fields = {name: getattr(self, name) for name in names}
        if self.profile is None:
            del fields['profile']
        return {
            'schema': 1,
            **{name: as_json(value) for name, value in fields.items()},
            'mesh': dict(self.mesh),
            'meshes': [dict(mesh) for mesh in self.meshes],
            'counts': dict(self.collectives.counts),
            'network_bytes': self.network_bytes,
            # only if it was asked for
            'timeline': as_json(self.__dict__.get('timeline')),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file: '.html' for a web page, '.svg' for a picture of the timeline, or text.

        The page begins with what a reader decides by. It has the timeline, if there can be one, and
        the suggestions as a patch.
        """
        suffix = Path(path).suffix.lower()
        if suffix == '.svg':
            self.timeline.save(path)
        elif suffix in ('.html', '.htm'):
            if self.reading is not None and refusal(self.reading) is None:
                _ = self.timeline  # from now on, the report has it
            timeline: Timeline | None = self.__dict__.get('timeline')
            is_live = self.fixes is not None and not isinstance(self.fixes, _NoFunction)
            patch = self.patch() if is_live and any(f.tried for f in self.findings) else ''
            text = report_document(self, self._page(), timeline, patch)
            Path(path).write_text(text, encoding='utf-8')
        else:
            super().save(path)

    def _page(self) -> Page:
        unknown_loops = any(row.at_least for row in self.products) or any(
            not row.is_exact for row in self.collectives
        )
        timeline: Timeline | None = self.__dict__.get('timeline')  # only if it was asked for
        sections = (
            _array_section('arguments', self.arguments),
            _result_section(self),
            _intermediate_section(self.intermediates or ()),
            collective_section(self.collectives),
            Section('on each device', lines=tuple(_resources(self)), comes_first=True),
            *(() if self.profile is None else measured_sections(self.profile)),
            temporaries_section(self.temporaries, self.memory),
            bounds_section(self.chip or '', self.bounds, self.step, unknown_loops),
            *(timeline_sections(timeline) if timeline else ()),
        )
        devices, meshes = plural(self.n_devices, 'device'), meshes_text(self)
        title = f'{self.name} on {devices} ({self.device_kind}{"; " * bool(meshes)}{meshes})'
        filled = tuple(section for section in sections if section.rows or section.lines)
        findings = (*_finding_texts(self.findings), *self.total)
        return Page(title, filled, findings, _finding_texts(self.notes))


class _NoFunction:
    """Stands for `Report.fixes` in a copy of a report, which has only its data."""

    def _raise(self, *_: Any) -> Any:
        raise EinshardError(
            'a copy of a report has its data, but not its function',
            code='argument',
            facts={'instead': 'call this of the report that explain has returned'},
        )

    function = patch = more = _raise


# --- sections -----------------------------------------------------------------------------------

_ARRAYS = (
    Column('path', shorten='middle'),
    Column('array', shorten='middle'),
    Column('placement'),
    Column('on a device', right=True),
)


def meshes_text(report: Report) -> str:
    """Formats the user's meshes: 'data=4, tp=2; x=8'."""
    return '; '.join(', '.join(f'{name}={n}' for name, n in mesh) for mesh in report.meshes)


def timed_findings(measured: Measured, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Gives findings the exposed time of the collectives that they explain, most first.

    Those that keep a program from running stay first.
    """
    exposed = {row.name: row.exposed.mean for row in measured.rows}
    timed = [
        replace(finding, seconds=sum(exposed.get(name, 0.0) for name in {*finding.explains}))
        for finding in findings
    ]
    return tuple(sorted(timed, key=lambda f: (f.kind not in URGENT, -(f.seconds or 0.0))))


def _finding_texts(findings: Sequence[Finding]) -> tuple[str, ...]:
    counts = Counter(map(_finding_text, findings))
    return tuple(f'{text} ({n} times)' if n > 1 else text for text, n in counts.items())


def _finding_text(finding: Finding) -> str:
    line = f'{short_source(finding.source)}: ' if finding.source else ''
    if finding.seconds:
        line += f'{format_seconds(finding.seconds)} exposed: '
    suggestion = ''
    if finding.suggestion:
        text, _, other = finding.suggestion.partition('. Or: ')
        suggestion = f'. {text[0].upper()}{text[1:]}.'
        if finding.tried is not None:
            on = ' on simulated CPUs' * finding.tried.is_simulated
            suggestion += f' Tried{on}: {finding.tried}.'
        suggestion += f' Or: {other}.' * bool(other)
    reason = f' ({finding.reason})' if finding.reason else ''
    return f'{line}{finding.text}{reason}{suggestion}'


def _array_section(title: str, rows: Sequence[ArrayRow]) -> Section:
    shown: list[tuple[str, ...]] = []
    values = [(row.array, row.placement) for row in rows]
    for path, indices in fold([row.path for row in rows], values):
        row = rows[indices[0]]
        count = f'{len(indices)} x ' if len(indices) > 1 else ''
        shown.append((path, row.array, row.placement, f'{count}{format_bytes(row.bytes)}'))
    return Section(title, _ARRAYS, tuple(shown), max_rows=_MAX_ROWS)


def _result_section(report: Report) -> Section:
    """Lists the results. Results that replace donated arguments are only counted."""
    in_place = dict(report.in_place)
    section = _array_section('results', [r for r in report.results if r.path not in in_place])
    counts = Counter(_strip_common_suffix(*pair) for pair in report.in_place)
    lines = [
        f'{result}: {plural(n, "array")} in place of {argument}, with the same shardings'
        for (result, argument), n in counts.items()
    ]
    columns = section.columns if section.rows else ()
    return replace(section, columns=columns, lines=(*section.lines, *lines))


def _strip_common_suffix(a: str, b: str) -> tuple[str, str]:
    """Turns 'result/0/w', 'state/w' into 'result/0', 'state'."""
    a_keys, b_keys = a.split('/'), b.split('/')
    n = min(common_suffix_length(a, b), len(a_keys) - 1, len(b_keys) - 1)
    return '/'.join(a_keys[: len(a_keys) - n]), '/'.join(b_keys[: len(b_keys) - n])


def _intermediate_section(rows: Sequence[ArrayRow]) -> Section:
    shown = [
        (row.path, row.array, row.placement, format_bytes(row.bytes), short_source(row.source))
        for row in rows
    ]
    columns = Column('name', shorten='start'), *_ARRAYS[1:], Column('line')
    return Section('intermediates', columns, tuple(shown), max_rows=_MAX_ROWS)


def _resources(report: Report) -> list[str]:
    lines = list(network_lines(report.collectives))
    if report.memory is not None:
        lines.append(f'memory: {_memory_text(report.memory)}')
    if report.flops is not None:
        lines.append(compute_line(report.flops, report.products))
    return lines


def _memory_text(memory: Memory) -> str:
    share = ''
    if memory.capacity:
        used = memory.total / memory.capacity
        percent = f'{used:.0%}' if used >= 0.01 else '<1%'
        share = f', {percent} of {format_bytes(memory.capacity)}'
    parts = ', '.join(f'{name} {text}' for name, text in memory.parts.items())
    return f'{format_bytes(memory.total)}{share}{": " * bool(parts)}{parts}'
