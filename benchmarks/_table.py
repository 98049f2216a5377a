"""The table on the terminal: by rich where it is installed, plain otherwise."""

from __future__ import annotations

import sys

from ._schema import Environment, Result, Row, Spread

HEADINGS = ('what', 'time', 'compared with', 'its time', 'ratio', 'quartiles', 'target', '')
PREFIXES = ((1.0, 's'), (1e-3, 'ms'), (1e-6, 'us'), (1e-9, 'ns'))


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
    rows = [cells(row) for row in result['rows']]
    try:
        import rich.console
        import rich.table
    except ImportError:
        print_plain(title, rows)
        return
    # a pipe has no width: as wide as the table, not folded to 80 columns
    console = rich.console.Console(width=None if sys.stdout.isatty() else 200)
    table = rich.table.Table(title=title, title_justify='left')
    for heading in HEADINGS:
        table.add_column(heading, justify='left' if heading in ('what', HEADINGS[2]) else 'right')
    for row, texts in zip(result['rows'], rows, strict=True):
        style = {True: 'green', False: 'red', None: None}[row['met']]
        table.add_row(*texts[:-1], f'[{style}]{texts[-1]}[/]' if style else texts[-1])
    console.print(table)


def print_plain(title: str, rows: list[tuple[str, ...]]) -> None:
    table = [HEADINGS, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADINGS))]
    print(f'\n{title}')
    for row in table:
        texts = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        print('  '.join(texts).rstrip())


def cells(row: Row) -> tuple[str, ...]:
    ratio, target = row['ratio'], row['target']
    limit = ''
    if target is not None:
        at_most = target['at_most']
        of_ratio = target['of'] == 'ratio'
        limit = f'<= {ratio_text(at_most) if of_ratio else quantity(at_most, row["unit"])}'
    return (
        row['name'] if row['subject'] == 'einshard' else f'{row["subject"]}: {row["name"]}',
        quantity(row['figure']['median'], row['unit']),
        row['compared_with'] or '',
        quantity(row['other']['median'], row['unit']) if row['other'] else '',
        ratio_text(ratio['median']) if ratio else '',
        quartiles(ratio) if ratio else '',
        limit,
        {True: 'met', False: 'not met', None: ''}[row['met']],
    )


def quartiles(ratio: Spread) -> str:
    return f'{ratio_text(ratio["q1"])} .. {ratio_text(ratio["q3"])}'


def ratio_text(ratio: float) -> str:
    """1.034; a small one as a fraction, 1/20.5"""
    if 0 < ratio < 0.5:
        return f'1/{1 / ratio:.3g}'
    return f'{ratio:.3f}' if ratio < 10 else f'{ratio:.3g}'


def quantity(value: float, unit: str) -> str:
    """12.5 us; -40 ns, of a difference; 0 backends"""
    if unit != 's':
        return f'{value:g} {unit}'
    scale, prefixed = next((p for p in PREFIXES if abs(value) >= p[0]), PREFIXES[-1])
    return f'{value / scale:.3g} {prefixed}'
