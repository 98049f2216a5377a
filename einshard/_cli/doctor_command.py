"""The command `einshard doctor`: what is installed, and what that allows. Starts no backend."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from .._errors import EinshardError
from .._explain.partition import check_flatbuffers
from .._sharding.cuda_plugin import find_plugin
from .._sharding.libtpu import has_libtpu
from .._version import __version__
from .options import Parser, package_version

_EXAMPLES = """\
examples:
  {prog} doctor
  {prog} doctor tpu plan --json
exit status: 0, or 1 if a feature that is asked for is missing
"""
_OTHERS = ('flax', 'equinox', 'optax', 'orbax-checkpoint')


def run(arguments: Sequence[str]) -> tuple[str, int]:
    description = 'Says what is installed, and what that allows. Starts no backend.'
    parser = Parser('doctor', description, _EXAMPLES)
    parser.option('features', 'feature', f'one of {", ".join(_FEATURES)}', nargs='*')
    parser.add_json()
    options = parser.parse_args(arguments)
    found = _check(options.features)
    text = json.dumps(found, indent=2) if options.json else _as_text(found)
    return text, 1 if found['missing'] else 0


def _versions() -> dict[str, str]:
    """Returns the versions of Python, einshard, JAX and the libraries that einshard knows."""
    found = {
        'python': sys.version.partition(' ')[0],
        'einshard': __version__,
        'jax': jax.__version__,
        'jaxlib': package_version('jaxlib'),
        **{name: package_version(name) for name in _OTHERS},
    }
    return {name: version for name, version in found.items() if version}


def _check(asked: Sequence[str]) -> dict[str, Any]:
    """Returns what the command prints. `missing` lists the features in `asked` that don't work."""
    for name in asked:
        if name not in _FEATURES:
            raise EinshardError(
                f"'{name}' is not a feature",
                code='command',
                facts={'features': ', '.join(_FEATURES)},
            )
    # what a package allows, whether it works, and what is found or missing; nothing is compiled
    found = {
        name: {'works': works, 'allows': allows, 'text': text}
        for name, (allows, check) in _FEATURES.items()
        for works, text in [check()]
    }
    return {
        'schema': 1,
        'versions': _versions(),
        'platforms': os.environ.get('JAX_PLATFORMS') or None,
        'features': found,
        'missing': [name for name, one in found.items() if name in asked and not one['works']],
    }


def _as_text(found: dict[str, Any]) -> str:
    lines = [', '.join(f'{name} {version}' for name, version in found['versions'].items())]
    if found['platforms']:
        lines.append(f'JAX_PLATFORMS={found["platforms"]}')
    for name, one in found['features'].items():
        lines += ['', f'{name}: {"yes" if one["works"] else "no"}, {one["text"]}']
        lines.append(f'  for {one["allows"]}')
    if found['missing']:
        lines += ['', f'missing: {", ".join(found["missing"])}']
    return '\n'.join(lines)


def _tpu() -> tuple[bool, str]:
    works = has_libtpu()
    return works, f'libtpu {package_version("libtpu")}' if works else "pip install 'jax[tpu]'"


def _gpu() -> tuple[bool, str]:
    try:
        plugin = find_plugin()
    except EinshardError as error:
        label = next((label for label in ('install', 'remove one') if label in error.facts), None)
        instead = f'; {error.facts[label]}' if label else ''
        return False, f'{error.sentence}{instead}'
    compiler = _ptx_compiler()
    if compiler is None:
        return False, 'no PTX compiler; pip install nvidia-cuda-nvcc'
    package = f'jax-{plugin.rpartition("xla_")[2]}-plugin'
    return True, f'{package} {package_version(package)}, PTX compiler {compiler}'


def _ptx_compiler() -> str | None:
    """Returns the path of ptxas: XLA looks in NVIDIA's packages, in CUDA_HOME, and in the PATH."""
    nvidia = importlib.util.find_spec('nvidia')
    folders = [Path(folder) for folder in (nvidia and nvidia.submodule_search_locations) or ()]
    for folder in folders:
        for part in ('cu13', 'cuda_nvcc'):  # of CUDA 13 and CUDA 12
            if (path := folder / part / 'bin' / 'ptxas').exists():
                return str(path)
    roots = [os.environ.get('CUDA_HOME') or '', '/usr/local/cuda']
    paths = [Path(root, 'bin', 'ptxas') for root in roots if root]
    return next((str(path) for path in paths if path.exists()), shutil.which('ptxas'))


def _plan() -> tuple[bool, str]:
    try:
        check_flatbuffers()
    except EinshardError as error:
        return False, error.facts.get('install', error.sentence)
    return True, f'flatbuffers {package_version("flatbuffers")}'


def _rich() -> tuple[bool, str]:
    version = package_version('rich')
    return version is not None, f'rich {version}' if version else 'pip install rich'


_FEATURES = {
    'tpu': ("TPU slices you don't have: topology('v5e:4x4')", _tpu),
    'gpu': ("GPU clusters you don't have: topology('h100:4x8')", _gpu),
    'plan': ('plan, which finds a sharding', _plan),
    'rich': ('color in terminals', _rich),
}
