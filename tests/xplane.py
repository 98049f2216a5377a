"""Writes traces by the published schema, for devices that tests don't have.

https://github.com/openxla/xla has the schemas, xplane.proto and hlo.proto.
"""

import struct
from collections import defaultdict

# private: what the package reads in traces, and a second route to it
from einshard._profile.events import read_events
from einshard._profile.form import difference
from einshard._profile.match import find_programs
from einshard._profile.trace import read_planes, read_trace
from einshard._program.hlo.wire import fields, messages, text

DTYPES = {'pred': 1, 's32': 4, 'u32': 8, 'f32': 11, 'bf16': 16, 'token': 17}


def varint(n):
    n %= 2**64
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def field(number, value):
    """One field: an integer, a float, text, or the bytes of a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack('<d', value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def module_of(program):
    """The HloModuleProto of a parsed text. Groups and dimensions are text, too."""
    ids = {}
    for ops in program.computations.values():
        for op in ops:
            ids[op.name] = len(ids) + 1
    computations = b''
    for name, ops in program.computations.items():
        body = field(1, name)
        for op in ops:
            operands = [o.partition('#')[0] for o in op.operands]
            body += field(2, instruction(op, ids, [ids[o] for o in operands if o in ids]))
        computations += field(3, body)
    return field(1, program.name) + computations


def instruction(op, ids, operands):
    arrays = b''.join(field(4, shape_of(array)) for array in op.results)
    shape = shape_of(op.results[0]) if len(op.results) == 1 else field(2, 13) + arrays
    data = field(1, op.name) + field(2, op.opcode) + field(3, shape)
    if op.opcode == 'constant':
        data += field(8, op.operand_text)
    groups, _, rest = op.attributes.partition('replica_groups=')
    data += field(49, rest.partition('}}')[0]) if rest else b''
    data += field(14, groups) if groups else b''
    return data + field(35, ids[op.name]) + field(36, b''.join(map(varint, operands)))


def shape_of(array):
    dims = b''.join(map(varint, array.shape))
    return field(2, DTYPES[array.dtype]) + field(3, dims)


class Plane:
    """An XPlane; `lines` is {name: [(event name, start in us, microseconds, stats)]}."""

    def __init__(self, name, lines=None, programs=None, stats=None):
        self.name, self.events, self.stats = name, {}, {}
        body = field(2, name)
        for number, (line, events) in enumerate((lines or {}).items(), 1):
            data = field(1, number) + field(2, line)
            for event, start, took, values in events:
                data += field(
                    4,
                    field(1, self.id(self.events, event))
                    + field(2, round(start * 1e6))
                    + field(3, round(took * 1e6))
                    + b''.join(field(4, self.stat(*pair)) for pair in values.items()),
                )
            body += field(3, data)
        for program, module in (programs or {}).items():
            proto = self.stat('hlo_proto', field(1, module))
            n = self.id(self.events, program)
            body += self.entry(4, n, field(1, n) + field(2, program) + field(5, proto))
        for event, n in self.events.items():
            if event not in (programs or {}):
                body += self.entry(4, n, field(1, n) + field(2, event))
        body += b''.join(field(6, self.stat(*pair)) for pair in (stats or {}).items())
        for stat, n in self.stats.items():
            body += self.entry(5, n, field(1, n) + field(2, stat))
        self.data = body

    @staticmethod
    def id(known, name):
        return known.setdefault(name, len(known) + 1)

    @staticmethod
    def entry(number, key, value):
        return field(number, field(1, key) + field(2, value))

    def stat(self, name, value):
        number = 4 if isinstance(value, int) else 5 if isinstance(value, str) else 6
        return field(1, self.id(self.stats, name)) + field(number, value)


def space(*planes, warnings=()):
    return b''.join(field(1, plane.data) for plane in planes) + b''.join(
        field(3, text) for text in warnings
    )


def cut(data):
    """A trace of CPUs with only its programs, without source files, and their events.

    tests/traces has those of `profiled.STEPS`, each called three times.
    """
    from jax.profiler import ProfileData

    def without(message, numbers, inside=None):
        kept = b''
        for number, value in fields(message):
            if number not in numbers:
                inner = (inside or {}).get(number)
                value = value if isinstance(value, int) else bytes(value)
                kept += field(number, inner(memoryview(value)) if inner else value)
        return kept

    def module(proto):
        # stack frames are 17, computations 3, their instructions 2, and metadata of these 7
        return without(proto, {17}, {3: lambda c: without(c, (), {2: lambda i: without(i, {7})})})

    programs = {}
    for name, plane in read_planes(memoryview(data)):
        for entry in messages(plane, 4) if name == '/host:metadata' else ():
            for metadata in messages(entry, 2):
                (title,) = map(text, messages(metadata, 2))
                for stat in messages(metadata, 5):
                    for proto in messages(stat, 6):
                        (programs[title],) = map(module, messages(proto, 1))
    lines = {}
    keys = 'hlo_op', 'hlo_module', 'program_id', 'run_id', 'device_ordinal'
    for plane in ProfileData.from_serialized_xspace(data).planes:
        for line in plane.lines if plane.name == '/host:CPU' else ():
            for event in line.events:
                stats = dict(event.stats)
                if 'hlo_op' in stats:
                    row = event.name, event.start_ns / 1e3, event.duration_ns / 1e3
                    values = {key: stats[key] for key in keys}
                    lines.setdefault('threads', []).append((*row, values))
    return space(Plane('/host:metadata', programs=programs), Plane('/host:CPU', lines))


def raw_events(folder, program):
    """{instruction: {device: [(run, start, end)]}} of the raw bytes, by another route."""
    data = memoryview(read_trace(folder).data)
    found = defaultdict(lambda: defaultdict(list))
    for plane in messages(data, 1):
        if [*map(text, messages(plane, 2))] != ['/host:CPU']:
            continue
        stats = {}
        for entry in messages(plane, 5):
            key, value = dict(fields(entry)).values()
            stats[key] = next(map(text, messages(value, 2)), '')
        for line in messages(plane, 3):
            base = dict(fields(line)).get(3, 0)
            for event in messages(line, 4):
                values = {}
                for stat in messages(event, 4):
                    parts = dict(fields(stat))
                    value = next((v for number, v in parts.items() if number != 1), 0)
                    is_text = not isinstance(value, int)
                    value = text(value) if is_text else stats[value] if 7 in parts else value
                    values[stats[parts.get(1, 0)]] = value
                if 'hlo_op' in values and values['program_id'] == program:
                    parts = dict(fields(event))
                    start = base + parts.get(2, 0) / 1000
                    row = values['run_id'], start, start + parts.get(3, 0) / 1000
                    found[values['hlo_op']][values['device_ordinal']].append(row)
    return found


def programs_of(path):
    """The form, the differences to all others, and the events of each program of a trace."""
    trace = read_trace(path)
    for name, form in trace.forms.items():
        (match,) = find_programs(form, trace, None, kernels_may_differ=False)
        assert match.name == name
        others = [difference(form, other) for n, other in trace.forms.items() if n != name]
        yield form, others, read_events(trace.data, match, [*form])
