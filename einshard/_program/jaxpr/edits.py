"""Edits of a traced program: constraints on the values of source expressions, other shardings."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jax.extend import core as jex
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ..._errors import EinshardError
from ..._sharding.mesh import partition_spec, spec_axes
from ..._text import array_text
from .graph import Site
from .op_sharding_rule import BatchAxis, batch_axes
from .spans import Frames, Span
from .two_levels import run_in_two_levels

_CONSTRAINT = 'sharding_constraint'
# These pass a cotangent on to their operands: no equation of the backward pass is theirs.
_PASS_COTANGENTS_ON = ('add', 'add_any', 'sub')


class ValueEdit(NamedTuple):
    """A sharding constraint on the value of an expression, and on its cotangent.

    Where the expression is a constraint, its sharding is replaced; or its operand is constrained,
    and the constraint kept.

    Attributes:
        span: the expression. If it is evaluated several times, all its values are constrained.
        sharding: of the value as the expression sees it. Axes that `jax.vmap` adds in front of it
            stay unconstrained.
        of_operand: whether the expression is a constraint, and its operand is constrained.
    """

    span: Span
    sharding: NamedSharding
    of_operand: bool = False


class PerDevice(NamedTuple):
    """An operation that each device runs on its shard, in a `shard_map`.

    Attributes:
        span: the expression that calls it. Its gradients there are changed alike.
        axes: pairs of a batch axis and the mesh axes that shard it; see `batch_axes`.
        along: the mesh axes that shard an axis along which it operates, which then runs in two
            levels; see `run_in_two_levels`.
        dim: that axis.
    """

    span: Span
    primitive: str
    axes: tuple[tuple[int | str, tuple[str, ...]], ...]
    mesh: Mesh
    along: tuple[str, ...] = ()
    dim: int = 0


@dataclass(frozen=True)
class JittedCall:
    """A call of a jitted function, as the only equation of a program.

    Attributes:
        eqn: the equation, with jaxpr, shardings, donation and name.
        leaves: the leaves of the arguments `(args, kwargs)`.
        operands: for each operand of the equation, the index of the leaf that it is, or a constant.
        args_tree, result_tree: the structures of the arguments and of the result.
        trace_again: returns the call with other leaves, such as ShapeDtypeStructs with other
            shardings. None if it cannot be called with other shardings.
    """

    eqn: Any
    leaves: Sequence[Any]
    operands: Sequence[int | _Constant]
    args_tree: Any
    result_tree: Any
    trace_again: Callable[[Sequence[Any]], JittedCall] | None = None

    @property
    def jaxpr(self) -> Any:
        return self.eqn.params['jaxpr']

    @property
    def dynamic(self) -> list[int]:
        """The leaves that are operands, in the order of the program's arguments."""
        return [leaf for leaf in self.operands if isinstance(leaf, int)]

    @property
    def arguments(self) -> dict[int, int]:
        """The operand that is each leaf. Static and constant leaves are left out."""
        return {leaf: i for i, leaf in enumerate(self.operands) if isinstance(leaf, int)}


class _Constant(NamedTuple):
    value: Any


