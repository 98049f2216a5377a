"""What the JSON of a run holds, and the check that a document holds it."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal, TypedDict

VERSION = 2


class Spread(TypedDict):
    """The quartiles of what the rounds gave."""

    q1: float
    median: float
    q3: float


class Target(TypedDict):
    """What the median should be: of the ratio, or of the figure itself."""

    of: Literal['ratio', 'figure']
    at_most: float


class Row(TypedDict):
    """One figure and what it is compared with."""

    name: str
    subject: str  # whose figure it is: 'einshard 0.3.0'
    parameters: dict[str, str | int | float]
    unit: str  # of figure and other: 's' for one call; 'bytes'; 'programs'; ...
    figure: Spread
    compared_with: str | None
    other: Spread | None  # the same of what it is compared with
    ratio: Spread | None  # figure / other, round by round; None to what is 0
    rounds: int
    target: Target | None
    met: bool | None


class Result(TypedDict):
    """One benchmark."""

    name: str
    about: str
    tiny: bool  # whether it was only tried, at a size where figures mean nothing
    seconds_a_figure: float
    rows: list[Row]
    left_out: list[str]  # what cannot be measured here, and why


class Environment(TypedDict):
    """Where a run took place."""

    python: str
    jax: str
    jaxlib: str
    libtpu: str | None  # None where it is not installed
    einshard: str
    platform: str
    device_kind: str
    device_count: int
    process_count: int
    cores: int
    system: str
    date: str


class Report(TypedDict):
    """A whole run."""

    schema: int
    environment: Environment
    benchmarks: list[Result]


def check(document: Any, kind: Any = Report, where: str = 'report') -> None:
    """Raises ValueError where a document read from JSON is not of the kind, all the way down.

    >>> check({'q1': 1.0, 'median': 'fast', 'q3': 2.0}, Spread, 'ratio')
    Traceback (most recent call last):
    ValueError: ratio.median: not a float: 'fast'
    """
    if typing.is_typeddict(kind):
        fields = typing.get_type_hints(kind)
        if not isinstance(document, dict) or set(document) != set(fields):
            found = sorted(document) if isinstance(document, dict) else document
            raise ValueError(f'{where}: needs exactly {", ".join(fields)}; has {found!r}')
        for key, field in fields.items():
            check(document[key], field, f'{where}.{key}')
        return
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and isinstance(document, list):
        for i, item in enumerate(document):
            check(item, arguments[0], f'{where}[{i}]')
    elif origin is dict and isinstance(document, dict):
        for key, value in document.items():
            check(key, arguments[0], f'{where} key')
            check(value, arguments[1], f'{where}.{key}')
    elif origin is Literal:
        if document not in arguments:
            raise ValueError(f'{where}: {document!r} is none of {arguments}')
    elif origin in (typing.Union, types.UnionType):
        _check_union(document, arguments, where)
    elif origin is not None or not _is_plain(document, kind):
        name = getattr(kind, '__name__', kind) if origin is None else origin.__name__
        raise ValueError(f'{where}: not a {name}: {document!r}')


def _check_union(document: Any, kinds: tuple[Any, ...], where: str) -> None:
    if document is None and type(None) in kinds:
        return
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) == 1:
        check(document, others[0], where)  # the error then says what is wrong inside
    elif not any(_is_plain(document, kind) for kind in others):
        names = ' or '.join(kind.__name__ for kind in others)
        raise ValueError(f'{where}: not a {names}: {document!r}')


def _is_plain(document: Any, kind: Any) -> bool:
    if isinstance(document, bool):  # which Python counts among the integers
        return kind is bool
    return isinstance(document, (int, float) if kind is float else kind)
