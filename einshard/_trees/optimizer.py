"""Specs for the states of optimizers: moments live as the parameters that they belong to."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding

from .._cache import cached
from .._errors import EinshardError, plural, quoted
from .._notation.expression import axis_letters, parse
from .._notation.layout import axis_positions
from .._sharding.context import Context, current_context, mesh_scope
from .._sharding.describe import find_expression
from .._sharding.leaf_spec import REPLICATED, AnySpec, LeafSpec
from .._sharding.mesh import (
    AnyMesh,
    MeshLike,
    is_device_mesh,
    mesh_fact,
    partition_spec,
    sizes_of,
    spec_axes,
)
from .._sharding.resolve import resolve
from .._text import array_text, first_of
from .paths import leaf_paths, leaf_text
from .rules import Rules
from .specs import Spec, check_specs, leaf_specs
from .table import Table, make_table

Shape: TypeAlias = tuple[int, ...]
Zero: TypeAlias = Literal[True] | tuple[str, ...]  # every mesh axis, or those of these names
# One way to follow a parameter: for each axis of a leaf the axis that it is of the parameter.
Way: TypeAlias = tuple[int | None, ...]
MeshAxes: TypeAlias = tuple[Any, ...]


def for_optimizer(
    params: Any, spec: Spec, *, zero: bool | str | Sequence[str] = False, default: Spec = ...
) -> StateSpec:
    """A spec for the state of an optimizer: moments live as their parameters do.

        >>> params = {'up': np.ones((64, 256)), 'down': np.ones((256, 64))}
        >>> rules = Rules([('^up', 'd f -> * d f2'), ('^down', 'f d -> * f2 d')])
        >>> state = {'count': np.zeros(()), 'mu': params, 'v_row': {'up': np.ones(64)}}
        >>> describe(einshard(state, for_optimizer(params, rules))['mu'])
        {'down': 'a b -> 8 a2 b', 'up': 'a b -> 8 a b2'}
        >>> describe(einshard(state, for_optimizer(params, rules, zero=True))['mu'])
        {'down': 'a b -> b8 a2', 'up': 'a b -> a8 b2'}

    A leaf follows the parameter in whose path its own path ends, as '0/mu/mlp/kernel' ends in
    'mlp/kernel'; of several parameters, that of the longest path. What it gets depends on its
    shape:

    * that of the parameter: the spec of the parameter;
    * with axes left out, as in the factored moments of Adafactor: that spec without them, where
      the devices that cut them hold replicas. If sizes do not tell which axes these are, and it
      makes a difference, `v_row` and `v_col` in the path mean what they mean in optax;
    * with axes added in front, as in the history of L-BFGS: these are not cut.

    Leaves of one element, such as counters, are on every device. So one spec places the
    state of any chain of transformations and, without `zero=`, a train state that holds parameters
    and moments. It goes wherever `Rules` go, and has a `table` as they do.

    With `zero=`, devices that hold replicas of a parameter share its moments out (ZeRO, stage 1).
    The mesh axes that do not cut the parameter are given to the array axis that is largest on a
    device, of those that they divide; if they divide none, as many of them as do, and then the
    others. What nothing takes stays replicated. They come behind the mesh axes that cut an array
    axis already: each device keeps a part of what it keeps of the parameter, and a step has only
    the new parameters to gather. In expressions by count a replica is cut in its place instead,
    first along axes that are not cut to the right of it, for which the same is true.

    Parameters in one tree with their moments would be shared out too. Rules tell them apart:
    `Rules([('opt_state/', for_optimizer(params, rules, zero=True))], default=rules)`; without '^',
    since paths may begin with a place among several results.

    Args:
        params: the parameters: arrays, or the shapes of `jax.eval_shape`. Only their paths, shapes
            and dtypes are kept.
        spec: the spec of the parameters: an expression, `Rules`, a function, or a tree of those.
        zero: True to share moments out over every mesh axis that is free, or the names of those
            that may be used, where there is a mesh with names.
        default: the spec of leaves that follow no parameter; where left out, they are an error.

    Returns:
        A spec, a function `(path, leaf) -> spec`.

    Raises:
        EinshardError: `spec` or `default` is no spec, or `spec` no prefix of `params`. In use: a
            leaf follows no parameter, or there are several ways to follow it; a spec does not fit
            its parameter; the mesh has no axis that `zero=` names.
    """
    return StateSpec(params, spec, zero, default)


class StateSpec:
    """Where the leaves of an optimizer's state live: a spec that `for_optimizer` makes."""

    def __init__(self, params: Any, spec: Spec, zero: bool | str | Sequence[str], default: Spec):
        self._params = jtu.tree_map(_without_values, params)
        self._leaves: list[Any] = jtu.tree_leaves(self._params)
        self._paths = leaf_paths(self._params)
        self._spec = spec
        self._zero: Zero = _checked(zero)
        self._default = None if default is ... else Rules([], default=default)
        try:
            check_specs(spec)
            # raises where it is no prefix; what functions say depends on the mesh in use
            leaf_specs(self._params, self._leaves, jtu.tree_map(lambda _: None, spec))
        except EinshardError as error:
            raise error.about(of='the parameters of for_optimizer') from None
        arrays = [i for i, leaf in enumerate(self._leaves) if _shape_of(leaf) is not None]
        self._by_path = {self._paths[i]: i for i in arrays}
        self._followed: dict[tuple[str, Shape], tuple[int, tuple[Way, ...]] | None] = {}
        self._known: tuple[Context, Sequence[AnySpec | None]] | None = None

    def __repr__(self) -> str:
        zero = f', zero={self._zero!r}' if self._zero else ''
        return f'for_optimizer({plural(len(self._by_path), "parameter")}, {self._spec!r}{zero})'

    def __getstate__(self) -> dict[str, Any]:
        # what was found for a mesh holds its devices, which neither pickle nor copy
        return {**self.__dict__, '_followed': {}, '_known': None}

    def __call__(self, path: str, leaf: Any) -> AnySpec | None:
        """The spec of one leaf."""
        return self.for_leaves([path], [leaf])[0]

    def for_leaves(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[AnySpec | None]:
        """The specs of many leaves; one error for all that follow no parameter."""
        return [spec for _, spec in self.find_all(paths, leaves)]

    def table(self, tree: Any, *, mesh: MeshLike | None = None) -> Table:
        """What becomes of a state, leaf by leaf, with totals, as `Rules.table` has it."""
        context = current_context(mesh)
        with mesh_scope(context.mesh):
            found = self.find_all(leaf_paths(tree), jtu.tree_leaves(tree))
        return make_table(tree, found, [], context)

    def find_all(
        self, paths: Sequence[str], leaves: Sequence[Any]
    ) -> list[tuple[str, AnySpec | None]]:
        """What each leaf follows, or why it follows nothing, and the spec that comes of it."""
        context = current_context(None)
        _check_mesh_axes(self._zero, context)
        specs = self._specs(context)
        found: list[tuple[str, AnySpec | None]] = []
        lost: list[str] = []
        for path, leaf in zip(paths, leaves, strict=True):
            shape = _shape_of(leaf)
            follows = None if shape is None else self._follow(path, shape)
            if follows:
                i, ways = follows
                spec = self._follower(path, leaf, i, ways, specs[i], context)
                found.append((f'as {self._paths[i]}', spec))
            elif shape is None:
                found.append(('no array', None))
            elif math.prod(shape) == 1:
                found.append(('scalar', REPLICATED))
            elif self._default:
                found.append(('default', self._default(path, leaf)))
            else:
                lost.append(self._lost(path, leaf))
        if lost:
            raise self._no_parameter(lost)
        return found

    def _specs(self, context: Context) -> Sequence[AnySpec | None]:
        """The specs of the parameters, kept until the mesh or the axis rules are others."""
        known = self._known
        if known is None or known[0] is not context:
            try:
                known = context, leaf_specs(self._params, self._leaves, self._spec)
            except EinshardError as error:
                raise error.about(of='the parameters of for_optimizer') from None
            self._known = known
        return known[1]

    def _follow(self, path: str, shape: Shape) -> tuple[int, tuple[Way, ...]] | None:
        """The number of the parameter that a leaf follows, and in which ways it may do so."""
        key = path, shape
        if key not in self._followed:
            self._followed[key] = next(self._followable(path, shape), None)
        return self._followed[key]

    def _followable(self, path: str, shape: Shape) -> Iterator[tuple[int, tuple[Way, ...]]]:
        for end in _ends(path):
            i = self._by_path.get(end)
            if i is not None:
                ways = _ways(self._leaves[i].shape, shape, path.removesuffix(end))
                if ways:
                    yield i, ways

    def _follower(
        self,
        path: str,
        leaf: Any,
        i: int,
        ways: tuple[Way, ...],
        spec: AnySpec | None,
        context: Context,
    ) -> AnySpec | None:
        """The spec of a leaf that follows the i-th parameter, whose spec is given."""
        whole = self._leaves[i]
        if spec is None or (not self._zero and leaf.shape == whole.shape):
            return spec
        try:
            found = _followers(spec, whole.shape, tuple(leaf.shape), ways, self._zero, context)
        except EinshardError as error:
            raise error.about(array=leaf_text(self._paths[i], whole, 'parameter')) from None
        if len(found) == 1:
            return found[0]
        raise EinshardError(
            'the sizes do not tell which axes of its parameter an array has',
            facts={
                'array': leaf_text(path, leaf),
                'parameter': leaf_text(self._paths[i], whole, 'parameter'),
                'may be': ' or '.join(f"'{text}'" for text in found),
                'give': 'a function (path, leaf) -> spec that knows, and asks this one otherwise',
            },
        )

    def _lost(self, path: str, leaf: Any) -> str:
        near = next((self._by_path[end] for end in _ends(path) if end in self._by_path), None)
        text = f"'{path}' {array_text(leaf)}"
        if near is None:
            return text
        return f'{text} (its parameter is {array_text(self._leaves[near])})'

    def _no_parameter(self, lost: Sequence[str]) -> EinshardError:
        some = [f"'{path}' {array_text(self._leaves[i])}" for path, i in self._by_path.items()]
        return EinshardError(
            f'{plural(len(lost), "array")} {"follows" if len(lost) == 1 else "follow"} '
            'no parameter',
            facts={
                'arrays': first_of(lost, 8),
                'parameters': first_of(some, 3) or 'none',
                'give': "default=, the spec of such arrays: default='... -> * ...'",
            },
        )


def _without_values(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, 'dtype') else leaf


def _shape_of(leaf: Any) -> Shape | None:
    """The shape of an array or a struct; None for anything else, numbers of Python too."""
    # a Mesh has a shape too, but is no array
    return tuple(leaf.shape) if hasattr(leaf, 'dtype') else None


def _ends(path: str) -> Iterator[str]:
    """'a/b/c' -> 'a/b/c', 'b/c', 'c', ''"""
    yield path
    while path:
        path = path.partition('/')[2]
        yield path


def _ways(whole: Shape, shape: Shape, prefix: str) -> tuple[Way, ...]:
    """How an array of a shape may have come of a parameter; `prefix` is before that in its path."""
    n_new = len(shape) - len(whole)
    if n_new > 0:
        same = shape[n_new:] == whole
        return ((None,) * n_new + tuple(range(len(whole))),) if same else ()
    if math.prod(shape) == 1 and shape != whole:
        return ()
    kept = itertools.combinations(range(len(whole)), len(shape))
    ways = tuple(axes for axes in kept if tuple(whole[axis] for axis in axes) == shape)
    names = prefix.split('/')
    if len(ways) > 1 and ('v_row' in names or 'v_col' in names):
        # optax: v_row lacks the largest axis, v_col the second; of equals, as argsort has them
        lacks = int(np.argsort(whole)[-1 if 'v_row' in names else -2])
        way = tuple(axis for axis in range(len(whole)) if axis != lacks)
        return (way,) if way in ways else ways
    return ways


_REPLICATED = parse(REPLICATED)


@cached
def _followers(
    spec: AnySpec, whole: Shape, shape: Shape, ways: tuple[Way, ...], zero: Zero, context: Context
) -> tuple[LeafSpec, ...]:
    """The specs of a leaf that follows a parameter of shape `whole`, in some ways.

    One for each placement: most often all ways come to the same.
    """
    placement = resolve(spec, whole, context)
    mesh, memory_kind = placement.sharding.mesh, placement.sharding.memory_kind
    cuts = spec_axes(placement.sharding.spec)
    cuts += [()] * (len(whole) - len(cuts))
    free = [axis for axis in mesh.axis_names if axis not in itertools.chain(*cuts)]
    free = [axis for axis in free if zero is True or str(axis) in zero]
    names = {axis: name for name, axis in axis_positions(placement.expression, len(whole)).items()}
    found: dict[NamedSharding, LeafSpec] = {}
    for way in ways:
        left = [() if axis is None else cuts[axis] for axis in way]
        shared = _share_out(left, shape, free, mesh)
        sharding = NamedSharding(mesh, partition_spec(shared), memory_kind=memory_kind)
        letters = (letter for letter in axis_letters() if letter not in names.values())
        called = [names[axis] if axis in names else next(letters) for axis in way]
        expression = find_expression(sharding, len(shape), called) if any(shared) else _REPLICATED
        if expression is None:
            raise EinshardError(
                'the mesh has axes that an expression cannot name', facts={'mesh': mesh_fact(mesh)}
            )
        found.setdefault(sharding, LeafSpec(expression, memory_kind))
    return tuple(found.values())


def _share_out(
    cuts: Sequence[MeshAxes], shape: Shape, free: Sequence[Any], mesh: AnyMesh
) -> list[MeshAxes]:
    """Cuts an array over mesh axes that hold replicas: as many at a time as one array axis takes.

    A device is to keep a part of what it has, so the free mesh axes come behind those that cut an
    axis already. The expressions of the one mesh know device order only. There, axes go first
    that are not cut behind the replicas, then the one cut next to them: where a parameter
    float32[256,1024] was 'd f -> * d f2' on 16 devices, moments 'f8 d f2' made XLA sum gradients of
    the whole shape and gather activations; 'd8 f2' added the gathering of new parameters alone.
    """
    sizes = sizes_of(mesh)
    free = [axis for axis in free if sizes.get(str(axis), 1) > 1]
    in_order = is_device_mesh(mesh)
    place = {axis: i if in_order else 0 for i, axis in enumerate(mesh.axis_names)}
    shared = list(cuts)
    while free:
        choices: list[tuple[int, int, int, int]] = []
        for i, (size, axes) in enumerate(zip(shape, shared, strict=True)):
            on_device = size // _parts(axes, sizes)
            behind = (place[axis] for axis in axes if place[axis] > place[free[0]])
            next_to = min(behind, default=-1)
            for n in range(1, len(free) + 1):
                if on_device and on_device % _parts(free[:n], sizes) == 0:
                    choices.append((next_to, -n, -on_device, i))
        n = 1
        if choices:
            _, minus_n, _, i = min(choices)
            n = -minus_n
            shared[i] = tuple(sorted((*shared[i], *free[:n]), key=lambda axis: place[axis]))
        free = free[n:]
    return shared


def _parts(axes: Sequence[Any], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[str(axis)] for axis in axes)


def _checked(zero: object) -> Zero:
    if isinstance(zero, bool):
        return zero or ()
    names = (zero,) if isinstance(zero, str) else zero
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise EinshardError(
            f'zero= is True or mesh axes, not {zero!r}',
            facts={'as in': "zero=True, zero='data', zero=('data', 'fsdp')"},
        )
    return tuple(names)


def _check_mesh_axes(zero: Zero, context: Context) -> None:
    """Raises where `zero=` names mesh axes that are not there."""
    if zero is True or not zero:
        return
    mesh = context.mesh
    if mesh is None:
        raise EinshardError(
            f'zero= names {quoted(zero)}, but there is no mesh',
            facts={'give': "mesh=, or enter one: 'with jax.set_mesh(mesh):'; or zero=True"},
        )
    sizes = sizes_of(mesh)
    for name in zero:
        if name not in sizes:
            near = difflib.get_close_matches(name, sizes, n=1)
            raise EinshardError(
                f"the mesh has no axis '{name}', which zero= names",
                facts={'mesh': mesh_fact(mesh)},
                fix=f"zero='{near[0]}'" if near and len(zero) == 1 else None,
            )
