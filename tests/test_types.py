"""Type checkers see the types of `typed_calls.py`, and an error in each wrong line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import einshard

FILE = Path(__file__).with_name('typed_calls.py')
PACKAGE = Path(einshard.__file__).parents[1]
WRONG = {i for i, line in enumerate(FILE.read_text().splitlines(), 1) if '# wrong' in line}


def run(checker, *arguments, folder):
    command = shutil.which(checker, path=f'{sys.prefix}/bin') or shutil.which(checker)
    if command is None:
        pytest.skip(f'{checker} is not installed: it belongs to the extra dev')
    environment = {**os.environ, 'MYPYPATH': str(PACKAGE)}
    return subprocess.run(
        [command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
        cwd=folder,
    ).stdout


def test_pyright(tmp_path):
    shutil.copy(FILE, tmp_path)
    # JAX leaves `jax.devices` and `Lowered.compile` untyped
    strict = {'typeCheckingMode': 'strict', 'reportUnknownMemberType': False}
    settings = {'extraPaths': [str(PACKAGE)], **strict}
    (tmp_path / 'pyrightconfig.json').write_text(json.dumps(settings))
    options = '--outputjson', '--pythonpath', sys.executable, '-p', str(tmp_path)
    output = json.loads(run('pyright', *options, folder=tmp_path))
    assert output['summary']['filesAnalyzed'] == 1
    found = {x['range']['start']['line'] + 1 for x in output['generalDiagnostics']}
    assert found == WRONG, output['generalDiagnostics']


def test_mypy(tmp_path):
    shutil.copy(FILE, tmp_path)
    options = '--strict', '--python-executable', sys.executable, '--follow-imports', 'silent'
    output = run('mypy', *options, FILE.name, folder=tmp_path)
    found = {int(line) for line in re.findall(rf'^{FILE.name}:(\d+): error', output, re.MULTILINE)}
    assert found == WRONG, output
