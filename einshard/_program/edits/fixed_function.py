"""A function with edits, which takes the arguments of the one that was edited."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer

from ..._errors import EinshardError
from ..._text import array_text
from .apply import Edited
from .call import JittedCall, array_type, is_array, is_committed


class FixedFunction:
    """An edited function that takes the arguments of the one that was edited.

    Arguments whose shardings the edits change are moved before the call. The others are placed as
    in the call that was edited, unless they are on devices already.

    Attributes:
        jitted: the function that takes arguments as `place` returns them.
    """

    def __init__(
        self,
        call: JittedCall,
        edited: Edited,
        moved: Collection[int],
        paths: Mapping[int, str],
        bind: Callable[[Sequence[Any], Mapping[str, Any]], tuple[Any, Any]],
    ):
        """
        Args:
            moved: the leaves whose shardings the edits change.
            paths: the paths of the leaves that are arguments of the program.
            bind: returns the arguments of `call` for those of the user's function.
        """
        self.jitted = edited.function
        self.__name__ = self.__qualname__ = edited.function.__name__
        self._call, self._moved, self._paths, self._bind = call, {*moved}, paths, bind
        self._structs = jtu.tree_leaves((edited.args, edited.kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.place(args, kwargs)
        return self.jitted(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.place(args, kwargs)
        return self.jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self.trace(*args, **kwargs).lower()

    def place(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns the arguments for `jitted`: those that the edits move have their new shardings.

        Raises an EinshardError for other static arguments, whose values are in the program, and for
        arrays of other types: the traced operations would compute other values with them.
        """
        args, kwargs = self._bind(args, kwargs)
        call, (leaves, tree) = self._call, jtu.tree_flatten((tuple(args), dict(kwargs)))
        facts: dict[str, str] = {}
        if tree != call.args_tree:
            facts = {'arguments of the report': str(call.args_tree), 'got': str(tree)}
        else:
            for i, (old, new) in enumerate(zip(call.leaves, leaves, strict=True)):
                if i not in call.arguments and not is_array(old) and new is not old and new != old:
                    facts = {'constant of the report': repr(old), 'got': repr(new)}
            avals = call.jaxpr.in_avals
            for i, operand in call.arguments.items():
                expected, got = _type_text(avals[operand]), _type_text(array_type(leaves[i]))
                if got != expected:
                    got = got if is_array(leaves[i]) else array_text(leaves[i])
                    path = self._paths[i]
                    facts = {'argument': path, 'in the report': expected, 'got': got}
                    break
        if facts:
            raise EinshardError(
                f'{self.__name__} with suggestions cannot take these arguments',
                code='argument',
                facts={**facts, 'instead': 'explain the function with these arguments'},
            )
        return tree.unflatten([self._placed(i, leaf) for i, leaf in enumerate(leaves)])

    def _placed(self, i: int, leaf: Any) -> Any:
        sharding = self._structs[i].sharding if i in self._call.arguments else None
        if sharding is None or not is_array(leaf):
            return leaf
        is_moved = i in self._moved
        if isinstance(leaf, jax.ShapeDtypeStruct):
            is_placed = leaf.sharding is not None and not is_moved
            return leaf if is_placed else leaf.update(sharding=sharding)
        if isinstance(leaf, Tracer):
            return jax.device_put(leaf, sharding) if is_moved else leaf
        if is_committed(leaf) and not (
            is_moved and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        ):
            return leaf
        is_donated = self._call.eqn.params['donated_invars'][self._call.arguments[i]]
        return jax.device_put(leaf, sharding, donate=is_donated)


def _type_text(aval: Any) -> str:
    aval = getattr(aval, 'inner_aval', aval)  # of a Ref
    weak = ', as a Python number' * bool(getattr(aval, 'weak_type', False))
    return array_text(aval) + weak
