"""One jitted program of a `sharded` function: a form of call, over one mesh."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding

from ._describe import describe, describe_named
from ._errors import EinshardError
from ._expression import ELLIPSIS, parse
from ._layout import needs_rank
from ._mesh import AnyMesh, MeshLike, enclosing_mesh, resolve_mesh
from ._parameters import Form
from ._sharding import Placement, find_placement
from ._specs import Spec, array_text, is_none, leaf_specs, path_text


class Stale(Exception):
    """A program is traced for a mesh or for arguments other than those it was resolved for."""


class Program:
    """A function jitted with the shardings that its specs mean, for one form of call.

    Shardings are given to `jax.jit` by prefix where a spec is an expression, and leaf by leaf
    where it looks at the leaves: a function of the path, or an axis behind '...'. What a spec says
    about ranks and sizes is checked while the function is traced: a call that needs no tracing pays
    nothing for it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        form: Form,
        labels: Sequence[str],
        specs: Sequence[Spec],
        out: Spec,
        static: frozenset[str],
        values: Sequence[Any],
        mesh_given: MeshLike | None,
        options: Mapping[str, Any],
    ):
        self.function = function
        self.name = name
        self.form = form
        self.labels = labels
        self.specs = specs
        self.out = out
        self.static = [i for i, label in enumerate(labels) if label in static]
        self.mesh_given = mesh_given
        self.mesh = resolve_mesh(mesh_given)
        self.signature = signature(specs, out, values, self.static)
        self.check(values)
        traced = self._traced()
        self.in_shardings = [
            self._shardings(spec, value, lambda path, leaf, i=i: self._argument(i, path, leaf))
            for i, (spec, value) in enumerate(zip(specs, values, strict=True))
        ]
        dynamic = [s for i, s in enumerate(self.in_shardings) if i not in self.static]
        if any(sharding is not None for sharding in dynamic):
            options = {**options, 'in_shardings': tuple(dynamic)}
        options = {**options, 'static_argnums': tuple(self.static)}
        self.out_shardings = self._out_shardings(jax.jit(traced, **options), values)
        if self.out_shardings is not None:
            options = {**options, 'out_shardings': self.out_shardings}
        self.jitted: Any = jax.jit(traced, **options)

    def is_for(self, values: Sequence[Any]) -> bool:
        """Whether the shardings are those of these arguments too."""
        return self.signature == signature(self.specs, self.out, values, self.static)

    def check(self, values: Sequence[Any]) -> None:
        """Raises for the first argument whose rank or sizes do not fit its spec."""
        for i, (spec, value) in enumerate(zip(self.specs, values, strict=True)):
            if spec is None:
                continue
            for path, leaf, placement in self._placed(spec, value, i):
                try:
                    placement.check(np.shape(leaf))
                except EinshardError as error:
                    raise error.about(array=self._argument(i, path, leaf)) from None

    def place(self, values: Sequence[Any], reshard: bool) -> list[Any] | None:
        """The arguments, those that jit refuses for their placement moved; None if there are none.

        Raises for arrays that are partitioned otherwise, unless `reshard`.
        """
        self.check(values)
        placed = list(values)
        for i, (spec, value) in enumerate(zip(self.specs, values, strict=True)):
            if i in self.static:
                continue
            if spec is None:
                self._check_devices(i, value)
                continue
            leaves, treedef = jtu.tree_flatten(value)
            moved = list(leaves)
            for j, (path, leaf, placement) in enumerate(self._placed(spec, value, i)):
                if not _is_misplaced(leaf, placement.sharding):
                    continue
                whole = len(leaf.sharding.device_set) == 1 or leaf.is_fully_replicated
                if not (whole or reshard):
                    raise self._partitioned_otherwise(i, path, leaf, placement)
                moved[j] = jax.device_put(leaf, placement.sharding)
            if any(new is not old for new, old in zip(moved, leaves, strict=True)):
                placed[i] = jtu.tree_unflatten(treedef, moved)
        return placed if any(n is not o for n, o in zip(placed, values, strict=True)) else None

    def _traced(self) -> Callable[..., Any]:
        def traced(*values: Any) -> Any:
            mesh = resolve_mesh(self.mesh_given)
            if _abstract(mesh) != _abstract(self.mesh):
                raise Stale
            if not self.is_for(values):
                raise Stale
            self.check(values)
            token = enclosing_mesh.set(mesh)
            try:
                n, keywords = self.form.positional, self.form.keywords
                result = self.function(*values[:n], **dict(zip(keywords, values[n:], strict=True)))
            finally:
                enclosing_mesh.reset(token)
            self._check_result(result)
            return result

        # jit names the program and its arguments by these
        traced.__name__ = self.name
        traced.__qualname__ = self.name
        traced.__signature__ = _row_of(self.labels)  # type: ignore[attr-defined]
        return traced

    def _check_result(self, result: Any) -> None:
        if self.out is None:
            return
        for path, leaf, placement in self._placed(self.out, result, None):
            try:
                placement.check(np.shape(leaf))
            except EinshardError as error:
                raise error.about(array=self._result(path, leaf)) from None

    def _placed(
        self, spec: Spec, value: Any, argument: int | None
    ) -> Iterator[tuple[Any, Any, Placement]]:
        """Path, leaf and placement of every leaf that has a spec."""
        where = self._result if argument is None else None
        leaves = jtu.tree_leaves(value)
        try:
            specs = leaf_specs(value, leaves, spec)
        except EinshardError as error:
            label = 'the result' if argument is None else f"parameter '{self.labels[argument]}'"
            raise error.about(of=f'{label} of {self.name}') from None
        for (path, leaf), one in zip(jtu.tree_leaves_with_path(value), specs, strict=True):
            if one is None:
                continue
            try:
                yield path, leaf, find_placement(one, np.ndim(leaf), self.mesh_given, None)
            except EinshardError as error:
                text = where(path, leaf) if where else self._argument(argument or 0, path, leaf)
                raise error.about(array=text) from None

    def _shardings(self, spec: Spec, value: Any, text: Callable[[Any, Any], str]) -> Any:
        """What `jax.jit` is given for a spec: shardings, as a prefix of the argument or whole."""
        if spec is None:
            return None
        if not looks_at_leaves(spec):
            return jtu.tree_map(self._sharding, spec, is_leaf=is_none)
        leaves, treedef = jtu.tree_flatten(value)
        shardings: list[NamedSharding | None] = []
        for i, one in enumerate(leaf_specs(value, leaves, spec)):
            try:
                n_dims = np.ndim(leaves[i])
                found = None if one is None else find_placement(one, n_dims, self.mesh_given, None)
            except EinshardError as error:
                raise error.about(array=text(*jtu.tree_leaves_with_path(value)[i])) from None
            shardings.append(None if found is None else found.sharding)
        return jtu.tree_unflatten(treedef, shardings)

    def _sharding(self, spec: str | None) -> NamedSharding | None:
        try:
            found = None if spec is None else find_placement(spec, None, self.mesh_given, None)
            return None if found is None else found.sharding
        except EinshardError as error:
            raise error.about(function=self.name) from None

    def _out_shardings(self, jitted: Any, values: Sequence[Any]) -> Any:
        if not looks_at_leaves(self.out):
            return self._shardings(self.out, None, self._result)
        # the one case that needs the result's shapes beforehand; jit keeps what it traces here
        return self._shardings(self.out, jitted.eval_shape(*values), self._result)

    def _argument(self, i: int, path: Sequence[Any], leaf: Any) -> str:
        inside = f'/{path_text(path)}' if path else ''
        return f"{array_text(leaf)}, parameter '{self.labels[i]}{inside}' of {self.name}"

    def _result(self, path: Sequence[Any], leaf: Any) -> str:
        inside = f" '{path_text(path)}'" if path else ''
        return f'{array_text(leaf)}, result{inside} of {self.name}'

    def _partitioned_otherwise(
        self, i: int, path: Sequence[Any], leaf: Any, placement: Placement
    ) -> EinshardError:
        names = placement.expression.names
        known = None if ELLIPSIS in names else names
        is_placed = leaf.sharding
        if isinstance(is_placed, NamedSharding):
            text = describe_named(is_placed, leaf.ndim, known)
        else:
            text = describe(leaf)
        terms = [term for term in placement.expression.right if term.placed]
        return placement.expression.error(
            f"the argument is partitioned otherwise: it is '{text}'",
            terms,
            array=self._argument(i, path, leaf),
            to_move_it='einshard(x, ...) before the call, or sharded(..., reshard=True)',
        )

    def _check_devices(self, i: int, value: Any) -> None:
        """Raises where an argument without a spec is held by other devices than the mesh."""
        if isinstance(self.mesh, AbstractMesh) or not any(self.in_shardings):
            return
        for path, leaf in jtu.tree_leaves_with_path(value):
            if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.committed:
                continue
            if leaf.sharding.device_set != set(self.mesh.devices.flat):
                raise EinshardError(
                    f'an argument without a spec is held by {len(leaf.sharding.device_set)} of '
                    f'the {self.mesh.size} devices',
                    facts={
                        'array': self._argument(i, path, leaf),
                        'it is': describe(leaf),
                        'give': f"a spec: {self.labels[i]}='... -> * ...' puts it on every device",
                    },
                )


