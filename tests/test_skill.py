"""The skill for coding agents: its form, its code, and that the wheel has it."""

import inspect
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import pytest
from command import main
from jax.sharding import PartitionSpec

import einshard
from einshard import EinshardError, device_mesh, make_sharding, topology

ROOT = Path(__file__).parents[1]
SKILL = Path(einshard.__file__).parent / '.agents' / 'skills' / 'einshard'
TEXT = (SKILL / 'SKILL.md').read_text(encoding='utf-8')


def test_the_command_prints_the_folder(capsys):
    assert main(['skill']) == 0
    assert Path(capsys.readouterr().out.strip()) == SKILL


def test_front_matter_and_size():
    """As https://agentskills.io/specification has it; a token is about four characters."""
    _, header, body = TEXT.split('---\n', 2)
    fields = dict(line.split(': ', 1) for line in header.splitlines())
    assert fields['name'] == SKILL.name
    assert 0 < len(fields['description']) <= 1024
    assert len(body) / 4 < 5000


def test_references_exist():
    named = set(re.findall(r'`references/([\w.]+)`', TEXT))
    assert named == {path.name for path in (SKILL / 'references').iterdir()}


def test_the_code_runs(monkeypatch):
    devices = jax.devices()[:8]
    monkeypatch.setattr(jax, 'devices', lambda: devices)
    # conftest.py turns suggestions off
    monkeypatch.setitem(inspect.unwrap(einshard.explain).__kwdefaults__, 'tries', 4)
    code = '\n'.join(re.findall(r'^```python\n(.*?)^```$', TEXT, re.MULTILINE | re.DOTALL))
    names = {}
    exec(compile(code, 'SKILL.md', 'exec'), names)
    assert names['report'].findings
    assert not names['after'].findings
    assert names['after'].network_bytes < names['report'].network_bytes


def test_codes_and_targets_exist():
    errors = (SKILL / 'references' / 'errors.md').read_text(encoding='utf-8')
    table = errors.partition('| symptom')[0]
    codes = re.findall(r'^\| `([a-z-]+)`', table, re.MULTILINE)
    page = (ROOT / 'docs' / 'errors.md').read_text(encoding='utf-8')
    assert codes
    assert all(f'\n| `{code}` |' in page for code in codes)
    targets = (SKILL / 'references' / 'targets.md').read_text(encoding='utf-8')
    rows = targets.partition('| devices |')[2].partition('\n\n')[0]
    for name in re.findall(r'`([\w-]+:[\dx]+)`', rows):
        try:
            assert topology(name).size > 1
        except EinshardError as error:  # raised only for names that einshard knows
            assert error.code == 'not-installed', error  # noqa: PT017


def test_the_table_of_plain_jax():
    notation = (SKILL / 'references' / 'notation.md').read_text(encoding='utf-8')
    rows = re.findall(r"^\| `(P\(.*?\))` \| `'([^']*)'`", notation, re.MULTILINE)
    mesh = device_mesh(data=4, tensor=4)
    for spec, expression in rows:
        expected = eval(spec, {'P': PartitionSpec})
        sharding = make_sharding(expression, ndim=2, mesh=mesh)
        assert sharding.is_equivalent_to(type(sharding)(mesh, expected), 2)
    assert len(rows) == 3


def test_library_skills_finds_it_in_the_wheel(tmp_path):
    pytest.importorskip('hatchling')
    scanner = pytest.importorskip('library_skills.scanner')
    if not (ROOT / 'pyproject.toml').exists():
        pytest.skip('no checkout')
    command = [sys.executable, '-m', 'hatchling', 'build', '-t', 'wheel', '-d', str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob('*.whl')
    site = tmp_path / 'site-packages'
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    found = scanner.scan_python_distributions(site)
    assert [(skill.name, skill.package_name) for skill in found.skills] == [('einshard',) * 2]
    assert not found.warnings
    packed = {path.name for path in (site / 'einshard' / 'schemas').iterdir()}
    assert packed == {path.name for path in (SKILL.parents[2] / 'schemas').iterdir()}
