"""Flattens a jaxpr, with the bodies of its loops and nested functions, to a list of operations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._sharding.mesh import UNCONSTRAINED, spec_axes
from .links import Relation, Shape, relate


@dataclass(slots=True)
class Value:
    """An array of the program; in the body of a loop, it stands for those of all iterations.

    Attributes:
        spec: the mesh axes of each array axis, from a sharding constraint; None without one.
    """

    shape: Shape
    dtype: Any
    spec: tuple[tuple[str, ...], ...] | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * getattr(self.dtype, 'itemsize', 4)


@dataclass(slots=True)
class Op:
    """An operation of the program.

    Attributes:
        primitive: the name of its JAX primitive; or 'scan_input', 'scan_output', 'scan_axis' or
            'carry', which connect a loop with its body, and branches with the result of a `cond`.
        ins, outs: operands and results, as indices into `Program.values`; None for a scalar.
        executions: how often it runs: the product of the lengths of the scans around it. A while
            loop counts as one iteration.
        scope: the number of the innermost loop around it; 0 outside of loops.
        body: the number of the loop that a 'scan_input' or 'scan_output' belongs to; else 0.
    """

    primitive: str
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    relation: Relation
    executions: int = 1
    scope: int = 0
    body: int = 0

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
        ops: in program order.
        parents: for each scope, the number of the scope around it.
        arguments, results: indices into `values`; None for a scalar.
    """

    values: list[Value] = field(default_factory=list[Value])
    parents: list[int] = field(default_factory=lambda: [0])
    ops: list[Op] = field(default_factory=list[Op])
    arguments: list[int | None] = field(default_factory=list[int | None])
    results: list[int | None] = field(default_factory=list[int | None])


def flatten(closed: Any) -> Program:
    """Flattens a ClosedJaxpr; leaves out operations whose results are not used."""
    reader = _Reader()
    jaxpr = _open(closed)
    program = reader.program
    program.arguments = reader.new_values(jaxpr.invars)
    program.results = reader.read(jaxpr, program.arguments)
    program.ops = _used(program)
    return program