def read_call(
    jitted: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result_tree: Any,
    *,
    numbers_are_static: bool = False,
    flatten: Callable[[Any], tuple[list[Any], Any]] = jtu.tree_flatten,
) -> JittedCall | None:
    """Traces a call of a jitted function as one equation. Returns None if it is not one.

    This is public, where the shardings, the donation and the name of a `jax.stages.Traced` are not.
    Only of a function with compiler options, which JAX does not trace in another one, that is read.

    Args:
        result_tree: the structure of the result. None for a function that a framework jits, which
            rearranges its arguments and results: then the call takes and returns leaves.
        numbers_are_static: whether Python's numbers are static, as in Equinox.
        flatten: returns the leaves of the call, and what unflattens them.
    """
    # a function of Equinox may have arrays, which are arguments of the program
    called = (jitted if result_tree is None else None, tuple(args), dict(kwargs))
    leaves, args_tree = flatten(called)

    def trace(leaves: Sequence[Any], is_dynamic: Callable[[Any], bool]) -> JittedCall:
        dynamic = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]

        # it returns nothing, because functions of frameworks also return leaves other than arrays
        def call(*values: Any) -> None:
            given = dict(zip(dynamic, values, strict=True))
            merged = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
            function, args, kwargs = args_tree.unflatten(merged)
            (jitted if function is None else function)(*args, **kwargs)

        operands: list[int | _Constant]
        try:
            closed = jax.make_jaxpr(call)(*(leaves[i] for i in dynamic))
        except ValueError as error:
            if result_tree is None or 'compiler_options' not in str(error):
                raise
            _, args, kwargs = args_tree.unflatten(leaves)
            eqn: Any = SimpleNamespace(params=jitted.trace(*args, **kwargs)._params)  # type: ignore[reportFunctionMemberAccess]
            operands = [*dynamic]
            shapes = [aval.shape for aval in eqn.params['jaxpr'].in_avals]
            if shapes != [jnp.shape(leaves[i]) for i in dynamic]:
                raise
        else:
            outer = _open(closed)
            (eqn,) = outer.eqns
            known: dict[Any, Any] = dict(zip(outer.invars, dynamic, strict=True))
            constants = zip(outer.constvars, closed.consts, strict=True)
            known |= {v: _Constant(value) for v, value in constants}
            operands = [
                _Constant(v.val) if isinstance(v, jex.Literal) else known[v] for v in eqn.invars
            ]
        if not _is_jaxpr(eqn.params.get('jaxpr')):
            raise ValueError('not a call of a jitted function')
        if result_tree is not None:
            _, *of_args = args_tree.children()
            tree, order = jtu.treedef_tuple(of_args), [*range(len(leaves))]
        else:
            order = [i for i in operands if isinstance(i, int)]
            tree = jtu.tree_structure((tuple(order), {}))
        renamed = {leaf: i for i, leaf in enumerate(order)}

        def trace_again(changed: Sequence[Any]) -> JittedCall:
            new = dict(zip(order, changed, strict=True))
            return trace([new.get(i, leaf) for i, leaf in enumerate(leaves)], is_dynamic)

        return JittedCall(
            eqn,
            [leaves[i] for i in order],
            [renamed[i] if isinstance(i, int) else i for i in operands],
            tree,
            jtu.tree_structure(tuple(eqn.outvars)) if result_tree is None else result_tree,
            trace_again,
        )

    # Python's numbers are arguments, unless they are static: then a tracer has no hash
    options = [_is_array] if numbers_are_static else [_is_number_or_array, _is_array]
    for is_dynamic in options:
        try:
            return trace(leaves, is_dynamic)
        except (TypeError, ValueError, KeyError):
            continue
    return None


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')


def _is_number_or_array(leaf: Any) -> bool:
    return _is_array(leaf) or isinstance(leaf, bool | int | float | complex)


