"""One jitted program of a `sharded` function: a form of call, over one mesh."""

from __future__ import annotations

import inspect
import keyword
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from ._agreement import Intention, check_same
from ._constraint import constrain, has_type
from ._describe import describe, describe_in
from ._errors import EinshardError
from ._mesh import Around, MeshLike, around, is_tracing, resolve_mesh
from ._parameters import Form
from ._placement import put
from ._promises import Allowed, Guarded
from ._sharding import Placement, find_fitting, find_mesh, find_placement
from ._signals import Stale, Untyped
from ._signature import abstract_mesh, is_committed, looks_at_leaves, placements, same_shardings
from ._specs import Spec, array_text, check_visible, is_none, leaf_specs, path_text


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
        promise: Allowed | None,
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
        self._looks_out = looks_at_leaves(out)
        self.check(values)
        traced = self._traced()
        self.in_shardings = [
            self._shardings(spec, value, i)
            for i, (spec, value) in enumerate(zip(specs, values, strict=True))
        ]
        dynamic = [s for i, s in enumerate(self.in_shardings) if i not in self.static]
        if any(sharding is not None for sharding in dynamic):
            options = {**options, 'in_shardings': tuple(dynamic)}
            if self.mesh.size == 1:
                promise = None  # a program that is held to one device communicates with none
        options = {**options, 'static_argnums': tuple(self.static)}
        self.jitted: Any = None  # while the result's shapes are asked for
        self.out_shardings = self._out_shardings(jax.jit(traced, **options), values)
        if self.out_shardings is not None:
            options = {**options, 'out_shardings': self.out_shardings}
        self.jitted = jax.jit(traced, **options)
        self._guarded = None if promise is None else Guarded(name, traced, options, promise)
        # what calls take
        self.called: Any = self.jitted if self._guarded is None else self._guarded.call
        # JAX compiles anew for arguments without a spec that are placed otherwise, and traces
        # nothing: under a promise a program is for one placement of these
        everyone = range(len(values))
        self.unplaced = [] if promise is None else [i for i in everyone if self._is_unplaced(i)]
        self.placements = placements(values, self.unplaced)
        self.tried = False

    def run(self, *values: Any) -> Any:
        """Calls it. Under a promise the first program is read before, unless part of another."""
        guarded = self._guarded
        if guarded is None or is_tracing():
            return self.jitted(*values)
        if guarded.unread:
            with guarded.lock:
                if guarded.unread:
                    guarded.read(values)
        return guarded.call(*values)

    def clear_cache(self) -> None:
        self.jitted.clear_cache()
        if self._guarded is not None:
            self._guarded.clear_cache()

    def _is_unplaced(self, i: int) -> bool:
        """Whether an argument, or a part of it, has no spec."""
        shardings = jtu.tree_leaves(self.in_shardings[i], is_leaf=is_none)
        return i not in self.static and any(map(is_none, shardings))

    def places(self, values: Sequence[Any]) -> bool:
        """Whether the shardings of the arguments are those of these too, whatever their shapes."""
        rows = zip(self.specs, values, self.in_shardings, strict=True)
        return all(
            same_shardings(self._shardings(spec, value, i), shardings)
            for i, (spec, value, shardings) in enumerate(rows)
            if looks_at_leaves(spec)
        )

    def is_for(self, values: Sequence[Any]) -> bool:
        """Whether the shardings of arguments and result are those of a call with these."""
        if not self.places(values) or self.placements != placements(values, self.unplaced):
            return False
        if self._looks_out:
            try:
                self._shapes(self.jitted, values)
            except Stale:
                return False
        return True

    def check(self, values: Sequence[Any]) -> None:
        """Raises for the first argument whose rank or sizes do not fit its spec."""
        for i, (spec, value) in enumerate(zip(self.specs, values, strict=True)):
            if spec is not None:
                deque(self._placed(spec, value, i), maxlen=0)

    def place(
        self, values: Sequence[Any], reshard: bool, running: bool, uncommitted: bool = False
    ) -> list[Any] | None:
        """The arguments, those that jit refuses for their placement moved; None if there are none.

        `uncommitted` ones, which jit places itself, only if asked. Raises for arrays that are
        partitioned otherwise, unless `reshard`; and, where all processes are `running` the program,
        for one that each of them has to itself, if these are not the same.
        """
        self.check(values)
        placed = list(values)
        spread: list[tuple[Intention, Any]] = []
        for i, (spec, value) in enumerate(zip(self.specs, values, strict=True)):
            if i in self.static:
                continue
            if spec is None:
                self._check_devices(i, value)
                continue
            leaves, treedef = jtu.tree_flatten(value)
            moved = list(leaves)
            for j, (path, leaf, placement) in enumerate(self._placed(spec, value, i)):
                if _is_misplaced(leaf, placement.sharding):
                    whole = len(leaf.sharding.device_set) == 1 or leaf.is_fully_replicated
                    if not (whole or reshard):
                        raise self._partitioned_otherwise(i, path, leaf, placement) from None
                    moved[j] = _moved(leaf, placement.sharding)
                elif uncommitted and isinstance(leaf, Tracer):
                    moved[j] = constrain(leaf, placement)
                elif uncommitted and isinstance(leaf, jax.ShapeDtypeStruct):
                    moved[j] = leaf.update(sharding=placement.sharding)
                elif uncommitted or _is_local(leaf):
                    moved[j] = _moved(leaf, placement.sharding)
                if moved[j] is not leaf and _is_spread(leaf, placement.sharding):
                    intention = self._leaf(i, path, leaf), placement.expression.text
                    spread.append((intention, leaf))
            if any(new is not old for new, old in zip(moved, leaves, strict=True)):
                placed[i] = jtu.tree_unflatten(treedef, moved)
        if spread and running and isinstance(self.mesh, Mesh) and not is_tracing():
            check_same(spread, self.mesh)
        return placed if any(n is not o for n, o in zip(placed, values, strict=True)) else None

    def _traced(self) -> Callable[..., Any]:
        def traced(*values: Any) -> Any:
            mesh = resolve_mesh(self.mesh_given)
            if abstract_mesh(mesh) != abstract_mesh(self.mesh) or not self.places(values):
                raise Stale
            if self._is_untyped(values):
                raise Untyped
            self.check(values)
            token = around.set((around.get() or Around())._replace(mesh=mesh))
            try:
                n, keywords = self.form.positional, self.form.keywords
                result = self.function(*values[:n], **dict(zip(keywords, values[n:], strict=True)))
            finally:
                around.reset(token)
            if self._looks_out and self.jitted is not None:
                if not same_shardings(self._shardings(self.out, result, None), self.out_shardings):
                    raise Stale
            elif self.out is not None:
                deque(self._placed(self.out, result, None), maxlen=0)
            return result

        # jit names the program and its arguments by these
        traced.__name__ = self.name
        traced.__qualname__ = self.name
        traced.__wrapped__ = self.function  # type: ignore[attr-defined]
        traced.__signature__ = _row_of(self.labels)  # type: ignore[attr-defined]
        return traced

    def _is_untyped(self, values: Sequence[Any]) -> bool:
        """Whether explicit mesh axes are to be in the types of arguments, and are not.

        jit puts host arrays where `in_shardings` say, but gives them the types of unsharded ones.
        """
        if AxisType.Explicit not in self.mesh.axis_types:
            return False
        return any(
            not has_type(leaf, placement.sharding)
            for i, (spec, value) in enumerate(zip(self.specs, values, strict=True))
            if spec is not None
            for _, leaf, placement in self._placed(spec, value, i)
        )

    def _placed(
        self, spec: Spec, value: Any, argument: int | None
    ) -> Iterator[tuple[Any, Any, Placement]]:
        """Path, leaf and placement of every leaf of an argument, or of the result, with a spec."""
        where = find_mesh(self.mesh_given)
        leaves = jtu.tree_leaves(value)
        try:
            specs = leaf_specs(value, leaves, spec, where[0] if where else None)
        except EinshardError as error:
            label = 'the result' if argument is None else f"parameter '{self.labels[argument]}'"
            of: dict[str, str] = {'of': f'{label} of {self.name}'}
            if argument is not None and isinstance(spec, list | tuple) and jtu.all_leaves([value]):
                of['instead'] = 'a spec for each parameter, not a list: sharded(spec, spec, ...)'
            raise error.about(**of) from None
        for (path, leaf), one in zip(jtu.tree_leaves_with_path(value), specs, strict=True):
            if one is None:
                continue
            try:
                yield path, leaf, find_fitting(one, np.shape(leaf), where, None)
            except EinshardError as error:
                text = self._leaf(argument, path, leaf)
                raise (_no_array(leaf, text) or error.about(array=text)) from None

    def _shardings(self, spec: Spec, value: Any, argument: int | None) -> Any:
        """What `jax.jit` is given for a spec: shardings, as a prefix of the argument or whole."""
        if spec is None:
            return None
        if not looks_at_leaves(spec):
            return jtu.tree_map(self._sharding, spec, is_leaf=is_none)
        found = {path: p.sharding for path, _, p in self._placed(spec, value, argument)}
        return jtu.tree_map_with_path(lambda path, _: found.get(path), value)

    def _sharding(self, spec: str | None) -> NamedSharding | None:
        try:
            found = None if spec is None else find_placement(spec, None, self.mesh_given, None)
            return None if found is None else found.sharding
        except EinshardError as error:
            raise error.about(function=self.name) from None

    def _out_shardings(self, jitted: Any, values: Sequence[Any]) -> Any:
        # the one case that needs the result's shapes beforehand
        result = self._shapes(jitted, values) if self._looks_out else None
        return self._shardings(self.out, result, None)

    def _shapes(self, jitted: Any, values: Sequence[Any]) -> Any:
        """Those of the result, by a trace that jit keeps for the call."""
        typed = list(values)
        if AxisType.Explicit in self.mesh.axis_types:
            for i, (spec, value) in enumerate(zip(self.specs, values, strict=True)):
                types = {
                    path: _typed(leaf, placement.sharding)
                    for path, leaf, placement in self._placed(spec, value, i)
                }
                if types:
                    typed[i] = jtu.tree_map_with_path(types.get, value)
        return jitted.eval_shape(*typed)

    def _leaf(self, argument: int | None, path: Sequence[Any], leaf: Any) -> str:
        """A leaf as errors show it: float32[6,8], parameter 'params/w' of step."""
        if argument is None:
            inside = f" '{path_text(path)}'" if path else ''
            return f'{array_text(leaf)}, result{inside} of {self.name}'
        inside = f'/{path_text(path)}' if path else ''
        return f"{array_text(leaf)}, parameter '{self.labels[argument]}{inside}' of {self.name}"

    def _partitioned_otherwise(
        self, i: int, path: Sequence[Any], leaf: Any, placement: Placement
    ) -> EinshardError:
        text = describe_in(placement.expression, leaf.sharding, leaf.ndim)
        terms = [term for term in placement.expression.right if term.placed]
        return placement.expression.error(
            f"the argument is partitioned otherwise: it is '{text}'",
            terms,
            array=self._leaf(i, path, leaf),
            to_move_it='einshard(x, ...) before the call, or sharded(..., reshard=True)',
        )

    def _check_devices(self, i: int, value: Any) -> None:
        """Raises where an argument without a spec is not on the devices of the mesh, in order."""
        placed = any(self.in_shardings) or bool(jtu.tree_leaves(self.out_shardings))
        if isinstance(self.mesh, AbstractMesh) or not placed:
            return
        row = tuple(self.mesh.devices.flat)
        for path, leaf in jtu.tree_leaves_with_path(value):
            if not is_committed(leaf):
                continue
            if leaf.sharding.device_set != set(row):
                held = f'{len(leaf.sharding.device_set)} of the {self.mesh.size} devices'
            elif _row_of_devices(leaf.sharding) not in (None, row):
                held = 'the devices of the mesh, but in another order'
            else:
                continue
            raise EinshardError(
                f'an argument without a spec is held by {held}',
                facts={
                    'array': self._leaf(i, path, leaf),
                    'it is': describe(leaf),
                    'give': f"a spec: {self.labels[i]}='... -> * ...' puts it on every device",
                },
            ) from None


