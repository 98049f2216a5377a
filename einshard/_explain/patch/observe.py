"""Traces a program again, and keeps the variables of the functions that edits change."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, get_abstract_mesh

from ..._program.hlo.sources import is_user_file
from ..._program.jaxpr.spans import Frames, Span
from ..._sharding.scopes import current_context, fresh_traces
from .files import read_source
from .scope import Scope, visible

_T = TypeVar('_T')


@dataclass(frozen=True)
class Frame:
    """A function while it ran.

    Attributes:
        variables: its variables, and those of the functions around it that had not returned.
    """

    span: Span
    variables: Sequence[tuple[str, Mapping[str, Any]]]
    globals: Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """An expression that was evaluated, with its calls.

    Attributes:
        frames: the function that it is in, its caller, and so on, without those of libraries.
        bare_mesh, einshard_mesh: see `Scope`.
    """

    frames: Sequence[Frame]
    bare_mesh: Any
    einshard_mesh: Any

    @property
    def path(self) -> tuple[Span, ...]:
        return tuple(frame.span for frame in self.frames)

    def scope(self, level: int) -> Scope | None:
        """The scope of the expression, or of a call of its function. None without a source."""
        frame = self.frames[level]
        source = read_source(frame.span.file)
        node = None if source is None else source.node(frame.span)
        if source is None or node is None:
            return None
        names, functions = visible(source, node, frame.variables, frame.globals)
        return Scope(source, node, names, self.bare_mesh, self.einshard_mesh, functions)


def observe(
    run: Callable[[], _T], spans: Collection[Span]
) -> tuple[_T, list[Seen], list[types.CodeType]]:
    """Calls `run`, which traces, and returns what it has evaluated of the expressions.

    Also returns the code that has run, without that of libraries. A profiler sees functions return:
    what a traceback keeps are code objects, without variables.
    """
    files, found = {span.file for span in spans}, dict[tuple[Span, ...], Seen]()
    ran: dict[int, types.CodeType] = {}  # a code object is hashed by all its constants
    frames, here = Frames(), inspect.currentframe()

    def on_return(frame: types.FrameType, event: str, _: Any) -> None:
        if event != 'return':
            return
        ran.setdefault(id(frame.f_code), frame.f_code)
        if frame.f_code.co_filename not in files:
            return
        inside = {*frames.spans(frame.f_code)}
        for span in spans:
            if span in inside:
                add(frame, span)

    def add(frame: types.FrameType, span: Span) -> None:
        stack = [(frame, span)]
        outer = frame.f_back
        while outer is not None and outer is not here:
            if (at := frames.span(outer.f_code, outer.f_lasti)) is not None:
                stack.append((outer, at))
            outer = outer.f_back
        path = tuple(each for _, each in stack)
        if path not in found:
            seen = [Frame(at, _variables(each, here), each.f_globals) for each, at in stack]
            mesh = current_context().lowering_mesh
            found[path] = Seen(seen, _bare_mesh(), mesh)

    before = sys.getprofile()
    with fresh_traces():
        sys.setprofile(on_return)
        try:
            result = run()
        finally:
            sys.setprofile(before)
    return result, [*found.values()], [c for c in ran.values() if is_user_file(c.co_filename)]


def _variables(frame: types.FrameType, last: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the variables of a function, and of the functions around it that still run."""
    code = frame.f_code
    found: list[tuple[str, Mapping[str, Any]]] = [(code.co_name, dict(frame.f_locals))]
    outer = frame.f_back
    while outer is not None and outer is not last:
        if any(each is code for each in outer.f_code.co_consts):
            found.append((outer.f_code.co_name, dict(outer.f_locals)))
            code = outer.f_code
        outer = outer.f_back
    return found


def _bare_mesh() -> Any:
    """Returns the mesh of a constraint with a PartitionSpec, which `with mesh:` also sets."""
    if not (mesh := get_abstract_mesh()).empty:
        return mesh

    def constrained(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, PartitionSpec())

    try:
        (eqn,) = jax.make_jaxpr(constrained)(jnp.float32(0)).eqns
        return eqn.params['sharding'].mesh
    except (RuntimeError, ValueError):  # there is none
        return None
