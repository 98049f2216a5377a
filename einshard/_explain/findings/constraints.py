"""Finds constraints without effect, and constraints whose names have no axis rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from jax.sharding import AbstractMesh, AxisType, NamedSharding

from ..._program.jaxpr.graph import FlatJaxpr
from ..._program.jaxpr.names import names_in
from ..._program.jaxpr.spans import Frames, Span
from ..._program.traced.conflicts import DROPPED, Conflict
from ..._program.traced.propagated import CONSTRAINT, Operation, axis_names, name_of
from ..._sharding.describe import describe_named
from ..._text import first_of
from ..report_rows import Finding
from .expressions import expression_of
from .facts import Facts
from .values import Axis

_Stack: TypeAlias = tuple[Span, ...]
_RESULT_UNUSED = 'the result of this constraint is not used; assign it: x = einshard(x, ...)'
_DEVICE_PUT = (
    'jax.device_put has no effect in a jitted function; use einshard or '
    'jax.lax.with_sharding_constraint'
)
_MEMORY_KIND_DROPPED = (
    'jax.device_put has no effect here: GPUs that JAX describes have no memories, so it drops '
    "memory_kind=. For host memory, use jax.memory.Space.Host, or einshard with '(in "
    "pinned_host)'; for another sharding, einshard or jax.lax.with_sharding_constraint"
)


def unused_constraints(facts: Facts) -> Iterator[Finding]:
    """Reports constraints whose result is unused, and `jax.device_put` to Auto mesh axes."""
    return (finding for finding, is_repeated in _no_effect(facts) if not is_repeated)


def repeated_constraints(facts: Facts) -> Iterator[Finding]:
    """Notes constraints that repeat the sharding of an argument or of another constraint.

    Constraints that match the compiler's own choice are not detected.
    """
    return (finding for finding, is_repeated in _no_effect(facts) if is_repeated)


def _no_effect(facts: Facts) -> Iterator[tuple[Finding, bool]]:
    """Yields (finding, is_repeated) for constraints without effect, at most one for each line.

    A constraint is unused if it is unused wherever it occurs with the same call stack: in its
    forward and its backward pass, for example. Others are yielded only if no constraint on their
    line has an effect. `is_repeated` says whether the constrained value already has the sharding of
    the constraint.
    """
    if facts.traced is None:
        return
    specified = _arguments_with_sharding(facts)
    pairs = enumerate(zip(facts.traced.arguments, facts.arguments, strict=False))
    shardings = {v: array.sharding for i, (v, array) in pairs if i in specified and v is not None}
    by_stack: dict[_Stack, list[str | None]] = {}
    for stack, reason in _constraints(facts.traced, shardings):
        by_stack.setdefault(stack, []).append(reason)
    unused: list[_Stack] = []
    others: dict[str, list[_Stack]] = {}
    for stack, reasons in by_stack.items():
        is_unused = set(reasons) == {_RESULT_UNUSED}
        (unused if is_unused else others.setdefault(_line(stack), [])).append(stack)
    unused_lines = (_line_of_unused(stack, others.get(_line(stack), ())) for stack in unused)
    for line in dict.fromkeys(unused_lines):
        yield Finding('no effect', _RESULT_UNUSED, line or None), False
    for line, stacks in others.items():
        several = [reason for stack in stacks for reason in by_stack[stack]]
        reason = several[-1]
        if reason is not None and None not in several:
            is_repeated = reason not in (_RESULT_UNUSED, _DEVICE_PUT, _MEMORY_KIND_DROPPED)
            yield Finding('no effect', reason, line or None), is_repeated


def _arguments_with_sharding(facts: Facts) -> set[int]:
    """Returns the indices of the arguments whose sharding the user specified.

    The compiler chooses the other shardings, often because of a constraint.
    """
    module: Any = facts.stages.lower().compiler_ir()  # JAX caches the lowered program
    (main,) = (op for op in module.body.operations if op.attributes['sym_name'].value == 'main')
    # the first inputs may be effect tokens or constants
    attributes = [*main.arg_attrs][-len(facts.used_arguments) :]
    pairs = zip(facts.used_arguments, attributes, strict=False)
    return {i for i, names in pairs if 'sdy.sharding' in names or 'mhlo.sharding' in names}


def _line_of_unused(stack: _Stack, others: Sequence[_Stack]) -> str:
    """Returns the line of an unused constraint, or of the call of a helper function that has it.

    It is the innermost frame that differs from those of `others`, which are on the same line.
    """
    n_same = 0
    for other in others:
        pairs = enumerate(zip(stack, other, strict=False))
        n_same = max(n_same, next((i for i, (a, b) in pairs if a != b), 0))
    return _line(stack[n_same:])


def _line(stack: _Stack) -> str:
    return stack[0].source if stack else ''


def _constraints(
    traced: FlatJaxpr, shardings: dict[int, Any]
) -> Iterator[tuple[_Stack, str | None]]:
    """Yields (stack, reason) for each constraint without effect, and (stack, None) for others.

    Also yields each `jax.device_put` without effect. `shardings` has those of arguments, by the
    index of the value; this function adds those of constrained values.
    """
    used = {v for op in traced.ops for v in op.arrays_in}
    used.update(v for v in traced.results if v is not None)
    frames = Frames()
    for op in traced.ops:
        if op.primitive not in ('sharding_constraint', 'reshard', 'device_put'):
            continue
        params, stack = op.eqn.params, op.site.frames
        if op.primitive == 'device_put':
            targets = [s for s in params['devices'] if isinstance(s, NamedSharding)]
            pairs = zip(op.eqn.invars, op.eqn.outvars, strict=True)
            is_moved = any(v.aval.memory_space != new.aval.memory_space for v, new in pairs)
            if targets and not is_moved and all(map(_has_no_effect_in_jit, targets)):
                is_dropped = all(
                    s.memory_kind is None and not isinstance(s.mesh, AbstractMesh) for s in targets
                )
                yield stack, _MEMORY_KIND_DROPPED if is_dropped else _DEVICE_PUT
            continue
        before, result = op.ins[0], op.outs[0]
        if before is None or result is None:  # a scalar
            continue
        is_unused = result not in used
        if op.primitive == 'reshard':
            # reshards of JAX have no frames; on meshes with Auto axes, einshard also constrains
            is_explicit = {*params['dst_sharding'].mesh.axis_types} == {AxisType.Explicit}
            if is_explicit and frames.of(op.eqn):
                yield stack, _RESULT_UNUSED if is_unused else None
            continue
        sharding, ndim, reason = params['sharding'], len(traced.values[result].shape), None
        if is_unused:
            reason = _RESULT_UNUSED
        elif before in shardings and (
            (old := shardings[before]) == sharding or old.is_equivalent_to(sharding, ndim)
        ):
            text = sharding
            if isinstance(sharding, NamedSharding):
                text = describe_named(sharding, ndim)
            reason = f"the value is already '{text}', so this constraint has no effect"
        shardings[result] = sharding
        yield stack, reason


def _has_no_effect_in_jit(sharding: NamedSharding) -> bool:
    has_only_auto_axes = set(sharding.mesh.axis_types) == {AxisType.Auto}
    return has_only_auto_axes and sharding.memory_kind in (None, 'device')


# --- names without a rule -----------------------------------------------------------------------


def names_without_rule(facts: Facts) -> Iterator[Finding]:
    """Reports constraints that gather a sharded axis because no axis rule has its name."""
    program, mesh = facts.propagation.program, facts.mesh
    if program is None or mesh is None:
        return
    # {constraint: {axis of its value: the mesh axes that it drops}}
    dropped: dict[Operation, dict[int, list[str]]] = {}
    constraints = [op for op in program.operations if op.kind == CONSTRAINT]
    makers = [op.operands[0].producer for op in constraints]
    near = [op for op in (*constraints, *makers) if op is not None]
    own = [
        c for op in near for v in op.operands for a in axis_names(v) for c in facts.conflicts(op, a)
    ]
    earlier = [conflict for reason in facts.reasons.values() for conflict in reason.conflicts]
    for conflict in dict.fromkeys([*own, *earlier]):
        for op, dim in _constraints_that_drop(conflict):
            dropped.setdefault(op, {}).setdefault(dim, []).append(name_of(conflict.axis))
    for op, by_dim in dropped.items():
        names, after = names_in(op.path), op.results[0]
        if names is None or not names.without_rule:
            continue
        known = facts.axis_names.get(after, ())
        # a rule may shard another axis over these mesh axes
        kept = {*axis_names(after)}
        sharded = [
            known[dim]
            for dim, axes in sorted(by_dim.items())
            if kept.isdisjoint(axes) and dim < len(known) and known[dim] in names.without_rule
        ]
        if not sharded:
            continue
        entries = after.axes or ((),) * len(after.shape)
        axes = [
            Axis(name, tuple(dict.fromkeys([*map(name_of, axes), *by_dim.get(dim, ())])))
            for dim, (name, axes) in enumerate(zip(known, entries, strict=True))
        ]
        gathers = [c for c in facts.unexplained if (c.source or '') == op.place]
        yield Finding.about(
            'names without a rule',
            f'{first_of([repr(name) for name in sharded], 3)} '
            f'{"has" if len(sharded) == 1 else "have"} no axis rule, so this constraint gathers '
            f'{"this axis" if len(sharded) == 1 else "these axes"} of a value that is sharded as '
            f"'{expression_of(axes, mesh)}'",
            gathers,
            op.place,
        )


def _constraints_that_drop(conflict: Conflict) -> Iterator[tuple[Operation, int]]:
    """Yields the constraints because of which a value loses a mesh axis, with the axis of theirs.

    The sharding of a constraint propagates backwards, so the value may lose it earlier.
    """
    op, dim = conflict.operation, conflict.value.dimension(conflict.axis)
    if dim is None or not op.is_forward:
        return
    if op.kind == CONSTRAINT:
        yield op, dim
    elif conflict.kind == DROPPED and op.rule is not None:
        factors = op.rule.tensors[conflict.position][dim]
        for i in conflict.others:
            for user, _ in op.values[i].users:
                if user.kind == CONSTRAINT:
                    yield from (
                        (user, d)
                        for d, several in enumerate(op.rule.tensors[i])
                        if {*several} & {*factors}
                    )
