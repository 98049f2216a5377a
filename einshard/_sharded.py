"""`jax.jit` with shardings in the notation: the decorator `sharded`."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from ._errors import EinshardError, plural
from ._mesh import MeshLike
from ._parameters import name_of
from ._promises import Promise
from ._sharded_function import ShardedFunction
from ._specs import Spec

P = ParamSpec('P')
R = TypeVar('R')


@overload
def sharded(function: Callable[P, R], /) -> ShardedFunction[P, R]: ...
@overload
def sharded(
    *in_specs: Spec,
    out: Spec = None,
    mesh: MeshLike | None = None,
    reshard: bool = False,
    collectives: Promise | None = None,
    **named_specs_and_jit_options: Any,
) -> Callable[[Callable[P, R]], ShardedFunction[P, R]]: ...
def sharded(
    *in_specs: Spec,
    out: Spec = None,
    mesh: MeshLike | None = None,
    reshard: bool = False,
    collectives: Promise | None = None,
    **named_specs_and_jit_options: Any,
) -> Any:
    """`jax.jit` with the placement of arguments and result in the notation.

        >>> @sharded('b x -> * b x', 'x y -> * x y2', out='b y -> * b y2')
        ... def layer(x, w):
        ...     return jax.nn.relu(x @ w)
        >>> describe(layer(np.ones((4, 8)), np.ones((8, 16))))
        'a b -> 8 a b2'

    The i-th spec is for the i-th positional parameter (the instance of a method has none), and
    `name=spec` for the parameter of that name. Parameters without a spec, and the result without
    `out=`, are placed as the compiler likes. Used bare, as `@sharded`, it reads `Sharded[...]`
    annotations.

    Arguments that are not placed as their spec says are placed if they are host data, or whole on
    one device or on every one. An array that is partitioned otherwise is an error, since to move it
    is communication that nobody wrote; `reshard=True` allows it.

    Expressions are resolved at the first call and kept; a call then is that of `jax.jit`, behind
    one Python frame. Inside other transformations it is a nested jit. In the function, `einshard`
    uses the same mesh.

    `collectives=` is a promise: the collectives of every program that a call compiles are read, of
    the first before it runs, of one for other shapes before its result is given. Any other call is
    one Python frame more; and where arguments without a spec are is looked at. A nested jit has no
    program of its own, and is not read. `lower` is as without a promise: a call after it compiles.

    Args:
        in_specs: specs by position: expressions, None, `Rules`, functions `(path, leaf) -> spec`,
            or trees of those that are prefixes of the argument. A function that stands alone, as
            in `@sharded`, is not a spec but what is decorated.
        out: the spec of the result.
        mesh: as for `make_sharding`; where left out, the mesh in context at each call.
        reshard: whether arguments that are partitioned otherwise may be moved.
        collectives: those that there may be: `()` for none, 'all-reduce' or a collection of kinds,
            or the most of each kind, as in `{'all-reduce': 1}`. Each counts once, also in a loop.
        named_specs_and_jit_options: specs by parameter name, and every option of `jax.jit`:
            `static_argnames`, `donate_argnums`, `inline`, `keep_unused`, `compiler_options`, ...

    Returns:
        A function with the parameters and the result of the one decorated; and with `lower`,
        `trace`, `eval_shape`, `in_shardings`, `out_shardings`, `clear_cache` and `__wrapped__`.

    Raises:
        EinshardError: at decoration, for a spec too many, one for a name that is no parameter or
            for a static parameter, a wrong expression, an unknown option; at a call, for arrays
            that do not fit their spec.
        UnexpectedCollectives: at a call, for a program that breaks the promise.
    """
    named = named_specs_and_jit_options
    bare = not (named or reshard) and out is None and mesh is None and collectives is None
    if bare and len(in_specs) == 1 and _is_function(in_specs[0]):
        return _decorate(in_specs[0], (), None, None, False, None, {})

    def decorate(*functions: Any, **unexpected: Any) -> Any:
        if len(functions) != 1 or unexpected or not _is_function(functions[0]):
            raise called_too_early('sharded', [*functions, *unexpected.values()], in_specs)
        return _decorate(functions[0], in_specs, out, mesh, reshard, collectives, named)

    return decorate


def _is_function(x: Any) -> bool:
    # specs that see all leaves at once, as Rules do, are callable too
    is_spec = hasattr(x, 'for_leaves')
    return isinstance(x, staticmethod | classmethod) or (callable(x) and not is_spec)


def called_too_early(
    decorator: str, given: Sequence[Any], in_specs: Sequence[Spec]
) -> EinshardError:
    """For what `sharded(...)` and the like give, called with other things than a function."""
    found = reprlib.repr(given[0]) if len(given) == 1 else plural(len(given), 'argument')
    facts: dict[str, Any] = {}
    if len(in_specs) == 1 and _is_function(in_specs[0]):
        name = name_of(in_specs[0])
        facts['given first'] = f'{name}, which beside options is taken for a spec'
        facts['to decorate it'] = f'{decorator}(...)({name})'
    return EinshardError(f'{decorator} decorates a function, not {found}', facts=facts)


def _decorate(
    function: Any,
    in_specs: Sequence[Spec],
    out: Spec,
    mesh: MeshLike | None,
    reshard: bool,
    collectives: Promise | None,
    named: Mapping[str, Any],
) -> Any:
    if isinstance(function, staticmethod | classmethod):
        inner = _decorate(function.__func__, in_specs, out, mesh, reshard, collectives, named)
        return type(function)(inner)
    for kind, what in (
        (inspect.isgeneratorfunction, 'a generator'),
        (inspect.iscoroutinefunction, 'a coroutine'),
        (inspect.isasyncgenfunction, 'an asynchronous generator'),
    ):
        if kind(function) or kind(type(function).__call__):
            raise EinshardError(
                f'{name_of(function)} is {what}, which JAX cannot trace: sharded decorates '
                'functions that return arrays'
            )
    made = ShardedFunction(function, in_specs, out, mesh, reshard, collectives, named)
    return made if made.is_method else made.function