def _row_of_devices(sharding: Sharding) -> tuple[Any, ...] | None:
    """The devices in the order that jit compares; None where nothing public tells it."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else None


def _no_array(leaf: Any, text: str) -> EinshardError | None:
    """For a leaf with a spec that is no array: to speak of its dimensions would mislead."""
    if hasattr(leaf, 'dtype') or isinstance(leaf, int | float | complex):
        return None
    try:
        check_visible(leaf)
    except EinshardError as error:
        return error.about(array=text)
    return EinshardError(
        f'{type(leaf).__name__} is no array, and no tree that JAX knows',
        facts={'it is': text, 'give': 'no spec for it; jit takes it if it is static'},
    )


def _typed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    aval: Any = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def _moved(leaf: Any, sharding: NamedSharding) -> Any:
    if jax.process_count() > 1:
        return put([leaf], [sharding])[0]
    return jax.device_put(leaf, sharding)  # to an abstract mesh too, which put refuses


def _is_local(leaf: Any) -> bool:
    """Whether an argument is host data of one of several processes, which jit does not spread."""
    return jax.process_count() > 1 and not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def _is_spread(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether of what each process has to itself each gets a part. JAX compares it, or refuses."""
    if jax.process_count() == 1 or sharding.is_fully_addressable or sharding.is_fully_replicated:
        return False
    is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    return not (is_global or isinstance(leaf, Tracer | jax.ShapeDtypeStruct))


def _is_misplaced(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether jit would refuse an argument; it places uncommitted arrays and host data itself."""
    return is_committed(leaf) and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


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
