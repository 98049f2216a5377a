"""A call of a jitted function, as one equation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend import core as jex

from ..private_jax import jit_params
from .jaxprs import is_jaxpr, opened


@dataclass(frozen=True)
class JittedCall:
    """A call of a jitted function, as the only equation of a program.

    Attributes:
        eqn: the equation, with jaxpr, shardings, donation and name.
        leaves: the leaves of the arguments `(args, kwargs)`.
        operands: for each operand of the equation, the index of the leaf that it is, or a constant.
        args_tree, result_tree: the structures of the arguments and of the result.
        trace_again: returns the call with other leaves, such as ShapeDtypeStructs with other
            shardings. None if it cannot be called with other shardings.
    """

    eqn: Any
    leaves: Sequence[Any]
    operands: Sequence[int | Constant]
    args_tree: Any
    result_tree: Any
    trace_again: Callable[[Sequence[Any]], JittedCall] | None = None

    @property
    def jaxpr(self) -> Any:
        return self.eqn.params['jaxpr']

    @property
    def dynamic(self) -> list[int]:
        """The leaves that are operands, in the order of the program's arguments."""
        return [leaf for leaf in self.operands if isinstance(leaf, int)]

    @property
    def arguments(self) -> dict[int, int]:
        """The operand that is each leaf. Static and constant leaves are left out."""
        return {leaf: i for i, leaf in enumerate(self.operands) if isinstance(leaf, int)}


class Constant(NamedTuple):
    value: Any


def read_call(
    jitted: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result_tree: Any,
    *,
    numbers_are_static: bool = False,
    flatten: Callable[[Any], tuple[list[Any], Any]] = jtu.tree_flatten,
) -> JittedCall | None:
    """Traces a call of a jitted function as one equation. Returns None if it is not one.

    This is public, where the shardings, the donation and the name of a `jax.stages.Traced` are not.
    Only of a function with compiler options, which JAX does not trace in another one, that is read.

    Args:
        result_tree: the structure of the result. None for a function that a framework jits, which
            rearranges its arguments and results: then the call takes and returns leaves.
        numbers_are_static: whether Python's numbers are static, as in Equinox.
        flatten: returns the leaves of the call, and what unflattens them.
    """
    # a function of Equinox may have arrays, which are arguments of the program
    called = (jitted if result_tree is None else None, tuple(args), dict(kwargs))
    leaves, args_tree = flatten(called)

    def trace(leaves: Sequence[Any], is_dynamic: Callable[[Any], bool]) -> JittedCall:
        dynamic = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]

        # it returns nothing, because functions of frameworks also return leaves other than arrays
        def call(*values: Any) -> None:
            given = dict(zip(dynamic, values, strict=True))
            merged = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
            function, args, kwargs = args_tree.unflatten(merged)
            (jitted if function is None else function)(*args, **kwargs)

        operands: list[int | Constant]
        try:
            closed = jax.make_jaxpr(call)(*(leaves[i] for i in dynamic))
        except ValueError as error:
            if result_tree is None or 'compiler_options' not in str(error):
                raise
            _, args, kwargs = args_tree.unflatten(leaves)
            traced = jitted.trace(*args, **kwargs)  # type: ignore[reportFunctionMemberAccess]
            eqn: Any = SimpleNamespace(params=jit_params(traced))
            operands = [*dynamic]
            shapes = [aval.shape for aval in eqn.params['jaxpr'].in_avals]
            if shapes != [jnp.shape(leaves[i]) for i in dynamic]:
                raise
        else:
            outer = opened(closed)
            (eqn,) = outer.eqns
            known: dict[Any, Any] = dict(zip(outer.invars, dynamic, strict=True))
            constants = zip(outer.constvars, closed.consts, strict=True)
            known |= {v: Constant(value) for v, value in constants}
            operands = [
                Constant(v.val) if isinstance(v, jex.Literal) else known[v] for v in eqn.invars
            ]
        if not is_jaxpr(eqn.params.get('jaxpr')):
            raise ValueError('not a call of a jitted function')
        if result_tree is not None:
            _, *of_args = args_tree.children()
            tree, order = jtu.treedef_tuple(of_args), [*range(len(leaves))]
        else:
            order = [i for i in operands if isinstance(i, int)]
            tree = jtu.tree_structure((tuple(order), {}))
        renamed = {leaf: i for i, leaf in enumerate(order)}

        def trace_again(changed: Sequence[Any]) -> JittedCall:
            new = dict(zip(order, changed, strict=True))
            return trace([new.get(i, leaf) for i, leaf in enumerate(leaves)], is_dynamic)

        return JittedCall(
            eqn,
            [leaves[i] for i in order],
            [renamed[i] if isinstance(i, int) else i for i in operands],
            tree,
            jtu.tree_structure(tuple(eqn.outvars)) if result_tree is None else result_tree,
            trace_again,
        )

    # Python's numbers are arguments, unless they are static: then a tracer has no hash
    options = [is_array] if numbers_are_static else [_is_number_or_array, is_array]
    for is_dynamic in options:
        try:
            return trace(leaves, is_dynamic)
        except (TypeError, ValueError, KeyError):
            continue
    return None


def is_array(leaf: Any) -> bool:
    return hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')


def _is_number_or_array(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def array_type(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)


def struct_of(leaf: Any, sharding: Any = None) -> Any:
    """Returns an array without its values, as JAX traces it."""
    aval = array_type(leaf)
    weak = bool(getattr(aval, 'weak_type', False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def is_committed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.committed
