"""Asks the compiler how it computes a contraction of sharded operands, on devices you don't have.

Shardy, XLA's propagation, runs in this process on the lowered einsum. Its last passes write where
operands are resharded and sums added up. It is asked with what the user wrote, and then with other
shardings of operands and result, as XLA's partitioner may choose another way by sizes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .._notation.counts import prime_factors
from .._notation.expression import Term, with_unsharded
from .._program.traced.attributes import Attributes
from .._program.traced.outline import Place, main_of
from .._program.traced.propagated import Axes
from .._program.traced.shardy import (
    EXPLICIT_PASSES,
    OUT_SHARDING,
    REDUCTION_AXES,
    RULE,
    SHARDING,
    NotPropagated,
    run,
)
from .._program.traced.variants import Variants
from .contraction import Contraction

_RESULT = 'the result'


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective predicted by `parallelism`.

    Attributes:
        kind: 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all' or 'collective-permute'.
        of: the array: 'operand 0', 'operand 1' or 'the result'.
        over: the mesh axes along which it runs.
        group_size: the number of devices in each group.
        groups: the number of groups.
        block: the block of a device before or after the collective, whichever is larger, such as
            'b/2 x'.
        bytes: the bytes of that block, or None if sizes are not given.
    """

    kind: str
    of: str
    over: tuple[str, ...]
    group_size: int
    groups: int
    block: str
    bytes: int | None

    def __str__(self) -> str:
        amount = '' if self.bytes is None else f', {self.bytes:,} bytes'
        among = f'{self.groups} groups of ' if self.groups > 1 else ''
        return (
            f'{self.kind} of {self.of} over {", ".join(self.over)}: '
            f'[{self.block}]{amount}, among {among}{self.group_size} devices'
        )


@dataclass(frozen=True)
class Choice:
    """One way to compute a contraction of sharded operands.

    Attributes:
        result: the placement of the result.
        collectives: the collectives, in order.
        slices: the slices of operands that devices take locally, such as 'operand 0 along x'.
        operands: the placements of the operands when they are multiplied.
        block: what each device multiplies, such as '[b/2 x/4] [x/4 y]'.
    """

    result: str
    collectives: tuple[Communication, ...]
    slices: tuple[str, ...]
    operands: tuple[str, ...]
    block: str

    @property
    def bytes(self) -> int | None:
        """The total bytes of all collectives, or None if array sizes are not given."""
        if any(collective.bytes is None for collective in self.collectives):
            return None
        return sum(collective.bytes or 0 for collective in self.collectives)

    def __str__(self) -> str:
        steps = [f'slice {text} (no communication)' for text in self.slices]
        steps += map(str, self.collectives)
        return '\n'.join([f"result '{self.result}'", *(steps or ['no communication'])])


@dataclass(frozen=True, slots=True)
class Array:
    """An operand, the result, or a value between them, and the mesh axes that shard its axes."""

    label: str  # 'operand 0', 'the result'
    names: tuple[str, ...]
    axes: Axes

    @property
    def by_name(self) -> dict[str, tuple[str, ...]]:
        return dict(zip(self.names, self.axes, strict=True))

    def array_axis(self, mesh_axis: str) -> str | None:
        return next((name for name, axes in self.by_name.items() if mesh_axis in axes), None)

    def sharded(self, by_name: Mapping[str, Sequence[str]]) -> Array:
        return replace(self, axes=tuple(tuple(by_name.get(name, ())) for name in self.names))


class _Way(NamedTuple):
    """A choice, and the arrays of which `Contractor` makes others."""

    choice: Choice
    operands: tuple[Array, ...]  # as they are multiplied
    product: Array
    partial: tuple[str, ...]  # the mesh axes over which it is a partial sum


