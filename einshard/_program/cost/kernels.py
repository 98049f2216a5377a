"""Kernels: parts of a program whose costs the user declares, in place of what is compiled."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..hlo.text import Instruction
from ..jaxpr.graph import FlatJaxpr, Op

_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a kernel costs a device.

    Attributes:
        flops, bytes: of one call. The bytes are those that it reads from and writes to HBM.
        calls: the calls of a `jax.named_scope` in one run; None if it is a custom call.
    """

    flops: float
    bytes: float
    calls: int | None = None


def target_of(op: Instruction) -> str:
    """Returns the target of a custom call, or ''."""
    match = _TARGET.search(op.attributes) if op.opcode == 'custom-call' else None
    return match[1] if match else ''


def scope_of(path: str, names: Collection[str]) -> str:
    """Returns the innermost of the named scopes that an operation is in, or ''.

    Operations of a backward pass, which computes cotangents, are in 'transpose(name)'.

        >>> from einshard._program.cost.kernels import scope_of
        >>> scope_of('jit(f)/jvp(layer)/flash/dot_general', ['flash', 'transpose(flash)'])
        'flash'
        >>> scope_of('jit(f)/transpose(jvp(flash))/mul', ['flash', 'transpose(flash)'])
        'transpose(flash)'
    """
    for name in reversed(scopes_in(path)):
        if name in names:
            return name
    return ''


def scopes_in(path: str) -> list[str]:
    """Returns the components of a path without `jvp` and `vmap`, outermost first."""
    # what is recomputed for a backward pass is forward
    is_backward = path.rfind('transpose(') > path.rfind('rematted_computation')
    names = (part.rstrip(')').rpartition('(')[2] for part in path.split('/'))
    return [f'transpose({name})' if is_backward else name for name in names if name]


def count_calls(program: FlatJaxpr, names: Collection[str]) -> Mapping[str, int]:
    """Returns how often each scope is entered in one run.

    The operations of one call follow one another, and so may those of several: at least one line
    runs once in each. A loop of unknown length counts as one iteration.
    """
    calls: Counter[str] = Counter()
    for (name, _), group in itertools.groupby(_scopes(program, names), lambda each: each[0]):
        ops = [op for _, op in group]
        runs = min(op.site.runs or 1 for op in ops)
        outer = (op for op in ops if (op.site.runs or 1) == runs)
        lines = Counter((op.primitive, op.site.frames[:1]) for op in outer)
        calls[name] += runs * min(lines.values()) if name else 0
    return calls


def scopes_of(program: FlatJaxpr) -> set[str]:
    """Returns all named scopes, and what else is a component of a path."""
    return {name for _, parts in _paths(program) for name in scopes_in('/'.join(parts))}


def _scopes(program: FlatJaxpr, names: Collection[str]) -> Iterator[tuple[tuple[str, Any], Op]]:
    """Yields each operation with its scope, and the calls and loops around that."""
    for op, parts in _paths(program):
        if name := scope_of('/'.join(parts), names):
            n = sum(
                scope_of('/'.join(parts[: i + 1]), names) != name for i in range(len(parts) - 1)
            )
            yield (name, tuple(map(id, op.site.calls[:n]))), op
        else:
            yield ('', None), op


def _paths(program: FlatJaxpr) -> Iterator[tuple[Op, list[str]]]:
    """Yields each operation with the name stacks of the calls around it, and its own."""
    for op in program.ops:
        # 'carry', 'scan_input' and the like pass values into and out of what is called
        if op.eqn is not None and op.eqn.primitive.name == op.primitive:
            yield op, [str(eqn.source_info.name_stack) for eqn in (*op.site.calls, op.eqn)]
