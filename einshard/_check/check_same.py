"""check_same: compares the results of a function on several devices and on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import stages
from jax.sharding import Mesh, NamedSharding

from .._arrays.device_put import put_array
from .._arrays.gather import gather
from .._errors import EinshardError, plural, public
from .._explain.call_checks import check_arguments
from .._explain.frameworks import positional_parameters, restored_if_failed
from .._functions.error_notes import is_sharding_type_error
from .._sharding.mesh import partition_spec, spec_axes
from .._sharding.tracing import is_tracing
from .._text import array_text, first_line, name_of
from .._trees.paths import argument_path, common_suffix_length, leaves_with_paths, result_path
from .comparison import ComparedRow, Comparison, compare, key_data
from .one_device import (
    Arrays,
    Call,
    OneDeviceProgram,
    is_inexact,
    make_call,
    on_one_device,
    sharding_on,
)
from .tolerance import Rounding, largest_rounding, rounding_unit


class DifferentResults(EinshardError):
    """The results of a function on several devices differ from those on one device.

    The message lists the results that differ.
    """

    code = 'different-results'


DifferentResults.__module__ = 'einshard'

_ARRAYS = jax.Array | np.ndarray | np.generic
_MAX_ROWS = 8
_N_PERTURBED = 2  # runs on one device with perturbed arguments


@public
def check_same(
    fn: Any,
    *args: Any,
    gradients: bool = True,
    reference: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Comparison:
    """Runs a function on its devices and on one device, and raises if the results differ.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import check_same, sharded
        >>> @sharded('b x*', 'x* y', out='* b y')
        ... def product(x, w):
        ...     return x @ w
        >>> x = np.random.default_rng(0).normal(size=(4, 8 * jax.device_count()))
        >>> comparison = check_same(product, x, x.T)
        >>> [row.path for row in comparison.rows]
        ['result', 'gradient of x', 'gradient of w']

    If `nnx.jit` updates a module in the arguments, its new arrays are compared as results.

    For the run on one device, all mesh axes have size 1, and all counts and stars in expressions
    are 1. The function must therefore not depend on the number of devices, and must not contain a
    `NamedSharding` over several devices.

    The gradients are those of a weighted sum of all elements of the results, with fixed random
    weights. A difference larger than the tolerance is an error. The tolerance is the larger of two
    numbers: the expected rounding error, given the dtype and the longest sum; and 4 times the
    change in the results when the arguments change by about two rounding errors. The replicas of a
    result must also agree within the tolerance.

    Args:
        fn: a `sharded` or jitted function. Any other function is jitted first.
        args, kwargs: arguments of the call. They are not donated, and NNX modules are not updated.
        gradients: whether to also compare the gradients of all floating-point arguments.
        reference: the function to run on one device. Default: `fn`.

    Returns:
        A `Comparison`, which prints as a table of differences and tolerances.

    Raises:
        DifferentResults: a result or a gradient differs by more than its tolerance.
        EinshardError: the function cannot be differentiated, or cannot run on one device, for
            example because it needs too much memory.
    """
    name = name_of(fn)
    _check_supported(fn, name, args, kwargs)
    with restored_if_failed(fn, args, kwargs):
        call = make_call(fn, name, args, kwargs)
        result = call.run()
        comparison = _compare(call, result, reference, gradients)
    if not comparison.same:
        raise _make_error(comparison, has_reference=reference is not None)
    return comparison


def _check_supported(fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if isinstance(fn, stages.Compiled | stages.Lowered | stages.Traced) or not callable(fn):
        raise EinshardError(
            f'check_same needs a function, not {type(fn).__name__}',
            facts={'expected': 'a function that can be traced again, for one device'},
        )
    check_arguments(fn, name, args, kwargs)
    if is_tracing():
        raise EinshardError('check_same cannot run in a traced function', code='tracing')
    if jax.process_count() > 1:
        raise EinshardError(
            'check_same cannot run in several processes',
            facts={
                'processes': jax.process_count(),
                'instead': 'run it in one process, on simulated devices',
            },
        )
    names = dict(enumerate(positional_parameters(fn)))
    for path, leaf in leaves_with_paths((args, dict(kwargs))):
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.Ref):
            raise EinshardError(
                f'check_same needs arrays, not {type(leaf).__name__}',
                code='array',
                facts={'argument': argument_path(path, names), 'array': array_text(leaf)},
            )


def _compare(
    call: Call, result: Any, reference: Callable[..., Any] | None, gradients: bool
) -> Comparison:
    result, new = result if call.updated else (result, [])
    leaves = [(result_path(path), x) for path, x in leaves_with_paths(result)]
    names = dict(enumerate(positional_parameters(call.function)))
    updates = [(argument_path(path, names), x) for path, x in zip(call.updated, new, strict=True)]
    before = {path: call.leaves[i] for i, path in call.paths.items()}
    # only functions with modules of Equinox return other leaves: `jax.jit` makes arrays of numbers
    static = [not isinstance(x, _ARRAYS) for _, x in leaves]
    static += [not isinstance(x, _ARRAYS) or _is_same(x, before.get(path)) for path, x in updates]
    call = replace(call, static=static)
    leaves += [(f'result/{path}', x) for path, x in updates]
    compared: list[tuple[str, Any]] = [
        pair for pair, is_static in zip(leaves, static, strict=True) if not is_static
    ]
    results = [x for _, x in compared]
    arrays = [x for x in results if isinstance(x, jax.Array)]
    if not arrays:
        raise EinshardError(f'{call.name} returns no arrays to compare')
    sharding = arrays[0].sharding
    n_devices = len(sharding.device_set)
    device = min(sharding.device_set, key=lambda d: d.id)
    mesh: Any = sharding_on(sharding, device).mesh
    single = on_one_device(call, call.function if reference is None else reference, mesh)
    check = _Check(call, single, mesh, n_devices, has_reference=reference is not None)
    rows = check.results(results, [path for path, _ in compared])
    notes: list[str] = []
    # not of updates: those of an optimizer may be infinite, as that of the square root of 0 in Adam
    n_results = static[: len(static) - len(updates)].count(False)
    differentiable = {i: x for i, x in enumerate(results[:n_results]) if is_inexact(x)}
    if not gradients:
        notes.append('gradients were not compared: gradients=False')
    elif not (differentiable and call.float_indices):
        where = 'result' if call.float_indices else 'argument'
        notes.append(f'there are no gradients: no {where} is a floating-point array')
    else:
        rows += check.gradients(differentiable)
    return Comparison(call.name, n_devices, tuple(rows), tuple(notes))


def _is_same(new: Any, old: Any) -> bool:
    if old is None or new.shape != old.shape or new.dtype != old.dtype:
        return False
    return bool(np.array_equal(gather(key_data(new)), gather(key_data(old))))


@dataclass(frozen=True)
class _Check:
    """Compares the results and gradients of `call` with those of `single`.

    Attributes:
        call: the call on several devices.
        single: the same call on one device, or a call of the user's `reference`.
        mesh: the mesh of `single`.
        n_devices: the number of devices of `call`.
        has_reference: whether `single` calls `reference`.
    """

    call: Call
    single: Call
    mesh: Mesh
    n_devices: int
    has_reference: bool

    @property
    def device(self) -> Any:
        return self.mesh.devices.flat[0]

    def results(self, results: Sequence[jax.Array], paths: Sequence[str]) -> list[ComparedRow]:
        def leaves(arrays: Arrays) -> list[Any]:
            return self.single.result_arrays(arrays)

        program = OneDeviceProgram(self.call.name, self.mesh, leaves, self.single.arrays)
        rounding = largest_rounding(program.jaxpr, self.n_devices, self.device.platform)
        arguments = self._arguments(rounding)
        runs = [program(arrays) for arrays in arguments]
        shapes = [[x.shape for x in arrays] for arrays in (map(key_data, results), runs[0])]
        if shapes[0] != shapes[1]:
            sentence = f'{self.call.name} returns arrays of different shapes on one device'
            labels = 'on all devices', 'on one device'
            if self.has_reference:
                sentence = f'{self.call.name} and its reference return arrays of different shapes'
                labels = 'function', 'reference'
            raise EinshardError(sentence, facts=dict(zip(labels, map(str, shapes), strict=True)))
        gathered = [gather(arrays) for arrays in arguments]
        rows: list[ComparedRow] = []
        for i, (path, result) in enumerate(zip(paths, results, strict=True)):
            updated = self._updated_argument(path, result)
            before = [0 if updated is None else arrays[updated] for arrays in gathered]
            rows.append(compare(path, result, [run[i] for run in runs], before, rounding))
        return rows

    def gradients(self, results: Arrays) -> list[ComparedRow]:
        """Compares the gradients of a weighted sum of `results` with those on one device."""
        random = np.random.default_rng(0)
        weights = {i: random.normal(size=x.shape).astype(x.dtype) for i, x in results.items()}
        weights_on_devices: dict[int, Any] = dict(weights)
        for i, x in results.items():
            if isinstance(x.sharding, NamedSharding):
                # in JAX, the cotangent of an unreduced value is reduced, and vice versa
                old = x.sharding.spec
                spec = partition_spec(spec_axes(old), unreduced=old.reduced, reduced=old.unreduced)
                sharding = NamedSharding(x.sharding.mesh, spec)
                weights_on_devices[i] = put_array(weights[i], sharding)
        weights_on_one = {
            i: jax.device_put(weights[i], sharding_on(x.sharding, self.device))
            for i, x in results.items()
        }
        try:
            found = jax.jit(self.call.gradients)(self.call.arrays, weights_on_devices)
        except EinshardError:
            raise
        except Exception as error:
            expected_kinds = TypeError, ValueError, NotImplementedError
            if not (isinstance(error, expected_kinds) or is_sharding_type_error(error)):
                raise
            raise EinshardError(
                f'{self.call.name} cannot be differentiated',
                code='tracing',
                facts={'JAX says': first_line(error), 'try': 'check_same(..., gradients=False)'},
            ) from error
        name, single = self.call.name, self.single
        program = OneDeviceProgram(name, self.mesh, single.gradients, single.arrays, weights_on_one)
        rounding = largest_rounding(program.jaxpr, self.n_devices, self.device.platform)
        arguments = self._arguments(rounding)
        runs = [program(arrays, weights_on_one) for arrays in arguments]
        rows: list[ComparedRow] = []
        for i in self.call.float_indices:
            path, computed = f'gradient of {self.call.paths[i]}', [run[i] for run in runs]
            rows.append(compare(path, found[i], computed, [0] * len(runs), rounding))
        return rows

    def _arguments(self, rounding: Rounding) -> list[Arrays]:
        """Returns the arguments on one device, followed by perturbed copies of them."""
        arrays = self.single.arrays
        return [arrays, *(_perturb(arrays, rounding.unit, seed) for seed in range(_N_PERTURBED))]

    def _updated_argument(self, path: str, result: jax.Array) -> int | None:
        """Returns the index of the argument that `result` may update, such as weights, or None.

        `compare` divides differences by the largest change of this argument, because dividing by
        the weights would hide a large error in a small update.
        """
        leaves = self.call.leaves
        types = {i: (leaves[i].shape, leaves[i].dtype) for i in self.call.float_indices}
        candidates = [i for i, key in types.items() if key == (result.shape, result.dtype)]
        return max(
            candidates, key=lambda i: common_suffix_length(path, self.call.paths[i]), default=None
        )


def _perturb(arrays: Arrays, unit: float, seed: int) -> Arrays:
    """Returns copies in which each float is multiplied by 1 + e or 1 - e, at random.

    e is twice the rounding unit of the dtype, or twice `unit` if that is larger.
    """
    random = np.random.default_rng(seed)
    changed: dict[int, Any] = dict(arrays)
    for i, x in arrays.items():
        if is_inexact(x):
            step = 2 * max(unit, rounding_unit(x.dtype))
            factors = 1 + step * random.choice([-1.0, 1.0], size=x.shape)
            changed[i] = jax.device_put((np.asarray(x) * factors).astype(x.dtype), x.sharding)
    return changed


def _make_error(comparison: Comparison, has_reference: bool) -> DifferentResults:
    wrong = [row for row in comparison.rows if not row.same]
    facts: dict[str, str] = {}
    for row in wrong[:_MAX_ROWS]:
        differs = f'differs by {row.difference:.1e} relative to the {row.relative_to}'
        if row.relative_to == 'elements':
            differs = f'differs in {row.difference:.1e} of the elements'
        tolerance = f'tolerance: {row.tolerance:.1e} ({row.because})'
        replicas = '; its replicas differ' * row.replicas_differ
        facts[row.path] = f'{row.array} {differs}; {tolerance}{replicas}'
    if len(wrong) > _MAX_ROWS:
        facts['and'] = f'{len(wrong) - _MAX_ROWS} more'
    devices = plural(comparison.n_devices, 'device')
    sentence = f'{comparison.name} has different results on {devices} and on one device'
    if has_reference:
        sentence = f'{comparison.name}, on {devices}, and its reference have different results'
    return DifferentResults(
        f'{sentence}: {len(wrong)} of {plural(len(comparison.rows), "array")} '
        f'{"differs" if len(wrong) == 1 else "differ"}',
        facts=facts,
    )
