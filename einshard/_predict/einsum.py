"""einsum: `jnp.einsum` with named axes and placements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from .._arrays.constrain import constrain, restrict_to_type
from .._arrays.place import einshard
from .._arrays.reshard import reshard
from .._errors import EinshardError, RuleSuggestion, Suggestion, public, quoted
from .._notation.expression import ELLIPSIS, Expression, Term
from .._notation.layout import axis_positions
from .._program.jaxpr.names import einsum_scope
from .._sharding.axis_rules import axis_rules
from .._sharding.mesh import MeshLike, device_mesh, partition_spec, sizes_of, spec_axes
from .._sharding.placement import Placement, may_use_rules
from .._sharding.resolve import resolve
from .._sharding.scopes import current_context
from .._sharding.tracing import is_tracing
from .._working_fixes import keep_working_suggestions, works
from .contraction import (
    Contraction,
    from_numpy_subscripts,
    is_placed,
    placement_text,
    read_contraction,
    result_shape,
)


@public
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
    reduce-scatter. Operands and result are expressions without '->'. Arrays with a placement are
    placed or constrained; the compiler decides the sharding of the others. `'+@tp'` makes the
    result a partial sum over mesh axis tp (JAX: unreduced).

    `axis_rules` apply to the result, and to operands with a placement. They do not apply to other
    operands: both operands give a contracted axis the same name, but often shard it differently.

    Args:
        expression: operands separated by commas, '->', and the result. An axis appears at most once
            per operand; '...' stands for the same axes in all operands.
        arrays: one array or traced value per operand.
        mesh: a mesh, or a sequence of devices, as for `make_sharding`.
        options: options of `jnp.einsum`: `precision`, `preferred_element_type`, `optimize`.

    Returns:
        The result, with its axes in the order of the right side.

    Raises:
        EinshardError: the expression is invalid; an axis has different sizes in two arrays; or a
            placement does not fit its array or the mesh.
    """
    if 'out' in options:
        raise EinshardError(
            'einsum has no out=; place its result in the expression',
            facts={'example': "einsum('batch x, x y -> batch y*', X, W)"},
        )
    shapes = [np.shape(array) for array in arrays]
    try:
        contraction = read_contraction(expression)
        shape = result_shape(contraction, shapes)
    except EinshardError as error:
        raise error.with_fix(from_numpy_subscripts(expression, shapes) or error.fix) from None
    context = current_context(mesh)
    operands, placement = [*arrays], None
    current = contraction.result  # the operand or result to name in errors
    try:
        for i, current in enumerate(contraction.operands):
            if is_placed(current):
                operands[i] = einshard(arrays[i], placement_text(current), mesh=mesh)
        current = contraction.result
        # inside shard_map with all mesh axes Manual, each device has its own result
        by_rules = may_use_rules(current, context) and bool(sizes_of(context.lowering_mesh))
        if is_placed(current) or by_rules:
            placement = resolve(placement_text(current), shape, context)
            if not context.on_one_device:  # on one device, '+' is ignored: there is nothing to sum
                _check_partial_sum(contraction, operands, placement)
        else:
            _check_contracted_axes(contraction, operands)
    except EinshardError as error:
        raise _with_working_fix(error, contraction, current, arrays, mesh, options) from None
    tracing = is_tracing()
    # jit eager calls, so that XLA can compute the sum in the result's sharding
    contract = _contract if tracing else _jitted
    path = options.get('optimize')
    if isinstance(path, list | tuple):  # jit needs a hashable one
        steps = [tuple(step) if isinstance(step, list | tuple) else (step,) for step in path]
        if not all(isinstance(operand, int) for step in steps for operand in step):
            raise EinshardError(
                f'optimize= must be a strategy or a contraction path, not {path!r}',
                facts={
                    'expected': "'greedy', 'optimal', or the operands of each step: "
                    '[(0, 1), (0, 1)]'
                },
            )
        options['optimize'] = tuple(steps)
    subscripts = contraction.numpy_subscripts()
    scope = jax.named_scope(einsum_scope(contraction.plain())) if tracing else nullcontext()
    with scope:
        return contract(subscripts, placement, tuple(options.items()), *operands)