@dataclass(frozen=True)
class Edited:
    """An edited program.

    Attributes:
        function: the jitted function, which is called as the one that was edited.
        args, kwargs: the arguments, as ShapeDtypeStructs with shardings.
        applied: for each value edit, the numbers of values and of cotangents that are constrained.
        n_per_device: for each `PerDevice`, the number of operations that it changes. 0 if one of
            them cannot be changed.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    applied: tuple[tuple[int, int], ...]
    n_per_device: tuple[int, ...] = ()


def apply(
    call: JittedCall,
    values: Sequence[ValueEdit] = (),
    arguments: Mapping[int, Sharding] | None = None,
    results: Mapping[int, Sharding] | None = None,
    through: tuple[Mapping[int, Sharding], Mapping[int, Sharding]] = ({}, {}),
    per_device: Sequence[PerDevice] = (),
) -> Edited:
    """Returns the program with constraints on values, and other shardings.

    Everything else is kept: the shardings of other arguments and results, donation and the name.

    Args:
        arguments: the new shardings of arguments, by the index of the leaf.
        results: the new shardings of results, by the index of the leaf.
        through: shardings that arguments and results, by the index of the leaf, have on the way
            from the caller and to it.
        per_device: operations that each device is to run on its shard.
    """
    arguments, results = arguments or {}, results or {}
    params, by_leaf = call.eqn.params, call.arguments

    def sharding_of(leaf: int) -> Sharding | None:
        given = params['in_shardings'][by_leaf[leaf]] if leaf in by_leaf else None
        return arguments.get(leaf, given if isinstance(given, Sharding) else None)

    in_shardings = [sharding_of(i) for i in range(len(call.leaves))]
    out_shardings = [
        results.get(i, given if isinstance(given, Sharding) else None)
        for i, given in enumerate(params['out_shardings'])
    ]
    structs = [
        _struct(leaf, in_shardings[i]) if i in by_leaf else leaf
        for i, leaf in enumerate(call.leaves)
    ]
    # the types in its jaxpr are those of its arguments
    if any(map(_has_explicit_axes, arguments.values())):
        if values or call.trace_again is None:
            raise ValueError('on Explicit mesh axes, only arguments and results can change')
        call = call.trace_again(structs)
    splicer = _Splicer(values)
    jaxpr = splicer.splice(call.jaxpr) if values else call.jaxpr
    n_per_device: list[int] = []
    for each in per_device:
        sharder = _Sharder(each)
        jaxpr = sharder.edit(jaxpr, Site())
        n_per_device.append(0 if sharder.has_failed else sharder.n_changed)
    run = jex.jaxpr_as_fun(jaxpr)
    args, kwargs = call.args_tree.unflatten(structs)
    numbers: tuple[tuple[Any, ...], dict[str, Any]] = call.args_tree.unflatten(
        range(len(call.leaves))
    )

    def is_static(tree: Any) -> bool:
        leaves = jtu.tree_leaves(tree)
        return bool(leaves) and not any(i in by_leaf for i in leaves)

    def is_donated(tree: Any) -> bool:
        leaves = [by_leaf[i] for i in jtu.tree_leaves(tree) if i in by_leaf]
        return bool(leaves) and all(params['donated_invars'][i] for i in leaves)

    options: dict[str, Any] = {
        'static_argnums': [i for i, tree in enumerate(numbers[0]) if is_static(tree)],
        'static_argnames': [name for name, tree in numbers[1].items() if is_static(tree)],
        'donate_argnums': [i for i, tree in enumerate(numbers[0]) if is_donated(tree)],
        'donate_argnames': [name for name, tree in numbers[1].items() if is_donated(tree)],
        'keep_unused': params['keep_unused'],
        'compiler_options': dict(params['compiler_options_kvs']) or None,
    }
    if any(s is not None for s in in_shardings) and not kwargs:
        dynamic = [tree for i, tree in enumerate(numbers[0]) if i not in options['static_argnums']]
        options['in_shardings'] = tuple(
            jtu.tree_map(lambda i: in_shardings[i], tree) for tree in dynamic
        )
    if any(s is not None for s in out_shardings):
        options['out_shardings'] = call.result_tree.unflatten(out_shardings)

    def constrained(leaves: Sequence[Any], shardings: Mapping[int, Sharding]) -> list[Any]:
        return [
            jax.lax.with_sharding_constraint(leaf, shardings[i]) if i in shardings else leaf
            for i, leaf in enumerate(leaves)
        ]

    def edited(*args: Any, **kwargs: Any) -> Any:
        leaves = constrained(jtu.tree_leaves((args, kwargs)), through[0])
        operands = [leaves[each] if isinstance(each, int) else each.value for each in call.operands]
        return call.result_tree.unflatten(constrained(run(*operands), through[1]))

    edited.__name__ = edited.__qualname__ = params['name']
    applied = tuple(splicer.applied[edit] for edit in range(len(values)))
    return Edited(jax.jit(edited, **options), args, kwargs, applied, tuple(n_per_device))


class FixedFunction:
    """An edited function that takes the arguments of the one that was edited.

    Arguments whose shardings the edits change are moved before the call. The others are placed as
    in the call that was edited, unless they are on devices already.

    Attributes:
        jitted: the function that takes arguments as `place` returns them.
    """

    def __init__(
        self,
        call: JittedCall,
        edited: Edited,
        moved: Collection[int],
        paths: Mapping[int, str],
        bind: Callable[[Sequence[Any], Mapping[str, Any]], tuple[Any, Any]],
    ):
        """
        Args:
            moved: the leaves whose shardings the edits change.
            paths: the paths of the leaves that are arguments of the program.
            bind: returns the arguments of `call` for those of the user's function.
        """
        self.jitted = edited.function
        self.__name__ = self.__qualname__ = edited.function.__name__
        self._call, self._moved, self._paths, self._bind = call, {*moved}, paths, bind
        self._structs = jtu.tree_leaves((edited.args, edited.kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.place(args, kwargs)
        return self.jitted(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.place(args, kwargs)
        return self.jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self.trace(*args, **kwargs).lower()

    def place(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns the arguments for `jitted`: those that the edits move have their new shardings.

        Raises an EinshardError for other static arguments, whose values are in the program, and for
        arrays of other types: the traced operations would compute other values with them.
        """
        args, kwargs = self._bind(args, kwargs)
        call, (leaves, tree) = self._call, jtu.tree_flatten((tuple(args), dict(kwargs)))
        facts: dict[str, str] = {}
        if tree != call.args_tree:
            facts = {'arguments of the report': str(call.args_tree), 'got': str(tree)}
        else:
            for i, (old, new) in enumerate(zip(call.leaves, leaves, strict=True)):
                if i not in call.arguments and not _is_array(old) and new is not old and new != old:
                    facts = {'constant of the report': repr(old), 'got': repr(new)}
            avals = call.jaxpr.in_avals
            for i, operand in call.arguments.items():
                expected, got = _type_text(avals[operand]), _type_text(_array_type(leaves[i]))
                if got != expected:
                    got = got if _is_array(leaves[i]) else array_text(leaves[i])
                    path = self._paths[i]
                    facts = {'argument': path, 'in the report': expected, 'got': got}
                    break
        if facts:
            raise EinshardError(
                f'{self.__name__} with suggestions cannot take these arguments',
                code='argument',
                facts={**facts, 'instead': 'explain the function with these arguments'},
            )
        return tree.unflatten([self._placed(i, leaf) for i, leaf in enumerate(leaves)])

    def _placed(self, i: int, leaf: Any) -> Any:
        sharding = self._structs[i].sharding if i in self._call.arguments else None
        if sharding is None or not _is_array(leaf):
            return leaf
        is_moved = i in self._moved
        if isinstance(leaf, jax.ShapeDtypeStruct):
            is_placed = leaf.sharding is not None and not is_moved
            return leaf if is_placed else leaf.update(sharding=sharding)
        if isinstance(leaf, Tracer):
            return jax.device_put(leaf, sharding) if is_moved else leaf
        if _is_committed(leaf) and not (
            is_moved and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        ):
            return leaf
        is_donated = self._call.eqn.params['donated_invars'][self._call.arguments[i]]
        return jax.device_put(leaf, sharding, donate=is_donated)


