"""A copy of a program in which every edit is an attribute, lowered once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..jaxpr.graph import Site
from .apply import apply_to
from .call import JittedCall
from .draft import Draft
from .edit import Constrain, MoveThrough
from .jaxprs import closed_like, map_jaxprs, opened
from .keys import Key, Path
from .splice import CONSTRAINTS


class Sites:
    """A copy of a program with open constraints, which change nothing until they get a sharding.

    Behind each candidate value and each of its cotangents, the copy has a sharding constraint that
    is open on all axes (`P.UNCONSTRAINED`). Those, and the user's own constraints and reshards,
    have a tag in their name stack, and so in the location of their operation in the module.

    An edit is then an attribute of an argument, a result or a tagged constraint of one module,
    which is lowered once; see `Variants`. Arguments and results have the numbers that edits have:
    unused arguments are kept.

    Attributes:
        values: the paths of candidate values that have a constraint.
        left_out: those that have none: nothing evaluates them, or a constraint computes the value,
            which `ReplaceConstraint` changes.
        constraints: the paths of the user's constraints.
        edited: the copy, as from `apply`.
        lowered: the copy, lowered.
    """

    def __init__(
        self,
        call: JittedCall,
        values: Iterable[Path],
        mesh: Mesh,
        through: Iterable[MoveThrough] = (),
    ):
        """
        Args:
            call: the program.
            values: the call paths of candidate values, such as the frames of operations in
                `flatten(call.jaxpr)`.
            mesh: the mesh of all edits.
            through: moves that are to get a place. Their shardings do not matter.
        """
        any_sharding = NamedSharding(mesh, PartitionSpec())
        self._draft = draft = Draft(call, tags={})
        draft.jaxpr = _tagged(draft.jaxpr, draft)
        self.constraints = tuple(path for _, path in draft.tags or {})
        opened_values = [Constrain(path, any_sharding) for path in dict.fromkeys(values)]
        opens = [*opened_values, *through]
        self.edited = apply_to(draft, opens)
        applied = [n for n, _ in self.edited.applied]
        pairs = [*zip(opened_values, applied, strict=False)]
        self.values = tuple(edit.path for edit, n in pairs if n)
        self.left_out = tuple(edit.path for edit, n in pairs if not n)

    @cached_property
    def lowered(self) -> Any:
        return self.edited.function.lower(*self.edited.args, **self.edited.kwargs)

    @cached_property
    def module(self) -> Any:
        """The module of `lowered`, in StableHLO."""
        return self.lowered.compiler_ir('stablehlo')

    @property
    def keys(self) -> dict[int, Key]:
        """What each tag is of, by its number; complete once `module` was made."""
        return {number: key for key, number in (self._draft.tags or {}).items()}


def _tagged(closed: Any, draft: Draft, site: Site | None = None) -> Any:
    """Tags the constraints of a jaxpr."""
    site, jaxpr, eqns = site or Site(), opened(closed), list[Any]()
    for eqn in jaxpr.eqns:
        at = site.at(eqn, draft.frames.of(eqn))
        # of a product on Explicit axes; cotangents have that of the type of their value
        is_given = eqn.params.get('out_sharding') is not None and not at.is_backward
        # JAX itself reshards scalars
        is_array = at.frames and eqn.outvars and getattr(eqn.outvars[0].aval, 'shape', ())
        if is_array and (eqn.primitive.name in CONSTRAINTS or is_given):
            tag = draft.tag(('constraint', at.frames), at.n_mapped)
            stack = eqn.source_info.name_stack.extend(tag)
            eqns.append(eqn.replace(source_info=eqn.source_info.replace(name_stack=stack)))
            continue
        inside = at.inside(eqn)
        params = map_jaxprs(eqn, lambda inner, inside=inside: _tagged(inner, draft, inside))
        eqns.append(eqn if params is eqn.params else eqn.replace(params=params))
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return closed
    return closed_like(closed, jaxpr.replace(eqns=eqns))
