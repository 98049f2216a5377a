"""Rewrites JAX's errors about the body of a per-device function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._errors import EinshardError, quoted
from .._functions.error_notes import SpecLeaf, is_jax_error, sizes_that_differ, unbound_axis
from .._notation.layout import mesh_text
from .._text import array_text, first_line
from .resolver import Resolver

# JAX's messages for one axis and for several axes
_VARYING_ERROR = re.compile(
    r'out_specs((?:[\[.].*?)?) is P(?:artitionSpec)?\(.* which implies that .* '
    r"(?:replicated across mesh axis '(\w+)'"
    r'|and not \{([^}]+)\})'
)
# 'my key' and mean, of "['my key'].mean"
_KEYS = re.compile(r"""(?<=\[')(.*?)(?='\])|(?<=\[")(.*?)(?="\])|(\w+)""")

_MAX_ARGUMENTS = 4  # listed in an error


def explain_varying_result(function: str, error: Exception) -> EinshardError | None:
    """Rewrites JAX's error about a result that `out=` declares replicated, but that may vary.

    Returns None for other errors.
    """
    match = _VARYING_ERROR.search(str(error)) if isinstance(error, ValueError) else None
    if match is None:
        return None
    key, axis, several = match.groups()
    axes = (axis,) if axis else tuple(several.split(','))
    names = repr(axis or axes)
    path = '/'.join(''.join(part) for part in _KEYS.findall(key))
    over, result = quoted(axes), f"result '{path}'" if path else 'the result'
    return EinshardError(
        f'out= declares {result} of {function} replicated over {over}, but devices along {over} '
        'may return different values',
        code='spec',
        facts={
            'if they differ': f'sum over {over} with jax.lax.psum(result, {names}), or '
            f'shard the result over {over} in out=',
            'if they are equal': 'pass check_vma=False; JAX does not see it after ppermute, and '
            "after all_gather only with to='invarying'",
        },
    )


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
    facts['JAX says'] = first_line(error)
    return EinshardError(f'the shards of the arguments do not match: {sizes}', facts=facts)


def explain_unknown_axis(
    function: str, resolver: Resolver, mapped: Callable[..., Any], arguments: Sequence[Any]
) -> EinshardError | None:
    """Returns an error if a collective uses a mesh axis that does not exist or is not manual.

    Returns None otherwise.

    Args:
        mapped: a partial of `jax.shard_map` that lacks only `out_specs` and `check_vma`.
        arguments: the arguments of the function, as global arrays.
    """
    try:
        # with check_vma, JAX raises AssertionError or KeyError instead of NameError
        unchecked = mapped(out_specs=PartitionSpec(), check_vma=False)
        jax.eval_shape(unchecked, *arguments)
        return None
    except NameError as error:
        axis = unbound_axis(error)
    except Exception:  # the caller reraises JAX's error
        return None
    if axis is None:
        return None
    facts = {'function': function, 'mesh axes': mesh_text(resolver.axes) or 'none'}
    if resolver.axes.keys() - resolver.manual:
        facts['axis_names='] = quoted(sorted(resolver.manual))
    sentence = f"{function} uses mesh axis '{axis}', but the mesh has no such axis"
    if axis in resolver.axes:
        sentence = f"{function} uses mesh axis '{axis}', which is not in axis_names="
    elif resolver.uses_array_names:
        sentence = f"{function} uses axis '{axis}', but no expression shards an axis of that name"
    else:
        facts['note'] = 'if a mesh is passed or in context, collectives use its axis names'
        if axis in resolver.joint.named_sizes:
            facts[f"'{axis}' is sharded over"] = resolver.mesh_axes_of(axis)
    return EinshardError(sentence, facts=facts)
