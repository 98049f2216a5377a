"""Prints reports as text, in color with rich, and shows them as HTML in notebooks."""

from __future__ import annotations

import dataclasses
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._page import Page, page_lines, page_text
from ._page_html import page_document, page_html

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_MAX_WIDTH, _MIN_WIDTH = 100, 80


class Display(ABC):
    """Base class of objects that print and display as a page."""

    __slots__ = ()

    @abstractmethod
    def _page(self) -> Page:
        """Returns the page to display."""

    def _text(self, width: int) -> str:
        return page_text(self._page(), width)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file: an HTML page if the name ends in '.html' or '.htm', otherwise text."""
        path = Path(path)
        is_html = path.suffix.lower() in ('.html', '.htm')
        text = page_document(self._page()) if is_html else f'{self._text(_MAX_WIDTH)}\n'
        path.write_text(text, encoding='utf-8')

    def __str__(self) -> str:
        columns = shutil.get_terminal_size((_MAX_WIDTH, 24)).columns
        return self._text(min(_MAX_WIDTH, max(_MIN_WIDTH, columns)))

    def __repr__(self) -> str:
        return str(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in page_lines(self._page(), min(_MAX_WIDTH, options.max_width)):
            yield Text.assemble(*line)

    def _repr_html_(self) -> str:
        return page_html(self._page())


def as_json(value: Any) -> Any:
    """Converts dataclasses and mappings to dictionaries, and tuples to lists, for JSON.

    Of a class with `json_fields`, takes these attributes; of other dataclasses, the fields.
    """
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        value = {name: getattr(value, name) for name in getattr(value, 'json_fields', names)}
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    return value
