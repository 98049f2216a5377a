"""The version, the license and the versions of Python agree wherever they are written."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import einshard

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))
SOURCES = PROJECT['tool']['hatch']['build']['targets']['sdist']['include']


def read(path):
    return (ROOT / path).read_text(encoding='utf-8')


def test_changelog_begins_with_this_version():
    assert re.search(r'^## (\S+),', read('CHANGELOG.md'), re.MULTILINE)[1] == einshard.__version__


def test_citation_is_of_this_version():
    citation = dict(re.findall(r'^(\S+): (\S+)$', read('CITATION.cff'), re.MULTILINE))
    assert citation['version'] == einshard.__version__
    assert citation['license'] == PROJECT['project']['license']


@pytest.mark.parametrize('path', SOURCES)
def test_paths_of_the_source_distribution_exist(path):
    if not (ROOT / 'einshard').exists():
        pytest.skip('no checkout')
    assert (ROOT / path.removeprefix('/')).exists()


def test_the_source_distribution_has_all_tracked_files():
    if not (ROOT / '.git').exists():
        pytest.skip('not a clone')
    listed = subprocess.run(
        ['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = {f'/{path.partition("/")[0]}' for path in listed.stdout.split('\0') if path}
    # these Hatchling adds by itself
    added = {'/pyproject.toml', '/README.md', '/LICENSE', '/.gitignore'}
    assert tracked - added <= set(SOURCES)


def test_workflow_runs_everything_on_the_oldest_and_the_newest_python():
    workflow = read('.github/workflows/ci.yml')
    versions = re.search(r'python-version: \|\n((?: +3\.\d+\n)+)', workflow)[1].split()
    oldest = PROJECT['project']['requires-python'].removeprefix('>=')
    # the newest that .ci/run looks for
    newest = re.search(r'for minor in (\d+)', read('.ci/run'))[1]
    assert set(versions) == {oldest, f'3.{newest}'}
    assert f'- run: .ci/run\n        env:\n          PYTHON: python{oldest}\n' in workflow
