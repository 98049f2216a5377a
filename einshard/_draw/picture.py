"""Picture and Gallery, the results of `show`."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from .._errors import plural
from .._text import MONOSPACED
from .blocks import Blocks
from .caption import wrapped
from .svg import svg_text
from .terminal import text_lines

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_WIDTH = 100


class ColorRepr:
    """Gives a class a repr in color if rich is installed and the terminal supports it."""

    def __repr__(self) -> str:
        try:
            from rich.console import Console
        except ImportError:
            return str(self)
        console = Console(force_jupyter=False)
        if not console.is_terminal or console.color_system is None or console.no_color:
            return str(self)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip('\n')


@dataclass(frozen=True, eq=False, repr=False)
class Picture(ColorRepr):
    """A picture of a placement, made by `show`.

    `str` returns plain text. If rich is installed, `repr` adds color on a terminal. Notebooks show
    an SVG. Each block is colored by its first device and labeled with its devices. The SVG hatches
    replicated blocks. Arrays of the same shape have about the same size in all pictures.

    Attributes:
        blocks: the blocks of the array and their devices.
        words: sentences that describe the placement.
    """

    blocks: Blocks
    words: tuple[str, ...]

    @property
    def svg(self) -> str:
        """An SVG for use in a web page; text outside of blocks has the color of the page's text."""
        return svg_text(self.blocks)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes an SVG file that follows the light or dark mode of the viewer."""
        # an SVG in a web page uses the colors of the page
        style = 'svg { color-scheme: light dark; color: CanvasText; background: Canvas }'
        start = self.svg.index('>') + 1
        text = f'{self.svg[:start]}<style>{style}</style>{self.svg[start:]}\n'
        Path(path).write_text(text, encoding='utf-8')

    def __str__(self) -> str:
        lines = text_lines(self.blocks, _WIDTH)
        texts = [''.join(text for text, _ in line).rstrip() for line in lines]
        return '\n'.join([*texts, *wrapped(self.words, _WIDTH)])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        width = min(_WIDTH, options.max_width)
        for line in text_lines(self.blocks, width):
            text = Text()
            for segment, device in line:
                color = '' if device is None else f'black on {self.blocks.color(device)}'
                text.append(segment, color)
            yield text
        for line in wrapped(self.words, width):
            yield Text(line)

    def _repr_html_(self) -> str:
        lines = ''.join(f'<div>{html.escape(line)}</div>' for line in self.words)
        return (
            f'<div style="font: 13px/1.35 {MONOSPACED}">'
            f'<div style="overflow-x: auto">{self.svg}</div>'
            f'<div style="margin-top: 6px">{lines}</div></div>'
        )


@dataclass(frozen=True, eq=False, repr=False)
class Gallery(ColorRepr):
    """Pictures of the leaves of a pytree, one per distinct shape and placement.

    Attributes:
        pictures: (caption, picture) pairs; a caption starts with the paths of leaves.
        rest: the number of placements without a picture.
    """

    pictures: Sequence[tuple[str, Picture]]
    rest: int

    def __str__(self) -> str:
        parts = [f'{caption}\n{picture}' for caption, picture in self.pictures]
        return '\n\n'.join([*parts, *self._more()])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[object]:
        from rich.text import Text

        for i, (caption, picture) in enumerate(self.pictures):
            yield Text(f'\n{caption}' if i else caption, style='bold')
            yield picture
        for line in self._more():
            yield Text(f'\n{line}')

    def _repr_html_(self) -> str:
        figures = ''.join(
            '<figure style="margin: 0; text-align: left; overflow-x: auto">'
            '<figcaption style="font: 13px sans-serif; margin-bottom: 6px; text-align: left">'
            f'{html.escape(caption)}</figcaption>{picture.svg}</figure>'
            for caption, picture in self.pictures
        )
        more = ''.join(f'<div>{line}</div>' for line in self._more())
        return f'<div style="display: flex; flex-wrap: wrap; gap: 24px">{figures}{more}</div>'

    def _more(self) -> list[str]:
        return [f'and {plural(self.rest, "more placement")}'] if self.rest else []
