"""The examples of the documentation, run as a reader runs them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / 'docs' / 'examples'

# What a run of the demo leaves behind, as JSON; the comparison of the curves is the test's own.
DIGITS = """
import io, json, sys
import digits, jax
from rich.console import Console

console = Console(file=io.StringIO(), width=100)
runs = digits.main(console)
print(json.dumps({
    'devices': jax.device_count(),
    'output': console.file.getvalue(),
    'tolerance': digits.TOLERANCE,
    'runs': [{
        'name': run.layout.name,
        'losses': run.losses.tolist(),
        'accuracy': run.accuracy,
        'reported': digits.difference(run, runs[0]),
        'shards': {name: [list(s.data.shape) for s in w.addressable_shards]
                   for name, w in run.weights.items()},
    } for run in runs],
}))
"""


def python(*arguments, **environment):
    """Runs Python as a user does: without the devices that the tests have set up."""
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(EXAMPLES), **environment}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope='module')
def digits():
    done = python('-c', DIGITS, XLA_FLAGS=None)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_digits_has_eight_devices_unless_told_otherwise(digits):
    assert digits['devices'] == 8


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


def test_digits_is_sharded_as_it_says(digits):
    unsharded, tensor, both = (run['shards'] for run in digits['runs'])
    assert unsharded == {'w1': [[64, 480]], 'w2': [[480, 10]]}
    assert tensor == {'w1': [[64, 60]] * 8, 'w2': [[60, 10]] * 8}
    assert both == {'w1': [[64, 240]] * 8, 'w2': [[240, 10]] * 8}


def test_digits_tells_what_it_does(digits):
    output = digits['output']
    assert 'devices: 8 simulated' in output
    notation = ('... -> * ...', 'x y -> x y*', 'y z -> y* z')
    for expression in (*notation, 'b x -> b4 x 2', 'x y -> 4 x y2', 'y z -> 4 y2 z'):
        assert f"'{expression}'" in output
    assert output.count('300/300') == 3
    assert len(re.findall(r'\d\d\.\d% right', output)) == 3
    assert 'agree to 1e-05' in output
    assert '\x1b' not in output  # no colours where there is no terminal


def test_digits_runs_on_one_device():
    program = 'import digits; print(digits.main(epochs=1)[-1].layout.images)'
    done = python('-c', program, XLA_FLAGS='--xla_force_host_platform_device_count=1')
    assert done.returncode == 0, done.stderr
    assert 'devices: 1 simulated' in done.stdout
    assert done.stdout.splitlines()[-1] == 'b x -> b1 x 1'
