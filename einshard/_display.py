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

_FILE_WIDTH = 100  # of text in files and pipes; tables may be wider, because nothing is omitted


class Display(ABC):
    """Base class of objects that print and display as a page."""

    __slots__ = ()

    @abstractmethod
    def _page(self) -> Page:
        """Returns the page to display."""

    def _text(self, width: int | None) -> str:
        """Returns the page for a terminal with `width` columns, or for a file if it is None."""
        return page_text(self._page(), width or _FILE_WIDTH, shortens=width is not None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file: an HTML page if the name ends in '.html' or '.htm', otherwise text."""
        path = Path(path)
        is_html = path.suffix.lower() in ('.html', '.htm')
        text = page_document(self._page()) if is_html else f'{self._text(None)}\n'
        path.write_text(text, encoding='utf-8')

    def __str__(self) -> str:
        # 0 columns without a terminal, as in a pipe or a notebook
        return self._text(shutil.get_terminal_size((0, 0)).columns or None)

    def __repr__(self) -> str:
        return str(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in page_lines(self._page(), options.max_width):
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
