"""Functions that Flax NNX and Equinox jit: their stages, and the paths of arguments and results.

Neither is imported. Both keep JAX's own stage in a public attribute of theirs, and both rearrange
the arguments and results of the user's function.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np
from jax.stages import Compiled, Lowered, Traced

from .._text import name_of
from .._trees.partition import Partitioned, find_modules, join, partition
from .._trees.paths import argument_path, leaves_with_paths, path_text, result_path

Framework: TypeAlias = Literal['nnx', 'equinox']

JITTED: Any = type(jax.jit(lambda: None))
_STAGES = Compiled | Lowered | Traced
_ARRAYS = jax.Array | np.ndarray | np.generic  # the arrays of Equinox; others are static


def jax_stage(stage: Any) -> Any:
    """Returns `stage` if it is a stage of JAX, the one that it holds, or None."""
    held = (getattr(stage, name, None) for name in ('traced', 'lowered', 'compiled'))
    return next((each for each in (stage, *held) if isinstance(each, _STAGES)), None)


def framework_of(stage: Any) -> Framework | None:
    if isinstance(stage, _STAGES):
        return None
    return 'nnx' if hasattr(stage, 'jit_wrapped') else 'equinox'


def is_jitted(fn: Any) -> bool:
    """Whether `fn` can be traced by its own method or, as a function of Equinox, only lowered.

    A pytree with methods `trace` and `lower`, such as a linear operator, is not jitted.
    """
    if is_filter_jitted(fn) or jitted_by_haliax(fn):
        return True
    return isinstance(fn, jax.stages.Wrapped) and jtu.all_leaves([fn])


def is_filter_jitted(fn: Any) -> bool:
    """Whether `fn` is a function of `eqx.filter_jit`."""
    return _is_made_by('equinox', 'filter_jit', fn)


def jitted_by_haliax(fn: Any) -> bool:
    """Whether `fn` is a function of `hax.named_jit`, which `explain` cannot read."""
    return _is_made_by('haliax', 'named_jit', fn)


def _is_made_by(module_name: str, decorator: str, fn: Any) -> bool:
    """Whether `fn` has the type of the functions that `module.decorator` returns."""
    decorate = getattr(sys.modules.get(module_name), decorator, None)
    return decorate is not None and isinstance(fn, _type_of_decorated(decorate))


@functools.cache
def _type_of_decorated(decorate: Any) -> type:
    return type(decorate(lambda: None))


def unbound(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Returns a jitted method or partial as the jitted function, with all arguments of the call.

    A bound method of JAX's `jit` has the attributes of the function, which expect `self`. A bound
    method of `nnx.jit` is a `functools.partial`, and of `eqx.filter_jit`, an `eqx.Partial`. An
    object may have such a method as `__call__`.
    """
    if hasattr(fn, '__func__') and hasattr(fn, '__self__'):  # Equinox has its own bound methods
        inner, first, by_name = fn.__func__, (fn.__self__,), {}
    elif isinstance(fn, functools.partial) or type(fn).__name__ == 'Partial':
        inner, first, by_name = fn.func, fn.args, fn.keywords
    elif _has_own_call(fn):
        inner, first, by_name = fn.__call__, (), {}
    else:
        return fn, args, kwargs
    inner, more, by_name = unbound(inner, (*first, *args), {**by_name, **kwargs})
    return (inner, more, by_name) if is_jitted(inner) else (fn, args, kwargs)


def _has_own_call(fn: Any) -> bool:
    """Whether `fn` is an object, such as a module, whose class decorates `__call__`."""
    in_class = getattr(type(fn), '__call__', None)  # noqa: B004
    return is_jitted(in_class) and not is_jitted(fn)


@contextmanager
def restored_if_failed(*trees: Any) -> Generator[None]:
    """Restores the objects of NNX in pytrees if the block fails.

    `nnx.jit` may clear a module before it sets the new arrays. If setting one fails, the module
    has neither the old nor the new ones.
    """
    nnx: Any = sys.modules.get('flax.nnx')
    saved: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
    if nnx is not None and _has_leaf(trees, nnx.Pytree):
        for _, node in nnx.iter_graph(trees):
            if isinstance(node, nnx.Pytree | nnx.Variable):
                # copies of dicts, because NNX updates metadata in place
                slots = {name: copy.copy(getattr(node, name)) for name in _slots(node)}
                saved.append((node, slots, dict(getattr(node, '__dict__', {}))))
    try:
        yield
    except BaseException:
        for node, slots, attributes in saved:
            for name, value in slots.items():
                object.__setattr__(node, name, value)
            if attributes:
                vars(node).clear()
                vars(node).update(attributes)
        raise


