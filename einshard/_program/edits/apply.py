"""Applies edits to a traced call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.tree_util as jtu
from jax.extend import core as jex
from jax.sharding import Sharding

from ..jaxpr.spans import Frames
from .call import JittedCall, array_type, is_committed
from .edit import Applied, Edit
from .jaxprs import has_explicit_axes
from .splice import Splicer


@dataclass(frozen=True)
class Edited:
    """An edited program.

    Attributes:
        function: the jitted function, which is called as the one that was edited.
        args, kwargs: the arguments, as ShapeDtypeStructs with shardings.
        applied: for each edit, the numbers of values and of cotangents that it changes. 0 values:
            it does not apply.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    applied: tuple[Applied, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all edits apply."""
        return all(values for values, _ in self.applied)


@dataclass
class Draft:
    """A call that edits change.

    Attributes:
        arguments, results: the new shardings, by index.
        entering, leaving: shardings that arguments and results have on the way from the caller and
            to it, by index.
        needs_trace: whether types in the jaxpr have the shardings of the arguments.
    """

    call: JittedCall
    arguments: dict[int, Sharding] = field(default_factory=dict)
    results: dict[int, Sharding] = field(default_factory=dict)
    entering: dict[int, Sharding] = field(default_factory=dict)
    leaving: dict[int, Sharding] = field(default_factory=dict)
    needs_trace: bool = False
    frames: Frames = field(default_factory=Frames)
    _jaxpr: Any = None

    @property
    def in_shardings(self) -> list[Sharding | None]:
        """The shardings of the leaves, as far as the program or an edit gives them."""
        call, found = self.call, list[Sharding | None]([None] * len(self.call.leaves))
        for i, leaf in enumerate(call.dynamic):
            given = call.eqn.params['in_shardings'][call.arguments[leaf]]
            found[leaf] = self.arguments.get(i, given if isinstance(given, Sharding) else None)
        return found

    @property
    def structs(self) -> list[Any]:
        """The leaves, with ShapeDtypeStructs for the arguments."""
        pairs = enumerate(zip(self.call.leaves, self.in_shardings, strict=True))
        dynamic = {*self.call.dynamic}
        return [_struct(leaf, s) if i in dynamic else leaf for i, (leaf, s) in pairs]

    @property
    def jaxpr(self) -> Any:
        if self._jaxpr is None:
            if self.needs_trace:
                if self.call.trace_again is None:
                    raise ValueError('it cannot be traced with other shardings of its arguments')
                self.call = self.call.trace_again(self.structs)
            self._jaxpr = self.call.jaxpr
        return self._jaxpr

    @jaxpr.setter
    def jaxpr(self, jaxpr: Any) -> None:
        self._jaxpr = jaxpr

    def splice(self, splicer: Splicer) -> Applied:
        """Changes constraints in the jaxpr."""
        jaxpr = self.jaxpr
        if self.needs_trace or has_explicit_axes(splicer.sharding):
            raise ValueError('on Explicit mesh axes, only arguments and results can change')
        splicer.frames = self.frames
        self.jaxpr = splicer.splice(jaxpr)
        return splicer.applied


def apply(call: JittedCall, edits: Sequence[Edit] = ()) -> Edited:
    """Returns the program with edits.

    Everything else is kept: the shardings of other arguments and results, donation and the name.
    """
    draft, applied = Draft(call), dict[int, Applied]()
    for i in sorted(range(len(edits)), key=lambda i: edits[i].stage):
        applied[i] = edits[i].apply(draft)
    run = jex.jaxpr_as_fun(draft.jaxpr)
    call, in_shardings, structs = draft.call, draft.in_shardings, draft.structs
    params, by_leaf = call.eqn.params, call.arguments
    out_shardings = [
        draft.results.get(i, given if isinstance(given, Sharding) else None)
        for i, given in enumerate(params['out_shardings'])
    ]
    entering = {call.dynamic[i]: sharding for i, sharding in draft.entering.items()}
    args, kwargs = call.args_tree.unflatten(structs)
    numbers: tuple[tuple[Any, ...], dict[str, Any]] = call.args_tree.unflatten(
        range(len(call.leaves))
    )

    def is_static(tree: Any) -> bool:
        leaves = jtu.tree_leaves(tree)
        return bool(leaves) and not any(i in by_leaf for i in leaves)

    def is_donated(tree: Any) -> bool:
        leaves = [by_leaf[i] for i in jtu.tree_leaves(tree) if i in by_leaf]
        return bool(leaves) and all(params['donated_invars'][i] for i in leaves)

    options: dict[str, Any] = {
        'static_argnums': [i for i, tree in enumerate(numbers[0]) if is_static(tree)],
        'static_argnames': [name for name, tree in numbers[1].items() if is_static(tree)],
        'donate_argnums': [i for i, tree in enumerate(numbers[0]) if is_donated(tree)],
        'donate_argnames': [name for name, tree in numbers[1].items() if is_donated(tree)],
        'keep_unused': params['keep_unused'],
        'compiler_options': dict(params['compiler_options_kvs']) or None,
    }
    if any(s is not None for s in in_shardings) and not kwargs:
        dynamic = [tree for i, tree in enumerate(numbers[0]) if i not in options['static_argnums']]
        options['in_shardings'] = tuple(
            jtu.tree_map(lambda i: in_shardings[i], tree) for tree in dynamic
        )
    if any(s is not None for s in out_shardings):
        options['out_shardings'] = call.result_tree.unflatten(out_shardings)

    def constrained(leaves: Sequence[Any], shardings: Mapping[int, Sharding]) -> list[Any]:
        return [
            jax.lax.with_sharding_constraint(leaf, shardings[i]) if i in shardings else leaf
            for i, leaf in enumerate(leaves)
        ]

    def edited(*args: Any, **kwargs: Any) -> Any:
        leaves = constrained(jtu.tree_leaves((args, kwargs)), entering)
        operands = [leaves[each] if isinstance(each, int) else each.value for each in call.operands]
        return call.result_tree.unflatten(constrained(run(*operands), draft.leaving))

    edited.__name__ = edited.__qualname__ = params['name']
    numbers_applied = tuple(applied[i] for i in range(len(edits)))
    return Edited(jax.jit(edited, **options), args, kwargs, numbers_applied)


def _struct(leaf: Any, sharding: Sharding | None) -> Any:
    """Returns the ShapeDtypeStruct of an argument, with its own sharding if it is committed."""
    aval = array_type(leaf)
    if sharding is None and (isinstance(leaf, jax.ShapeDtypeStruct) or is_committed(leaf)):
        sharding = leaf.sharding
    weak = bool(getattr(aval, 'weak_type', False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)
