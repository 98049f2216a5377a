"""Resolves a spec in a context: finds its Placement, warns about typos, and suggests fixes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace

from jax.sharding import AbstractMesh, NamedSharding

from .._cache import cached
from .._errors import EinshardError, Suggestion, public
from .._notation.hints import mesh_axes_hint, spacing_hint
from .._working_fixes import keep_working_suggestions, with_working_fix, works
from .apply_axis_rules import fix_in_axis_rules
from .context import Context, changed
from .leaf_spec import AnySpec, LeafSpec, as_leaf_spec, unconstrained_error, with_expression
from .mesh import MeshLike, device_mesh, is_canonical_mesh, partition_text, sizes_of
from .placement import (
    Placement,
    Shape,
    check_types,
    is_users_mesh,
    make_placement,
    may_use_rules,
    with_unconstrained,
)
from .program_mesh import with_legacy_mesh_note
from .scopes import current_context
from .tracing import user_stacklevel


@dataclass(frozen=True, slots=True)
class LikelyTypo(Placement):
    """The placement of a valid expression that is likely a typo.

    A class of its own, because one check of the type then tells fast paths that `resolve` has
    something to say.
    """

    warning: str = ''


@public
def make_sharding(
    expression: str,
    *,
    ndim: int | None = None,
    mesh: MeshLike | None = None,
    memory_kind: str | None = None,
) -> NamedSharding:
    """Returns the `jax.sharding.NamedSharding` for an expression.

        >>> import jax
        >>> from einshard import make_sharding
        >>> n = jax.device_count()
        >>> sharding = make_sharding('batch d -> batch* d')
        >>> sharding.shard_shape((8 * n, 4))
        (8, 4)

    Different expressions for the same placement give equal shardings with equal hashes, so
    `jax.jit` traces once for all of them. A repeated expression costs one cache lookup.

    Args:
        expression: the placement, in einshard's notation.
        ndim: the rank of the array. Required only if a sharded axis comes after '...' on the left
            side. If given, the expression must have this rank.
        mesh: a mesh, or a sequence of devices. Default: the mesh of an enclosing `sharded` function
            or of `jax.set_mesh`, or else all devices. An `AbstractMesh` gives a sharding without
            devices.
        memory_kind: the memory on each device, as in `NamedSharding`: 'device', 'pinned_host', ...

    Raises:
        EinshardError: the expression is invalid, or does not fit the rank or the mesh.
    """
    if ndim is not None and type(ndim) is not int:
        check_types(expression, ndim, memory_kind)  # the cache cannot tell 2.0 from 2
    context = current_context(mesh)
    if memory_kind is not None:
        check_types(expression, ndim, memory_kind)
        context = changed(context, memory_kind=memory_kind)
    return resolve(expression, ndim, context).sharding


def resolve(
    spec: AnySpec,
    shape: Shape | int | None,
    context: Context,
    *,
    owner: str | None = None,
    traced: bool = False,
) -> Placement:
    """Finds the placement of an array, warns about a likely typo, and raises if there is none.

    Args:
        shape: the shape or the rank, or None if neither is known.
        owner: what has the option `missing='replicate'`, such as 'einshard'. Errors about missing
            mesh axes suggest it. None if the caller has no such option.
        traced: whether the array is a traced value, which allows P.UNCONSTRAINED.
    """
    try:
        found = find_placement(spec, shape, context)
    except TypeError:  # raised by the cache for unhashable arguments
        check_types(spec, shape, context.memory_kind)
        raise
    if isinstance(found, Placement):
        if traced or not found.is_unconstrained:
            if isinstance(found, LikelyTypo):  # Python shows it only once per line of user code
                warnings.warn(found.warning, stacklevel=user_stacklevel())
            return found
        found = _about_spec(unconstrained_error(), spec)
    error = with_legacy_mesh_note(found, context.mesh)
    fix = error.fix
    if fix == _IGNORE_MISSING:
        fix = f'{owner}(..., {_IGNORE_MISSING})' if owner else None
    if isinstance(spec, LeafSpec) and spec.unconstrained and not traced:
        fix = None
    raise error.with_fix(fix)  # a copy, because the cached error must not keep a traceback


_IGNORE_MISSING = "missing='replicate'"  # the fix of cached errors, which do not know the caller


@cached
def find_placement(
    spec: AnySpec, shape: Shape | int | None, context: Context
) -> Placement | EinshardError:
    """Returns the placement, or an error whose fix was tested. Allows P.UNCONSTRAINED.

    This is the only cache from spec to placement. Testing a fix takes 1 ms, so errors are cached
    too: many leaves of a tree may have one shape.
    """
    try:
        placement = make_placement(spec, shape, context)
    except EinshardError as error:
        error = _about_spec(_with_working_fix(error, spec, shape, context), spec)
        return error.with_fix(fix_in_axis_rules(error.fix, error, spec, context))
    # a valid expression may still be a likely typo, if the expression that was meant works
    leaf_spec, warning = as_leaf_spec(spec), None

    def attempt(text: str) -> Placement:
        return make_placement(with_expression(leaf_spec, text), shape, context)

    if leaf_spec.partition is not None:
        return placement
    if placement.replicated_by_default:
        names = [name for name, size in sizes_of(context.lowering_mesh).items() if size > 1]
        warning = mesh_axes_hint(leaf_spec.expression, names, attempt)
    elif not may_use_rules(leaf_spec.expression, context):
        warning = spacing_hint(leaf_spec.expression, attempt)
    if warning is None:
        return placement
    values = (getattr(placement, field.name) for field in fields(placement))
    return replace(LikelyTypo(*values, warning=warning), replicated_by_default=False)


def _about_spec(error: EinshardError, spec: AnySpec) -> EinshardError:
    """Adds the facts of a spec that the expression of the error does not show."""
    if isinstance(spec, LeafSpec) and spec.partition is not None:
        error = error.about(spec=partition_text(spec.partition))
    return error.about(rule=spec.rule) if isinstance(spec, LeafSpec) and spec.rule else error


def _with_working_fix(
    error: EinshardError, spec: AnySpec, shape: Shape | int | None, context: Context
) -> EinshardError:
    """Tests the fix of an error, and replaces or removes it if it fails.

    For an error without a fix, suggests an option that ignores missing mesh axes, if that works.
    """

    def attempt(candidate: AnySpec, context: Context = context) -> Placement:
        return make_placement(candidate, shape, context)

    def retry(text: str) -> Placement:
        return attempt(with_expression(spec, text))

    def retry_on(n: int) -> Placement:
        mesh = device_mesh(AbstractMesh((n,), ('n',)))
        return attempt(spec, changed(context, mesh=mesh, mesh_is_ambient=False))

    if isinstance(shape, tuple) and not is_users_mesh(context):
        result = keep_working_suggestions(error, retry, retry_on)
    else:
        result = with_working_fix(error, retry)
    if isinstance(result.fix, Suggestion):
        fixed = with_expression(spec, result.fix.expression)
        if not isinstance(spec, LeafSpec) or spec.partition is None:
            return result.with_fix(Suggestion(str(fixed)))
        sharding = attempt(fixed).sharding
        return result.with_fix(
            partition_text(
                (with_unconstrained(sharding, spec) if spec.unconstrained else sharding).spec
            )
        )
    mesh, rules = context.mesh, context.axis_rules
    # suggest no option if mesh= was probably forgotten, or if the error's own fix failed: then the
    # expression is probably wrong on any mesh
    if mesh is None or error.fix is not None or not isinstance(spec, str | LeafSpec):
        return result
    lenient_rules = tuple(rule._replace(ignores_missing=True) for rule in rules)
    lenient = changed(context, axis_rules=lenient_rules)
    if lenient is not context and works(lambda: attempt(spec, lenient)):
        return result.with_fix("axis_rules(..., missing='replicate')")
    try:
        missing = attempt(spec, changed(context, missing='replicate')).missing_axes
    except EinshardError:
        return result
    if missing and is_canonical_mesh(mesh):  # ignoring all axes would not help
        sizes = (
            f'{missing[0]}={mesh.size}' if len(missing) == 1 else '=..., '.join(missing) + '=...'
        )
        return result.about(expected=f'a mesh with named axes: mesh=device_mesh(devices, {sizes})')
    # the option helps only if mesh axes are missing
    return result.with_fix(_IGNORE_MISSING) if missing else result
