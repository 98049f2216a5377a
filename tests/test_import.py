"""Importing the package, and reading and defining with it, starts no backend."""

import os
import pathlib
import subprocess
import sys

from spawn import free_port, python_path

import einshard

# JAX sets the number of CPU devices, and connects to other processes, only while no backend runs.
# So both calls show, by documented means, whether one does.
PROGRAM = """
import sys

import jax
import einshard
TOOLS = '_check', '_cli', '_draw', '_eject', '_explain', '_move', '_page', '_plan', '_predict'
TOOLS += ('_program',)
assert not {f'einshard.{name}' for name in TOOLS} & {*sys.modules}
from jax.sharding import AbstractMesh

for name in dir(einshard):
    getattr(einshard, name)
einshard.clear_caches()

mesh = AbstractMesh((4, 4), ('x', 'y'))
einshard.make_sharding('a b -> 2 a2* b*', mesh=AbstractMesh((2, 4, 2), ('x', 'y', 'z')))
try:
    einshard.make_sharding('a b ->', mesh=mesh)
except einshard.EinshardError as error:
    assert 'right side' in str(error)

sharding = einshard.make_sharding('a b -> a4 b4', mesh=mesh)
assert einshard.describe(sharding) == 'a b ... -> a@x b@y ...'
einshard.make_sharding('a b -> a8 b2', mesh=einshard.device_mesh(mesh))
struct = jax.ShapeDtypeStruct((16, 16), 'float32')
assert einshard.einshard(struct, 'a b -> a4 b4', mesh=mesh).sharding == sharding

@jax.jit
def f(x):
    return einshard.einshard(x, 'a b -> a* b')

@einshard.sharded('a b -> a* b', out='a b -> a b*')
def g(x):
    return x

def start(n):
    jax.config.update('jax_num_cpu_devices', n)

start(3)
jax.distributed.initialize('127.0.0.1:PORT', num_processes=1, process_id=0)
start(5)
print('no backend ran', end=', ')
assert einshard.make_sharding('a -> a*').num_devices == 5
try:
    start(3)
except RuntimeError:
    print('now one does')
jax.distributed.shutdown()
"""


def test_star_import_has_all_public_names_and_no_others():
    names = {}
    exec('from einshard import *', names)
    assert {*names} - {'__builtins__'} == {*einshard.__all__}
    assert {*einshard.__all__} <= {*dir(einshard)}
    assert len(dir(einshard)) == len({*dir(einshard)})  # also after the lazy names are loaded


def test_starts_no_backend():
    path = python_path(pathlib.Path(einshard.__file__).parents[1])
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path}
    env.pop('XLA_FLAGS', None)
    done = subprocess.run(
        [sys.executable, '-W', 'error', '-c', PROGRAM.replace('PORT', str(free_port()))],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'no backend ran, now one does\n'
