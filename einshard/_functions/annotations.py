"""Reads the `Sharded` annotations of functions and of the classes in them."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import sys
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np

from .._errors import EinshardError
from .._notation.expression import ELLIPSIS
from .._sharding.context import AxisRule
from .._text import name_of
from .._trees.paths import leaves_with_paths, path_text
from .._trees.specs import Spec
from .sharded_type import Metadata, dimension_name, metadata_of, type_text

# The axis rules of `sharded`, with which jaxtyping annotations are specs, or None.
Rules: TypeAlias = Sequence[AxisRule] | None


class _Annotation(NamedTuple):
    """A type or its text, and the function or class that it annotates."""

    hint: Any
    owner: Any


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
    target: Any = inspect.unwrap(function)
    while not (inspect.isroutine(target) or isinstance(target, type)):
        # the annotations of an object itself are those of its fields
        is_partial = isinstance(target, functools.partial)
        target = inspect.unwrap(target.func if is_partial else target.__call__)
    specs: dict[str, Spec] = {}
    for name, annotation in _annotations(target).items():
        if name not in (*parameters, 'return'):
            continue
        reader = _SpecByType(annotation, None if name in static else rules)
        try:
            has_spec = reader.has_spec(annotation)
            if has_spec or (reader.has_text and name not in static):
                specs[name] = reader.simplified()
        except EinshardError as error:
            owner = 'the result' if name == 'return' else f"parameter '{name}'"
            text = type_text(annotation.hint)
            raise error.about(annotation_of=owner, annotation=text) from None
    out = specs.pop('return', None)
    return specs, out


class _Type(NamedTuple):
    """A type in an annotation, without text in place of it.

    Attributes:
        hint: the type, or an EinshardError if its text cannot be evaluated, or not yet.
        spec: the spec of all leaves of the type, if it is `Sharded`.
        elements: the types of the elements by key, such as '0' or 'w'. None stands for all keys.
    """

    hint: Any
    spec: Metadata | None = None
    elements: Mapping[str | None, _Annotation] = types.MappingProxyType({})


class _SpecByType:
    """A spec function for a type that contains specs, such as `dict[str, Sharded[Array, 'x*']]`."""

    def __init__(self, annotation: _Annotation, rules: Rules):
        self.annotation = annotation
        self.rules = rules
        self.has_text = False  # which cannot be evaluated yet

    def __call__(self, path: str, leaf: Any) -> Spec:
        return self._spec_at(path.split('/') if path else (), leaf, {})

    def for_tree(self, tree: Any) -> list[Spec]:
        # key paths instead of text, because dict keys may contain '/'
        known: dict[Any, tuple[_Annotation, list[_Type]]] = {}  # reading a type takes 1 ms
        return [
            self._spec_at([path_text([key]) for key in path], leaf, known)
            for path, leaf in leaves_with_paths(tree)
        ]

    def simplified(self) -> Spec:
        """Returns a spec, or a tuple of specs, with which `out_shardings` need no trace, or `self`.

        Only for a type that contains a spec, or text that cannot be evaluated yet.
        """
        first, *others = self.members(self.annotation)
        if not others and first.spec is not None:
            return first.spec.spec
        if others or typing.get_origin(first.hint) is not tuple or None in first.elements:
            return self
        items = [_SpecByType(item, self.rules) for item in first.elements.values()]
        specs = tuple(
            x.simplified() if x.has_spec(x.annotation) or x.has_text else None for x in items
        )
        return self if any(isinstance(x, _SpecByType) for x in specs) else specs

    def _spec_at(
        self, keys: Iterable[str], leaf: Any, known: dict[Any, tuple[_Annotation, list[_Type]]]
    ) -> Spec:
        def read(annotation: _Annotation) -> list[_Type]:
            key = id(annotation.hint), id(annotation.owner)  # types may be unhashable
            if key not in known:  # with the annotation, so that its id stays valid
                known[key] = annotation, self.members(annotation)
            return known[key][1]

        members = read(self.annotation)
        for key in keys:
            outer, members = members, list[_Type]()
            for member in outer:
                if member.spec or isinstance(member.hint, EinshardError):
                    members.append(member)
                elif element := member.elements.get(key, member.elements.get(None)):
                    members += read(element)
            if not members:
                self._check_is_field(outer, key)
        for member in members:
            if isinstance(member.hint, EinshardError) and np.ndim(leaf) > 0:
                raise member.hint  # it may stand for a `Sharded` type
        return _only_spec(members)

    def _check_is_field(self, members: Sequence[_Type], key: str) -> None:
        """Raises if a pytree node has specs, but its key is not one of those with a type."""
        nodes = [x for x in members if x.hint is not types.NoneType]
        elements = [element for x in nodes for element in x.elements.values()]
        if all(x.elements for x in nodes) and any(map(self.has_spec, elements)):
            name = type_text(nodes[0].hint)
            raise EinshardError(
                f"{name} has specs, but the key '{key}' of its pytree is not a field",
                code='spec',
                facts={'instead': f'register it by jax.tree_util.register_dataclass({name})'},
            )

    def has_spec(self, annotation: _Annotation, seen: tuple[Any, ...] = ()) -> bool:
        """Whether a type contains a spec. Raises if one is in a type that is not read."""
        members = self.members(annotation, seen)
        found = _only_spec(members) is not None
        for member in members:
            if member.hint not in seen:  # a type may contain itself
                seen = (*seen, member.hint)
                for element in member.elements.values():
                    found |= self.has_spec(element, seen)
        return found

    def members(self, annotation: _Annotation, seen: tuple[Any, ...] = ()) -> list[_Type]:
        """Returns the types in a union, or the only type."""
        # 1. Text may name what is defined later, so it is evaluated each time. Names inside a type
        #    of another module, such as optax.OptState, may be defined only there.
        hint, owner = annotation
        text = getattr(hint, '__forward_arg__', hint)
        if isinstance(text, str):
            is_foreign = text is not hint and 'Sharded' not in text
            found = _evaluate(text, owner)
            if not isinstance(found, EinshardError):
                return self.members(_Annotation(found, owner), seen)
            self.has_text = True
            return [_Type(Any if is_foreign else found)]

        # 2. The spec of a type is for all its leaves.
        metadata = metadata_of(hint)
        if metadata is None and self.rules is not None and getattr(hint, 'dim_str', None):
            metadata = Metadata(_translate(hint.dim_str, self.rules))
        if metadata is not None:
            return [_Type(hint, metadata)]

        # 3. Unions, type aliases, NewTypes, bound TypeVars and PyTrees stand for other types.
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        stands_for = args[:1] if origin in (Annotated, typing.Final) else ()
        if origin in (typing.Union, types.UnionType):
            stands_for = args
        for name in ('__value__', '__supertype__', '__bound__', 'leaftype'):
            if not args and getattr(hint, name, None) is not None:
                stands_for = (getattr(hint, name),)
        if stands_for:
            return [y for x in stands_for for y in self.members(_Annotation(x, owner), seen)]

        # 4. Containers have elements, and NamedTuples and dataclasses have fields.
        cls: Any = origin or hint
        inner = [_Annotation(arg, owner) for arg in args]
        elements: dict[str | None, _Annotation] = {}
        unread: list[_Annotation] = []
        is_unpacked = any(
            getattr(x, '__unpacked__', False) or typing.get_origin(x) is typing.Unpack
            for x in (hint, *args)
        )
        if hasattr(cls, '__dataclass_fields__') or hasattr(cls, '_fields'):
            elements.update(_annotations(cls))
            bases = [x for c in cls.__mro__ for x in vars(c).get('__orig_bases__', ())]
            of_bases = [x for base in bases for x in typing.get_args(base)]
            unread = inner + [
                _Annotation(x, cls) for x in of_bases if type(x) is not typing.TypeVar
            ]
        elif typing.is_typeddict(cls):
            bases = getattr(cls, '__orig_bases__', ())
            unread = [*inner, *_annotations(cls).values(), *(_Annotation(x, cls) for x in bases)]
        elif is_unpacked:  # the keys of the elements are not known
            unread = inner
        elif origin is tuple and Ellipsis not in args:
            elements.update((str(i), item) for i, item in enumerate(inner))
        elif args and isinstance(cls, type) and issubclass(cls, Iterable):
            elements[None] = inner[-1 if issubclass(cls, Mapping) else 0]
        elif origin not in (collections.abc.Callable, typing.Literal):
            unread = inner  # functions and literals have no leaves

        # 5. Specs in other types would be lost.
        if hint not in seen and any(self.has_spec(x, (*seen, hint)) for x in unread):
            raise EinshardError(
                f'specs in {type_text(hint)} are not read',
                code='spec',
                facts={
                    'instead': 'Sharded[...] in a tuple, list or dict, or on a field of a '
                    'NamedTuple or dataclass, or specs in the decorator'
                },
            )
        return [_Type(hint, None, elements)]


def _only_spec(members: Sequence[_Type]) -> Spec:
    """Returns the spec of the types in a union, or None. Raises if they have different specs."""
    specs: list[Spec] = []
    for member in members:
        if member.spec is not None and member.spec.spec not in specs:
            specs.append(member.spec.spec)
    if len(specs) > 1:
        raise EinshardError(
            'the types in a union cannot have different specs',
            code='spec',
            facts={
                'specs': ', '.join(map(repr, specs)),
                'instead': 'a spec in the decorator, which may be a function (path, leaf) -> spec',
            },
        )
    return specs[0] if specs else None


def _annotations(owner: Any) -> dict[str, _Annotation]:
    """Returns the annotations of a function, or those of a class and its bases."""
    options: dict[str, Any] = {}
    if sys.version_info >= (3, 14):  # annotations are evaluated here
        from annotationlib import Format

        options['format'] = Format.FORWARDREF
    found: dict[str, _Annotation] = {}
    for scope in reversed(owner.__mro__) if isinstance(owner, type) else [owner]:
        for name, hint in inspect.get_annotations(scope, **options).items():
            # a NamedTuple keeps text in a ForwardRef
            found[name] = _Annotation(getattr(hint, '__forward_arg__', hint), scope)
    return found


def _evaluate(text: str, owner: Any) -> Any:
    """Returns the type, or an EinshardError for text that cannot be evaluated, or not yet.

    Returns `Any` for text that is not an expression, such as 'the input'.
    """
    parameters = {x.__name__: x for x in getattr(owner, '__type_params__', ())}  # Python 3.12
    scopes: list[Any] = [parameters, getattr(owner, '__globals__', {})]
    if isinstance(owner, type):
        module = sys.modules.get(owner.__module__)
        scopes = [parameters, getattr(module, '__dict__', {}), dict(vars(owner))]
    try:
        # in a tuple, because the text may be '*tuple[A, B]'
        return eval(f'({text},)[0]', {}, ChainMap(*scopes))
    except EinshardError:
        raise
    except Exception as error:  # text may raise anything
        if isinstance(error, SyntaxError) and 'Sharded' not in text:
            return Any
        missing = error.name if isinstance(error, NameError) else None
        return EinshardError(
            f"cannot resolve the annotation '{text}' of {name_of(owner)}: {error}",
            code='spec',
            fix=missing and f"define '{missing}' in the module, outside `if TYPE_CHECKING`",
        )


def _translate(text: str, rules: Sequence[AxisRule]) -> str:
    """Translates the dimensions of a jaxtyping type to a short-form expression.

    'batch d' stays as it is. What has no name of letters is unsharded, and named '_', '__', ..:
    '4', 'n+1', 'd4', 'b=4' and '_x'. So is a name that is repeated.
    """
    dims = [dimension_name(token) for token in text.split()]
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
