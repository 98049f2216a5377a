"""Sixteen simulated CPU devices for every test; set before jax starts its backend."""

import gc
import importlib.util
import os
import threading
import time

from flags import QUICK, WITHOUT_TPU, simulating

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {simulating(16)} {WITHOUT_TPU}'
os.environ['COLUMNS'] = '100'  # reports are as wide as the terminal; pytest-xdist sets 80
# libtpu, where it is installed, describes TPU slices without looking for a TPU
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
# several test processes load it at once
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

import jax
import pytest

# JAX reads the flags here, once, before pages and examples set their own. libtpu and the processes
# that tests start read them later; libtpu does not know all of WITHOUT_TPU.
assert len(jax.devices()) == 16
os.environ['XLA_FLAGS'] = os.environ['XLA_FLAGS'].replace(WITHOUT_TPU, QUICK)

# test files that need packages of the extra `test`; without these packages they are left out
PACKAGES = {
    'test_equinox.py': ('equinox', 'optax'),
    'test_examples.py': ('rich', 'sklearn', 'equinox', 'flax', 'optax'),
    'test_export.py': ('flatbuffers',),
    'test_findings_models.py': ('equinox', 'flax', 'optax'),
    'test_flax.py': ('flax', 'optax'),
    'test_haliax.py': ('haliax',),
    'test_optimizer.py': ('optax',),
    'test_orbax.py': ('flax', 'optax', 'orbax'),
    'test_real_code.py': ('optax',),
}
LACKING = {
    file: [package for package in packages if importlib.util.find_spec(package) is None]
    for file, packages in PACKAGES.items()
}
collect_ignore = [file for file, packages in LACKING.items() if packages]


CUDA_PLUGINS = ('jax_cuda12_plugin', 'jax_cuda13_plugin')


def pytest_addoption(parser):
    parser.addoption(
        '--update-messages',
        action='store_true',
        help='test_messages.py writes the messages of messages.md',
    )


# A process runs a file (see the Makefile): the longest ones first, so that none is left at the end.
LONGEST = (
    *('advice', 'docs', 'processes', 'move', 'fixes', 'promises_in_threads', 'plan_steps'),
    *('explain', 'plan_named', 'edits', 'timeline', 'findings_models', 'findings'),
)


def turn_of(item):
    name = item.path.stem.removeprefix('test_')
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def pytest_collection_modifyitems(items):
    items.sort(key=turn_of)
    if not any(map(importlib.util.find_spec, CUDA_PLUGINS)):
        skip = pytest.mark.skip(reason="JAX's CUDA plugin, of the extra gpu, is not installed")
        for item in items:
            if item.get_closest_marker('gpu'):
                item.add_marker(skip)


# less frequent collections of less garbage save 5% of the tests' time
gc.set_threshold(100_000, 50, 100)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def pytest_report_header():
    return [f'left out: {file}, without {", ".join(LACKING[file])}' for file in collect_ignore]


# a wheel has it beside the package
in_checkout = importlib.util.find_spec('einshard._pytest_plugin')
pytest_plugins = ['einshard._pytest_plugin' if in_checkout else '_einshard_pytest_plugin']


@pytest.fixture(autouse=True)
def own_flags(monkeypatch):
    """Examples and commands set the number of simulated devices, which later processes read."""
    monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])


@pytest.fixture(params=[1, 2, 3, 4, 6, 8, 12, 16])
def devices(request):
    """The first few devices, in each of the counts that tests run over."""
    return jax.devices()[: request.param]


@pytest.fixture
def devices8():
    return jax.devices()[:8]


@pytest.fixture
def in_threads():
    """A function that calls function(0) to function(n - 1) in n threads that start together."""

    def run(n, function):
        barrier = threading.Barrier(n)
        results = {}

        def call(i):
            barrier.wait(60)
            results[i] = function(i)

        # daemons, because a deadlock must not keep pytest from ending
        threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(n)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30
        for thread in threads:
            thread.join(max(0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads), 'threads wait for each other'
        return [results[i] for i in range(n)]

    return run


@pytest.fixture
def without_events(monkeypatch):
    """As with a JAX that does not report compilations: checks compile ahead of time."""
    from einshard._functions import compile_events

    monkeypatch.setattr(compile_events, 'COMPILED', 'unknown')
    monkeypatch.setattr(compile_events, '_has_seen_compilation', False)


@pytest.fixture
def persistent_cache(tmp_path):
    """The folder of JAX's persistent compilation cache, which keeps every program."""
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        'jax_compilation_cache_dir': str(tmp_path),
        'jax_persistent_cache_min_compile_time_secs': 0,
        'jax_persistent_cache_min_entry_size_bytes': -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for values in (options, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is options:
            yield tmp_path
