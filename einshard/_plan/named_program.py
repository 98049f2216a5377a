"""A program whose axes have names in its code or in metadata: what a candidate costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh

from .._chips.chip import Chip
from .._chips.table import default_chip
from .._errors import EinshardError
from .._explain.arrays import find_names
from .._explain.local_devices import asked_texts
from .._explain.stages import Stages
from .._program.cost.score import Score
from .._program.edits.keys import Key
from .._program.jaxpr.names import names_in as names_in_scope
from .._program.private_jax import kept_arguments
from .._program.traced.axis_classes import AxisClasses, Dim
from .._program.traced.outline import PRODUCTS, Place
from .._program.traced.propagated import Axes
from .._program.traced.shardy import NotPropagated
from .._program.traced.variants import Variants, resize_meshes
from .._trees.paths import argument_path, path_and_array
from .candidate import Candidate
from .model import Array, ArrayNames, AxisNames, Model
from .scores import Scores, placed
from .tracing import first_trace, metadata_of_traced, names_in, trace_with_names


class NamedProgram(Scores):
    """A program whose arguments and constraints have axis names.

    It is lowered once, on a mesh that has an axis for each name. A candidate is this module on its
    own mesh, where each place that has names has the mesh axes of these.

    Args:
        stages: traced by `trace_with_names`.
        names: the axis names of the program.
        in_metadata: the names in the metadata of each traced argument, or None.

    Raises:
        NotPropagated: if Shardy cannot read it.
    """

    def __init__(
        self,
        stages: Stages,
        names: Sequence[str],
        in_metadata: Sequence[ArrayNames | None],
        mesh: Mesh,
        chip: Chip | None,
        is_kept: bool,
    ):
        super().__init__(mesh, chip or default_chip(), is_kept)
        traced: Any = stages.traced
        # JAX may have no devices of its own, and a mesh without devices tells it none
        with jax.default_device(mesh.devices.flat[0]):
            lowered = traced.lower(lowering_platforms=('cpu',))
        module = lowered.compiler_ir('stablehlo')
        resize_meshes(module, 2)  # Shardy drops axes of one device
        self.variants = variants = Variants(module, _names_of_constraint)
        self._kept = kept_arguments(lowered)
        self._stages, self._traced = stages, traced
        each = {place: self._given(place, {*names}) for place in variants.given}
        self._names = {place: axes for place, axes in each.items() if any(axes)}
        for j, i in enumerate(self._kept):
            place, labels = Place('argument', j), in_metadata[i]
            if labels is not None and variants.given[place] is None and any(labels):
                self._names[place] = labels
        alike: dict[ArrayNames, list[Place]] = defaultdict(list)
        for place, names_of_place in self._names.items():
            alike[names_of_place].append(place)
        variants.fold(alike.values())
        # of values that a constraint takes
        self._constrained = {
            variants.outline.constrained[place.index]: names_of_place
            for place, names_of_place in self._names.items()
            if place.kind == 'constraint' and place.index in variants.outline.constrained
        }
        self._classes = classes = AxisClasses(variants.outline)
        self._class_names: dict[Dim, AxisNames] = {}
        for place, each in self._names.items():
            for d, axis in enumerate(each):
                if axis:
                    dim = classes.of((variants.value(place), d))
                    self._class_names.setdefault(dim, axis)
        self.model = self._model([*names])

    def _given(self, place: Place, names: Collection[str]) -> ArrayNames:
        """The names that a place has in the module.

        `jax.vmap` leaves its axes open, but on a mesh of axes of one device, it does not move the
        entries of a constraint behind them: it overwrites the first ones.
        """
        variants, ndim = self.variants, len(self.variants.shape(place))
        axes = variants.given[place] or ((),) * ndim
        site = variants.sites.get(place)
        own: Any = () if site is None else site[0][1]
        if site is None or ndim == len(own):
            return axes
        n = ndim - len(own)
        variants.sites[place] = site[0], n
        first = tuple((name,) if name in names else () for name in own[:n])
        return (((),) * n + first + axes[n : len(own)])[:ndim]

    def score(self, candidate: Candidate) -> Score | None:
        axes, sizes = dict(candidate.axes), dict(candidate.mesh)
        changes: dict[Place, Axes | None] = {
            place: placed(names, self.variants.shape(place), axes, sizes)
            for place, names in self._names.items()
        }
        return self.propagated(candidate, changes)

    def _model(self, names: Sequence[str]) -> Model:
        variants, stages = self.variants, self._stages
        sizes: dict[str, set[int]] = {name: set() for name in names}
        of_arguments = [*self._names_of_arguments()]
        for place, each in self._names.items():
            for axis, size in zip(each, variants.shape(place), strict=True):
                for name in axis:
                    if name in sizes:
                        sizes[name].add(size)
        array_names = dict.fromkeys(
            tuple(n for axis in each for n in axis) for each in self._names.values()
        )
        return Model(
            name=stages.name,
            axis_sizes={name: sorted(sizes[name]) for name in names},
            array_names=tuple(array_names),
            arrays=_arrays(self._traced, of_arguments),
            unnamed_data=tuple(self._unnamed_data(of_arguments)),
            asked=tuple(asked_texts(stages.jaxpr, self.mesh.devices.flat[0].device_kind)),
        )

    def _names_of_arguments(self) -> Iterator[ArrayNames]:
        """The names of each traced argument; of one that has none, those of the classes it has."""
        positions = {i: j for j, i in enumerate(self._kept)}
        for i, leaf in enumerate(jtu.tree_leaves(self._traced.args_info)):
            if i not in positions:
                yield ((),) * len(leaf.shape)
                continue
            place = Place('argument', positions[i])
            found = self._own_names(place)
            if found is None:
                dims = ((self.variants.value(place), d) for d in range(len(leaf.shape)))
                found = tuple(self._class_names.get(self._classes.of(dim), ()) for dim in dims)
            yield found

    def _own_names(self, argument: Place) -> ArrayNames | None:
        constrained = self._constrained.get(self.variants.value(argument))
        return self._names.get(argument, constrained)

    def _unnamed_data(self, of_arguments: Sequence[ArrayNames]) -> Iterator[str]:
        """The arguments that have an axis without a name which is one of half of all flops.

        The batch is an axis of nearly all products, an axis of a weight only of its own.
        """
        classes, outline = self._classes, self.variants.outline
        flops, total = Counter[Dim](), 0.0
        for step in outline.steps:
            if step.form.kind in PRODUCTS:
                values = (*step.operands, *step.results)
                dims = {
                    classes.of((v, d)) for v in values for d in range(len(outline.types[v].shape))
                }
                flops.update(dict.fromkeys(dims, step.form.flops * step.runs))
                total += step.form.flops * step.runs
        leaves = jtu.tree_leaves_with_path(self._traced.args_info)
        of_position = find_names(self._stages, self._traced)
        for j, i in enumerate(self._kept):
            place = Place('argument', j)
            if self._own_names(place) is not None or self.variants.given[place] is not None:
                continue
            path, leaf = leaves[i]
            dims = [classes.of((self.variants.value(place), d)) for d in range(len(leaf.shape))]
            open_dims = [c for c, names in zip(dims, of_arguments[i], strict=True) if not names]
            if any(2 * flops[c] >= total > 0 for c in open_dims):
                yield path_and_array(argument_path(path, of_position), leaf)


def _names_of_constraint(location: str) -> tuple[Key, int] | None:
    found = names_in_scope(location)
    own = None if found is None else found.of_constraint
    return None if own is None else (('names', own), 0)


def find_named(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Mesh,
    chip: Chip | None,
    is_kept: bool = False,
) -> NamedProgram | None:
    """Traces a function, and finds the axis names of its arrays. Returns None if it has none.

    Args:
        mesh: the devices to plan for.
        is_kept: whether candidates keep the axes of `mesh`, which expressions may name.
    """
    mesh_axes = [str(name) for name in mesh.axis_names] if is_kept else []
    expressions, metadata_names = first_trace(fn, args, kwargs, mesh_axes)
    in_code = [name for expression in expressions for name in names_in(expression)]
    in_metadata = [name for array in metadata_names for axis in array or () for name in axis]
    every = dict.fromkeys([*in_metadata, *in_code])
    if not (names := [name for name in every if name not in mesh_axes]):
        return None
    with trace_with_names(fn, args, kwargs, names, mesh_axes) as stages:
        traced: Any = stages.traced
        if traced is None:  # Haliax only lowers
            return None
        labels = metadata_of_traced(args, kwargs, metadata_names, traced.args_info)
        known = {*names, *mesh_axes}
        labels = [
            each and tuple(tuple(n for n in axis if n in known) for axis in each) for each in labels
        ]
        try:
            found = NamedProgram(stages, names, labels, mesh, chip, is_kept)
        except NotPropagated as error:
            raise EinshardError(
                f'the compiler cannot propagate shardings in {stages.name}',
                code='plan',
                facts={'because': str(error)},
            ) from error
    found.model = replace(
        found.model, metadata_names=tuple(metadata_names), is_named_in_code=bool(in_code)
    )
    return found


def _arrays(traced: Any, axis_names: Sequence[ArrayNames]) -> tuple[Array, ...]:
    leaves, results = jtu.tree_leaves_with_path(traced.args_info), jtu.tree_leaves(traced.out_info)
    n_leaves: Counter[Any] = Counter()
    first_names: defaultdict[Any, set[str]] = defaultdict(set)
    for (path, _), names in zip(leaves, axis_names, strict=True):
        argument = path[:2]  # args or kwargs, and the position or keyword
        n_leaves[argument] += 1
        first_names[argument].add(next((name for one in names for name in one), ''))
    returned = Counter((tuple(one.shape), str(one.dtype)) for one in results)
    # a single result may have the shape of an argument by coincidence
    returns_state = len(results) > 1 and not any(info.donated for _, info in leaves)
    found: list[Array] = []
    for (path, info), names in zip(leaves, axis_names, strict=True):
        shape, dtype = tuple(map(int, info.shape)), str(info.dtype)
        argument = path[:2]
        has_weights = n_leaves[argument] > 1 and len(first_names[argument]) > 1
        is_state = info.donated or has_weights or (returns_state and returned[shape, dtype] > 0)
        n_bytes = prod(shape) * info.dtype.itemsize
        found.append(Array(shape, dtype, names, is_state, info.donated, n_bytes))
    return tuple(found)
