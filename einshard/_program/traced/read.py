"""Reads a lowered module as a `Propagated`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .attributes import Attributes
from .propagated import (
    BARRIER,
    BRANCH,
    CALL,
    CONSTRAINT,
    LOOP,
    MANUAL_IN,
    MANUAL_OUT,
    RESULT,
    SHARD,
    Frame,
    Operation,
    Propagated,
    Value,
)
from .shardy import (
    ADDED,
    EDGE_SHARDING,
    EDGES,
    IN_SHARDINGS,
    ORIGIN_NAME,
    ORIGINS,
    OUT_SHARDINGS,
    REPLACED,
    RULE,
    SHARDING,
    Op,
    propagated,
)


def read_program(module: Any, names: Mapping[int, str] | None = None) -> Propagated:
    """Propagates a lowered module and reads it.

    >>> import jax
    >>> from einshard._program.traced.read import read_program
    >>> lowered = jax.jit(lambda x: x @ x.T).lower(jax.ShapeDtypeStruct((8, 4), 'float32'))
    >>> program = read_program(lowered.compiler_ir('stablehlo'), {0: 'x'})
    >>> [op.kind for op in program.operations], program.results[0].shape
    (['transpose', 'dot_general', 'result'], (8, 8))

    Args:
        module: from `lowered.compiler_ir('stablehlo')`. It is not changed.
        names: the user's names of arguments, by their number among those that the program keeps.

    Raises:
        NotPropagated: if Shardy cannot read it.
    """
    with propagated(module) as copy:
        return _Reader(names or {}).read(copy)


class _Outside(NamedTuple):
    """What surrounds an operation: the path and the frames of the call of its function."""

    path: str = ''
    frames: tuple[Frame, ...] = ()


class _Reader:
    def __init__(self, names: Mapping[int, str]):
        self._names = names
        self._read = Attributes()
        self._values: dict[Any, Value] = {}
        # other operations with regions, such as a reduction, have scalars in them
        self._regions = {
            'while': self._while,
            'case': self._case,
            'if': self._case,
            'named_computation': self._call,
            'manual_computation': self._manual,
        }
        self.program = Propagated({}, [], [], [])

    def read(self, module: Op) -> Propagated:
        for view in module.regions[0].blocks[0].operations:
            op = view.operation
            if op.name == 'sdy.mesh':
                self.program.mesh.update(self._read.mesh(op.attributes['mesh']))
            elif op.name == 'func.func' and op.attributes['sym_name'].value == 'main':
                self._main(op)
        return self.program

    def _main(self, function: Op) -> None:
        program, block = self.program, function.regions[0].blocks[0]
        given = _attributes_of_each(function, 'arg_attrs')
        for i, argument in enumerate(block.arguments):
            value = self._value(argument)
            value.argument = i
            value.path = self._read.location(argument.location)[0]
            value.name = self._names.get(i) or value.path or f'argument {i}'
            if given:
                self._annotate(value, given[i], SHARDING)
            program.arguments.append(value)
        outputs = self._block(block, _Outside())
        given = _attributes_of_each(function, 'res_attrs')
        for i, value in enumerate(outputs):
            result = Value(value.shape, value.dtype, result=i, name='result')
            # the return has no line: where the value is computed says more
            source = value.producer
            path, frames = (source.path, source.frames) if source else ('', ())
            op = self._add(Operation(RESULT, path, frames, [value], [result]))
            if given:
                self._annotate(result, given[i], SHARDING)
                if EDGES in given[i]:
                    op.edges = self._read.edges(given[i][EDGES], 1)
                if 'jax.result_info' in given[i]:
                    result.name = given[i]['jax.result_info'].value
            program.results.append(result)

    def _value(self, mlir: Any) -> Value:
        value = self._values[mlir] = Value(*self._read.type(mlir.type))
        return value

    def _annotate(self, value: Value, attributes: Any, key: str) -> None:
        if key in attributes:
            [sharding] = self._read.shardings(attributes[key])
            value.axes, value.replicated, value.unreduced = sharding
        if ORIGINS in attributes:
            value.origin_names = self._read.origins(attributes[ORIGINS])[0]

    def _add(self, op: Operation) -> Operation:
        self.program.operations.append(op)
        for i, value in enumerate(op.operands):
            value.users.append((op, i))
        for i, value in enumerate(op.results):
            value.producer, value.index = op, i
        return op

    def _block(self, block: Any, outside: _Outside) -> list[Value]:
        """Reads the operations of a block. Returns the values that it ends with."""
        read, values = self._read, self._values
        for view in block.operations:
            op = view.operation
            name, attributes = op.name, op.attributes
            operands = [values[v] for v in op.operands]
            kind = name.rpartition('.')[2]
            if kind == 'return':
                return operands
            if kind == 'data_flow_edge':
                # The shardings of carried values and of arguments and results of calls are not at
                # the loop or call, but at an operation that takes their place.
                value = values[op.results[0]] = operands[0]
                self._annotate(value, attributes, EDGE_SHARDING)
                if value.producer is not None and EDGES in attributes:
                    n_operands = len(value.producer.operands)
                    value.producer.edges = read.edges(attributes[EDGES], n_operands)
                continue
            if ADDED in attributes:
                values[op.results[0]] = operands[0]
                continue
            path, frames = read.location(op.location)
            if outside.path:  # names in an inner function begin at the function
                path = f'{outside.path}/{path}' if path else outside.path
                frames += outside.frames
            if kind in self._regions:
                self._regions[kind](op, operands, outside, _Outside(path, frames))
                continue
            results = [self._value(v) for v in op.results]
            if kind == BARRIER:
                for value, result in zip(operands, results, strict=True):
                    self._add(Operation(BARRIER, path, frames, [value], [result]))
                continue
            if REPLACED in attributes:
                kind = attributes[REPLACED].value.rpartition('.')[2]
            made = Operation(kind, path, frames, operands, results)
            if RULE in attributes:
                made.rule = read.rule(attributes[RULE])
            if EDGES in attributes:
                made.edges = read.edges(attributes[EDGES], len(operands))
            if kind == CONSTRAINT:
                self._annotate(results[0], attributes, EDGE_SHARDING)
                if ORIGIN_NAME in attributes:
                    self.program.constraints[attributes[ORIGIN_NAME].value] = made
            elif SHARDING in attributes:
                shardings = read.shardings(attributes[SHARDING])
                # a callback without results has one sharding nevertheless
                for value, sharding in zip(results, shardings, strict=False):
                    value.axes, value.replicated, value.unreduced = sharding
                if ORIGINS in attributes:
                    origins = read.origins(attributes[ORIGINS])
                    for value, names in zip(results, origins, strict=True):
                        value.origin_names = names
            self._add(made)
        return []

    # --- operations with regions: what they pass on, one operation for each value -----------------

    def _while(self, op: Op, operands: list[Value], outside: _Outside, here: _Outside) -> None:
        carried = [self._value(v) for v in op.results]
        ends: list[Value] = []
        for region in op.regions:  # the condition, then the body
            block = region.blocks[0]
            # Shardy shards a value of a loop once, before, inside and after the loop
            self._values.update(zip(block.arguments, carried, strict=True))
            ends = self._block(block, outside)
        for first, last, value in zip(operands, ends, carried, strict=True):
            self._add(Operation(LOOP, here.path, here.frames, [first, last], [value]))

    def _case(self, op: Op, operands: list[Value], outside: _Outside, here: _Outside) -> None:
        ends = [self._block(region.blocks[0], outside) for region in op.regions]
        for each, result in zip(zip(*ends, strict=True), op.results, strict=True):
            value = self._value(result)
            self._add(Operation(BRANCH, here.path, here.frames, [*each], [value]))

    def _call(self, op: Op, operands: list[Value], outside: _Outside, here: _Outside) -> None:
        block = op.regions[0].blocks[0]
        for value, argument in zip(operands, block.arguments, strict=True):
            self._add(Operation(CALL, here.path, here.frames, [value], [self._value(argument)]))
        for value, result in zip(self._block(block, here), op.results, strict=True):
            self._add(Operation(CALL, here.path, here.frames, [value], [self._value(result)]))

    def _manual(self, op: Op, operands: list[Value], outside: _Outside, here: _Outside) -> None:
        block, attributes = op.regions[0].blocks[0], op.attributes
        path, frames = here
        name = attributes[ORIGIN_NAME].value if ORIGIN_NAME in attributes else ''

        def add(kind: str, i: int, value: Value, given: Value, key: str) -> None:
            sharding = self._read.shardings(attributes[key])[i]
            given.axes, given.replicated, given.unreduced = sharding
            given.origin_names = {a: 'self' for axes in given.axes for a in axes}
            side = 'input' if kind == MANUAL_IN else 'output'
            made = self._add(Operation(kind, path, frames, [value], [given]))
            self.program.manual[f'{name}_{side}: {i}'] = made

        for i, (value, argument) in enumerate(zip(operands, block.arguments, strict=True)):
            given = Value(value.shape, value.dtype)
            add(MANUAL_IN, i, value, given, IN_SHARDINGS)
            self._add(Operation(SHARD, path, frames, [given], [self._value(argument)]))
        for i, (value, result) in enumerate(zip(self._block(block, here), op.results, strict=True)):
            made, given = self._value(result), Value(*self._read.type(result.type))
            self._add(Operation(SHARD, path, frames, [value], [given]))
            add(MANUAL_OUT, i, given, made, OUT_SHARDINGS)
            given.axes = made.axes


def _attributes_of_each(function: Op, key: str) -> Sequence[Any]:
    """Returns the attributes of each argument or result, or nothing if none has any."""
    return list(function.attributes[key]) if key in function.attributes else ()