def _with_working_fix(
    error: EinshardError,
    contraction: Contraction,
    array: Expression,
    arrays: Sequence[Any],
    mesh: MeshLike | None,
    options: Mapping[str, Any],
) -> EinshardError:
    """Rewrites an error about one array as an error about the einsum, and tests its suggestions."""
    text = contraction.text
    if error.expression != text:
        start, end = array.right[0].span[0], array.right[-1].span[1]
        fix = error.fix
        if isinstance(fix, Suggestion):
            fix = fix.inside(text[:start], text[end:])
        error = error.about(einsum=f"'{text}'").with_fix(fix)

    def try_einsum(expression: str, mesh: MeshLike | None = mesh) -> None:
        def traced(*values: Any) -> Any:
            return einsum(expression, *values, mesh=mesh, **options)

        try:
            jax.eval_shape(traced, *arrays)
        except EinshardError:
            raise
        except Exception as jax_error:  # such as JAX errors about explicit mesh axes
            raise EinshardError(str(jax_error)) from None

    def on_devices(n: int) -> None:
        try_einsum(text, device_mesh(AbstractMesh((n,), ('n',))))

    def with_rule(fix: RuleSuggestion) -> None:
        with axis_rules({fix.name: fix.placement}):
            try_einsum(text)

    kept = keep_working_suggestions(error, try_einsum, on_devices)
    fix = error.fix
    if isinstance(fix, RuleSuggestion) and works(lambda: with_rule(fix)):
        return kept.with_fix(fix)
    return kept


def _contract(
    subscripts: str,
    placement: Placement | None,
    options: tuple[tuple[str, Any], ...],
    *operands: Any,
) -> Any:
    if placement is None:
        operands = _prepare(subscripts, None, operands)
        return jnp.einsum(subscripts, *operands, **dict(options))
    mesh, out = placement.sharding.mesh, None
    if AxisType.Explicit in mesh.axis_types:
        # with explicit mesh axes, JAX needs out_sharding for a sum over a sharded axis
        spec = restrict_to_type(placement.sharding, AxisType.Explicit).spec
        out = NamedSharding(mesh, partition_spec(spec_axes(spec), spec.unreduced))
        operands = _prepare(subscripts, out, operands)
    return constrain(
        jnp.einsum(subscripts, *operands, out_sharding=out, **dict(options)), placement
    )


