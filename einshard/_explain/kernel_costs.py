"""Reads `costs=` of `explain`: what kernels cost a device."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from .._errors import EinshardError, quoted
from .._program.cost.kernels import Kernel, count_calls, scopes_of, target_of
from .._program.hlo.text import HloModule
from .._program.jaxpr.graph import flatten

_EXAMPLE = "costs={'flash': (4e9, 2e7)}, the flops and the bytes of HBM of one call on a device"


def read_kernel_costs(costs: Any, program: HloModule, jaxpr: Any) -> Mapping[str, Kernel]:
    """Returns the kernels by name: that of a scope, or the target of a custom call.

    Raises:
        EinshardError: the costs are not pairs of numbers; nothing has the name; or only the forward
            or the backward pass of a scope is declared, and the program has both.
    """
    if not costs:
        return {}
    given = _checked(costs)
    targets = {target_of(op) for ops in program.computations.values() for op in ops} - {''}
    traced = None if jaxpr is None else flatten(jaxpr)
    scopes = set[str]() if traced is None else scopes_of(traced)
    for name in given:
        if name not in scopes | targets:
            raise _not_found(name, scopes, targets, traced is not None)
    for name in given.keys() - targets:
        is_backward = name.startswith('transpose(')
        other = name[len('transpose(') : -1] if is_backward else f'transpose({name})'
        if other in scopes and other not in given:
            passes = ('backward', 'forward') if is_backward else ('forward', 'backward')
            raise EinshardError(
                f"costs= has the {passes[0]} pass of '{name}', but not its {passes[1]} pass",
                code='argument',
                facts={'expected': f'also {other!r}'},
            )
    calls = {} if traced is None else count_calls(traced, given.keys() - targets)
    return {name: Kernel(*pair, calls.get(name)) for name, pair in given.items()}


def _checked(costs: Any) -> dict[str, tuple[float, float]]:
    if not isinstance(costs, Mapping):
        raise EinshardError(
            f'costs= must be a dictionary, not {costs!r}',
            code='argument',
            facts={'example': _EXAMPLE},
        )
    found: dict[str, tuple[float, float]] = {}
    items: Mapping[Any, Any] = costs
    for name, pair in items.items():
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2  # type: ignore[reportUnknownArgumentType]
        numbers: list[Any] = [*pair] if is_pair else []  # type: ignore[reportUnknownArgumentType]
        is_valid = bool(numbers) and all(
            isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < float('inf')
            for n in numbers
        )
        if not is_valid or not isinstance(name, str):
            raise EinshardError(
                f'costs= must have the flops and bytes of a name, not {name!r}: {pair!r}',
                code='argument',
                facts={'example': _EXAMPLE},
            )
        found[name] = float(numbers[0]), float(numbers[1])
    return found


def _not_found(name: str, scopes: set[str], targets: set[str], has_scopes: bool) -> EinshardError:
    facts: dict[str, Any] = {}
    if near := difflib.get_close_matches(name, [*scopes, *targets], 4, 0.5):
        facts['similar'] = quoted(near)
    if targets:
        facts['custom calls'] = quoted(sorted(targets))
    if not has_scopes:
        facts['instead'] = (
            'explain the function: what is compiled does not say how often it is called'
        )
    what = 'jax.named_scope or custom call' if has_scopes else 'custom call'
    return EinshardError(
        f"costs= has '{name}', but the program has no {what} of this name",
        code='argument',
        facts=facts,
    )