def _slots(node: Any) -> list[str]:
    """Returns the slots of a variable of NNX that have a value."""
    slots = [name for cls in type(node).__mro__ for name in getattr(cls, '__slots__', ())]
    return [name for name in slots if not name.startswith('__') and hasattr(node, name)]


def can_filter_jit(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has modules of Equinox, and `eqx.filter_jit` traces it."""
    if not find_modules((fn, args, kwargs)):
        return False
    equinox: Any = sys.modules['equinox']
    try:
        trace_filtered(equinox.filter_jit(fn), args, kwargs)
    except (TypeError, ValueError):
        return False
    return True


def is_update_of_module(error: Exception) -> bool:
    """Whether NNX raised `error` because a trace updates a module from outside of it."""
    errors: Any = sys.modules.get('flax.errors')
    return errors is not None and isinstance(error, errors.TraceContextError)


def nnx_jit_of_method(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Returns the text of `nnx.jit` of a method, or of `__call__` of a module, if it is traced."""
    nnx: Any = sys.modules['flax.nnx']
    module = getattr(fn, '__self__', fn)
    function = getattr(fn, '__func__', None) or type(fn).__call__
    if not isinstance(module, nnx.Pytree):
        return None
    try:
        nnx.jit(function).lower(module, *args, **kwargs)
    except (TypeError, ValueError):
        return None
    return f'nnx.jit({function.__qualname__})'


def has_shapes(*trees: Any) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves(trees))


def trace_filtered(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Traced, tuple[Any, Sequence[Any], Mapping[str, Any]]]:
    """Traces a function of `eqx.filter_jit` for ShapeDtypeStructs.

    `fn.lower` takes them for static values, and fails in the function. The trace has the arguments
    and the result as the user passes and returns them, and the arrays of the function itself, if
    it is a module, as a keyword argument with its name. Also returns the function that is traced,
    and its arguments.
    """
    function, bound = fn.__wrapped__, inspect.signature(fn).bind(*args, **kwargs)
    name = name_of(function)
    by_name = {**bound.kwargs, name: function}

    def call(*args: Any, **kwargs: Any) -> Partitioned:
        by_name = join(kwargs)
        return partition(by_name.pop(name)(*join(args), **by_name))

    call.__name__ = call.__qualname__ = name
    first, rest = fn.donate_first, fn.donate_rest
    donated = [i for i in range(len(bound.args)) if (rest if i else first)]
    jitted = jax.jit(call, donate_argnums=donated, donate_argnames=[*by_name] if rest else ())
    names = positional_parameters(fn)
    labels = [*names, *(f'args[{i}]' for i in range(len(names), len(bound.args)))]
    positional = [partition(x, label) for x, label in zip(bound.args, labels, strict=False)]
    keywords = {label: partition(x, label) for label, x in by_name.items()}
    return jitted.trace(*positional, **keywords), (jitted, positional, keywords)


class _Graph:
    """The structure of a pytree with objects of NNX."""

    def __init__(self, nodes: Sequence[Any], treedef: Any, is_object: Sequence[bool]):
        nnx: Any = sys.modules['flax.nnx']
        self._merge, self._treedef, self._is_object = nnx.merge, treedef, is_object
        objects = [node for node, is_object in zip(nodes, is_object, strict=True) if is_object]
        self._graphdef, state = nnx.split(objects)
        self._others = [x for x, is_object in zip(nodes, is_object, strict=True) if not is_object]
        self.leaves, self._state = jtu.tree_flatten((state, self._others))

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        state, others = self._state.unflatten(leaves)
        objects, rest = iter(self._merge(self._graphdef, state)), iter(others)
        return self._treedef.unflatten(next(objects if each else rest) for each in self._is_object)


def flatten_graph(tree: Any) -> tuple[list[Any], Any]:
    """Flattens a pytree whose objects of NNX may share arrays. Such an array is one leaf.

    As pytrees, each of these objects would have its own.
    """
    nnx: Any = sys.modules['flax.nnx']
    kinds = nnx.Pytree, nnx.Variable
    nodes, treedef = jtu.tree_flatten(tree, is_leaf=lambda x: isinstance(x, kinds))
    graph = _Graph(nodes, treedef, [isinstance(node, kinds) for node in nodes])
    return graph.leaves, graph


def _has_leaf(tree: Any, kind: type) -> bool:
    leaves = jtu.tree_leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return any(isinstance(leaf, kind) for leaf in leaves)


def positional_parameters(fn: Any) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in by_position]


# --- paths --------------------------------------------------------------------------------------


