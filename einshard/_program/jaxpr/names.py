"""The axis names of traced values, in the `jax.named_scope` of einshard's operations.

A scope stays with an equation through `grad`, `vmap`, `scan`, `cond` and `jax.checkpoint`, also if
a source line has several constraints. A compiled program keeps only some scopes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

_SCOPE = re.compile(r'einshard\(([^()]*)\)')
_ELLIPSIS, _UNNAMED = '...', '.'


class AxisNames(NamedTuple):
    """The axis names of a constraint or an einsum.

    Attributes:
        arrays: the names of each array: of the constrained value, or of the operands and the result
            of an einsum. An axis that '...' stands for has the name ''. In an einsum, '...' stays.
        without_rule: the names that have no axis rule.
    """

    arrays: tuple[tuple[str, ...], ...]
    without_rule: tuple[str, ...] = ()

    @property
    def of_constraint(self) -> tuple[str, ...] | None:
        """The names of a constrained value, or None for an einsum."""
        return self.arrays[0] if len(self.arrays) == 1 else None


def constraint_scope(names: Sequence[str], ndim: int, without_rule: Collection[str] = ()) -> str:
    """Writes the name of the scope of a constraint.

        >>> from einshard._program.jaxpr.names import constraint_scope
        >>> constraint_scope(['...', 'mlp'], 3, without_rule=['mlp'])
        'einshard(. . mlp?)'

    It has `ndim` names, so that they tell how many axes `jax.vmap` adds later.
    """
    words: list[str] = []
    for name in names:
        if name == _ELLIPSIS:
            words += [_UNNAMED] * (ndim - len(names) + 1)
        else:
            words.append(f'{name}?' if name in without_rule else name)
    return f'einshard({" ".join(words)})'


def einsum_scope(expression: str) -> str:
    """Writes the name of the scope of an einsum, such as 'a b, b c -> a c'."""
    return f'einshard({expression})'


def names_in(scopes: str) -> AxisNames | None:
    """Reads the names of the innermost scope in the name stack of an equation, or in an `op_name`.

    >>> from einshard._program.jaxpr.names import names_in
    >>> names_in('jit(f)/jvp(einshard(. mlp?))')
    AxisNames(arrays=(('', 'mlp'),), without_rule=('mlp',))
    >>> names_in('einshard(a b, b c -> a c)/dot_general').arrays
    (('a', 'b'), ('b', 'c'), ('a', 'c'))
    """
    if 'einshard(' not in scopes:
        return None
    found = _SCOPE.findall(scopes)
    if not found:
        return None
    arrays = [array.split() for array in re.split(',|->', found[-1])]
    words = [word for array in arrays for word in array]
    return AxisNames(
        tuple(tuple('' if w == _UNNAMED else w.rstrip('?') for w in array) for array in arrays),
        tuple(word[:-1] for word in words if word.endswith('?')),
    )


def without_names(op_name: str) -> str:
    """Removes the scopes from an `op_name`.

    >>> from einshard._program.jaxpr.names import without_names
    >>> without_names('jvp(einshard(a b))/hidden/einshard(a, a -> )/dot_general')
    'jvp()/hidden/dot_general'
    """
    return re.sub(rf'{_SCOPE.pattern}/?', '', op_name)


def dims_of_vmap(eqn: Any, n_names: int) -> list[int]:
    """Returns the axes that `jax.vmap` has added to a constraint of an array with `n_names` axes.

    On Auto mesh axes they are unconstrained, unless `spmd_axis_name` shards them. On Explicit ones,
    and with `spmd_axis_name`, they cannot be told from the others, and are assumed to come first.
    """
    n_added = eqn.outvars[0].aval.ndim - n_names
    unconstrained = eqn.params.get('unconstrained_dims', ())
    dims = range(eqn.outvars[0].aval.ndim)
    return sorted(dims, key=lambda dim: (dim not in unconstrained, dim))[: max(n_added, 0)]
