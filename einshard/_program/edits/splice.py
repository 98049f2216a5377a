"""Inserts, replaces and removes the constraints of one expression in a jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax.extend import core as jex
from jax.sharding import NamedSharding, PartitionSpec

from ..._sharding.mesh import partition_spec, spec_axes
from ..jaxpr.graph import Site, inner_jaxprs
from ..jaxpr.spans import Frames, Span
from .jaxprs import closed_like, is_var, map_jaxprs, opened

# The numbers of values and of cotangents that an edit changes. 0 values: it does not apply.
Applied: TypeAlias = tuple[int, int]
CONSTRAINT = 'sharding_constraint'
# These pass a cotangent on to their operands: no equation of the backward pass is theirs.
_PASS_COTANGENTS_ON = ('add', 'add_any', 'sub')


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
class Splicer:
    """Changes the constraints of one expression.

    Attributes:
        path: the expression, and the calls through which it is evaluated.
        sharding: None removes a constraint.
        which: whether the value is constrained, a constraint is replaced, or its operand is
            constrained. A value that a constraint computes is constrained in its place.
        shared: for each jaxpr and changes of it, both that jaxpr and the changed one.
        tag: returns the tag of a constraint, from the number of axes that `jax.vmap` adds. With
            tags, constraints are open, and none is replaced.
        applied: the numbers of values and of cotangents that were changed.
    """

    path: tuple[Span, ...]
    sharding: NamedSharding | None
    which: Literal['value', 'constraint', 'operand'] = 'value'
    frames: Frames = field(default_factory=Frames)
    shared: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    tag: Callable[[int], str] | None = None
    applied: Applied = (0, 0)
    signature: _Signature | None = None

    def splice(self, closed: Any) -> Any:
        for is_transposed in (False, True):
            if self.signature is None:
                self._find_signature(closed, Site(), is_transposed)
        signature = self.signature
        if signature is None or (self.which != 'value' and signature.primitive != CONSTRAINT):
            return closed
        if self.tag is not None and self.which != 'operand' and signature.primitive == CONSTRAINT:
            return closed
        found = self._edit(closed, Site(), (), frozenset())
        if not self.applied[1] and signature.primitive not in _PASS_COTANGENTS_ON:
            # the backward pass of a custom derivative has other equations
            self.applied, self.signature = (0, 0), signature._replace(is_custom=True)
            found = self._edit(closed, Site(), (), frozenset())
        return found

    def at(self, frames: Sequence[Span]) -> int:
        """Returns where in the frames the path begins, or -1."""
        first, n = self.path[0], len(self.path)
        for i, span in enumerate(frames):
            if span == first and (*frames[i : i + n],) == self.path:
                return i
        return -1

    def _find_signature(self, closed: Any, site: Site, is_transposed: bool) -> None:
        """Finds an equation that returns the value of the expression."""
        jaxpr = opened(closed)
        sites = [site.at(eqn, self.frames.of(eqn)) for eqn in jaxpr.eqns]
        forward = [
            n
            for n, at in enumerate(sites)
            if self.at(at.frames) >= 0 > self.at(site.frames)
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
            path = frames[: self.at(frames)]
            kinds = {
                jaxpr.eqns[n].primitive.name
                for n in forward
                if sites[n].frames[: self.at(sites[n].frames)] == path
            }
            producers = {v: n for n, each in enumerate(jaxpr.eqns) for v in each.outvars}
            shape = tuple(eqn.outvars[found[1]].aval.shape)
            operands = [
                inner[: len(self.path) + max(self.at(inner), 0)]
                for v in eqn.invars
                if not isinstance(v, jex.Literal) and v in producers and v.aval.shape == shape
                for inner in [sites[producers[v]].frames]
                # but its derivative may keep it
                if len(users[v]) == 1 or sum(sites[n].frames != inner for n in users[v]) == 1
            ]
            self.signature = _Signature(
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
            if self._is_all_manual(eqn):
                continue
            for inner in (
                () if eqn.primitive.name == 'pallas_call' else inner_jaxprs(eqn.params.values())
            ):
                self._find_signature(inner, at.inside(eqn), is_transposed)
                if self.signature is not None:
                    return

    def _edit(
        self,
        closed: Any,
        site: Site,
        cotangent_inputs: Sequence[bool],
        manual: frozenset[str],
    ) -> Any:
        """Returns a jaxpr with changed constraints.

        Args:
            cotangent_inputs: whether each input is a cotangent; False for missing ones.
            manual: the manual mesh axes of the `shard_map` around it.
        """
        jaxpr = opened(closed)
        body = _Body(self, jaxpr, site, cotangent_inputs, manual)
        for eqn in jaxpr.eqns:
            body.edit(eqn)
        # the same object where nothing has changed, or the same has: XLA shares a function that is
        # called twice
        if not body.changes:
            return closed
        key = id(closed), tuple(body.changes)
        if key not in self.shared:
            outvars = [body.new.get(v, v) if is_var(v) else v for v in jaxpr.outvars]
            changed = jaxpr.replace(eqns=body.eqns, outvars=outvars)
            self.shared[key] = closed, closed_like(closed, changed)
        return self.shared[key][1]

    def count(self, values: int, cotangents: int) -> None:
        self.applied = self.applied[0] + values, self.applied[1] + cotangents

    def _is_all_manual(self, eqn: Any) -> bool:
        """Whether each device runs the body of a `shard_map` on its own."""
        if eqn.primitive.name != 'shard_map':
            return False
        mesh = eqn.params['mesh'] if self.sharding is None else self.sharding.mesh
        return _manual_axes(eqn) >= {*map(str, mesh.axis_names)}

    def edit_inner(
        self, eqn: Any, site: Site, cotangents: Sequence[bool], manual: frozenset[str]
    ) -> dict[str, Any]:
        inside = site.inside(eqn)
        manual |= _manual_axes(eqn)
        if eqn.primitive.name == 'pallas_call' or self._is_all_manual(eqn):
            return eqn.params

        def edited(jaxpr: Any) -> Any:
            # the inputs of the jaxpr are the last operands, as in `cond`
            flags = cotangents[max(len(cotangents) - len(opened(jaxpr).invars), 0) :]
            return self._edit(jaxpr, inside, flags, manual)

        return map_jaxprs(eqn, edited)


class _Place(NamedTuple):
    """Where an equation is: its frames, and whether they begin inside the expression."""

    at: Site
    path: tuple[Span, ...] | None  # the frames inside the expression; None outside of it
    is_there: bool  # whether they are those of the signature


class _Body:
    """The changed equations of one jaxpr, added one by one.

    Attributes:
        eqns: the equations so far.
        new: constrained values, by what they replace.
        changes: what was changed; equal changes of a jaxpr are made once.
    """

    def __init__(
        self,
        splicer: Splicer,
        jaxpr: Any,
        site: Site,
        cotangent_inputs: Sequence[bool],
        manual: frozenset[str],
    ):
        assert splicer.signature is not None
        self.splicer, self.signature, self.sharding = splicer, splicer.signature, splicer.sharding
        self.site, self.manual = site, manual
        self.eqns: list[Any] = []
        self.new: dict[Any, Any] = {}
        self.changes: list[Any] = []
        self._before: dict[Any, Any] = {}  # what a constrained value replaces
        inputs = zip(jaxpr.invars, cotangent_inputs, strict=False)
        self._cotangents = {v for v, is_cotangent in inputs if is_cotangent}
        self._constrained_cotangents: dict[Any, Any] = {}
        self._constants = {*jaxpr.constvars}
        self._producer_paths: dict[Any, tuple[Span, ...] | None] = {}

    def edit(self, eqn: Any) -> None:
        """Adds an equation, with changed constraints of its operands and results."""
        place = self._place(eqn)
        invars = [v if isinstance(v, jex.Literal) else self.new.get(v, v) for v in eqn.invars]
        # what the derivative of the expression keeps is computed from its unconstrained value
        if place.is_there and eqn.primitive.name != self.signature.primitive:
            invars = [self._before.get(v, v) if is_var(v) else v for v in invars]
        invars = self._constrain_cotangent(eqn, place, invars)
        is_constraint = place.is_there and eqn.primitive.name == CONSTRAINT
        if is_constraint and self.signature.primitive == CONSTRAINT:
            self._edit_constraint(eqn, place.at, invars)
        else:
            params = eqn.params
            if place.path is None:
                is_cotangent = [self._is_cotangent(v) for v in eqn.invars]
                params = self.splicer.edit_inner(eqn, place.at, is_cotangent, self.manual)
                if params is not eqn.params:
                    inner = map(id, inner_jaxprs(params.values()))
                    self.changes.append((len(self.eqns), *inner))
            self.eqns.append(eqn.replace(invars=invars, params=params))
        self._follow(eqn, place)
        self._constrain_value(eqn, place)

    def _place(self, eqn: Any) -> _Place:
        at = self.site.at(eqn, self.splicer.frames.of(eqn))
        begin = self.splicer.at(at.frames)
        path = at.frames[:begin] if begin >= 0 > self.splicer.at(self.site.frames) else None
        return _Place(at, path, path == self.signature.path)

    def _is_cotangent(self, v: Any) -> bool:
        return is_var(v) and v in self._cotangents

    def _constrain_cotangent(self, eqn: Any, place: _Place, invars: list[Any]) -> list[Any]:
        """Constrains the cotangent that enters the transposes of the expression."""
        signature, at = self.signature, place.at
        passes_on = signature.primitive in _PASS_COTANGENTS_ON
        if passes_on:
            is_transpose = any(at.frames[: len(each)] == each for each in signature.operands)
        else:
            is_transpose = place.path is not None if signature.is_custom else place.is_there
        if signature.primitive == CONSTRAINT or not is_transpose:
            return invars
        if not at.is_transposed or signature.is_transposed:
            return invars

        def enters(v: Any) -> bool:
            if not self._is_cotangent(v) or not _has_shape(v, signature.shape):
                return False
            if passes_on or (signature.is_only_kind and not signature.is_custom):
                return True
            path = self._producer_paths.get(v)
            return path is None if signature.is_custom else path != signature.path

        entering = next((n for n, v in enumerate(eqn.invars) if enters(v)), None)
        if entering is None:
            return invars
        old, v = eqn.invars[entering], invars[entering]
        if old not in self._constrained_cotangents:
            self._constrained_cotangents[old] = self._constrain(v, eqn, at.n_mapped)
            self.splicer.count(0, 1)
            if passes_on:
                self.new[old] = self._constrained_cotangents[old]
        return [self._constrained_cotangents[old] if w is v else w for w in invars]

    def _edit_constraint(self, eqn: Any, at: Site, invars: list[Any]) -> None:
        """Replaces or removes a constraint, or constrains its operand."""
        (old,), n = eqn.outvars, at.n_mapped
        if self.splicer.which == 'operand':
            if not at.is_transposed:
                invars = [self._constrain(invars[0], eqn, n)]
            self.eqns.append(eqn.replace(invars=invars))
            if at.is_transposed:
                self.new[old] = self._constrain(old, eqn, n)
        elif self.sharding is None:
            self.new[old] = invars[0]
            self.changes.append((len(self.eqns), 'removed'))
        else:
            shape = tuple(old.aval.shape)
            made = _constraint(shape, old.aval.dtype, self.sharding, self.manual, n)
            self.changes.append((len(self.eqns), self.sharding, self.manual, n))
            self.eqns.append(
                made.replace(invars=invars, outvars=eqn.outvars, source_info=eqn.source_info)
            )
        self.splicer.count(not at.is_transposed, at.is_transposed)

    def _follow(self, eqn: Any, place: _Place) -> None:
        """Follows cotangents and constants: the cotangent of the loss is a constant."""
        is_constant = all(not is_var(v) or v in self._constants for v in eqn.invars)
        is_from_loss = is_constant and place.at.is_transposed
        if is_from_loss or any(map(self._is_cotangent, eqn.invars)):
            self._cotangents.update(eqn.outvars)
        elif is_constant:
            self._constants.update(eqn.outvars)
        for v in eqn.outvars:
            self._producer_paths[v] = place.path

    def _constrain_value(self, eqn: Any, place: _Place) -> None:
        signature = self.signature
        is_value = (
            place.is_there
            and place.at.is_transposed == signature.is_transposed
            and eqn.primitive.name == signature.primitive != CONSTRAINT
            and signature.output < len(eqn.outvars)
        )
        v = eqn.outvars[signature.output] if is_value else None
        if v is not None and _has_shape(v, signature.shape) and not _is_dropped(v):
            self.new[v] = self._constrain(v, eqn, place.at.n_mapped)
            self._before[self.new[v]] = v
            self.splicer.count(1, 0)

    def _constrain(self, v: Any, eqn: Any, n_mapped: int) -> Any:
        """Adds a constraint of a value of an equation, and returns the constrained value."""
        assert self.sharding is not None
        tag, shape = self.splicer.tag, tuple(v.aval.shape)
        self.changes.append((len(self.eqns), v, self.sharding, self.manual, n_mapped))
        constraint = _constraint(
            shape, v.aval.dtype, self.sharding, self.manual, n_mapped, is_open=tag is not None
        )
        fresh, source = constraint.outvars[0], eqn.source_info
        if tag is not None:
            source = source.replace(name_stack=source.name_stack.extend(tag(n_mapped)))
        self.eqns.append(constraint.replace(invars=[v], outvars=[fresh], source_info=source))
        return fresh


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
    is_open: bool = False,
) -> Any:
    """Returns the equation of a constraint, whose variables the caller replaces.

    `jax.vmap` adds `n_mapped` axes, at the front.
    """
    entries = spec_axes(sharding.spec)
    n_new = min(n_mapped, len(shape) - len(entries))
    spec = partition_spec([(PartitionSpec.UNCONSTRAINED,)] * n_new + entries)
    if is_open:
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * len(shape))
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
        (outer,) = opened(closed).eqns
        closed = outer.params['jaxpr']
    (eqn,) = opened(closed).eqns
    return eqn


def _is_dropped(v: Any) -> bool:
    return type(v).__name__ == 'DropVar'  # not public


def _has_shape(v: Any, shape: tuple[int, ...]) -> bool:
    return tuple(getattr(v.aval, 'shape', ())) == shape


def constrained(x: Any, sharding: Any, is_open: bool) -> Any:
    """Constrains a traced value, on no axis if the constraint is open."""
    if is_open:
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim)
        sharding = NamedSharding(sharding.mesh, spec)
    return jax.lax.with_sharding_constraint(x, sharding)
