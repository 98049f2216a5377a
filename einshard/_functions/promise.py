"""What a function may communicate: promises, and programs that are read before they run."""

from __future__ import annotations

import difflib
import functools
import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from .._errors import EinshardError, plural
from .._hlo.collectives import KINDS, Collective, read_collectives
from .._sharding.context import depth_of_user, is_staging, is_tracing
from .._text import format_bytes, short_arrays, short_source

# One kind of collective, several, or how many of each there may be at most.
Promise: TypeAlias = str | Collection[str] | Mapping[str, int]
# The most of each kind; of others there may be none.
Allowed: TypeAlias = Mapping[str, float]


class UnexpectedCollectives(EinshardError):
    """A compiled program communicates more than it may: every collective that is too much."""


UnexpectedCollectives.__module__ = 'einshard'  # errors print their public name


def read_promise(promise: Promise, given_as: str = 'collectives=') -> Allowed:
    """The kinds of collectives that are promised to be the only ones, and how many of each."""
    if isinstance(promise, str):
        return read_promise((promise,), given_as)
    if not isinstance(promise, Collection):  # type: ignore[reportUnnecessaryIsInstance]
        raise EinshardError(
            f'{given_as} is {promise!r}, which names no collectives',
            facts={'give': "() for none, 'all-reduce', several kinds, or {'all-reduce': 1}"},
        )
    for kind in promise:
        if kind not in KINDS:
            near = difflib.get_close_matches(str(kind), KINDS, n=1)
            raise EinshardError(
                f'{kind!r} is no kind of collective',
                facts={'kinds': ', '.join(KINDS)},
                fix=repr(near[0]) if near else None,
            )
    if not isinstance(promise, Mapping):
        return dict.fromkeys(promise, math.inf)
    for kind, most in promise.items():
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:  # type: ignore[reportUnnecessaryIsInstance]
            raise EinshardError(
                f"how many '{kind}' there may be is {most!r}, which is no count",
                facts={'give': 'a whole number from 0 on; or the kinds alone, for any number'},
            )
    return dict(promise)


def check_promise(name: str, compiled: Any, allowed: Allowed) -> None:
    """Raises for the collectives of a compiled program that are not allowed."""
    found = read_collectives(program_text(name, compiled))
    too_many = more_than(allowed, found)
    if not too_many:
        return
    raise UnexpectedCollectives(
        f'{name} communicates more than it may: {counts_text(too_many)}',
        facts={'allowed': allowed_text(allowed), **_rows(too_many)},
    ) from None


def more_than(allowed: Allowed, found: Sequence[Collective]) -> list[Collective]:
    """The collectives of the kinds of which there are too many."""
    counts = Counter(one.kind for one in found)
    return [one for one in found if counts[one.kind] > allowed.get(one.kind, 0)]


def counts_text(found: Sequence[Collective]) -> str:
    """2 all-reduces, 1 all-gather"""
    return ', '.join(plural(n, kind) for kind, n in Counter(one.kind for one in found).items())


def program_text(name: str, compiled: Any) -> str:
    """The optimised program, as text; raises where the compiler does not show it."""
    text = compiled.as_text()
    if text is None:
        raise EinshardError(
            f'which collectives {name} has is not known: its compiler does not show the program'
        )
    return text


def allowed_text(allowed: Allowed) -> str:
    """at most 1 all-reduce, all-gather"""
    texts = [
        kind if most == math.inf else f'at most {plural(int(most), kind)}'
        for kind, most in allowed.items()
        if most
    ]
    return ', '.join(texts) or 'no collectives'


def _rows(found: Sequence[Collective]) -> dict[str, str]:
    """A fact for each collective, and for several that differ in nothing shown."""
    alike = Counter((one.kind, _row(one)) for one in found)
    kinds = Counter(kind for kind, _ in alike)
    seen: Counter[str] = Counter()
    rows: dict[str, str] = {}
    for (kind, row), n in alike.items():
        seen[kind] += 1
        label = kind if kinds[kind] == 1 else f'{kind} {seen[kind]}'
        rows[label] = row if n == 1 else f'{n} x {row}'
    return rows


