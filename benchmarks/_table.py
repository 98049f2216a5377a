"""The table on the terminal: by rich where it is installed, plain otherwise."""

from __future__ import annotations

import sys

from ._schema import Environment, Result, Row, Spread

HEADINGS = ('what', 'figure', 'compared with', 'its figure', 'ratio', 'quartiles', 'target', '')
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
    rows = [cells(row) for row in result['rows']]
    print_rows(title, rows)
    for text in result['left_out']:
        print(f'left out: {text}')


def print_rows(title: str, rows: list[tuple[str, ...]]) -> None:
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
    for texts in rows:
        style = {'met': 'green', 'not met': 'red'}.get(texts[-1])
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
        figure_text(row),
        row['compared_with'] or '',
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
    scale, prefixed = next((p for p in prefixes if abs(value) >= p[0]), prefixes[-1])
    return f'{value / scale:.3g} {prefixed}'
