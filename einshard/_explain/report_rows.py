"""The rows of a report except collectives: arrays, findings, and the costs of suggestions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._program.hlo.collective import Collective
from .._text import format_bytes, format_flops, format_seconds, shape_text
from .kinds import Kind


@dataclass(frozen=True, slots=True)
class Figures:
    """What a program costs a device in one run.

    Attributes:
        network_bytes: the bytes that it sends.
        memory: the bytes of memory that it needs, or None if unknown.
        flops: as in `Report.flops`.
        bound: the sum of the lower bounds for compute, HBM and network, in seconds.
        hbm: the one for HBM.
        step: the seconds of a run by `Report.timeline`, an estimate. None if unknown.
    """

    network_bytes: int
    memory: int | None
    flops: int
    bound: float
    hbm: float = 0.0
    step: float | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """The costs of a program with a suggested change, and before it.

    Both are compiled in the same way.

    Attributes:
        network_bytes, memory, flops, bound, hbm, step: the costs with the change; see `Figures`.
        before: the costs without it, but with the changes of the findings before this one.
        is_simulated: whether simulated CPU devices have these costs, in place of GPUs or TPUs.
    """

    network_bytes: int
    memory: int | None
    flops: int
    bound: float
    before: Figures
    is_simulated: bool = False
    hbm: float = 0.0
    step: float | None = None

    def __str__(self) -> str:
        """For example 'sends 2.0 MiB instead of 15.0 MiB'."""
        return '; '.join(changes(self.before, self)) or 'the same costs'


def changes(before: Figures | Tried, after: Figures | Tried) -> list[str]:
    """Describes the costs that differ by more than 1 %, as printed too."""
    found: list[str] = []

    def compare(text: str, old: float, new: float, formatted: Callable[[Any], str]) -> None:
        old_text, new_text = formatted(old), formatted(new)
        if abs(new - old) > 0.01 * max(old, new) and new_text != old_text:
            found.append(text.format(f'{new_text} instead of {old_text}'))

    compare('sends {}', before.network_bytes, after.network_bytes, format_bytes)
    compare('{}', before.flops, after.flops, format_flops)
    if before.hbm > 0.5 * before.bound:
        compare('HBM at least {}', before.hbm, after.hbm, format_seconds)
    is_clear = bool(found)
    if before.memory and after.memory:
        compare('memory {}', before.memory, after.memory, format_bytes)
    if not is_clear:
        memory, found = found, []
        compare('sum of the lower bounds {}', before.bound, after.bound, format_seconds)
        found += memory
    if order := compare_steps(after.step, before.step):
        part = (after.step or 0.0) / (before.step or 1.0)
        found.append(
            f'the estimated step {abs(1 - part):.0%} {"shorter" if order < 0 else "longer"}'
        )
    return found


def compare_steps(one: float | None, other: float | None) -> int:
    """Compares estimates: -1 if the first is less, 1 if more, 0 if unknown or about equal."""
    if one is None or other is None or abs(one - other) < _EQUAL * max(one, other):
        return 0
    return -1 if one < other else 1


_EQUAL = 0.1  # estimates are no better


@dataclass(frozen=True, slots=True)
class ArrayRow:
    """An argument, result or intermediate, with its placement.

    Attributes:
        path: 'params/w' for an argument, or 'result/0' for a result. For an intermediate, its name
            in the program.
        shape: the global shape.
        dtype: such as 'float32'.
        placement: an expression, or a description such as 'not used'. The expression has the axis
            names of the spec, if there is one.
        bytes: bytes per device, or 0 if the program does not use the array.
        sharded: whether each device holds only a shard, or only one term of a partial sum.
        source: the source line of an intermediate, such as 'model.py:12'. None for others.
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
        """The dtype and global shape, such as 'float32[8,16]'."""
        return f'{self.dtype}{shape_text(self.shape)}'


@dataclass(frozen=True, slots=True)
class Finding:
    """A likely mistake in a program, and what to write instead.

    Attributes:
        kind: such as 'missing constraint'; docs/explain.md lists the kinds of `Report.findings`.
        text: a sentence that names the arrays as in the user's code.
        source: the source line, such as 'model.py:12', or None.
        bytes: the bytes per device that the finding is about: those sent in one run, the size of
            the arrays, or the memory that the program needs. 0 if it is not about bytes.
        suggestion: a change that was compiled and lowers the costs, as a sentence with the
            expression to write. Empty if none was found, and with `tries=0`.
        tried: the costs of the program with the suggestion. None if there is none.
        explains: what the finding accounts for: the names of collectives (`Collective.name`),
            source lines of matmuls, and paths of arrays. Later findings and notes leave these out.
        reason: half a sentence on why the compiler sends what the finding is about: the arrays
            that disagree about a mesh axis, and where it comes from. Empty if unknown.
        seconds: the exposed time of the collectives that it explains, in one measured run. None
            without a profile.
    """

    kind: Kind
    text: str
    source: str | None = None
    bytes: int = 0
    suggestion: str = ''
    explains: tuple[str, ...] = ()
    tried: Tried | None = None
    reason: str = ''
    seconds: float | None = None

    @classmethod
    def about(
        cls, kind: Kind, text: str, rows: Sequence[Collective], source: str | None = None
    ) -> Finding:
        """Makes a finding that accounts for collectives, by default at the line of the first."""
        source = source or next((row.source for row in rows if row.source), None)
        n_bytes = sum(row.total_bytes for row in rows)
        return cls(kind, text, source, n_bytes, explains=tuple(row.name for row in rows))

    @property
    def json_fields(self) -> tuple[str, ...]:
        return tuple(
            name for name in self.__slots__ if name != 'seconds' or self.seconds is not None
        )
