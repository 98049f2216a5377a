"""A traced call while edits change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import jax
from jax.sharding import Sharding

from ..jaxpr.spans import Frames
from .call import JittedCall, is_committed, struct_of
from .jaxprs import has_explicit_axes
from .keys import Key
from .splice import Applied, Splicer
from .tags import TAG


class Keyed(Protocol):
    """An edit, as far as a draft knows it."""

    @property
    def key(self) -> frozenset[Key]: ...


# Returns the call with edits in its code, for these leaves; None for its own.
Rewrite: TypeAlias = Callable[[Sequence[Any], Sequence[Any] | None], JittedCall]


@dataclass
class Draft:
    """A call that edits change.

    Attributes:
        arguments, results: the new shardings, by index.
        entering, leaving: shardings that arguments and results have on the way from the caller and
            to it, by index.
        tags: the numbers of tagged places. None if places have no tags; else, all constraints that
            edits add are open.
        needs_trace: whether types in the jaxpr have the shardings of the arguments.
        rewrite: traces the call with edits in its code, where types in the jaxpr have shardings, so
            that it cannot be spliced. None on Auto mesh axes.
        in_code: the edits that it gets.
    """

    call: JittedCall
    arguments: dict[int, Sharding] = field(default_factory=dict)
    results: dict[int, Sharding | None] = field(default_factory=dict)
    entering: dict[int, Sharding] = field(default_factory=dict)
    leaving: dict[int, Sharding] = field(default_factory=dict)
    tags: dict[Key, int] | None = None
    needs_trace: bool = False
    rewrite: Rewrite | None = None
    in_code: list[Keyed] = field(default_factory=list[Keyed])
    frames: Frames = field(default_factory=Frames)
    _shared: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    _jaxpr: Any = None

    @property
    def in_shardings(self) -> list[Sharding | None]:
        """The shardings of the leaves, as far as the program or an edit gives them."""
        call, found = self.call, list[Sharding | None]([None] * len(self.call.leaves))
        for i, leaf in enumerate(call.dynamic):
            given = call.eqn.params['in_shardings'][call.arguments[leaf]]
            found[leaf] = self.arguments.get(i, given if isinstance(given, Sharding) else None)
        return found

    @property
    def structs(self) -> list[Any]:
        """The leaves, with ShapeDtypeStructs for the arguments."""
        pairs = enumerate(zip(self.call.leaves, self.in_shardings, strict=True))
        dynamic = {*self.call.dynamic}
        return [_struct(leaf, s) if i in dynamic else leaf for i, (leaf, s) in pairs]

    @property
    def jaxpr(self) -> Any:
        if self._jaxpr is None:
            if self.needs_trace and self.call.trace_again is None:
                raise ValueError('it cannot be traced with other shardings of its arguments')
            structs = self.structs if self.needs_trace else None
            if self.rewrite is not None and self.in_code:
                self.call = self.rewrite(self.in_code, structs)
            elif structs is not None and self.call.trace_again is not None:
                self.call = self.call.trace_again(structs)
            self._jaxpr = self.call.jaxpr
        return self._jaxpr

    @jaxpr.setter
    def jaxpr(self, jaxpr: Any) -> None:
        self._jaxpr = jaxpr

    def tag(self, key: Key, n_mapped: int = 0) -> str:
        """Returns the tag of a place, or '' if places have none."""
        if self.tags is None:
            return ''
        return TAG.format(self.tags.setdefault(key, len(self.tags)), n_mapped)

    def splice(self, edit: Keyed, splicer: Splicer) -> Applied:
        """Changes constraints in the jaxpr, or in the code of which it is traced."""
        if self.rewrite is not None:
            self.in_code.append(edit)
            return 1, 0
        jaxpr = self.jaxpr
        if self.needs_trace or has_explicit_axes(splicer.sharding):
            raise ValueError('on Explicit mesh axes, constraints only change in the code')
        (key,) = edit.key
        if self.tags is not None:
            splicer.tag = lambda n_mapped: self.tag(key, n_mapped)
        splicer.frames, splicer.shared = self.frames, self._shared
        self.jaxpr = splicer.splice(jaxpr)
        return splicer.applied


def _struct(leaf: Any, sharding: Sharding | None) -> Any:
    """Returns the ShapeDtypeStruct of an argument, with its own sharding if it is committed."""
    if sharding is None and (isinstance(leaf, jax.ShapeDtypeStruct) or is_committed(leaf)):
        sharding = leaf.sharding
    return struct_of(leaf, sharding)
