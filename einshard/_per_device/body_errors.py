"""Explains errors that JAX raises while it traces the body of a per-device function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._errors import EinshardError, quoted
from .._functions.error_notes import (
    SpecLeaf,
    is_jax_error,
    sizes_that_differ,
    unbound_axis,
)
from .._notation.mesh_text import mesh_text
from .._text import array_text
from .resolver import Resolver

_MAX_ARGUMENTS = 4  # listed in an error


def explain_different_sizes(
    function: str, error: Exception, shards: Iterable[SpecLeaf]
) -> EinshardError | None:
    """Rewrites a JAX error about an axis that has different sizes in two arguments.

    Returns None for other errors.

    Args:
        shards: the leaves of the arguments, with the shapes that the body sees.
    """
    if not is_jax_error(error):
        return None
    shards = list(shards)
    sizes = '; '.join(sizes_that_differ(shards, str(error)))
    if not sizes:
        return None
    facts = {'function': function}
    for name, shard, expression in shards[:_MAX_ARGUMENTS]:
        spec = f", '{expression.text}'" if expression else ''
        facts[f"parameter '{name}'"] = f'{array_text(shard)} per device{spec}'
    facts['JAX says'] = str(error).splitlines()[0]
    return EinshardError(f'the shards of the arguments do not match: {sizes}', facts=facts)


def explain_unknown_axis(
    function: str,
    resolver: Resolver,
    manual: Collection[str],
    mapped: Callable[..., Any],
    arguments: Sequence[Any],
) -> EinshardError | None:
    """Returns an error if a collective uses a mesh axis that does not exist or is not manual.

    Returns None otherwise.

    Args:
        manual: the mesh axes in `axis_names=`, or an empty collection for all mesh axes.
        mapped: a partial of `jax.shard_map` that lacks only `out_specs` and `check_vma`.
        arguments: the arguments of the function, as global arrays.
    """
    try:
        # with check_vma, JAX raises AssertionError or KeyError instead of NameError
        unchecked = mapped(out_specs=PartitionSpec(), check_vma=False)
        jax.eval_shape(unchecked, *arguments)
    except NameError as error:
        axis = unbound_axis(error)
        return _unknown_axis_error(function, resolver, manual, axis) if axis else None
    except Exception:
        return None  # the caller reraises JAX's error
    return None


def _unknown_axis_error(
    function: str, resolver: Resolver, manual: Collection[str], axis: str
) -> EinshardError:
    facts = {'mesh axes': mesh_text(resolver.axes) or 'none'}
    if manual:
        facts['axis_names='] = quoted(sorted(manual))
    sentence = f"{function} uses mesh axis '{axis}', but the mesh has no such axis"
    if axis in resolver.axes:
        sentence = f"{function} uses mesh axis '{axis}', which is not in axis_names="
    elif resolver.uses_array_names:
        sentence = f"{function} uses axis '{axis}', but no expression shards an axis of that name"
    else:
        facts['note'] = 'if a mesh is passed or in context, collectives use its axis names'
        if axis in resolver.joint.named_sizes:
            facts[f"'{axis}' is sharded over"] = resolver.mesh_axes_of(axis)
    return EinshardError(sentence, facts={'function': function, **facts})