class Contractor:
    """A contraction of arrays with placements, on a mesh.

    It has a mesh axis 'm0', 'm1', ... for each prime factor of those of the user: Shardy reshards
    parts of axes, and names of axes may have letters that its text escapes.

    Args:
        mesh_shape: the sizes of the user's mesh axes, slowest-varying first.
        array_axes: the array axis that each of them shards, of each operand and of the result.
        sizes: of the array axes, or None if they are unknown.
    """

    def __init__(
        self,
        contraction: Contraction,
        mesh_shape: Mapping[str, int],
        array_axes: Sequence[Mapping[str, str]],
        sizes: Mapping[str, int] | None,
        item_bytes: int,
    ):
        self.contraction, self.user_mesh = contraction, mesh_shape
        self.sizes, self.item_bytes = sizes, item_bytes
        primes = [(axis, n) for axis, size in mesh_shape.items() for n in prime_factors(size)]
        self.mesh_shape = {f'm{i}': n for i, (_, n) in enumerate(primes)}
        self.axis_of = {f'm{i}': axis for i, (axis, _) in enumerate(primes)}
        arrays: list[Array] = []
        for i, (array, names) in enumerate(zip(contraction.arrays, array_axes, strict=True)):
            by_name: dict[str, list[str]] = {}
            for axis, name in names.items():
                parts = [part for part, user_axis in self.axis_of.items() if user_axis == axis]
                by_name.setdefault(name, []).extend(parts)
            label = f'operand {i}' if i < len(contraction.operands) else _RESULT
            arrays.append(Array(label, array.names, ()).sharded(by_name))
        *self.operands, self.result = arrays

    # --- text -------------------------------------------------------------------------------------

    def n_shards(self, axes: Iterable[str]) -> int:
        return math.prod(self.mesh_shape[axis] for axis in axes)

    def _is_in_order(self, axes: Sequence[str]) -> bool:
        return [axis for axis in self.mesh_shape if axis in axes] == list(axes)

    def placement(self, array: Array) -> str:
        """Writes a placement with counts, or mesh axes if an array axis has them out of order."""
        if all(map(self._is_in_order, array.axes)):
            grid = ((array.array_axis(axis), n) for axis, n in self.mesh_shape.items())
            terms = [
                Term(name, math.prod(n for _, n in neighbors))
                for name, neighbors in itertools.groupby(grid, lambda pair: pair[0])
            ]
            terms = with_unsharded(terms, array.names)
        else:
            terms = [
                Term(name, mesh_axes=tuple(dict.fromkeys(self.axis_of[axis] for axis in axes)))
                for name, axes in array.by_name.items()
            ]
        return f'{" ".join(array.names)} -> {" ".join(map(str, terms))}'.strip()

    def block(self, array: Array) -> str:
        """Writes the block of one device, such as 'b/2 x'."""
        counts = {name: self.n_shards(axes) for name, axes in array.by_name.items()}
        return ' '.join(f'{name}/{n}' if n > 1 else name for name, n in counts.items())

    def _communication(self, kind: str, axes: Iterable[str], array: Array) -> Communication:
        axes = [axis for axis in self.mesh_shape if axis in {*axes}]
        n, n_bytes = self.n_shards(axes), None
        if self.sizes is not None:
            n_elements = math.prod(self.sizes[name] for name in array.names)
            n_bytes = self.item_bytes * n_elements // self.n_shards(itertools.chain(*array.axes))
        over = tuple(dict.fromkeys(self.axis_of[axis] for axis in axes))
        n_groups = math.prod(self.mesh_shape.values()) // n
        return Communication(kind, array.label, over, n, n_groups, self.block(array), n_bytes)

    # --- the compiler -----------------------------------------------------------------------------

    def choices(self, is_result_placed: bool) -> tuple[Choice, ...]:
        """Asks how the contraction is computed as it is, then with other operands and results.

        Raises:
            EinshardError: if the propagation does not run.
        """
        placed, found = self.result if is_result_placed else None, list[Choice]()
        try:
            variants = Variants(self._lower().compiler_ir('stablehlo'))
            ways = [self._ask(variants, self.operands, placed)]
            targets = (operands for operands in self._targets() if operands != ways[0].operands)
            ways += [self._ask(variants, operands, placed) for operands in targets]
            for way in ways:
                found.append(way.choice)
                by_name = way.product.by_name
                # a partial sum may also be reduce-scattered along an axis
                for name in by_name if way.partial and placed is None else ():
                    result = way.product.sharded({**by_name, name: (*by_name[name], *way.partial)})
                    if self._divides(result) and self._is_in_order(result.by_name[name]):
                        found.append(self._ask(variants, way.operands, result).choice)
        except NotPropagated as error:
            sentence = "parallelism needs Shardy, XLA's propagation, which did not run"
            raise self.contraction.error(sentence, because=error) from None
        return tuple(dict.fromkeys(found))

    def _divides(self, array: Array) -> bool:
        """Whether the mesh axes of each array axis divide its size, if that is known."""
        return self.sizes is None or all(
            self.sizes[name] % self.n_shards(axes) == 0 for name, axes in array.by_name.items()
        )

    def _targets(self) -> Iterator[tuple[Array, ...]]:
        """Yields other shardings in which the devices can multiply their blocks of the operands.

        Tries, for each mesh axis, the array axes that it shards in the operands and in the result.
        If an operand does not shard an array axis that another one shards, that one is gathered.
        """
        arrays = *self.operands, self.result
        # mesh axes that shard the same array axes are resharded together
        groups: dict[tuple[str | None, ...], list[str]] = {}
        for axis in self.mesh_shape:
            groups.setdefault(tuple(array.array_axis(axis) for array in arrays), []).append(axis)
        options: list[list[str | None]] = []
        for *held, result in groups:
            names = {name for name in held if name}
            pairs = zip(self.operands, held, strict=True)
            is_missing = any(not name and names & {*operand.names} for operand, name in pairs)
            found: dict[str | None, None] = dict.fromkeys(name for name in (*held, result) if name)
            if not names or (len(names) == 1 and is_missing):
                found[None] = None
            options.append([*found])
        for chosen in itertools.product(*options):
            by_name: dict[str, list[str]] = {}
            for name, axes in zip(chosen, groups.values(), strict=True):
                if name:
                    by_name.setdefault(name, []).extend(axes)
            for name, axes in by_name.items():
                # in the order of the array that shards this array axis over the most
                order = max((array.by_name.get(name, ()) for array in arrays), key=len)
                axes.sort(key=lambda axis, order=order: axis in order and order.index(axis))
            if all(self._divides(array.sharded(by_name)) for array in arrays):
                yield tuple(operand.sharded(by_name) for operand in self.operands)

    def _lower(self) -> Any:
        # JAX needs a mesh axis on one device, too
        shape, names = tuple(self.mesh_shape.values()) or (1,), tuple(self.mesh_shape) or ('m0',)
        mesh = AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
        # axes of unknown size, and those of empty arrays, are divisible
        sizes = dict.fromkeys(self.contraction.names, math.prod(shape))
        sizes |= {name: size for name, size in (self.sizes or {}).items() if size}
        structs: list[Any] = []
        for array in self.operands:
            spec = PartitionSpec(*(axes or None for axes in array.axes))
            dims = [sizes[name] for name in array.names]
            structs.append(
                jax.ShapeDtypeStruct(dims, 'float32', sharding=NamedSharding(mesh, spec))
            )

        def contract(*operands: Any) -> Any:
            # open constraints, where `_ask` puts others
            specs = (PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim) for x in operands)
            shardings = (NamedSharding(mesh, spec) for spec in specs)
            held = map(jax.lax.with_sharding_constraint, operands, shardings)
            return jnp.einsum(self.contraction.numpy_subscripts(), *held)

        with jax.sharding.use_abstract_mesh(mesh):  # not that of the user's context
            return jax.jit(contract).trace(*structs).lower(lowering_platforms=('cpu',))

    def _ask(self, variants: Variants, operands: Sequence[Array], result: Array | None) -> _Way:
        """Reads how the compiler contracts the operands after it reshards them to `operands`."""
        changes = {Place('result', 0): None if result is None else result.axes}
        for position, operand in zip(variants.outline.constraints, operands, strict=True):
            changes[Place('constraint', position)] = operand.axes
        with variants.changed(changes) as (module, _):
            run(module, EXPLICIT_PASSES)
            return self._read(module)

    def _read(self, module: Any) -> _Way:
        """Reads a module in which each collective is an operation.

        It has no reduce-scatter: sums are added up, and each device keeps a slice.
        """
        read, block = Attributes(), main_of(module).regions[0].blocks[0]
        arrays: dict[Any, Array] = dict(zip(block.arguments, self.operands, strict=True))
        multiplied = {operand.label: operand.by_name for operand in self.operands}
        collectives, slices, partial = list[Communication](), list[str](), list[str]()
        product = self.result
        *body, end = [view.operation for view in block.operations]
        for op in body:
            given, inputs = op.attributes, [arrays[value] for value in op.operands]
            if OUT_SHARDING not in given:
                for array in inputs:
                    multiplied.get(array.label, {}).update(array.by_name)
                arrays[op.results[0]] = product = self._computed(op, inputs, read)
                if op.name != 'stablehlo.transpose':  # the sum may be transposed before the slice
                    partial = []
                continue
            (old,), kind = inputs, op.name.removeprefix('sdy.').replace('_', '-')
            new = replace(old, axes=read.shardings(given[OUT_SHARDING])[0].axes)
            arrays[op.results[0]] = new
            before, after = (
                {(name, axis) for name, axes in array.by_name.items() for axis in axes}
                for array in (old, new)
            )
            added, gone = (
                {axis for _, axis in pairs} for pairs in (after - before, before - after)
            )
            if kind == 'all-reduce':
                axes = re.findall(r'"(\w+)"', str(given[REDUCTION_AXES]))
                collectives.append(self._communication(kind, axes, new))
                if old is product:
                    product, partial = new, axes
            elif kind == 'all-slice':
                scattered = added & {*partial} if old is product else ()
                if scattered:
                    collectives[-1] = self._communication('reduce-scatter', scattered, old)
                    if rest := {*partial} - added:
                        collectives.append(self._communication('all-reduce', rest, new))
                elif old.label != _RESULT:
                    sliced = [n for n in old.names if old.by_name[n] != new.by_name[n]]
                    slices += (f'{old.label} along {name}' for name in sliced)
            elif kind == 'collective-permute':
                pairs = zip(old.axes, new.axes, strict=True)
                axes = [axis for a, b in pairs if a != b for axis in (*a, *b)]
                collectives.append(self._communication(kind, axes, new))
            else:
                larger = new if kind == 'all-gather' else old
                collectives.append(self._communication(kind, gone or added, larger))
        operands = tuple(operand.sharded(multiplied[operand.label]) for operand in self.operands)
        choice = Choice(
            self.placement(arrays[end.operands[0]]),
            tuple(collectives),
            tuple(slices),
            tuple(map(self.placement, operands)),
            ' '.join(f'[{self.block(operand)}]' for operand in operands),
        )
        return _Way(choice, operands, product, tuple(partial))

    def _computed(self, op: Any, inputs: Sequence[Array], read: Attributes) -> Array:
        """Returns the result of an operation on shards: its rule says what its dimensions are."""
        if RULE not in op.attributes:  # a constant
            return Array('', (), ())
        tensors = read.rule(op.attributes[RULE]).tensors
        names = {
            factor: name
            for array, tensor in zip(inputs, tensors, strict=False)
            for name, (factor,) in zip(array.names, tensor, strict=True)
        }
        labels = {array.label for array in inputs if array.label}
        is_of_one = len(labels) == 1 < len(self.operands)
        array = Array(
            labels.pop() if is_of_one else _RESULT, tuple(names[f] for (f,) in tensors[-1]), ()
        )
        if SHARDING not in op.attributes:
            return array.sharded({})
        return replace(array, axes=read.shardings(op.attributes[SHARDING])[0].axes)