class _Reader:
    """Reads jaxprs into one program.

    Attributes:
        executions, scope: those of the operations that it adds next, as in `Op`.
    """

    def __init__(self) -> None:
        self.program = Program()
        self.executions = 1
        self.scope = 0
        self.n_scopes = 0

    def new(self, aval: Any) -> int | None:
        """Adds a value and returns its number; None for a scalar or a value without a shape."""
        shape = getattr(aval, 'shape', ())
        if not shape:
            return None
        self.program.values.append(Value(tuple(map(int, shape)), aval.dtype))
        return len(self.program.values) - 1

    def new_values(self, variables: Sequence[Any]) -> list[int | None]:
        return [self.new(variable.aval) for variable in variables]

    def read(self, jaxpr: Any, arguments: Sequence[int | None]) -> list[int | None]:
        """Adds the operations of a jaxpr whose arguments are these values; returns the results."""
        constants = self.new_values(jaxpr.constvars)
        env: dict[Any, int | None] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True)
        )

        def value_of(atom: Any) -> int | None:
            if hasattr(atom, 'val'):  # a literal
                return self.new(atom.aval)
            return env[atom]

        for eqn in jaxpr.eqns:
            ins = [value_of(atom) for atom in eqn.invars]
            outs = self.equation(eqn, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        """Adds the operations of an equation with these operands; returns the results."""
        name, params = eqn.primitive.name, eqn.params
        if name == 'scan':
            return self.scan(eqn, ins)
        if name == 'while':
            return self.while_loop(eqn, ins)
        if name == 'cond':
            return self.cond(eqn, ins)
        # a nested function such as jit; the body of a Pallas kernel has blocks instead of arrays
        body = next(_bodies(params), None)
        if body is not None and len(body.invars) == len(ins) and name != 'pallas_call':
            found = self.read(body, ins)
            if len(found) == len(eqn.outvars):
                return found
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
        self, name: str, old: int | None, new: int | None, shift: tuple[int, int], body: int = 0
    ) -> None:
        """Adds an operation that passes a value into or out of a loop, or to the next iteration.

        Args:
            shift: the first axis to link, of the old and of the new value.
            body: the number of the loop, if its iterations slice or stack the value.
        """
        if old is None or new is None:
            return
        n = min(len(self.shape(old)) - shift[0], len(self.shape(new)) - shift[1])
        links = tuple((0, d + shift[0], 0, d + shift[1]) for d in range(n))
        # every device runs all iterations, so it needs the scanned axis in full
        unsharded = ((0, 0),) if name == 'scan_input' else ()
        self.append(Op(name, (old,), (new,), Relation(links, unsharded=unsharded), body=body))

    def carry(self, olds: Sequence[int | None], news: Sequence[int | None]) -> None:
        """Connects values that enter or leave a loop or branch, or go to the next iteration."""
        for old, new in zip(olds, news, strict=True):
            self.connect('carry', old, new, (0, 0))

    def shape(self, value: int | None) -> Shape:
        return () if value is None else self.program.values[value].shape

    def scan(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        body, length = _open(eqn.params['jaxpr']), eqn.params['length']
        # JAX 0.12 has no `num_consts` and `num_carry`; outside of the body, what is scanned over or
        # stacked has one more axis, so variables of the same rank are constants or carried
        n_carry = sum(map(_same_rank, body.outvars, eqn.outvars))
        n_before = sum(map(_same_rank, body.invars, eqn.invars))
        n_consts = n_before - n_carry
        outs = self.new_values(eqn.outvars)
        loop = self.n_scopes + 1  # the number that `read_loop` gives the body
        inner = self.new_values(body.invars)
        inner[:n_consts] = ins[:n_consts]
        self.carry(ins[n_consts:n_before], inner[n_consts:n_before])
        for old, new in zip(ins[n_before:], inner[n_before:], strict=True):
            self.connect('scan_input', old, new, (1, 0), loop)
        found = self.read_loop(body, inner, length)
        self.carry(found[:n_carry], inner[n_consts:n_before])
        self.carry(found[:n_carry], outs[:n_carry])
        for old, new in zip(found[n_carry:], outs[n_carry:], strict=True):
            self.connect('scan_output', old, new, (0, 1), loop)
        # the first axis of stacked and of scanned arrays is the same: the iterations
        scanned = next((value for value in ins[n_before:] if value is not None), None)
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
        found = self.read_loop(body, [*consts, *inner], 1)  # the number of iterations is unknown
        self.carry(found, inner)
        self.carry(found, outs)
        return outs

    def cond(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        outs = self.new_values(eqn.outvars)
        for branch in map(_open, eqn.params['branches']):
            found = self.read(branch, ins[1:])
            self.carry(found, outs)
        return outs

    def read_loop(
        self, jaxpr: Any, arguments: Sequence[int | None], length: int
    ) -> list[int | None]:
        """Adds the operations of a loop body, each executed `length` times; returns the results."""
        outside = self.executions, self.scope
        self.n_scopes += 1
        self.program.parents.append(self.scope)
        self.executions, self.scope = self.executions * length, self.n_scopes
        found = self.read(jaxpr, arguments)
        self.executions, self.scope = outside
        return found


def _bodies(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the jaxprs in the parameters of an equation."""
    opened = map(_open, params.values())
    return (value for value in opened if hasattr(value, 'eqns') and hasattr(value, 'invars'))


def _open(jaxpr: Any) -> Any:
    """Returns the jaxpr in a ClosedJaxpr; anything else as it is."""
    return getattr(jaxpr, 'jaxpr', jaxpr)


def _same_rank(one: Any, other: Any) -> bool:
    shapes = [getattr(atom.aval, 'shape', ()) for atom in (one, other)]
    return len(shapes[0]) == len(shapes[1])


def entries_of(spec: Any, shape: Shape) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes of every array axis of a PartitionSpec."""
    entries = [() if entry == UNCONSTRAINED else entry for entry in spec_axes(spec)]
    entries += [()] * (len(shape) - len(entries))
    return tuple(tuple(map(str, entry)) for entry in entries)


def _used(program: Program) -> list[Op]:
    """Returns the operations whose results are used."""
    used: set[int | None] = {value for value in program.results if value is not None}
    kept: set[int] = set()
    # repeated, because an operation of a loop body may be used only in the next iteration
    n_before = -1
    while len(kept) > n_before:
        n_before = len(kept)
        for i in range(len(program.ops) - 1, -1, -1):
            op = program.ops[i]
            if i not in kept and any(value in used for value in op.outs):
                kept.add(i)
                if op.primitive != 'scan_axis':  # it links axes, and reads no data
                    used.update(op.arrays_in)
    return [op for i, op in enumerate(program.ops) if i in kept]
