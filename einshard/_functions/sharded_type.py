"""`Sharded[Float[Array, 'x y'], 'x y*']`: a type with a spec."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from typing import TYPE_CHECKING, Annotated, Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType

from .._arrays.constrain import type_matches
from .._errors import EinshardError, plural
from .._notation.expression import ELLIPSIS, Expression, parse
from .._sharding.describe import describe_in
from .._sharding.mesh import are_equivalent
from .._sharding.resolve import resolve
from .._sharding.scopes import current_context
from .._text import array_text
from .._trees.specs import Spec, check_specs

if TYPE_CHECKING:
    # mypy rejects `Sharded = Annotated`
    from typing import Annotated as Sharded  # type: ignore[reportUnusedImport]
else:

    class Sharded:
        """An array type with a spec, for annotations: `Sharded[array type, spec]`.

            >>> import jax
            >>> import jax.numpy as jnp
            >>> from einshard import Sharded, sharded
            >>> from jaxtyping import Array, Float
            >>> @sharded
            ... def double(x: Sharded[Float[Array, 'x y'], 'x y*']) -> Sharded[Array, 'x* y']:
            ...     return 2 * x
            >>> y = double(jnp.ones((3 * jax.device_count(), jax.device_count())))
            >>> y.addressable_shards[0].data.shape == (3, jax.device_count())
            True

        Type checkers see only the array type. `@sharded` without specs reads the annotations of the
        parameters and the result, including those inside unions, tuples, lists, dicts,
        NamedTuples, dataclasses and Equinox modules. A dataclass must be a pytree with key paths:
        use `jax.tree_util.register_dataclass`. Specs in other types are an error: in TypedDicts, in
        the arguments of generic classes, and in unpacked types such as `*args: *tuple[...]`.

        Under beartype, with or without `jaxtyping.jaxtyped`, a call raises EinshardError if an
        array is not sharded as the expression in its annotation says. Pytree types, and specs that
        are not expressions, are not checked. Traced arrays are checked only if all mesh axes are
        explicit, because only then is the sharding part of the array's type.

        The array type may be a jaxtyping type, `jax.Array`, or a pytree type. All leaves of a
        pytree have the same spec. The types in a union cannot have different specs. The axis names
        of an expression must match the dimensions of a jaxtyping type. '...' in the expression
        matches any number of dimensions.

        Raises:
            EinshardError: the expression is invalid, or its axis names differ from the dimensions
                of the jaxtyping type.
        """

        def __class_getitem__(cls, item: Any) -> Any:
            if not isinstance(item, tuple) or len(item) != 2:
                raise EinshardError(
                    'Sharded takes an array type and a spec',
                    code='spec',
                    facts={
                        'got': plural(len(item) if isinstance(item, tuple) else 1, 'argument'),
                        'example': "Sharded[Float[Array, 'x y'], 'x y*']",
                    },
                )
            array_type, spec = item
            check_specs(spec)
            if not isinstance(spec, str):
                return Annotated[array_type, Metadata(spec)]
            _check_names(array_type, parse(spec))
            return Annotated[array_type, _validator(spec)]


@dataclasses.dataclass(frozen=True, repr=False)
class Metadata:
    """The spec of a `Sharded` type. Called by beartype, checks an array."""

    spec: Spec

    def __repr__(self) -> str:
        return repr(self.spec)

    def __call__(self, x: Any) -> bool:
        """Returns True, or raises an error that shows the sharding of the array."""
        if not isinstance(x, jax.Array):
            return True
        sharding: Any = jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding
        mesh = sharding.mesh if isinstance(x, Tracer) else None
        if mesh is not None and set(mesh.axis_types) != {AxisType.Explicit}:
            return True  # the type of a traced value does not have its sharding
        context = current_context(mesh)
        shape = x.shape if context.replicates_indivisible else x.ndim
        try:
            placement = resolve(self.spec, shape, context)
            if mesh is not None:
                matches = type_matches(x, placement.sharding)
            else:
                matches = are_equivalent(sharding, placement.sharding, x.ndim)
            if not matches:
                text = describe_in(placement.expression, sharding, x.ndim)
                raise placement.expression.error(
                    f"the array is sharded as '{text}', not as its annotation says",
                    [term for term in placement.expression.right if term.spans_devices],
                    code='spec',
                )
        except EinshardError as error:
            raise _annotation_error_class()(**error.about(array=array_text(x)).parts()) from None
        return True


def metadata_of(hint: Any) -> Metadata | None:
    """Returns the metadata of a `Sharded` type, or None for other types."""
    for item in getattr(hint, '__metadata__', ()):
        metadata = _metadata_of_validators.get(id(item), item)
        if isinstance(metadata, Metadata):
            return metadata
    return None


# Keyed by the id of a beartype validator, because beartype accepts no other metadata after a
# validator. Validators are cached forever, so their ids stay valid.
_metadata_of_validators: dict[int, Metadata] = {}


@functools.cache
def _validator(spec: str) -> Any:
    # imported here because it takes 100 ms, and `import einshard` takes only 40 ms
    from beartype.vale import Is

    metadata = Metadata(spec)
    validator = Is[metadata]
    _metadata_of_validators[id(validator)] = metadata
    return validator


@functools.cache
def _annotation_error_class() -> type[EinshardError]:
    from jaxtyping import AnnotationError

    # jaxtyping reraises an AnnotationError, but replaces any other error with one that does not
    # show the sharding of the array
    name, bases = EinshardError.__name__, (EinshardError, AnnotationError)
    return type(name, bases, {'__module__': 'einshard', '__doc__': EinshardError.__doc__})


def _check_names(array_type: Any, expression: Expression) -> None:
    """Raises if the axis names of `expression` do not match the dimensions of a jaxtyping type."""
    text = getattr(array_type, 'dim_str', None)
    if not isinstance(text, str):
        return
    # '_' stands for a dimension that matches any name, and '...' in the names for any dimensions
    dims = [name or '_' for name in map(dimension_name, text.split())]
    names = list(expression.names)
    pattern = ''.join(r'(\S+ )*' if x == ELLIPSIS else f'({x}|_) ' for x in names)
    if not re.fullmatch(pattern, ''.join(f'{dim} ' for dim in dims)):
        raise expression.error(
            f"the expression names the axes '{' '.join(names)}', but the type has '{text}'",
            expression.left if not expression.short else expression.right,
            code='spec',
            type=type_text(array_type),
        )


def dimension_name(token: str) -> str | None:
    """Returns the axis name that a dimension of a jaxtyping type requires.

    Returns '...' for '*batch' and '...'. Returns None for '3', '_' and 'n+1', which match any name.
    """
    name = token.lstrip('#?*')
    if name == ELLIPSIS or '*' in token[: len(token) - len(name)]:
        return ELLIPSIS
    is_name = not name.startswith('_') and re.fullmatch(r'[^\W\d]+', name)
    return name if is_name else None


def type_text(hint: Any) -> str:
    """Formats an annotation as in code, such as "list[Sharded[Array, 'x* y']]"."""
    if isinstance(hint, str):
        return hint
    without_modules = re.sub(r'[\w.]+\.(?=\w)', '', inspect.formatannotation(hint))
    return re.sub(r'Annotated\[(.*?), Is\[(.*?)\]\]', r'Sharded[\1, \2]', without_modules)
