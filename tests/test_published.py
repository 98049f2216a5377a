"""The published einshard 0.2.0: where it succeeds, the same device holds the same slice.

The published package runs in its own environment, which is created once and kept in the project's
folder.
"""

import fcntl
import subprocess
import sys
from pathlib import Path

import jax
import oracle
import pytest
from hypothesis import given

from einshard import make_sharding

pytestmark = oracle.ANY_SPACING

ROOT = Path(__file__).parent.parent
HOME = ROOT / '.venv-einshard-0.2'
REQUIREMENT = 'einshard==0.2.0'

# Expressions that the published package must accept. Expressions that only one package accepts are
# not compared.
KNOWN = {
    16: [
        ('a b -> 2 a2 b4', (8, 8)),
        ('a ... d -> 4 a2 ... d2', (4, 3, 5, 4)),
        ('a b c d -> 4 a2 b c d2', (4, 3, 5, 4)),
        ('a b -> * a2 b', (4, 3)),
        ('a b -> 2 a2* b*', (8, 4)),
        ('a b -> * a* b2*', (2, 4)),
        ('a b -> b2 a4 2', (8, 8)),
        ('... -> * ...', (3, 5)),
        ('... -> * ...', ()),
        ('... a -> ... a*', (2, 16)),
        ('a b -> a b*', (3, 16)),
        ('a b c d -> a* b* c* d*', (2, 4, 6, 8)),
    ],
    12: [
        ('a b -> a3 b4', (3, 8)),
        ('a b -> a4 b3', (8, 3)),
        ('a b -> a3* b*', (6, 2)),
        ('x y -> 3 y2 x*', (4, 4)),
    ],
    8: [
        ('x y -> x y*', (3, 8)),
        ('b x -> b4 x 2', (8, 3)),
        ('x y -> 4 x y2', (3, 8)),
        ('a b -> a2* b*', (8, 8)),
    ],
}


@pytest.fixture(scope='module')
def python():
    """The Python of an environment with the published package."""
    if sys.version_info < (3, 12):
        pytest.skip(f'{REQUIREMENT} needs Python 3.12, this is {sys.version.split()[0]}')
    HOME.mkdir(exist_ok=True)
    found, ready = HOME / 'env' / 'bin' / 'python', HOME / 'ready'
    with open(HOME / 'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other pytest workers wait for the one that creates it
        if not ready.exists():
            subprocess.run([sys.executable, '-m', 'venv', '--clear', HOME / 'env'], check=True)
            pip = [found, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check']
            done = subprocess.run([*pip, REQUIREMENT], capture_output=True, text=True)
            if done.returncode:
                why = done.stderr.strip().splitlines()[-1:]
                pytest.skip(f'{REQUIREMENT} cannot be installed: {"".join(why)}')
            ready.touch()
    return str(found)


def in_today_s_notation(case):
    """The expression that means today what a case means to the published package.

    There, if several terms have the same axis, only the last one shards it; the others replicate.
    This is the only difference between expressions that both packages accept.
    """
    terms = list(case.right)
    axes = [term.axis for term in terms]
    for i, term in enumerate(terms):
        if term.axis and term.axis in axes[i + 1 :]:
            terms[i] = oracle.Term(None, term.count or 1, term.star)
    return f'{" ".join(case.left)} -> {" ".join(map(str, terms))}'


def cases(n_devices):
    """(an expression, the same in today's notation, shape)"""
    collected = []

    @oracle.examples(400)
    @given(case=oracle.cases(device_counts=(n_devices,)))
    def collect(case):
        collected.append((case.text, in_today_s_notation(case), case.shape))

    collect()
    return [(text, text, shape) for text, shape in KNOWN[n_devices]] + collected


@pytest.mark.slow
@pytest.mark.parametrize('n_devices', KNOWN)
def test_devices_hold_the_same_slices(python, n_devices):
    devices = jax.devices()[:n_devices]
    questions = cases(n_devices)
    # not from the project's folder, where 'einshard' is the new package
    asked = [(text, shape) for text, _, shape in questions]
    answers = oracle.answers_of(python, n_devices, asked, cwd=str(HOME))
    compared = 0
    for i, ((text, meant, shape), answer) in enumerate(zip(questions, answers, strict=True)):
        if isinstance(answer, str):
            assert i >= len(KNOWN[n_devices]), f'the published package refuses {text!r}: {answer}'
            continue
        ours = make_sharding(meant, ndim=len(shape), mesh=devices)
        assert oracle.of_sharding(ours, devices, shape) == answer, (text, meant, shape)
        compared += 1
    assert compared > len(questions) // 5, f'only {compared} of {len(questions)} compared'


@pytest.mark.slow
def test_only_the_last_term_of_an_axis_sharded_it(python):
    shape, devices = (8, 8), jax.devices()
    (answer,) = oracle.answers_of(python, 16, [('i o -> i2 o4 i2', shape)], cwd=str(HOME))
    then, now = (
        oracle.of_sharding(make_sharding(text, mesh=devices), devices, shape)
        for text in ('i o -> 2 o4 i2', 'i o -> i2 o4 i2')
    )
    assert answer == then != now


@pytest.mark.slow
def test_the_published_package_answers(python):
    asked = (
        'import importlib.metadata as m, einshard; print(m.version("einshard"), einshard.__file__)'
    )
    done = subprocess.run(
        [python, '-c', asked], cwd=HOME, capture_output=True, text=True, check=True
    )  # fmt: skip
    version, file = done.stdout.split()
    assert version == '0.2.0'
    assert HOME in Path(file).parents