def _row(one: Collective) -> str:
    times = {1: '', None: ', in a loop of unknown length'}.get(
        one.executions, f', {one.executions} times'
    )
    groups = f'{one.n_groups} groups of ' if one.n_groups > 1 else ''
    source = f', {short_source(one.source)}' if one.source else ''
    among = f'{groups}{plural(one.group_size, "device")}'
    return f'{short_arrays(one.shape_text)} of {format_bytes(one.bytes)}, {among}{times}{source}'


class Budget:
    """The collectives that one function may have, and whether its user knows where none is read."""

    def __init__(self, name: str, allowed: Allowed):
        self.name = name
        self.allowed = allowed
        self._warned = False

    def check(self, compiled: Any) -> None:
        check_promise(self.name, compiled, self.allowed)

    def warn_unchecked(self) -> None:
        """Warns, once, if the next program runs unread: JAX compiles it for a transformation.

        In `jax.jit` the function is part of another program, which makes promises of its own.
        """
        if self._warned or is_staging():
            return
        self._warned = True
        warnings.warn(
            f'the collectives of {self.name} are not checked in jax.grad, jax.vmap and the like '
            f'outside of jax.jit; write sharded(..., collectives=...)(jax.grad({self.name}))',
            stacklevel=depth_of_user(),
        )


class CheckedJit:
    """A jitted function whose programs are read: the first before it runs, later ones after.

    JAX says nothing of a program that it compiles, but it traces before, and it keeps what it has
    traced and compiled: to lower and compile again costs nothing. So the function notes that it is
    traced, and calls ask afterwards. To raise while it is traced would come earlier, but then
    `jax.jit` takes its slow way, 80 to 250 us, for such arguments ever after.

    A thread may run a program that another has traced and not read yet. So each call that returns
    while any trace is unread, or whose jitted function has been replaced since, reads its own.

    Attributes:
        call: what calls take, one Python frame more than the jitted function.
    """

    def __init__(
        self,
        budget: Budget,
        traced: Callable[..., Any],
        options: Mapping[str, Any],
        nested: Callable[..., Any],
    ):
        self._budget = budget
        self._traced = traced
        self._options = options
        self._nested = nested
        self._first = threading.RLock()
        self.call = self._call  # one object, by which calls of it are recognised
        self._begin()

    def _call(self, *values: Any) -> Any:
        if is_tracing():
            self._budget.warn_unchecked()
            return self._nested(*values)
        if not self._checked:
            self._check_first(values)
        jitted, unread = state = self._state
        try:
            result = jitted(*values)
        except BaseException:
            if unread:
                self._begin()  # what was traced is kept, and nobody has read it
            raise
        if unread or self._state is not state:
            self._check(values)
        return result

    def clear_cache(self) -> None:
        jitted, _ = self._state
        jitted.clear_cache()
        self._begin()

    def _begin(self) -> None:
        """Begins anew, with nothing traced."""
        unread = set[int]()  # threads that have traced a program which they have not read

        @functools.wraps(self._traced)
        def noted(*values: Any) -> Any:
            unread.add(threading.get_ident())
            return self._traced(*values)

        self._checked = False
        self._state: tuple[Any, set[int]] = jax.jit(noted, **self._options), unread

    def _check_first(self, values: Sequence[Any]) -> None:
        with self._first:
            if not self._checked:
                self._check(values)

    def _check(self, values: Sequence[Any]) -> None:
        """Raises if the program for these arguments breaks the promise."""
        jitted, unread = state = self._state
        try:
            self._budget.check(jitted.trace(*values).lower().compile())
        except BaseException:
            self._begin()
            raise
        unread.discard(threading.get_ident())
        if self._state is state:
            self._checked = True
