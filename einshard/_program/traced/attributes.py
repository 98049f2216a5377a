"""Reads Shardy's attributes, and locations, of MLIR operations: each distinct one once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .propagated import Axes, Axis, Edges, Frame, Rule

_TEXT = r'"((?:[^"\\]|\\.)*)"'
# '"norm"("model.py":10:13 to :63)' in the text of a location; the end may have a line
_FRAME = re.compile(_TEXT + r':(\d+):(\d+)(?: to (\d*):(\d+))?')
# a name is followed by the location that it names
_PATH = re.compile(rf'loc\({_TEXT}[()]')
_ORIGIN = re.compile(r'([\w.]+|"(?:[^"\\]|\\.)*")\s*=\s*"([^"]*)"')
_EDGE = re.compile(r'"([^"]+)"((?::\(\d+\)\d+)?) = (\w+)-(\d+) -> \[([^\]]*)\]')
_STEP = re.compile(r'step-\d+')
_BRACES = re.compile(r'\{([^{}]*)\}')
# StableHLO's names of element types; HLO has others
_DTYPES = {'i1': 'pred', 'complex<f32>': 'c64', 'complex<f64>': 'c128'}


class Sharding(NamedTuple):
    axes: Axes = ()
    replicated: tuple[Axis, ...] = ()
    unreduced: tuple[Axis, ...] = ()


class Attributes:
    """Reads attributes of one module. Needs the module's context.

    A program has few distinct shardings, rules and locations: 94 rules for 10,000 operations of a
    train step with 32 layers. So each result is kept by its attribute, which MLIR makes unique. Of
    5,900 edges none equals another, as they count steps; they are compared without the number.
    """

    def __init__(self) -> None:
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import sdy

        self._ir: Any = ir
        self._sdy: Any = sdy
        self._types: dict[Any, tuple[tuple[int, ...], str]] = {}
        self._shardings: dict[Any, tuple[Sharding, ...]] = {}
        self._rules: dict[Any, Rule] = {}
        self._locations: dict[Any, tuple[str, tuple[Frame, ...]]] = {}
        self._origins: dict[Any, tuple[dict[Axis, str], ...]] = {}
        self._edges: dict[tuple[str, int], Edges] = {}

    def type(self, type_: Any) -> tuple[tuple[int, ...], str]:
        """The shape and HLO dtype of a type; a token has none."""
        found = self._types.get(type_)
        if found is None:
            if isinstance(type_, self._ir.RankedTensorType):
                name = str(type_.element_type)
                dtype = _DTYPES.get(name) or re.sub(r'^ui', 'u', re.sub(r'^i', 's', name))
                found = tuple(map(int, type_.shape)), dtype.lower()
            else:
                found = (), 'token'
            self._types[type_] = found
        return found

    def mesh(self, attribute: Any) -> dict[str, int]:
        axes = map(self._sdy.MeshAxisAttr, self._sdy.MeshAttr(attribute).axes)
        return {axis.name: int(axis.size) for axis in axes}

    def mesh_of(self, sizes: Mapping[str, int]) -> Any:
        """The attribute of a mesh with axes of these sizes."""
        axes = ', '.join(f'"{name}"={size}' for name, size in sizes.items())
        return self._ir.Attribute.parse(f'#sdy.mesh<[{axes}]>')

    def shardings(self, attribute: Any) -> tuple[Sharding, ...]:
        """The sharding of each value; one for an attribute of a single value."""
        found = self._shardings.get(attribute)
        if found is None:
            several = self._sdy.TensorShardingPerValueAttr
            each = [attribute]
            if several.isinstance(attribute):
                each = several(attribute).shardings
            found = self._shardings[attribute] = tuple(map(self._sharding, each))
        return found

    def _sharding(self, attribute: Any) -> Sharding:
        read = self._sdy.TensorShardingAttr(attribute)
        dimensions = map(self._sdy.DimensionShardingAttr, read.dimension_shardings)
        axes = tuple(tuple(map(self._axis, d.axes)) for d in dimensions)
        replicated, unreduced = read.replicated_axes, read.unreduced_axes
        return Sharding(axes, tuple(map(self._axis, replicated)), tuple(map(self._axis, unreduced)))

    def _axis(self, attribute: Any) -> Axis:
        read = self._sdy.AxisRefAttr(attribute)
        if read.sub_axis_info is None:
            return read.name
        part = self._sdy.SubAxisInfoAttr(read.sub_axis_info)
        return f'{read.name}:({part.pre_size}){part.size}'

    def rule(self, attribute: Any) -> Rule:
        found = self._rules.get(attribute)
        if found is None:
            sdy = self._sdy
            read = sdy.OpShardingRuleAttr(attribute)
            mappings = [*read.operand_mappings, *read.result_mappings]
            tensors = tuple(
                tuple(
                    tuple(sdy.DimMappingAttr(dim).factor_indices)
                    for dim in sdy.TensorMappingAttr(mapping).dim_mappings
                )
                for mapping in mappings
            )
            found = self._rules[attribute] = Rule(
                tensors,
                tuple(read.factor_sizes),
                frozenset(read.reduction_factors),
                frozenset(read.need_replication_factors),
                frozenset(read.permutation_factors),
            )
        return found

    def location(self, location: Any) -> tuple[str, tuple[Frame, ...]]:
        """The path of an operation, '' if it has none, and its frames, innermost first."""
        key = location.attr
        found = self._locations.get(key)
        if found is None:
            text = str(location)
            path = _PATH.match(text)
            frames = tuple(
                Frame(_unescaped(file), int(line), int(column) + 1, *_end(line, *end))
                for file, line, column, *end in _FRAME.findall(text)
            )
            found = self._locations[key] = (_unescaped(path[1]) if path else ''), frames
        return found

    def number(self, n: int) -> Any:
        """An attribute with a number."""
        return self._ir.IntegerAttr.get(self._ir.IntegerType.get_signless(64), n)

    def sharding(self, mesh: str, axes: Axes, n_open: int = 0) -> Any:
        """The attribute of a sharding. Propagation adds only to the first `n_open` dimensions."""
        dims = (
            '{' + ', '.join([*map(_axis_text, dim), *['?'] * (i < n_open)]) + '}'
            for i, dim in enumerate(axes)
        )
        return self._ir.Attribute.parse(f'#sdy.sharding<@{mesh}, [{", ".join(dims)}]>')

    def origins(self, attribute: Any) -> tuple[dict[Axis, str], ...]:
        """The origin of each mesh axis of each value; one for an attribute of a single value."""
        found = self._origins.get(attribute)
        if found is None:
            parts = _BRACES.findall(str(attribute))
            each = [{key.strip('"'): name for key, name in _ORIGIN.findall(p)} for p in parts]
            found = self._origins[attribute] = tuple(each)
        return found

    def edges(self, attribute: Any, n_operands: int) -> Edges:
        text = _STEP.sub('', str(attribute))
        found = self._edges.get((text, n_operands))
        if found is None:

            def position(side: str, number: str) -> int:
                return int(number) + (n_operands if side == 'result' else 0)

            found = self._edges[text, n_operands] = tuple(
                (
                    axis + part,
                    position(side, number),
                    tuple(position(*end.split('-')) for end in ends.split(', ')),
                )
                for axis, part, side, number, ends in _EDGE.findall(text)
            )
        return found


def _axis_text(axis: Axis) -> str:
    name, colon, part = axis.partition(':')
    return f'"{name}"{colon}{part}'


def _end(line: str, end_line: str, end_column: str) -> tuple[int, int]:
    # an end in the same line has no line number; MLIR counts columns from 0
    return (int(end_line or line), int(end_column) + 1) if end_column else (0, 0)


def _unescaped(text: str) -> str:
    if '\\' not in text:
        return text
    # MLIR writes bytes outside ASCII as two hexadecimal digits
    escaped = re.sub(rb'\\([0-9A-F]{2}|.)', _byte, text.encode())
    return escaped.decode(errors='replace')


def _byte(match: re.Match[bytes]) -> bytes:
    digits = match[1]
    return bytes.fromhex(digits.decode()) if len(digits) == 2 else digits
