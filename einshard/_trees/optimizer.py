"""for_optimizer: shards optimizer states like the parameters."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax.tree_util as jtu
import numpy as np

from .._cache import remember
from .._errors import EinshardError, plural, public
from .._sharding.context import Context
from .._sharding.leaf_spec import REPLICATED, AnySpec
from .._sharding.mesh import MeshLike
from .._sharding.scopes import current_context
from .._text import array_text, first_of
from .free_axes import ZERO, AxisMap, MeshAxes, Shape, check_mesh_axes, read_mesh_axes, state_specs
from .paths import leaf_paths, leaf_text, path_and_array
from .rules import Rules
from .specs import ArgumentOrder, Spec, check_specs, leaf_specs, meshes_of, shape_of, without_values

if TYPE_CHECKING:
    from .table import Table


@public
def for_optimizer(
    params: Any, spec: Spec, *, zero: bool | str | Sequence[str] = False, default: Spec = ...
) -> StateSpec:
    """Returns a spec for an optimizer state: moments are sharded like their parameters.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import Rules, describe, device_mesh, einshard, for_optimizer
        >>> mesh = device_mesh(jax.sharding.AbstractMesh((16,), ('d0',)))
        >>> params = {'w': jax.ShapeDtypeStruct((64, 256), np.float32)}
        >>> state = {'count': jax.ShapeDtypeStruct((), np.int32), 'mu': params}
        >>> rules = Rules([('w$', 'd f -> * d f2')])
        >>> describe(einshard(state, for_optimizer(params, rules), mesh=mesh)['mu'])
        {'w': 'a b -> 8 a b2'}
        >>> describe(einshard(state, for_optimizer(params, rules, zero=True), mesh=mesh)['mu'])
        {'w': 'a b -> a8 b2'}

    The path of a moment contains the path of its parameter: '0/mu/mlp/kernel' and 'mlp/kernel/mu'
    belong to 'mlp/kernel'. If several parameters fit by path and shape, the longest path is used;
    of equally long ones, the last in the moment's path. The spec of a moment depends on its shape:

    * Same shape as the parameter: the spec of the parameter.
    * Fewer axes, as in Adafactor: the spec of the parameter without the missing axes. If several
      axes have the same size, the optax keys `v_row` and `v_col` in the path decide.
    * More axes in front, as in L-BFGS: the added axes are not sharded.

    Other arrays with one element, such as counters, are replicated. Use the spec wherever `Rules`
    are accepted; it also has a `table` method.

    With `zero=`, moments are also sharded over the mesh axes that replicate the parameter (ZeRO,
    stage 1). Where possible, they become minor to the mesh axes that already shard an array axis,
    so that a step gathers only the new parameters. If several array axes qualify, the one with the
    largest shards is used.

    If parameters and moments are in one pytree, apply `zero=` to the moments only, with rules:
    `Rules([('opt_state/', for_optimizer(params, rules, zero=True))], default=rules)`.

    Args:
        params: the parameters, as arrays or ShapeDtypeStructs. Only their paths, shapes and dtypes
            are kept.
        spec: the spec of the parameters: an expression, `Rules`, a function, or a pytree of these.
        zero: True to use all mesh axes that replicate the parameter, or the names of mesh axes.
        default: the spec of arrays that match no parameter. If omitted, such an array is an error.

    Returns:
        A function `(path, leaf) -> spec`.

    Raises:
        EinshardError: an argument is invalid, or `spec` is not a prefix of `params`. When applied:
            an array matches no parameter, its axes match the parameter in several ways, a spec does
            not fit its parameter, or the mesh lacks an axis in `zero=`.
    """
    return StateSpec(params, spec, zero, default)


_ORDER = ArgumentOrder(
    'for_optimizer takes the model parameters first, then their spec', 'for_optimizer(params, spec)'
)


class StateSpec:
    """The spec of an optimizer state, made by `for_optimizer`."""

    def __init__(self, params: Any, spec: Spec, zero: bool | str | Sequence[str], default: Spec):
        self._params = jtu.tree_map(without_values, params)
        self._leaves: list[Any] = jtu.tree_leaves(self._params)
        self._paths = leaf_paths(self._params)
        self._spec = spec
        self.meshes = meshes_of([spec, default])
        self._zero: MeshAxes = () if zero is False else read_mesh_axes(zero, ZERO)
        self._default = None if default is ... else Rules([], default=default)
        check_specs(spec, _ORDER)
        # check only that `spec` is a prefix. Functions in it are called later, because their
        # results may depend on the mesh in context
        self._specs_of_parameters(jtu.tree_map(lambda _: None, spec))
        arrays = [i for i, leaf in enumerate(self._leaves) if shape_of(leaf) is not None]
        self._by_path: dict[str, int] = {}
        for i in arrays:
            if self._by_path.setdefault(self._paths[i], i) != i:
                raise EinshardError(
                    f"two parameters have the path '{self._paths[i]}'",
                    code='rules',
                    facts={'instead': 'rename one of their keys'},
                )
        self._matches: dict[tuple[str, Shape], tuple[int, tuple[AxisMap, ...]] | None] = {}
        self._latest: tuple[Context, Sequence[AnySpec | None]] | None = None

    def __repr__(self) -> str:
        zero = f', zero={self._zero!r}' if self._zero else ''
        return f'for_optimizer({plural(len(self._by_path), "parameter")}, {self._spec!r}{zero})'

    def __getstate__(self) -> dict[str, Any]:
        # without the caches: they contain devices, which cannot be pickled or copied
        return {**self.__dict__, '_matches': {}, '_latest': None}

    def __call__(self, path: str, leaf: Any) -> AnySpec | None:
        return self.for_leaves([path], [leaf])[0]

    def for_leaves(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[AnySpec | None]:
        return [spec for _, spec in self.find_all(paths, leaves)]

    def table(self, tree: Any, *, mesh: MeshLike | None = None) -> Table:
        """Shows how each leaf of an optimizer state is sharded, with totals, like `Rules.table`."""
        from .table import make_table  # with pages and HTML, which other uses do not need

        return make_table(self, tree, mesh)

    def find_all(
        self, paths: Sequence[str], leaves: Sequence[Any]
    ) -> list[tuple[str, AnySpec | None]]:
        """Returns a (rule, spec) pair for each leaf.

        The rule is 'scalar', 'default', 'not an array', or 'as w' for a moment of parameter w.
        """
        context = current_context(None)
        check_mesh_axes(self._zero, context, ZERO)
        latest = self._latest  # read once, because other threads may replace it
        if latest is None or latest[0] is not context:
            latest = self._latest = context, self._specs_of_parameters(self._spec)
        specs = latest[1]
        result: list[tuple[str, AnySpec | None]] = []
        unmatched: list[str] = []
        for path, leaf in zip(paths, leaves, strict=True):
            shape = shape_of(leaf)
            parameter = None if shape is None else self._find_parameter(path, shape)
            if parameter:
                i, axis_maps = parameter
                spec = self._spec_of(path, leaf, i, axis_maps, specs[i], context)
                result.append((f'as {self._paths[i]}', spec))
            elif shape is None:
                result.append(('not an array', None))
            elif math.prod(shape) == 1:
                result.append(('scalar', REPLICATED))
            elif self._default:
                result.append(('default', self._default(path, leaf)))
            else:
                found = (self._by_path[x] for x, _ in _subpaths(path) if x in self._by_path)
                i = next(found, None)
                of = '' if i is None else f' (its parameter is {array_text(self._leaves[i])})'
                unmatched.append(f'{path_and_array(path, leaf)}{of}')
        if unmatched:
            known = [path_and_array(path, self._leaves[i]) for path, i in self._by_path.items()]
            verb = 'matches' if len(unmatched) == 1 else 'match'
            raise EinshardError(
                f'{plural(len(unmatched), "array")} {verb} no parameter by path and shape',
                code='rules',
                facts={
                    'arrays': first_of(unmatched, 8),
                    'parameters': first_of(known, 3) or 'none',
                    'try': "default='... -> * ...' in for_optimizer, to replicate such arrays",
                },
            )
        return result

    def _specs_of_parameters(self, spec: Spec) -> Sequence[AnySpec | None]:
        try:
            return leaf_specs(self._params, self._leaves, spec)
        except EinshardError as error:
            raise error.about(spec_of='the model parameters, in for_optimizer') from None

    def _find_parameter(self, path: str, shape: Shape) -> tuple[int, tuple[AxisMap, ...]] | None:
        """Returns the index of a state array's parameter, and the axis maps that fit the shapes."""
        key = path, shape
        try:
            return self._matches[key]
        except KeyError:  # not `in`, because another thread may empty the cache
            pass
        for param_path, other_keys in _subpaths(path):
            i = self._by_path.get(param_path)
            axis_maps = () if i is None else _axis_maps(self._leaves[i].shape, shape, other_keys)
            if i is not None and axis_maps:
                return remember(self._matches, key, (i, axis_maps))
        return remember(self._matches, key, None)

    def _spec_of(
        self,
        path: str,
        leaf: Any,
        i: int,
        axis_maps: tuple[AxisMap, ...],
        spec: AnySpec | None,
        context: Context,
    ) -> AnySpec | None:
        """Returns the spec of a state array. Its parameter has index `i` and spec `spec`."""
        parameter = self._leaves[i]
        if spec is None or (not self._zero and leaf.shape == parameter.shape):
            return spec
        shape = tuple(leaf.shape)
        try:
            candidates = state_specs(spec, parameter.shape, shape, axis_maps, self._zero, context)
        except EinshardError as error:
            raise error.about(array=leaf_text(self._paths[i], parameter, 'parameter')) from None
        if len(candidates) == 1:
            return candidates[0]
        size = next(size for size in shape if parameter.shape.count(size) > 1)
        raise EinshardError(
            f"ambiguous: several axes of parameter '{self._paths[i]}' have size {size}",
            code='rules',
            facts={
                'array': leaf_text(path, leaf),
                'parameter': leaf_text(self._paths[i], parameter, 'parameter'),
                'could be': ' or '.join(f"'{text}'" for text in candidates),
                'instead': f"Rules([(r'{re.escape(path)}$', spec), ('', for_optimizer(...))]), "
                'where spec is one of the specs above'
                if path
                else 'pass one of the specs above for this array',
            },
        )


