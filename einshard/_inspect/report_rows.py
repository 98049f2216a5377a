"""The rows of a report: arrays and findings."""

from __future__ import annotations

from dataclasses import dataclass

from .._text import shape_text


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
        suggestion: the change to make, as a sentence with the expression to write. Empty if none is
            known.
        explains: what the finding accounts for: the names of collectives (`Collective.name`),
            source lines of matmuls, and paths of arrays. Later findings and notes leave these out.
    """

    kind: str
    text: str
    source: str | None = None
    bytes: int = 0
    suggestion: str = ''
    explains: tuple[str, ...] = ()
