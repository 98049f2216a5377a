"""JAX's CUDA plugin, which compiles for GPUs on machines without one."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from .._chips.table import GPUS, Gpu
from .._errors import EinshardError
from .._text import first_line
from .libtpu import load_libtpu, set_variables


def describe_gpus(gpu: Gpu, sizes: str) -> list[Any]:
    """Returns devices for which JAX compiles. `sizes` are '4x1x8': domains, hosts, GPUs."""
    plugin = find_plugin()
    _check_compiler(plugin)
    load_libtpu()  # the default backend starts when JAX lowers a program
    config = _target_config(gpu)
    from jax.experimental.topologies import get_topology_desc

    def describe() -> Any:
        return get_topology_desc('', 'cuda', topology=sizes, target_config=config)

    with _without_check():
        try:
            description = describe()
        except NotImplementedError:
            # Without a GPU, the plugin's check of CUDA libraries fails when JAX starts, so JAX has
            # not registered the plugin. JAX itself tries only once.
            try:
                importlib.import_module(plugin).initialize()
            except RuntimeError as error:  # on a machine with a GPU, its check is not skipped
                raise EinshardError(
                    "JAX's CUDA plugin fails on this machine",
                    code='not-installed',
                    facts={'plugin says': first_line(error)},
                ) from None
            description = describe()
    return description.devices


# Limits that all GPUs of the table share: CUDA programming guide, tables of compute capabilities.
# Without `threads_per_warp` or `block_dim_limit_x`, the compiler ends the process.
_LIMITS = {
    'threads_per_warp': 32,
    'threads_per_block_limit': 1024,
    'block_dim_limit_x': 2**31 - 1,
    'block_dim_limit_y': 2**16 - 1,
    'block_dim_limit_z': 2**16 - 1,
    'registers_per_core_limit': 2**16,
    'registers_per_block_limit': 2**16,
    'shared_memory_per_block': 48 * 2**10,
}


def _target_config(gpu: Gpu) -> str:
    """Returns the description of a GPU, a GpuTargetConfigProto of XLA in text format."""
    major, minor = gpu.capability
    links = f'device_interconnect_info {{ active_links: {gpu.links} }}'
    return '\n'.join(
        (
            'gpu_device_info {',
            *(f'  {field}: {value}' for field, value in _LIMITS.items()),
            f'  cuda_compute_capability {{ major: {major} minor: {minor} }}',
            f'  core_count: {gpu.sms}',
            f'  fpus_per_core: {gpu.fp32}',
            f'  clock_rate_ghz: {gpu.clock}',
            f'  device_memory_size: {gpu.memory * 2**20}',
            f'  memory_bandwidth: {gpu.bandwidth:.0f}',
            f'  l2_cache_size: {gpu.l2 * 2**20:.0f}',
            f'  shared_memory_per_core: {gpu.shared * 2**10}',
            f'  shared_memory_per_block_optin: {(gpu.shared - 1) * 2**10}',
            f'  threads_per_core_limit: {gpu.threads}',
            f'  {links}' if gpu.links else '',
            '}',
            'platform_name: "CUDA"',
            'dnn_version_info { major: 9 minor: 10 }',
            f'device_description_str: "{gpu.kind}"',
        )
    )


@functools.cache
def start_backend() -> None:
    """Starts JAX's default backend, without what its plugins print on machines without devices.

    The CUDA plugin prints 20 lines about cuDNN, which is not installed to compile for GPUs.
    """
    load_libtpu()
    platforms: str | None = jax.config.jax_platforms  # type: ignore[reportAttributeAccessIssue]
    is_used = not platforms or 'cuda' in platforms.split(',')
    if is_used and not _has_gpu() and any(map(_is_installed, _PLUGINS)):
        # without a GPU and with JAX_PLATFORMS=cuda, JAX has no backend
        with _without_check(), suppress(AssertionError, RuntimeError):
            jax.devices()


def _without_check() -> AbstractContextManager[None]:
    """Skips the plugin's check of CUDA libraries, unless this machine has an NVIDIA GPU.

    Quiets the plugin, too, which reads its log level when it loads. It would print lines about a
    program that is too large, whose sizes `explain` shows.
    """
    if _has_gpu():
        return set_variables({})
    variables = {'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1'}
    # JAX sets the level 1. With another, the user has chosen it
    if os.environ.get('TF_CPP_MIN_LOG_LEVEL', '1') == '1':
        variables['TF_CPP_MIN_LOG_LEVEL'] = '3'
    return set_variables(variables)


def _has_gpu() -> bool:
    # /dev/dxg is the GPU in Windows Subsystem for Linux
    return any(Path(path).exists() for path in ('/dev/nvidia0', '/dev/nvidiactl', '/dev/dxg'))


def find_plugin() -> str:
    """Returns the module of the plugin. Raises unless there is one, of the version of jaxlib."""
    plugins = [name for name in _PLUGINS if _is_installed(name)]
    if not plugins:
        raise EinshardError(
            "compiling for GPUs needs JAX's CUDA plugin, which is not installed",
            code='not-installed',
            facts={'install': _INSTALL, 'or': _ENOUGH, 'exists for': _PLATFORMS},
        )
    packages = [(name, version) for name in _PACKAGES if (version := _version(name))]
    if len(plugins) > 1:
        raise EinshardError(
            "JAX's plugins for CUDA 12 and CUDA 13 are both installed, and break each other",
            code='not-installed',
            facts={
                'installed': ', '.join(f'{name} {version}' for name, version in packages),
                'remove one': 'pip uninstall jax-cuda12-plugin jax-cuda12-pjrt',
            },
        )
    jaxlib = _version('jaxlib')
    wrong = [f'{name} {version}' for name, version in packages if version != jaxlib]
    if wrong and jaxlib:
        cuda = plugins[0][-2:]
        raise EinshardError(
            "JAX's CUDA plugin has another version than jaxlib, so it would compile other programs",
            code='not-installed',
            facts={
                'installed': ', '.join([*wrong, f'jaxlib {jaxlib}']),
                'install': f"pip install 'jax[cuda{cuda}{'-local' * (cuda == '13')}]"
                f"=={jax.__version__}'",
            },
        )
    return plugins[0]


_PLUGINS = ('jax_plugins.xla_cuda13', 'jax_plugins.xla_cuda12')
_INSTALL = "pip install 'jax[cuda13-local]' nvidia-cuda-nvcc"
_ENOUGH = 'jax[cuda12] or jax[cuda13], which have both'
_PLATFORMS = 'Linux on x86_64 and aarch64'
_PACKAGES = ('jax-cuda12-plugin', 'jax-cuda12-pjrt', 'jax-cuda13-plugin', 'jax-cuda13-pjrt')


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # there are no plugins at all
        return False


def _version(package: str) -> str | None:
    """Returns the version of an installed package, without the suffixes of rebuilds."""
    try:
        return re.sub(r'\.post\d+|\+.*', '', metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


# --- PTX compiler -------------------------------------------------------------------------------

# Needs libdevice and a PTX compiler. Without one, JAX raises an error or ends the process.
_PROGRAM = """
import sys, jax
from jax.experimental.topologies import get_topology_desc
device, = get_topology_desc('', 'cuda', topology='1x1x1', target_config=sys.argv[1]).devices
sharding = jax.sharding.SingleDeviceSharding(device)
x = jax.ShapeDtypeStruct((256,), 'float32', sharding=sharding)
jax.jit(jax.numpy.tanh).lower(x).compile()
"""


@functools.cache
def _check_compiler(plugin: str) -> None:
    """Raises if there is no PTX compiler. Only the first call takes time, about a second."""
    flags = os.environ.get('XLA_FLAGS', '')
    process = subprocess.run(
        [sys.executable, '-P', '-c', _PROGRAM, _target_config(GPUS['h100'])],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors='replace',
        env={
            **os.environ,
            'PYTHONPATH': os.pathsep.join(filter(None, sys.path)),
            'PYTHONWARNINGS': 'ignore',
            'JAX_PLATFORMS': 'cpu',
            'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1',
            'JAX_ENABLE_COMPILATION_CACHE': '0',
            # thousands of simulated devices take seconds to start
            'XLA_FLAGS': f'{flags} --xla_force_host_platform_device_count=1',
        },
    )
    if process.returncode:
        says = re.findall(r'^[\w.]+(?:Error|Exception): (.*)', process.stderr, re.MULTILINE)
        if process.returncode < 0:
            says = [f'the process ended with {signal.Signals(-process.returncode).name}']
        raise EinshardError(
            'XLA cannot compile a test program for GPUs, usually because there is no PTX compiler',
            code='not-installed',
            facts={
                'XLA says': says[-1] if says else process.stderr.strip().rpartition('\n')[2],
                'install': f'pip install nvidia-cuda-nvcc{"-cu12" * plugin.endswith("12")}',
            },
        )
