"""Sixteen simulated CPU devices for every test; set before jax starts its backend."""

import importlib.util
import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '')
    + ' --xla_force_host_platform_device_count=16'
    # a quarter of the tests' time was LLVM's; programs as the tests read them come before it
    + ' --xla_backend_optimization_level=0'
)
# libtpu, where it is installed, describes TPU slices without looking for a TPU
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
# several test processes load it at once
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

import jax
import pytest

# files about packages that the extra `test` brings; without it the others run
PACKAGES = {
    'test_equinox.py': ('equinox', 'optax'),
    'test_examples.py': ('rich', 'sklearn', 'equinox', 'flax', 'optax'),
    'test_export.py': ('flatbuffers',),
    'test_flax.py': ('flax', 'optax'),
    'test_optimizer.py': ('optax',),
    'test_orbax.py': ('flax', 'optax', 'orbax'),
}
LACKING = {
    file: [package for package in packages if importlib.util.find_spec(package) is None]
    for file, packages in PACKAGES.items()
}
collect_ignore = [file for file, packages in LACKING.items() if packages]


def pytest_report_header():
    return [f'left out: {file}, for want of {", ".join(LACKING[file])}' for file in collect_ignore]


# a wheel has it beside the package
in_checkout = importlib.util.find_spec('einshard._pytest_plugin')
pytest_plugins = ['einshard._pytest_plugin' if in_checkout else '_einshard_pytest_plugin']


@pytest.fixture(params=[1, 2, 3, 4, 6, 8, 12, 16])
def devices(request):
    """The first few devices, in each of the counts that tests run over."""
    return jax.devices()[: request.param]


@pytest.fixture
def devices8():
    return jax.devices()[:8]
