"""Shows an object as a page: text in print, color with rich, HTML in notebooks and files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ._page import Page, page_document, page_html, page_lines, page_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_WIDTH, _NARROW = 100, 80


class Display:
    """Base class of objects that are shown as a page."""

    __slots__ = ()

    def _page(self) -> Page:
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file: an HTML page if the name ends in '.html', otherwise text."""
        page, path = self._page(), Path(path)
        is_html = path.suffix.lower() in ('.html', '.htm')
        text = page_document(page) if is_html else f'{page_text(page, _WIDTH)}\n'
        path.write_text(text, encoding='utf-8')

    def __str__(self) -> str:
        columns = shutil.get_terminal_size((_WIDTH, 24)).columns
        return page_text(self._page(), min(_WIDTH, max(_NARROW, columns)))

    def __repr__(self) -> str:
        return str(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in page_lines(self._page(), min(_WIDTH, options.max_width)):
            yield Text.assemble(*line)

    def _repr_html_(self) -> str:
        return page_html(self._page())
