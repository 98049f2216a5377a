"""A function's parameters, and how one call fills them. Imports no jax.

`jax.jit` with `in_shardings` takes positional arguments only. A call is therefore brought into a
form: the values in one row, and how many of them are positional, how the others are called.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import numbers as numeric
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import EinshardError, plural


@dataclass(frozen=True, slots=True)
class Form:
    """How a call passes its values: `positional` of them by position, the others by keyword."""

    positional: int
    keywords: tuple[str, ...]


class Parameters:
    """The parameters of a function by kind; all of them `*args`, `**kwargs` if it has none to show.

    Attributes:
        names: those that take a position, the instance of a method included.
        instance: 1 if the first of them is the `self` or `cls` of a method, else 0.
        by_keyword: those that must be given by keyword.
        rest: the name of `*args`, or None.
        rest_keywords: the name of `**kwargs`, or None.
        options: names beside those of parameters that may have been meant.
    """

    def __init__(self, function: Callable[..., Any], options: Iterable[str] = ()):
        self.function = name_of(function)
        self.qualname = getattr(function, '__qualname__', self.function)
        self.options = tuple(options)
        try:
            self.signature = inspect.signature(function)
        except (ValueError, TypeError):  # some builtins
            self.signature = inspect.signature(lambda *args, **kwargs: None)  # type: ignore[reportUnknownLambdaType]
        kinds: dict[Any, list[str]] = {}
        for parameter in self.signature.parameters.values():
            kinds.setdefault(parameter.kind, []).append(parameter.name)
        only = kinds.get(inspect.Parameter.POSITIONAL_ONLY, [])
        self.names = (*only, *kinds.get(inspect.Parameter.POSITIONAL_OR_KEYWORD, []))
        self.positional_only = frozenset(only)
        self.by_keyword = tuple(kinds.get(inspect.Parameter.KEYWORD_ONLY, []))
        self.rest = next(iter(kinds.get(inspect.Parameter.VAR_POSITIONAL, [])), None)
        self.rest_keywords = next(iter(kinds.get(inspect.Parameter.VAR_KEYWORD, [])), None)
        self.instance = int(_is_method(function) and self.names[:1] in (('self',), ('cls',)))

    def form(self, n_args: int, keywords: Iterable[str]) -> tuple[Form, tuple[str, ...]]:
        """The form of a call, and in which order what it gives by keyword follows its arguments.

        Keywords move to their positions, if they have any.
        """
        others = set(keywords)
        for name in self.names[:n_args]:
            if name in others and name not in self.positional_only:
                # before any spec is held against one of the two, and as Python says it
                raise TypeError(f"{self.qualname}() got multiple values for argument '{name}'")
        moved: list[str] = []
        for name in self.names[n_args:]:
            if name not in others or name in self.positional_only:
                break
            moved.append(name)
        others.difference_update(moved)
        by_keyword = tuple(sorted(others))
        return Form(n_args + len(moved), by_keyword), (*moved, *by_keyword)

    def labels(self, form: Form) -> tuple[str, ...]:
        """The name of each value: that of its parameter; 'args[2]' for one of `*args`.

        One of `**kwargs` may be called as a parameter that takes a position only: "kwargs['x']".
        """
        named = self.names[: form.positional]
        rest = (f'{self.rest}[{i}]' for i in range(form.positional - len(named)))
        taken = self.positional_only
        given = (f"{self.rest_keywords}['{k}']" if k in taken else k for k in form.keywords)
        return (*named, *rest, *given)

    def assign(self, specs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Spec by label, from specs by position and by name."""
        names = self.names[self.instance :]
        if len(specs) > len(names) and self.rest is None:
            raise EinshardError(
                f'{self.function} takes {plural(len(names), "positional parameter")}, '
                f'but {plural(len(specs), "spec")} {"is" if len(specs) == 1 else "are"} given',
                facts={'parameters': ', '.join(names) or 'none'},
            )
        more = len(specs) - len(names)
        labels = (*names, *(f'{self.rest}[{i}]' for i in range(more)))
        assigned = dict(zip(labels, specs, strict=False))
        for name, spec in named.items():
            self.check_name(name)
            if name in assigned:
                raise EinshardError(
                    f"parameter '{name}' of {self.function} has two specs, one by position and "
                    'one by name',
                    facts={'by position': assigned[name], 'by name': spec},
                )
            assigned[name] = spec
        return assigned

    def spec_for(self, label: str, specs: Mapping[str, Any]) -> Any:
        """The spec of a value; those of `*args` and `**kwargs` may share the spec of the whole."""
        if label in specs:
            return specs[label]
        if self.rest is not None and label.startswith(f'{self.rest}['):
            return specs.get(self.rest)
        if label not in self.names and label not in self.by_keyword:
            return specs.get(self.rest_keywords) if self.rest_keywords else None
        return None

    def check_name(self, name: str) -> None:
        """Raises if a spec is given by a name that is no parameter, nor an option of jax.jit."""
        known = [*self.names[self.instance :], *self.by_keyword]
        known += [rest for rest in (self.rest, self.rest_keywords) if rest is not None]
        if name in known or self.rest_keywords is not None:
            return
        near = difflib.get_close_matches(name, [*known, *self.options], n=1)
        raise EinshardError(
            f"{self.function} has no parameter '{name}', and jax.jit has no such option",
            facts={'parameters': ', '.join(known) or 'none'},
            fix=f'{near[0]}=' if near else None,
        )

    def chosen(self, numbers: Any, names: Any, option: str) -> frozenset[str]:
        """Labels of the parameters that `static_argnums`, `static_argnames` and their like name."""
        labels: set[str] = set(listed(names, str, option, 'names of parameters', "('x',)"))
        known = (*self.names, *self.by_keyword)
        for name in labels:
            if name not in known and self.rest_keywords is None:
                raise EinshardError(
                    f"{self.function} has no parameter '{name}', which {option} names",
                    facts={'parameters': ', '.join(known) or 'none'},
                )
        by_number = option.replace('argnames', 'argnums')
        for number in listed(numbers, numeric.Integral, by_number, 'numbers of parameters', '(0,)'):
            if self.rest is not None and number >= len(self.names):
                labels.add(f'{self.rest}[{number - len(self.names)}]')
            elif -len(self.names) <= number < len(self.names):
                labels.add(self.names[number])
            else:
                raise EinshardError(
                    f'{self.function} has no parameter number {number}',
                    facts={'parameters': ', '.join(self.names) or 'none'},
                )
        return frozenset(labels)


def name_of(function: Any) -> str:
    """The name of a function, a partial or a callable object, as errors show it."""
    while not hasattr(function, '__name__') and hasattr(function, 'func'):
        function = function.func
    return getattr(function, '__name__', type(function).__name__)


def _is_method(function: Any) -> bool:
    """Whether a function is defined in the body of a class."""
    parts = getattr(function, '__qualname__', '').split('.')
    return len(parts) > 1 and parts[-2] != '<locals>'


def listed(values: Any, single: type, option: str, what: str, example: str) -> list[Any]:
    """One thing or several that an option gives, as a list; raises for others."""
    if values is None:
        return []
    items: list[Any] = [values]
    if not isinstance(values, str):
        with contextlib.suppress(TypeError):  # of what has no items, an array of no dimensions too
            items = [*values]
    if not all(isinstance(item, single) for item in items):
        raise EinshardError(
            f'{option}= is {values!r}, and no {what}',
            facts={'as in': f'{option}={example}'},
        )
    return items
