"""shard_largest: a spec that shards the largest divisible axis of each array."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, overload

import jax.tree_util as jtu

from .._errors import EinshardError, combine_errors, public
from .._sharding.leaf_spec import REPLICATED, AnySpec, LeafSpec
from .._sharding.mesh import AnyMesh
from .._sharding.scopes import current_context
from .free_axes import LARGEST, MeshAxes, check_mesh_axes, read_mesh_axes, state_specs
from .paths import leaf_text
from .rules import read_min_size
from .specs import Spec, call_spec, check_specs, meshes_of, shape_of

_NO_LEAF: Any = object()


@overload
def shard_largest(path: str, leaf: Any, /) -> str: ...
@overload
def shard_largest(
    axes: str | Sequence[str] | None = None, /, *, spec: Spec = REPLICATED, min_bytes: int = 0
) -> LargestAxis: ...
@public
def shard_largest(
    axes: Any = None, leaf: Any = _NO_LEAF, /, *, spec: Spec = REPLICATED, min_bytes: int = 0
) -> str | LargestAxis:
    """Returns a spec that shards the largest divisible axis of each array over all devices.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import describe, einshard, shard_largest
        >>> x = einshard(np.ones((3, 2 * jax.device_count())), shard_largest)
        >>> x.sharding.shard_shape(x.shape)
        (3, 2)

    Arrays without a divisible axis are replicated. Of several largest axes, the first is sharded.
    Use `shard_largest` as a spec, or as `default=` of `Rules`, for fully sharded data parallelism
    (FSDP).

    Call it to choose mesh axes or options. With `spec=`, it adds to the sharding of another spec,
    for example FSDP on top of tensor parallelism:

        >>> types = (jax.sharding.AxisType.Auto,) * 2
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ('fsdp', 'tensor'), axis_types=types)
        >>> both = shard_largest('fsdp', spec='d f -> d f@tensor', min_bytes=1024)
        >>> w = jax.ShapeDtypeStruct((64, 256), np.float32)
        >>> describe(einshard(w, both, mesh=mesh))
        'a b -> a b@(tensor,fsdp)'

    Args:
        axes: the mesh axes to shard over. Those that already shard the array are skipped. Default:
            all.
        spec: the spec to add to: an expression, `Rules` or a function. Default: replicated.
        min_bytes: smaller arrays keep the sharding of `spec`.

    Raises:
        EinshardError: an option is invalid. When applied: the mesh lacks one of the axes, or `spec`
            does not fit.
    """
    if leaf is not _NO_LEAF:
        return str(_shard_largest_axis(REPLICATED, shape_of(leaf) or (), True))
    min_bytes = read_min_size(min_bytes, 'min_bytes=', 'bytes')
    if not jtu.all_leaves([spec]):
        raise EinshardError(
            f'spec= of shard_largest must be one spec for all arrays, not {spec!r}', code='rules'
        )
    check_specs(spec)
    return LargestAxis(read_mesh_axes(True if axes is None else axes, LARGEST), spec, min_bytes)


@dataclass(frozen=True)
class LargestAxis:
    """The spec that a call such as `shard_largest('fsdp')` returns."""

    axes: MeshAxes
    spec: Spec
    min_bytes: int

    @property
    def meshes(self) -> Set[AnyMesh]:
        return meshes_of(self.spec)

    def __call__(self, path: str, leaf: Any) -> AnySpec | None:
        check_mesh_axes(self.axes, current_context(), LARGEST)
        return self._extend_spec(call_spec(self.spec, path, leaf), leaf)

    def for_leaves(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[AnySpec | None]:
        check_mesh_axes(self.axes, current_context(), LARGEST)
        pairs = list(zip(paths, leaves, strict=True))
        if hasattr(self.spec, 'for_leaves'):  # Rules
            base_specs = self.spec.for_leaves(paths, leaves)
        else:
            base_specs = [call_spec(self.spec, path, leaf) for path, leaf in pairs]
        specs: list[AnySpec | None] = []
        errors: list[EinshardError] = []
        for spec, (path, leaf) in zip(base_specs, pairs, strict=True):
            try:
                specs.append(self._extend_spec(spec, leaf))
            except EinshardError as error:
                errors.append(error.about(array=leaf_text(path, leaf)))
        if errors:
            raise combine_errors(errors) from None
        return specs

    def _extend_spec(self, spec: AnySpec | None, leaf: Any) -> AnySpec | None:
        """Shards the largest axis too, unless `leaf` is a scalar, too small, or not an array."""
        shape = shape_of(leaf)
        if spec is None or not shape or math.prod(shape) * leaf.dtype.itemsize < self.min_bytes:
            return spec
        return _shard_largest_axis(spec, shape, self.axes)


def _shard_largest_axis(spec: AnySpec, shape: tuple[int, ...], axes: MeshAxes) -> LeafSpec:
    # `state_specs` treats the array as a parameter, and as a state with the same axes
    identity = tuple(range(len(shape)))
    context = current_context()
    return state_specs(spec, shape, shape, (identity,), axes, context, all_or_none=True)[0]
