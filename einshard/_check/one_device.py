"""Runs a function and its gradients for `check_same`: on its devices, and on one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._arrays.gather import gather
from .._chips.table import find_chip
from .._errors import EinshardError
from .._explain.frameworks import JITTED, is_jitted, positional_parameters, unbound
from .._functions.bound_method import BoundMethod, sharded_call
from .._functions.module_updates import module_leaves
from .._functions.place_arguments import place_arguments
from .._functions.program import Program
from .._functions.sharded_function import ShardedFunction
from .._program.hlo.memory import read_memory
from .._progress import progress
from .._sharding.mesh import Device, device_mesh, is_partial, partition_spec, shrink_mesh, spec_axes
from .._sharding.scopes import ambient_mesh, one_device_scope
from .._text import first_line, format_bytes
from .._trees.partition import join
from .._trees.paths import argument_path, leaves_with_paths

Arrays = Mapping[int, Any]  # arrays by leaf index, in the arguments or in the result


@dataclass(frozen=True)
class Call:
    """A call of a function.

    Attributes:
        name: the name of the user's function, for errors.
        leaves, treedef: the flattened (args, kwargs).
        paths: the path of each leaf that is an array, by leaf index.
        updated: the key paths of the arrays in NNX modules that the function may update in place.
            Their new values come after the results.
        static: whether each of these is not compared: a static leaf of the result, such as a
            function in a module of Equinox, or an array that the call has not changed.
    """

    function: Callable[..., Any]
    name: str
    leaves: Sequence[Any]
    treedef: Any
    paths: Mapping[int, str]
    updated: Sequence[tuple[Any, ...]] = ()
    static: Sequence[bool] = ()

    @property
    def arrays(self) -> dict[int, Any]:
        return {i: self.leaves[i] for i in self.paths}

    @property
    def float_indices(self) -> list[int]:
        return [i for i in self.paths if is_inexact(self.leaves[i])]

    def result(self, arrays: Arrays) -> Any:
        args, kwargs = self.arguments(arrays)
        result = self.function(*args, **kwargs)
        if not self.updated:
            return result
        after = module_leaves((args, kwargs))
        return result, [after.get(path, 0) for path in self.updated]

    def result_arrays(self, arrays: Arrays) -> list[Any]:
        """Returns the leaves of the result, without those that are static."""
        leaves = jtu.tree_leaves(self.result(arrays))
        if len(leaves) != len(self.static):  # of a reference, which may return only arrays
            return leaves
        return [x for x, is_static in zip(leaves, self.static, strict=True) if not is_static]

    def run(self) -> Any:
        """Runs the function on copies of the arrays, because it may donate them."""
        function = self.result if hasattr(self.function, 'lower') else jax.jit(self.result)
        copies = {i: x.copy() if isinstance(x, jax.Array) else x for i, x in self.arrays.items()}
        return function(copies)

    def arguments(self, arrays: Arrays) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Returns (args, kwargs), with `arrays` in place of the arrays in `leaves`."""
        return self.treedef.unflatten([arrays.get(i, x) for i, x in enumerate(self.leaves)])

    def gradients(self, arrays: Arrays, weights: Arrays) -> Arrays:
        """Returns the gradients of a weighted sum of the results.

        `weights[i]` has a weight for each element of result i. Results without weights are ignored.
        """

        def results_with_weights(inputs: Arrays) -> Arrays:
            results = self.result_arrays({**arrays, **inputs})
            return {i: results[i] for i in weights}

        _, pull_back = jax.vjp(results_with_weights, {i: arrays[i] for i in self.float_indices})
        return pull_back(dict(weights))[0]


