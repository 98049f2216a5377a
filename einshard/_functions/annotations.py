"""`Sharded[Float[Array, 'x y'], 'x y*']`: shardings in type annotations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from .._arrays.constrain import type_matches
from .._errors import EinshardError, plural
from .._notation.expression import ELLIPSIS, Expression, parse
from .._sharding.context import current_context
from .._sharding.describe import describe_in
from .._sharding.mesh import are_equivalent
from .._sharding.resolve import resolve
from .._text import array_text, name_of
from .._trees.paths import path_text
from .._trees.specs import Spec, check_specs

if TYPE_CHECKING:
    Sharded = Annotated
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
        parameters and the result, including those inside tuples, lists, dicts, NamedTuples,
        TypedDicts, dataclasses and Equinox modules, also generic ones. A dataclass must be a pytree
        with key paths: use `jax.tree_util.register_dataclass`.

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
                    facts={
                        'got': plural(len(item) if isinstance(item, tuple) else 1, 'argument'),
                        'example': "Sharded[Float[Array, 'x y'], 'x y*']",
                    },
                )
            array_type, spec = item
            check_specs(spec)
            if not isinstance(spec, str):
                return Annotated[array_type, SpecMetadata(spec)]
            _check_names(array_type, parse(spec))
            return Annotated[array_type, _validator(spec)]


@dataclasses.dataclass(frozen=True)
class SpecMetadata:
    spec: Spec


def read_annotations(
    function: Callable[..., Any], parameters: Collection[str], static: Collection[str]
) -> tuple[dict[str, Spec], Spec]:
    """Reads the `Sharded` annotations of a function.

    Args:
        parameters: the names of the parameters, without `self`.
        static: the names of static parameters.

    Returns:
        {parameter: spec}, and the spec of the result, which is None without an annotation.
    """
    target = _find_annotated(function)
    hints = _class_hints(target) if isinstance(target, type) else _own_hints(target)
    unused = hints.keys() - {*parameters, 'return'}
    if target is function:
        unused &= {'self', 'cls'}  # other names are errors
    for name in unused:
        del hints[name]
    for name, hint in [*hints.items()]:
        packed = _packed(hint)
        if packed is not None:
            del hints[name]
            hints |= _unpacked_hints(name, packed)
    specs = {
        name: _spec_of(hint)
        for name, hint in hints.items()
        if name not in static or _contains_sharded(hint)
    }
    out = specs.pop('return', None)
    return {name: spec for name, spec in specs.items() if spec is not None}, out


def _unpacked_hints(name: str, packed: Any) -> dict[str, Any]:
    """Returns the hints of `**name: Unpack[TypedDict]` or `*name: Unpack[tuple[...]]`."""
    if typing.get_origin(packed) is not tuple:
        return _fields(packed)
    items = _tuple_items(packed)
    if len(items) == 2 and items[1] is Ellipsis:
        return {name: items[0]}
    if _contains_sharded(packed):
        raise EinshardError(
            f"the elements of '*{name}' cannot have different types with specs",
            facts={'instead': f"use one parameter for each element, or '*{name}: *tuple[T, ...]'"},
        )
    return {}


def _find_annotated(function: Any) -> Any:
    """Returns the function whose annotations are read.

    For an object with `__call__`, this is `__call__`: the annotations of the object are those of
    the fields of its class.
    """
    while True:
        inner = inspect.unwrap(function)
        if isinstance(function, functools.partial):
            function = typing.cast('functools.partial[Any]', function).func
        elif inspect.isroutine(inner) or isinstance(inner, type):
            return function
        else:
            function = function.__call__ if inner is function else inner


def _own_hints(owner: Any) -> dict[str, Any]:
    """Returns the types of a function's annotations, or of those in the body of a class."""
    if sys.version_info >= (3, 14):  # annotations are evaluated here
        from annotationlib import Format

        hints = inspect.get_annotations(owner, format=Format.FORWARDREF)
    else:
        hints = inspect.get_annotations(owner)
    return {name: _evaluate(owner, hint) for name, hint in hints.items()}


