"""Traces a call of a `sharded` function with keyword arguments."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax

from .._sharding.tracing import is_tracing
from .place_arguments import place_arguments
from .program import Program
from .value_spec import as_struct


def trace_as_called(
    program: Program, n_args: int, keywords: Collection[str], order: Sequence[str], *values: Any
) -> jax.stages.Traced:
    """Traces a call with `n_args` positional arguments and `keywords`.

    `jax.jit` with in_shardings rejects keyword arguments, so ShapeDtypeStructs have the shardings
    instead. `order` has the names of the last `values`: the keywords, and omitted parameters whose
    defaults contain arrays. Values between these and the first `n_args` are such defaults of
    positional-only parameters.
    """
    context = program.setup.context()
    if is_tracing():  # otherwise, `ShardedFunction` has placed them
        values = tuple(place_arguments(program, values, context, running=False))
    n_positional = len(values) - len(order)
    names = dict(enumerate(order, n_positional))
    structs = [
        value if i in program.static else argument.map_leaves(as_struct, value, context)
        for i, (argument, value) in enumerate(zip(program.arguments, values, strict=True))
    ]

    def as_called(*args: Any, **kwargs: Any) -> Any:
        def default(i: int) -> Any:
            return program.arguments[i].constrain(values[i], context)

        omitted = {name: default(i) for i, name in names.items() if name not in keywords}
        by_keyword = map({**omitted, **kwargs}.__getitem__, order)
        return program.wrapper(*args, *map(default, range(n_args, n_positional)), *by_keyword)

    as_called.__name__ = as_called.__qualname__ = program.setup.name
    as_called.__wrapped__ = program.setup.function  # type: ignore[attr-defined]
    donated = program.options.get('donate_argnums', ())
    options: dict[str, Any] = {
        **program.options,
        'static_argnums': tuple(i for i in program.static if i < n_args),
        'static_argnames': tuple(names[i] for i in program.static if i in names),
        'donate_argnums': tuple(i for i in donated if i < n_args),
        'donate_argnames': tuple(names[i] for i in donated if i in names),
    }
    if program.out_shardings is not None:
        options['out_shardings'] = program.for_jit(program.out_shardings)
    by_keyword = {name: structs[i] for i, name in names.items() if name in keywords}
    return jax.jit(as_called, **options).trace(*structs[:n_args], **by_keyword)
