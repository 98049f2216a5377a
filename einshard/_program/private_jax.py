"""What einshard reads of JAX for which there is no public way. Nothing else uses private fields.

tests/test_jax_facts.py checks each of them, so that a JAX that moves one is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Sharding
from jax.stages import Compiled, Lowered, Traced


def compile_options(lowered: Lowered) -> Mapping[str, Any]:
    """Returns what JAX compiles with: shardings, the mesh in context, the arguments that it keeps.

    `Lowered` knows devices that are only in `in_shardings=` or in constraints.
    """
    return lowered._lowering.compile_args  # type: ignore[reportPrivateUsage]


def devices_of(lowered: Lowered) -> list[Any]:
    """Returns the devices that a program is compiled for, in the order of the partitioner."""
    lowering: Any = lowered._lowering  # type: ignore[reportPrivateUsage]
    return [*lowering._device_list]


def kept_arguments(lowered: Lowered) -> list[int]:
    """Returns the indices of the argument leaves that JAX keeps in the program."""
    return sorted(compile_options(lowered)['kept_var_idx'])


def shardings_of_compiled(
    compiled: Compiled,
) -> tuple[Mapping[int, Sharding], Sequence[tuple[Any, Sharding]]]:
    """Returns the shardings of the argument leaves that JAX keeps, and (aval, sharding) of outputs.

    Of a program with a `jax.Ref`, `Compiled.input_shardings` and `out_info` are wrong or raise: its
    final value is among the outputs, but not in `out_tree`.
    """
    program: Any = compiled._executable  # type: ignore[reportPrivateUsage]
    kept = zip(sorted(program._kept_var_idx), program._in_shardings, strict=False)
    return dict(kept), [*zip(program.out_avals, program._out_shardings, strict=False)]


def jit_params(traced: Traced) -> Mapping[str, Any]:
    """Returns the parameters that the equation of a jitted function has in an enclosing jaxpr.

    JAX does not trace a function with `compiler_options` inside another one.
    """
    return traced._params  # type: ignore[reportAttributeAccessIssue]
