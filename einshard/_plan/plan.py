"""plan: finds how to shard a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any, TypeAlias, get_args

from jax.sharding import Mesh

from .._errors import EinshardError, public
from .._explain.lowered import concrete
from .._functions.bound_method import unwrap_partial
from .._program.cost.chips import Chip, as_chip, find_chip
from .._program.hlo.memory import parse_bytes
from .._progress import progress
from .._sharding.axis_rules import AxisPlacement, check_option
from .._sharding.context import current_context, mesh_scope
from .._sharding.mesh import MeshLike, is_canonical_mesh, mesh_fact
from .._text import name_of
from .candidate import Objective
from .estimate import Estimator
from .evaluate import Function, Partitioner, as_sharded, copy_sharded, has_rules
from .find_candidates import find_candidates
from .make_plan import make_plan
from .model import Model, find_model
from .result import Plan
from .search import Search
from .space import AXES, Space, read_candidate, read_pins

# the sizes of the mesh axes, and the placement of each axis name
UserCandidate: TypeAlias = tuple[Mapping[str, int], Mapping[str, AxisPlacement]]


@public
def plan(
    fn: Any,
    *args: Any,
    mesh: MeshLike | None = None,
    chip: Chip | str | None = None,
    memory: str | int | None = None,
    objective: Objective = 'bound',
    pin: Mapping[str, str] | None = None,
    candidates: Iterable[UserCandidate] = (),
    compilations: int = 40,
    seconds: float | None = None,
    **kwargs: Any,
) -> Plan:
    """Finds how to shard a model: the mesh shape, and the mesh axes of each axis name.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from einshard import device_mesh, plan, sharded
        >>> @sharded('batch embed', 'embed mlp')
        ... def up(x, w):
        ...     return jax.nn.relu(x @ w)
        >>> x = jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16)
        >>> w = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
        >>> found = plan(up, x, w, mesh=device_mesh(), chip='TPU v5e')  # doctest: +SKIP
        >>> found.rules  # doctest: +SKIP
        {'batch': '@x', 'embed': '', 'mlp': ''}

    The function names its axes in expressions without placements: in the specs of `sharded`, in
    `Rules`, and in constraints such as `einshard(x, 'batch seq act')`. `plan` finds these names by
    tracing, and reads those that Flax and Haliax keep with arrays. A candidate is a mesh shape with
    up to three axes (x, y, z), and the mesh axes over which each name is sharded. `plan` ranks
    candidates by estimates, compiles the best ones with XLA's partitioner (for simulated CPU
    devices, in another process), and compiles the best of these for the target. Nothing runs, and
    arguments can be ShapeDtypeStructs.

    By default, the cost of a candidate is a sum of lower bounds: compute, HBM, and the network
    along each mesh axis. It is not a prediction of the step time.

    Args:
        fn: a `sharded` or jitted function, or any other function that names its axes.
        args, kwargs: the arguments of a call, as in `explain`. Bind a parameter that has the name
            of an option, as in `functools.partial(step, mesh=...)`.
        mesh: the devices, such as `topology('v5e:16x16')`. If the mesh has named axes, `plan` keeps
            its shape, and finds only placements. Default: the mesh in context, or all devices.
        chip: the chip for the lower bounds, as in `explain`. Default: the chip of the devices.
        memory: the bytes that a plan may use on a device, such as '14 GB'. Default: the memory of
            the device, or no limit if the chip is unknown.
        objective: what to minimize: 'bound' (the sum of the lower bounds), 'bytes' (sent by a
            device) or 'memory'. Ties are broken by memory, then bytes.
        pin: axis names with fixed placements: {'embed': '@x', 'layers': ''}.
        candidates: your own candidates, to be compiled first. Each is a pair of mesh sizes and
            placements: `({'data': 16, 'tensor': 16}, {'batch': '@data', 'mlp': '@tensor'})`.
        compilations: the maximum number of candidates to compile with the partitioner.
        seconds: the time limit. With one, the result depends on the speed of the machine.

    Returns:
        A `Plan`. If no candidate fits into memory, it has a warning, and its best plan is the one
        that needs the least memory.

    Raises:
        EinshardError: the model has no axis names or nothing to shard; `fn` has its own mesh; there
            is only one device; the objective is 'bound' but the chip is unknown; a pin or candidate
            does not fit the sizes; or no candidate compiles.
    """
    check_option('objective', objective, get_args(Objective))
    fn, arguments, keywords = unwrap_partial(fn, args, kwargs)
    _check_has_no_mesh(fn)
    # rules of the function would win over those of each candidate
    had_rules = has_rules(fn)
    fn = copy_sharded(fn, axis_rules=())
    devices = _devices(mesh)
    chip = _find_chip(chip, devices, objective)
    limit = None if chip is None else int(chip.memory * chip.share(devices.devices.flat[0]))
    if memory is not None:
        limit = parse_bytes(memory, 'memory=')
    given: tuple[Any, Any] = compilations, seconds
    if type(given[0]) is not int or compilations < 1:
        raise EinshardError(
            f'compilations= must be a positive integer, not {compilations!r}', code='plan'
        )
    is_number = isinstance(given[1], int | float) and not isinstance(given[1], bool)
    if seconds is not None and not (is_number and seconds > 0):
        raise EinshardError(f'seconds= must be a positive number, not {seconds!r}', code='plan')
    mesh_axes = None if is_canonical_mesh(devices) else tuple(devices.shape.items())
    mesh_axis_names = [name for name, _ in mesh_axes or ()]
    with mesh_scope(devices):
        kind = devices.devices.flat[0].device_kind
        model = find_model(fn, arguments, keywords, mesh_axis_names, kind)
    pinned = read_pins(pin or {}, mesh_axis_names or AXES)
    slices = {getattr(device, 'slice_index', None) for device in devices.devices.flat}
    space = Space(model, devices.size, len(slices), mesh_axes, pinned)
    user_candidates = [
        read_candidate(i, pair, model, devices.size) for i, pair in enumerate(candidates)
    ]
    estimator = Estimator(model, devices, chip)
    found = find_candidates(space, estimator, memory=limit, objective=objective)
    if not any(axes for candidate in found.ranked for _, axes in candidate.axes):
        raise _nothing_to_shard(model, devices)
    function = Function(fn, arguments, keywords, devices, chip, model.metadata_names, had_rules)
    # for CPUs, the partitioner is already the compiler of the target
    is_cpu = devices.devices.flat[0].platform == 'cpu'
    with closing(Partitioner(function)) as partitioner:
        search = Search(
            estimates=[estimator.evaluate(candidate) for candidate in found.ranked],
            user_candidates=user_candidates,
            partitioner=partitioner.evaluate_all,
            compiler=None if is_cpu else function.evaluate_all,
            objective=objective,
            limit=limit,
            compilations=compilations,
            seconds=seconds,
        )
        with progress(search.progress_text):
            search.run()
    return make_plan(search, found, model, function)


def _devices(mesh: MeshLike | None) -> Mesh:
    target = concrete(current_context(mesh).lowering_mesh, 'plan for')
    if target.size == 1:
        raise EinshardError(
            'plan needs at least two devices',
            code='device-count',
            facts={
                'mesh': mesh_fact(target),
                'instead': "mesh=topology('v5e:4x4'), or simulated devices: "
                "XLA_FLAGS='--xla_force_host_platform_device_count=8'",
            },
        )
    return target


def _find_chip(chip: Chip | str | None, devices: Mesh, objective: Objective) -> Chip | None:
    kind = devices.devices.flat[0].device_kind
    found = as_chip(chip) if chip is not None else find_chip(kind)
    if objective == 'bound' and found is None:
        raise EinshardError(
            "objective='bound' needs a chip, but the chip of these devices is unknown",
            code='plan',
            facts={
                'devices': kind,
                'instead': "chip='TPU v5e', mesh=topology('v5e:4x4'), or objective='bytes'",
            },
        )
    return found


def _check_has_no_mesh(fn: Any) -> None:
    function = as_sharded(fn)
    if function is not None and function.has_mesh:
        raise EinshardError(
            f'{name_of(fn)} has its own mesh, so plan cannot try others',
            code='plan',
            facts={
                'instead': 'omit mesh= from sharded, and pass the devices to plan, '
                "as in mesh=topology('v5e:4x4')"
            },
        )


def _nothing_to_shard(model: Model, devices: Mesh) -> EinshardError:
    return EinshardError(
        f'no axis of {model.name} can be sharded over this mesh',
        code='plan',
        facts={
            'axes': ', '.join(map(model.axis_text, model.axis_sizes)),
            'mesh': mesh_fact(devices),
            'expected': 'an axis whose size is divisible by the size of a mesh axis',
        },
    )