def _subpaths(path: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields (subpath, other keys) pairs. The subpaths of 'a/b' are 'a/b', 'b', 'a' and ''."""
    keys = path.split('/')
    for n in range(len(keys), 0, -1):
        for start in range(len(keys) - n, -1, -1):
            end = start + n
            yield '/'.join(keys[start:end]), (*keys[:start], *keys[end:])
    if path:
        yield '', keys


def _axis_maps(param_shape: Shape, shape: Shape, other_keys: Sequence[str]) -> tuple[AxisMap, ...]:
    """Finds the possible maps from axes of a state array to axes of its parameter.

    `other_keys` are the keys in the path of the state array that are not in the parameter's path.
    """
    n_new = len(shape) - len(param_shape)
    if n_new > 0:
        fits = shape[n_new:] == param_shape
        return ((None,) * n_new + tuple(range(len(param_shape))),) if fits else ()
    if math.prod(shape) == 1 and shape != param_shape:
        return ()
    choices = itertools.combinations(range(len(param_shape)), len(shape))
    fitting = tuple(axes for axes in choices if tuple(param_shape[axis] for axis in axes) == shape)
    if len(fitting) > 1 and ('v_row' in other_keys or 'v_col' in other_keys):
        # optax: v_row lacks the largest axis and v_col the second largest, in argsort order
        missing = int(np.argsort(param_shape)[-1 if 'v_row' in other_keys else -2])
        axis_map = tuple(axis for axis in range(len(param_shape)) if axis != missing)
        return (axis_map,) if axis_map in fitting else fitting
    return fitting
