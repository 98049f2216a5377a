"""Rewrites JAX's error about a result that `out=` declares replicated, but that may vary."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._errors import EinshardError, quoted
from .._sharding.mesh import entry_axes

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

# JAX's messages for one axis and for several axes
_VARYING_ERROR = re.compile(
    r'out_specs((?:[\[.].*?)?) is P(?:artitionSpec)?\(.* which implies that .* '
    r"(?:replicated across mesh axis '(\w+)'"
    r'|and not \{([^}]+)\})'
)
# 'my key' and mean, of "['my key'].mean"
_KEYS = re.compile(r"""(?<=\[')(.*?)(?='\])|(?<=\[")(.*?)(?="\])|(\w+)""")


@dataclass(frozen=True)
class VaryingResult:
    """A result that may vary along mesh axes that its expression does not name."""

    key: str  # the key path of the result in out_specs, such as "[1]['mean']"
    axes: tuple[str, ...]

    def error(self, function: str, facts: Mapping[str, str]) -> EinshardError:
        path = '/'.join(''.join(part) for part in _KEYS.findall(self.key))
        result = f"result '{path}'" if path else 'the result'
        return EinshardError(
            f'out= declares {result} of {function} replicated over {quoted(self.axes)}, but '
            f'devices along {quoted(self.axes)} may return different values',
            code='spec',
            facts=facts,
        )


def read_varying(error: Exception) -> VaryingResult | None:
    """Parses JAX's error about a result that may vary. Returns None for any other error."""
    match = _VARYING_ERROR.search(str(error)) if isinstance(error, ValueError) else None
    if match is None:
        return None
    key, axis, axes = match.groups()
    return VaryingResult(key, (axis,) if axis else tuple(axes.split(',')))


@dataclass(frozen=True)
class VaryingAxes:
    """The mesh axes along which a value varies according to JAX, by reason.

    Attributes:
        varying: the axes that shard arguments, and the axes of `axis_index`.
        gathered: the axes of an `all_gather`. The value is replicated along them, but JAX does not
            infer that.
        exchanged: the axes of collectives such as `ppermute`, and of all collectives in a loop, a
            conditional or a nested jit. The value may be replicated along them: a ring of
            `ppermute` can compute a sum.
    """

    varying: frozenset[str] = frozenset()
    gathered: frozenset[str] = frozenset()
    exchanged: frozenset[str] = frozenset()

    def __or__(self, other: VaryingAxes) -> VaryingAxes:
        return VaryingAxes(
            self.varying | other.varying,
            self.gathered | other.gathered,
            self.exchanged | other.exchanged,
        )

    def without(self, axes: frozenset[str]) -> VaryingAxes:
        return VaryingAxes(self.varying - axes, self.gathered - axes, self.exchanged - axes)

    def reason(self, axis: str) -> str | None:
        """Returns 'exchanged', 'varying', 'gathered', or None if the value does not vary."""
        sets = {'exchanged': self.exchanged, 'varying': self.varying, 'gathered': self.gathered}
        return next((reason for reason, axes in sets.items() if axis in axes), None)


