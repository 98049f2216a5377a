"""Finds bf16 and f16 collectives that XLA runs in f32, as on CPU."""

from __future__ import annotations

import re
from dataclasses import replace

from .module import ArrayType, Computation, Instruction, Module

_MOVES = frozenset(('copy', 'bitcast', 'reshape', 'transpose', 'get-tuple-element', 'slice'))
_PROMOTED = re.compile(r'to_apply=%?\S+_promoted\b')  # suffix from XLA's all-reduce promotion


def widened_dtypes(module: Module, comp: Computation, op: Instruction) -> tuple[str, ...]:
    """Returns the original dtype of each operand that XLA widened to f32, and '' for others.

    A convert that XLA added has no op_name, unlike a convert in the user's program.
    """
    if 'f32[' not in op.type:
        return ('',) * len(op.operands)
    promoted = 'bf16' if _PROMOTED.search(op.attributes) else ''
    return tuple(
        _original_dtype(module, comp, operand) or promoted if 'f32[' in comp[operand].type else ''
        for operand in op.operands
    )


def _original_dtype(module: Module, comp: Computation, name: str) -> str:
    """Returns 'bf16' or 'f16' if XLA converted the value `name` from that dtype, else ''."""
    while True:
        op = comp[name]
        called = module.called(op) if op.opcode == 'fusion' else None
        if called is not None and called.root.opcode != 'tuple':
            comp, name = called, ''
        elif op.opcode == 'convert' and not op.op_name:
            return narrow if (narrow := comp[op.operands[0]].results[0].dtype) in _NARROW else ''
        elif op.opcode in _MOVES:
            name = op.operands[0]
        else:
            return ''


_NARROW = ('bf16', 'f16')


def narrowed(arrays: tuple[ArrayType, ...], dtypes: tuple[str, ...]) -> tuple[ArrayType, ...]:
    """Replaces the dtypes of `arrays` by `dtypes`, where '' keeps the dtype."""
    if len(arrays) != len(dtypes):
        return arrays
    return tuple(
        replace(array, dtype=dtype or array.dtype)
        for array, dtype in zip(arrays, dtypes, strict=True)
    )
