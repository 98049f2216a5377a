"""Writes changes of a program as a unified diff of its source files, and checks it."""

from __future__ import annotations

import threading
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ..._program.edits.call import JittedCall
from ..._program.edits.edit import Edit
from ..._program.jaxpr.graph import flatten
from ..._sharding.mesh import spec_axes
from ..._text import first_line, format_bytes
from ..search.trials import Trial, Trials
from .check import NotTraced, patched
from .files import Piece, Source, relative_to
from .observe import Seen, observe
from .write import Change, Missing, Option, options

_CONSTRAINTS = 'sharding_constraint', 'reshard'
# one patch at a time: while one is checked, functions have other code
_lock = threading.Lock()


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
    with _lock:
        return _Patch(changes, edits, trials, in_mesh).text(comments, placed)


def _commented(texts: Iterable[str]) -> str:
    return ''.join(f'# {line}\n' for text in texts for line in text.splitlines())


class _Patch:
    def __init__(
        self,
        changes: Mapping[Edit, Change],
        edits: Sequence[Edit],
        trials: Trials,
        in_mesh: bool = False,
    ):
        self.changes, self.edits, self.trials, self.in_mesh = changes, edits, trials, in_mesh
        self.again: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.codes: Sequence[types.CodeType] = ()

    def text(self, comments: Sequence[str], placed: Sequence[Option]) -> str:
        # 1. what each expression can name
        seen, failed = self._observe() if self.changes else ([], '')
        ways, missing = dict[Edit, list[Option]](), dict[Edit, str]()
        for edit, change in self.changes.items():
            try:
                if failed:
                    raise Missing(failed)
                ways[edit] = options(change, [*self.changes.values()], seen)
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
        # 3. the diff
        texts = [*comments]
        for edit, reason in missing.items():
            change = self.changes[edit]
            texts.append(f'{change.path[0].source}: {change.text} (not written: {reason})')
        pieces = _pieces([*chosen.values(), *placed])
        folder = relative_to([source.path for source in pieces]) if pieces else Path()
        diffs = list[str]()
        for source, each in pieces.items():
            new = source.edited(each)
            assert new is not None
            diffs.append(source.diff(new, source.path.relative_to(folder).as_posix()))
        top = [checked.text] if checked is not None else []
        top += ['with the mesh in context: with jax.set_mesh(mesh)'] * bool(self.in_mesh and chosen)
        top += [f'apply in {folder}'] if pieces and folder != Path.cwd() else []
        top += dict.fromkeys(t for way in chosen.values() for t in (way.assumed, way.note) if t)
        if placed:
            top.append('not traced: in_shardings= and out_shardings=')
        return _commented([*top, *texts]) + ''.join(diffs)

    def _observe(self) -> tuple[list[Seen], str]:
        """Returns the expressions with their variables, or why they are unknown."""
        spans = {change.path[0] for change in self.changes.values()}
        mesh, error = self.trials.facts.mesh, ''
        expected = _constraints(self.trials.call.jaxpr)
        contexts: list[Callable[[], Any]] = [nullcontext]
        if isinstance(mesh, Mesh):  # the program was traced in a context that has ended
            contexts += [lambda: jax.set_mesh(mesh), lambda: mesh]
            contexts = contexts[1:2] if self.in_mesh else contexts
        for context in contexts:
            try:
                with context():
                    call, seen, self.codes = observe(self._trace, spans)
            except Exception as raised:  # that of the user's function
                error = error or f'traced again, it raises {_first_line(raised)}'
                continue
            if call is not None and _constraints(call.jaxpr) == expected:
                self.again = context
                return seen, ''
        return [], error or 'traced again, it is another program'

    def _trace(self) -> JittedCall | None:
        return replace(self.trials.facts.stages).call

    def _check(self, chosen: Mapping[Edit, Option], is_last: bool = False) -> _Checked:
        """Traces the program with edits in its source.

        `is_last` applies the edits of arguments and results to the trace, and reads the figures.
        """
        pieces, is_sure = _pieces(chosen.values()), all(way.is_sure for way in chosen.values())
        try:
            texts = [source.edited(each) for source, each in pieces.items()]
            if None in texts:
                return _Checked(False, 'two changes replace the same code')
            for source, text in zip(pieces, texts, strict=True):
                compile(text or '', str(source.path), 'exec', dont_inherit=True)
            entries = [entry for way in chosen.values() for entry in way.entries]
            with self.again(), patched(pieces, self.codes, entries):
                call = self._trace()
        except NotTraced as reason:
            return _Checked(is_sure, f'parsed, not traced: {reason}')
        except Exception as raised:  # the patched code does not parse or run
            return _Checked(False, f'the patched code raises {_first_line(raised)}')
        if call is None:
            return _Checked(False, 'the patched function does not trace')
        if _operations(call.jaxpr) != _operations(self.trials.call.jaxpr):
            return _Checked(False, 'the patched code computes something else')
        facts = self.trials.facts
        rest = tuple(edit for edit in self.edits if edit not in self.changes) if is_last else ()
        tried, after = (*rest, *chosen), Trials(facts, call)
        try:
            is_same = is_sure and _edited(self.trials, tried) == _edited(after, rest)
        except ValueError as error:  # such as on Explicit mesh axes, where only code can be changed
            if not is_sure:
                return _Checked(False, f'it cannot be tried: {first_line(error)}')
            is_same = True
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


def _pieces(chosen: Any) -> dict[Source, list[Piece]]:
    found: dict[Source, list[Piece]] = defaultdict(list)
    for way in chosen:
        for source, piece in way.pieces:
            found[source].append(piece)
    return found


def _edited(trials: Trials, edits: Sequence[Edit]) -> Counter[Any]:
    edited = trials.edited(tuple(edits))
    return _constraints(edited.function.trace(*edited.args, **edited.kwargs).jaxpr)


def _constraints(jaxpr: Any) -> Counter[Any]:
    """Counts the constraints of a program, by shape and sharding."""
    found = Counter[Any]()
    for op in flatten(jaxpr, keep_unused=True).ops:
        if op.primitive in _CONSTRAINTS:
            params, (out,) = op.eqn.params, op.eqn.outvars
            sharding = params.get('sharding', params.get('dst_sharding'))
            entries = spec_axes(sharding.spec)
            while entries and not entries[-1]:
                entries.pop()
            found[op.primitive, out.aval.shape, str(entries), sharding.mesh.abstract_mesh] += 1
    return found


def _operations(jaxpr: Any) -> Counter[Any]:
    """Counts all other operations of a program, by the types of their results."""
    return Counter(
        (op.primitive, *((out.aval.shape, out.aval.dtype) for out in op.eqn.outvars))
        for op in flatten(jaxpr, keep_unused=True).ops
        if op.primitive not in _CONSTRAINTS and op.eqn is not None
    )


def _first_line(error: Exception) -> str:
    return f'{type(error).__name__}: {first_line(error)}'
