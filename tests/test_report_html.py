"""The web page of a report: what is decided by comes first, and nothing needs a script."""

import dataclasses
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of

from einshard import explain, topology


def step(w, x):
    # sends <more> & "costs" more
    return jnp.tanh(x @ w['up']) @ w['down']


def arguments(mesh, down):
    def struct(spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, 'float32', sharding=NamedSharding(mesh, spec))

    weights = {'up': struct(P(None, 'tensor'), 256, 1024), 'down': struct(down, 1024, 256)}
    return weights, struct(P('data'), 4096, 256)


class Tags(HTMLParser):
    """Checks that tags are closed in order, and keeps the text outside of styles and scripts."""

    VOID = 'meta', 'br', 'wbr', 'use', 'rect'

    def __init__(self, page):
        super().__init__()
        self.open, self.text = [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not {'script', 'style'} & {*self.open}:
            self.text.append(data)


def saved(report, tmp_path):
    report.save(tmp_path / 'report.html')
    page = (tmp_path / 'report.html').read_text(encoding='utf-8')
    return page, ' '.join(' '.join(Tags(page).text).split())


@pytest.fixture(scope='module')
def report():
    mesh = mesh_of(data=2, tensor=4)
    return explain(jax.jit(step), *arguments(mesh, P(None, 'tensor')), chip='TPU v5e', tries=4)


def test_figures_come_first(report, tmp_path):
    _, text = saved(report, tmp_path)
    sent, memory, bound, findings = map(
        text.index, ('sent by a device', 'memory of a device', 'largest lower bound', 'findings')
    )
    assert sent < memory < bound < findings
    assert 'fits: <1% of 15.8 GiB' in text
    assert 'estimated step' not in text  # CPUs have no timeline


def test_findings_are_cards_with_a_table(report, tmp_path):
    page, text = saved(report, tmp_path)
    (finding,) = (each for each in report.findings if each.tried)
    assert page.count('<div class="card">') == len(report.findings)
    assert f'{finding.suggestion[0].upper()}{finding.suggestion[1:]}.' in text
    assert 'as it is with this change' in text
    # the patch, and a button that a script shows
    assert '<button hidden>copy</button>' in page
    assert 'all suggestions as a patch' in text
    assert report.patch().splitlines()[0] in text


def test_source_has_costs_beside_its_lines(report, tmp_path):
    page, text = saved(report, tmp_path)
    assert 'test_report_html.py, with its costs' in text
    assert '# sends <more> & "costs" more' in text  # escaped
    assert re.search(r'<mark> +\d+  +return jnp.tanh.*</mark>  <span class="cost">.*flop', page)


def test_a_stored_report_has_no_patch(report, tmp_path):
    page, text = saved(dataclasses.replace(report, fixes=None, reading=None), tmp_path)
    assert 'all suggestions as a patch' not in text
    assert '<div class="card">' in page


def test_names_are_escaped(report, tmp_path):
    page, text = saved(dataclasses.replace(report, name='<script>alert(1)</script>'), tmp_path)
    assert '<script>alert' not in page
    assert '<script>alert(1)</script> on 8 devices' in text


def test_for_a_chip_with_a_timeline(tmp_path):
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    mesh = topology('v5e:2x4', data=2, tensor=4)
    report = explain(jax.jit(step), *arguments(mesh, P('tensor')), tries=0)
    page, text = saved(report, tmp_path)
    assert 'estimated step' in text
    assert report.timeline.svg in page
    capacity = dataclasses.replace(report.memory, capacity=2**20)
    small = dataclasses.replace(report, memory=capacity)
    page, text = saved(small, tmp_path)
    assert 'does not fit: ' in text
    assert '<div class="figure bad">' in page
