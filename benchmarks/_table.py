"""Rows as text: the table on the terminal, and the cells of the page."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ._headlines import Headline, find_headline
from ._report import Detail, Row

HEADINGS = ('what', 'einshard', 'compared with', 'ratio', 'target')
PREFIXES = {
    's': ((1.0, 's'), (1e-3, 'ms'), (1e-6, 'us'), (1e-9, 'ns')),
    'bytes': ((2**30, 'GiB'), (2**20, 'MiB'), (2**10, 'KiB'), (1, 'bytes')),
    'bytes/s': ((1e9, 'GB/s'), (1e6, 'MB/s')),
}


def print_benchmark(title: str, rows: Sequence[Row], left_out: Sequence[str]) -> None:
    print_table(title, [cells(row) for row in rows])
    for against in dict.fromkeys(row.against for row in rows if row.against):
        print(f'compared with: {against}')
    for text in left_out:
        print(f'left out: {text}')


def print_table(title: str, lines: Sequence[Sequence[str]]) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print_plain(title, lines)
        return
    # as wide as the table, if the output is piped
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(title=Text(title), title_justify='left', box=box.SIMPLE_HEAD)
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify='right' if i else 'left', no_wrap=i > 0)
    for line in lines:
        # as a Text, '[8]' is not markup
        table.add_row(*(Text(text, 'red' * text.endswith('missed')) for text in line))
    console.print(table)


def print_plain(title: str, lines: Sequence[Sequence[str]]) -> None:
    lines = [HEADINGS, *lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    print(f'\n{title}')
    for line in lines:
        print('  '.join(map(str.ljust, line, widths)).rstrip())


def cells(row: Row) -> list[str]:
    what = '; '.join([row.name, *map(detail_text, row.details.items())])
    headline = find_headline(row)
    target = f'{target_text(headline, row)} {met_text(headline, row)}' if headline else ''
    return [what, quantity(row.figure, row.unit), other_text(row), ratio_text(row), target.strip()]


def target_text(headline: Headline, row: Row) -> str:
    """'<= 1.050'; '' for a headline without a target"""
    limit = headline.at_most
    return '' if limit is None else f'<= {judged_text(headline, limit, row.unit)}'


def met_text(headline: Headline, row: Row) -> str:
    if headline.at_most is None:
        return ''
    return 'met' if headline.is_met(row) else 'missed'


def judged_text(headline: Headline, value: float, unit: str) -> str:
    """'1.034' of a ratio, '100 us' of a figure, '+500 ns' of a difference"""
    if headline.of == 'ratio':
        return ratio_digits(value)
    return '+' * (headline.of == 'difference' and value >= 0) + quantity(value, unit)


def other_text(row: Row) -> str:
    return '' if row.other is None else quantity(row.other, row.unit)


def ratio_text(row: Row) -> str:
    """'1.034 ± 2%'"""
    if row.ratio is None:
        return ''
    spread = '' if row.spread is None else f' ± {row.spread:.0%}'
    return ratio_digits(row.ratio) + spread


def words_of_ratio(row: Row) -> str:
    """'13% more', '1/17', 'equal' within the spread; 'none' of no lines that differ"""
    if row.ratio is None:
        return 'none' if row.figure == 0 else ''
    factor = max(row.ratio, 1 / row.ratio)
    percent = f'{abs(row.ratio - 1):.0%}'
    if abs(row.ratio - 1) <= (row.spread or 0) or percent == '0%':
        return 'equal'
    if row.ratio <= 0.5:
        return f'1/{factor:.2g}'
    amount = f'{factor:.2g} times' if factor >= 2 else percent
    return f'{amount} {"more" if row.ratio > 1 else "less"}'


def ratio_digits(ratio: float) -> str:
    """'1.034'; a small ratio as a fraction, '1/20.5'"""
    if 0 < ratio < 0.5:
        return f'1/{1 / ratio:.3g}'
    return f'{ratio:.3f}' if ratio < 10 else f'{ratio:.3g}'


def detail_text(detail: tuple[str, Detail]) -> str:
    """'memory 1.5 MiB'; 'collectives 2 all-reduce'"""
    name, value = detail
    return f'{name} {value if isinstance(value, str) else quantity(*value)}'


def quantity(value: float, unit: str) -> str:
    """'12.5 us', '-40 ns', '1.5 MiB', '0 lines', '1 line'"""
    if unit not in PREFIXES:
        return f'{value:.4g} {unit.removesuffix("s") if value == 1 else unit}'
    prefixes = PREFIXES[unit]
    # three digits of 999.6 ns are 1 us
    scale, prefixed = next((p for p in prefixes if abs(value) >= 0.9995 * p[0]), prefixes[-1])
    return f'{value / scale:.3g} {prefixed}'
