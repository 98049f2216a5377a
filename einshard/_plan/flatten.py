"""Flattens a jaxpr, including loop bodies and nested calls, into a list of operations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._sharding.mesh import UNCONSTRAINED, spec_axes
from .op_sharding_rule import OpShardingRule, Shape, op_sharding_rule


@dataclass(slots=True)
class Value:
    """An array in a program.

    A value in a loop body represents the arrays of all iterations.

    Attributes:
        spec: the mesh axes of each array axis if a sharding constraint returns the value.
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
        primitive: the name of a JAX primitive, or one of four others. 'carry', 'scan_input' and
            'scan_output' pass values between a loop and its body, and 'carry' also passes the
            results of the branches of a `cond`. 'scan_axis' links the scanned axis of an input of
            a scan to that of an output.
        ins, outs: the indices of operands and results in `Program.values`; None for a scalar.
        executions: the product of the trip counts of the loops around the operation. A while loop
            counts as one iteration, because its trip count is unknown.
        loop: the id of the innermost loop around the operation, or 0 if it is in no loop.
        scan: for a 'scan_input' or 'scan_output', the id of its scan. For others, 0.
    """

    primitive: str
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    rule: OpShardingRule
    executions: int = 1
    loop: int = 0
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
        values: all arrays. Operations refer to them by index.
        parent_loops: for each loop id, the id of the loop around it, or 0 if there is none.
        arguments, results: indices into `values`; None for a scalar.
    """

    values: list[Value] = field(default_factory=list[Value])
    parent_loops: list[int] = field(default_factory=lambda: [0])
    ops: list[Op] = field(default_factory=list[Op])
    arguments: list[int | None] = field(default_factory=list[int | None])
    results: list[int | None] = field(default_factory=list[int | None])


def flatten(closed: Any) -> Program:
    """Flattens a ClosedJaxpr, and removes operations whose results are not used."""
    reader = _Flattener()
    jaxpr = _open(closed)
    program = reader.program
    program.arguments = reader.new_values(jaxpr.invars)
    program.results = reader.read(jaxpr, program.arguments)
    program.ops = _used_ops(program)
    return program


