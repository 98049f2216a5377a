"""How reports look on terminals, in files and on pages, and the line during long compilations."""

import contextlib
import html.parser
import io
import json
import re
import shutil
import subprocess
import sys
import time
import unicodedata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from einshard import (
    _progress,
    axis_rules,
    check_same,
    einshard,
    expect_collectives,
    explain,
    parallelism,
    per_device,
    sharded,
    topology,
)
from einshard._page import Column, Page, Section, page_text
from einshard._page_html import page_document, page_html
from einshard._progress import progress
from einshard._text import display_width

EIGHT = jax.devices()[:8]
LONG = 'parameters/a_layer_with_a_very_long_name/and_a_matrix_with_a_long_name'


class Elements(html.parser.HTMLParser):
    """The rows of tables, as lists of cells; asserts that elements nest."""

    VOID = ('meta', 'wbr', 'br')

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.heads = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == 'tr':
            self.rows.append([])
        elif tag in ('td', 'th'):
            self.rows[-1].append('')
            self.heads.append(dict(attrs).get('data-head'))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ('td', 'th'):
            self.rows[-1][-1] += data


@pytest.fixture(scope='module')
def report():
    """A report with 60 arguments, intermediates and bounds."""

    specs = {f'{LONG}_{i}': 'x y -> x8 y' for i in range(60)}

    @sharded('b x -> b8 x', specs, mesh=EIGHT)
    def many(x, w):
        for matrix in w.values():
            x = einshard(jnp.tanh(x @ matrix @ matrix.T), 'b y -> b y8')
        return x

    arrays = {f'{LONG}_{i}': np.ones((64, 8 + i), np.float32) for i in range(60)}
    return explain(
        many, np.ones((8, 64), np.float32), arrays, intermediates=True, chip='H100', tries=0
    )


@pytest.mark.parametrize(
    'rules',
    [
        axis_rules(batch='@(data,fsdp)', mlp='4'),
        axis_rules({'missing': '@data', 'for': ''}, missing='replicate'),
        axis_rules([('w', '@data'), ('w', '@tp')], taken='next', indivisible='replicate'),
        axis_rules(),
    ],
)
def test_a_repr_of_rules_is_their_call(rules):
    again = eval(repr(rules))
    assert again.rules == rules.rules


def test_a_repr_of_functions_and_of_expected_collectives():
    def f(x):
        return x

    assert repr(sharded('a*')(f)) == '<sharded function f>'
    assert repr(per_device('a*', out='a*')(f)) == '<per_device function f>'
    assert (
        repr(expect_collectives({'all-reduce': 2})) == '<expect_collectives: at most 2 all-reduces>'
    )
    assert repr(topology('v5e:4x4', data=4, tp=4)).startswith('Mesh(axis_sizes=(4, 4)')


def test_files_and_pipes_have_all_text(report, tmp_path, monkeypatch):
    monkeypatch.delenv('COLUMNS', raising=False)
    report.save(tmp_path / 'report.txt')
    for text in (str(report), (tmp_path / 'report.txt').read_text()):
        assert f'w/{LONG}_0 ' in text
        assert not re.search(r'[^ ]\.\.', text)  # nothing is omitted but rows: '.. and 40 more'


@pytest.mark.parametrize('width', [60, 80, 100, 140])
def test_terminals_use_their_width(report, width, monkeypatch):
    monkeypatch.setenv('COLUMNS', str(width))
    lines = str(report).splitlines()
    arguments = lines[lines.index('arguments') + 2 :]
    rows = [line.split()[0] for line in arguments[: arguments.index('')] if 'float32' in line]
    assert len({*rows}) == len(rows) > 5  # no two rows look alike
    longest = max(map(display_width, lines))
    assert longest <= max(width, 80)
    assert longest > width - 20 or width > 100


def test_rows_that_would_look_alike_keep_their_text():
    rows = ('layers/attention/kernel',), ('layers/mlp_with_att/kernel',), ('short',)
    section = Section('', (Column('path', shorten='middle'),), rows)
    first, second, _ = page_text(Page('', (section,)), 14).splitlines()[1:]
    assert [first, second] == [rows[0][0], rows[1][0]]
    distinct = Section(
        '', section.columns, (('layers/attention/kernel',), ('other/mlp/bias_of_it',))
    )
    assert all('..' in line for line in page_text(Page('', (distinct,)), 14).splitlines()[1:])


