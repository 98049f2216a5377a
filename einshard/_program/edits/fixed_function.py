"""A function with edits, which takes the arguments of the one that was edited."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer

from ..._errors import EinshardError
from ..._text import array_text
from .apply import Edited
from .call import JittedCall, array_type, is_array, is_committed, struct_of

# Returns the edited program for other arguments: those of the user's function, and the leaves of
# the call. Or why the edits do not fit it.
Trace: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any], Sequence[Any]], Edited | str]


class FixedFunction:
    """An edited function that takes the arguments of the one that was edited.

    Arguments whose shardings the edits change are moved before the call. The others are placed as
    in the call that was edited, unless they are on devices already. For arrays of other shapes or
    dtypes, the function is traced and edited again.
    """

    def __init__(
        self,
        call: JittedCall,
        edited: Edited,
        moved: Collection[int],
        paths: Mapping[int, str],
        bind: Callable[[Sequence[Any], Mapping[str, Any]], tuple[Any, Any]],
        trace: Trace,
    ):
        """
        Args:
            moved: the leaves whose shardings the edits change.
            paths: the paths of the leaves that are arguments of the program.
            bind: returns the arguments of `call` for those of the user's function.
        """
        self.__name__ = self.__qualname__ = edited.function.__name__
        self._call, self._edited, self._moved, self._paths = call, edited, {*moved}, paths
        self._bind, self._trace = bind, trace
        self._structs = jtu.tree_leaves((edited.args, edited.kwargs))
        avals = call.jaxpr.in_avals
        self._types = {i: _type_text(avals[operand]) for i, operand in call.arguments.items()}
        self._traced = {(*self._types.values(),): edited}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        jitted, args, kwargs = self.bound(args, kwargs)
        return jitted(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        jitted, args, kwargs = self.bound(args, kwargs)
        return jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self.trace(*args, **kwargs).lower()

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Returns the jitted function, and its arguments: those that edits move are placed anew.

        Raises an EinshardError for other static arguments, whose values are in the program, and for
        arrays that the edits do not fit.
        """
        given = _without_tracers(args), _without_tracers(kwargs)
        args, kwargs = self._bind(args, kwargs)
        call, (leaves, tree) = self._call, jtu.tree_flatten((tuple(args), dict(kwargs)))
        if tree != call.args_tree:
            self._refuse({'arguments of the report': str(call.args_tree), 'got': str(tree)})
        for i, (old, new) in enumerate(zip(call.leaves, leaves, strict=True)):
            if i not in call.arguments and not is_array(old) and new is not old and new != old:
                self._refuse({'constant of the report': repr(old), 'got': repr(new)})
        types = {i: _type_text(array_type(leaves[i])) for i in call.arguments}
        different = [i for i, text in types.items() if text != self._types[i]]
        facts = dict[str, str]()
        if different:
            i = different[0]
            got = types[i] if is_array(leaves[i]) else array_text(leaves[i])
            facts = {'argument': self._paths[i], 'in the report': self._types[i], 'got': got}
        for i in self._moved.intersection(different):
            shape = jnp.shape(leaves[i])
            if len(shape) != len(self._structs[i].shape) or not _divides(self._structs[i], shape):
                placed = str(self._structs[i].sharding.spec)
                self._refuse({**facts, 'placed as': f'{self._paths[i]}: {placed}'})
        key = (*types.values(),)
        if key not in self._traced:
            structs = [self._struct(i, leaf) for i, leaf in enumerate(leaves)]
            found = self._trace(*given, structs)
            if isinstance(found, str):
                self._refuse({**facts, 'because': found})
            self._traced[key] = found
        placed = [self._placed(i, leaf) for i, leaf in enumerate(leaves)]
        return self._traced[key].function, *tree.unflatten(placed)

    def _refuse(self, facts: Mapping[str, str]) -> NoReturn:
        raise EinshardError(
            f'{self.__name__} with suggestions cannot take these arguments',
            code='argument',
            facts={**facts, 'instead': 'explain the function with these arguments'},
        )

    def _struct(self, i: int, leaf: Any) -> Any:
        """Returns an argument to trace with: placed as in the report, without its values."""
        if i not in self._call.arguments or not is_array(leaf) or isinstance(leaf, jax.Ref):
            return leaf
        struct = self._structs[i]
        return struct_of(leaf, struct.sharding if _divides(struct, leaf.shape) else None)

    def _placed(self, i: int, leaf: Any) -> Any:
        sharding = self._structs[i].sharding if i in self._call.arguments else None
        if sharding is None or not is_array(leaf):
            return leaf
        is_moved = i in self._moved
        if not _divides(self._structs[i], leaf.shape):
            return leaf
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


def _divides(struct: Any, shape: tuple[int, ...]) -> bool:
    """Whether an array of another shape can be sharded likewise."""
    if struct.sharding is not None:
        try:
            struct.sharding.shard_shape(shape)
        except ValueError:
            return False
    return True


def _without_tracers(tree: Any) -> Any:
    return jtu.tree_map(lambda leaf: struct_of(leaf) if isinstance(leaf, Tracer) else leaf, tree)
