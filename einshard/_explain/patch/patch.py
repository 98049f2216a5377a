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
    trials: Trials,
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
    if not (changes or placed):
        return commented(comments)
    with lock:
        patch = _Patch(changes, edits, trials, in_mesh)
        if patch.missing and not patch.has_mesh:  # with a mesh in context, it may be written
            other = _Patch(changes, edits, trials, in_mesh=True)
            patch = other if len(other.missing) < len(patch.missing) else patch
        return patch.text(comments, placed)


def commented(texts: Iterable[str]) -> str:
    return ''.join(f'# {line}\n' for text in texts for line in text.splitlines())


class _Patch:
    """Chooses how to write changes.

    Attributes:
        chosen, checked: the ways to write them, and what a trace of these says.
        missing: why others are not written.
    """

    def __init__(
        self, changes: Mapping[Edit, Change], edits: Sequence[Edit], trials: Trials, in_mesh: bool
    ):
        self.changes, self.edits, self.trials, self.in_mesh = changes, edits, trials, in_mesh
        # 1. what each expression can name
        self.has_mesh, ways, self.missing = True, dict[Edit, list[Option]](), dict[Edit, str]()
        if changes:
            spans = {change.path[0] for change in changes.values()}
            self.code = Code(trials.call, trials.trace, trials.facts.mesh, spans, in_mesh)
            self.has_mesh = self.code.has_mesh
        for edit, change in changes.items():
            try:
                ways[edit] = self.code.options(change, [*changes.values()])
            except Missing as reason:
                self.missing[edit] = str(reason)
        # 2. the first ways, or else those that a trace finds right one by one
        self.chosen = {edit: several[0] for edit, several in ways.items()}
        self.checked = self._check_all()
        if self.checked is not None and not self.checked.is_right:
            for edit, several in ways.items():
                each = (self._check({edit: way}) for way in several)
                found = [(way, one) for way, one in zip(several, each, strict=True)]
                right = next((way for way, one in found if one.is_right), None)
                if right is None:
                    self._leave_out(edit, several[0].instead or found[0][1].text)
                else:
                    self.chosen[edit] = right
            self.checked = self._check_all()
            if self.checked is not None and not self.checked.is_right:  # each is right alone
                for edit in [edit for edit, way in self.chosen.items() if not way.is_sure]:
                    self._leave_out(edit, self.checked.text)
                self.checked = self._check_all()

    def _leave_out(self, edit: Edit, reason: str) -> None:
        self.missing[edit] = reason
        del self.chosen[edit]

    def text(self, comments: Sequence[str], placed: Sequence[Option]) -> str:
        chosen, checked = self.chosen, self.checked
        texts = [*comments]
        for edit, reason in self.missing.items():
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
        return commented([*top, *texts]) + ''.join(diffs)

    def _check_all(self) -> _Checked | None:
        return self._check(self.chosen, is_last=True) if self.chosen else None

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
