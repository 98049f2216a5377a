"""`Sharded[Float[Array, 'x y'], 'x y*']`: shardings in type annotations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from .._arrays.constrain import type_matches
from .._errors import EinshardError, plural
from .._notation.expression import ELLIPSIS, Expression, parse
from .._sharding.context import AxisRule
from .._sharding.describe import describe_in
from .._sharding.mesh import are_equivalent
from .._sharding.resolve import resolve
from .._sharding.scopes import current_context
from .._text import array_text, name_of
from .._trees.paths import leaves_with_paths, path_text
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
        parameters and the result, including those inside tuples, lists, dicts, NamedTuples,
        dataclasses and Equinox modules, also generic ones. A dataclass must be a pytree with key
        paths: use `jax.tree_util.register_dataclass`. Specs in TypedDicts, and in unpacked types
        such as `*args: *tuple[...]`, are an error.

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
                return Annotated[array_type, SpecMetadata(spec)]
            _check_names(array_type, parse(spec))
            return Annotated[array_type, _validator(spec)]


@dataclasses.dataclass(frozen=True)
class SpecMetadata:
    spec: Spec


# The axis rules of `sharded`, with which jaxtyping annotations are specs, or None.
Rules: TypeAlias = Sequence[AxisRule] | None


def read_annotations(
    function: Callable[..., Any],
    parameters: Collection[str],
    static: Collection[str],
    rules: Rules = None,
) -> tuple[dict[str, Spec], Spec]:
    """Reads the `Sharded` annotations of a function, and with `rules` also those of jaxtyping.

    Args:
        parameters: the names of the parameters, without `self`.
        static: the names of static parameters.

    Returns:
        {parameter: spec}, and the spec of the result, which is None without an annotation.
    """
    target = _find_annotated(function)
    hints = class_hints(target) if isinstance(target, type) else own_hints(target)
    unused = hints.keys() - {*parameters, 'return'}
    if target is function:
        unused &= {'self', 'cls'}  # other names are errors
    specs: dict[str, Spec] = {}
    for name, hint in hints.items():
        if name in unused or (name in static and not _contains_spec(hint)):
            continue
        try:
            specs[name] = _spec_of(hint, rules)
        except EinshardError as error:
            owner = 'the result' if name == 'return' else f"parameter '{name}'"
            raise error.about(annotation_of=owner) from None
    out = specs.pop('return', None)
    return {name: spec for name, spec in specs.items() if spec is not None}, out


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


def _spec_of(hint: Any, rules: Rules) -> Spec:
    """Returns the spec of a type, or None if the type does not contain one.

    For `tuple[A, B]`, returns a tuple of specs, with which `out_shardings` need no trace. For other
    containers and unions, and for a tuple that contains one of these, returns a `_SpecByType`.
    """
    found = nested_types(hint)
    for inner in found:
        _only_spec(union_members(inner))  # raises for different specs
        kind = kind_not_read(inner)
        if kind is not None and _contains_spec(inner, rules):
            raise EinshardError(
                f'specs in {kind} are not read',
                code='spec',
                facts={
                    'instead': 'use a NamedTuple or a dataclass, or pass specs to the decorator'
                },
            )
    written, hint = hint, unwrapped(hint)
    metadata = _find_metadata(hint, rules)
    if metadata is not None:
        return metadata.spec
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and Ellipsis not in args:
        specs = tuple(_spec_of(arg, rules) for arg in args)
        if not any(isinstance(spec, _SpecByType) for spec in specs):
            return specs if any(spec is not None for spec in specs) else None
    has_spec = _contains_spec(written, rules) or any(isinstance(x, Unresolved) for x in found)
    return _SpecByType(written, rules) if has_spec else None


def _contains_spec(hint: Any, rules: Rules = None) -> bool:
    return any(_find_metadata(inner, rules) is not None for inner in nested_types(hint))


def _find_metadata(hint: Any, rules: Rules = None) -> SpecMetadata | None:
    for item in getattr(hint, '__metadata__', ()):
        metadata = _specs_of_validators.get(id(item), item)
        if isinstance(metadata, SpecMetadata):
            return metadata
    text = getattr(getattr(hint, 'leaftype', hint), 'dim_str', None)  # of `PyTree[...]`, or itself
    if rules is None or not isinstance(text, str) or not text.split():
        return None
    return SpecMetadata(_translate(text, rules))


class _SpecByType:
    """A spec function for a type that contains specs, such as `dict[str, Sharded[Array, 'x*']]`."""

    def __init__(self, hint: Any, rules: Rules):
        self.hint = hint
        self.rules = rules

    def __call__(self, path: str, leaf: Any) -> Spec:
        return self._spec_at(path.split('/') if path else (), leaf)

    def for_tree(self, tree: Any) -> list[Spec]:
        # key paths instead of text, because dict keys may contain '/'
        leaves = leaves_with_paths(tree)
        return [self._spec_at([path_text([key]) for key in path], leaf) for path, leaf in leaves]

    def _spec_at(self, keys: Iterable[str], leaf: Any) -> Spec:
        hints = [self.hint]
        for key in keys:
            outer = hints
            hints = [inner for hint in hints for inner in _element_types(hint, key, self.rules)]
            if not hints:
                _check_fields(outer, key)
        members = [member for hint in hints for member in union_members(hint)]
        for member in members:
            if isinstance(member, Unresolved) and np.ndim(leaf) > 0:
                raise member.error()  # it may stand for a `Sharded` type
        if self.rules is not None:  # types of jaxtyping may differ in the number of dimensions
            members = [x for x in members if _fits(x, np.ndim(leaf))]
        return _only_spec(members, self.rules)


def _only_spec(members: list[Any], rules: Rules = None) -> Spec:
    """Returns the spec of the types in a union, or None. Raises if they have different specs."""
    specs: list[Spec] = []
    for member in members:
        metadata = _find_metadata(member, rules)
        if metadata is not None and metadata.spec not in specs:
            specs.append(metadata.spec)
    if len(specs) > 1:
        raise EinshardError(
            'the types in a union cannot have different specs',
            code='spec',
            facts={'specs': ', '.join(map(repr, specs))},
        )
    return specs[0] if specs else None


def _element_types(hint: Any, key: str, rules: Rules) -> list[Any]:
    """Returns the possible types of a container's element at a key such as '0' or 'w'."""
    hint = unwrapped(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if _find_metadata(hint, rules) is not None or isinstance(hint, Unresolved):
        return [hint]  # `Sharded[pytree type, spec]`: the spec is for all leaves
    if origin is Annotated:
        return _element_types(args[0], key, rules)
    if origin in (typing.Union, types.UnionType):
        return [inner for member in args for inner in _element_types(member, key, rules)]
    if origin is tuple and Ellipsis not in args:
        return [*args[int(key) :][:1]] if key.isdigit() else []
    fields = fields_of(hint)
    if isinstance(origin, type) and not fields:
        return [args[-1] if issubclass(origin, Mapping) else args[0]] if args else []
    return [fields[key]] if key in fields else []


def _check_fields(hints: list[Any], key: str) -> None:
    """Raises if the pytree nodes with `Sharded` fields have no field for a key path."""
    members = [member for hint in hints for member in union_members(hint)]
    classes = [member for member in members if member is not types.NoneType]
    if not all(map(fields_of, classes)) or not any(map(_contains_spec, classes)):
        return
    name = name_of(typing.get_origin(classes[0]) or classes[0])
    if key.isdigit():
        raise EinshardError(
            f'{name} has `Sharded` fields, but is registered without key paths',
            code='spec',
            facts={'instead': f'register it by jax.tree_util.register_dataclass({name})'},
        )
    raise EinshardError(
        f"{name} has `Sharded` fields, but the key '{key}' of its pytree is not a field",
        code='spec',
        facts={'fields': ', '.join(fields_of(classes[0]))},
    )


def _check_names(array_type: Any, expression: Expression) -> None:
    """Raises if the axis names of `expression` do not match the dimensions of a jaxtyping type."""
    text = getattr(array_type, 'dim_str', None)
    if not isinstance(text, str):
        return
    dims = [_dimension(token) for token in text.split()]
    names = list(expression.names)
    if not _match(names, dims):
        # not repr(array_type), which includes the module of jax.Array in JAX 0.10
        type_name = array_type.__name__.partition('[')[0]
        array_class = getattr(array_type.array_type, '__name__', 'Any').rpartition('.')[2]
        raise expression.error(
            f"the expression names the axes '{' '.join(names)}', but the type has '{text}'",
            expression.left if not expression.short else expression.right,
            code='spec',
            type=f"{type_name}[{array_class}, '{text}']",
        )


def _translate(text: str, rules: Sequence[AxisRule]) -> str:
    """Translates the dimensions of a jaxtyping type to a short-form expression.

    'batch d' stays as it is. What has no name of letters is unsharded, and named '_', '__', ..:
    '4', 'n+1', 'd4', 'b=4' and '_x'. So is a name that is repeated.
    """
    tokens = text.split()
    dims = [_dimension(token) for token in tokens]
    ruled = {rule.name for rule in rules if rule.placement}
    terms: list[str] = []
    for dim in dims:
        is_repeated = dim != ELLIPSIS and dims.count(dim) > 1
        if dim is not None and is_repeated and dim in ruled:
            raise EinshardError(
                f"axis '{dim}' has a rule, but '{text}' names several axes '{dim}'",
                code='axis-rules',
                facts={'instead': 'a spec for this array, which wins over its annotation'},
            )
        terms.append('_' * (len(terms) + 1) if dim is None or is_repeated else dim)
    return ' '.join(terms)


def _fits(hint: Any, ndim: int) -> bool:
    """Whether an array with `ndim` dimensions may have this type."""
    text = getattr(hint, 'dim_str', None)
    if not isinstance(text, str):
        return True
    dims = [_dimension(token) for token in text.split()]
    return ndim >= len(dims) - 1 if ELLIPSIS in dims else ndim == len(dims)


def _dimension(token: str) -> str | None:
    """Returns the axis name that a dimension of a jaxtyping type requires.

    Returns '...' for '*batch' and '...'. Returns None for '3', '_' and 'n+1', which match any name.
    """
    name = token.lstrip('#?*')
    if name == ELLIPSIS or '*' in token[: len(token) - len(name)]:
        return ELLIPSIS
    is_name = not name.startswith('_') and re.fullmatch(r'[^\W\d]+', name)
    return name if is_name else None


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
        sharding: Any = jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding
        mesh = sharding.mesh if isinstance(x, Tracer) else None
        if mesh is not None and set(mesh.axis_types) != {AxisType.Explicit}:
            return True  # the type of a traced value does not have its sharding
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
                code='spec',
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


def own_hints(owner: Any) -> dict[str, Any]:
    """Returns the types of a function's annotations, or of those in the body of a class."""
    if sys.version_info >= (3, 14):  # annotations are evaluated here
        from annotationlib import Format

        hints = inspect.get_annotations(owner, format=Format.FORWARDREF)
    else:
        hints = inspect.get_annotations(owner)
    return {name: _evaluate(owner, hint) for name, hint in hints.items()}


def fields_of(hint: Any) -> dict[str, Any]:
    """Returns {field: type} of a NamedTuple, dataclass or Equinox module, or {}."""
    cls = typing.get_origin(hint) or hint
    has_fields = dataclasses.is_dataclass(cls) or hasattr(cls, '_fields')
    return class_hints(hint) if isinstance(cls, type) and has_fields else {}


def class_hints(hint: Any) -> dict[str, Any]:
    """Returns the types of a class. Those of a generic class contain its type arguments."""
    arguments = _type_arguments(hint)
    hints: dict[str, Any] = {}
    for cls in reversed((typing.get_origin(hint) or hint).__mro__):
        for name, own in own_hints(cls).items():
            hints[name] = _substitute(own, cls, arguments.get(cls, ()))
    return hints


def _type_arguments(hint: Any) -> dict[Any, tuple[Any, ...]]:
    """Returns {class: type arguments} of a class and its generic bases."""
    cls, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    found = {cls: args}
    for base in getattr(cls, '__orig_bases__', ()):
        origin = typing.get_origin(base)
        if isinstance(origin, type) and origin not in (typing.Generic, typing.Protocol):
            found = _type_arguments(_substitute(base, cls, args)) | found
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


def nested_types(hint: Any, found: list[Any] | None = None) -> list[Any]:
    """Returns a type and the types in it: arguments of generic types, and types of fields."""
    found = [] if found is None else found
    if isinstance(hint, Unresolved):
        found.append(hint)
    hint = unwrapped(hint)
    if hint not in found:  # a type may contain itself
        found.append(hint)
        args = typing.get_args(hint)
        inner = args[:1] if typing.get_origin(hint) is typing.Annotated else args
        cls, fields = typing.get_origin(hint) or hint, fields_of(hint)
        if typing.is_typeddict(cls):  # lacks the type arguments of its bases
            inner, fields = (*inner, *getattr(cls, '__orig_bases__', ())), own_hints(cls)
        for inner_hint in (*inner, *fields.values()):
            nested_types(inner_hint, found)
    return found


def kind_not_read(hint: Any) -> str | None:
    """Describes a type in which specs are not read, or None for other types."""
    items = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
    cls = typing.get_origin(hint) or hint
    if typing.is_typeddict(cls):
        return f'the TypedDict {name_of(cls)}'
    if any(
        typing.get_origin(x) is typing.Unpack or (type(x) is types.GenericAlias and x.__unpacked__)
        for x in items
    ):
        return 'an unpacked type, such as *args: *tuple[...],'
    return None


def _evaluate(owner: Any, hint: Any) -> Any:
    """Evaluates the strings in an annotation.

    Returns `Unresolved` if that fails, or `Any` for text that is not a type, such as 'the input'.
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
        text = getattr(hint, '__forward_arg__', hint)
        missing = error.name if isinstance(error, NameError) else None
        is_foreign = missing is not None and 'Sharded' not in str(text)
        if is_foreign and isinstance(text, str) and not re.search(rf'\b{missing}\b', text):
            # the type refers to itself in its own module, as optax.OptState does
            variables = {parameter.__name__: parameter for parameter in parameters}
            return _evaluate(owner, eval(text, scopes[0], {**scopes[1], **variables}))
        return Unresolved(
            owner, hint, str(error), missing, is_foreign and not isinstance(text, str)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Unresolved:
    """An annotation that cannot be evaluated yet, for example because it names a later class.

    Attributes:
        missing: a name that is not defined, or None after another error.
        is_foreign: whether it is a type with names in it that may belong to another module, such as
            optax.OptState. It is used as it is if they are not defined at the first call.
    """

    owner: Any
    hint: Any
    reason: str
    missing: str | None
    is_foreign: bool

    def error(self) -> EinshardError:
        text = getattr(self.hint, '__forward_arg__', self.hint)
        return EinshardError(
            f"cannot resolve the annotation '{text}' of {name_of(self.owner)}: {self.reason}",
            code='spec',
            fix=self.missing
            and f"define '{self.missing}' in the module, outside `if TYPE_CHECKING`",
        )


def unwrapped(hint: Any) -> Any:
    """Resolves type aliases, NewTypes, bound TypeVars and Final.

    Evaluates an annotation that was `Unresolved` again.
    """
    while True:
        if isinstance(hint, Unresolved):
            hint = _evaluate(hint.owner, hint.hint)
            if isinstance(hint, Unresolved):
                if not hint.is_foreign:
                    return hint
                hint = hint.hint
        if typing.get_origin(hint) is typing.Final:
            (hint,) = typing.get_args(hint)
        elif type(hint).__name__ == 'TypeAliasType':  # in typing since Python 3.12
            hint = hint.__value__
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif isinstance(hint, typing.TypeVar) and hint.__bound__ is not None:
            hint = hint.__bound__
        else:
            return hint


def union_members(hint: Any) -> list[Any]:
    hint = unwrapped(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(hint) for inner in union_members(member)]
    return [hint]