def suggest_fixes(
    result: VaryingResult,
    body: Callable[..., Any],
    in_specs: Sequence[Any],
    arguments: Sequence[Any],
    shard_map: Callable[..., Any],
) -> dict[str, str]:
    """Returns the fixes for `result` as facts of an error, or {} if no fix is known.

    Args:
        in_specs: a pytree of PartitionSpecs for each argument.
        arguments: the arguments, as global arrays.
        shard_map: `jax.shard_map` with the mesh and axis names of the function.
    """
    varying_axes, ranks, can_add = list[VaryingAxes](), list[int](), list[bool]()
    is_in_result = re.compile(re.escape(result.key) + r'(?!\w)')  # '.a' is not in '.ab'

    def trace_body(*values: Any) -> None:
        jaxpr, shapes = jax.make_jaxpr(body, return_shape=True)(*values)
        arguments_axes = [
            VaryingAxes(frozenset(axis for entry in spec for axis in entry_axes(entry)))
            for spec in jtu.tree_leaves(in_specs)
        ]
        results_axes = _varying_axes(jaxpr.jaxpr, arguments_axes)
        leaves = jtu.tree_leaves_with_path(shapes)
        for (path, leaf), axes in zip(leaves, results_axes, strict=True):
            if is_in_result.match(jtu.keystr(path)):
                varying_axes.append(axes)
                ranks.append(leaf.ndim)
                # random keys have an extended dtype, and cannot be added
                can_add.append(not jnp.issubdtype(leaf.dtype, jax.dtypes.extended))

    unchecked = shard_map(trace_body, in_specs=in_specs, out_specs=PartitionSpec(), check_vma=False)
    jax.eval_shape(unchecked, *arguments)
    # one spec may cover several arrays, which may vary for different reasons
    reasons = {axis: {x.reason(axis) for x in varying_axes} - {None} for axis in result.axes}
    varying = [axis for axis, reason in reasons.items() if reason == {'varying'}]
    gathered = [axis for axis, reason in reasons.items() if reason == {'gathered'}]
    gather = _replicating_gather(gathered, shard_map) if gathered else ''
    if len(varying) + len(gathered) < len(result.axes) or gather is None:
        return {'try': 'check_vma=False, if the result is in fact replicated'}
    facts = {'try': f'{gather}, which returns a replicated value'} if gather else {}
    if varying:
        # a result may be a partial sum along one axis, and have different rows along another
        each, over, axes = '', quoted(varying), str((*varying,))
        if len(varying) == 1:
            axes = repr(varying[0])
        elif all(can_add) and all(ranks):
            each, over, axes = f'for each axis ({over}): ', 'it', 'axis'
        fixes = [f'sum over {over} with jax.lax.psum(result, {axes})'] if all(can_add) else []
        fixes += [f'shard the result over {over} in out='] if all(ranks) else []
        label = f'along {", ".join(varying)}' if gathered else 'try'
        facts |= {label: each + ', or '.join(fixes)} if fixes else {}
    return facts


def _replicating_gather(axes: Sequence[str], shard_map: Callable[..., Any]) -> str | None:
    """Returns the `all_gather` call whose result JAX infers to be replicated, or None."""

    def gathered() -> list[Any]:
        return [jax.lax.all_gather(jax.lax.axis_index(axis), axis, to='invarying') for axis in axes]

    try:
        jax.eval_shape(shard_map(gathered, in_specs=(), out_specs=PartitionSpec()))
    except (TypeError, ValueError):
        return None
    return "jax.lax.all_gather(..., to='invarying')"


# Collectives with a replicated result. JAX does not document the names of its primitives;
# tests/test_per_device.py fails if they change.
_REPLICATING = {'psum', 'psum_invariant', 'pmax', 'pmin', 'all_gather_invariant'}


def _varying_axes(jaxpr: Jaxpr, arguments: Sequence[VaryingAxes]) -> list[VaryingAxes]:
    """Computes the varying axes of each result of a jaxpr from those of its arguments."""
    from jax.extend.core import Var  # imported here: it takes 10 ms

    by_variable: dict[Any, VaryingAxes] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atoms: Sequence[Any]) -> list[VaryingAxes]:
        # literals and captured values do not vary
        no_axes = VaryingAxes()
        return [by_variable.get(x, no_axes) if isinstance(x, Var) else no_axes for x in atoms]

    for equation in jaxpr.eqns:
        operands = reduce(operator.or_, read(equation.invars), VaryingAxes())
        by_variable.update(dict.fromkeys(equation.outvars, _result_axes(equation, operands)))
    return read(jaxpr.outvars)


def _result_axes(equation: Any, operands: VaryingAxes) -> VaryingAxes:
    name, axes = equation.primitive.name, _mesh_axes(equation)
    if name == 'axis_index':
        return operands | VaryingAxes(varying=axes)
    if equation.params.get('axis_index_groups') is None:
        if name in _REPLICATING:
            return operands.without(axes)
        if name == 'all_gather':
            return operands.without(axes) | VaryingAxes(gathered=axes)
    exchanged = axes.union(*map(_mesh_axes, _equations_inside(equation)))
    return operands | VaryingAxes(exchanged=exchanged)


def _mesh_axes(equation: Any) -> frozenset[str]:
    """Returns the mesh axes that an equation names. Array axes, as in `reduce_sum`, are numbers."""
    axes = equation.params.get('axis_name', equation.params.get('axes', ()))
    return frozenset(axis for axis in entry_axes(axes) if isinstance(axis, str))


def _equations_inside(equation: Any) -> Iterator[Any]:
    """Yields the equations in the body of a loop, a conditional or a nested jit."""
    from jax.extend.core import ClosedJaxpr, Jaxpr

    for value in jtu.tree_leaves(list(equation.params.values())):
        jaxpr = value.jaxpr if isinstance(value, ClosedJaxpr) else value
        if isinstance(jaxpr, Jaxpr):
            for inner in jaxpr.eqns:
                yield from (inner, *_equations_inside(inner))
