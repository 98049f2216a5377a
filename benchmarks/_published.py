"""The process that measures the published einshard 0.2.0, in the environment that has it.

Writes its rows as JSON. Started by the placement benchmark, as `python -I _published.py SECONDS`.
"""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import platform
import sys

VERSION = '0.2.0'


def main() -> None:
    found = importlib.metadata.version('einshard')
    if found != VERSION:
        raise SystemExit(f'{sys.executable} has einshard {found}, not {VERSION}')
    import jax
    import numpy as np

    import einshard  # the published one, before this repository is on the path

    sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
    from benchmarks import _arrays
    from benchmarks._harness import Bench

    versions = f'jax {jax.__version__}, Python {platform.python_version()}'
    bench = Bench(
        'published',
        seconds=float(sys.argv[1]),
        tiny='--tiny' in sys.argv,
        subject=f'einshard {VERSION} ({versions})',
    )
    n = jax.device_count()
    like = einshard.einshard(np.ones((n, 1), np.float32), _arrays.EXPRESSION)
    _arrays.measure(bench, einshard.einshard, like.sharding)
    for row in bench.rows:
        row['target'] = row['met'] = None  # the targets are ours
    print(json.dumps(bench.rows))


if __name__ == '__main__':
    main()
