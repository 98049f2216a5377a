"""One table of the opcodes of HLO: what each operation does with the numbers of its operands."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Each opcode is in one row, with all that is true of it:
#   collective    devices communicate
#   copy          copies, reshapes, transposes or converts an array
#   move          moves the numbers of its first operand, or some of them, to other places
#   shape         changes at most the shape or the place, not the dtype
#   join          has the numbers of all operands
#   elementwise   computes each number from those at the same place in its operands
#   stop          computes another quantity than that of its operands
#   fixed         has the same numbers in each run, or random ones
#   source        reads no operand
#   free          computes nothing
#   view          needs no memory of its own, or that of an operand
# Those of the last row have no trait.
_ROWS = {
    'collective': 'all-reduce ragged-all-to-all reduce-scatter',
    'collective move': 'all-gather all-to-all collective-broadcast collective-permute',
    'copy shape': 'copy reshape transpose',
    'copy shape free view': 'bitcast',
    'copy': 'convert',
    'move': 'dynamic-slice pad reverse',
    'move shape': 'slice',
    'join': 'concatenate',
    'elementwise': (
        'abs acos acosh add and asin asinh atan2 atanh cbrt ceil clamp cosh cosine divide erf '
        'exponential exponential-minus-one floor log log-plus-one logistic maximum minimum '
        'multiply negate not or power remainder round-nearest-afz round-nearest-even rsqrt select '
        'sign sine sinh sqrt subtract tan tanh xor'
    ),
    'stop': (
        'broadcast compare convolution custom-call dot gather is-finite ragged-dot reduce '
        'reduce-window scaled-dot select-and-scatter sort topk'
    ),
    'stop view': 'conditional scatter',
    'fixed': 'rng-bit-generator',
    'fixed source': 'iota partition-id replica-id',
    'fixed source free view': 'constant',
    'source free view': 'parameter',
    'free view': 'after-all get-tuple-element tuple',
    'view': 'call dynamic-update-slice opt-barrier while',
    '': (
        'add-dependency async batch-norm-grad batch-norm-inference batch-norm-training '
        'bitcast-convert cholesky complex count-leading-zeros domain dynamic-reshape fft '
        'fusion get-dimension-size imag infeed map outfeed popcnt real recv reduce-precision rng '
        'rng-get-and-update-state scan send set-dimension-size shift-left shift-right-arithmetic '
        'shift-right-logical stochastic-convert triangular-solve'
    ),
}
OPCODES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        opcode: frozenset(traits.split())
        for traits, opcodes in _ROWS.items()
        for opcode in opcodes.split()
    }
)


def _with(trait: str) -> frozenset[str]:
    return frozenset(opcode for opcode, traits in OPCODES.items() if trait in traits)


COLLECTIVES = _with('collective')
ELEMENTWISE = _with('elementwise')
JOINS = _with('join') | {'branch'}
STOPS = _with('stop')
FIXED = _with('fixed')
SOURCES = _with('source')
FREE = _with('free')
# a -done returns what its -start has computed, as it is
COPIES = _with('copy') | {
    *('all-gather-done', 'all-reduce-done', 'collective-permute-done', 'copy-done', 'copy-start'),
    *('recv-done', 'slice-done'),
}
SHAPES = _with('shape')
MOVES = COPIES | _with('move') | {'all-gather-start', 'collective-permute-start', 'slice-start'}
VIEWS = _with('view') | {'copy-start', 'copy-done'}
# the operands that are not indices or predicates
NUMBERS: Mapping[str, slice] = {
    'dynamic-slice': slice(1),
    'dynamic-update-slice': slice(2),
    'pad': slice(1),
    'select': slice(1, 3),
}


def is_known(opcode: str) -> bool:
    """Whether `OPCODES` has an operation, or the one of which it is a part, as of 'copy-start'."""
    for suffix in ('-start', '-update', '-done'):
        opcode = opcode.removesuffix(suffix)
    return opcode in OPCODES