def _has_explicit_axes(sharding: Any) -> bool:
    return AxisType.Explicit in getattr(getattr(sharding, 'mesh', None), 'axis_types', ())


def _struct(leaf: Any, sharding: Sharding | None) -> Any:
    """Returns the ShapeDtypeStruct of an argument, with its own sharding if it is committed."""
    aval = _array_type(leaf)
    if sharding is None and (isinstance(leaf, jax.ShapeDtypeStruct) or _is_committed(leaf)):
        sharding = leaf.sharding
    weak = bool(getattr(aval, 'weak_type', False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def _array_type(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)


def _type_text(aval: Any) -> str:
    aval = getattr(aval, 'inner_aval', aval)  # of a Ref
    weak = ', as a Python number' * bool(getattr(aval, 'weak_type', False))
    return array_text(aval) + weak


def _is_committed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.committed


# --- constraints --------------------------------------------------------------------------------


class _Signature(NamedTuple):
    """What the equation that returns the value of an expression has in common everywhere.

    Attributes:
        path: the frames inside the expression, innermost first.
        primitive, output, shape: of the equation.
        is_only_kind: whether all equations at `path` are of this primitive.
        operands: the frames, from the innermost to the expression, of the equations that return
            operands which nothing else uses.
        is_transposed: whether the expression is in the backward pass, as in a custom derivative.
        is_custom: whether the equations at `path` have no transposes.
    """

    path: tuple[Span, ...]
    primitive: str
    output: int
    shape: tuple[int, ...]
    is_only_kind: bool
    operands: tuple[tuple[Span, ...], ...]
    is_transposed: bool
    is_custom: bool = False


@dataclass
class _Splicer:
    """Inserts constraints into the jaxprs of a program."""

    edits: Sequence[ValueEdit]
    applied: dict[int, tuple[int, int]] = field(default_factory=dict)
    signatures: dict[int, _Signature] = field(default_factory=dict)
    frames: Frames = field(default_factory=Frames)

    def splice(self, closed: Any) -> Any:
        for i in range(len(self.edits)):
            self.applied[i] = 0, 0
            for is_transposed in (False, True):
                if i not in self.signatures:
                    self._find_signature(i, closed, Site(), is_transposed)
            if i not in self.signatures:
                continue
            found = self._edit(i, closed, Site(), (), frozenset())
            if not self.applied[i][1] and self.signatures[i].primitive not in _PASS_COTANGENTS_ON:
                # the backward pass of a custom derivative has other equations
                self.applied[i] = 0, 0
                self.signatures[i] = self.signatures[i]._replace(is_custom=True)
                found = self._edit(i, closed, Site(), (), frozenset())
            closed = found
        return closed

    def _find_signature(self, i: int, closed: Any, site: Site, is_transposed: bool) -> None:
        """Finds an equation that returns the value of the expression."""
        jaxpr, span = _open(closed), self.edits[i].span
        sites = [site.at(eqn, self.frames.of(eqn)) for eqn in jaxpr.eqns]
        forward = [
            n
            for n, at in enumerate(sites)
            if span in at.frames
            and span not in site.frames
            and at.is_transposed == is_transposed
            and any(not _is_dropped(v) for v in jaxpr.eqns[n].outvars)
        ]
        if forward:
            users: dict[Any, list[int]] = {}
            for n, eqn in enumerate(jaxpr.eqns):
                for v in eqn.invars:
                    if not isinstance(v, jex.Literal):
                        users.setdefault(v, []).append(n)
            inside = {*forward}
            values = [(n, i, v) for n in forward for i, v in enumerate(jaxpr.eqns[n].outvars)]
            # The last value that the rest of the forward pass uses. If only the caller uses it, the
            # first result: the others are what the backward pass needs.
            used = [
                (n, -output)
                for n, output, v in values
                if any(
                    m not in inside and sites[m].is_transposed == is_transposed
                    for m in users.get(v, ())
                )
            ]
            returned = [
                (-position, n, -output)
                for n, output, v in values
                for position, result in enumerate(jaxpr.outvars)
                if result is v
            ]
            found = max(used) if used else max(returned)[1:] if returned else (forward[-1], 0)
            found = found[0], -found[1]
            eqn, frames = jaxpr.eqns[found[0]], sites[found[0]].frames
            path = frames[: frames.index(span)]
            kinds = {
                jaxpr.eqns[n].primitive.name
                for n in forward
                if sites[n].frames[: sites[n].frames.index(span)] == path
            }
            producers = {v: n for n, each in enumerate(jaxpr.eqns) for v in each.outvars}
            shape = tuple(eqn.outvars[found[1]].aval.shape)
            operands = [
                inner[: inner.index(span) + 1] if span in inner else inner[:1]
                for v in eqn.invars
                if not isinstance(v, jex.Literal) and v in producers and v.aval.shape == shape
                for inner in [sites[producers[v]].frames]
                # but its derivative may keep it
                if len(users[v]) == 1 or sum(sites[n].frames != inner for n in users[v]) == 1
            ]
            self.signatures[i] = _Signature(
                path,
                eqn.primitive.name,
                found[1],
                shape,
                len(kinds) == 1,
                tuple(operands),
                is_transposed,
            )
            return
        for eqn, at in zip(jaxpr.eqns, sites, strict=True):
            if self._is_all_manual(i, eqn):
                continue
            for inner in _inner(eqn):
                self._find_signature(i, inner, at.inside(eqn), is_transposed)
                if i in self.signatures:
                    return

    def _edit(
        self,
        i: int,
        closed: Any,
        site: Site,
        cotangent_inputs: Sequence[bool],
        manual: frozenset[str],
    ) -> Any:
        """Returns a jaxpr with the constraints of one edit.

        Args:
            cotangent_inputs: whether each input is a cotangent; False for missing ones.
            manual: the manual mesh axes of the `shard_map` around it.
        """
        jaxpr, edit, signature = _open(closed), self.edits[i], self.signatures[i]
        inputs = zip(jaxpr.invars, cotangent_inputs, strict=False)
        cotangents = {v for v, is_cotangent in inputs if is_cotangent}
        constants = {*jaxpr.constvars}
        producer_paths: dict[Any, tuple[Span, ...] | None] = {}
        eqns: list[Any] = []
        new: dict[Any, Any] = {}  # constrained values, by what they replace
        unconstrained: dict[Any, Any] = {}  # the reverse
        constrained_cotangents: dict[Any, Any] = {}
        is_changed = False

        def constrain(v: Any, eqn: Any, n_mapped: int) -> Any:
            shape = tuple(v.aval.shape)
            constraint = _constraint(shape, v.aval.dtype, edit.sharding, manual, n_mapped)
            fresh = constraint.outvars[0]
            eqns.append(
                constraint.replace(invars=[v], outvars=[fresh], source_info=eqn.source_info)
            )
            return fresh

        def count(values: int, cotangents: int) -> None:
            before = self.applied[i]
            self.applied[i] = before[0] + values, before[1] + cotangents

        for eqn in jaxpr.eqns:
            at = site.at(eqn, self.frames.of(eqn))
            frames = at.frames
            is_inside = edit.span in frames and edit.span not in site.frames
            path = frames[: frames.index(edit.span)] if is_inside else None
            is_there = is_inside and path == signature.path
            invars = [v if isinstance(v, jex.Literal) else new.get(v, v) for v in eqn.invars]
            # what the derivative of the expression keeps is computed from its unconstrained value
            if is_there and eqn.primitive.name != signature.primitive:
                invars = [unconstrained.get(v, v) if _is_var(v) else v for v in invars]
            # 1. the cotangent enters the equations that are the transposes of the expression
            passes_on = signature.primitive in _PASS_COTANGENTS_ON
            if passes_on:
                is_transpose = any(frames[: len(each)] == each for each in signature.operands)
            else:
                is_transpose = is_inside if signature.is_custom else is_there
            if at.is_transposed and is_transpose and not signature.is_transposed:
                entering = [
                    n
                    for n, v in enumerate(eqn.invars)
                    if _is_var(v)
                    and v in cotangents
                    and _has_shape(v, signature.shape)
                    and (
                        passes_on
                        or (signature.is_only_kind and not signature.is_custom)
                        or (
                            producer_paths.get(v) is None
                            if signature.is_custom
                            else producer_paths.get(v) != signature.path
                        )
                    )
                ]
                if signature.primitive == _CONSTRAINT:
                    entering = []
                for n in entering[:1]:
                    old, v = eqn.invars[n], invars[n]
                    if old not in constrained_cotangents:
                        constrained_cotangents[old] = constrain(v, eqn, at.n_mapped)
                        count(0, 1)
                        if passes_on:
                            new[old] = constrained_cotangents[old]
                    invars = [constrained_cotangents[old] if w is v else w for w in invars]
            params = eqn.params
            if not is_inside:
                flags = [_is_var(v) and v in cotangents for v in eqn.invars]
                params = self._edit_inner(i, eqn, at, flags, manual)
                is_changed = is_changed or params is not eqn.params
            eqn_new = eqn.replace(invars=invars, params=params)
            is_constraint = is_there and eqn.primitive.name == _CONSTRAINT == signature.primitive
            if is_constraint and edit.of_operand:
                if not at.is_transposed:
                    invars = [constrain(invars[0], eqn, at.n_mapped)]
                    count(1, 0)
                eqn_new = eqn.replace(invars=invars)
            elif is_constraint:
                old = eqn.outvars[0]
                shape = tuple(old.aval.shape)
                eqn_new = _constraint(
                    shape, old.aval.dtype, edit.sharding, manual, at.n_mapped
                ).replace(invars=invars, outvars=eqn.outvars, source_info=eqn.source_info)
                count(not at.is_transposed, at.is_transposed)
                is_changed = True
            eqns.append(eqn_new)
            if is_constraint and edit.of_operand and at.is_transposed:
                (old,) = eqn.outvars
                new[old] = constrain(old, eqn, at.n_mapped)
                count(0, 1)
            # the cotangent of the loss is a constant
            is_constant = all(not _is_var(v) or v in constants for v in eqn.invars)
            if any(_is_var(v) and v in cotangents for v in eqn.invars) or (
                is_constant and at.is_transposed
            ):
                cotangents.update(eqn.outvars)
            elif is_constant:
                constants.update(eqn.outvars)
            for v in eqn.outvars:
                producer_paths[v] = path
            # 2. the value
            if (
                is_there
                and at.is_transposed == signature.is_transposed
                and eqn.primitive.name == signature.primitive != _CONSTRAINT
                and signature.output < len(eqn.outvars)
                and _has_shape(eqn.outvars[signature.output], signature.shape)
            ):
                v = eqn.outvars[signature.output]
                if not _is_dropped(v):
                    new[v] = constrain(v, eqn, at.n_mapped)
                    unconstrained[new[v]] = v
                    count(1, 0)
        outvars = [new.get(v, v) if _is_var(v) else v for v in jaxpr.outvars]
        # the same object where nothing has changed: XLA shares a function that is called twice
        if len(eqns) == len(jaxpr.eqns) and not is_changed:
            return closed
        return _closed_like(closed, jaxpr.replace(eqns=eqns, outvars=outvars))

    def _is_all_manual(self, i: int, eqn: Any) -> bool:
        """Whether each device runs the body of a `shard_map` on its own."""
        return _manual_axes(eqn) >= {*map(str, self.edits[i].sharding.mesh.axis_names)}

    def _edit_inner(
        self, i: int, eqn: Any, site: Site, cotangents: Sequence[bool], manual: frozenset[str]
    ) -> dict[str, Any]:
        inside = site.inside(eqn)
        manual |= _manual_axes(eqn)
        if eqn.primitive.name == 'pallas_call' or self._is_all_manual(i, eqn):
            return eqn.params

        def edited(value: Any) -> Any:
            if isinstance(value, tuple) and any(_is_jaxpr(each) for each in value):
                several = tuple(map(edited, value))
                return value if all(map(operator.is_, several, value)) else several
            if not _is_jaxpr(value):
                return value
            # the inputs of the jaxpr are the last operands, as in `cond`
            flags = cotangents[max(len(cotangents) - len(_open(value).invars), 0) :]
            return self._edit(i, value, inside, flags, manual)

        params = {name: edited(value) for name, value in eqn.params.items()}
        is_same = all(value is eqn.params[name] for name, value in params.items())
        return eqn.params if is_same else params


def _manual_axes(eqn: Any) -> frozenset[str]:
    """The mesh axes over which a `shard_map` is manual. Empty for other equations."""
    if eqn.primitive.name != 'shard_map':
        return frozenset()
    return frozenset(map(str, eqn.params['newly_manual_axes']))


def _constraint(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding,
    manual: frozenset[str],
    n_mapped: int,
) -> Any:
    """Returns the equation of a constraint, whose variables the caller replaces.

    `jax.vmap` adds `n_mapped` axes, at the front.
    """
    entries = spec_axes(sharding.spec)
    n_new = min(n_mapped, len(shape) - len(entries))
    spec = partition_spec([(PartitionSpec.UNCONSTRAINED,)] * n_new + entries)
    struct = jax.ShapeDtypeStruct(shape, dtype)
    if not manual:

        def constrain(x: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, spec))

        closed = jax.make_jaxpr(constrain)(struct)
    else:
        # in a partially manual shard_map, the mesh of a constraint has Manual axes

        def constrain_auto(x: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, spec)

        closed = jax.make_jaxpr(
            jax.shard_map(
                constrain_auto,
                mesh=sharding.mesh,
                in_specs=PartitionSpec(),
                out_specs=PartitionSpec(),
                axis_names={*manual},
                check_vma=False,
            )
        )(struct)
        (outer,) = _open(closed).eqns
        closed = outer.params['jaxpr']
    (eqn,) = _open(closed).eqns
    return eqn


# --- operations on shards -----------------------------------------------------------------------


@dataclass
class _Sharder:
    """Puts operations into a `shard_map`."""

    change: PerDevice
    n_changed: int = 0
    has_failed: bool = False
    frames: Frames = field(default_factory=Frames)

    def edit(self, closed: Any, site: Site) -> Any:
        jaxpr, eqns = _open(closed), list[Any]()
        for eqn in jaxpr.eqns:
            at = site.at(eqn, self.frames.of(eqn))
            if eqn.primitive.name == self.change.primitive and self.change.span in at.frames[:1]:
                eqns.append(self.run_on_shards(eqn))
            elif eqn.primitive.name in ('pallas_call', 'shard_map'):
                eqns.append(eqn)
            else:
                inside = at.inside(eqn)

                def edited(value: Any, inside: Site = inside) -> Any:
                    if isinstance(value, tuple) and any(_is_jaxpr(each) for each in value):
                        several = tuple(map(edited, value))
                        return value if all(map(operator.is_, several, value)) else several
                    return self.edit(value, inside) if _is_jaxpr(value) else value

                params = {name: edited(value) for name, value in eqn.params.items()}
                is_same = all(value is eqn.params[name] for name, value in params.items())
                eqns.append(eqn if is_same else eqn.replace(params=params))
        if all(map(operator.is_, eqns, jaxpr.eqns)):
            return closed
        return _closed_like(closed, jaxpr.replace(eqns=eqns))

    def run_on_shards(self, eqn: Any) -> Any:
        if self.change.along:
            return self.run_in_two_levels(eqn)
        mesh, params = self.change.mesh, dict(eqn.params)
        ins, outs = ([tuple(v.aval.shape) for v in vs] for vs in (eqn.invars, eqn.outvars))
        known = batch_axes(eqn.primitive.name, eqn.params, ins, outs)
        found: list[tuple[BatchAxis, tuple[str, ...]]] = []
        for name, mesh_axes in self.change.axes:
            n, axis = math.prod(mesh.shape[each] for each in mesh_axes), known.get(name)
            sizes = (
                [] if axis is None else [ins[i][d] for i, d in enumerate(axis.ins) if d is not None]
            )
            if axis is not None and axis.groups:
                sizes.append(params[axis.groups])
                params[axis.groups] //= n
            if axis is None or any(size % n for size in sizes):
                self.has_failed = True
                return eqn
            found.append((axis, mesh_axes))

        def spec(shape: Sequence[int], dims: Sequence[int | None]) -> PartitionSpec:
            entries: list[tuple[str, ...]] = [()] * len(shape)
            for d, (_, mesh_axes) in zip(dims, found, strict=True):
                if d is not None:
                    entries[d] = mesh_axes
            return partition_spec(entries)

        summed = tuple(name for axis, mesh_axes in found if axis.is_summed for name in mesh_axes)

        def run(*values: Any) -> Any:
            results = eqn.primitive.bind(*values, **params)
            results = results if eqn.primitive.multiple_results else [results]
            return [jax.lax.psum(each, summed) if summed else each for each in results]

        local = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=tuple(spec(s, [a.ins[i] for a, _ in found]) for i, s in enumerate(ins)),
            out_specs=[spec(s, [a.outs[o] for a, _ in found]) for o, s in enumerate(outs)],
            check_vma=False,
        )
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        (new,) = _open(jax.make_jaxpr(local)(*structs)).eqns
        self.n_changed += 1
        return new.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)

    def run_in_two_levels(self, eqn: Any) -> Any:
        (operand,), mesh, along = eqn.invars, self.change.mesh, self.change.along
        shape = tuple(operand.aval.shape)
        entries = [dict(self.change.axes).get(d, ()) for d in range(len(shape))]
        entries[self.change.dim] = along
        sizes = (math.prod(mesh.shape[name] for name in entry) for entry in entries)
        if any(size % n for size, n in zip(shape, sizes, strict=True)):
            self.has_failed = True
            return eqn
        function = run_in_two_levels(eqn, mesh, entries, self.change.dim)
        struct = jax.ShapeDtypeStruct(shape, operand.aval.dtype)
        (new,) = _open(jax.make_jaxpr(function)(struct)).eqns
        self.n_changed += 1
        return new.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _inner(eqn: Any) -> list[Any]:
    found: list[Any] = []
    for value in eqn.params.values():
        found += filter(_is_jaxpr, value if isinstance(value, tuple) else (value,))
    return [] if eqn.primitive.name == 'pallas_call' else found


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, jex.Jaxpr | jex.ClosedJaxpr)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, 'jaxpr', jaxpr)


def _closed_like(closed: Any, jaxpr: Any) -> Any:
    """Closes `jaxpr` if `closed` is a ClosedJaxpr of JAX before 0.12."""
    if jex.ClosedJaxpr is not jex.Jaxpr and isinstance(closed, jex.ClosedJaxpr):  # type: ignore[reportUnnecessaryComparison]
        return jex.ClosedJaxpr(jaxpr, closed.consts)
    return jaxpr


def _is_var(v: Any) -> bool:
    return not isinstance(v, jex.Literal)


def _is_dropped(v: Any) -> bool:
    return type(v).__name__ == 'DropVar'  # not public


def _has_shape(v: Any, shape: tuple[int, ...]) -> bool:
    return tuple(getattr(v.aval, 'shape', ())) == shape
