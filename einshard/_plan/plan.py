"""plan: finds how to shard a model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from math import inf
from typing import Any, NamedTuple, TypeAlias, get_args

from jax.sharding import Mesh

from .._chips.chip import Chip
from .._chips.table import as_chip, find_chip
from .._errors import EinshardError, public
from .._explain.call_checks import concrete
from .._functions.bound_method import unwrap_partial
from .._program.hlo.memory import parse_bytes
from .._progress import progress
from .._sharding.axis_rules import AxisPlacement, check_option
from .._sharding.mesh import MeshLike, is_canonical_mesh, mesh_fact
from .._sharding.scopes import current_context, mesh_scope
from .._text import name_of
from .candidate import Objective
from .evaluate import Function, Partitioner, as_sharded, copy_sharded, has_rules
from .make_plan import make_plan
from .model import Model
from .named_program import find_named
from .result import Plan
from .scores import Scores
from .search import PlanSearch
from .space import AXES, Space, read_candidate, read_pins
from .starts import Starts
from .step_function import StepFunction, make_step

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
    constraints: bool = True,
    compilations: int = 40,
    target_compilations: int = 5,
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

    The function may name its axes in expressions without placements: in the specs of `sharded`, in
    `Rules`, and in constraints such as `einshard(x, 'batch seq act')`. `plan` finds these names by
    tracing, and reads those that Flax and Haliax keep with arrays. A candidate is a mesh shape with
    up to three axes (x, y, z), and the mesh axes over which each name is sharded. `plan` ranks
    candidates by the compiler's propagation, compiles the best ones with XLA's partitioner (for
    simulated CPU devices, in another process), and compiles the best of these for the target.
    Nothing runs, and arguments can be ShapeDtypeStructs.

    A function without names, such as a step of plain JAX, Flax or Equinox, gets names: axes that
    its operations link or contract are one, such as 'batch' or 'width'. Weights and activations
    have names of their own ('width', 'activation_width'). Candidates place the arguments
    (`Plan.place`), and constrain as few values as needed (`Plan.patch`, `Plan.function`). The
    function as it is is one of the plans.

        >>> def double(w, x):
        ...     return 2 * jax.nn.relu(x @ w)
        >>> found = plan(double, w, x, mesh=device_mesh(), chip='TPU v5e')  # doctest: +SKIP
        >>> w, x = found.place(w, x)  # doctest: +SKIP

    By default, the cost of a candidate is a sum of lower bounds: compute, HBM, and the network
    along each mesh axis. It is not a prediction of the step time.

    Args:
        fn: a `sharded` or jitted function, also by `flax.nnx.jit` or `equinox.filter_jit`, or any
            other function.
        args, kwargs: the arguments of a call, as in `explain`. Bind a parameter that has the name
            of an option, as in `functools.partial(step, mesh=...)`.
        mesh: the devices, such as `topology('v5e:16x16')`. If the mesh has named axes, `plan` keeps
            its shape, and finds only placements. So it does if the code of a function without names
            names a mesh. Default: the mesh in context, or all devices.
        chip: the chip for the lower bounds, as in `explain`. Default: the chip of the devices.
        memory: the bytes that a plan may use on a device, such as '14 GB'. Default: the memory of
            the device, or no limit if the chip is unknown.
        objective: what to minimize: 'bound' (the sum of the lower bounds), 'bytes' (sent by a
            device) or 'memory'. Ties are broken by memory, then bytes.
        pin: axis names with fixed placements: {'embed': '@x', 'layers': ''}.
        candidates: your own candidates, to be compiled first. Each is a pair of mesh sizes and
            placements: `({'data': 16, 'tensor': 16}, {'batch': '@data', 'mlp': '@tensor'})`.
        constraints: whether plans may constrain values of a function without axis names. With
            False, only arguments are placed, and the code stays as it is.
        compilations: the maximum number of candidates to compile with the partitioner, without the
            function as it is.
        target_compilations: how many plans the compiler of the target compiles, without your
            candidates and the function as it is. It goes on if the newest is the best.
        seconds: the time limit. With one, the result depends on the speed of the machine.

    Returns:
        A `Plan`. If no candidate fits into memory, it has a warning, and its best plan is the one
        that needs the least memory.

    Raises:
        EinshardError: there is nothing to shard; `fn` has its own mesh, or cannot be traced or
            changed; there is only one device; the objective is 'bound' but the chip is unknown; a
            pin or candidate does not fit the sizes; or no candidate compiles.
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
    for name, n in (
        ('compilations', compilations),
        ('target_compilations', target_compilations),
    ):
        if type(n) is not int or n < 1:  # type: ignore[reportUnnecessaryComparison]
            raise EinshardError(f'{name}= must be a positive integer, not {n!r}', code='plan')
    given: Any = seconds
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if seconds is not None and not (is_number and seconds > 0):
        raise EinshardError(f'seconds= must be a positive number, not {seconds!r}', code='plan')
    options = _Options(objective, limit, compilations, target_compilations, seconds)
    is_kept = not is_canonical_mesh(devices)
    with mesh_scope(devices):
        try:
            named = find_named(fn, arguments, keywords, devices, chip, is_kept)
        except EinshardError as error:
            # on the mesh without devices that finds names, code that has a mesh does not trace
            if error.code != 'tracing':
                raise
            named = None
    # names of weights alone would leave the batch whole
    if named is None or (named.model.unnamed_data and not named.model.is_named_in_code):
        step = make_step(fn, arguments, keywords, devices, chip, is_kept, constraints)
        return _plan(step.step, step, pin or {}, candidates, options)
    metadata = named.model.metadata_names
    function = Function(fn, arguments, keywords, devices, chip, metadata, had_rules)
    return _plan(named, function, pin or {}, candidates, options)


class _Options(NamedTuple):
    objective: Objective
    limit: int | None
    compilations: int
    target_compilations: int
    seconds: float | None


def _plan(
    scores: Scores,
    function: Function,
    pin: Mapping[str, str],
    candidates: Iterable[UserCandidate],
    options: _Options,
) -> Plan:
    model, mesh_axes, devices = scores.model, scores.mesh_axes, function.devices
    names = [name for name, _ in mesh_axes or ()]
    slices = {getattr(device, 'slice_index', None) for device in devices.devices.flat}
    pinned = read_pins(pin, names or AXES)
    space = Space(model, devices.size, len(slices), mesh_axes, pinned)
    given = [read_candidate(i, c, model, devices.size) for i, c in enumerate(candidates)]
    end = inf if options.seconds is None else time.monotonic() + options.seconds / 2
    with progress(lambda: f'plan: scored {scores.n_scored} candidates'):
        ranked = Starts(scores, space, options.limit, options.objective, end).find()
    is_late = time.monotonic() > end
    if not (is_late or any(axes for candidate in ranked for _, axes in candidate.axes)):
        raise _nothing_to_shard(model, devices)
    if isinstance(function, StepFunction) and not pin:  # the step as it is does not count
        given = [function.as_it_is, *given]
        options = options._replace(compilations=options.compilations + 1)
    # for CPUs, the partitioner is already the compiler of the target
    is_cpu = devices.devices.flat[0].platform == 'cpu'
    with closing(Partitioner(function)) as partitioner:
        search = PlanSearch(
            candidates=ranked,
            user_candidates=given,
            partitioner=partitioner.evaluate_all,
            compiler=None if is_cpu else function.evaluate_all,
            **options._asdict(),
        )
        with progress(search.progress_text):
            search.run()
    return make_plan(search, model, function)


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
