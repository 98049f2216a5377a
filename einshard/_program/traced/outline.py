"""What a lowered module computes, whatever its shardings: read once, for all that are scored.

Reading a module as `Propagated` takes as long as propagating it. Neighbours of a program differ
only in attributes, so operations, rules and loops are read once; of each propagated copy, only the
attributes of shardings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeAlias

from ..hlo.queries import reached
from .attributes import Attributes, Sharding
from .propagated import BARRIER, CONSTRAINT, Rule
from .shardy import (
    EDGE_SHARDING,
    IN_SHARDINGS,
    OUT_SHARDINGS,
    POSITION,
    REPLACED,
    RULE,
    RULE_PASSES,
    SHARDING,
    NotPropagated,
    Op,
    all_ops,
    run,
)

# a value passes from one place to another with the same dimensions: into and out of loops,
# branches, calls and shard_map, through a constraint, or to a result of the program
MOVE = 'move'
PRODUCTS = frozenset(('dot_general', 'convolution'))
# operations with regions that are walked; others, such as a reduction, have scalars in them
_REGIONS = frozenset(('while', 'case', 'if', 'named_computation', 'manual_computation'))
_FEATURES = re.compile(r'\]x\[(.*?)\]')
_COUNT = re.compile(r'dense<([1-9]\d*)>')
_GROUPS = re.compile(r'dense<(.*)> : tensor<(\d+)x(\d+)xi64>')


class Type(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """What equal operations have in common, as those of unrolled layers.

    Attributes:
        kind: its StableHLO name, such as 'dot_general', or MOVE.
        rule: None for a MOVE, and for operations that Shardy does not know.
        flops: of products, of all devices.
        groups: the devices of each group of a collective inside `shard_map`.
    """

    kind: str
    rule: Rule | None
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    flops: float = 0.0
    groups: tuple[tuple[int, ...], ...] = ()
    slices: tuple[int, ...] = ()


# the name of an attribute, and the values that each of its shardings is of
Slot: TypeAlias = tuple[str, tuple[tuple[int, ...], ...]]


class Step(NamedTuple):
    """An operation, or the passing of a value.

    Attributes:
        operands, results: numbers of values.
        runs: how often it runs.
        op: its position in the module, for its location.
    """

    form: Form
    operands: tuple[int, ...]
    results: tuple[int, ...]
    runs: int
    op: int


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """A place in a module that has an attribute for a sharding.

    Attributes:
        kind: 'argument', 'result' or 'constraint'.
        index: of the argument or result, or the position of the constraint in the module.
    """

    kind: str
    index: int


@dataclass(eq=False)
class Outline:
    """What a module computes.

    Attributes:
        mesh: the size of each mesh axis.
        types: of each value, by its number.
        steps: in program order.
        arguments, results: the numbers of their values. A result's own value, with its own
            sharding, is in `ends`.
        aliases: {argument: the result that is in its memory}.
        unsharded: the sharding of each value without an attribute.
        carried: the arguments of the condition and the body of a loop, by its result.
        standing, n_standing: the positions of operations of a layer that stands for others, and for
            how many.
        constraints, constrained: the value that each constraint gives, and the one that it takes,
            by its position in the module, in program order.
    """

    mesh: dict[str, int] = field(default_factory=dict[str, int])
    types: list[Type] = field(default_factory=list[Type])
    steps: list[Step] = field(default_factory=list[Step])
    arguments: list[int] = field(default_factory=list[int])
    results: list[int] = field(default_factory=list[int])
    ends: list[int] = field(default_factory=list[int])
    aliases: dict[int, int] = field(default_factory=dict[int, int])
    constraints: dict[int, int] = field(default_factory=dict[int, int])
    constrained: dict[int, int] = field(default_factory=dict[int, int])
    carried: dict[int, list[int]] = field(default_factory=dict[int, 'list[int]'])
    standing: frozenset[int] = frozenset()
    n_standing: int = 1
    mesh_name: str = ''
    # by position, the attributes to read, and the values that each of their shardings is of
    slots: list[tuple[Slot, ...]] = field(default_factory=list['tuple[Slot, ...]'])
    # kinds of places, attributes of the main function, and the value that each entry is of
    ports: list[tuple[str, str, list[int]]] = field(
        default_factory=list[tuple[str, str, list[int]]]
    )
    # the positions of operations with regions that are walked
    nested: set[int] = field(default_factory=set[int])
    unsharded: list[Sharding] = field(default_factory=list[Sharding])

    @functools.cached_property
    def steps_of(self) -> dict[int, list[int]]:
        """The steps that take or give each value, by their position in `steps`."""
        found: dict[int, list[int]] = {}
        for i, step in enumerate(self.steps):
            for value in (*step.operands, *step.results):
                found.setdefault(value, []).append(i)
        return found

    def shardings(
        self, module: Op, attributes: Attributes, removed: Collection[int] = ()
    ) -> list[Sharding]:
        """The sharding of each value in a propagated copy.

        Args:
            removed: the positions of constraints that the copy does not have.
        """
        found = [*self.unsharded]
        slots, read = self.slots, attributes.shardings
        main = main_of(module)
        blocks = [main.regions[0].blocks[0]]
        for block in blocks:
            for op in block.operations:
                given = op.attributes
                number = given.get(POSITION)
                if number is None:
                    continue
                at = number.value
                for key, values in slots[at]:
                    attribute = given.get(key)
                    if attribute is None:
                        continue
                    # a callback without results has one sharding nevertheless
                    for sharding, each in zip(read(attribute), values, strict=False):
                        for value in each:
                            # the result of a callback is on one device, in a sharding without axes
                            if len(sharding.axes) == len(found[value].axes):
                                found[value] = sharding
                if at in self.nested:
                    blocks += (region.blocks[0] for region in op.regions)
        for _, key, values in self.ports:
            if key not in main.attributes:
                continue
            for value, given in zip(values, main.attributes[key], strict=True):
                if SHARDING in given:
                    found[value] = read(given[SHARDING])[0]
        for position, value in self.constraints.items():  # in program order
            if position in removed:
                found[value] = found[self.constrained[position]]
        return found


def bytes_of(type_: Type) -> int:
    return prod(type_.shape) * _WIDTHS.get(type_.dtype, 4)


_WIDTHS = {
    **dict.fromkeys(('pred', 's8', 'u8', 's4', 'u4'), 1),
    **dict.fromkeys(('bf16', 'f16', 's16', 'u16'), 2),
    **dict.fromkeys(('f64', 's64', 'u64', 'c64'), 8),
    'c128': 16,
    'token': 0,
}


def read_outline(module: Op, attributes: Attributes) -> Outline:
    """Reads an imported module, inside `shardy.locked`. Numbers its operations, if none has one."""
    ops = all_ops(module)
    if POSITION not in module.attributes:
        for i, op in enumerate(ops):
            # the passes may move constraints, and remove operations that nothing uses
            op.attributes[POSITION] = attributes.number(i)
    ruled = module.clone()
    run(ruled, RULE_PASSES)
    return _Reader(attributes, {_position(op): op for op in all_ops(ruled)}).read(module)


def _position(op: Op) -> int:
    return op.attributes[POSITION].value


def find_mesh(module: Op, attributes: Attributes) -> tuple[str, dict[str, int]]:
    """Returns the name of the mesh and the sizes of its axes.

    Keys of random numbers may have a second one, without axes.

    Raises:
        NotPropagated: if there are meshes of several shapes. A shard_map may have its own.
    """
    ops = (view.operation for view in module.regions[0].blocks[0].operations)
    meshes = [
        (op.attributes['sym_name'].value, attributes.mesh(op.attributes['mesh']))
        for op in ops
        if op.name == 'sdy.mesh'
    ]
    found = [mesh for mesh in meshes if mesh[1]]
    if any(mesh[1] != found[0][1] for mesh in found):
        raise NotPropagated('its values are on several meshes')
    return found[0] if found else ('', {})


class _Reader:
    def __init__(self, attributes: Attributes, ruled: Mapping[int, Op]):
        self._read = attributes
        self._ruled = ruled
        self._values: dict[Any, int] = {}
        self._forms: dict[Any, Form] = {}
        # conditions, and what has effects
        self._needed = list[int]()
        self.outline = Outline()

    def read(self, module: Op) -> Outline:
        outline = self.outline
        n = 1 + max(map(_position, all_ops(module)))
        outline.slots = [()] * n
        outline.mesh_name, outline.mesh = find_mesh(module, self._read)
        main = main_of(module)
        block = main.regions[0].blocks[0]
        outline.arguments = [self._value(v) for v in block.arguments]
        outline.results = self._block(block, 1)
        outline.ends = [self._new(outline.types[v]) for v in outline.results]
        outline.ports = [
            ('argument', 'arg_attrs', outline.arguments),
            ('result', 'res_attrs', outline.ends),
        ]
        for value, end in zip(outline.results, outline.ends, strict=True):
            self._move(value, end, 1, n - 1)
        outline.steps = self._used_steps()
        if 'arg_attrs' in main.attributes:
            for i, given in enumerate(main.attributes['arg_attrs']):
                if 'tf.aliasing_output' in given:
                    outline.aliases[i] = given['tf.aliasing_output'].value
        none = {type_: Sharding(((),) * len(type_.shape)) for type_ in {*outline.types}}
        outline.unsharded = [none[type_] for type_ in outline.types]
        return outline

    def _used_steps(self) -> list[Step]:
        """The steps whose results are needed. XLA removes the others, which have no shardings.

        Differentiation leaves some, such as the derivative of a maximum that only shifts values.
        """
        outline = self.outline
        makers: dict[int, list[Step]] = {}
        for step in outline.steps:
            for value in step.results:
                makers.setdefault(value, []).append(step)
        loops = {argument: [r] for r, each in outline.carried.items() for argument in each}

        def needed(value: int) -> list[int]:
            operands = [v for step in makers.get(value, ()) for v in step.operands]
            return operands + loops.get(value, [])

        used = {*reached([*outline.ends, *self._needed], needed)}
        return [step for step in outline.steps if not used.isdisjoint(step.results)]

    # --- values ---------------------------------------------------------------------------------

    def _new(self, type_: Type) -> int:
        self.outline.types.append(type_)
        return len(self.outline.types) - 1

    def _value(self, mlir: Any) -> int:
        value = self._values[mlir] = self._new(Type(*self._read.type(mlir.type)))
        return value

    def _slot(self, at: int, key: str, values: Iterable[tuple[int, ...]]) -> None:
        self.outline.slots[at] += ((key, tuple(values)),)

    # --- steps ----------------------------------------------------------------------------------

    def _form(self, kind: str, rule: Rule | None, *rest: Any) -> Form:
        key = kind, id(rule), rest
        if key not in self._forms:
            self._forms[key] = Form(kind, rule, *rest)
        return self._forms[key]

    def _add(self, form: Form, operands: Sequence[int], results: Sequence[int], runs: int, at: int):
        self.outline.steps.append(Step(form, tuple(operands), tuple(results), runs, at))

    def _move(self, value: int, to: int, runs: int, at: int) -> None:
        type_ = self.outline.types[value]
        self._add(self._form(MOVE, None, (type_,), (type_,)), [value], [to], runs, at)

    def _block(self, block: Any, runs: int) -> list[int]:
        """Reads the operations of a block. Returns the values that it ends with."""
        values, outline = self._values, self.outline
        for view in block.operations:
            op = view.operation
            at = _position(op)
            kind = op.name.rpartition('.')[2]
            operands = [values[v] for v in op.operands]
            if kind == 'return':
                return operands
            if kind in _REGIONS:
                outline.nested.add(at)
                self._region(kind, op, operands, runs, at)
                continue
            if kind == 'data_flow_edge':
                # it has the sharding of what it takes, and of arguments of the body of a loop
                followers = outline.carried.get(operands[0], ())
                self._slot(at, EDGE_SHARDING, [(*operands, *followers)])
                values[op.results[0]] = operands[0]
                continue
            results = [self._value(v) for v in op.results]
            if kind == CONSTRAINT:
                self._slot(at, EDGE_SHARDING, [(results[0],)])
                outline.constraints[at] = results[0]
                outline.constrained[at] = operands[0]
                self._move(operands[0], results[0], runs, at)
            else:
                self._slot(at, SHARDING, ((v,) for v in results))
                if kind == BARRIER:
                    for value, result in zip(operands, results, strict=True):
                        self._move(value, result, runs, at)
                elif results:
                    self._operation(kind, op, operands, results, runs, at)
        return []

    def _operation(
        self, kind: str, op: Op, operands: list[int], results: list[int], runs: int, at: int
    ) -> None:
        types, given = self.outline.types, self._ruled[at].attributes
        rule = self._read.rule(given[RULE]) if RULE in given else None
        if REPLACED in op.attributes:
            kind = op.attributes[REPLACED].value.rpartition('.')[2]
        shapes = tuple(types[v] for v in operands), tuple(types[v] for v in results)
        flops, groups = 0.0, ()
        if kind in PRODUCTS and rule is not None:
            flops = 2.0 * prod(rule.sizes)
            if kind == 'convolution':
                names = _FEATURES.search(str(op.attributes['dimension_numbers']))
                features = names[1].split(', ').index('o') if names else 0
                weights = types[operands[1]].shape
                flops = 2.0 * prod(types[results[0]].shape) * prod(weights) / weights[features]
        elif 'replica_groups' in op.attributes:
            groups = _groups_of(str(op.attributes['replica_groups']))
        slices: tuple[int, ...] = ()
        if 'slice_sizes' in op.attributes:
            slices = tuple(op.attributes['slice_sizes'])
        if kind == 'custom_call':
            self._needed += results
        form = self._form(kind, rule, *shapes, flops, groups, slices)
        self._add(form, operands, results, runs, at)

    def _region(self, kind: str, op: Op, operands: list[int], runs: int, at: int) -> None:
        if kind == 'manual_computation':
            self._manual(op, operands, runs, at)
            return
        results = [self._value(v) for v in op.results]
        blocks = [region.blocks[0] for region in op.regions]
        if kind == 'while':
            for block in blocks:
                arguments = [self._value(v) for v in block.arguments]
                for result, argument in zip(results, arguments, strict=True):
                    self.outline.carried.setdefault(result, []).append(argument)
            for value, result in zip(operands, results, strict=True):
                self._move(value, result, runs, at)
            n = trip_count(op)
            condition, *ends = (self._block(block, runs * n) for block in blocks)
            self._needed += condition
            runs *= n
        elif kind == 'named_computation':
            arguments = [self._value(v) for v in blocks[0].arguments]
            for value, argument in zip(operands, arguments, strict=True):
                self._move(value, argument, runs, at)
            ends = [self._block(blocks[0], runs)]
        else:
            self._needed += operands  # which branch
            ends = [self._block(block, runs) for block in blocks]
        for each in ends:
            for value, result in zip(each, results, strict=True):
                self._move(value, result, runs, at)

    def _manual(self, op: Op, operands: list[int], runs: int, at: int) -> None:
        block, types = op.regions[0].blocks[0], self.outline.types
        given = [self._new(types[v]) for v in operands]
        for value, argument in zip(operands, given, strict=True):
            self._move(value, argument, runs, at)
        for argument in block.arguments:
            self._value(argument)
        first = len(self.outline.steps)
        self._block(block, runs)
        self._needed += (v for step in self.outline.steps[first:] for v in step.results)
        results = [self._value(v) for v in op.results]
        self._slot(at, IN_SHARDINGS, ((v,) for v in given))
        self._slot(at, OUT_SHARDINGS, ((v,) for v in results))


def trip_count(op: Op) -> int:
    """The iterations of a loop that counts from 0 up to a constant, else 1."""
    for view in op.regions[0].blocks[0].operations:
        if view.operation.name != 'stablehlo.compare':
            continue
        for value in view.operation.operands:
            if hasattr(value, 'arg_number'):
                value = op.operands[value.arg_number]
            owner = getattr(value.owner, 'operation', value.owner)
            is_constant = getattr(owner, 'name', '').endswith('.constant')
            if is_constant and (count := _COUNT.search(str(owner.attributes['value']))):
                return int(count[1])
    return 1


def _groups_of(text: str) -> tuple[tuple[int, ...], ...]:
    found = _GROUPS.search(text)
    if found is None:
        return ()
    numbers, size = [int(n) for n in re.findall(r'\d+', found[1])], int(found[3])
    return tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))


def main_of(module: Op) -> Op:
    ops = (view.operation for view in module.regions[0].blocks[0].operations)
    return next(
        op for op in ops if op.name == 'func.func' and op.attributes['sym_name'].value == 'main'
    )
