"""The bytes of HBM that one instruction reads and writes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from .hbm_traffic import is_in_hbm
from .text import HloModule, Instruction, array_types

_TYPE = re.compile(r'[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?')
_SLICES = ('dynamic-slice', 'slice', 'gather')
_MOVES = ('bitcast', 'convert', 'copy', 'reshape')
_ACCESSED = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')  # Pallas kernels


def op_bytes(program: HloModule, op: Instruction, types: Mapping[str, str]) -> int:
    """Returns the bytes of operands and results. A fusion is a unit: what is inside is not in HBM.

    Of an array that is only sliced or updated in place, the slices and the update count. What is
    in the VMEM of a TPU does not.

        >>> from einshard._program.hlo.op_bytes import op_bytes
        >>> from einshard._program.hlo.text import HloModule
        >>> text = '''HloModule jit_f
        ...
        ... ENTRY %main (x: f32[100,8], i: s32[]) -> f32[1,8] {
        ...   %x = f32[100,8]{1,0} parameter(0)
        ...   %i = s32[] parameter(1)
        ...   ROOT %y = f32[1,8]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,8}
        ... }
        ... '''
        >>> program = HloModule(text)
        >>> types = {op.name: op.type for op in program.computations['main']}
        >>> op_bytes(program, program.root, types)  # a slice is read, and written; i is read twice
        72

    Args:
        types: the HLO types of the instructions in its computation, by name.
    """
    if declared := _ACCESSED.search(op.config):
        return int(declared[1])
    if op.opcode == 'slice-start':  # (operand, slice, ..)
        return 2 * op.results[1].bytes
    callee = next(iter(op.callees.get('calls', ())), '')
    inner = {o.name: o for o in program.computations.get(callee, ())} or {op.name: op}
    users: dict[str, list[Instruction]] = {}
    for one in inner.values():
        for name in one.operands:
            users.setdefault(name, []).append(one)
    parameters = {int(o.operand_text): o.name for o in inner.values() if o.opcode == 'parameter'}
    total = 0
    for i, operand in enumerate(op.operands):
        name, _, index = operand.partition('#')  # '%pair#0' is an element of '%pair'
        sizes = _hbm_sizes(types.get(name, ''))
        size = sizes[int(index)] if index.isdecimal() and int(index) < len(sizes) else sum(sizes)
        if size:
            total += _bytes_read(parameters.get(i, operand), users, size)
    root = next((o for o in inner.values() if o.is_root), op)
    results = [inner.get(name) for name in root.operands] if root.opcode == 'tuple' else [root]
    sizes = _hbm_sizes(root.type if op.opcode.endswith('-start') else op.type)
    for size, result in zip(sizes, results, strict=False):
        while result is not None and result.opcode in _MOVES and len(inner) > 1:
            result = inner.get(result.operands[0])
        if result is not None and result.opcode == 'dynamic-update-slice':
            update = result.operands[1]
            written = inner[update].type if update in inner else types.get(update, '')
            size = min(size, sum(array.bytes for array in array_types(written)))
        total += size
    return total


def _bytes_read(name: str, users: Mapping[str, Sequence[Instruction]], size: int) -> int:
    """Returns the bytes that are read of an operand of `size` bytes."""
    read, moved = 0, [name]
    for name in moved:  # which grows
        for user in users.get(name, ()):
            is_first = user.operands[0] == name
            if user.opcode in _SLICES and is_first:
                read += sum(array.bytes for array in user.results)
            elif user.opcode in _MOVES and len(users) > 1:
                moved.append(user.name)
            elif not (user.opcode == 'dynamic-update-slice' and is_first):
                return size
    return min(size, read)


@functools.lru_cache(maxsize=4096)
def _hbm_sizes(type_: str) -> tuple[int, ...]:
    """Returns the bytes of each array of a type; 0 for those in another memory."""
    found = _TYPE.findall(type_)
    return tuple(array_types(one)[0].bytes if is_in_hbm(one) else 0 for one in found)
