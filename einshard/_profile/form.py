"""The canonical form of a compiled program, which tells it from others of the same name.

A trace holds each program that it ran as an `HloProto`, and `runtime_executable()` gives that of a
compiled function. The bytes of the two differ in ids, metadata and the tables of stack frames, but
each instruction has the same name, opcode, shape, literal, operands and other attributes. Names
alone prove nothing: programs that differ in a constant have the same names.
https://github.com/openxla/xla/blob/main/xla/service/hlo.proto has the numbers of the fields.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from .._program.hlo.opcodes import COLLECTIVES
from .._program.hlo.sources import Sources
from .._program.hlo.wire import WireValue, fields, messages, numbers, text


class Op(NamedTuple):
    """One instruction: hashes stand for its literal, and for its other attributes."""

    name: str
    opcode: str
    shape: str
    operands: str
    literal: str
    rest: str
    groups: str

    @property
    def is_collective(self) -> bool:
        return self.opcode.removesuffix('-start') in COLLECTIVES


Form = Mapping[str, Op]  # by name, in the order of the program

_NAME, _OPCODE, _SHAPE, _METADATA, _LITERAL, _ID, _OPERANDS = 1, 2, 3, 7, 8, 35, 36
_GROUPS = (49, 52, 87)  # replica_groups, source_target_pairs, collective_device_list
# control predecessors and callees by id, sharding, backend_config, in which a GPU's autotuning
# writes, frontend_attributes, statistics, and the values before optimization
_LEFT_OUT = frozenset((_METADATA, _ID, 37, 38, 40, 43, 68, 82, 88))


def read_form(module: memoryview) -> Form:
    """Reads an HloModuleProto."""
    found: dict[str, Op] = {}
    for computation in messages(module, 3):
        names: dict[int, str] = {}  # operands come before their users
        for instruction in messages(computation, 2):
            op = _read_op(instruction, names)
            found[op.name] = op
    return found


def _read_op(data: memoryview, names: dict[int, str]) -> Op:
    name = opcode = shape = literal = ''
    layout = b''
    operands, rest, groups = list[str](), list[bytes](), list[bytes]()
    for number, value in fields(data):
        if number == _NAME:
            name = text(value)
        elif number == _OPCODE:
            opcode = text(value)
        elif number == _SHAPE and not isinstance(value, int):
            shape, layout = shape_text(value), bytes(value)
        elif number == _LITERAL and not isinstance(value, int):
            literal = _hash(value)
        elif number == _OPERANDS:
            operands += [names.get(i, '?') for i in numbers(value)]
        elif number == _ID and isinstance(value, int):
            names[value] = name
        elif number not in _LEFT_OUT:
            part = b'%d:' % number + (b'%d' % value if isinstance(value, int) else bytes(value))
            (groups if number in _GROUPS else rest).append(part)
    hashes = _hash(b';'.join((layout, *rest))), _hash(b';'.join(groups)) if groups else ''
    return Op(name, opcode, shape, ' '.join(operands), literal, *hashes)


def _hash(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


_DTYPES = {
    1: 'pred',
    2: 's8',
    3: 's16',
    4: 's32',
    5: 's64',
    6: 'u8',
    7: 'u16',
    8: 'u32',
    9: 'u64',
    10: 'f16',
    11: 'f32',
    12: 'f64',
    14: 'opaque',
    15: 'c64',
    16: 'bf16',
    17: 'token',
    18: 'c128',
    19: 'f8e5m2',
    20: 'f8e4m3fn',
    21: 's4',
    22: 'u4',
}


def shape_text(shape: memoryview) -> str:
    """Formats a ShapeProto without its layout: 'f32[8,16]', or '(f32[8], s32[])'."""
    dtype, sizes, parts = 0, list[int](), list[str]()
    for number, value in fields(shape):
        if number == 2 and isinstance(value, int):
            dtype = value
        elif number == 3:
            sizes += numbers(value)
        elif number == 4 and not isinstance(value, int):
            parts.append(shape_text(value))
    if dtype == 13:
        return f'({", ".join(parts)})'
    return f'{_DTYPES.get(dtype, f"type{dtype}")}[{",".join(map(str, sizes))}]'


def pack(form: Form) -> bytes:
    """Compresses a form: a tenth of the size of the program's text."""
    return zlib.compress('\n'.join('\t'.join(op) for op in form.values()).encode(), 1)


