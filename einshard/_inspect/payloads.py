"""Finds the payloads of collectives: weights, gradients or activations, with paths or axes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .._arrays.constrain import names_at, names_by_letter_at
from .._hlo.collective import Collective
from .._hlo.find_collectives import MARKS
from .._hlo.flops import find_products
from .._hlo.module import Module
from .._hlo.origins import Origins
from .._hlo.output_uses import output_uses
from .._hlo.sources import operations
from .._notation.expression import ELLIPSIS

# kinds of collectives that send their operand without summing it
_MOVES = ('all-gather', 'all-to-all', 'collective-broadcast', 'collective-permute')


class Payload(NamedTuple):
    """The fields of a `CollectiveRow` that say what the collective sends."""

    role: str
    is_backward: bool
    of: tuple[str, ...]
    axes: str


def find_payloads(
    module: Module,
    collectives: Sequence[Collective],
    weights: Mapping[int, bool],
    inputs: Sequence[tuple[str, str]],
    outputs: Mapping[int, str],
) -> Iterator[Payload]:
    """Yields the payload of each collective.

    Args:
        weights: the result of `find_weights`.
        inputs: (path, dtype) of each argument that the program uses, by parameter number.
        outputs: the paths of the program's outputs, by number.
    """
    by_name = {site.op.name: site for site in module.find(*MARKS)} if collectives else {}
    origins = Origins(module)
    uses = output_uses(module, [collective.name for collective in collectives])
    updated = _updated_inputs(module, inputs, outputs)
    for collective in collectives:
        parameter = origins.of(by_name[collective.name]) if collective.kind in _MOVES else None
        # parameters after `inputs` are Refs that the function closes over
        if parameter is not None and parameter >= len(inputs):
            parameter = None
        used_by = uses[collective.name]
        of = tuple(outputs[output] for output in used_by if output in outputs)
        is_backward, role = 'transpose(' in collective.op_name, 'activations'
        updates_weights = any(weights.get(i) for output in used_by for i in updated.get(output, ()))
        if parameter is not None:
            of = (inputs[parameter][0],)
            role = 'weights' if weights[parameter] else 'activations'
        elif used_by and (is_backward or updates_weights):
            # an all-gather outside the backward pass sends the new weights, as in ZeRO
            gathers_weights = collective.kind == 'all-gather' and not is_backward
            role = 'weights' if gathers_weights else 'gradients'
        axes = _axes(collective) if role == 'activations' and parameter is None else ''
        yield Payload(role, is_backward or role == 'gradients', of, axes)


def find_weights(
    module: Module, inputs: Sequence[tuple[str, str]], outputs: Mapping[int, str]
) -> dict[int, bool]:
    """Returns {parameter number: whether it is a weight or optimizer state}.

    In a train step, weights are the updated arguments, or all arguments if none is updated. In
    inference, updated arguments are caches, and all other arguments are weights. Only
    floating-point arrays count.
    """
    floating = [bool(re.match(r'b?float', dtype)) for _, dtype in inputs]
    by_output = _updated_inputs(module, inputs, outputs)
    updated = {i for indices in by_output.values() for i in indices}
    if not _is_train_step(module):
        return {i: is_float and i not in updated for i, is_float in enumerate(floating)}
    updates_none = not any(floating[i] for i in updated)
    return {i: is_float and (updates_none or i in updated) for i, is_float in enumerate(floating)}


def _is_train_step(module: Module) -> bool:
    """Whether a program has a backward pass or, like an optimizer update, no matmuls."""
    return '/transpose(' in module.text or next(find_products(module), None) is None


def _updated_inputs(
    module: Module, inputs: Sequence[tuple[str, str]], outputs: Mapping[int, str]
) -> Mapping[int, Sequence[int]]:
    """Returns {output number: the parameters that the output replaces}.

    An output replaces a parameter that is donated to it. It also replaces parameters with a
    matching path, such as 'state/w' for 'result/state/w', 'result/w' or 'result/0/w'. In inference,
    parameters with a matching path must also have the shape and dtype of the output.
    """
    by_path: dict[str, list[int]] = {}
    for i, (path, _) in enumerate(inputs):
        for end in {path, path.partition('/')[2]}:
            by_path.setdefault(end, []).append(i)
    is_train_step = _is_train_step(module)
    types = {op.parameter_number: op.results for op in module.entry.parameters()}
    results = module.entry.root.results
    updated: dict[int, list[int]] = defaultdict(list)
    for output, parameter in module.aliases.items():
        if parameter < len(inputs):
            updated[output].append(parameter)
    for output, path in outputs.items():
        path = path.partition('/')[2]  # without 'result'
        for end in {path, path.partition('/')[2]} - {''}:
            for i in by_path.get(end, ()):
                if is_train_step or types.get(i) == results[output : output + 1]:
                    updated[output].append(i)
    return updated


# the axis names of a constraint also hold for elementwise operations on its source line
_ELEMENTWISE = frozenset(
    (
        *('add', 'convert_element_type', 'cos', 'div', 'exp', 'logistic', 'max', 'min', 'mul'),
        *('neg', 'select_n', 'sharding_constraint', 'sin', 'sqrt', 'square', 'sub', 'tanh'),
    )
)
_EINSUM = re.compile(r'/([A-Za-z,]+)->([A-Za-z]*)/')


def _axes(collective: Collective) -> str:
    """Reads `CollectiveRow.axes` from the einsum or the constraint on the source line."""
    ndim, op_name = len(collective.arrays[0].shape), collective.op_name
    if einsum := _EINSUM.search(op_name):
        operands, result = einsum[1].split(','), einsum[2]
        is_forward = 'transpose(' not in op_name or '/rematted_computation/' in op_name
        if collective.kind in _MOVES:  # an operand, or the gradient of the result
            candidates = operands if is_forward else [*operands, result]
        else:  # the result, or the gradient of an operand
            candidates = [result] if is_forward else operands
        # the compiler may have merged axes, so accept a single candidate of any ndim
        fitting = [c for c in candidates if len(c) == ndim or len(candidates) == 1]
        lines = collective.called_at, collective.source
        names = next((names_by_letter_at[line] for line in lines if line in names_by_letter_at), {})

        def named(letters: str) -> str:
            return ' '.join(names.get(letter, letter) for letter in letters)

        if len(fitting) == 1:
            return named(fitting[0])
        return f'{", ".join(map(named, operands))} -> {named(result)}' if names else einsum[0][1:-1]
    if _ELEMENTWISE.issuperset(operations(op_name)):
        for line in filter(None, (collective.called_at, collective.source)):
            names = names_at.get(line, ())
            if len(names) == ndim and ELLIPSIS not in names:
                return ' '.join(names)
    return ''
