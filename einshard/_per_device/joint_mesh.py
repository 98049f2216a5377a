"""Finds one mesh for all expressions of a per-device function. Does not import JAX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .._cache import cached
from .._errors import EinshardError, quoted
from .._notation.expression import Expression, Term, write, write_short
from .._notation.layout import mesh_text
from .spec_axes import MeshAxis, SpecAxes, grid_of, leading_replicas, without_suggestions


@dataclass(frozen=True, slots=True)
class JointMesh:
    """A mesh whose axes are named after array axes, slowest-varying first.

    Every array is replicated along an axis named None, as in (('x', 2), (None, 4)).
    """

    axes: tuple[MeshAxis, ...]

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The axis sizes, keyed by name; unnamed axes become 'replica0', 'replica1' and so on."""
        numbers = itertools.count()  # no clash, because names of array axes have no digits
        return {name or f'replica{next(numbers)}': count for name, count in self.axes}

    @property
    def named_sizes(self) -> dict[str, int]:
        return {name: count for name, count in self.axes if name is not None}

    def complete(self, expression: Expression) -> Expression:
        """Extends an expression to all devices: 'x2 y' becomes 'x y -> 4 x2 y' on 8 devices."""
        array_axis_of = self._array_axes(expression)
        # a mesh axis that shards no axis of this array holds replicas
        sizes = [(array_axis_of.get(name or ''), count) for name, count in self.axes]
        terms = [Term(axis, count) for axis, count in sizes if count > 1]
        return _with_right(expression, terms or [Term(count=1)])

    def use_mesh_axes(self, expression: Expression) -> Expression:
        """Rewrites counts as mesh axes: 'x y -> x2 y' becomes 'x y -> x@x y'."""
        mesh_axes: dict[str, list[str]] = {}
        for mesh_axis, array_axis in self._array_axes(expression).items():
            mesh_axes.setdefault(array_axis, []).append(mesh_axis)
        terms = [Term(name, mesh_axes=tuple(axes)) for name, axes in mesh_axes.items()]
        return _with_right(expression, terms or [Term(star=True)])

    def _array_axes(self, expression: Expression) -> dict[str, str]:
        """Returns {mesh axis: the array axis that it shards in `expression`}, in device order."""
        spec = SpecAxes('', expression)
        array_axis_of = {axis: str(term.name) for axis, term in spec.uses.items()}
        array_axis_of |= {name: name for name in spec.defines}
        return {axis: array_axis_of[axis] for axis in self.named_sizes if axis in array_axis_of}


def _with_right(expression: Expression, terms: Sequence[Term]) -> Expression:
    """Returns the expression with `terms`, and then its other axes, to the right of '->'."""
    sharded = {term.name for term in terms}
    names = [Term(name) for name in expression.names]
    return write(names, [*terms, *(term for term in names if term.name not in sharded)])


@cached
def joint_mesh(
    specs: tuple[SpecAxes, ...], n_devices: int, axis_sizes: tuple[int, ...] | None = None
) -> JointMesh:
    """Finds the mesh that fits all expressions. Raises if no mesh fits, or several fit.

    A count in one expression applies to all of them. An expression with replicas uses all devices,
    so '4 x*' gives x 2 shards on 8 devices. Starred axes of the other expressions share the
    remaining devices.

    `axis_sizes` are the axis sizes of the user's mesh, if any, for errors.
    """
    return _Specs(specs, n_devices, axis_sizes).mesh()


