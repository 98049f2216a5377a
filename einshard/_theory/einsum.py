"""einsum: a contraction whose operands and result say where they live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from .._constraint import constrain, only
from .._errors import EinshardError
from .._layout import axis_positions
from .._mesh import MeshLike, entry_axes, is_tracing
from .._placement import einshard
from .._sharding import Placement, find_fitting, find_mesh
from .contraction import Contraction, is_placed, of_words, read_contraction, result_shape, written


def einsum(expression: str, *arrays: Any, mesh: MeshLike | None = None, **options: Any) -> Any:
    """`jnp.einsum` with axes that are words, and that may say how they are cut.

        >>> X, W = np.ones((4, 32)), np.ones((32, 16))
        >>> Y = einsum('batch x*, x* y -> batch y*', X, W)
        >>> describe(Y)
        'a b -> a b16'

    Read it aloud: *the sum over x of X and W, x cut over all devices in both; y of the result is
    cut over all devices.* Operands and result are expressions in the short form. An operand with
    a placement is put there first, as by `einshard`; the result is constrained to be where it
    says. What has no placement is left to the compiler. The product itself is XLA's.

    Args:
        expression: operands with commas between them, '->', the result. Every axis once in an
            operand; '...' stands for the same axes in all of them.
        arrays: an array for each operand, or traced values.
        mesh: as for `make_sharding`.
        options: those of `jnp.einsum`: `precision`, `preferred_element_type`, `optimize`.

    Returns:
        The result, with an axis for each of its names.

    Raises:
        EinshardError: the expression breaks a rule; arrays do not fit it or one another; a
            placement does not fit its array or the mesh.
    """
    shapes = [np.shape(array) for array in arrays]
    try:
        contraction = read_contraction(expression)
        shape = result_shape(contraction, shapes)
    except EinshardError as error:
        raise error.with_fix(_of_words(expression, shapes) or error.fix) from None
    try:
        operands = [
            einshard(array, written(operand), mesh=mesh) if is_placed(operand) else array
            for operand, array in zip(contraction.operands, arrays, strict=True)
        ]
        placement = None
        if is_placed(contraction.result):
            placement = find_fitting(written(contraction.result), shape, find_mesh(mesh), None)
    except EinshardError as error:
        raise error.about(einsum=f"'{contraction.text}'") from None
    if placement is None:
        _check_types(contraction, operands)
    # eagerly one program, in which the sum goes straight to where the result is to be
    contract = _contract if is_tracing() else _jitted
    if isinstance(options.get('optimize'), list | tuple):
        options['optimize'] = _path(options['optimize'])
    return contract(contraction.of_letters(), placement, tuple(options.items()), *operands)


def _path(given: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """A path of contractions, in tuples: lists cannot be hashed."""
    steps = [tuple(step) if isinstance(step, list | tuple) else (step,) for step in given]
    if not all(isinstance(operand, int) for step in steps for operand in step):
        raise EinshardError(
            f'optimize= is {given!r}, which is no path of contractions',
            facts={'give': "'greedy', 'optimal' or the operands of each step, [(0, 1), (0, 1)]"},
        )
    return tuple(steps)


def _of_words(expression: str, shapes: Sequence[tuple[int, ...]]) -> str | None:
    """The einsum with an axis for every letter, where the arrays have as many axes."""
    fix = of_words(expression)
    try:
        if fix is not None:
            result_shape(read_contraction(fix.strip("'")), shapes)
    except EinshardError:
        return None
    return fix


def _contract(
    subscripts: str,
    placement: Placement | None,
    options: tuple[tuple[str, Any], ...],
    *operands: Any,
) -> Any:
    if placement is None:
        return jnp.einsum(subscripts, *operands, **dict(options))
    mesh = placement.sharding.mesh
    explicit = AxisType.Explicit in mesh.axis_types
    # under explicit axes a sum over a sharded axis has to be told where its result is
    out = only(placement.sharding, AxisType.Explicit) if explicit else None
    return constrain(
        jnp.einsum(subscripts, *operands, out_sharding=out, **dict(options)), placement
    )


_jitted = jax.jit(_contract, static_argnums=(0, 1, 2))


def _check_types(contraction: Contraction, operands: Sequence[Any]) -> None:
    """Raises where explicit axes leave open what is to become of a sum."""
    reduced = contraction.reduced
    for i, (operand, array) in enumerate(zip(contraction.operands, operands, strict=True)):
        sharding = jax.typeof(array).sharding
        explicit = {
            name
            for name, kind in zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
            if kind == AxisType.Explicit
        }
        positions = axis_positions(operand, len(array.shape))
        for name, at in positions.items():
            entry = sharding.spec[at] if at < len(sharding.spec) else None
            if name in reduced and explicit.intersection(entry_axes(entry)):
                raise contraction.error(
                    f"the sum is over '{name}', which is sharded: under explicit axes the result "
                    'has to say where it is',
                    [term.span for term in operand.right if term.name == name],
                    operand=f'{i}, {jax.typeof(array)}',
                    give=f"a placement of the result, as in '{contraction.text.rstrip()} *'",
                )