def _evaluate(owner: Any, hint: Any) -> Any:
    """Evaluates the strings in an annotation.

    Returns `_Unresolved` if that fails, or `Any` for text that is not a type, such as 'the input'.
    """
    if isinstance(hint, type):
        return hint
    if type(hint) is types.GenericAlias and not hint.__unpacked__:  # such as tuple[A, B]
        origin: Any = hint.__origin__
        return origin[tuple(_evaluate(owner, arg) for arg in hint.__args__)]
    if isinstance(owner, type):
        module = sys.modules.get(owner.__module__)
        scopes = dict(vars(owner)), vars(module) if module else {}
    else:
        scopes = (getattr(inspect.unwrap(owner), '__globals__', {}),) * 2
    parameters = getattr(owner, '__type_params__', ())  # since Python 3.12
    holder = type('', (), {'__annotations__': {'hint': hint}, '__type_params__': parameters})
    try:
        return typing.get_type_hints(holder, *scopes, include_extras=True)['hint']
    except EinshardError:
        raise
    except Exception as error:  # text may raise anything
        if isinstance(error, SyntaxError) and 'Sharded' not in str(hint):
            return Any
        missing = error.name if isinstance(error, NameError) else None
        text = getattr(hint, '__forward_arg__', hint)
        fallback = None
        if missing and 'Sharded' not in str(text):
            if not isinstance(text, str):
                fallback = hint
            elif not re.search(rf'\b{missing}\b', text):
                # the type refers to itself in its own module, as optax.OptState does
                variables = {parameter.__name__: parameter for parameter in parameters}
                return _evaluate(owner, eval(text, scopes[0], {**scopes[1], **variables}))
        return _Unresolved(owner, hint, str(error), missing, fallback)


@dataclasses.dataclass(frozen=True, eq=False)
class _Unresolved:
    """An annotation that cannot be evaluated yet, for example because it names a later class.

    Attributes:
        missing: a name that is not defined, or None after another error.
        fallback: a type with names in it that may belong to another module, such as
            optax.OptState. It is used as it is if these names are not defined at the first call.
    """

    owner: Any
    hint: Any
    reason: str
    missing: str | None
    fallback: Any

    def error(self) -> EinshardError:
        text = getattr(self.hint, '__forward_arg__', self.hint)
        fix = f"define '{self.missing}' in the module, outside `if TYPE_CHECKING`"
        return EinshardError(
            f"cannot resolve the annotation '{text}' of {name_of(self.owner)}: {self.reason}",
            fix=fix if self.missing else None,
        )


def _spec_of(hint: Any) -> Spec:
    """Returns the spec of a type, or None if the type does not contain `Sharded`.

    For `tuple[A, B]`, returns a tuple of specs. For other containers and unions, and for a tuple
    that contains one of these, returns a `_ContainerSpec`.
    """
    written, hint = hint, _unwrapped(hint)
    metadata = _find_metadata(hint)
    if metadata is not None:
        return metadata.spec
    if typing.get_origin(hint) is tuple and Ellipsis not in _tuple_items(hint):
        specs = tuple(map(_spec_of, _tuple_items(hint)))
        if not any(isinstance(spec, _ContainerSpec) for spec in specs):
            return specs if any(spec is not None for spec in specs) else None
    may_have_spec = _contains_sharded(hint) or any(
        isinstance(inner, _Unresolved) for inner in _nested_types(written)
    )
    return _ContainerSpec(written) if may_have_spec else None


def _unwrapped(hint: Any) -> Any:
    """Resolves type aliases, NewTypes, bound TypeVars, and qualifiers such as NotRequired.

    Evaluates an annotation that was `_Unresolved` again.
    """
    while True:
        if isinstance(hint, _Unresolved):
            hint = _evaluate(hint.owner, hint.hint)
            if isinstance(hint, _Unresolved):
                if hint.fallback is None:
                    return hint
                hint = hint.fallback
        if typing.get_origin(hint) in _QUALIFIERS:
            (hint,) = typing.get_args(hint)
        elif type(hint).__name__ == 'TypeAliasType':  # in typing since Python 3.12
            hint = hint.__value__
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif isinstance(hint, typing.TypeVar) and hint.__bound__ is not None:
            hint = hint.__bound__
        else:
            return hint