@dataclass(frozen=True, slots=True)
class _Specs:
    """The expressions of a function, and the number of devices of their mesh.

    Its errors suggest no expressions: one that fits the devices may not fit the other expressions.
    """

    specs: tuple[SpecAxes, ...]
    n_devices: int
    axis_sizes: tuple[int, ...] | None

    def mesh(self) -> JointMesh:
        for spec in self.specs:
            spec.check(self.specs)
        counts = self.counts()
        n_replicas, remainder = divmod(self.n_devices, math.prod(counts.values()))
        if remainder:
            raise self.counts_do_not_fit(counts)
        if n_replicas > 1 and not any(spec.lists_replicas for spec in self.specs):
            raise self.unused_devices(counts)
        orders = list(itertools.islice(_orders(self.specs, counts, self.n_devices), 2))
        if len(orders) != 1:
            raise self.no_order(counts, orders)
        (order,) = orders
        for spec in self.specs:
            spec.check_order([name for name, _ in order])
        size_one_axes = [(name, count) for name, count in counts.items() if count == 1]
        return JointMesh((*order, *size_one_axes) or ((None, 1),))

    def counts(self) -> dict[str, int]:
        """Returns the sizes of all mesh axes, keyed by name, in order of appearance."""
        sources: dict[str, tuple[int, SpecAxes]] = {}  # the size, and the first spec with it

        def add(name: str, count: int, spec: SpecAxes) -> None:
            first_count, first_spec = sources.setdefault(name, (count, spec))
            if first_count != count:
                raise first_spec.expression.error(
                    f"axis '{name}' has {first_count} shards in one expression "
                    f'and {count} in another',
                    [first_spec.defines[name]],
                    code='axis-names',
                    **_expression_facts([first_spec, spec]),
                    devices=self.n_devices,
                )

        for spec in self.specs:
            for name, term in spec.defines.items():
                if not term.star:
                    add(name, term.factor, spec)
        written = {name: count for name, (count, _) in sources.items()}
        for spec in self.specs:
            if spec.lists_replicas and not spec.uses:
                solved = dict(spec.grid(written, self.n_devices))
                for name in spec.defines:
                    add(name, solved.get(name, 1), spec)
        counts = {name: count for name, (count, _) in sources.items()}
        counts |= self.solve_stars(counts)
        return {name: counts[name] for spec in self.specs for name in spec.defines}

    def solve_stars(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of starred axes not in `counts`. They share the remaining devices."""
        starred = dict.fromkeys(n for spec in self.specs for n in spec.defines if n not in counts)
        if not starred:
            return {}
        if self.n_devices % math.prod(counts.values()):
            raise self.counts_do_not_fit(counts)
        terms = [Term(name, count) for name, count in counts.items()]
        terms += [Term(name, star=True) for name in starred]
        try:
            solved = dict(grid_of(write_short(terms), self.n_devices))
        except EinshardError as error:
            error = without_suggestions(error)
            facts = {**_expression_facts(self.specs), **error.facts}
            raise EinshardError(**error.parts(facts=facts)) from None
        return {name: solved.get(name, 1) for name in starred}

    def counts_do_not_fit(self, counts: Mapping[str, int]) -> EinshardError:
        sharded = [(name, count) for name, count in counts.items() if count > 1]
        product, n_devices = math.prod(counts.values()), self.n_devices
        factors = ' x '.join(str(count) for _, count in sharded)
        facts = {**_expression_facts(self.specs), 'devices': n_devices}
        terms = quoted(f'{name}{count}' for name, count in sharded)
        factors = factors if len(sharded) == 1 else f'{factors} = {product}'
        if product > n_devices:
            sentence = (
                f'{terms} {"needs" if len(sharded) == 1 else "need"} {factors} devices, '
                f'but there {"is" if n_devices == 1 else "are"} only {n_devices}'
            )
        else:
            sentence = (
                f'the number of devices ({n_devices}) is not divisible by {factors} ({terms})'
            )
        return EinshardError(sentence, code='axis-names', facts=facts)

    def unused_devices(self, counts: Mapping[str, int]) -> EinshardError:
        n_devices = self.n_devices
        sharded = [f'{name}{count}' for name, count in counts.items() if count > 1]
        longest = max(self.specs, key=lambda spec: len(spec.defines))
        expression = longest.expression
        sentence = f"nothing is sharded; add '*' to replicate over all {n_devices} devices"
        if sharded:
            use = f'{"uses" if len(sharded) == 1 else "use"} only {math.prod(counts.values())}'
            sentence = f'{quoted(sharded)} {use} of {n_devices} devices; '
            sentence += (
                "add '*' to replicate over the rest"
                if self.axis_sizes is None
                else 'counts and stars must use all of them'  # '*' may not fit the user's mesh
            )
        return expression.error(
            sentence,
            longest.defines.values() or expression.right,
            code='axis-names',
            **_expression_facts(self.specs),
            **({'mesh': ' x '.join(map(str, self.axis_sizes))} if self.axis_sizes else {}),
            devices=n_devices,
        )

    def no_order(
        self, counts: Mapping[str, int], orders: Sequence[tuple[MeshAxis, ...]]
    ) -> EinshardError:
        if orders:
            differing = next(pair for pair in zip(*orders, strict=False) if pair[0] != pair[1])
            one, other = (f"'{name or ''}{count}'" for name, count in differing)
            return EinshardError(
                f'ambiguous device order: {one} could come before {other} or after it',
                code='axis-names',
                facts={
                    **_expression_facts(self.specs),
                    'devices': self.n_devices,
                    'instead': 'give the order in one expression, with numbers for replicas: '
                    "'b4 2 x' has its replicas after b",
                },
            )
        conflicting: Sequence[SpecAxes] = self.specs
        for pair in itertools.combinations(self.specs, 2):
            names = {name for spec in pair for name in (*spec.defines, *spec.uses)}
            pair_counts = {name: count for name, count in counts.items() if name in names}
            if next(_orders(pair, pair_counts, self.n_devices), None) is None:
                conflicting = pair
                break
        subject = 'two expressions' if len(conflicting) == 2 else 'the expressions'
        sizes = mesh_text({name: count for name, count in counts.items() if count > 1})

        def order_text(spec: SpecAxes) -> str:
            grid = spec.grid(counts, self.n_devices)
            axes = [mesh_text({name: n}) if name else f'{n} replicas' for name, n in grid]
            return f', device order: {", ".join(axes)}' if axes else ''

        return conflicting[0].expression.error(
            f'{subject} disagree on the device order',
            [term for term in conflicting[0].expression.right if term.spans_devices],
            code='axis-names',
            **_expression_facts(conflicting, order_text),
            devices=f'{self.n_devices} ({sizes})',
        )


def _orders(
    specs: Sequence[SpecAxes], counts: Mapping[str, int], n_devices: int
) -> Iterator[tuple[MeshAxis, ...]]:
    """Yields every order of the mesh axes of size 2 or more that agrees with all expressions.

    Appends one mesh axis at a time, if `SpecAxes.take` accepts it for every expression. A
    topological sort (`graphlib`) is not enough: in '4 x2', the product of the sizes of the mesh
    axes before x must be 4.
    """

    def extend(
        order: tuple[MeshAxis, ...], rests: Sequence[tuple[MeshAxis, ...]]
    ) -> Iterator[tuple[MeshAxis, ...]]:
        candidates = [axis for axis in sharded if axis not in order]
        n_placed = math.prod(count for name, count in order if name is None)
        n_replicas_left = n_devices // math.prod(counts.values()) // n_placed
        if not candidates and n_replicas_left == 1:
            yield order
        # two axes of replicas are never adjacent, because they would be one axis
        if n_replicas_left > 1 and (not order or order[-1][0] is not None):
            pairs = zip(specs, rests, strict=True)
            replica_counts = (leading_replicas(rest) for spec, rest in pairs if spec.lists_replicas)
            common = math.gcd(n_replicas_left, *replica_counts)
            candidates += [(None, common)] if common > 1 else []
        for axis in candidates:
            taken = [spec.take(axis, rest) for spec, rest in zip(specs, rests, strict=True)]
            new_rests = [rest for rest in taken if rest is not None]
            if len(new_rests) == len(specs):
                yield from extend((*order, axis), new_rests)

    sharded: list[MeshAxis] = [(name, count) for name, count in counts.items() if count > 1]
    yield from extend((), [spec.grid(counts, n_devices) for spec in specs])


def _expression_facts(
    specs: Sequence[SpecAxes], note: Callable[[SpecAxes], str] = lambda _: ''
) -> dict[str, str]:
    """Returns {owner: quoted expression + note}. An expression of several owners is listed once."""
    first = {spec.expression: spec for spec in reversed(specs)}
    shown = [spec for spec in specs if first[spec.expression] is spec]
    return {spec.owner: f"'{spec.expression.text}'{note(spec)}" for spec in shown}
