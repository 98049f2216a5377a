"""Finds what collectives carry: weights, gradients or activations, and their paths or axes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from .._arrays.constrain import names_at
from .._hlo.collectives import MARKS, Collective
from .._hlo.flops import find_products
from .._hlo.module import Module
from .._hlo.origins import Origins
from .._hlo.output_uses import output_uses
from .._notation.expression import ELLIPSIS
from .report_rows import ArrayRow

ROLES = ('weights', 'gradients', 'activations')
# kinds that only move data; the others also sum
_MOVES = ('all-gather', 'all-to-all', 'collective-broadcast', 'collective-permute')


class Carried(NamedTuple):
    """What a collective carries.

    Attributes:
        role: one of ROLES.
        is_backward: whether it belongs to the backward pass.
        of: the path of the argument that it sends, or the paths of the results that are computed
            from it.
        axes: the axis names of an activation, such as 'b s d', or ''.
    """

    role: str
    is_backward: bool
    of: tuple[str, ...]
    axes: str


def find_carried(
    module: Module,
    collectives: Sequence[Collective],
    weights: Mapping[int, bool],
    inputs: Sequence[str],
    outputs: Mapping[int, str],
) -> Iterator[Carried]:
    """Finds what each collective carries.

    Args:
        module: the compiled program.
        collectives: its collectives.
        weights: whether a program parameter, by number, is a weight or state of an optimizer.
        inputs: the paths of the program's parameters.
        outputs: the paths of the program's outputs.
    """
    places = {place.op.name: place for place in module.find(*MARKS)} if collectives else {}
    origins, uses = Origins(module), output_uses(module, [one.name for one in collectives])
    for one in collectives:
        sent = origins.of(places[one.name]) if one.kind in _MOVES else None
        if sent is not None and sent >= len(inputs):  # a `jax.Ref` that the function closes over
            sent = None
        becomes = uses[one.name]
        of = tuple(outputs[i] for i in becomes if i in outputs)
        backward, role = 'transpose(' in one.op_name, 'activations'
        if sent is not None:
            of, role = (inputs[sent],), 'weights' if weights[sent] else 'activations'
        elif becomes and (backward or any(weights.get(module.aliases.get(i, -1)) for i in becomes)):
            # all-gathers may gather the new weights, as in ZeRO; others carry gradients
            role = 'weights' if one.kind == 'all-gather' and not backward else 'gradients'
        axes = _axes(one) if role == 'activations' and sent is None else ''
        yield Carried(role, backward or role == 'gradients', of, axes)


def find_weights(
    module: Module, inputs: Sequence[tuple[str, str]], outputs: Mapping[int, str]
) -> dict[int, bool]:
    """Finds the parameters that are weights or optimizer state; `inputs` are (path, dtype).

    In a train step, these are the arguments that are donated to a result, or that have the path of
    a result; if there are none, all arguments. In inference, such arguments are caches, and the
    weights are all other arguments. Only floating-point arrays count.
    """
    floating = [bool(re.match(r'b?float', dtype)) for _, dtype in inputs]
    # a program without a backward pass may be the update of an optimizer, which has no products
    is_training = '/transpose(' in module.text or next(find_products(module), None) is None
    given = {op.parameter_number: op.results for op in module.entry.parameters()}
    results = module.entry.root.results
    updated = set(module.aliases.values())
    for output, path in outputs.items():
        end = path.partition('/')[2]
        ends = {end, end.partition('/')[2]} - {''}
        updated |= {
            i
            for i, (path, _) in enumerate(inputs)
            if {path, path.partition('/')[2]} & ends
            and (is_training or given.get(i) == results[output : output + 1])
        }
    updates_any = any(floating[i] for i in updated if i < len(inputs))
    return {
        i: is_float and ((i in updated or not updates_any) if is_training else i not in updated)
        for i, is_float in enumerate(floating)
    }


def results_in_place(
    arguments: Sequence[ArrayRow], results: Sequence[ArrayRow], module: Module
) -> tuple[tuple[str, str], ...]:
    """Returns path pairs (result, argument) that share their memory and have one sharding."""
    inputs = [row for row in arguments if row.placement != 'not used']
    pairs = [
        (results[output], inputs[parameter])
        for output, parameter in module.aliases.items()
        if output < len(results) and parameter < len(inputs)
    ]
    return tuple((a.path, b.path) for a, b in pairs if replace(a, path=b.path) == b)


# elementwise operations: their operands and results have the axes of a constraint in their line
_ELEMENTWISE = frozenset(
    (
        *('add', 'convert_element_type', 'cos', 'div', 'exp', 'logistic', 'max', 'min', 'mul'),
        *('neg', 'select_n', 'sharding_constraint', 'sin', 'sqrt', 'square', 'sub', 'tanh'),
    )
)
_EINSUM = re.compile(r'/([A-Za-z,]+)->([A-Za-z]*)/')


def _axes(one: Collective) -> str:
    """Finds the axis names of an activation, from an einsum or a constraint in its source line."""
    n_dims = len(one.arrays[0].shape)
    if einsum := _EINSUM.search(one.op_name):
        operands, result = einsum[1].split(','), einsum[2]
        is_forward = 'transpose(' not in one.op_name or '/rematted_computation/' in one.op_name
        if one.kind in _MOVES:  # an operand, or the gradient of the result
            sides = operands if is_forward else [*operands, result]
        else:  # the result, or the gradient of an operand
            sides = [result] if is_forward else operands
        # a single side needs no check of the rank, which is wrong if the compiler merged axes
        fitting = [side for side in sides if len(side) == n_dims or len(sides) == 1]
        return ' '.join(fitting[0]) if len(fitting) == 1 else einsum[0].strip('/')
    if one.op_name.rpartition('/')[2] in _ELEMENTWISE:
        for line in filter(None, (one.called_at, one.source)):
            names = names_at.get(line, ())
            if len(names) == n_dims and ELLIPSIS not in names:
                return ' '.join(names)
    return ''