def _prepare(
    subscripts: str, out: NamedSharding | None, operands: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Reshards operands so that JAX is right for a partial sum, as the result or as a gradient.

    JAX adds up the wrong shards if a product stays a partial sum, and an axis of it is resharded.
    So the operands are sharded as the result first.

    The gradient of an operand is a product of the other operand and the result's gradient. JAX
    raises unless both shard the axes that it contracts over exactly the reduced mesh axes ('='). So
    the operand's reduced axes become those over which both shard them. If there are none, the
    gradient is added up, and becomes a partial sum afterwards; so too for more than two operands,
    for which JAX returns wrong gradients or XLA aborts the process.
    """
    types: list[Any] = [jax.typeof(x) for x in operands]
    unreduced = frozenset[Any]() if out is None else out.spec.unreduced
    n_reduced = sum(map(len, (a.sharding.spec.reduced for a in types)))
    if not (unreduced or n_reduced) or (len(operands) == 1 and out is None):
        return operands
    if out is None and len(operands) == 2:
        plain = [
            _reshard(x, spec_axes(a.sharding.spec)) for x, a in zip(operands, types, strict=True)
        ]
        shape: Any = jax.eval_shape(lambda *xs: jnp.einsum(subscripts, *xs), *plain)
        out = shape.sharding
    *inputs, result = re.split(',|->', subscripts)
    n_unnamed = max(  # axes of '...'
        len(a.shape) - len(letters.replace(ELLIPSIS, ''))
        for letters, a in zip(inputs, types, strict=True)
    )

    def by_letter(letters: str, sharding: NamedSharding | None) -> dict[str, Any]:
        before, dots, after = letters.partition(ELLIPSIS)
        names = [*before, *(map(str, range(n_unnamed)) if dots else ()), *after]
        axes: list[Any] = [] if sharding is None else spec_axes(sharding.spec)
        return dict(zip(names, axes + [()] * (len(names) - len(axes)), strict=True))

    result_axes = by_letter(result, out)
    axes_of = [by_letter(names, a.sharding) for names, a in zip(inputs, types, strict=True)]
    if unreduced:
        axes_of = [{k: result_axes.get(k, v) for k, v in own.items()} for own in axes_of]
    reduced = [frozenset[Any]()] * len(operands)
    for i in range(2 if len(operands) == 2 else 0):
        own, other = axes_of[i], axes_of[1 - i]
        # the axes of the gradient, unless it is resharded or another array lacks one
        axes = {k: result_axes.get(k, other.get(k, ())) for k in own}
        summed = frozenset(
            chain(*(v for k, v in other.items() if k in result_axes and k not in own))
        )
        used = [*chain(*axes.values()), *summed]
        if (
            summed & types[i].sharding.spec.reduced
            and all(other[k] == result_axes[k] for k in other if k in result_axes)
            and all(k in result_axes or k in other for k in own)
            and len(used) == len({*used})
        ):
            axes_of[i], reduced[i] = axes, summed
    return tuple(
        _reshard(x, own.values(), axes)
        for x, own, axes in zip(operands, axes_of, reduced, strict=True)
    )


def _reshard(
    x: Any, entries: Iterable[tuple[Any, ...]], reduced: frozenset[Any] = frozenset()
) -> Any:
    sharding: Any = jax.typeof(x).sharding
    spec = partition_spec(entries, sharding.spec.unreduced, reduced)
    return x if spec == sharding.spec else reshard(x, NamedSharding(sharding.mesh, spec))


_jitted = jax.jit(_contract, static_argnums=(0, 1, 2))


def _check_contracted_axes(contraction: Contraction, operands: Sequence[Any]) -> None:
    before, _, result = contraction.text.rpartition('->')
    for i, name, _ in _sharded_contracted_axes(contraction, operands):
        raise contraction.error(
            f"contracted axis '{name}' is sharded over Explicit mesh axes, so the result needs a "
            "placement; '*' replicates it",
            [term.span for term in contraction.operands[i].right if term.name == name],
            code='mesh',
            operand=f'{i}, {jax.typeof(operands[i])}',
            fix=Suggestion(f'{before}-> * {result.strip()}'.strip()),
        )


def _check_partial_sum(
    contraction: Contraction, operands: Sequence[Any], placement: Placement
) -> None:
    """Raises if the mesh axes of a partial sum are not those that shard the contracted axes.

    JAX also requires that two operands shard them in the same way.
    """
    signed = [term for term in contraction.result.right if term.sign == '+']
    if not signed:
        return
    spans = [term.span for term in signed]
    if len(operands) > 2:
        # for more than two operands, JAX uses `auto_axes`, so the compiler decides where to sum
        raise contraction.error(
            'a partial sum needs an einsum of one or two operands, but this one has '
            f'{len(operands)}',
            spans,
            code='partial-sum',
        )
    mesh = placement.sharding.mesh
    contracted = [*_sharded_contracted_axes(contraction, operands)]
    for i, name, axes in contracted if len(operands) == 2 else ():
        if (1 - i, name, axes) not in contracted:
            raise _sharded_differently(contraction, operands, i, name, axes)
    used = {axis for _, _, axes in contracted for axis in axes}
    axes = tuple(axis for axis in mesh.axis_names if axis in used)
    if {*axes} == {*placement.sharding.spec.unreduced}:
        return
    (start, end), text = spans[0], contraction.text
    correct = Term(sign='+', mesh_axes=tuple(map(str, axes)))
    raise contraction.error(
        f"the result is a partial sum, '{signed[0]}', but the contracted axes are "
        + (f'sharded over {quoted(map(str, axes))}' if axes else 'not sharded'),
        spans,
        code='partial-sum',
        fix=Suggestion(f'{text[:start]}{correct}{text[end:]}') if axes else None,
    )


def _sharded_differently(
    contraction: Contraction, operands: Sequence[Any], i: int, name: str, axes: tuple[Any, ...]
) -> EinshardError:
    """Makes the error about a contracted axis that only operand `i` shards over `axes`."""
    text, other = contraction.text, contraction.operands[1 - i]
    terms = [term for array in contraction.operands for term in array.right if term.name == name]
    sentence = f"axis '{name}' of a partial sum must be in both operands"
    fix = None
    if name in other.names:
        sentence = (
            f"for a partial sum, both operands must shard contracted axis '{name}' in the same way"
        )
        start, end = next(term.span for term in other.right if term.name == name)
        correct = Term(name, mesh_axes=tuple(map(str, axes)))
        fix = Suggestion(f'{text[:start]}{correct}{text[end:]}')
    return contraction.error(
        sentence,
        [term.span for term in terms],
        fix=fix,
        operand_0=jax.typeof(operands[0]),
        operand_1=jax.typeof(operands[1]),
    )


def _sharded_contracted_axes(
    contraction: Contraction, operands: Sequence[Any]
) -> Iterator[tuple[int, str, tuple[Any, ...]]]:
    """Yields (operand, name, mesh axes) of contracted axes sharded over explicit mesh axes."""
    for i, (operand, array) in enumerate(zip(contraction.operands, operands, strict=True)):
        sharding = jax.typeof(array).sharding
        types = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
        explicit = {name for name, axis_type in types if axis_type == AxisType.Explicit}
        entries = spec_axes(sharding.spec)
        for name, at in axis_positions(operand, np.ndim(array)).items():
            entry = entries[at] if at < len(entries) else ()
            axes = tuple(axis for axis in entry if axis in explicit)
            if name in contraction.contracted and axes:
                yield i, name, axes