def test_html_begins_with_findings_and_totals(report):
    text = report._repr_html_()
    at = [text.index(f'>{title}<') for title in ('on each device', 'arguments', 'collectives')]
    assert at == sorted(at)
    page = Page('t', (Section('table', lines=('a',)),), findings=('f',), notes=('n',))
    at = [page_html(page).index(f'>{word}<') for word in ('findings', 'table', 'notes')]
    assert at == sorted(at)


@pytest.mark.parametrize('width', [1, 12])
def test_narrow_consoles(report, width):
    console = pytest.importorskip('rich.console').Console(width=width)
    with console.capture() as capture:
        console.print(report)
    assert 'collectives' in capture.get().replace('\n', '')


def test_html_has_all_rows_and_text_the_first(report):
    rows = Elements(report._repr_html_()).rows
    paths = [cells[0] for cells in rows]
    assert all(f'w/{LONG}_{i}' in paths for i in range(60))
    arguments = str(report).partition('results')[0].splitlines()[4:-1]
    assert len(arguments) == 40
    assert arguments[-1] == '  .. and 22 more'


def test_text_counts_the_bytes_of_collectives_that_it_leaves_out():
    section = Section(
        '', (Column('a'),), tuple((str(i),) for i in range(5)), max_rows=3, omitted=': 2 B'
    )
    assert page_text(Page('', (section,)), 80) == 'a\n0\n1\n.. and 3 more: 2 B'
    assert Elements(page_html(Page('', (section,)))).rows == [['a'], *([i] for i in '01234')]


@pytest.mark.parametrize(
    'name', ['模型/编码器/第一层/权重', 'e\u0301' * 30, '한글/경로/이름', 'ab' * 15]
)
@pytest.mark.parametrize('shorten', ['middle', 'start'])
def test_cells_of_wide_and_combining_characters_fit(name, shorten):
    columns = (Column('path', shorten=shorten), Column('n', right=True))
    rows = (('short', '1'), (f'{name}{"x" * 20}{name}', '22'))
    for width in range(16, 40):
        *lines, last = page_text(Page('', (Section('', columns, rows),)), width).split('\n')
        assert {display_width(line) for line in (*lines, last)} == {width}
        # marks stay with their letters
        kept = unicodedata.normalize('NFC', last).split('22')[0].rstrip().split('..')
        assert all(not text or not unicodedata.combining(text[0]) for text in kept)


def test_files(report, tmp_path, monkeypatch):
    monkeypatch.delenv('COLUMNS')  # which says that there is a terminal
    report.save(tmp_path / 'report.html')
    report.save(str(tmp_path / 'report.txt'))
    page = (tmp_path / 'report.html').read_text('utf-8')
    assert page.startswith('<!DOCTYPE html>')
    assert '<title>many on 8 devices (cpu)</title>' in page
    assert 'max-height: 32em' not in page
    assert Elements(page).rows == Elements(report._repr_html_()).rows
    assert (tmp_path / 'report.txt').read_text('utf-8') == f'{report}\n'


def test_each_cell_has_its_heading():
    section = Section('', (Column('a'), Column('b>')), (('1', '2'),))
    elements = Elements(page_html(Page('', (section,))))
    assert elements.heads == [None, None, 'a', 'b>']


THEORY = {
    'einsum': lambda: parallelism('b x, x y -> b y', x=8, sizes={'b': 32, 'x': 512, 'y': 64}),
    'chain': lambda: parallelism(['b x, x y -> b y', 'b y, y z -> b z'], y=4),
    'conflict': lambda: parallelism('b x4, x y4 -> b y'),
}


@pytest.mark.parametrize('case', THEORY)
def test_parallelism(case, tmp_path):
    theory = THEORY[case]()
    assert repr(theory) == str(theory)
    assert {theory: case}[THEORY[case]()] == case  # is hashable
    data = theory.to_dict()
    assert json.loads(json.dumps(data)) == data
    theory.save(tmp_path / 'theory.txt')
    assert (tmp_path / 'theory.txt').read_text('utf-8') == f'{theory}\n'
    shown = re.sub('<style>.*</style>', '', theory._repr_html_(), flags=re.DOTALL)
    shown = html.unescape(re.sub('<[^>]*>', ' ', shown))
    words = re.sub(r"operand \d: '.*'", '', str(theory)).split()
    assert set(words) <= set(shown.split())