def make_call(fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Places the arguments of a `sharded` function, as an ordinary call does."""
    fn = sharded_call(fn)
    fn, args, kwargs = unbound(fn, args, kwargs)
    if isinstance(fn, ShardedFunction):

        def placer(program: Program) -> Callable[..., Any]:
            context = program.setup.context()
            return lambda *values: program.call.split(
                place_arguments(program, values, context, running=False)
            )

        args, kwargs = join(fn._call(args, kwargs, placer))  # type: ignore[reportPrivateUsage]
    names = dict(enumerate(positional_parameters(fn)))
    treedef = jtu.tree_structure((tuple(args), dict(kwargs)))
    with_paths = leaves_with_paths((tuple(args), dict(kwargs)))
    paths = {
        i: argument_path(path, names)
        for i, (path, leaf) in enumerate(with_paths)
        if isinstance(leaf, jax.Array | np.ndarray | np.generic)
    }
    # `nnx.jit` updates modules; `jax.jit` and `sharded` do not
    may_update = is_jitted(fn) and not isinstance(fn, JITTED | ShardedFunction)
    updated = [*module_leaves((tuple(args), dict(kwargs)))] if may_update else []
    return Call(fn, name, [leaf for _, leaf in with_paths], treedef, paths, updated)


def is_inexact(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


# --- on one device ------------------------------------------------------------------------------


def on_one_device(call: Call, function: Callable[..., Any], mesh: Mesh) -> Call:
    """Returns a call of `function` with the arrays of `call` on one device.

    Arrays keep their mesh axes, with size 1. Arrays without a mesh are put on `mesh`, because
    Explicit axes require all arrays to be on the same mesh.
    """
    if isinstance(function, BoundMethod):
        function = function.func
    if isinstance(function, ShardedFunction):
        # copy the function, because a call with a second mesh would disable its fast path
        function = ShardedFunction(function._setup)  # type: ignore[reportPrivateUsage]
    elif isinstance(function, JITTED):
        function = function.__wrapped__  # type: ignore[reportFunctionMemberAccess]
    leaves = [*call.leaves]
    for i in call.paths:
        sharding = getattr(leaves[i], 'sharding', None)
        if not isinstance(sharding, NamedSharding):
            sharding = NamedSharding(mesh, PartitionSpec())
        # device_put rejects partial sums
        array = gather(leaves[i]) if is_partial(sharding) else leaves[i]
        leaves[i] = jax.device_put(array, sharding_on(sharding, mesh.devices.flat[0]))
    return replace(call, function=function, leaves=leaves)


def sharding_on(sharding: Any, device: Device) -> NamedSharding:
    """Returns a sharding on one device, over the same mesh axes with size 1.

    Drops unreduced and reduced axes, because expressions on one device ignore '+' and '='.
    """
    single_mesh = device_mesh([device])
    if not isinstance(sharding, NamedSharding):
        return NamedSharding(single_mesh, PartitionSpec())
    spec = partition_spec(spec_axes(sharding.spec))
    return NamedSharding(shrink_mesh(sharding.mesh, single_mesh), spec)


class OneDeviceProgram:
    """A function of arrays, compiled for one device.

    Args:
        name: the name of the user's function, for errors.
        mesh: a mesh of one device, for expressions without named mesh axes.
        function: the function to compile.
        arguments: the arguments to compile for. Calls need the same types and shardings.
    """

    def __init__(self, name: str, mesh: Mesh, function: Callable[..., Any], *arguments: Any):
        self._name = name
        self._mesh = mesh
        with self._on_one_device():
            # `__call__` does not use `compiled`, which rejects int4 arrays in JAX 0.10
            self._jitted = jax.jit(function)
            traced = self._jitted.trace(*arguments)
            self.jaxpr = traced.jaxpr.jaxpr
            lowered = traced.lower()
            with progress(f'compiling {name} for one device'):
                compiled = lowered.compile()
            memory, capacity = read_memory(compiled), _capacity(mesh.devices.flat[0])
            if memory is not None and capacity is not None and memory.total > capacity:
                facts = {'needs': format_bytes(memory.total), 'device has': format_bytes(capacity)}
                raise _too_large(name, facts)

    def __call__(self, *arguments: Any) -> Any:
        """Returns the results as NumPy arrays."""
        with self._on_one_device():
            return gather(self._jitted(*arguments))

    @contextmanager
    def _on_one_device(self) -> Generator[None, None, None]:
        """Sets the mesh, and marks errors as coming from the run on one device."""
        mesh: Any = self._mesh
        try:
            with ExitStack() as stack:
                if (ambient := ambient_mesh()) is not None:  # of `jax.set_mesh`
                    mesh = shrink_mesh(ambient, mesh)
                    stack.enter_context(jax.set_mesh(mesh))
                stack.enter_context(one_device_scope(mesh))
                yield
        except EinshardError as error:
            if self._name in error.sentence:
                raise
            raise error.about(function=f'{self._name}, on one device') from None
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            if 'RESOURCE_EXHAUSTED' in str(error):
                raise _too_large(self._name, {}) from error
            raise EinshardError(
                f'{self._name} does not run on one device',
                code='does-not-compile',
                facts={
                    'JAX says': first_line(error),
                    'instead': 'use PartitionSpecs and jax.set_mesh instead of NamedShardings, or '
                    'pass a function for one device as reference=',
                },
            ) from error


def _too_large(name: str, facts: Mapping[str, str]) -> EinshardError:
    return EinshardError(
        f'{name} does not fit in the memory of one device; check_same also runs it on one device',
        code='memory',
        facts={**facts, 'instead': 'pass smaller arguments: fewer layers, a smaller batch'},
    )


def _capacity(device: Device) -> int | None:
    """Returns the bytes of memory of a device (for a CPU, of the machine), or None if unknown."""
    chip = find_chip(device.device_kind)
    if chip is not None:
        return int(chip.memory * chip.share(device))
    if device.platform != 'cpu' or not hasattr(os, 'sysconf'):
        return None
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
