"""Changes of a program in the user's words."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding, Sharding

from ..._program.edits.edit import (
    Constrain,
    Edit,
    MoveThrough,
    RemoveConstraint,
    ReplaceConstraint,
    indices,
    placements,
)
from ..._program.jaxpr.spans import Span
from ..._program.traced.propagated import CONSTRAINT, Operation
from ..._sharding.mesh import is_canonical_mesh
from ..._text import short_source
from ..findings.expressions import expression_of, partition_text, shard_text, short_code, source_of
from ..findings.facts import Facts
from ..findings.next_call import next_arguments
from ..findings.values import Axes, Axis, mesh_entries
from ..patch.arguments import code_to_place
from ..patch.write import Change


class Words:
    """Says what changes of a program do, in the names of its arguments, lines and axes."""

    def __init__(self, facts: Facts):
        self._facts, self._replaced = facts, next_arguments(facts)
        is_found = facts.stages.has_mesh or facts.mesh is None or is_canonical_mesh(facts.mesh)
        self._mesh = '' if is_found else ', mesh=mesh'  # of an expression in the function

    def say(self, edits: Sequence[Edit]) -> str:
        """Returns what to write."""
        texts = [*dict.fromkeys(text for edit in edits if (text := self._edit(edit)))]
        moved, returned = self._placed(edits)
        # without out_shardings=, results are sharded like the arguments that they replace
        arguments, results = placements(edits)
        given = self._given('out_shardings')
        said = {
            self._facts.results[i].path
            for i in results
            if self._replaced.get(i, -1) not in arguments
            or (i < len(given) and isinstance(given[i], Sharding))
        }
        returned = {path: to for path, to in returned.items() if path in said}
        texts += [shard_text(each) for each in (moved, returned) if each]
        return ', and '.join(texts)

    def _given(self, name: str) -> Sequence[Any]:
        """The `in_shardings` or `out_shardings` of the jitted function."""
        call = self._facts.stages.call
        return () if call is None else call.eqn.params[name]

    def code_to_place(self, edits: Sequence[Edit]) -> list[str]:
        """Returns how to shard arguments and results, in words and as code to paste."""
        facts, (moved, returned) = self._facts, self._placed(edits)
        assert facts.mesh is not None
        mesh = '' if is_canonical_mesh(facts.mesh) else ', mesh=mesh'
        given, (arguments, _) = self._given('in_shardings'), placements(edits)
        specs = {facts.arguments[i].path: to.spec for i, to in arguments.items()}
        as_specs = f': {partition_text(specs)}' if mesh and specs else ''
        texts = [shard_text(moved or returned) + as_specs] if moved or returned else []
        call = '{name} = einshard({name}, {spec}' + mesh + ')'
        texts += code_to_place(moved, [each.path for each in facts.arguments], call)
        if any(isinstance(given[i], Sharding) for i in arguments if i < len(given)):
            texts.append('and in_shardings= of jax.jit, which has to be the same')
        if returned:
            paths = [each.path for each in facts.results]
            texts += code_to_place(returned, paths, '{name} = {spec}')
            pin = 'sharded(..., out=result), or out_shardings= of jax.jit'
            if facts.stages.is_equinox:  # eqx.filter_jit has no out_shardings=
                pin = f'return einshard(..., result{mesh})'
            texts.append(f'of the results: {pin}')
        through = [each for each in edits if isinstance(each, MoveThrough)]
        return texts + [self._through(each) for each in through if isinstance(each.what[1], int)]

    def change(self, edit: Edit) -> Change | None:
        """Returns a change of a value, as code can say it; None for other edits."""
        if isinstance(edit, MoveThrough) and not isinstance(path := edit.what[1], int):
            placement = self._placement(self._axes_at(path), edit.sharding)
            return Change('operand', path, edit.sharding, self._edit(edit), placement)
        if not isinstance(edit, _OF_PATH):
            return None
        kind = _KINDS[type(edit)]
        if isinstance(edit, RemoveConstraint):
            return Change(kind, edit.path, None, self._edit(edit))
        placement, mapped = self._seen(edit)
        missing = 'it is under jax.vmap' if mapped else ''
        return Change(kind, edit.path, edit.sharding, self._edit(edit), placement, missing)

    def _placed(self, edits: Sequence[Edit]) -> tuple[dict[str, str], dict[str, str]]:
        """The placements of arguments and of results, by path."""
        arguments, results = placements(edits)
        moved = {
            self._facts.arguments[i].path: self._placement(self._facts.axes_of_argument(i), to)
            for i, to in arguments.items()
        }
        returned = {
            self._facts.results[i].path: self._placement(self._axes_of_result(i), to)
            for i, to in results.items()
        }
        return moved, returned

    def sources(self, edits: Sequence[Edit]) -> set[str]:
        """Returns the lines that change."""
        return {edit.path[0].source for edit in edits if isinstance(edit, _OF_PATH)}

    def paths(self, edits: Sequence[Edit]) -> set[str]:
        """Returns the arguments and results that get new shardings."""
        arguments = {self._facts.arguments[i].path for i in indices(edits, 'argument')}
        return arguments | {self._facts.results[i].path for i in indices(edits, 'result')}

    def _edit(self, edit: Edit) -> str:
        if isinstance(edit, MoveThrough):
            return self._through(edit)
        if not isinstance(edit, _OF_PATH):
            return ''
        span, callers = edit.path[0], edit.path[1:2]
        line, source = short_source(span.source), source_of(span)
        called = [short_source(at.source) for at in callers if at.source != span.source]
        line += f', called at {called[0]}' if called else ''
        if isinstance(edit, RemoveConstraint):
            return f'remove {_asked(source)} in {line}'
        placement, mapped = self._seen(edit)
        if isinstance(edit, ReplaceConstraint):
            return f"change {_asked(source)} in {line} to '{placement}'{mapped}"
        what = short_code(span) or 'the value'
        return f"constrain {what} in {line}: einshard(..., '{placement}'{self._mesh}){mapped}"

    def _seen(self, edit: Constrain | ReplaceConstraint) -> tuple[str, str]:
        """The placement of a value as its expression sees it, and what else to write."""
        op = self._op_at(edit.path)
        ndim = len(op.results[0].shape) if op is not None else 0
        n_mapped = op.path.count('vmap(') if op is not None else 0
        axes = self._axes_at(edit.path)
        if not n_mapped or len(edit.sharding.spec) <= ndim - n_mapped:
            return self._placement(axes, edit.sharding), ''
        entries = mesh_entries(edit.sharding, ndim)
        mapped, others = entries[:n_mapped], entries[n_mapped:]
        assert self._facts.mesh is not None
        # spmd_axis_name= also shards what other constraints under the jax.vmap constrain, and the
        # mesh axes of the canonical mesh have no names that code can write
        if self._are_others_mapped(edit.path) or any(mapped[1:]) or any(others):
            return self._placement(axes, edit.sharding), ', with the axes that jax.vmap adds'
        if is_canonical_mesh(self._facts.mesh):
            return self._placement(axes, edit.sharding), ', with the axes that jax.vmap adds'
        names = mapped[0]
        name = repr(names[0] if len(names) == 1 else names)
        which = 'the jax.vmap' if n_mapped == 1 else 'the outermost jax.vmap'
        return '... -> ...', f', and spmd_axis_name={name} in {which} around it'

    def _are_others_mapped(self, path: Sequence[Span]) -> bool:
        """Whether constraints under `jax.vmap` stand elsewhere."""
        program = self._facts.propagation.program
        return program is not None and any(
            op.kind == CONSTRAINT and 'vmap(' in op.path and op.place != path[0].source
            for op in program.operations
        )

    def _through(self, edit: MoveThrough) -> str:
        """Says how to move a value through another placement."""
        kind, what = edit.what
        value, where, axes = '', '', tuple[Axis, ...]()
        if isinstance(what, int):
            array = (self._facts.arguments if kind == 'argument' else self._facts.results)[what]
            is_in = kind == 'argument'
            axes = self._facts.axes_of_argument(what) if is_in else self._axes_of_result(what)
            where = 'at the start of the function' if is_in else 'before the function returns'
            value = array.path if array.path.isidentifier() else ''
            where += '' if value else f', for {array.path}'
        else:
            axes, where = self._axes_at(what), f'before {short_source(next(iter(what)).source)}'
            value = _constrained(source_of(next(iter(what))) or '')
        assigned = f'{value} = ' if value else ''
        placement = self._placement(axes, edit.sharding)
        call = f"einshard({value or '...'}, '{placement}'{self._mesh})"
        return f'reshard in two steps, {where}: {assigned}{call}'

    def _axes_of_result(self, i: int) -> Axes:
        array = self._facts.results[i]
        if array.names is None and i in self._replaced:
            return self._facts.axes_of_argument(self._replaced[i])
        return tuple(Axis(name) for name in array.names or [''] * len(array.shape))

    def _op_at(self, path: Sequence[Span]) -> Operation | None:
        """The operation that computes the value of an expression, or None if it is unknown."""
        program, span = self._facts.propagation.program, path[0]
        # the last one: others of a lookup compute its indices
        for op in () if program is None else reversed(program.operations):
            frame = op.frame
            is_here = frame is not None and frame[:3] == (span.file, span.line, span.column + 1)
            if is_here and op.is_forward and op.results and op.results[0].shape:
                return op
        return None

    def _axes_at(self, path: Sequence[Span]) -> Axes:
        """The axes of the value of an expression; () if it is unknown."""
        op = self._op_at(path)
        return () if op is None else tuple(map(Axis, self._facts.axis_names.get(op.results[0], ())))

    def _placement(self, axes: Axes, sharding: NamedSharding) -> str:
        assert self._facts.mesh is not None
        n = len(sharding.spec)
        axes = ((Axis(),) * n + axes)[-n:] if len(axes) != n and n else axes
        entries = mesh_entries(sharding, len(axes))
        pairs = zip(axes, entries, strict=True)
        moved = [replace(axis, mesh_axes=entry) for axis, entry in pairs]
        return expression_of(moved, self._facts.mesh)


def _call(source: str) -> ast.Call | None:
    try:
        call = ast.parse(source, mode='eval').body
    except SyntaxError:
        return None
    return call if isinstance(call, ast.Call) else None


def _constrained(source: str) -> str:
    """The variable that a call constrains, or ''."""
    call = _call(source)
    first = call.args[0] if call is not None and call.args else None
    return first.id if isinstance(first, ast.Name) else ''


def _asked(source: str | None) -> str:
    """What asks for a placement in the code: on Explicit axes also `out_sharding=`."""
    call = _call(source or '')
    if call is not None and any(each.arg == 'out_sharding' for each in call.keywords):
        return 'out_sharding='
    name = '' if call is None else ast.unparse(call.func).rpartition('.')[2]
    return 'the reshard' if name == 'reshard' else 'the constraint'


_OF_PATH = (Constrain, ReplaceConstraint, RemoveConstraint)
_KINDS: Any = {Constrain: 'constrain', ReplaceConstraint: 'replace', RemoveConstraint: 'remove'}


def replaced_strategy(facts: Facts, edits: Sequence[Edit]) -> str:
    """Returns the mesh axis of tensor parallelism that changes give up, or ''.

    Such an axis shards weights and no data; with the changes, it shards data or no weights.
    """
    moved, _ = placements(edits)
    weights = facts.multiplied - facts.data
    before = {i: facts.axes_of_argument(i) for i in range(len(facts.arguments))}

    def names(i: int, with_edits: bool) -> set[str]:
        if not with_edits or i not in moved:
            return {name for axis in before[i] for name in axis.mesh_axes}
        entries = mesh_entries(moved[i], len(before[i]))
        return {name for entry in entries for name in entry}

    def tensor_axes(with_edits: bool) -> set[str]:
        of_weights = {name for i in weights for name in names(i, with_edits)}
        return of_weights - {name for i in facts.data for name in names(i, with_edits)}

    gone = tensor_axes(False) - tensor_axes(True)
    return min(gone, default='')


def strategy_text(facts: Facts, edits: Sequence[Edit]) -> str:
    """Says if changes give up tensor parallelism."""
    axis = replaced_strategy(facts, edits)
    return f'this replaces tensor parallelism along {axis} by data parallelism' if axis else ''


def pin_text(facts: Facts, it: str, placements: str) -> str:
    """Says how to place results.

    `eqx.filter_jit` has no `out_shardings=`, and that of `nnx.jit` does not place what is updated.
    """
    if facts.stages.is_equinox or facts.stages.framework == 'nnx':
        return f'constrain {it} with einshard before the function returns: {placements}'
    return f'pin {it} with out= or out_shardings=: {placements}'