def test_parallelism_as_data():
    data = THEORY['einsum']().to_dict()
    assert data['devices'] == {'x': 8}
    assert data['operands'] == ['b x -> b x8', 'x y -> x8 y']
    first, *_ = data['choices']
    assert first['collectives'] == [
        {
            'kind': 'all-reduce',
            'of': 'the result',
            'over': ['x'],
            'group_size': 8,
            'groups': 1,
            'block': 'b y',
            'bytes': 8192,
        }
    ]
    assert len(THEORY['chain']().to_dict()['steps']) == 2


CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')
MEASURE = """<script>
onload = () => {
  const scrolls = [document.documentElement, ...document.querySelectorAll('div')]
    .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth);
  document.title = 'scrolls: ' + scrolls.length;
};
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason='needs Chromium')
def test_no_page_scrolls_sideways(report, tmp_path):
    double = sharded('b* x', mesh=EIGHT)(lambda x: {LONG: x * 2})
    pages = {
        'report': report,
        'theory': THEORY['einsum'](),
        'comparison': check_same(double, np.ones((8, 4), np.float32), gradients=False),
    }
    frames = ''
    for name, page in pages.items():
        (tmp_path / f'{name}.html').write_text(page_document(page._page()) + MEASURE, 'utf-8')
        # frames, because a window of Chromium is at least 500 pixels wide
        for width in (390, 1100):
            wait = 'setTimeout(() => this.title = this.contentDocument.title, 200)'
            size = f'width="{width}" height="900"'
            frames += f'<iframe src="{name}.html" {size} onload="{wait}"></iframe>'
    (tmp_path / 'frames.html').write_text(frames, 'utf-8')
    done = subprocess.run(
        [
            CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--dump-dom',
            '--allow-file-access-from-files', '--virtual-time-budget=2000',
            str(tmp_path / 'frames.html'),
        ],
        capture_output=True, encoding='utf-8', check=True, timeout=60,
    )  # fmt: skip
    scrolls = re.findall(r'src="(.*?)\.html" width="(\d+)".*? title="(.*?)"', done.stdout)
    assert scrolls == [(name, w, 'scrolls: 0') for name in pages for w in ('390', '1100')]


# --- the line that shows that a compilation takes long --------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(_progress, '_DELAY', 0.05)
    monkeypatch.setattr(_progress, '_INTERVAL', 0.05)


def run(monkeypatch, stream, seconds=0.2):
    monkeypatch.setattr(sys, 'stderr', stream)
    with progress('compiling step'):
        time.sleep(seconds)
    return stream.getvalue() if stream else ''


def test_a_long_block_on_a_terminal(monkeypatch, quick):
    text = run(monkeypatch, Terminal())
    assert text.startswith('\rcompiling step: 0 s\rcompiling step: 0 s')
    assert text.endswith('\r' + ' ' * len('compiling step: 0 s') + '\r')


def test_nothing_is_written_otherwise(monkeypatch, quick):
    assert run(monkeypatch, io.StringIO()) == ''
    assert run(monkeypatch, None) == ''
    assert run(monkeypatch, Terminal(), seconds=0) == ''


def test_commands_write_lines_without_a_terminal(monkeypatch):
    monkeypatch.setattr(_progress, '_LOG_INTERVAL', 0.05)
    monkeypatch.setattr(_progress, '_logs', True)
    lines = run(monkeypatch, io.StringIO()).splitlines()
    assert lines
    assert {*lines} == {'compiling step: 0 s'}


def test_the_default_waits_for_seconds(monkeypatch):
    assert run(monkeypatch, Terminal(), seconds=0.2) == ''


def test_an_error_ends_the_line(monkeypatch, quick):
    stream = Terminal()
    monkeypatch.setattr(sys, 'stderr', stream)
    with contextlib.suppress(ZeroDivisionError), progress('compiling'):
        time.sleep(0.1)
        raise ZeroDivisionError
    assert stream.getvalue().endswith('\r')


def test_explain(monkeypatch):
    monkeypatch.setattr(_progress, '_DELAY', 0.0)
    stream = Terminal()
    monkeypatch.setattr(sys, 'stderr', stream)

    @jax.jit
    def step(x):
        return jax.lax.scan(lambda c, _: (c @ x + 1, None), x, None, length=3)

    explain(step, np.ones((4, 4), np.float32))
    assert '\rcompiling step: 0 s' in stream.getvalue()