_QUALIFIERS = {
    typing.Required,
    typing.NotRequired,
    typing.Final,
    getattr(typing, 'ReadOnly', typing.Final),  # since Python 3.13
}


def _find_metadata(hint: Any) -> SpecMetadata | None:
    for item in getattr(hint, '__metadata__', ()):
        metadata = _specs_of_validators.get(id(item), item)
        if isinstance(metadata, SpecMetadata):
            return metadata
    return None


class _ContainerSpec:
    """A spec function for a container type, such as `dict[str, Sharded[Array, 'x*']]`."""

    def __init__(self, hint: Any):
        self.hint = hint

    def __call__(self, path: str, leaf: Any) -> Spec:
        return self._spec_at(path.split('/') if path else (), leaf)

    def for_tree(self, tree: Any) -> list[Spec]:
        # key paths instead of text, because dict keys may contain '/'
        leaves = jtu.tree_leaves_with_path(tree)
        return [self._spec_at([path_text([key]) for key in path], leaf) for path, leaf in leaves]

    def _spec_at(self, keys: Iterable[str], leaf: Any) -> Spec:
        hints = [self.hint]
        for key in keys:
            outer = hints
            hints = [inner for hint in hints for inner in _element_types(hint, key)]
            if not hints:
                _check_fields(outer, key)
        members = [member for hint in hints for member in _union_members(hint)]
        for member in members:
            if isinstance(member, _Unresolved) and np.ndim(leaf) > 0:
                raise member.error()  # it may stand for a `Sharded` type
        return _only_spec(members)


def _union_members(hint: Any) -> list[Any]:
    hint = _unwrapped(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(hint) for inner in _union_members(member)]
    return [hint]


def _only_spec(members: list[Any]) -> Spec:
    """Returns the spec of the types in a union, or None. Raises if they have different specs."""
    specs: list[Spec] = []
    for metadata in map(_find_metadata, members):
        if metadata is not None and metadata.spec not in specs:
            specs.append(metadata.spec)
    if len(specs) > 1:
        raise EinshardError(
            'the types in a union cannot have different specs',
            facts={'specs': ', '.join(map(repr, specs))},
        )
    return specs[0] if specs else None


