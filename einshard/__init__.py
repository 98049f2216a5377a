"""One-line sharding for JAX: say how an array is split across devices.

    >>> import jax.numpy as jnp
    >>> from einshard import einshard
    >>> w = einshard(jnp.ones((64, 128)), 'x y -> x y*')  # y is sharded over all devices

Arrays and pytrees: `einshard`, `make_sharding`, `gather`, `from_local`, `move`, `explain_move`.
Functions: `sharded`, `Sharded`, `per_device`, `einsum`.
Models: `Rules`, `shard_largest`, `for_optimizer`, `axis_rules`, `TRAINING_AXES`, `DECODING_AXES`.
Meshes: `device_mesh`, `topology`.
Inspect placements: `describe`, `show`.
Inspect programs: `explain`, `profile`, `compare`, `assert_collectives`, `expect_collectives`,
`Chip`, `Efficiency`.
Check results and placements: `check_same`, `expect_placements`.
Predict collectives without compiling: `parallelism`.
Find shardings: `plan`. Write shardings as plain JAX: `to_jax`.
Errors: `EinshardError`, `UnexpectedCollectives`, `MemoryExceeded`, `DifferentResults`.
Caches: `clear_caches`.
"""

import importlib
import typing

from ._arrays.from_local import from_local
from ._arrays.gather import gather
from ._arrays.place import einshard
from ._cache import clear_caches
from ._errors import EinshardError
from ._functions.expect_collectives import expect_collectives
from ._functions.promise import MemoryExceeded, UnexpectedCollectives
from ._functions.sharded import sharded
from ._functions.sharded_type import Sharded
from ._per_device.per_device import per_device
from ._sharding.axis_presets import DECODING_AXES, TRAINING_AXES
from ._sharding.axis_rules import axis_rules
from ._sharding.describe import describe
from ._sharding.mesh import device_mesh
from ._sharding.resolve import make_sharding
from ._sharding.topology import topology
from ._trees.optimizer import for_optimizer
from ._trees.rules import Rules
from ._trees.shard_largest import shard_largest
from ._version import __version__ as __version__

__all__ = [
    'DECODING_AXES',
    'TRAINING_AXES',
    'Chip',
    'DifferentResults',
    'Efficiency',
    'EinshardError',
    'MemoryExceeded',
    'Rules',
    'Sharded',
    'UnexpectedCollectives',
    'assert_collectives',
    'axis_rules',
    'check_same',
    'clear_caches',
    'compare',
    'describe',
    'device_mesh',
    'einshard',
    'einsum',
    'expect_collectives',
    'expect_placements',
    'explain',
    'explain_move',
    'for_optimizer',
    'from_local',
    'gather',
    'make_sharding',
    'move',
    'parallelism',
    'per_device',
    'plan',
    'profile',
    'shard_largest',
    'sharded',
    'show',
    'to_jax',
    'topology',
]

if typing.TYPE_CHECKING:
    from ._check.check_same import DifferentResults, check_same
    from ._check.expect_placements import expect_placements
    from ._chips.chip import Chip, Efficiency
    from ._draw.show import show
    from ._eject.to_jax import to_jax
    from ._explain.assert_collectives import assert_collectives
    from ._explain.compare import compare
    from ._explain.explain import explain
    from ._explain.profile import profile
    from ._move.explain_move import explain_move
    from ._move.move import move
    from ._plan.plan import plan
    from ._predict.einsum import einsum
    from ._predict.parallelism import parallelism
else:
    # imported on first use, because they load two thirds of the package
    _LAZY = {
        'Chip': '._chips.chip',
        'DifferentResults': '._check.check_same',
        'Efficiency': '._chips.chip',
        'assert_collectives': '._explain.assert_collectives',
        'check_same': '._check.check_same',
        'compare': '._explain.compare',
        'einsum': '._predict.einsum',
        'expect_placements': '._check.expect_placements',
        'explain': '._explain.explain',
        'explain_move': '._move.explain_move',
        'move': '._move.move',
        'parallelism': '._predict.parallelism',
        'plan': '._plan.plan',
        'profile': '._explain.profile',
        'show': '._draw.show',
        'to_jax': '._eject.to_jax',
    }

    def __getattr__(name: str) -> typing.Any:
        if name not in _LAZY:
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        value = getattr(importlib.import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
