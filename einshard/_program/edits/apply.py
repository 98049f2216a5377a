"""Applies edits to a traced call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.extend import core as jex
from jax.sharding import Sharding

from .call import JittedCall
from .draft import Draft, Rewrite
from .edit import Edit
from .splice import Applied, constrained


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


def apply(call: JittedCall, edits: Sequence[Edit] = (), rewrite: Rewrite | None = None) -> Edited:
    """Returns the program with edits.

    Everything else is kept: the shardings of other arguments and results, donation and the name.

    Args:
        rewrite: see `Draft`.
    """
    return apply_to(Draft(call, rewrite=rewrite), edits)


def apply_to(draft: Draft, edits: Sequence[Edit]) -> Edited:
    """Applies edits to a draft, of which they are the last."""
    applied = dict[int, Applied]()
    for i in sorted(range(len(edits)), key=lambda i: edits[i].stage):
        applied[i] = edits[i].apply(draft)
    run = jex.jaxpr_as_fun(draft.jaxpr)
    call, in_shardings, structs = draft.call, draft.in_shardings, draft.structs
    params, by_leaf = call.eqn.params, call.arguments
    out_shardings = [
        draft.results.get(i, given if isinstance(given, Sharding) else None)
        for i, given in enumerate(params['out_shardings'])
    ]
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
        'keep_unused': params['keep_unused'] or draft.tags is not None,
        'compiler_options': dict(params['compiler_options_kvs']) or None,
    }
    if any(s is not None for s in in_shardings) and not kwargs:
        dynamic = [tree for i, tree in enumerate(numbers[0]) if i not in options['static_argnums']]
        options['in_shardings'] = tuple(
            jtu.tree_map(lambda i: in_shardings[i], tree) for tree in dynamic
        )
    if any(s is not None for s in out_shardings):
        options['out_shardings'] = call.result_tree.unflatten(out_shardings)

    def through(values: Sequence[Any], kind: str, shardings: Mapping[int, Sharding]) -> list[Any]:
        moved = [*values]
        for i, sharding in shardings.items():
            at = call.dynamic[i] if kind == 'argument' else i
            tag = draft.tag(('through', (kind, i)))
            with jax.named_scope(tag) if tag else nullcontext():
                moved[at] = constrained(values[at], sharding, draft.tags is not None)
        return moved

    def edited(*args: Any, **kwargs: Any) -> Any:
        leaves = through(jtu.tree_leaves((args, kwargs)), 'argument', draft.entering)
        operands = [leaves[each] if isinstance(each, int) else each.value for each in call.operands]
        return call.result_tree.unflatten(through(run(*operands), 'result', draft.leaving))

    edited.__name__ = edited.__qualname__ = params['name']
    numbers_applied = tuple(applied[i] for i in range(len(edits)))
    return Edited(jax.jit(edited, **options), args, kwargs, numbers_applied)
