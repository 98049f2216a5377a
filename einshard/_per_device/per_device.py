"""`jax.shard_map` in the notation: the decorator `per_device`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from .._errors import EinshardError, quoted
from .._expression import parse
from .._layout import axis_positions, mesh_text
from .._mesh import MeshLike, around, mesh_fact, resolve_mesh
from .._parameters import Form, Parameters, listed, name_of
from .._sharded import called_too_early, sharded
from .._sharded_function import JIT_OPTIONS, ShardedFunction
from .._specs import Spec, array_text, check_specs, is_none, leaf_specs, leaf_text, path_text
from .device_view import View, make_view
from .mesh_members import Member

P = ParamSpec('P')
R = TypeVar('R')


def per_device(
    *in_specs: Spec,
    out: Spec,
    mesh: MeshLike | None = None,
    manual: Iterable[str] | None = None,
    check_vma: bool = True,
    reshard: bool = False,
    **named_specs_and_jit_options: Any,
) -> Callable[[Callable[P, R]], ShardedFunction[P, R]]:
    """`jax.shard_map` in the notation: the function is what each device does with its own shards.

        >>> @per_device('b x -> b4 x2', 'x y -> x2 y', out='b y -> b4 y', mesh=jax.devices()[:8])
        ... def product(x, w):  # of a (2, 3) and a (3, 5) shard
        ...     return jax.lax.psum(x @ w, 'x')
        >>> y = product(np.ones((8, 6)), np.ones((6, 5)))
        >>> describe(y), float(y[0, 0])
        ('a b -> a4 b 2', 6.0)

    Read: x in four parts along b and two along x; w in two along x, whole for every part of b.

    The axes that the expressions cut make one mesh, and the function sees it by their names:
    `jax.lax.psum(z, 'x')`, `all_gather`, `psum_scatter`, `all_to_all`, `ppermute`, `axis_index`,
    `axis_size`. An expression names the axes that it cuts itself, in device order. Where it spells
    out replicas, `'x y -> 4 x2 y'`, they must be the other axes. `'y@x'` cuts y over the devices
    of x, as after `psum_scatter` over 'x'. A count that one expression gives holds in all;
    the stars that are left share what is left. With a mesh in context, or a mesh of your own by
    `mesh=`, the function sees the names of its axes instead.

    Arguments, results and calls are those of `sharded`: arrays that are placed as the expressions
    say enter without a copy, and results compare equal to those of `make_sharding`.

    Args:
        in_specs: expressions by position, or trees of them that are prefixes of the argument.
            Every argument has one ('...' is whole on every device), but static ones; the instance
            of a method is whole on every device.
        out: the expression of the result, or a tree of them.
        mesh: a mesh or devices; those in context where left out, else all devices.
        manual: the mesh axes that the function works on device by device, where that is not all:
            along the others it sees whole arrays, which `einshard` and the compiler place.
        check_vma: whether JAX checks that a result is the same on devices where `out` says so.
        reshard: whether arguments that are partitioned otherwise may be moved.
        named_specs_and_jit_options: expressions by parameter name, and options of `jax.jit`.

    Raises:
        EinshardError: at decoration, for a wrong expression and for what is none; at the first
            call, for expressions that disagree on a count or on the order of the devices, or leave
            devices over; at a call, for arrays that do not fit, for a collective over an axis that
            is not sharded, and in another per-device function.
    """
    named = named_specs_and_jit_options

    def decorate(*functions: Any, **unexpected: Any) -> Any:
        function = functions[0] if len(functions) == 1 and not unexpected else None
        if isinstance(function, staticmethod | classmethod):
            return type(function)(decorate(function.__func__))
        if not callable(function):
            given = [*functions, *unexpected.values()]
            raise called_too_early('per_device', given, in_specs)
        its_specs = {name: spec for name, spec in named.items() if name not in JIT_OPTIONS}
        options = {name: value for name, value in named.items() if name in JIT_OPTIONS}
        mapped = _Mapped(function, in_specs, its_specs, out, mesh, manual, check_vma)
        return sharded(
            *map(mapped.lazy, in_specs),
            out=mapped.lazy(out),
            mesh=mesh,
            reshard=reshard,
            **{name: mapped.lazy(spec) for name, spec in its_specs.items()},
            **options,
        )(mapped.whole_function())

    return decorate


_WHOLE = '...'


class _Mapped:
    """A function with its expressions; they are resolved for the devices that are around."""

    def __init__(
        self,
        function: Callable[..., Any],
        in_specs: Sequence[Spec],
        named_specs: Mapping[str, Spec],
        out: Spec,
        mesh: MeshLike | None,
        manual: Iterable[str] | None,
        check_vma: bool,
    ):
        self.function = function
        self.name = name_of(function)
        self.parameters = Parameters(function, sorted(JIT_OPTIONS))
        self.out = out
        self.mesh = mesh
        self.check_vma = check_vma
        try:
            names = listed(manual, str, 'manual', 'names of mesh axes', "('x',)")
            self.manual = frozenset(names)
            self.specs = self.parameters.assign(in_specs, named_specs)
            self.members = tuple(self._members())
        except EinshardError as error:
            raise error.about(function=self.name) from None

    def lazy(self, spec: Spec) -> Spec:
        """A spec as `sharded` takes it: functions of the path, called when the mesh is known."""
        return jtu.tree_map(lambda one: functools.partial(self._place, one), spec, is_leaf=is_none)

    def whole_function(self) -> Callable[..., Any]:
        """The function of whole arrays that `sharded` traces."""

        @functools.wraps(self.function)
        def whole(*args: Any, **kwargs: Any) -> Any:
            return self._map(args, kwargs)

        whole.__name__ = self.name
        return whole

    def _members(self) -> Iterator[Member]:
        for label, spec in [*self.specs.items(), (None, self.out)]:
            of = 'the result' if label is None else f"parameter '{label}'"
            try:
                check_specs(spec)
            except EinshardError as error:
                raise error.about(spec_of=of) from None
            for path, one in jtu.tree_leaves_with_path(spec, is_leaf=is_none):
                if label is not None:
                    of = f"parameter '{'/'.join([label, path_text(path)]).rstrip('/')}'"
                elif path:
                    of = f"the result '{path_text(path)}'"
                if callable(one):
                    raise EinshardError(
                        'per_device takes no functions of the path and no Rules: it makes a mesh '
                        'of expressions',
                        facts={'spec of': of, 'it is': repr(one)},
                    )
                if one is not None:
                    yield Member(of, parse(one))

    def _view(self) -> View:
        try:
            context = jax.sharding.get_abstract_mesh()
            if AxisType.Manual in context.axis_types:
                raise EinshardError(
                    'a per-device function cannot be called in another, where each device has its '
                    'own arrays',
                    facts={'mesh around': mesh_fact(context)},
                )
            surroundings = around.get()
            rules = surroundings.axis_rules if surroundings else ()
            mesh = resolve_mesh(self.mesh)
            abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
            if not context.empty and context != abstract:
                raise EinshardError(
                    'the mesh given is not the mesh in context',
                    facts={'mesh given': mesh_fact(mesh), 'mesh in context': mesh_fact(context)},
                )
            view = make_view(self.members, mesh, not context.empty, rules)
            for axis in sorted(self.manual):
                if axis not in view.axes:
                    raise EinshardError(
                        f"manual= names '{axis}', which is no axis of the mesh",
                        facts={'mesh': mesh_text(view.axes)},
                    )
            return view
        except EinshardError as error:
            # said here, or `sharded` would name the parameter that it happens to be at
            raise error.about(of=self.name) from None

    def _place(self, text: str | None, path: str, leaf: Any) -> str | None:
        """The spec of a leaf for `sharded`."""
        if text is None:
            return None
        view = self._view()
        try:
            view.check(text, np.shape(leaf))
        except EinshardError as error:
            raise error.about(array=leaf_text(path, leaf)) from None
        return view.completed(text)

    def _map(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        view = self._view()
        labels = self.parameters.labels(Form(len(args), tuple(kwargs)))
        values = [*args, *kwargs.values()]
        # the others are static, or hold no arrays
        traced = [i for i, value in enumerate(values) if _is_traced(value)]
        arguments = [values[i] for i in traced]

        def each(*its_values: Any) -> Any:
            row = list(values)
            for i, value in zip(traced, its_values, strict=True):
                row[i] = value
            n = len(args)
            result = self.function(*row[:n], **dict(zip(kwargs, row[n:], strict=True)))
            self._result_leaves(view, result)  # its errors say more than those of JAX
            return result

        each.__name__ = each.__qualname__ = self.name
        in_specs = tuple(self._argument_specs(view, labels[i], values[i]) for i in traced)
        mapped = functools.partial(
            jax.shard_map, each, mesh=view.mesh, in_specs=in_specs, axis_names=self.manual
        )
        try:
            out_specs = self._out_specs(view, mapped, arguments)
            return mapped(out_specs=out_specs, check_vma=self.check_vma)(*arguments)
        except EinshardError:
            raise
        except (NameError, AssertionError, KeyError, ValueError) as error:
            ours = self._unbound(view, mapped, arguments) or self._differs(error)
            if ours is None:
                raise
            raise ours from None

    def _argument_specs(self, view: View, label: str, value: Any) -> Any:
        spec = self.parameters.spec_for(label, self.specs)
        if spec is None and label in self.parameters.names[: self.parameters.instance]:
            spec = _WHOLE
        leaves, treedef = jtu.tree_flatten(value)
        found: list[PartitionSpec] = []
        for text, leaf in zip(leaf_specs(value, leaves, spec), leaves, strict=True):
            if not isinstance(text, str):
                raise _no_spec(f"parameter '{label}' of {self.name}", leaf)
            found.append(view.partition_spec(text, np.ndim(leaf), self.manual))
        return jtu.tree_unflatten(treedef, found)

    def _out_specs(self, view: View, mapped: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        texts = [one for one in jtu.tree_leaves(self.out) if one is not None]
        if view.uncut(self.manual) or any(view.needs_rank(text) for text in texts):
            # the ranks are those of any other specs
            unplaced = mapped(out_specs=PartitionSpec(), check_vma=False)
            shapes = jax.eval_shape(unplaced, *arguments)
            found = self._result_leaves(view, shapes)
            specs = [view.result_spec(text, n_dims, self.manual) for text, n_dims in found]
            return jtu.tree_unflatten(jtu.tree_structure(shapes), specs)
        return jtu.tree_map(lambda text: view.partition_spec(text, None, self.manual), self.out)

    def _result_leaves(self, view: View, result: Any) -> list[tuple[str, int]]:
        """The expression and the rank of every array of a result, which is checked."""
        leaves = jtu.tree_leaves(result)
        try:
            texts = leaf_specs(result, leaves, self.out)
        except EinshardError as error:
            raise error.about(of=f'the result of {self.name}') from None
        found: list[tuple[str, int]] = []
        for text, (path, leaf) in zip(texts, jtu.tree_leaves_with_path(result), strict=True):
            inside = f" '{path_text(path)}'" if path else ''
            of = f'the result{inside} of {self.name}'
            if not isinstance(text, str):
                raise _no_spec(of, leaf)
            try:
                axis_positions(view.expression(text), np.ndim(leaf))
            except EinshardError as error:
                raise error.about(array=f'{array_text(leaf)} on each device, {of}') from None
            found.append((text, np.ndim(leaf)))
        return found

    def _unbound(
        self, view: View, mapped: Callable[..., Any], arguments: Sequence[Any]
    ) -> EinshardError | None:
        """The error for a collective over an axis that there is not, if that is the reason."""
        try:
            # with check_vma JAX meets it by an assertion or a KeyError, without it by a NameError
            unchecked = mapped(out_specs=PartitionSpec(), check_vma=False)
            jax.eval_shape(unchecked, *arguments)
        except NameError as error:
            found = re.search(r'unbound axis name: ([^\s,.]+)', str(error))
            return found and self._no_axis(view, found[1])
        except Exception:
            return None  # the first error stands
        return None

    def _no_axis(self, view: View, axis: str) -> EinshardError:
        axes = {name: n for name, n in view.axes.items() if not self.manual or name in self.manual}
        facts = {'there are': mesh_text(axes) or 'none'}
        if axis in view.axes:
            sentence = f"a collective over '{axis}', which manual= leaves to the compiler"
        elif view.by_name:
            sentence = f"a collective over '{axis}', an axis that no expression cuts"
        else:
            sentence = f"a collective over '{axis}', which is no axis of the mesh that is in use"
            facts['because'] = 'a mesh is in context or given, and collectives name its axes'
            if axis in view.shared.sizes:
                facts[f"'{axis}' is over"] = view.mesh_axes_of(axis)
        return EinshardError(sentence, facts={'of': self.name, **facts})

    def _differs(self, error: Exception) -> EinshardError | None:
        """The error for a result of which devices have different ones, if that is the reason."""
        found = _REPLICATED.search(str(error)) if isinstance(error, ValueError) else None
        if found is None:
            return None
        key, axis, axes = found.groups()
        names = [axis] if axis else axes.split(',')
        path = '/'.join(re.findall(r'\w+', key))  # of [1]['mean']
        return EinshardError(
            f'out= says that devices have the same result along {quoted(names)}, but each may have '
            'another',
            facts={
                'of': f"the result '{path}' of {self.name}" if path else self.name,
                'instead': f"their sum, jax.lax.psum(z, '{names[0]}'), or the axis in out=",
            },
        )


# what JAX says of one axis, and of several
_REPLICATED = re.compile(
    r"out_specs(\S*) is .* which implies that .* (?:replicated across mesh axis '(\w+)'"
    r'|and not \{([^}]+)\})'
)


def _is_traced(value: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jtu.tree_leaves(value))


def _no_spec(of: str, leaf: Any) -> EinshardError:
    return EinshardError(
        'an array without a spec: per device, each has one',
        facts={'of': of, 'array': array_text(leaf), 'whole on each device': f"'{_WHOLE}'"},
    )