def looks_at_leaves(spec: Spec) -> bool:
    """Whether the shardings of a spec depend on the leaves: their ranks, paths or shapes."""
    return any(
        needs_rank(parse(one)) if isinstance(one, str) else one is not None
        for one in jtu.tree_leaves(spec, is_leaf=is_none)
    )


def signature(
    specs: Sequence[Spec], out: Spec, values: Sequence[Any], static: Sequence[int]
) -> Any:
    """What the shardings depend on: structure, shapes and dtypes of the arguments looked at."""
    all_of_them = looks_at_leaves(out)
    looked_at: list[Any] = []
    for i, (spec, value) in enumerate(zip(specs, values, strict=True)):
        if all_of_them and i in static:
            looked_at.append(value)
        elif all_of_them or looks_at_leaves(spec):
            leaves, treedef = jtu.tree_flatten(value)
            looked_at.append((treedef, tuple(map(_shape_and_dtype, leaves))))
    return tuple(looked_at)


def _shape_and_dtype(leaf: Any) -> Any:
    """The same for a value and for its tracer."""
    try:
        aval: Any = jax.typeof(leaf)
    except TypeError:  # no array: jit will say so
        return type(leaf)
    return aval.shape, aval.dtype


def _abstract(mesh: AnyMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def _is_misplaced(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether jit would refuse an argument; it places uncommitted arrays and host data itself."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.committed:
        return False
    return not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def _row_of(labels: Sequence[str]) -> inspect.Signature:
    """A signature of positional parameters called as the labels say, as far as they can be."""
    names: list[str] = []
    for label in labels:
        name = re.sub(r'\W', '_', label.removesuffix(']'))
        while name in names or keyword.iskeyword(name):
            name += '_'
        names.append(name)
    only = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, only) for name in names])
