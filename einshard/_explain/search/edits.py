"""Neighbours as edits of the traced program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ..._program.edits.call import JittedCall
from ..._program.edits.edit import (
    Constrain,
    Edit,
    MoveThrough,
    PlaceArguments,
    PlaceResults,
    RemoveConstraint,
    ReplaceConstraint,
)
from ..._program.edits.keys import Key
from ..._program.edits.sites import Sites
from ..._program.edits.tags import tag_in
from ..._program.jaxpr.graph import flatten
from ..._program.traced.outline import Place
from ..._program.traced.propagated import Axes
from ..._program.traced.variants import Variants
from ..._sharding.mesh import AnyMesh, partition_spec

# results at which a constraint may help: products, lookups, sums of a residual stream
_CANDIDATES = frozenset(
    ('dot_general', 'conv_general_dilated', 'gather', 'add', 'reshape', 'concatenate')
)


def edits_of(
    changes: Mapping[Place, Axes | None], variants: Variants, mesh: AnyMesh
) -> tuple[Edit, ...]:
    """Returns the edits that make changes of the module of `Sites` in its program."""
    arguments, results = dict[int, NamedSharding](), dict[int, NamedSharding | None]()
    by_key: dict[Key, Edit] = {}
    for place, axes in changes.items():
        axes = axes and axes[: variants.ranks.get(place)]
        if place.kind == 'argument':
            arguments[place.index] = sharding_of(axes or (), mesh)
        elif place.kind == 'result':
            results[place.index] = None if axes is None else sharding_of(axes, mesh)
        elif (site := variants.sites[place]) is not None:
            key, n_mapped = site
            what: Any
            kind, what = key
            if axes is None:
                by_key[key] = RemoveConstraint(what)
            elif kind == 'through':
                by_key[key] = MoveThrough(what, sharding_of(axes, mesh))
            else:
                edit = ReplaceConstraint if kind == 'constraint' else Constrain
                # the expression does not see the axes that jax.vmap adds, unless they are sharded
                seen = axes if any(axes[:n_mapped]) else axes[n_mapped:]
                by_key[key] = edit(what, sharding_of(seen, mesh))
    placed: list[Edit] = []
    if arguments:
        placed = [PlaceArguments(arguments, results)]
    elif results:
        placed = [PlaceResults(results)]
    return (*placed, *by_key.values())


def variants_of(call: JittedCall, mesh: Mesh, moves: bool = False) -> Variants:
    """Returns the variants of a call, with constraints at the results of `_CANDIDATES`.

    Args:
        moves: whether arguments, results and what constraints move may pass through another
            placement on the way.

    Raises:
        NotPropagated: if Shardy cannot read it.
    """
    program = flatten(call.jaxpr)
    # types determine the shardings of values on Explicit axes
    is_explicit = AxisType.Explicit in mesh.axis_types
    ops = [op for op in program.ops if op.site.frames and not (op.site.n_shards or is_explicit)]
    paths = [op.site.frames for op in ops if op.primitive in _CANDIDATES]
    avals = call.jaxpr.in_avals
    arguments: list[Any] = [avals[call.arguments[leaf]] for leaf in call.dynamic]
    # in the module, a key of random numbers has an axis more, of numbers
    ranks = {
        Place(kind, i): len(aval.shape)
        for kind, avals in (('argument', arguments), ('result', call.jaxpr.out_avals))
        for i, aval in enumerate(avals)
        if hasattr(aval, 'dtype') and jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)
    }
    through: list[MoveThrough] = []
    if moves and not is_explicit:
        unused = NamedSharding(mesh, PartitionSpec())
        ends = ('argument', program.arguments), ('result', program.results)
        what: list[Any] = [
            (kind, i)
            for kind, values in ends
            for i, v in enumerate(values)
            if v is not None and Place(kind, i) not in ranks
        ]
        constraints = (op.site.frames for op in ops if op.primitive == 'sharding_constraint')
        what += [('constraint', path) for path in dict.fromkeys(constraints)]
        through = [MoveThrough(one, unused) for one in what]
    sites = Sites(call, paths, mesh, through)
    module = sites.module  # lowering tags arguments and results
    keys: dict[int, Any] = sites.keys

    def site_of(location: str) -> tuple[Key, int] | None:
        tag = tag_in(location)
        return None if tag is None else (keys[tag[0]], tag[1])

    placed = call.eqn.params['out_shardings']
    typed = [i for i, s in enumerate(placed) if is_explicit and not isinstance(s, Sharding)]
    variants = Variants(module, site_of, is_explicit, typed)
    variants.ranks = ranks
    return variants


def sharding_of(axes: Axes, mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes))
