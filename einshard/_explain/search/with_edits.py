"""A function with edits, and the edits as a patch of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..._errors import EinshardError
from ..._program.edits.apply import Edited
from ..._program.edits.call import JittedCall
from ..._program.edits.edit import Edit, indices
from ..._program.edits.fixed_function import FixedFunction
from ..._sharding.scopes import mesh_scope
from ..._text import first_line
from ..findings.facts import Facts
from ..patch.arguments import in_jit
from ..patch.patch import commented, make_patch
from ..trace_call import trace_call
from .trials import Trials
from .words import Words


def patch_of(
    facts: Facts, edits: Sequence[Edit], comments: Sequence[str] = (), *, in_mesh: bool = False
) -> str:
    """Writes edits into the source of the function, as `patch` applies them.

    Args:
        comments: what else to change, in words.
        in_mesh: whether the function has not run on a mesh so far. Then, `comments` say how
            arguments are placed.
    """
    call, words = facts.stages.call, Words(facts)
    if call is None:
        return commented(comments)
    if not in_mesh:
        comments = [*comments, *words.code_to_place(edits)]
    changes = {edit: change for edit in edits if (change := words.change(edit))}
    placed, trials = in_jit(facts.stages.called, call, edits), Trials(facts, call)
    return make_patch(changes, edits, trials, comments, placed, in_mesh=in_mesh)


def fixed_function(facts: Facts, edits: Sequence[Edit]) -> FixedFunction:
    """Returns the function with edits. It takes the arguments of the user's function.

    Raises:
        EinshardError: Flax or Equinox jits the function.
    """
    stages, call = facts.stages, facts.stages.call
    assert call is not None
    if stages.framework is not None or stages.is_filtered:
        raise EinshardError(
            'the changes of a function that Flax or Equinox jits cannot be applied',
            code='argument',
            facts={'instead': 'apply report.patch()'},
        )
    edited = Trials(facts, call).edited(edits)

    def trace(
        args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[Any]
    ) -> Edited | str:
        def again() -> JittedCall | None:
            if call.trace_again is not None:
                return call.trace_again(leaves)
            return trace_call(stages.called, args, kwargs, stages.scope).call

        with mesh_scope(stages.scope):
            new = again()
        if new is None or new.dynamic != call.dynamic:
            return 'other arguments are arrays'
        try:
            edited = Trials(facts, new, again).edited(edits)
        except ValueError as error:  # a value that a constraint does not divide
            return first_line(error)
        return edited if edited.is_complete else 'an expression is not evaluated'

    moved = [call.dynamic[i] for i in indices(edits, 'argument')]
    named = zip(call.dynamic, facts.arguments, strict=True)
    paths = {leaf: argument.path for leaf, argument in named}
    return FixedFunction(call, edited, moved, paths, stages.bind, trace)
