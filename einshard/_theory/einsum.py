"""einsum: `jnp.einsum` with named axes and placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from .._arrays.constrain import constrain, only
from .._arrays.place import einshard
from .._errors import EinshardError, Suggestion
from .._notation.expression import Expression
from .._notation.layout import axis_positions
from .._sharding.context import current_context, is_tracing
from .._sharding.mesh import MeshLike, device_mesh, spec_axes
from .._sharding.resolve import Placement, resolve
from .._suggestions import tried
from .contraction import Contraction, is_placed, of_words, read_contraction, result_shape, written


def einsum(expression: str, *arrays: Any, mesh: MeshLike | None = None, **options: Any) -> Any:
    """`jnp.einsum` with named axes, and placements for operands and result.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import einsum
        >>> n = jax.device_count()
        >>> X, W = np.ones((4, 2 * n)), np.ones((2 * n, 3 * n))
        >>> Y = einsum('batch x*, x* y -> batch y*', X, W)
        >>> Y.shape == (4, 3 * n), Y.addressable_shards[0].data.shape
        (True, (4, 3))

    Both operands shard x over all devices, and the result shards y, so the sum over x becomes a
    reduce-scatter. Operands and result are expressions without '->'. Those with a placement are
    placed or constrained, as by `einshard`; the others are left to the compiler.

    Args:
        expression: operands separated by commas, '->', and the result. An axis appears once per
            operand; '...' stands for the same axes in all of them.
        arrays: one array or traced value per operand.
        mesh: as for `make_sharding`.
        options: options of `jnp.einsum`: `precision`, `preferred_element_type`, `optimize`.

    Returns:
        The result, with one axis per name on the right side.

    Raises:
        EinshardError: the expression is invalid; sizes of the arrays disagree; a placement does
            not fit its array or the mesh.
    """
    shapes = [np.shape(array) for array in arrays]
    try:
        contraction = read_contraction(expression)
        shape = result_shape(contraction, shapes)
    except EinshardError as error:
        raise error.with_fix(_of_words(expression, shapes) or error.fix) from None
    operands, placement, operand = [*arrays], None, contraction.result
    try:
        for i, operand in enumerate(contraction.operands):
            if is_placed(operand):
                operands[i] = einshard(arrays[i], written(operand), mesh=mesh)
        operand = contraction.result
        if is_placed(operand):
            placement = resolve(written(operand), shape, current_context(mesh))
        else:
            _check_types(contraction, operands)
    except EinshardError as error:
        raise _with_tried_fix(error, contraction, operand, arrays, mesh, options) from None
    # outside jit, run one jitted program: it computes the sum in the sharding of the result
    contract = _contract if is_tracing() else _jitted
    if isinstance(options.get('optimize'), list | tuple):
        options['optimize'] = _path(options['optimize'])
    return contract(contraction.of_letters(), placement, tuple(options.items()), *operands)


def _with_tried_fix(
    error: EinshardError,
    contraction: Contraction,
    operand: Expression,
    arrays: Sequence[Any],
    mesh: MeshLike | None,
    options: Mapping[str, Any],
) -> EinshardError:
    """An error about one operand, with a fix of the entire einsum if one works."""
    text = contraction.text
    if error.expression != text:
        start, end = operand.right[0].span[0], operand.right[-1].span[1]
        fix = error.fix
        if isinstance(fix, Suggestion):
            fix = Suggestion(f'{text[:start]}{fix.expression}{text[end:]}')
        error = error.about(einsum=f"'{text}'").with_fix(fix)

    def with_fix(fixed: str, mesh: MeshLike | None = mesh) -> None:
        def traced(*values: Any) -> Any:
            return einsum(fixed, *values, mesh=mesh, **options)

        try:
            jax.eval_shape(traced, *arrays)
        except EinshardError:
            raise
        except Exception as other:  # JAX's own errors under explicit axes
            raise EinshardError(str(other)) from None

    return tried(error, with_fix, lambda n: with_fix(text, device_mesh(AbstractMesh((n,), ('n',)))))


def _path(given: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """A contraction path in tuples, which are hashable."""
    steps = [tuple(step) if isinstance(step, list | tuple) else (step,) for step in given]
    if not all(isinstance(operand, int) for step in steps for operand in step):
        raise EinshardError(
            f'optimize= is not a contraction path: {given!r}',
            facts={
                'expected': "'greedy', 'optimal' or the operands of each step, [(0, 1), (0, 1)]"
            },
        )
    return tuple(steps)


def _of_words(expression: str, shapes: Sequence[tuple[int, ...]]) -> str | None:
    """The einsum with each letter as an axis, if the arrays fit that."""
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
    # under explicit axes, a sum over a sharded axis needs out_sharding
    out = only(placement.sharding, AxisType.Explicit) if explicit else None
    return constrain(
        jnp.einsum(subscripts, *operands, out_sharding=out, **dict(options)), placement
    )


_jitted = jax.jit(_contract, static_argnums=(0, 1, 2))


def _check_types(contraction: Contraction, operands: Sequence[Any]) -> None:
    """Raises if a sum over an explicit axis has no placement for its result."""
    reduced = contraction.reduced
    before, _, result = contraction.text.rpartition('->')
    for i, (operand, array) in enumerate(zip(contraction.operands, operands, strict=True)):
        sharding = jax.typeof(array).sharding
        explicit = {
            name
            for name, kind in zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
            if kind == AxisType.Explicit
        }
        entries = spec_axes(sharding.spec)
        positions = axis_positions(operand, len(array.shape))
        for name, at in positions.items():
            axes = entries[at] if at < len(entries) else ()
            if name in reduced and explicit.intersection(axes):
                raise contraction.error(
                    f"the sum over '{name}', which is sharded over explicit mesh axes, needs a "
                    'placement for the result',
                    [term.span for term in operand.right if term.name == name],
                    operand=f'{i}, {jax.typeof(array)}',
                    fix=Suggestion(f'{before}-> * {result.strip()}'.strip()),
                )
