"""One-line sharding for JAX: say how an array is split across devices.

    >>> import jax.numpy as jnp
    >>> from einshard import einshard
    >>> w = einshard(jnp.ones((64, 128)), 'x y -> x y*')  # y is sharded over all devices

Arrays and pytrees: `einshard`, `make_sharding`, `gather`, `from_local`.
Functions: `sharded`, `Sharded`, `per_device`, `einsum`.
Models: `Rules`, `shard_largest`, `for_optimizer`, `axis_rules`, `TRAINING_AXES`, `DECODING_AXES`.
Inspect placements: `describe`, `show`, `device_mesh`.
Inspect programs: `explain`, `topology`, `Chip`, `assert_collectives`, `expect_collectives`.
Check results: `check_same`.
Predict collectives without compiling: `parallelism`.
Find shardings: `plan`. Write shardings as plain JAX: `to_jax`.
Errors: `EinshardError`, `UnexpectedCollectives`, `MemoryExceeded`, `DifferentResults`.
Caches: `clear_caches`.
"""

import importlib
import typing

from ._arrays.from_local import from_local as from_local
from ._arrays.gather import gather as gather
from ._arrays.place import einshard as einshard
from ._cache import clear_caches as clear_caches
from ._errors import EinshardError as EinshardError
from ._functions.annotations import Sharded as Sharded
from ._functions.expect_collectives import expect_collectives as expect_collectives
from ._functions.promise import MemoryExceeded as MemoryExceeded
from ._functions.promise import UnexpectedCollectives as UnexpectedCollectives
from ._functions.sharded import sharded as sharded
from ._hlo.hardware import Chip as Chip
from ._inspect.assert_collectives import assert_collectives as assert_collectives
from ._inspect.check_same import DifferentResults as DifferentResults
from ._inspect.check_same import check_same as check_same
from ._inspect.explain import explain as explain
from ._inspect.show import show as show
from ._per_device.per_device import per_device as per_device
from ._sharding.axis_presets import DECODING_AXES as DECODING_AXES
from ._sharding.axis_presets import TRAINING_AXES as TRAINING_AXES
from ._sharding.axis_rules import axis_rules as axis_rules
from ._sharding.describe import describe as describe
from ._sharding.mesh import device_mesh as device_mesh
from ._sharding.resolve import make_sharding as make_sharding
from ._sharding.topology import topology as topology
from ._theory.einsum import einsum as einsum
from ._theory.parallelism import parallelism as parallelism
from ._trees.optimizer import for_optimizer as for_optimizer
from ._trees.rules import Rules as Rules
from ._trees.shard_largest import shard_largest as shard_largest
from ._version import __version__ as __version__

if typing.TYPE_CHECKING:
    from ._eject.to_jax import to_jax as to_jax
    from ._plan.plan import plan as plan
else:
    # imported on first use, because they load a lot of code
    _LAZY = {'plan': '._plan.plan', 'to_jax': '._eject.to_jax'}

    def __getattr__(name: str) -> typing.Any:
        if name not in _LAZY:
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        value = getattr(importlib.import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return [*globals(), *_LAZY]