def program_leaves(tree: Any) -> Sequence[tuple[Sequence[Any], Any]]:
    """Returns the leaves of a stage's arguments or results, with the user's paths.

    `nnx.jit` passes a module as a list of arrays and a `graphdef`, which has their paths, or with
    `graph_updates=False`, as its state.
    """

    def is_module(node: Any) -> bool:
        return hasattr(node, 'graphdef') and (hasattr(node, 'states') or hasattr(node, 'state'))

    nnx: Any = sys.modules.get('flax.nnx')
    if nnx is None:
        return leaves_with_paths(tree)
    found: list[tuple[Sequence[Any], Any]] = []
    for path, node in leaves_with_paths(tree, is_module):
        leaves = leaves_with_paths(node)
        if is_module(node) and hasattr(node, 'states'):
            numbered = jtu.tree_structure(node).unflatten(range(len(leaves)))
            try:
                module = nnx.merge(numbered.graphdef, *numbered.states)
            except (KeyError, ValueError):  # it shares arrays with an earlier argument
                names = {}
            else:
                state = nnx.to_pure_dict(nnx.state(module))
                names = {number: name for name, number in jtu.tree_leaves_with_path(state)}
            leaves = [(names.get(i, inner), leaf) for i, (inner, leaf) in enumerate(leaves)]
        elif is_module(node):
            leaves = [(inner[1:], leaf) for inner, leaf in leaves]
        found += [((*path, *inner), leaf) for inner, leaf in leaves]
    return found


MARKER = 'marker of filter_jit'  # the path of a result that Equinox adds


def framework_result_path(path: Sequence[Any], out_info: Any, names: Mapping[int, str]) -> str:
    """Formats the path of a result, without the containers that NNX and Equinox add.

    An array of a module that an NNX function updates has the path 'result/model/kernel'.
    """
    match [type(each).__name__ for each in out_info], path[0].idx:
        case [_, _, 'Static'], 0:  # Equinox: (marker, arrays, other results)
            return MARKER
        case ([_, _, 'Static'], 1) | ([_, _], 0) | ([_, _, _], 2):
            return result_path(path[1:])
        case [_, _], 1:  # NNX with graph=False: (result, updates)
            return f'updates/{path_text(path[1:])}'
        case _:  # NNX: (arguments, keyword arguments, result)
            return f'result/{argument_path(path, names)}'


def equinox_path(path: Sequence[Any]) -> str:
    """Formats the path of an argument of an Equinox stage, which has no names."""
    group = {'first': 'first argument', 'fun': 'function'}.get(path[2].key, 'other arguments')
    return f'{group}, leaf {path[3].idx}'


def equinox_paths(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], args_info: Any
) -> list[str] | None:
    """Returns the path of each leaf of a call of `eqx.filter_jit`. None if they do not match.

    Equinox sorts the arrays by whether they are donated, then into those of the first argument, of
    the function, and of the others.
    """
    bound = inspect.signature(fn).bind(*args, **kwargs)
    names, function = dict(enumerate(positional_parameters(fn))), fn.__wrapped__
    users = [(argument_path(path, names), x) for path, x in _arrays((bound.args, bound.kwargs))]
    users += [(f'{name_of(function)}/{path_text(path)}', x) for path, x in _arrays(function)]
    info = [(path[2].key, leaf) for path, leaf in jtu.tree_leaves_with_path(args_info)]
    groups = ('first', 'rest', 'fun')
    order = [i for group in groups for i, (name, _) in enumerate(info) if name == group]
    if [info[i][1].shape for i in order] != [x.shape for _, x in users]:
        return None
    paths = dict(zip(order, (path for path, _ in users), strict=True))
    return [paths[i] for i in range(len(info))]


def equinox_jaxpr(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], args_info: Any
) -> Any | None:
    """Returns the jaxpr that a call of `eqx.filter_jit` runs, because `lower` returns none.

    Returns None if its arguments are not those of the lowered program.
    """
    leaves, treedef = jtu.tree_flatten((tuple(args), dict(kwargs)))
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, _ARRAYS)}

    def call(arrays: Mapping[int, Any]) -> None:
        args, kwargs = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        fn(*args, **kwargs)

    equations = jax.make_jaxpr(call)(arrays).jaxpr.eqns
    jaxprs = [eqn.params['jaxpr'].jaxpr for eqn in equations if 'jaxpr' in eqn.params]
    shapes = [leaf.shape for leaf in jtu.tree_leaves(args_info)]
    found = [jaxpr for jaxpr in jaxprs if [v.aval.shape for v in jaxpr.invars] == shapes]
    return found[0] if len(found) == 1 else None


def _arrays(tree: Any) -> list[tuple[Sequence[Any], Any]]:
    pairs = jtu.tree_leaves_with_path(tree)
    return [(path, x) for path, x in pairs if isinstance(x, _ARRAYS)]
