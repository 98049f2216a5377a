"""sharded: `jax.jit` with shardings in einshard's notation."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

from jax.sharding import AbstractMesh, Mesh

from .._errors import EinshardError, public
from .._sharding.axis_rules import AxisPlacement, LogicalRule, check_flag, check_option
from .._sharding.axis_rules import axis_rules as rules_block
from .._sharding.context import Fallback
from .._sharding.mesh import MeshLike, check_mesh
from .._text import deferred_kind, name_of
from .._trees.specs import Spec, check_spec_functions, is_function, mesh_of
from .parameters import copied, declare, with_copied_options
from .promise import Budget, Promise, read_limits
from .setup import Options, Setup
from .sharded_function import ShardedFunction

Rules: TypeAlias = rules_block | Mapping[str, AxisPlacement] | Sequence[LogicalRule]
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
    indivisible: Fallback = 'error',
    collectives: Promise | None = None,
    memory: str | int | None = None,
    check_processes: bool = True,
    axis_rules: Rules | None = None,
    **named_specs_and_jit_options: Any,
) -> Callable[[Callable[P, R]], ShardedFunction[P, R]]: ...
@public
def sharded(
    *in_specs: Spec,
    out: Spec = None,
    mesh: MeshLike | None = None,
    reshard: bool = False,
    indivisible: Fallback = 'error',
    collectives: Promise | None = None,
    memory: str | int | None = None,
    check_processes: bool = True,
    axis_rules: Rules | None = None,
    **named_specs_and_jit_options: Any,
) -> Any:
    """`jax.jit` with the shardings of arguments and results in einshard's notation.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from einshard import sharded
        >>> @sharded('batch x -> batch* x', 'x y -> * x y', out='batch y -> batch* y')
        ... def layer(x, w):
        ...     return jax.nn.relu(x @ w)
        >>> y = layer(jnp.ones((3 * jax.device_count(), 8)), jnp.ones((8, 16)))
        >>> y.addressable_shards[0].data.shape
        (3, 16)

    The i-th spec is for the i-th positional parameter, not counting the `self` of a method.
    `name=spec` is for the parameter with that name. As in `jax.jit`, an argument without a spec is
    an error if another has one; None as a spec leaves the sharding to the compiler, which keeps
    that of a JAX array. Static arguments, and defaults that a call leaves out, need no spec.

    Arguments and results may contain modules of Equinox; their leaves that are not arrays are
    static. A function that updates an NNX module in its arguments is an error: use `nnx.jit`.

    Without specs, as in `sharded(out=...)`, the compiler shards all arguments. It also shards the
    result if there is no `out=`. `@sharded` without any specs reads the `Sharded[...]` annotations
    of the function; a parameter without one is left to the compiler.

    Host data, and arrays that are on one device or replicated, are placed as their spec says. An
    array that is sharded differently is an error unless `reshard=True`.

    Specs are resolved at the first call, and again at each call with a new mesh or new shapes.
    Inside a traced function, a call is a nested jit, and `out=` is a constraint. Inside the
    decorated function, `einshard` uses the same mesh.

    Args:
        in_specs: specs by position: expressions, PartitionSpecs, NamedShardings, None,
            `Rules`, functions `(path, leaf) -> spec`, or pytree prefixes of these. A single
            argument that is a function is not a spec: `sharded(f)` decorates `f`.
        out: the spec of the result.
        mesh: a mesh or devices. Default: the mesh of the NamedShardings among the specs, or else
            the mesh in context at each call, or else all devices.
        reshard: whether to reshard arguments that are sharded differently.
        indivisible: what to do if the size of an axis is not divisible by its number of shards:
            'error' raises, and 'replicate' replicates this axis in calls with such a size.
        collectives: the collectives that the compiled program may have: `()` for none, one kind
            such as 'all-reduce', several kinds, or the limit of each kind: `{'all-reduce': 1}`. A
            collective in a loop counts once. Each compiled program is checked before it runs. A
            call under `jax.grad` or `jax.vmap` outside `jax.jit` warns that it is not checked.
        memory: the memory that the compiled program may need on each device: '15 GB', '14.5 GiB' or
            a number of bytes. Checked like `collectives`.
        check_processes: whether the processes of a multi-process mesh compare digests of host data
            in each call, as in `einshard`.
        axis_rules: a mapping from axis names to placements, or an `axis_rules` object. The rules
            hold for the specs and the body of this function, as in a `with axis_rules(...)` block.
            Parameters without a spec, and the result without `out=`, then get their axis names from
            their jaxtyping annotations: `x: Float[Array, 'batch d']` has the spec 'batch d'.
            Without `axis_rules`, such annotations do not shard anything.
        named_specs_and_jit_options: specs by parameter name, and options of `jax.jit`:
            `static_argnames`, `donate_argnums`, `compiler_options`, ...

    Returns:
        A `ShardedFunction`: the function with `lower`, `trace`, `eval_shape`, `in_shardings`,
        `out_shardings`, `clear_cache` and `__wrapped__`.

    Raises:
        EinshardError: at decoration, for an invalid or missing spec, a spec for an unknown or
            static parameter, or an unknown option; at a call, for arrays that do not fit their
            spec.
        UnexpectedCollectives: at a call, if the program has collectives that are not allowed.
        MemoryExceeded: at a call, if the program needs more than `memory`.
    """
    check_option('indivisible', indivisible)
    check_flag('reshard', reshard)
    check_flag('check_processes', check_processes)
    if axis_rules is not None and not isinstance(axis_rules, rules_block):
        axis_rules = rules_block(axis_rules)
    # read once, because the decorator may decorate several functions
    named = with_copied_options(named_specs_and_jit_options)
    options = Options(
        copied(mesh),
        reshard,
        indivisible,
        collectives,
        memory,
        check_processes,
        axis_rules and axis_rules.rules,
    )
    one_function = len(in_specs) == 1 and _can_decorate(in_specs[0])
    if one_function and out is None and not named and options.are_default:
        return decorate(in_specs[0], (), out, named, options)
    check_spec_functions(in_specs)

    @public
    def decorator(*functions: Any, **unexpected: Any) -> Any:
        if len(functions) != 1 or unexpected or not _can_decorate(functions[0]):
            raise no_function_error('sharded', [*functions, *unexpected.values()], in_specs)
        return decorate(functions[0], in_specs, out, named, options)

    return decorator


def _can_decorate(x: Any) -> bool:
    is_spec = hasattr(x, 'for_leaves')  # such as Rules, which are callable
    return isinstance(x, staticmethod | classmethod) or (is_function(x) and not is_spec)


def no_function_error(
    decorator: str, arguments: Sequence[Any], in_specs: Sequence[Spec]
) -> EinshardError:
    """Returns the error for a decorator that is not called with exactly one function."""
    sentence = f'{decorator} must decorate one function, but got {len(arguments)} arguments'
    if len(arguments) == 1:
        sentence = f'{decorator} must decorate a function, not {reprlib.repr(arguments[0])}'
    facts: dict[str, Any] = {}
    if in_specs and _can_decorate(in_specs[-1]):
        name = name_of(in_specs[-1])
        facts['note'] = f'{decorator}({name}, ...) reads {name} as a spec'
        facts['try'] = f'{decorator}(...)({name})'
    return EinshardError(sentence, code='spec', facts=facts)


def check_traceable(function: Any) -> None:
    """Raises for an async or generator function."""
    kind = deferred_kind(function)
    if kind:
        raise EinshardError(
            f'{name_of(function)} is {kind}, which JAX cannot trace; use a function that '
            'returns arrays',
            code='tracing',
        )


def decorate(
    function: Any, in_specs: Sequence[Spec], out: Spec, named: Mapping[str, Any], options: Options
) -> Any:
    """Decorates a function as `sharded` does. `named` has specs, and options of `jax.jit`."""
    if isinstance(function, staticmethod | classmethod):
        return type(function)(decorate(function.__func__, in_specs, out, named, options))
    check_traceable(function)
    name, mesh = name_of(function), options.mesh
    try:
        jit_options, declaration = declare(function, in_specs, out, named, options.axis_rules)
        check_mesh(mesh)
        if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
            mesh = tuple(mesh)  # a copy: the list may change
        if mesh is None:
            mesh = mesh_of([declaration.specs, declaration.result.spec])
        limits = read_limits(options.collectives, options.memory)
        budget = limits and Budget(name, limits)
    except EinshardError as error:
        raise error.about(function=name) from None
    setup = Setup(function, name, declaration, options, mesh, jit_options, budget)
    return ShardedFunction(setup)