def _element_types(hint: Any, key: str) -> list[Any]:
    """Returns the possible types of a container's element at a key such as '0' or 'w'."""
    hint = _unwrapped(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if _find_metadata(hint) is not None or isinstance(hint, _Unresolved):
        return [hint]  # `Sharded[pytree type, spec]`: the spec is for all leaves
    if origin is Annotated:
        return _element_types(args[0], key)
    if origin in (typing.Union, types.UnionType):
        return [inner for member in args for inner in _element_types(member, key)]
    if origin is tuple:
        return _tuple_element(_tuple_items(hint), key)
    fields = _fields(hint)
    if isinstance(origin, type) and not fields:
        return [args[-1] if issubclass(origin, Mapping) else args[0]] if args else []
    return [fields[key]] if key in fields else []


def _tuple_items(hint: Any) -> tuple[Any, ...]:
    """Returns the types in `tuple[...]`, and Ellipsis after the type that it repeats.

    Replaces `Unpack[tuple[A, B]]` with A and B.
    """
    items: tuple[Any, ...] = ()
    for item in typing.get_args(hint):
        packed = _packed(item)
        items += (item,) if packed is None else _tuple_items(packed)
    return items


def _tuple_element(items: tuple[Any, ...], key: str) -> list[Any]:
    if Ellipsis in items[:-1]:
        raise EinshardError('in the type of a tuple with specs, Unpack[tuple[T, ...]] must be last')
    if not key.isdigit() or not items:
        return []
    if items[-1] is Ellipsis:
        return [items[min(int(key), len(items) - 2)]]
    return [*items[int(key) :][:1]]


def _packed(hint: Any) -> Any:
    """Returns T for `Unpack[T]` and `*T`, or None for other types."""
    if typing.get_origin(hint) is typing.Unpack:
        return _unwrapped(typing.get_args(hint)[0])
    if getattr(hint, '__unpacked__', False):
        return tuple[typing.get_args(hint)]
    return None


def _check_fields(hints: list[Any], key: str) -> None:
    """Raises if the pytree nodes with `Sharded` fields have no field for a key path."""
    members = [member for hint in hints for member in _union_members(hint)]
    classes = [member for member in members if member is not types.NoneType]
    if not all(map(_fields, classes)) or not any(map(_contains_sharded, classes)):
        return
    name = name_of(typing.get_origin(classes[0]) or classes[0])
    if key.isdigit():
        raise EinshardError(
            f'{name} has `Sharded` fields, but is registered without key paths',
            fix=f'jax.tree_util.register_dataclass({name})',
        )
    raise EinshardError(
        f"{name} has `Sharded` fields, but the key '{key}' of its pytree is not a field",
        facts={'fields': ', '.join(_fields(classes[0]))},
    )


def _fields(hint: Any) -> dict[str, Any]:
    """Returns {field: type} of a NamedTuple, TypedDict, dataclass or Equinox module, or {}.

    The types of a generic class contain its type arguments instead of type variables.
    """
    cls = typing.get_origin(hint) or hint
    has_fields = (
        dataclasses.is_dataclass(cls) or typing.is_typeddict(cls) or hasattr(cls, '_fields')
    )
    return _class_hints(hint) if isinstance(cls, type) and has_fields else {}


def _class_hints(hint: Any) -> dict[str, Any]:
    arguments = _type_arguments(hint)
    generic: dict[str, Any] = {}
    hints: dict[str, Any] = {}
    # a TypedDict does not have its bases in `__mro__`
    for cls in reversed([*dict.fromkeys([*next(iter(arguments)).__mro__, *arguments])]):
        for name, own in _own_hints(cls).items():
            if typing.is_typeddict(cls) and generic.get(name) == own:
                continue  # a TypedDict repeats the annotations of its bases
            generic[name] = own
            hints[name] = _substitute(own, cls, arguments.get(cls, ()))
    return hints


def _type_arguments(hint: Any) -> dict[Any, tuple[Any, ...]]:
    """Returns {class: type arguments} of a class and its bases, with the class first."""
    cls, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    found = {cls: args}
    if not hasattr(cls, '__orig_bases__'):  # neither it nor a base is generic
        return found
    for base in vars(cls).get('__orig_bases__', cls.__bases__):
        origin = typing.get_origin(base) or base
        if isinstance(origin, type) and origin not in (typing.Generic, typing.Protocol):
            found = found | _type_arguments(_substitute(base, cls, args)) | found
    return found


def _substitute(hint: Any, cls: type, args: tuple[Any, ...]) -> Any:
    """Replaces the type variables of a generic class in a type with type arguments."""
    variables = [
        typing.Unpack[variable] if isinstance(variable, typing.TypeVarTuple) else variable
        for variable in getattr(cls, '__parameters__', ())
    ]
    if not args or not variables:
        return hint
    return typing.get_args(tuple[(*variables, hint)][args])[-1]  # type: ignore[reportInvalidTypeArguments]


def _contains_sharded(hint: Any) -> bool:
    return any(_find_metadata(inner) is not None for inner in _nested_types(hint))


def _nested_types(hint: Any, found: list[Any] | None = None) -> list[Any]:
    """Returns a type and the types in it: arguments of generic types, and types of fields."""
    found = [] if found is None else found
    if isinstance(hint, _Unresolved):
        found.append(hint)
    hint = _unwrapped(hint)
    if hint not in found:  # a type may contain itself
        found.append(hint)
        _only_spec(_union_members(hint))
        args = typing.get_args(hint)
        inner = args[:1] if typing.get_origin(hint) is Annotated else args
        for inner_hint in (*inner, *_fields(hint).values()):
            _nested_types(inner_hint, found)
    return found


def _check_names(array_type: Any, expression: Expression) -> None:
    """Raises if the axis names of `expression` do not match the dimensions of a jaxtyping type."""
    text = getattr(array_type, 'dim_str', None)
    if not isinstance(text, str):
        return
    dims = [_dimension(token) for token in text.split()]
    names = list(expression.names)
    if not _match(names, dims):
        # not repr(array_type), which includes the module of jax.Array in JAX 0.9 and 0.10
        type_name = array_type.__name__.partition('[')[0]
        array_class = getattr(array_type.array_type, '__name__', 'Any').rpartition('.')[2]
        raise expression.error(
            f"the expression names the axes '{' '.join(names)}', but the type has '{text}'",
            expression.left if not expression.short else expression.right,
            type=f"{type_name}[{array_class}, '{text}']",
        )


def _dimension(token: str) -> str | None:
    """Returns the axis name that a dimension of a jaxtyping type requires.

    Returns '...' for '*batch' and '...'. Returns None for '3', '_' and 'n+1', which match any name.
    """
    token = token.lstrip('#?')
    if token == ELLIPSIS or token.startswith('*'):
        return ELLIPSIS
    is_name = not token.startswith('_') and re.fullmatch(r'[^\W\d]+', token)
    return token if is_name else None


def _match(names: list[str], dims: list[str | None]) -> bool:
    """Whether axis names match dimensions.

    '...' in `names` matches any number of dimensions; '...' in `dims` matches only '...'.
    """
    if not names or not dims:
        return names == dims or names == [ELLIPSIS]
    if names[0] == ELLIPSIS:
        return any(_match(names[1:], dims[i:]) for i in range(len(dims) + 1))
    if dims[0] == ELLIPSIS:
        return False
    return dims[0] in (None, names[0]) and _match(names[1:], dims[1:])


# Keyed by the id of a beartype validator, because beartype accepts no other metadata after a
# validator. Validators are cached forever, so their ids stay valid.
_specs_of_validators: dict[int, SpecMetadata] = {}


@functools.cache
def _validator(spec: str) -> Any:
    # imported here because it takes 100 ms, and `import einshard` takes only 40 ms
    from beartype.vale import Is

    validator = Is[_make_check(spec)]
    _specs_of_validators[id(validator)] = SpecMetadata(spec)
    return validator


def _make_check(spec: str) -> Callable[[Any], bool]:
    def check(x: Any) -> bool:  # returns True or raises
        if not isinstance(x, jax.Array):
            return True
        sharding = _known_sharding(x)
        if sharding is None:
            return True
        mesh = sharding.mesh if isinstance(x, Tracer) else None
        context = current_context(mesh)
        shape = x.shape if context.replicates_indivisible else x.ndim
        try:
            placement = resolve(spec, shape, context)
        except EinshardError as error:
            raise _as_annotation_error(error.about(array=array_text(x))) from None
        if mesh is not None:
            matches = type_matches(x, placement.sharding)
        else:
            matches = are_equivalent(sharding, placement.sharding, x.ndim)
        if matches:
            return True
        text = describe_in(placement.expression, sharding, x.ndim)
        raise _as_annotation_error(
            placement.expression.error(
                f"the array is sharded as '{text}', not as its annotation says",
                [term for term in placement.expression.right if term.spans_devices],
                array=array_text(x),
            )
        )

    return check


@functools.cache
def _annotation_error_class() -> type[EinshardError]:
    from jaxtyping import AnnotationError

    # jaxtyping reraises an AnnotationError, but replaces any other error with one that does not
    # show the sharding of the array
    name, bases = EinshardError.__name__, (EinshardError, AnnotationError)
    return type(name, bases, {'__module__': 'einshard', '__doc__': EinshardError.__doc__})


def _as_annotation_error(error: EinshardError) -> EinshardError:
    return _annotation_error_class()(**error.parts())


def _known_sharding(x: Any) -> Any:
    """Returns the sharding of an array, or None for a tracer unless all mesh axes are explicit."""
    if not isinstance(x, Tracer):
        return x.sharding
    sharding: Any = jax.typeof(x).sharding
    return sharding if set(sharding.mesh.axis_types) == {AxisType.Explicit} else None
