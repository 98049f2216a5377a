"""A step without axis names as a function whose candidates can be compiled."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .._chips.chip import Chip
from .._errors import EinshardError
from .._explain.explain import read_facts
from .._explain.findings.expressions import expression_of
from .._explain.findings.facts import Facts
from .._explain.findings.values import mesh_entries
from .._explain.partition import compile_in_worker, export
from .._explain.search.advice import make_trials
from .._explain.search.trials import Trials
from .._explain.search.with_edits import patch_of
from .._explain.search.words import Words
from .._explain.stages import Stages
from .._explain.trace_call import trace_call
from .._program.edits.edit import Edit, PlaceArguments, placements
from .._program.jaxpr.graph import inner_jaxprs
from .._program.traced.shardy import NotPropagated
from .._sharding.leaf_spec import REPLICATED
from .._sharding.mesh import device_mesh, is_canonical_mesh
from .._sharding.scopes import only_mesh_scope
from .._text import first_line
from .._trees.axis_names import MetadataNames, fitting_names
from .candidate import Candidate
from .evaluate import Function
from .source import mesh_call, suffix_rules
from .step import Step
from .tracing import metadata_of_traced, without_values


@dataclass(frozen=True, kw_only=True)
class StepFunction(Function):
    """A step, whose candidates shard its arguments, and constrain some of its values.

    Attributes:
        step: its axis names and edits.
        given, given_mesh, given_structs: the step as the user has it, and its arguments.
        is_placed: whether `in_shardings=` places the arguments.
        is_typed: whether the code needs the types of its arguments on Explicit axes.
    """

    step: Step
    given: Stages
    given_mesh: Mesh
    given_structs: Any
    is_placed: bool = False
    is_typed: bool = False
    _stages: dict[Mesh, Stages] = field(default_factory=dict[Mesh, Stages], repr=False)

    @property
    def as_it_is(self) -> Candidate:
        axes = tuple((name, ()) for name in self.step.model.sizes)
        return Candidate(tuple(self.given_mesh.shape.items()), axes, is_given=True)

    def mesh_of(self, candidate: Candidate) -> Mesh:
        return self.given_mesh if candidate.is_given else self.step.mesh_of(candidate)

    @contextmanager
    def scope(self, candidate: Candidate) -> Generator[Mesh]:
        with (
            jax.set_mesh(self.mesh_of(candidate)),
            candidate.scope(self.mesh_of(candidate)) as mesh,
        ):
            yield mesh

    def trace(self, candidate: Candidate) -> Stages:
        if candidate.is_given:
            return self.given
        with self.scope(candidate):
            facts = self.facts_of(candidate)
            assert facts.stages.call is not None
            try:
                edited = Trials(facts, facts.stages.call).edited(self.edits(candidate))
                traced = edited.function.trace(*edited.args, **edited.kwargs)
            except Exception as error:  # types refuse it; their error has no public name
                raise EinshardError(
                    f'JAX does not trace it: {first_line(error)}', code='tracing'
                ) from error
        paths = [array.path for array in facts.arguments]
        return replace(facts.stages, traced=traced, lowered=None, framework=None, paths=paths)

    def edits(self, candidate: Candidate) -> tuple[Edit, ...]:
        return () if candidate.is_given else self.step.edits(candidate)

    @property
    def examples(self) -> Mapping[str, str]:
        """Of each axis name, an axis of an argument."""
        return self.step.named.examples

    def n_constraints(self, candidate: Candidate) -> int:
        return sum(not isinstance(edit, PlaceArguments) for edit in self.edits(candidate))

    def facts_of(self, candidate: Candidate) -> Facts:
        """What is known of the step, traced on the mesh of a candidate."""
        mesh = self.mesh_of(candidate)
        if mesh not in self._stages:
            call = self.fn, self.args, self.kwargs
            options = {'keep': self.is_typed, 'is_placed': self.is_placed}
            self._stages[mesh], _ = _trace_on(*call, mesh, **options)
        return replace(self.step.facts, meshes=[mesh], stages=self._stages[mesh])

    def code(self, candidate: Candidate) -> list[str]:
        """What to write: how arguments are placed, then constraints by line."""
        words, edits = Words(self.facts_of(candidate)), self.edits(candidate)
        said = [words.say((edit,)) for edit in edits if not isinstance(edit, PlaceArguments)]
        return [*self.code_of_arguments(candidate), *(f'# {text}' for text in said)]

    def code_of_arguments(self, candidate: Candidate) -> list[str]:
        facts, mesh = self.facts_of(candidate), self.mesh_of(candidate)
        by_name: dict[str, dict[str, str]] = {}
        shardings = self._of_arguments(candidate)
        for i, (array, sharding) in enumerate(zip(facts.arguments, shardings, strict=True)):
            entries = mesh_entries(sharding, len(array.shape))
            pairs = zip(facts.axes_of_argument(i), entries, strict=True)
            axes = [replace(axis, mesh_axes=entry) for axis, entry in pairs]
            name, _, rest = array.path.partition('/')
            placement = expression_of(axes, mesh) if any(entries) else ''
            by_name.setdefault(name, {})[rest] = placement
        lines: list[str] = []
        for name, placed in by_name.items():
            spec = f"'{placed['']}'" if placed.get('') else suffix_rules(placed)
            spec = f"'{REPLICATED}'" if not any(placed.values()) else spec
            lines += f'{name} = einshard({name}, {spec}, mesh=mesh)'.splitlines()
        if self.is_placed:
            lines.append('# and in_shardings= of jax.jit, which has to be the same')
        return lines

    def patch(self, candidate: Candidate) -> str:
        """Writes a candidate into the source of the step."""
        with self.scope(candidate):  # as the patched step will run
            facts = self.facts_of(candidate)
            assert facts.stages.call is not None
        place = [f'mesh = {mesh_call(self.devices, candidate)}', *self.code_of_arguments(candidate)]
        return patch_of(facts, self.edits(candidate), place, in_mesh=True)

    def shardings(self, candidate: Candidate) -> list[NamedSharding | None]:
        """The sharding of each leaf of `(args, kwargs)`, or None for leaves that are no arrays.

        Raises:
            EinshardError: the arrays of the program are not those of the arguments.
        """
        leaves, arguments = jtu.tree_leaves((self.args, self.kwargs)), self.step.facts.arguments
        arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, 'shape')]
        if [tuple(leaves[i].shape) for i in arrays] != [array.shape for array in arguments]:
            raise EinshardError(
                'the arrays of the program are not those of its arguments, one by one',
                code='plan',
                facts={'instead': 'apply plan.patch(), or place them as plan.explain() lists them'},
            )
        found: list[NamedSharding | None] = [None] * len(leaves)
        for i, sharding in zip(arrays, self._of_arguments(candidate), strict=True):
            found[i] = sharding
        return found

    def _of_arguments(self, candidate: Candidate) -> list[NamedSharding]:
        """The sharding of each argument of the program."""
        if candidate.is_given:
            return self._as_given()
        moved, _ = placements(self.edits(candidate))
        return [moved[i] for i in range(len(self.step.facts.arguments))]

    def _as_given(self) -> list[NamedSharding]:
        replicated = NamedSharding(self.given_mesh, PartitionSpec())
        by_jit: Sequence[Any] = ()
        if self.is_placed:
            with self.scope(self.as_it_is):  # the code may have bare PartitionSpecs
                call = self.given.call
            if call is not None:
                given = call.eqn.params['in_shardings']
                by_jit = [given[call.arguments[leaf]] for leaf in call.dynamic]
        leaves = jtu.tree_leaves(self.given_structs)
        structs = [x.sharding for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
        each = itertools.zip_longest(structs, by_jit)
        return [
            next((s for s in pair if isinstance(s, NamedSharding)), replicated) for pair in each
        ]


def make_step(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    devices: Mesh,
    chip: Chip | None,
    is_kept: bool,
    constraints: bool = True,
) -> StepFunction:
    """Names the axes of a step.

    Args:
        is_kept: whether `devices` has axes that candidates keep.
        constraints: whether candidates may constrain values.

    Raises:
        EinshardError: the step cannot be traced or changed, or Shardy cannot read it.
    """
    others, is_placed = _meshes_of_code(fn, args, kwargs) if not is_kept else (set[Mesh](), False)
    if len(others) == 1:
        (devices,), is_kept = others, True
    mesh = Mesh(device_mesh(devices).devices.reshape(-1), ('x',))
    if is_kept:  # with Auto axes, even if it has Explicit ones
        mesh = Mesh(devices.devices, devices.axis_names)
    is_typed = False
    try:
        stages, structs = _trace_on(fn, args, kwargs, mesh, is_placed=is_placed)
    except EinshardError:
        if not is_kept or mesh == devices:
            raise
        # the code needs its Explicit axes, and maybe the types of its arguments
        mesh, is_typed = devices, True
        stages, structs = _trace_on(fn, args, kwargs, mesh, keep=True, is_placed=is_placed)
    with jax.set_mesh(mesh), only_mesh_scope(mesh):
        facts = read_facts(stages, chip) if is_kept else _read_replicated(stages, mesh, chip)
        info = stages.traced.args_info if stages.traced is not None else ()
        trials = make_trials(facts)
        if isinstance(trials, str):
            raise _no_step(stages, trials or 'it is no function of arrays on one mesh')
        try:
            labels = metadata_of_traced(args, kwargs, fitting_names((args, kwargs)), info)
            step = Step(facts, trials.call, is_kept, _logical(labels, mesh), constraints)
        except NotPropagated as error:
            raise _no_step(stages, str(error)) from error
    given_mesh = _mesh_of_arguments(args, kwargs, mesh)
    if given_mesh is not None:
        stages, structs = _trace_on(fn, args, kwargs, given_mesh, keep=True)
    return StepFunction(
        *(fn, args, kwargs, mesh, facts.chip),
        step=step,
        given=stages,
        given_mesh=given_mesh or mesh,
        given_structs=structs,
        is_placed=is_placed,
        is_typed=is_typed,
    )


def _logical(labels: Sequence[MetadataNames | None], mesh: Mesh) -> list[MetadataNames | None]:
    """The names in metadata without those of mesh axes, which say where an axis is."""
    axes = {*mesh.axis_names}
    return [
        None if names is None else tuple(tuple(n for n in axis if n not in axes) for axis in names)
        for names in labels
    ]


def _read_replicated(stages: Stages, mesh: Mesh, chip: Chip | None) -> Facts:
    """Reads a program with replicated arguments, as a `Worker` compiles it.

    That takes a tenth of what the compiler of a CPU or TPU needs, and memory does not matter.
    """
    traced: Any = stages.traced
    try:
        request, kept = export(stages, [*mesh.shape.items()])
        simulated = compile_in_worker(mesh.size, request)
    except Exception:  # it has a kernel or a callback, or is only lowered
        return read_facts(stages, chip)
    replicated = NamedSharding(mesh, PartitionSpec())
    leaves, tree = jtu.tree_flatten(traced.args_info)
    shardings = [replicated if i in {*kept} else None for i in range(len(leaves))]

    def result(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    compiled = SimpleNamespace(
        args_info=traced.args_info,
        input_shardings=tree.unflatten(shardings),
        out_info=jtu.tree_map(result, traced.out_info),
        memory_analysis=lambda: None,
    )
    return read_facts(stages, chip, simulated=simulated, compiled=compiled)


def _no_step(stages: Stages, reason: str) -> EinshardError:
    name = stages.name or 'the function'
    return EinshardError(
        f'{name} has no axis names, and none can be found',
        code='plan',
        facts={
            'because': reason,
            'expected': "a function of arrays, or axis names in it: x = einshard(x, 'batch embed')",
        },
    )


def _mesh_of_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Mesh) -> Mesh | None:
    """The mesh over which arguments are sharded; None if they are not on these devices."""
    shardings = [getattr(leaf, 'sharding', None) for leaf in jtu.tree_leaves((args, kwargs))]
    placed = [s for s in shardings if isinstance(s, NamedSharding) and any(s.spec)]
    devices = {*mesh.devices.flat}
    if not placed or any(s.device_set != devices for s in placed):
        return None
    found = placed[0].mesh
    return found if isinstance(found, Mesh) else None


def _meshes_of_code(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[set[Mesh], bool]:
    """The meshes with named axes in code, and whether `in_shardings=` places arguments."""
    args, kwargs = jtu.tree_map(without_values, (tuple(args), dict(kwargs)))
    stages = trace_call(fn, args, kwargs, mesh=None)
    found, is_placed = set[Mesh](), False
    if stages.call is not None:
        found = {*_meshes_of(stages.call.eqn)}
        is_placed = any(isinstance(s, Sharding) for s in stages.call.eqn.params['in_shardings'])
    elif stages.jaxpr is not None:
        found = {mesh for eqn in stages.jaxpr.eqns for mesh in _meshes_of(eqn)}
    named = {mesh for mesh in found if mesh.size > 1 and not is_canonical_mesh(mesh)}
    return named, is_placed


def _meshes_of(eqn: Any) -> Iterator[Mesh]:
    """The meshes that an equation names, and those in it."""
    values = [eqn.params.get(key) for key in ('sharding', 'mesh')]
    for key in ('in_shardings', 'out_shardings'):
        values += eqn.params.get(key) or ()
    for value in values:
        mesh = getattr(value, 'mesh', value)
        if isinstance(mesh, Mesh):
            yield mesh
    for inner in inner_jaxprs(eqn.params.values()):
        for each in inner.eqns:
            yield from _meshes_of(each)


def _trace_on(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Mesh,
    *,
    keep: bool = False,
    is_placed: bool = False,
) -> tuple[Stages, Any]:
    """Traces a function with its arguments replicated over a mesh, without their values.

    Returns also the arguments, as ShapeDtypeStructs.

    Args:
        keep: whether shardings on this mesh are kept.
        is_placed: whether the function places its arguments.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def struct(leaf: Any) -> Any:
        shape, given = without_values(leaf), getattr(leaf, 'sharding', None)
        if is_placed or not isinstance(shape, jax.ShapeDtypeStruct):
            return shape
        is_on = keep and isinstance(given, NamedSharding) and given.mesh == mesh
        return shape.update(sharding=given if is_on else replicated)

    args, kwargs = jtu.tree_map(struct, (tuple(args), dict(kwargs)))
    # or JAX reshards scalars for the mesh
    with jax.set_mesh(mesh), only_mesh_scope(mesh):
        stages = trace_call(fn, args, kwargs, mesh=None)
    return stages, (args, kwargs)
