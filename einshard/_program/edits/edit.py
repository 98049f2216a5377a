"""A change of a program, and lists of changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from jax.sharding import NamedSharding

from .draft import Draft
from .jaxprs import has_explicit_axes
from .keys import Key, Path
from .splice import Applied, Splicer


class Edit(ABC):
    """A change of a program, a frozen dataclass.

    Attributes:
        stage: when it is applied. 0: placements, which may trace again. 1 to 3: constraints that
            are there, their operands, and values, whose constraints may look like those. 4: what
            puts operations into a `shard_map`, where no constraint can be inserted.
    """

    stage: ClassVar[int] = 0

    @property
    @abstractmethod
    def key(self) -> frozenset[Key]:
        """What it changes. A later edit replaces what earlier ones change alike."""

    def without(self, key: frozenset[Key]) -> Self | None:
        """Returns the edit of what is left, or None."""
        return None if key & self.key else self

    @abstractmethod
    def apply(self, draft: Draft) -> Applied:
        """Changes the draft of a program."""


def combine(edits: Iterable[Edit], later: Iterable[Edit]) -> tuple[Edit, ...]:
    """Returns edits that do both. `later` ones replace what they change as well."""
    found = [*edits]
    for edit in later:
        left = (one.without(edit.key) for one in found)
        found = [*(one for one in left if one is not None), edit]
    return tuple(found)


def key_of(edits: Iterable[Edit]) -> frozenset[Key]:
    """Returns all that edits change."""
    return frozenset[Key]().union(*(edit.key for edit in edits))


def indices(edits: Iterable[Edit], kind: Literal['argument', 'result']) -> set[int]:
    """Returns the arguments or the results that edits place."""
    return {i for name, i in key_of(edits) if name == kind and isinstance(i, int)}


@dataclass(frozen=True)
class _OfValue(Edit):
    """An edit of the values of an expression, and of their cotangents.

    Attributes:
        path: the expression, and the calls through which it is evaluated. If it is evaluated
            several times, as in a loop, all its values are changed.
    """

    path: Path
    stage: ClassVar[int] = 1
    kind: ClassVar[str] = 'constraint'

    @property
    def key(self) -> frozenset[Key]:
        return frozenset({(self.kind, self.path)})


@dataclass(frozen=True)
class Constrain(_OfValue):
    """Constrains the value of an expression.

    Attributes:
        sharding: of the value as the expression sees it. Axes that `jax.vmap` adds in front of it
            stay unconstrained.
    """

    sharding: NamedSharding
    kind: ClassVar[str] = 'value'
    stage: ClassVar[int] = 3

    def apply(self, draft: Draft) -> Applied:
        return draft.splice(self, Splicer(self.path, self.sharding))


@dataclass(frozen=True)
class ReplaceConstraint(_OfValue):
    """Puts another sharding into a constraint.

    Attributes:
        sharding: as in `Constrain`.
    """

    sharding: NamedSharding

    def apply(self, draft: Draft) -> Applied:
        return draft.splice(self, Splicer(self.path, self.sharding, 'constraint'))


@dataclass(frozen=True)
class RemoveConstraint(_OfValue):
    """Removes a constraint."""

    def apply(self, draft: Draft) -> Applied:
        return draft.splice(self, Splicer(self.path, None, 'constraint'))


@dataclass(frozen=True)
class PlaceArguments(Edit):
    """Shards a group of arguments, such as a weight and its states, with their new values.

    Attributes:
        arguments, results: the shardings, by the index of the array. None leaves a result to the
            compiler.
    """

    arguments: Mapping[int, NamedSharding]
    results: Mapping[int, NamedSharding | None]

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> frozenset[Key]:
        return frozenset(
            {*(('argument', i) for i in self.arguments), *(('result', i) for i in self.results)}
        )

    def without(self, key: frozenset[Key]) -> PlaceArguments | None:
        if not key & self.key:
            return self
        arguments = {i: s for i, s in self.arguments.items() if ('argument', i) not in key}
        results = {i: s for i, s in self.results.items() if ('result', i) not in key}
        return PlaceArguments(arguments, results) if arguments or results else None

    def apply(self, draft: Draft) -> Applied:
        draft.arguments.update(self.arguments)
        draft.results.update(self.results)
        draft.needs_trace |= any(map(has_explicit_axes, self.arguments.values()))
        return len(self.arguments) + len(self.results), 0


@dataclass(frozen=True)
class PlaceResults(Edit):
    """Shards results.

    Attributes:
        results: the shardings, by the index of the array. None leaves a result to the compiler.
    """

    results: Mapping[int, NamedSharding | None]

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> frozenset[Key]:
        return frozenset(('result', i) for i in self.results)

    def without(self, key: frozenset[Key]) -> PlaceResults | None:
        if not key & self.key:
            return self
        results = {i: s for i, s in self.results.items() if ('result', i) not in key}
        return PlaceResults(results) if results else None

    def apply(self, draft: Draft) -> Applied:
        draft.results.update(self.results)
        return len(self.results), 0


@dataclass(frozen=True)
class MoveThrough(Edit):
    """Moves an array through another placement, and keeps both that it has.

    Attributes:
        what: ('argument', index): between the caller and the values that the program computes with;
            ('result', index): the reverse; ('constraint', path): what a constraint moves;
            ('value', path): the value of an expression, whose use implies another placement.
    """

    what: tuple[Literal['argument', 'result', 'constraint', 'value'], int | Path]
    sharding: NamedSharding
    stage: ClassVar[int] = 2

    @property
    def key(self) -> frozenset[Key]:
        return frozenset({('through', self.what)})

    def apply(self, draft: Draft) -> Applied:
        kind, at = self.what
        if isinstance(at, int):
            (draft.entering if kind == 'argument' else draft.leaving)[at] = self.sharding
            return 1, 0
        which = 'operand' if kind == 'constraint' else 'value'
        return draft.splice(self, Splicer(at, self.sharding, which))


def placements(
    edits: Iterable[Edit],
) -> tuple[dict[int, NamedSharding], dict[int, NamedSharding]]:
    """Returns the arguments and the results that edits place, with their shardings."""
    arguments, results = dict[int, NamedSharding](), dict[int, NamedSharding]()
    for edit in edits:
        if isinstance(edit, PlaceArguments):
            arguments.update(edit.arguments)
        if isinstance(edit, PlaceArguments | PlaceResults):
            results.update((i, s) for i, s in edit.results.items() if s is not None)
    return arguments, results
