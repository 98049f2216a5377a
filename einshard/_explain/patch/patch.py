"""Writes changes of a program as a unified diff of its source files, and checks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._program.edits.draft import Draft
from ..._program.edits.edit import Edit, indices, placements
from ..._text import first_line, format_bytes
from ..search.trials import Trial, Trials
from .check import NotTraced
from .code import Code, constraints, lock, operations, pieces_of, raised_text
from .files import relative_to
from .write import Change, Missing, Option


@dataclass(frozen=True)
class _Checked:
    """What a trace of patched functions says.

    Attributes:
        is_right: whether the program has the edits that were tried.
        text: what to write about it.
    """

    is_right: bool
    text: str


def make_patch(
    changes: Mapping[Edit, Change],
    edits: Sequence[Edit],
    trials: Trials | None,
    comments: Sequence[str],
    placed: Sequence[Option] = (),
    *,
    in_mesh: bool = False,
) -> str:
    """Returns a unified diff of changes of values, with comments at its top.

    A change that no code can say becomes a comment with the reason.

    Args:
        changes: those of `edits` that change values.
        edits: all that was tried.
        comments: what the other edits change, in words.
        placed: how to write them, where the code has them.
        in_mesh: whether the code will run with the mesh in context, which it has not done so far.
    """
    if trials is None or not (changes or placed):
        return _commented(comments)
    with lock:
        return _Patch(changes, edits, trials, in_mesh).text(comments, placed)


def _commented(texts: Iterable[str]) -> str:
    return ''.join(f'# {line}\n' for text in texts for line in text.splitlines())


@dataclass(frozen=True)
class _Choice:
    """The ways to write changes, what a trace of them says, and why others are not written."""

    ways: Mapping[Edit, Option]
    checked: _Checked | None
    missing: Mapping[Edit, str]


class _Patch:
    def __init__(
        self,
        changes: Mapping[Edit, Change],
        edits: Sequence[Edit],
        trials: Trials,
        in_mesh: bool = False,
    ):
        self.changes, self.edits, self.trials, self.in_mesh = changes, edits, trials, in_mesh

    def text(self, comments: Sequence[str], placed: Sequence[Option]) -> str:
        choice = self._choose()
        if choice.missing and not self.code.has_mesh:  # with a mesh in context, it may be written
            other = _Patch(self.changes, self.edits, self.trials, in_mesh=True)
            found = other._choose()
            if len(found.missing) < len(choice.missing):
                self.in_mesh, choice = True, found
        chosen, checked = choice.ways, choice.checked
        texts = [*comments]
        for edit, reason in choice.missing.items():
            change = self.changes[edit]
            texts.append(f'{change.path[0].source}: {change.text} (not written: {reason})')
        pieces = pieces_of([*chosen.values(), *placed])
        folder = relative_to([source.path for source in pieces]) if pieces else Path()
        diffs = list[str]()
        for source, each in pieces.items():
            new = source.edited(each)
            assert new is not None
            diffs.append(source.diff(new, source.path.relative_to(folder).as_posix()))
        top = [checked.text] if checked is not None else []
        needed = 'needs the mesh in context, as it was tried: with jax.set_mesh(mesh)'
        top += [needed] * bool(self.in_mesh and chosen)
        top += [f'apply in {folder}'] if pieces and folder != Path.cwd() else []
        top += dict.fromkeys(t for way in chosen.values() for t in (way.assumed, way.note) if t)
        if placed:
            top.append('not traced: in_shardings= and out_shardings=')
        return _commented([*top, *texts]) + ''.join(diffs)

    def _choose(self) -> _Choice:
        # 1. what each expression can name
        trials, spans = self.trials, {change.path[0] for change in self.changes.values()}
        if self.changes:
            mesh = trials.facts.mesh
            self.code = Code(trials.call, trials.trace, mesh, spans, self.in_mesh)
        ways, missing = dict[Edit, list[Option]](), dict[Edit, str]()
        for edit, change in self.changes.items():
            try:
                ways[edit] = self.code.options(change, [*self.changes.values()])
            except Missing as reason:
                missing[edit] = str(reason)
        # 2. the first ways, or else those that a trace finds right one by one
        chosen = {edit: several[0] for edit, several in ways.items()}
        checked = self._check(chosen, is_last=True) if chosen else None
        if checked is not None and not checked.is_right:
            for edit, several in ways.items():
                each = (self._check({edit: way}) for way in several)
                found = [(way, one) for way, one in zip(several, each, strict=True)]
                right = next((way for way, one in found if one.is_right), None)
                if right is None:
                    missing[edit] = several[0].instead or found[0][1].text
                    del chosen[edit]
                else:
                    chosen[edit] = right
            checked = self._check(chosen, is_last=True) if chosen else None
            if checked is not None and not checked.is_right:  # each is right alone
                for edit in [edit for edit, way in chosen.items() if not way.is_sure]:
                    missing[edit] = checked.text
                    del chosen[edit]
                checked = self._check(chosen, is_last=True) if chosen else None
        return _Choice(chosen, checked, missing)

    def _check(self, chosen: Mapping[Edit, Option], is_last: bool = False) -> _Checked:
        """Traces the program with edits in its source.

        `is_last` applies the edits of arguments and results to the trace, and reads the figures.
        """
        is_sure, facts = all(way.is_sure for way in chosen.values()), self.trials.facts
        rest, leaves = tuple[Edit, ...](), None
        if is_last or facts.is_explicit:
            rest = tuple(edit for edit in self.edits if edit not in self.changes)
        if facts.is_explicit and indices(rest, 'argument'):  # types may need both
            leaves = Draft(self.trials.call, {**placements(rest)[0]}).structs
        try:
            call = self.code.trace([*chosen.values()], leaves)
        except NotTraced as reason:
            return _Checked(is_sure, f'parsed, not traced: {reason}')
        except Missing as reason:
            return _Checked(False, str(reason))
        except Exception as raised:  # the patched code does not parse or run
            return _Checked(False, f'the patched code raises {raised_text(raised)}')
        if operations(call.jaxpr) != operations(self.trials.call.jaxpr):
            return _Checked(False, 'the patched code computes something else')
        tried, after = (*rest, *chosen), Trials(facts, call)
        try:
            is_same = is_sure and _edited(self.trials, tried) == _edited(after, rest)
        except Exception as error:  # such as a type that JAX refuses on Explicit axes
            return _Checked(False, f'it cannot be tried: {first_line(error)}')
        if is_same and not is_last:
            return _Checked(True, '')
        now = after.run(rest)
        if now is None:
            return _Checked(False, f'the patched program does not compile: {after.error}')
        sends = f'sends {format_bytes(now.figures.network_bytes)}'
        # around a call, a constraint may be on another value of this shape
        before = None if is_same else self.trials.run(tried)
        if before is not None and _costs(before) != _costs(now):
            promised = format_bytes(before.figures.network_bytes)
            return _Checked(False, f'the patched program {sends}, not {promised} as tried')
        return _Checked(True, f'parsed, traced: {sends}')


def _costs(trial: Trial) -> tuple[Any, ...]:
    figures = trial.figures
    return figures.network_bytes, figures.flops, figures.memory


def _edited(trials: Trials, edits: Sequence[Edit]) -> Counter[Any]:
    edited = trials.edited(tuple(edits))
    return constraints(edited.function.trace(*edited.args, **edited.kwargs).jaxpr)
