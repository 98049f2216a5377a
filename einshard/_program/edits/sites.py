"""A copy of a program in which every edit is an attribute, lowered once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._sharding.mesh import spec_axes
from ..jaxpr.graph import Site
from ..jaxpr.spans import Frames
from .apply import apply_to
from .call import JittedCall
from .draft import Draft
from .edit import Constrain, MoveThrough
from .jaxprs import closed_like, has_explicit_axes, is_var, map_jaxprs, opened
from .keys import Key, Path
from .splice import CONSTRAINT


class Sites:
    """A copy of a program with open constraints, which change nothing until they get a sharding.

    Behind each candidate value and each of its cotangents, the copy has a sharding constraint that
    is open on all axes (`P.UNCONSTRAINED`). Those, and the user's own constraints and reshards,
    have a tag in their name stack, and so in the location of their operation in the module.

    An edit is then an attribute of an argument, a result or a tagged constraint of one module,
    which is lowered once; see `Variants`. Arguments and results have the numbers that edits have:
    unused arguments are kept.

    Attributes:
        values: the paths of candidate values that have a constraint. Others have none: nothing
            evaluates them, or a constraint computes the value, which `ReplaceConstraint` changes.
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

        def tagged(eqn: Any, at: Site) -> Any:
            tag = draft.tag(('constraint', at.frames), at.n_mapped)
            stack = eqn.source_info.name_stack.extend(tag)
            return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))

        draft.jaxpr = map_constraints(draft.jaxpr, draft.frames, tagged)
        self.constraints = tuple(path for _, path in draft.tags or {})
        opened_values = [Constrain(path, any_sharding) for path in dict.fromkeys(values)]
        opens = [*opened_values, *through]
        self.edited = apply_to(draft, opens)
        pairs = zip(opened_values, self.edited.applied, strict=False)
        self.values = tuple(edit.path for edit, (n, _) in pairs if n)

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


def map_constraints(
    closed: Any, frames: Frames, function: Callable[[Any, Site], Any], site: Site | None = None
) -> Any:
    """Returns a jaxpr with other equations in the place of the user's constraints.

    On Explicit axes those are reshards and products with `out_sharding=`, without the transposes of
    both, which move cotangents to the types of their values.
    """
    site, jaxpr = site or Site(), opened(closed)
    sites = [site.at(eqn, frames.of(eqn)) for eqn in jaxpr.eqns]
    asked = dict[Any, int]()  # the equations, by their results
    for i, (eqn, at) in enumerate(zip(jaxpr.eqns, sites, strict=True)):
        # JAX itself reshards scalars
        if not (at.frames and eqn.outvars and getattr(eqn.outvars[0].aval, 'shape', ())):
            continue
        name, operand = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
        product = asked.get(operand) if operand is not None and is_var(operand) else None
        is_given = eqn.params.get('out_sharding') is not None
        # an operation with `out_sharding=` reshards its operands to a mesh with Auto axes
        is_given |= name == 'reshard' and has_explicit_axes(eqn.params['dst_sharding'])
        if name == CONSTRAINT or (is_given and not at.is_transposed):
            asked[eqn.outvars[0]] = i
        elif (
            name == 'transpose'  # with which `jnp.einsum` ends
            and product is not None
            and 'out_sharding' in jaxpr.eqns[product].params
            and sites[product].frames == at.frames
        ):
            del asked[operand]
            asked[eqn.outvars[0]] = i
    eqns, found = list[Any](), {*asked.values()}
    for i, (eqn, at) in enumerate(zip(jaxpr.eqns, sites, strict=True)):
        if i in found:
            eqns.append(function(eqn, at))
            continue
        inside = at.inside(eqn)
        params = map_jaxprs(
            eqn, lambda inner, inside=inside: map_constraints(inner, frames, function, inside)
        )
        eqns.append(eqn if params is eqn.params else eqn.replace(params=params))
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return closed
    return closed_like(closed, jaxpr.replace(eqns=eqns))


def find_constraints(jaxpr: Any) -> list[tuple[Site, Any]]:
    """Returns the user's constraints: where each is, and the type of its result."""
    found = list[tuple[Site, Any]]()

    def add(eqn: Any, at: Site) -> Any:
        found.append((at, eqn.outvars[0].aval))
        return eqn

    map_constraints(jaxpr, Frames(), add)
    return found


def count_constraints(
    jaxpr: Any, changed: Mapping[Path, NamedSharding | None] | None = None
) -> Counter[Any]:
    """Counts the constraints of a program on Explicit axes, by shape and sharding.

    Args:
        changed: constraints that count with another sharding, or as removed.
    """
    found = Counter[Any]()
    for at, aval in find_constraints(jaxpr):
        entries = spec_axes(aval.sharding.spec)
        entries += [()] * (len(aval.shape) - len(entries))
        paths = [path for path in changed or () if at.frames[: len(path)] == path]
        for sharding in ((changed or {})[path] for path in paths):
            new = [] if sharding is None else spec_axes(sharding.spec)
            # `jax.vmap` adds axes in front
            entries = entries[: min(at.n_mapped, len(entries) - len(new))] + new
        while entries and not entries[-1]:
            entries.pop()
        is_removed = any((changed or {})[path] is None for path in paths)
        found[aval.shape, str(entries)] += not is_removed
    return +found
