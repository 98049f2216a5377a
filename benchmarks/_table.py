"""The table on the terminal: by rich where it is installed, plain otherwise."""

from __future__ import annotations

import string
import sys
from collections.abc import Sequence

from ._schema import Environment, Result, Row, Spread

HEADINGS = ('what', 'figure', 'beside', 'its figure', 'ratio', 'quartiles', 'target', 'met')
IN_FULL = 100  # columns; in fewer what can be read off the ratio is left out
PREFIXES = {
    's': ((1.0, 's'), (1e-3, 'ms'), (1e-6, 'us'), (1e-9, 'ns')),
    'bytes': ((2**30, 'GiB'), (2**20, 'MiB'), (2**10, 'KiB'), (1, 'bytes')),
    'bytes/s': ((1e9, 'GB/s'), (1e6, 'MB/s')),
}


def print_environment(env: Environment) -> None:
    devices = f'{env["device_count"]} x {env["device_kind"]} ({env["platform"]})'
    print(
        f'einshard {env["einshard"]}, JAX {env["jax"]}, jaxlib {env["jaxlib"]}, '
        f'Python {env["python"]}, {devices}, {env["cores"]} cores, {env["system"]}'
    )


def print_result(result: Result) -> None:
    title = f'{result["name"]}: {result["about"]}'
    if result['tiny']:
        title += ' (tiny: the figures mean nothing)'
    print_rows(title, *columns(result['rows']))
    for text in legend(result['rows']):
        print(text)
    for text in result['left_out']:
        print(f'left out: {text}')


def print_rows(title: str, headings: list[str], rows: list[list[str]]) -> None:
    try:
        import rich.box
        import rich.console
        import rich.table
        from rich.text import Text
    except ImportError:
        print_plain(title, headings, rows)
        return
    # a pipe has no width: as wide as the table, not folded to 80 columns
    console = rich.console.Console(width=None if sys.stdout.isatty() else 200)
    table = rich.table.Table(title=Text(title), title_justify='left', box=rich.box.SIMPLE_HEAD)
    left_out = () if console.width >= IN_FULL else ('its figure', 'quartiles')
    shown = [i for i, heading in enumerate(headings) if heading not in left_out]
    for i in shown:
        may_fold = headings[i] in ('what', 'figure')
        justify = 'left' if headings[i] == 'what' else 'right'
        table.add_column(headings[i], justify=justify, no_wrap=not may_fold)
    styles = {'met': 'green', 'not met': 'red'}
    for texts in rows:
        # a Text, in which '[8]' is no markup
        table.add_row(*(Text(texts[i], styles.get(texts[i], '')) for i in shown))
    console.print(table)


def print_plain(title: str, headings: list[str], rows: list[list[str]]) -> None:
    table = [headings, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(headings))]
    print(f'\n{title}')
    for row in table:
        texts = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        print('  '.join(texts).rstrip())


def columns(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells, of those columns in which there is something."""
    letters = beside(rows)
    table = [cells(row, letters.get(row['compared_with'] or '', '')) for row in rows]
    used = [i for i in range(len(HEADINGS)) if any(texts[i] for texts in table)]
    return [HEADINGS[i] for i in used], [[texts[i] for i in used] for texts in table]


def beside(rows: Sequence[Row]) -> dict[str, str]:
    """A letter for each thing that rows are compared with; where there is one, none."""
    others = list(dict.fromkeys(row['compared_with'] for row in rows if row['compared_with']))
    if len(others) == 1:
        return {others[0]: ''}
    return dict(zip(others, string.ascii_lowercase, strict=False))


def legend(rows: Sequence[Row]) -> list[str]:
    return [f'beside {f"{at}: " if at else ""}{other}' for other, at in beside(rows).items()]


def cells(row: Row, beside: str) -> tuple[str, ...]:
    ratio, target = row['ratio'], row['target']
    limit = ''
    if target is not None:
        at_most = target['at_most']
        of_ratio = target['of'] == 'ratio'
        limit = f'<= {ratio_text(at_most) if of_ratio else quantity(at_most, row["unit"])}'
    return (
        row['name'] if row['subject'] == 'einshard' else f'{row["subject"]}: {row["name"]}',
        figure_text(row),
        beside,
        quantity(row['other']['median'], row['unit']) if row['other'] else '',
        ratio_text(ratio['median']) if ratio else '',
        quartiles(ratio) if ratio else '',
        limit,
        {True: 'met', False: 'not met', None: ''}[row['met']],
    )


def figure_text(row: Row) -> str:
    """The median; of collectives, how many there are of each kind."""
    kinds = row['parameters'].get('kinds') if row['unit'] == 'collectives' else None
    return str(kinds or quantity(row['figure']['median'], row['unit']))


def quartiles(ratio: Spread) -> str:
    return f'{ratio_text(ratio["q1"])} .. {ratio_text(ratio["q3"])}'


def ratio_text(ratio: float) -> str:
    """1.034; a small one as a fraction, 1/20.5"""
    if 0 < ratio < 0.5:
        return f'1/{1 / ratio:.3g}'
    return f'{ratio:.3f}' if ratio < 10 else f'{ratio:.3g}'


def quantity(value: float, unit: str) -> str:
    """12.5 us; -40 ns, of a difference; 1.5 MiB; 0 backends; 1 backend"""
    if unit not in PREFIXES:
        return f'{value:.4g} {unit.removesuffix("s") if value == 1 else unit}'
    prefixes = PREFIXES[unit]
    # three digits of 999.6 ns are those of 1 us
    scale, prefixed = next((p for p in prefixes if abs(value) >= 0.9995 * p[0]), prefixes[-1])
    return f'{value / scale:.3g} {prefixed}'
