"""The examples of the documentation, run as a reader runs them.

`make docs` runs each as a notebook, in an empty folder. Here their code is run without Jupyter.
"""

import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from flags import WITHOUT_TPU

import einshard

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / 'docs' / 'examples'

# What a run of the notebook leaves behind, as JSON; the comparison of the curves is the test's own.
DIGITS = """
import json
print('\\0', json.dumps({
    'devices': jax.device_count(),
    'tolerance': TOLERANCE,
    'runs': [{
        'name': run.layout.name,
        'losses': run.losses.tolist(),
        'accuracy': run.accuracy,
        'reported': difference(run, unsharded),
        'shards': {name: [list(s.data.shape) for s in w.addressable_shards]
                   for name, w in run.weights.items()},
    } for run in (unsharded, tensor, both)],
}))
"""


def cells(name):
    """The cells of an example: the tags of each, and its code."""
    text = (EXAMPLES / f'{name}.py').read_text(encoding='utf-8')
    parts = re.split(r'^# %%(.*)\n', text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def code(cell):
    """The code of a cell in the notebook; the script comments out cells only for the notebook."""
    tags, text = cell
    return re.sub(r'^# ?', '', text, flags=re.MULTILINE) if 'active-ipynb' in tags else text


def notebook(name):
    """The code of an example as the cells of its notebook have it."""
    left_out = re.compile(r'\[markdown\]|active-py"')
    return '\n'.join(code(cell) for cell in cells(name) if not left_out.search(cell[0]))


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    """A run of the notebook in an empty folder, without the devices that the tests have set up."""
    environment = {**os.environ, 'XLA_FLAGS': WITHOUT_TPU, 'PYTHONPATH': str(EXAMPLES.parents[1])}
    done = subprocess.run(
        [sys.executable, '-c', notebook('digits') + DIGITS],
        cwd=tmp_path_factory.mktemp('empty'),
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    output, _, result = done.stdout.partition('\0')
    return {'output': output, **json.loads(result)}


def test_digits_reads_most_held_out_images(digits):
    assert len(digits['runs']) == 3
    for run in digits['runs']:
        assert 0.95 <= run['accuracy'] <= 1, run['name']


def test_digits_learns_the_same_sharded_and_unsharded(digits):
    unsharded, *sharded = (np.array(run['losses']) for run in digits['runs'])
    assert unsharded.size == 300
    assert unsharded[-1] < unsharded[0] / 20
    assert digits['tolerance'] == 1e-5
    for losses, run in zip(sharded, digits['runs'][1:], strict=True):
        np.testing.assert_allclose(losses, unsharded, rtol=1e-5, atol=0)
        assert run['reported'] == pytest.approx(np.max(np.abs(losses / unsharded - 1)), rel=1e-6)
        # sums in another order: had nothing been sharded, every loss would be the same bits
        assert run['reported'] > 0


def test_shards_of_digits(digits):
    assert digits['devices'] == 8  # by default
    unsharded, tensor, both = (run['shards'] for run in digits['runs'])
    assert unsharded == {'w1': [[64, 480]], 'w2': [[480, 10]]}
    assert tensor == {'w1': [[64, 60]] * 8, 'w2': [[60, 10]] * 8}
    assert both == {'w1': [[64, 240]] * 8, 'w2': [[240, 10]] * 8}
    assert digits['output'].splitlines()[-2:] == ['a b -> a b8', 'a b -> 4 a b2']


def test_output_of_digits(digits):
    output = digits['output']
    assert 'devices: 8 simulated' in output
    notation = ('... -> * ...', 'x y -> x y*', 'y z -> y* z')
    for expression in (*notation, 'b x -> b4 x 2', 'x y -> 4 x y2', 'y z -> 4 y2 z'):
        assert f"'{expression}'" in output
    assert output.count('300/300') == 3
    assert len(re.findall(r'\d\d\.\d% right', output)) == 3
    assert 'agree to 1e-05' in output
    assert '\x1b' not in output  # no colors where there is no terminal


@pytest.fixture
def one_device(monkeypatch):
    """One device, as a laptop with a GPU has it; JAX started with the sixteen of the tests."""
    mesh = einshard.device_mesh(jax.devices()[:1])
    monkeypatch.setattr(jax, 'device_count', lambda: 1)
    monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])  # which examples change
    with jax.set_mesh(mesh):
        yield


def test_digits_runs_on_one_device(one_device):
    example = runpy.run_path(str(EXAMPLES / 'digits.py'))
    layout = example['data_and_tensor'](1)
    assert layout.images == 'b x -> b1 x 1'
    losses = [example['train'](p, epochs=1).losses for p in (example['UNSHARDED'], layout)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.parametrize(('name', 'package'), [('flax_nnx', 'flax'), ('equinox_mlp', 'equinox')])
def test_models_of_other_packages_run_on_one_device(name, package, one_device):
    pytest.importorskip(package)
    example = runpy.run_path(str(EXAMPLES / f'{name}.py'))
    names = example['main'].__globals__
    names['STEPS'] = 3
    model, losses = names['main']()
    assert len(losses) == 3
    arrays = [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]
    assert {leaf.sharding.num_devices for leaf in arrays} == {1}


def test_scaling_book(capsys):
    """The asserts of the example compare each number with the book's."""
    pytest.importorskip('libtpu')
    exec(notebook('scaling_book'), {'__name__': '__main__'})
    assert 'FSDP 2048 x tensor  4: network   1025 us' in capsys.readouterr().out


def test_tpu_slice_counts_the_bytes_of_a_step(capsys):
    """A smaller model, to compile sooner; bytes against those of ring algorithms, by hand."""
    pytest.importorskip('libtpu')
    program, sizes = notebook('tpu_slice'), 'LAYERS, D, F, BATCH = 64, 2048, 8192, 4096\n'
    assert sizes in program
    n, d, f, batch = 4, 256, 1024, 512
    names = {'__name__': '__main__'}
    exec(program.replace(sizes, f'LAYERS, D, F, BATCH = {n}, {d}, {f}, {batch}\n'), names)
    tensor, both = names['tensor'], names['both']
    assert {tensor.n_devices, both.n_devices} == {16}
    weights, rows = 2 * n * d * f, batch * d
    # sums over k chips: each sends 2 (k - 1) / k of the array, in 2 bytes a number
    assert tensor.network_bytes == pytest.approx(2 * n * 2 * 15 / 16 * rows * 2, rel=1e-3)
    stream, gradients = 2 * n * rows / 4, weights / 4
    assert both.network_bytes == pytest.approx(2 * 3 / 4 * (stream + gradients) * 2, rel=1e-3)
    # weights and velocity, and the two batches
    assert tensor.memory.arguments == 2 * (2 * weights / 16 + 2 * rows)
    assert both.memory.arguments == 2 * (2 * weights / 4 + 2 * rows / 4)
    printed = capsys.readouterr().out
    assert f'{tensor}\n' in printed
    assert textwrap.dedent(f'{tensor.diff(both)}\n') in textwrap.dedent(printed)
    sent = re.findall(r'GB sent by each chip in a step, \d+% of its memory$', printed, re.M)
    assert len(sent) == 2
