"""The parts of a report: arrays, collectives, memory, warnings; plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .._words import shape_text


@dataclass(frozen=True, slots=True)
class ArrayRow:
    """An argument, a result or an intermediate, and where it lives.

    Attributes:
        path: of an argument its parameter and the path in it, 'params/w'; 'result/0'; of an
            intermediate its name in the program.
        placement: its expression, in the user's axis names where a spec has them; or words.
        bytes: on each device.
        sharded: whether a device holds less than all of it.
        source: 'model.py:12', of an intermediate.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    bytes: int
    sharded: bool
    source: str | None = None

    @property
    def array(self) -> str:
        """float32[8,16]"""
        return f'{self.dtype}{shape_text(self.shape)}'


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """A collective of the program.

    Attributes:
        kind: 'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute',
            'ragged-all-to-all' or 'collective-broadcast'.
        arrays: what it is about, in full: of an all-gather what each device gets, of others what
            each puts in. 'f32[8,16]', as the compiler writes it.
        bytes: of those, on a device.
        parties: how many devices communicate with each other.
        groups: how many groups of them there are.
        along: which axes those groups lie along: mesh axes if the mesh is named, else the array
            axes that are cut over just these devices; 'h|k' is one or the other, 'b,x' both. ''
            where the groups are none of that.
        times: how often it runs in one run; None in a loop of unknown length.
        network_bytes: that a device sends each time.
        is_async: whether the program computes something else meanwhile.
        source: 'model.py:12', or None.
        of: the path of the argument that is gathered, or those of the results that it becomes, as
            a sum of gradients becomes weights; empty where it is neither.
        op_name: JAX's name for what became it.
    """

    kind: str
    arrays: str
    bytes: int
    parties: int
    groups: int
    along: str
    times: int | None
    network_bytes: int
    is_async: bool
    source: str | None
    of: tuple[str, ...]
    op_name: str


class Collectives(tuple[CollectiveRow, ...]):
    """The collectives of a program, in its order, each of them once."""

    __slots__ = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each kind; one in a loop counts once."""
        return dict(Counter(row.kind for row in self))

    @property
    def network_bytes(self) -> dict[str, int]:
        """What a device sends in one run of the program, by kind, with loops."""
        total: Counter[str] = Counter()
        for row in self:
            total[row.kind] += row.network_bytes * (1 if row.times is None else row.times)
        return dict(total)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device, as the compiler says.

    Attributes:
        aliased: of the results, what lies in the memory of donated arguments.
        peak: what the compiler has as its peak, which some count without the temporaries; None
            where it does not say.
    """

    arguments: int
    results: int
    temporaries: int
    code: int
    aliased: int
    peak: int | None

    @property
    def total(self) -> int:
        return self.arguments + self.results + self.temporaries + self.code - self.aliased


@dataclass(frozen=True, slots=True)
class Caution:
    """Something that is probably not meant.

    Attributes:
        kind: 'promise broken', 'replicated', 'moved whole', 'gathered again' or 'no effect'.
        text: what it is, in a sentence.
        source: 'model.py:12', or None.
    """

    kind: str
    text: str
    source: str | None = None
