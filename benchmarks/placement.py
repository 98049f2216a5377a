"""arrays and trees placed by an expression, against jax.device_put with shardings made before

Both sides wait for the arrays (`block_until_ready`); both put the same arrays into the same
shardings. `--published PYTHON` measures the published einshard 0.2.0 likewise, in the interpreter
in whose environment it is installed: a process of its own, so its ratio is against `device_put`
there.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
from typing import Any

import jax
import numpy as np

from einshard import einshard, make_sharding

from . import _arrays
from ._arrays import EXPRESSION
from ._harness import Bench, ratio_at_most
from ._schema import Row, check


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--published',
        metavar='PYTHON',
        help='an interpreter in whose environment einshard==0.2.0 is installed, to measure it too',
    )
    parser.add_argument(
        '--large', action='store_true', help='trees of 10,000 leaves too, some seconds a round'
    )


def run(bench: Bench) -> None:
    published: list[Row] = []
    if bench.options.published:
        # first, while this process has not taken the accelerator
        published = run_published(bench)
    _arrays.measure(bench, einshard, make_sharding(EXPRESSION))
    for n_leaves in (3, 10) if bench.tiny else (10, 1000):
        trees(bench, n_leaves)
    if bench.options.large and not bench.tiny:
        trees(bench, 10_000)
    bench.rows += published


def trees(bench: Bench, n_leaves: int) -> None:
    n = jax.device_count()
    sharding = make_sharding(EXPRESSION)
    leaf = np.ones((n, 8), np.float32)
    names = [f'w{i}' for i in range(n_leaves)]
    shardings = dict.fromkeys(names, sharding)
    expressions = dict.fromkeys(names, EXPRESSION)
    size: dict[str, int] = {'leaves': n_leaves, 'bytes_a_leaf': leaf.nbytes, 'devices': n}
    on_host = {name: leaf.copy() for name in names}
    on_device = jax.device_put(on_host, jax.devices()[0])
    together = 'one jax.device_put, a sharding for each leaf made before'

    def ours(tree: Any, spec: Any) -> Any:
        return lambda: jax.block_until_ready(einshard(tree, spec))

    def put(tree: Any) -> Any:
        return lambda: jax.block_until_ready(jax.device_put(tree, shardings))

    def put_each(tree: Any) -> Any:
        def loop() -> Any:
            placed = {name: jax.device_put(x, shardings[name]) for name, x in tree.items()}
            return jax.block_until_ready(placed)

        return loop

    limit = ratio_at_most(1.05)
    for kind, tree in (('numpy', on_host), ('jax', on_device)):
        name = f'tree of {n_leaves:,} {kind} leaves'
        bench.compare(name, ours(tree, EXPRESSION), together, put(tree), limit, **size)
        loop = 'a loop of jax.device_put, shardings made before'
        bench.compare(name, ours(tree, EXPRESSION), loop, put_each(tree), **size)
    name = f'tree of {n_leaves:,} jax leaves, an expression each'
    bench.compare(name, ours(on_device, expressions), together, put(on_device), limit, **size)
    placed = jax.device_put(on_device, shardings)
    name = f'tree of {n_leaves:,} leaves placed already'
    bench.compare(name, ours(placed, EXPRESSION), together, put(placed), **size)


def run_published(bench: Bench) -> list[Row]:
    """The rows of einshard 0.2.0, from a process of its own environment."""
    bench.progress('einshard 0.2.0, in its own process')
    script = pathlib.Path(__file__).with_name('_published.py')
    # -I: neither the directory one stands in nor PYTHONPATH may hide the published package
    command = [bench.options.published, '-I', str(script), str(bench.seconds)]
    done = subprocess.run(
        command + ['--tiny'] * bench.tiny, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f'einshard 0.2.0 could not be measured with {bench.options.published}')
    rows = json.loads(done.stdout)
    check(rows, list[Row], 'published')
    return rows
