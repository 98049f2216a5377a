"""Operations that each device runs on its shard, in a `shard_map`."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh, PartitionSpec

from ..._sharding.mesh import partition_spec
from ..jaxpr.batch_axes import BatchAxis, batch_axes
from ..jaxpr.graph import Site
from ..jaxpr.spans import Frames, Span
from ..jaxpr.two_levels import run_in_two_levels
from .draft import Draft
from .edit import Edit, Key
from .jaxprs import closed_like, map_jaxprs, opened
from .splice import Applied


@dataclass(frozen=True)
class RunPerDevice(Edit):
    """An operation that each device runs on its shard, in a `shard_map`.

    Attributes:
        span: the expression that calls it. Its gradients there are changed alike.
        axes: pairs of a batch axis and the mesh axes that shard it; see `batch_axes`.
        along: the mesh axes that shard an axis along which it operates, which then runs in two
            levels; see `run_in_two_levels`.
        dim: that axis.
    """

    span: Span
    primitive: str
    axes: tuple[tuple[int | str, tuple[str, ...]], ...]
    mesh: Mesh
    along: tuple[str, ...] = ()
    dim: int = 0
    stage: ClassVar[int] = 4

    @property
    def key(self) -> frozenset[Key]:
        return frozenset({('per device', (self.span, self.primitive))})

    def apply(self, draft: Draft) -> Applied:
        sharder = _Sharder(self, frames=draft.frames)
        draft.jaxpr = sharder.edit(draft.jaxpr, Site())
        return 0 if sharder.has_failed else sharder.n_changed, 0


@dataclass
class _Sharder:
    """Puts operations into a `shard_map`."""

    change: RunPerDevice
    n_changed: int = 0
    has_failed: bool = False
    frames: Frames = field(default_factory=Frames)

    def edit(self, closed: Any, site: Site) -> Any:
        jaxpr, eqns = opened(closed), list[Any]()
        for eqn in jaxpr.eqns:
            at = site.at(eqn, self.frames.of(eqn))
            if eqn.primitive.name == self.change.primitive and self.change.span in at.frames[:1]:
                eqns.append(self.run_on_shards(eqn))
            elif eqn.primitive.name in ('pallas_call', 'shard_map'):
                eqns.append(eqn)
            else:
                inside = at.inside(eqn)
                params = map_jaxprs(eqn, lambda inner, inside=inside: self.edit(inner, inside))
                eqns.append(eqn if params is eqn.params else eqn.replace(params=params))
        if all(map(operator.is_, eqns, jaxpr.eqns)):
            return closed
        return closed_like(closed, jaxpr.replace(eqns=eqns))

    def run_on_shards(self, eqn: Any) -> Any:
        function = self._in_two_levels(eqn) if self.change.along else self._over_batch(eqn)
        if function is None:
            self.has_failed = True
            return eqn
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        (new,) = opened(jax.make_jaxpr(function)(*structs)).eqns
        self.n_changed += 1
        return new.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)

    def _over_batch(self, eqn: Any) -> Any:
        """Returns a function that runs on shards of batch axes; None if these do not divide."""
        mesh, params = self.change.mesh, dict(eqn.params)
        ins, outs = ([tuple(v.aval.shape) for v in vs] for vs in (eqn.invars, eqn.outvars))
        known = batch_axes(eqn.primitive.name, eqn.params, ins, outs)
        found: list[tuple[BatchAxis, tuple[str, ...]]] = []
        for name, mesh_axes in self.change.axes:
            n, axis = math.prod(mesh.shape[each] for each in mesh_axes), known.get(name)
            if axis is None:
                return None
            sizes = [ins[i][d] for i, d in enumerate(axis.ins) if d is not None]
            if axis.groups:
                sizes.append(params[axis.groups])
                params[axis.groups] //= n
            if any(size % n for size in sizes):
                return None
            found.append((axis, mesh_axes))

        def spec(shape: Sequence[int], dims: Sequence[int | None]) -> PartitionSpec:
            entries: list[tuple[str, ...]] = [()] * len(shape)
            for d, (_, mesh_axes) in zip(dims, found, strict=True):
                if d is not None:
                    entries[d] = mesh_axes
            return partition_spec(entries)

        summed = tuple(name for axis, mesh_axes in found if axis.is_summed for name in mesh_axes)

        def run(*values: Any) -> Any:
            results = eqn.primitive.bind(*values, **params)
            results = results if eqn.primitive.multiple_results else [results]
            return [jax.lax.psum(each, summed) if summed else each for each in results]

        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=tuple(spec(s, [a.ins[i] for a, _ in found]) for i, s in enumerate(ins)),
            out_specs=[spec(s, [a.outs[o] for a, _ in found]) for o, s in enumerate(outs)],
            check_vma=False,
        )

    def _in_two_levels(self, eqn: Any) -> Any:
        """Returns a function that runs in two levels; None if shards have different sizes."""
        (operand,), mesh, along = eqn.invars, self.change.mesh, self.change.along
        shape = operand.aval.shape
        entries = [dict(self.change.axes).get(d, ()) for d in range(len(shape))]
        entries[self.change.dim] = along
        sizes = (math.prod(mesh.shape[name] for name in entry) for entry in entries)
        if any(size % n for size, n in zip(shape, sizes, strict=True)):
            return None
        return run_in_two_levels(eqn, mesh, entries, self.change.dim)
