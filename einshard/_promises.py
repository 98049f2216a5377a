"""What a function may communicate: promises, and programs that are read before they run."""

from __future__ import annotations

import difflib
import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from ._errors import EinshardError, plural
from ._hlo.collectives import KINDS, Collective, read_collectives
from ._mesh import is_tracing
from ._words import amount, short_arrays, short_source

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
    times = {1: '', None: ', in a loop of unknown length'}.get(one.times, f', {one.times} times')
    groups = f'{one.n_groups} groups of ' if one.n_groups > 1 else ''
    source = f', {short_source(one.source)}' if one.source else ''
    among = f'{groups}{plural(one.parties, "device")}'
    return f'{short_arrays(one.shape_text)} of {amount(one.bytes)}, {among}{times}{source}'


class Guarded:
    """A jitted function under a promise, the programs of which are read.

    JAX says nothing of a program that it compiles, but it traces before, and it keeps what it has
    traced and compiled: to lower and compile again costs nothing. So the function takes down that
    it is traced, and a call asks afterwards. To raise while it is traced would come earlier, but
    then `jax.jit` takes its slow way, 80 to 250 us, for such arguments ever after.

    Attributes:
        call: what calls take; as part of another program they may not, for what is traced there
            has no program, and is found in JAX's cache later.
        unread: whether no program has been read yet: then it is read before it runs.
    """

    def __init__(
        self, name: str, traced: Callable[..., Any], options: Mapping[str, Any], allowed: Allowed
    ):
        self.name = name
        self.allowed = allowed
        self.traced = traced
        self.options = options
        self.lock = threading.Lock()
        self._renew()

        def call(*values: Any) -> Any:
            result = self._jitted(*values)
            if self._news:
                self._read_news(values)
            return result

        self.call = call

    def read(self, values: Sequence[Any]) -> None:
        """Raises if the program for these arguments breaks the promise."""
        traced = self._jitted.trace(*values)
        try:
            check_promise(self.name, traced.lower().compile(), self.allowed)
        except BaseException:
            self._renew()
            raise
        self.unread = False

    def clear_cache(self) -> None:
        self._jitted.clear_cache()
        self._renew()

    def _renew(self) -> None:
        """Begins anew, with nothing traced."""
        news = self._news = list[int]()  # the threads that have traced

        @functools.wraps(self.traced)
        def noted(*values: Any) -> Any:
            news.append(threading.get_ident())
            return self.traced(*values)

        self._jitted: Any = jax.jit(noted, **self.options)
        self.unread = True

    def _read_news(self, values: Sequence[Any]) -> None:
        mine = threading.get_ident()
        if mine not in self._news:
            return
        self._news[:] = [thread for thread in self._news if thread != mine]
        if is_tracing():
            self._renew()
        else:
            self.read(values)
