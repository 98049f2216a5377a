"""Follows the shardings of arguments and constraints through a traced function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._arrays.constrain import names_at
from ..._notation.expression import ELLIPSIS
from ..._sharding.mesh import AnyMesh, spec_axes
from .lines import line_of
from .operations import PRODUCTS, RULES, elementwise, flops_of, product_of
from .values import Axis, Product, Value, drop_repeats, merged, reshaped


@dataclass(frozen=True, slots=True)
class Constraint:
    line: str
    before: Value
    after: Value
    is_backward: bool


class Scanned(NamedTuple):
    """An array that a scan runs over."""

    value: Value
    aval: Any


@dataclass(frozen=True, slots=True)
class Loop:
    """A `jax.lax.scan`."""

    line: str
    length: int
    sums: tuple[Value, ...]  # the elements of the carry to which the body only adds
    xs: tuple[Scanned, ...]  # the scanned arrays


class Slice(NamedTuple):
    """A slice along a sharded axis."""

    line: str
    value: Value
    dim: int
    size: int  # the size of the axis
    part: int  # the size of the slice
    is_equal_part: bool  # whether it is one of size // part equal parts

    @property
    def axis(self) -> Axis:
        return self.value.axes[self.dim]


@dataclass(frozen=True, slots=True)
class Trace:
    """The operations of a function, as far as diagnoses need them."""

    products: list[Product] = field(default_factory=list)  # in program order
    constraints: list[Constraint] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)


class _CallSite(NamedTuple):
    """Where a jaxpr is called.

    Attributes:
        runs: how often the jaxpr runs in one run of the function, or None if unknown.
        is_mapped: whether `jax.vmap` maps a function around it.
        n_shards: in a `shard_map`, the product of the sizes of all manual mesh axes; else 0.
        call: the equation of the innermost call around it, such as `jit` (not a loop), or None.
    """

    runs: int | None = 1
    is_backward: bool = False
    is_mapped: bool = False
    n_shards: int = 0
    call: Any = None


def read_trace(
    jaxpr: Any, arguments: Sequence[Value], mesh: AnyMesh, innermost_lines: bool = False
) -> Trace:
    """Reads a jaxpr that is called with `arguments`. For `innermost_lines`, see `line_of`."""
    reader = _Reader(Trace(), mesh, innermost_lines)
    reader.read(jaxpr, arguments, _CallSite())
    return reader.trace


class _Reader:
    def __init__(self, trace: Trace, mesh: AnyMesh, innermost_lines: bool):
        self.trace = trace
        self.innermost_lines = innermost_lines
        self.mesh_sizes = dict(mesh.shape)

    def read(self, jaxpr: Any, arguments: Sequence[Value], site: _CallSite) -> list[Value]:
        """Reads a jaxpr that is called with `arguments`, and returns the values of its results."""
        values: dict[int, Value] = dict(zip(map(id, jaxpr.invars), arguments, strict=False))

        def value_of(v: Any) -> Value:
            found = values.get(id(v))
            return _unsharded(v) if found is None else found

        for eqn in jaxpr.eqns:
            results = self.read_equation(eqn, list(map(value_of, eqn.invars)), site)
            for v, value in zip(eqn.outvars, results, strict=False):
                values[id(v)] = _typed(v, value)
        return [value_of(v) for v in jaxpr.outvars]

    def read_equation(self, eqn: Any, values: list[Value], site: _CallSite) -> Sequence[Value]:
        name = eqn.primitive.name
        transforms = str(eqn.source_info.name_stack)
        site = site._replace(
            is_backward=site.is_backward or 'transpose(' in transforms,
            is_mapped=site.is_mapped or 'vmap(' in transforms,
        )
        if name == 'scan':
            return self.read_scan(eqn, values, site)
        if name == 'while':
            return self.read_while(eqn, values, site)
        if name == 'cond':
            return self.read_cond(eqn, values, site)
        if name == 'shard_map':
            mesh = eqn.params['mesh']
            # called manual_axes in JAX 0.8
            manual = eqn.params.get('newly_manual_axes', eqn.params.get('manual_axes'))
            types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
            n_shards = prod(
                size
                for axis, size in mesh.shape.items()
                # Manual axes: those of a shard_map around this one
                if manual is None or axis in manual or types[axis] == AxisType.Manual
            )
            inner = [_unsharded(v) for v in eqn.params['jaxpr'].invars]
            self.read(eqn.params['jaxpr'], inner, site._replace(n_shards=n_shards))
            return [_unsharded(v, values) for v in eqn.outvars]
        if name in ('sharding_constraint', 'reshard', 'mesh_cast') and values:
            return [self.read_constraint(eqn, values[0], site)]
        if name in (*PRODUCTS, 'gather'):
            return [self.read_product(eqn, values, site)]
        if (inner := _called_jaxpr(eqn)) is not None:
            operands = values[len(values) - len(inner.invars) :]
            return self.read(inner, operands, site._replace(call=eqn))
        if name == 'reshape':
            before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            return [values[0].with_axes(reshaped(values[0].axes, before, after, self.mesh_sizes))]
        if name in ('split', 'slice', 'dynamic_slice'):
            self.read_slice(eqn, values[0])
        if name in RULES:
            return [RULES[name](eqn, values)]
        return [elementwise(v, values) for v in eqn.outvars]

    def line_of(self, eqn: Any) -> str:
        return line_of(eqn, self.innermost_lines)

    def read_product(self, eqn: Any, values: list[Value], site: _CallSite) -> Value:
        product = product_of(eqn, values)
        if product is None:
            return elementwise(eqn.outvars[0], values)
        flops = flops_of(eqn) * max(site.n_shards, 1)
        left, right, result = (v.aval for v in (*eqn.invars[:2], eqn.outvars[0]))
        self.trace.products.append(
            replace(
                product,
                line=self.line_of(eqn) or (self.line_of(site.call) if site.call else ''),
                aval=result,
                runs=site.runs,
                flops=None if site.runs is None else flops * site.runs,
                is_backward=site.is_backward,
                in_shard_map=site.n_shards > 0,
                is_mapped=site.is_mapped,
                sizes=(left.size, right.size, result.size),
            )
        )
        return product.result

    def read_slice(self, eqn: Any, value: Value) -> None:
        sizes, parts = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        for dim, (axis, size, part) in enumerate(zip(value.axes, sizes, parts, strict=True)):
            if 0 < part != size and axis.mesh_axes:
                is_equal_part = size % part == 0 and _starts_at_multiple(eqn, dim, part)
                found = Slice(self.line_of(eqn), value, dim, size, part, is_equal_part)
                self.trace.slices.append(found)

    def read_constraint(self, eqn: Any, before: Value, site: _CallSite) -> Value:
        sharding = eqn.params.get('sharding', eqn.params.get('dst_sharding'))
        if not isinstance(sharding, NamedSharding):
            return before
        if dict(sharding.mesh.shape) != self.mesh_sizes:
            return _unsharded(eqn.outvars[0], [before])
        line = line_of(eqn)  # not the innermost one: the keys of `names_at` are the user's lines
        names = names_at.get(line, ())
        if len(names) != len(before.axes) or ELLIPSIS in names:
            names = ('',) * len(before.axes)
        entries = mesh_entries(sharding, len(before.axes))
        axes = [
            replace(axis, name=name or axis.name)
            if entry is None
            else Axis(name or axis.name, entry, line)
            for axis, name, entry in zip(before.axes, names, entries, strict=True)
        ]
        after = Value(drop_repeats(axes), None, before.is_data)
        self.trace.constraints.append(Constraint(line, before, after, site.is_backward))
        return after

    def read_scan(self, eqn: Any, values: list[Value], site: _CallSite) -> Sequence[Value]:
        inner, length = jaxpr_in(eqn.params['jaxpr']), eqn.params['length']
        # newer JAX has no num_consts and num_carry in `params`. So compare ranks: only scanned
        # inputs and stacked outputs have one more axis outside the body
        n_carry = _n_of_same_rank(eqn.outvars, inner.outvars)
        n_consts = _n_of_same_rank(eqn.invars, inner.invars) - n_carry
        site = site._replace(runs=None if site.runs is None else site.runs * length)
        scanned = values[n_consts + n_carry :]
        slices = [value.with_axes(value.axes[1:]) for value in scanned]
        carry = values[n_consts : n_consts + n_carry]
        results = self.read(inner, [*values[:n_consts], *carry, *slices], site)
        sums = tuple(results[i] for i in _indices_of_sums(inner, n_consts, n_carry))
        xs = tuple(
            Scanned(value, v.aval)
            for value, v in zip(scanned, eqn.invars[n_consts + n_carry :], strict=True)
        )
        self.trace.loops.append(Loop(self.line_of(eqn), length, sums, xs))
        carried = [
            merged([value, after], len(value.axes))
            for value, after in zip(carry, results, strict=False)
        ]
        stacked = [Value((Axis(), *after.axes), None, after.is_data) for after in results[n_carry:]]
        return [*carried, *stacked]

    def read_while(self, eqn: Any, values: list[Value], site: _CallSite) -> Sequence[Value]:
        params = eqn.params
        n_cond, n_body = params['cond_nconsts'], params['body_nconsts']
        carry = values[n_cond + n_body :]
        inside = [*values[n_cond : n_cond + n_body], *carry]
        results = self.read(jaxpr_in(params['body_jaxpr']), inside, site._replace(runs=None))
        return [
            merged([value, after], len(value.axes))
            for value, after in zip(carry, results, strict=True)
        ]

    def read_cond(self, eqn: Any, values: list[Value], site: _CallSite) -> Sequence[Value]:
        results = [
            self.read(jaxpr_in(branch), values[1:], site) for branch in eqn.params['branches']
        ]
        return [merged(several, len(several[0].axes)) for several in zip(*results, strict=True)]


def mesh_entries(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...] | None]:
    """Returns the mesh axes of size > 1 that shard each axis, or None for unconstrained axes."""
    entries: list[tuple[str, ...] | None] = []
    for entry in [*spec_axes(sharding.spec), *[()] * ndim][:ndim]:
        if entry and entry[0] is PartitionSpec.UNCONSTRAINED:
            entries.append(None)
        else:
            entries.append(tuple(str(axis) for axis in entry if sharding.mesh.shape[axis] > 1))
    return entries


def argument_values(
    arrays: Sequence[Any], is_data: Mapping[int, bool], mesh: AnyMesh
) -> list[Value]:
    """`is_data[i]` is whether argument i is data, not a weight."""
    values: list[Value] = []
    for i, array in enumerate(arrays):
        ndim = len(array.shape)
        sharding, names = array.sharding, array.names or ('',) * ndim
        entries: list[tuple[str, ...] | None] = [()] * ndim
        if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
            entries = mesh_entries(sharding, ndim)
        axes = (
            Axis(name, entry or (), i if entry else None, dim)
            for dim, (name, entry) in enumerate(zip(names, entries, strict=True))
        )
        values.append(Value(tuple(axes), i, is_data.get(i, False)))
    return values


def _unsharded(v: Any, values: Sequence[Value] = ()) -> Value:
    """Returns an unsharded value with the rank of `v`. It is data if any of `values` is."""
    ndim = getattr(v.aval, 'ndim', 0)
    return Value((Axis(),) * ndim, None, any(value.is_data for value in values))


def _typed(v: Any, value: Value) -> Value:
    """Returns `value` with the sharding in the type of `v`, if the mesh has Explicit axes."""
    sharding = getattr(v.aval, 'sharding', None)
    types = getattr(getattr(sharding, 'mesh', None), 'axis_types', ())
    if AxisType.Explicit not in types or len(value.axes) != v.aval.ndim:
        return value
    entries = mesh_entries(sharding, v.aval.ndim)  # type: ignore[reportArgumentType]
    axes = (
        axis if entry is None else replace(axis, mesh_axes=entry)
        for axis, entry in zip(value.axes, entries, strict=True)
    )
    return value.with_axes(axes)


def _called_jaxpr(eqn: Any) -> Any:
    """Returns the jaxpr that an equation such as jit or checkpoint calls, or None.

    The inputs of the jaxpr are the last operands of the equation. The function of scalars that a
    scatter or a reduction has is not called.
    """
    if eqn.primitive.name.startswith(('pallas_call', 'reduce', 'scatter')):
        return None
    for parameter in eqn.params.values():
        inner = jaxpr_in(parameter)
        if hasattr(inner, 'eqns') and hasattr(inner, 'invars'):
            shapes = [getattr(v.aval, 'shape', None) for v in inner.outvars]
            is_call = shapes == [getattr(v.aval, 'shape', None) for v in eqn.outvars]
            return inner if is_call and len(inner.invars) <= len(eqn.invars) else None
    return None


def jaxpr_in(parameter: Any) -> Any:
    return getattr(parameter, 'jaxpr', parameter)


def _starts_at_multiple(eqn: Any, dim: int, part: int) -> bool:
    """Whether all slices along `dim` are contiguous and start at multiples of `part`."""
    if eqn.primitive.name == 'split':
        return set(eqn.params['sizes']) == {part}
    if eqn.primitive.name == 'dynamic_slice':
        start = getattr(eqn.invars[1 + dim], 'val', None)  # of a literal
        return start is not None and int(start) % part == 0
    strides = eqn.params['strides']
    return eqn.params['start_indices'][dim] % part == 0 and (strides is None or strides[dim] == 1)


def _n_of_same_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(len(v.aval.shape) == len(w.aval.shape) for v, w in pairs)


def inner_jaxprs(parameters: Any) -> Iterator[Any]:
    for parameter in parameters:
        if isinstance(parameter, list | tuple):
            yield from inner_jaxprs(parameter)
        elif hasattr(inner := jaxpr_in(parameter), 'eqns'):
            yield inner


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
