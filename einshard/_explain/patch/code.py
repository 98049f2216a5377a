"""The code of a program, which is traced again with changes in it."""

from __future__ import annotations

import threading
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice, product
from typing import Any

import jax
from jax.sharding import Mesh, get_abstract_mesh

from ..._program.edits.call import JittedCall
from ..._program.edits.edit import Edit
from ..._program.edits.jaxprs import has_explicit_axes
from ..._program.edits.sites import count_constraints, find_constraints
from ..._program.jaxpr.graph import flatten
from ..._program.jaxpr.spans import Span
from ..._sharding.mesh import spec_axes
from ..._text import first_line
from .check import NotTraced, patched
from .files import Piece, Source
from .observe import Seen, observe
from .write import Change, Missing, Option, options

_CONSTRAINTS = 'sharding_constraint', 'reshard'
# ways to write one list of changes that are traced until one is right
_MAX_WAYS = 6
# one at a time: while changes are traced, functions have other code
lock = threading.RLock()


class Code:
    """The functions of a program, and what the expressions in them can name.

    Args:
        call: the program.
        trace: traces it again.
        mesh: its mesh.
        spans: the expressions that may change.
        in_mesh: whether the code will run with the mesh in context, which it has not done so far.

    Attributes:
        has_mesh: whether it is traced with a mesh in context.
    """

    def __init__(
        self,
        call: JittedCall,
        trace: Callable[[], JittedCall | None],
        mesh: Any,
        spans: Collection[Span],
        in_mesh: bool = False,
    ):
        self.spans, self._call, self._trace = spans, call, trace
        self._seen: Sequence[Seen] = ()
        self._codes: Sequence[types.CodeType] = ()
        self._again: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._failed, self.has_mesh = '', True
        expected = constraints(call.jaxpr)
        contexts: list[Callable[[], Any]] = [nullcontext]
        if isinstance(mesh, Mesh):  # the program was traced in a context that has ended
            contexts += [lambda: jax.set_mesh(mesh), lambda: mesh]
            contexts = contexts[1:2] if in_mesh else contexts
        for context in contexts:
            try:
                with context():
                    again, seen, codes = observe(trace, spans)
            except Exception as raised:  # that of the user's function
                self._failed = self._failed or f'traced again, it raises {raised_text(raised)}'
                continue
            if again is not None and constraints(again.jaxpr) == expected:
                self._again, self._seen, self._codes, self._failed = context, seen, codes, ''
                self.has_mesh = context is not nullcontext or not get_abstract_mesh().empty
                return
        self._failed = self._failed or 'traced again, it is another program'

    def options(self, change: Change, changes: Collection[Change]) -> list[Option]:
        """Returns the ways to write a change, the best first. Raises `Missing` if there is none."""
        if self._failed:
            raise Missing(self._failed)
        return options(change, changes, self._seen)

    def trace(self, chosen: Sequence[Option], leaves: Sequence[Any] | None = None) -> JittedCall:
        """Returns the program with changes in its code, also where it is traced again.

        Args:
            leaves: those of the call, if they are other ones.

        Raises:
            Missing: the changes replace the same code.
            NotTraced: the functions that change cannot be reached.
        """
        pieces = pieces_of(chosen)
        texts = [(source, source.edited(each)) for source, each in pieces.items()]
        for source, text in texts:
            if text is None:
                raise Missing('two changes replace the same code')
            compile(text, str(source.path), 'exec', dont_inherit=True)
        again, entries = self._call.trace_again, [e for way in chosen for e in way.entries]
        with lock, self._again(), patched(pieces, self._codes, entries):
            new = again(leaves) if leaves is not None and again is not None else self._trace()
        if new is None:
            raise Missing('the patched function does not trace')
        return new if again is None else replace(new, trace_again=lambda n: self.trace(chosen, n))


class Rewriter:
    """Makes edits in the code of a program on Explicit mesh axes, and traces it again.

    There, types in the jaxpr have the shardings of values, so that it cannot be spliced.
    """

    def __init__(self, call: JittedCall, trace: Callable[[], JittedCall | None], mesh: Any):
        self._call, self._trace, self._mesh = call, trace, mesh
        self._code: Code | None = None
        self._right: dict[Edit, Option] = {}

    def trace(self, changes: Mapping[Edit, Change], leaves: Sequence[Any] | None) -> JittedCall:
        """Returns the program with changes. Raises an error that says why there is none.

        Args:
            leaves: those of the call, if they are other ones.
        """
        error: Exception = Missing('it cannot be written there')
        with lock:
            code, ways = self._code_for(changes.values()), dict[Edit, list[Option]]()
            for edit, change in changes.items():
                each = code.options(change, [*changes.values()])
                # the one that was right before is first
                ways[edit] = sorted(each, key=lambda way: way != self._right.get(edit))
            for chosen in islice(product(*ways.values()), _MAX_WAYS):
                is_sure = all(way.is_sure for way in chosen)
                try:
                    new = code.trace(chosen, leaves)
                except (Missing, NotTraced) as reason:
                    error = reason
                except Exception as raised:
                    if is_sure:  # types do not allow it, however it is written
                        raise
                    error = raised
                else:
                    if self._is_right(new, changes, is_sure):
                        self._right.update(zip(ways, chosen, strict=True))
                        return new
        raise error

    def _code_for(self, changes: Iterable[Change]) -> Code:
        spans = {change.path[0] for change in changes}
        if self._code is None or not spans <= {*self._code.spans}:
            # one trace for all that a search may change
            spans |= {at.frames[0] for at, _ in find_constraints(self._call.jaxpr)}
            self._code = Code(self._call, self._trace, self._mesh, spans)
        return self._code

    def _is_right(self, new: JittedCall, changes: Mapping[Edit, Change], is_sure: bool) -> bool:
        """Whether a program has the changes, beside those of types that follow from them."""
        if not is_sure and operations(new.jaxpr) != operations(self._call.jaxpr):
            return False
        of_constraints = (each for each in changes.values() if each.kind in ('replace', 'remove'))
        changed = {each.path: each.sharding for each in of_constraints}
        return count_constraints(new.jaxpr) == count_constraints(self._call.jaxpr, changed)


def pieces_of(chosen: Iterable[Option]) -> dict[Source, list[Piece]]:
    found: dict[Source, list[Piece]] = defaultdict(list)
    for way in chosen:
        found[way.source] += way.pieces
    return found


def constraints(jaxpr: Any) -> Counter[Any]:
    """Counts the constraints of a program, by shape and sharding."""
    found = Counter[Any]()
    for op in flatten(jaxpr).ops:
        if op.primitive in _CONSTRAINTS:
            params, (out,) = op.eqn.params, op.eqn.outvars
            sharding = params.get('sharding', params.get('dst_sharding'))
            # JAX itself reshards scalars on Auto axes, where no mesh is in context
            if op.primitive == 'reshard' and not has_explicit_axes(sharding):
                continue
            entries = spec_axes(sharding.spec)
            while entries and not entries[-1]:
                entries.pop()
            found[op.primitive, out.aval.shape, str(entries), sharding.mesh.abstract_mesh] += 1
    return found


def operations(jaxpr: Any) -> Counter[Any]:
    """Counts all other operations of a program, by the types of their results."""
    return Counter(
        (op.primitive, *((out.aval.shape, out.aval.dtype) for out in op.eqn.outvars))
        for op in flatten(jaxpr).ops
        if op.primitive not in _CONSTRAINTS and op.eqn is not None
    )


def raised_text(error: Exception) -> str:
    return f'{type(error).__name__}: {first_line(error)}'
