"""One graph of a traced program: a list of operations, with loop bodies and calls inlined."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import AxisType

from .names import AxisNames, names_in
from .spans import Frames, Span, with_callers


@dataclass(slots=True)
class Variable:
    """An array in a program.

    A value in a loop body represents the arrays of all iterations.

    Attributes:
        sharding: the sharding in the type, which has only Explicit mesh axes. None if unknown.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * getattr(self.dtype, 'itemsize', 4)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a jaxpr is called, or an operation is.

    Attributes:
        runs: how often it runs in one run of the program, or None if unknown, as in a while loop.
        frames: the spans of the user's frames, innermost first, with those of the callers.
        is_backward: whether it is in a backward pass, also if it is recomputed there.
        is_recomputed: whether `jax.checkpoint` recomputes it in the backward pass.
        n_mapped: how often `jax.vmap` maps a function around it.
        n_shards: in a `shard_map`, the product of the sizes of all manual mesh axes; else 0.
        calls: the equations of the calls and loops around it, outermost first.
        names: the axis names of the constraint or einsum of einshard that it belongs to, or None.
    """

    runs: int | None = 1
    frames: tuple[Span, ...] = ()
    is_backward: bool = False
    is_recomputed: bool = False
    n_mapped: int = 0
    n_shards: int = 0
    calls: tuple[Any, ...] = ()
    names: AxisNames | None = None

    @property
    def source(self) -> str:
        """The source line, as in its HLO: 'model.py:12', or '' if unknown."""
        return self.frames[0].source if self.frames else ''

    @property
    def is_transposed(self) -> bool:
        """Whether it computes cotangents."""
        return self.is_backward and not self.is_recomputed

    def at(self, eqn: Any, frames: tuple[Span, ...]) -> Site:
        """Returns the site of an equation of the jaxpr that has these frames."""
        transforms = str(eqn.source_info.name_stack)
        recomputed = transforms.rfind('rematted_computation')
        transposed = transforms.rfind('transpose(')
        return replace(
            self,
            frames=with_callers(frames, self.frames),
            is_backward=self.is_backward or transposed >= 0,
            is_recomputed=recomputed > transposed
            if recomputed != transposed
            else self.is_recomputed,
            n_mapped=self.n_mapped + transforms.count('vmap('),
            names=names_in(transforms) or self.names,
        )

    def inside(self, eqn: Any, length: int | None = 1) -> Site:
        """Returns the site of a body of an equation that is at this site, run `length` times."""
        runs = None if self.runs is None or length is None else self.runs * length
        return replace(self, runs=runs, calls=(*self.calls, eqn))


@dataclass(slots=True)
class Op:
    """An operation in a program.

    Attributes:
        primitive: the name of a JAX primitive, or one of four others. 'carry', 'scan_input' and
            'scan_output' pass values between a loop and its body, and 'carry' also passes the
            results of the branches of a `cond`. 'shards' passes values into and out of a
            `shard_map`.
        ins, outs: the indices of operands and results in `FlatJaxpr.values`; None for a scalar.
        eqn: the equation; for an operation that passes values, that of the loop or call.
        site: where the equation is.
        links: of an operation that passes a value, the same axis before and after it.
    """

    primitive: str
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    eqn: Any = None
    site: Site = Site()
    links: tuple[tuple[int, int], ...] = ()

    @property
    def arrays_in(self) -> list[int]:
        return [value for value in self.ins if value is not None]

    @property
    def arrays_out(self) -> list[int]:
        return [value for value in self.outs if value is not None]


@dataclass(slots=True)
class FlatJaxpr:
    """A program whose loops, branches and calls are flattened.

    Attributes:
        values: all arrays. Operations refer to them by index.
        sums: the lines and lengths of scans that only add to an array of the carry, inner first.
        arguments, results: indices into `values`; None for a scalar.
    """

    values: list[Variable] = field(default_factory=list[Variable])
    sums: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    ops: list[Op] = field(default_factory=list[Op])
    arguments: list[int | None] = field(default_factory=list[int | None])
    results: list[int | None] = field(default_factory=list[int | None])


def flatten(closed: Any) -> FlatJaxpr:
    """Flattens a jaxpr."""
    reader = _Flattener()
    jaxpr = _open(closed)
    program = reader.program
    program.arguments = reader.new_values(jaxpr.invars)
    program.results = reader.read(jaxpr, program.arguments)
    return program


class _Flattener:
    """Appends operations to one program, each with the current equation.

    Attributes:
        site: where the current jaxpr is called, and then where its current equation `eqn` is.
    """

    def __init__(self) -> None:
        self.program = FlatJaxpr()
        self.eqn: Any = None
        self.site = Site()
        self.frames = Frames()

    def new_value(self, aval: Any) -> int | None:
        """Returns the index of a new value, or None for a scalar or an aval without a shape."""
        shape = getattr(aval, 'shape', ())
        if not shape:
            return None
        sharding = getattr(aval, 'sharding', None)
        self.program.values.append(Variable(tuple(map(int, shape)), aval.dtype, sharding=sharding))
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

        call = self.eqn, self.site
        for eqn in jaxpr.eqns:
            self.eqn, self.site = eqn, call[1].at(eqn, self.frames.of(eqn))
            ins = [value_of(atom) for atom in eqn.invars]
            outs = self.equation(eqn, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
        self.eqn, self.site = call
        return [value_of(atom) for atom in jaxpr.outvars]

    def call(
        self,
        jaxpr: Any,
        arguments: Sequence[int | None],
        length: int | None = 1,
        n_shards: int | None = None,
    ) -> list[int | None]:
        """Adds the operations of a jaxpr that the current equation runs `length` times."""
        site = self.site
        self.site = site.inside(self.eqn, length)
        if n_shards is not None:
            self.site = replace(self.site, n_shards=n_shards)
        results = self.read(jaxpr, arguments)
        self.site = site
        return results

    def equation(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        name = eqn.primitive.name
        if name == 'scan':
            return self.scan(eqn, ins)
        if name == 'while':
            return self.while_loop(eqn, ins)
        if name == 'cond':
            return self.cond(eqn, ins)
        if name == 'shard_map':
            return self.shard_map(eqn, ins)
        if (body := called_jaxpr(eqn)) is not None:
            return self.call(body, ins[len(ins) - len(body.invars) :])
        outs = self.new_values(eqn.outvars)
        self.program.ops.append(Op(name, tuple(ins), tuple(outs), eqn, self.site))
        return outs

    def connect(self, name: str, old: int | None, new: int | None, skip: tuple[int, int]) -> None:
        """Adds an operation that turns the value `old` into the value `new`, and links their axes.

        Args:
            skip: the number of leading axes of `old` and of `new` that are not linked.
        """
        if old is None or new is None:
            return
        values = self.program.values
        axes = (range(n, len(values[v].shape)) for n, v in zip(skip, (old, new), strict=True))
        links = tuple(zip(*axes, strict=False))
        self.program.ops.append(Op(name, (old,), (new,), self.eqn, self.site, links))

    def carry(self, values: Sequence[int | None], targets: Sequence[int | None]) -> None:
        """Passes values into a loop, to its next iteration, or out of a loop or branch."""
        for old, new in zip(values, targets, strict=True):
            self.connect('carry', old, new, (0, 0))

    def scan(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        body, length = _open(eqn.params['jaxpr']), eqn.params['length']
        # Scanned and stacked arrays have one axis fewer in the body than outside. The others are
        # counted, because JAX 0.12 has neither the parameter num_consts nor num_carry.
        n_carry = sum(map(_has_same_ndim, body.outvars, eqn.outvars))
        n_unscanned = sum(map(_has_same_ndim, body.invars, eqn.invars))
        n_consts = n_unscanned - n_carry
        outs = self.new_values(eqn.outvars)
        inner = self.new_values(body.invars)
        inner[:n_consts] = ins[:n_consts]
        self.carry(ins[n_consts:n_unscanned], inner[n_consts:n_unscanned])
        for old, new in zip(ins[n_unscanned:], inner[n_unscanned:], strict=True):
            self.connect('scan_input', old, new, (1, 0))
        results = self.call(body, inner, length)
        self.carry(results[:n_carry], inner[n_consts:n_unscanned])
        self.carry(results[:n_carry], outs[:n_carry])
        for old, new in zip(results[n_carry:], outs[n_carry:], strict=True):
            self.connect('scan_output', old, new, (0, 1))
        if any(results[i] is not None for i in _indices_of_sums(body, n_consts, n_carry)):
            self.program.sums.append((self.site.source, length))
        return outs

    def while_loop(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        params = eqn.params
        n_cond, n_body = params['cond_nconsts'], params['body_nconsts']
        body = _open(params['body_jaxpr'])
        consts, carry = ins[n_cond : n_cond + n_body], ins[n_cond + n_body :]
        inner = self.new_values(body.invars[n_body:])
        outs = self.new_values(eqn.outvars)
        self.carry(carry, inner)
        results = self.call(body, [*consts, *inner], None)
        self.carry(results, inner)
        self.carry(results, outs)
        return outs

    def cond(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        outs = self.new_values(eqn.outvars)
        for branch in map(_open, eqn.params['branches']):
            self.carry(self.call(branch, ins[1:]), outs)
        return outs

    def shard_map(self, eqn: Any, ins: Sequence[int | None]) -> list[int | None]:
        """Adds the operations of a `shard_map`, whose values have the shapes of shards."""
        mesh, body = eqn.params['mesh'], eqn.params['jaxpr']
        manual = eqn.params['newly_manual_axes']
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        n_shards = math.prod(
            size
            for axis, size in mesh.shape.items()
            # Manual axes: those of a shard_map around this one
            if axis in manual or types[axis] == AxisType.Manual
        )
        inner, outs = self.new_values(_open(body).invars), self.new_values(eqn.outvars)
        for old, new in zip(ins, inner, strict=True):
            self.connect('shards', old, new, (0, 0))
        results = self.call(_open(body), inner, n_shards=n_shards)
        for old, new in zip(results, outs, strict=True):
            self.connect('shards', old, new, (0, 0))
        return outs


def called_jaxpr(eqn: Any) -> Any:
    """Returns the jaxpr that an equation such as jit or checkpoint calls, or None.

    The inputs of the jaxpr are the last operands of the equation. Not called are the function of
    scalars that a scatter or a reduction has, and a Pallas kernel, whose body works on blocks.
    """
    if eqn.primitive.name.startswith(('pallas_call', 'reduce', 'scatter')):
        return None
    for parameter in eqn.params.values():
        inner = _open(parameter)
        if hasattr(inner, 'eqns') and hasattr(inner, 'invars'):
            shapes = [getattr(v.aval, 'shape', None) for v in inner.outvars]
            is_call = shapes == [getattr(v.aval, 'shape', None) for v in eqn.outvars]
            return inner if is_call and len(inner.invars) <= len(eqn.invars) else None
    return None


def inner_jaxprs(parameters: Any) -> Iterator[Any]:
    """Yields the jaxprs in the parameters of an equation."""
    for parameter in parameters:
        if isinstance(parameter, list | tuple):
            yield from inner_jaxprs(parameter)
        elif hasattr(inner := _open(parameter), 'eqns'):
            yield inner


def _open(jaxpr: Any) -> Any:
    """Returns the jaxpr of a ClosedJaxpr. Returns other values unchanged."""
    return getattr(jaxpr, 'jaxpr', jaxpr)


def _indices_of_sums(jaxpr: Any, n_consts: int, n_carry: int) -> Iterator[int]:
    """Yields the indices of the carried values to which the loop body only adds."""
    carried = {id(v): i for i, v in enumerate(jaxpr.invars[n_consts : n_consts + n_carry])}
    producers = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    uses = Counter(id(v) for eqn in jaxpr.eqns for v in eqn.invars)
    for i, v in enumerate(jaxpr.outvars[:n_carry]):
        eqn = producers.get(id(v))
        while eqn is not None and eqn.primitive.name == 'sharding_constraint':
            eqn = producers.get(id(eqn.invars[0]))
        if eqn is None or eqn.primitive.name not in ('add', 'add_any'):
            continue
        if any(carried.get(id(v)) == i and uses[id(v)] == 1 for v in eqn.invars):
            yield i


def _has_same_ndim(one: Any, other: Any) -> bool:
    return len(getattr(one.aval, 'shape', ())) == len(getattr(other.aval, 'shape', ()))
