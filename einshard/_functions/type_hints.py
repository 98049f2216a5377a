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