def unpack(data: bytes) -> Form:
    rows = zlib.decompress(data).decode().split('\n')
    return {op.name: op for op in (Op(*row.split('\t')) for row in rows)}


def difference(ours: Form, theirs: Form) -> str:
    """Says in which instruction two programs first differ; '' if they are equal."""
    for name, op in ours.items():
        other = theirs.get(name)
        if other is None:
            return f'{op.opcode} {name} is not in it'
        if op == other:
            continue
        if op.opcode != other.opcode:
            return f'{name} is a {other.opcode} in it, not a {op.opcode}'
        if op.shape != other.shape:
            return f'{name} is {other.shape} in it, not {op.shape}'
        pairs = zip(Op._fields, op, other, strict=True)
        field = next(field for field, a, b in pairs if a != b)
        what = {'literal': 'value', 'rest': 'attributes', 'groups': 'device groups'}
        return f'{op.opcode} {name} has other {what.get(field, field)} in it'
    new = next((op for name, op in theirs.items() if name not in ours), None)
    return f'it also has {new.opcode} {new.name}' if new else ''


def alike(ours: Form, theirs: Form) -> Mapping[str, str] | None:
    """Joins the collectives of two programs whose kernels differ: {their name: our name}.

    Two compilations for GPUs may choose other kernels, as they try which are faster. Returns None
    unless both have the same parameters, the same constants, and as many collectives of each kind,
    shape and groups. Those that agree are joined in their order.
    """

    def key(op: Op) -> tuple[str, str, str]:
        return op.opcode, op.shape, op.groups

    def given(form: Form) -> tuple[object, object]:
        ops = form.values()
        return {op.literal for op in ops}, {op.shape for op in ops if op.opcode == 'parameter'}

    waiting: dict[object, list[str]] = defaultdict(list)
    for name, op in ours.items():
        if op.is_collective:
            waiting[key(op)].append(name)
    others = [op for op in theirs.values() if op.is_collective]
    counts = {shape: len(names) for shape, names in waiting.items()}
    if not waiting or Counter(map(key, others)) != counts or given(ours) != given(theirs):
        return None
    return {op.name: waiting[key(op)].pop(0) for op in others}


_FRAME = 15  # stack_frame_id of OpMetadata


def source_lines(module: memoryview) -> Mapping[str, str]:
    """Returns the source line of each instruction of an HloModuleProto that has one."""
    frames: dict[str, WireValue] = {}
    for computation in messages(module, 3):
        for instruction in messages(computation, 2):
            for metadata in messages(instruction, _METADATA):
                frame = dict(fields(metadata)).get(_FRAME, 0)
                frames[next(map(text, messages(instruction, _NAME)))] = frame
    sources = Sources(line for index in messages(module, 17) for line in _tables(index))
    spans = {name: sources.span(f'stack_frame_id={frame}') for name, frame in frames.items()}
    return {name: span.text for name, span in spans.items() if span is not None}


def _tables(index: memoryview) -> list[str]:
    """Writes a StackFrameIndexProto as the text of a program does."""
    heads = {
        1: ('FileNames', ()),
        3: ('FileLocations', ('file_name_id', 'function_name_id', 'line', 'column')),
        4: ('StackFrames', ('file_location_id', 'parent_frame_id')),
    }
    rows: dict[int, list[str]] = {number: [head] for number, (head, _) in heads.items()}
    for number, value in fields(index):
        if number == 1:
            rows[1].append(f'{len(rows[1])} "{text(value)}"')
        elif number in rows and not isinstance(value, int):
            found = dict(fields(value))
            names = enumerate(heads[number][1], 1)
            parts = ' '.join(f'{name}={found.get(i, 0)}' for i, name in names)
            rows[number].append(f'{len(rows[number])} {{{parts}}}')
    return [line for lines in rows.values() for line in lines]
