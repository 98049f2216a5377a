"""What the compiler made of a function: a report, of plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .diff import Diff, make_diff
from .html import html_of
from .page import lay_out_report
from .rows import ArrayRow, Caution, Collectives, Memory
from .text import page_lines, text_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_WIDTH = 100


@dataclass(frozen=True, repr=False)
class Report:
    """What the compiler made of a function. Printed it is text; in a notebook, HTML.

    Attributes:
        name: of the function.
        n_devices: that run the program.
        device_kind: what they are, 'cpu' or 'TPU v5 lite'.
        mesh: its axes and their sizes; empty where the program has no mesh.
        arguments, results: in order.
        collectives: a sequence, with `counts` and `network_bytes` by kind.
        memory: on each device; None where the compiler does not say.
        flops: of each device in one run, as the compiler counts them: the body of a loop
            once; None where it does not count.
        warnings: what is probably not meant.
        intermediates: where those values are that have a name or a line in the source, if asked.
    """

    name: str
    n_devices: int
    device_kind: str
    mesh: tuple[tuple[str, int], ...]
    arguments: tuple[ArrayRow, ...]
    results: tuple[ArrayRow, ...]
    collectives: Collectives
    memory: Memory | None
    flops: float | None
    warnings: tuple[Caution, ...]
    intermediates: tuple[ArrayRow, ...] | None = None

    @property
    def network_bytes(self) -> int:
        """What each device sends in one run; a loop of unknown length counts as one turn."""
        return sum(self.collectives.network_bytes.values())

    def diff(self, after: Report) -> Diff:
        """What is otherwise in another report: `before.diff(after)`."""
        return make_diff(self, after)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dictionaries, lists, strings and numbers, for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **{name: _plain(value) for name, value in fields.items()},
            'mesh': dict(self.mesh),
            'counts': dict(self.collectives.counts),
            'network_bytes': self.network_bytes,
        }

    def __str__(self) -> str:
        return text_of(lay_out_report(self), _WIDTH)

    def __repr__(self) -> str:
        return str(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in page_lines(lay_out_report(self), min(_WIDTH, options.max_width)):
            yield Text.assemble(*line)

    def _repr_html_(self) -> str:
        return html_of(lay_out_report(self))


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as dictionaries and lists."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