class _Flattener:
    """Appends operations to one program, each with the current `executions` and `loop`."""

    def __init__(self) -> None:
        self.program = Program()
        self.executions = 1
        self.loop = 0
        self.n_loops = 0

    def new_value(self, aval: Any) -> int | None:
        """Returns the index of a new value, or None for a scalar or an aval without a shape."""
        shape = getattr(aval, 'shape', ())
        if not shape:
            return None
        self.program.values.append(Value(tuple(map(int, shape)), aval.dtype))
        return len(self.program.values) - 1

    def new_values(self, variables: Sequence[Any]) -> list[int | None]:
        return [self.new_value(variable.aval) for variable in variables]

    def read(self, jaxpr: Any, arguments: Sequence[int | None]) -> list[int | None]:
        """Adds the operations of a call of `jaxpr` with `arguments`, and returns its results."""
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
        in_shapes, out_shapes = list(map(self.shape, ins)), list(map(self.shape, outs))
        rule = op_sharding_rule(name, params, in_shapes, out_shapes)
        self.append(Op(name, tuple(ins), tuple(outs), rule))
        return outs

    def constrain(self, value: int | None, sharding: Any) -> None:
        spec = getattr(sharding, 'spec', None)
        if value is not None and spec is not None:
            self.program.values[value].spec = mesh_axes_of(spec, len(self.shape(value)))

    def append(self, op: Op) -> None:
        op.executions, op.loop = self.executions, self.loop
        self.program.ops.append(op)

    def connect(
        self, name: str, old: int | None, new: int | None, skip: tuple[int, int], scan: int = 0
    ) -> None:
        """Adds an operation that turns the value `old` into the value `new`, and links their axes.

        Args:
            skip: the number of leading axes of `old` and of `new` that are not linked.
            scan: the id of the scan for a 'scan_input' or 'scan_output'.
        """
        if old is None or new is None:
            return
        n = min(len(self.shape(old)) - skip[0], len(self.shape(new)) - skip[1])
        links = tuple((0, d + skip[0], 0, d + skip[1]) for d in range(n))
        # every device runs all iterations, so the scanned axis must be unsharded
        unsharded = ((0, 0),) if name == 'scan_input' else ()
        self.append(Op(name, (old,), (new,), OpShardingRule(links, unsharded=unsharded), scan=scan))

    def carry(self, values: Sequence[int | None], targets: Sequence[int | None]) -> None:
        """Passes values into a loop, to its next iteration, or out of a loop or branch."""
        for old, new in zip(values, targets, strict=True):
            self.connect('carry', old, new, (0, 0))

    def shape(self, value: int | None) -> Shape:
        return () if value is None else self.program.values[value].shape

    def scan(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        body, length = _open(eqn.params['jaxpr']), eqn.params['length']
        # Scanned and stacked arrays have one axis fewer in the body than outside. The others are
        # counted, because JAX 0.12 has neither the parameter num_consts nor num_carry.
        n_carry = sum(map(_has_same_ndim, body.outvars, eqn.outvars))
        n_unscanned = sum(map(_has_same_ndim, body.invars, eqn.invars))
        n_consts = n_unscanned - n_carry
        outs = self.new_values(eqn.outvars)
        loop = self.n_loops + 1  # the id that `read_loop` gives the loop
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
        # the first axis of all scanned inputs and stacked outputs counts the iterations
        scanned = next((value for value in ins[n_unscanned:] if value is not None), None)
        for new in outs[n_carry:]:
            if scanned is not None and new is not None:
                self.append(Op('scan_axis', (scanned,), (new,), OpShardingRule(((0, 0, 0, 0),))))
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
            self.carry(self.read(branch, ins[1:]), outs)
        return outs

    def read_loop(
        self, jaxpr: Any, arguments: Sequence[int | None], length: int
    ) -> list[int | None]:
        """Adds the operations of a loop body that runs `length` times, and returns its results."""
        outside = self.executions, self.loop
        self.n_loops += 1
        self.program.parent_loops.append(self.loop)
        self.executions, self.loop = self.executions * length, self.n_loops
        results = self.read(jaxpr, arguments)
        self.executions, self.loop = outside
        return results


def _nested_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    opened = map(_open, params.values())
    return (value for value in opened if hasattr(value, 'eqns') and hasattr(value, 'invars'))


def _open(jaxpr: Any) -> Any:
    """Returns the jaxpr of a ClosedJaxpr. Returns other values unchanged."""
    return getattr(jaxpr, 'jaxpr', jaxpr)


def _has_same_ndim(one: Any, other: Any) -> bool:
    return len(getattr(one.aval, 'shape', ())) == len(getattr(other.aval, 'shape', ()))


def mesh_axes_of(spec: Any, ndim: int) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes over which a PartitionSpec shards each axis of an array."""
    entries = [() if entry == UNCONSTRAINED else entry for entry in spec_axes(spec)]
    entries += [()] * (ndim - len(entries))
    return tuple(tuple(map(str, entry)) for entry in entries)


def _used_ops(program: Program) -> list[Op]:
    used: set[int | None] = {value for value in program.results if value is not None}
    kept: set[int] = set()
    # repeats, because a value in a loop body may be used only in the next iteration
    n_before = -1
    while len(kept) > n_before:
        n_before = len(kept)
        for i, op in reversed([*enumerate(program.ops)]):
            if i not in kept and any(value in used for value in op.outs):
                kept.add(i)
                if op.primitive != 'scan_axis':  # 'scan_axis' links axes, but uses no value
                    used.update(op.arrays_in)
    return [op for i, op in enumerate(program.ops) if i in kept]
