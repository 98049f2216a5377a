"""The process in which the memory benchmark places a tree; it writes what it measured as JSON.

python -m benchmarks._placing ours|theirs BYTES ROUNDS: first that side alone, for its peaks; then
both turn by turn, for their times.
"""

from __future__ import annotations

import json
import resource
import sys

import jax
import numpy as np

from einshard import einshard, make_sharding

from ._harness import interleave

EXPRESSION = 'a b -> a* b'
N_LEAVES = 64


def main(side: str, n_bytes: int, rounds: int) -> None:
    n = jax.device_count()
    shape = (n, max(n_bytes // 4 // N_LEAVES // n, 1))
    tree = {f'w{i}': np.full(shape, i, np.float32) for i in range(N_LEAVES)}
    shardings = dict.fromkeys(tree, make_sharding(EXPRESSION))

    def ours() -> None:
        jax.block_until_ready(einshard(tree, EXPRESSION))

    def theirs() -> None:
        jax.block_until_ready(jax.device_put(tree, shardings))

    first, second = (ours, theirs) if side == 'ours' else (theirs, ours)
    first()
    measured: dict[str, object] = {'leaves': N_LEAVES, 'devices': n}
    # in kilobytes, but on macOS in bytes
    scale = 1 if sys.platform == 'darwin' else 1024
    measured['host'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    measured['device'] = (jax.devices()[0].memory_stats() or {}).get('peak_bytes_in_use')
    second()
    measured['ours'], measured['theirs'] = interleave(ours, theirs, 0, rounds=rounds)
    print(json.dumps(measured))


if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
