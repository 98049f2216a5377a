"""Flattens a jaxpr, including loop bodies and nested calls, into a list of operations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._sharding.mesh import UNCONSTRAINED, spec_axes
from .links import Relation, Shape, relate


@dataclass(slots=True)
class Value:
    """An array in a program; in a loop body, it stands for the arrays of all iterations.

    Attributes:
        spec: the mesh axes of each array axis, if the value is the result of a sharding constraint.
    """

    shape: Shape
    dtype: Any
    spec: tuple[tuple[str, ...], ...] | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * getattr(self.dtype, 'itemsize', 4)


@dataclass(slots=True)
class Op:
    """An operation in a program.

    Attributes:
        primitive: the name of a JAX primitive; or, for operations that connect a loop with its
            body, 'scan_input', 'scan_output', 'scan_axis' or 'carry'. 'carry' also connects the
            branches of a `cond` with its result.
        ins, outs: operands and results, as indices into `Program.values`; None for a scalar.
        executions: the product of the trip counts of the loops around it; those of while loops,
            which are unknown, count as 1.
        scope: the id of the innermost loop around it; 0 outside loops.
        scan: for 'scan_input' and 'scan_output', the id of the loop that they connect; else 0.
    """

    primitive: str
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    relation: Relation
    executions: int = 1
    scope: int = 0
    scan: int = 0

    @property
    def arrays_in(self) -> list[int]:
        return [value for value in self.ins if value is not None]

    @property
    def arrays_out(self) -> list[int]:
        return [value for value in self.outs if value is not None]


@dataclass(slots=True)
class Program:
    """A program whose loops, branches and calls are flattened.

    Attributes:
        values: all arrays; operations refer to them by index.
        parents: for each loop id, the id of the loop around it; 0 if there is none.
        arguments, results: indices into `values`; None for a scalar.
    """

    values: list[Value] = field(default_factory=list[Value])
    parents: list[int] = field(default_factory=lambda: [0])
    ops: list[Op] = field(default_factory=list[Op])
    arguments: list[int | None] = field(default_factory=list[int | None])
    results: list[int | None] = field(default_factory=list[int | None])


def flatten(closed: Any) -> Program:
    """Flattens a ClosedJaxpr, and removes operations whose results are not used."""
    reader = _Reader()
    jaxpr = _open(closed)
    program = reader.program
    program.arguments = reader.new_values(jaxpr.invars)
    program.results = reader.read(jaxpr, program.arguments)
    program.ops = _used_ops(program)
    return program


class _Reader:
    """Reads jaxprs into one program.

    `executions` and `scope` are those of the operations that are added next.
    """

    def __init__(self) -> None:
        self.program = Program()
        self.executions = 1
        self.scope = 0
        self.n_scopes = 0

    def new_value(self, aval: Any) -> int | None:
        """Adds a value and returns its index; None for a scalar or a value without a shape."""
        shape = getattr(aval, 'shape', ())
        if not shape:
            return None
        self.program.values.append(Value(tuple(map(int, shape)), aval.dtype))
        return len(self.program.values) - 1

    def new_values(self, variables: Sequence[Any]) -> list[int | None]:
        return [self.new_value(variable.aval) for variable in variables]

    def read(self, jaxpr: Any, arguments: Sequence[int | None]) -> list[int | None]:
        """Adds the operations of a jaxpr, called with `arguments`; returns its results."""
        constants = self.new_values(jaxpr.constvars)
        env: dict[Any, int | None] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True)
        )

        def value_of(atom: Any) -> int | None:
            if hasattr(atom, 'val'):  # a literal
                return self.new_value(atom.aval)
            return env[atom]

        for eqn in jaxpr.eqns:
            ins = [value_of(atom) for atom in eqn.invars]
            outs = self.equation(eqn, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        name, params = eqn.primitive.name, eqn.params
        if name == 'scan':
            return self.scan(eqn, ins)
        if name == 'while':
            return self.while_loop(eqn, ins)
        if name == 'cond':
            return self.cond(eqn, ins)
        # calls such as jit are inlined; a Pallas kernel is not, because its body works on blocks
        body = next(_nested_jaxprs(params), None)
        if body is not None and len(body.invars) == len(ins) and name != 'pallas_call':
            results = self.read(body, ins)
            if len(results) == len(eqn.outvars):
                return results
        outs = self.new_values(eqn.outvars)
        if name == 'sharding_constraint':
            self.constrain(outs[0], params['sharding'])
        relation = relate(name, params, list(map(self.shape, ins)), list(map(self.shape, outs)))
        self.append(Op(name, tuple(ins), tuple(outs), relation))
        return outs

    def constrain(self, value: int | None, sharding: Any) -> None:
        spec = getattr(sharding, 'spec', None)
        if value is not None and spec is not None:
            self.program.values[value].spec = entries_of(spec, self.shape(value))

    def append(self, op: Op) -> None:
        op.executions, op.scope = self.executions, self.scope
        self.program.ops.append(op)

    def connect(
        self, name: str, old: int | None, new: int | None, skip: tuple[int, int], scan: int = 0
    ) -> None:
        """Adds an operation that passes a value into or out of a loop, or to its next iteration.

        Args:
            skip: how many leading axes of `old` and of `new` have no counterpart in the other.
            scan: the id of the loop, if its iterations slice or stack the value.
        """
        if old is None or new is None:
            return
        n = min(len(self.shape(old)) - skip[0], len(self.shape(new)) - skip[1])
        links = tuple((0, d + skip[0], 0, d + skip[1]) for d in range(n))
        # every device runs all iterations, so it needs all of the scanned axis
        unsharded = ((0, 0),) if name == 'scan_input' else ()
        self.append(Op(name, (old,), (new,), Relation(links, unsharded=unsharded), scan=scan))

    def carry(self, values: Sequence[int | None], targets: Sequence[int | None]) -> None:
        """Passes values into or out of a loop or branch, or to the next iteration."""
        for old, new in zip(values, targets, strict=True):
            self.connect('carry', old, new, (0, 0))

    def shape(self, value: int | None) -> Shape:
        return () if value is None else self.program.values[value].shape

    def scan(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        body, length = _open(eqn.params['jaxpr']), eqn.params['length']
        # JAX 0.12 has no `num_consts` and `num_carry`, so this counts by rank: in the body, scanned
        # and stacked arrays have one axis fewer than outside; constants and the carry do not
        n_carry = sum(map(_has_same_rank, body.outvars, eqn.outvars))
        n_unscanned = sum(map(_has_same_rank, body.invars, eqn.invars))
        n_consts = n_unscanned - n_carry
        outs = self.new_values(eqn.outvars)
        loop = self.n_scopes + 1  # the id that `read_loop` gives the loop
        inner = self.new_values(body.invars)
        inner[:n_consts] = ins[:n_consts]
        self.carry(ins[n_consts:n_unscanned], inner[n_consts:n_unscanned])
        for old, new in zip(ins[n_unscanned:], inner[n_unscanned:], strict=True):
            self.connect('scan_input', old, new, (1, 0), loop)
        results = self.read_loop(body, inner, length)
        self.carry(results[:n_carry], inner[n_consts:n_unscanned])
        self.carry(results[:n_carry], outs[:n_carry])
        for old, new in zip(results[n_carry:], outs[n_carry:], strict=True):
            self.connect('scan_output', old, new, (0, 1), loop)
        # the first axis of scanned inputs and stacked outputs is the same: the iterations
        scanned = next((value for value in ins[n_unscanned:] if value is not None), None)
        for new in outs[n_carry:]:
            if scanned is not None and new is not None:
                self.append(Op('scan_axis', (scanned,), (new,), Relation(((0, 0, 0, 0),))))
        return outs

    def while_loop(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        params = eqn.params
        n_cond, n_body = params['cond_nconsts'], params['body_nconsts']
        body = _open(params['body_jaxpr'])
        consts, carry = ins[n_cond : n_cond + n_body], ins[n_cond + n_body :]
        inner = self.new_values(body.invars[n_body:])
        outs = self.new_values(eqn.outvars)
        self.carry(carry, inner)
        results = self.read_loop(body, [*consts, *inner], 1)  # the trip count is unknown
        self.carry(results, inner)
        self.carry(results, outs)
        return outs

    def cond(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        outs = self.new_values(eqn.outvars)
        for branch in map(_open, eqn.params['branches']):
            results = self.read(branch, ins[1:])
            self.carry(results, outs)
        return outs

    def read_loop(
        self, jaxpr: Any, arguments: Sequence[int | None], length: int
    ) -> list[int | None]:
        """Adds the operations of a loop body that runs `length` times; returns its results."""
        outside = self.executions, self.scope
        self.n_scopes += 1
        self.program.parents.append(self.scope)
        self.executions, self.scope = self.executions * length, self.n_scopes
        results = self.read(jaxpr, arguments)
        self.executions, self.scope = outside
        return results


def _nested_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    opened = map(_open, params.values())
    return (value for value in opened if hasattr(value, 'eqns') and hasattr(value, 'invars'))


def _open(jaxpr: Any) -> Any:
    """Returns the jaxpr of a ClosedJaxpr; anything else unchanged."""
    return getattr(jaxpr, 'jaxpr', jaxpr)


def _has_same_rank(one: Any, other: Any) -> bool:
    shapes = [getattr(atom.aval, 'shape', ()) for atom in (one, other)]
    return len(shapes[0]) == len(shapes[1])


def entries_of(spec: Any, shape: Shape) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes over which a PartitionSpec shards each axis of an array."""
    entries = [() if entry == UNCONSTRAINED else entry for entry in spec_axes(spec)]
    entries += [()] * (len(shape) - len(entries))
    return tuple(tuple(map(str, entry)) for entry in entries)


def _used_ops(program: Program) -> list[Op]:
    used: set[int | None] = {value for value in program.results if value is not None}
    kept: set[int] = set()
    # repeated, because a result in a loop body may be used only in the next iteration
    n_before = -1
    while len(kept) > n_before:
        n_before = len(kept)
        for i in range(len(program.ops) - 1, -1, -1):
            op = program.ops[i]
            if i not in kept and any(value in used for value in op.outs):
                kept.add(i)
                if op.primitive != 'scan_axis':  # 'scan_axis' links axes, but uses no value
                    used.update(op.arrays_in)
    return [op for i, op in enumerate(program.ops) if i in kept]
