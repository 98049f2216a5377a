"""Evaluates type hints, and reads the fields and type arguments of classes."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from typing import Any

from .._errors import EinshardError
from .._text import name_of


def own_hints(owner: Any) -> dict[str, Any]:
    """Returns the types of a function's annotations, or of those in the body of a class."""
    if sys.version_info >= (3, 14):  # annotations are evaluated here
        from annotationlib import Format

        hints = inspect.get_annotations(owner, format=Format.FORWARDREF)
    else:
        hints = inspect.get_annotations(owner)
    return {name: _evaluate(owner, hint) for name, hint in hints.items()}


def class_hints(hint: Any) -> dict[str, Any]:
    arguments = _type_arguments(hint)
    unsubstituted: dict[str, Any] = {}
    hints: dict[str, Any] = {}
    # a TypedDict does not have its bases in `__mro__`
    for cls in reversed([*dict.fromkeys([*next(iter(arguments)).__mro__, *arguments])]):
        for name, own in own_hints(cls).items():
            if typing.is_typeddict(cls) and unsubstituted.get(name) == own:
                continue  # a TypedDict repeats the annotations of its bases
            unsubstituted[name] = own
            hints[name] = _substitute(own, cls, arguments.get(cls, ()))
    return hints


def fields_of(hint: Any) -> dict[str, Any]:
    """Returns {field: type} of a NamedTuple, TypedDict, dataclass or Equinox module, or {}.

    The types of a generic class contain its type arguments instead of type variables.
    """
    cls = typing.get_origin(hint) or hint
    has_fields = (
        dataclasses.is_dataclass(cls) or typing.is_typeddict(cls) or hasattr(cls, '_fields')
    )
    return class_hints(hint) if isinstance(cls, type) and has_fields else {}


def _type_arguments(hint: Any) -> dict[Any, tuple[Any, ...]]:
    """Returns {class: type arguments} of a class and its bases, with the class first."""
    cls, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    found = {cls: args}
    if not hasattr(cls, '__orig_bases__'):  # neither it nor a base is generic
        return found
    for base in vars(cls).get('__orig_bases__', cls.__bases__):
        origin = typing.get_origin(base) or base
        if isinstance(origin, type) and origin not in (typing.Generic, typing.Protocol):
            # keeps the order and the first type arguments
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
        return Unresolved(owner, hint, str(error), missing, fallback)


@dataclasses.dataclass(frozen=True, eq=False)
class Unresolved:
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
            code='spec',
            fix=fix if self.missing else None,
        )


def unwrapped(hint: Any) -> Any:
    """Resolves type aliases, NewTypes, bound TypeVars, and qualifiers such as NotRequired.

    Evaluates an annotation that was `Unresolved` again.
    """
    while True:
        if isinstance(hint, Unresolved):
            hint = _evaluate(hint.owner, hint.hint)
            if isinstance(hint, Unresolved):
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


def union_members(hint: Any) -> list[Any]:
    hint = unwrapped(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(hint) for inner in union_members(member)]
    return [hint]


def tuple_items(hint: Any) -> tuple[Any, ...]:
    """Returns the types in `tuple[...]`, and Ellipsis after the type that it repeats.

    Replaces `Unpack[tuple[A, B]]` with A and B.
    """
    items: tuple[Any, ...] = ()
    for item in typing.get_args(hint):
        packed = packed_type(item)
        items += (item,) if packed is None else tuple_items(packed)
    return items


def packed_type(hint: Any) -> Any:
    """Returns T for `Unpack[T]` and `*T`, or None for other types."""
    if typing.get_origin(hint) is typing.Unpack:
        return unwrapped(typing.get_args(hint)[0])
    if getattr(hint, '__unpacked__', False):
        return tuple[typing.get_args(hint)]
    return None
