"""Sharding for JAX in one line of notation: 'x y -> x y*'.

    >>> w = einshard(np.ones((64, 128)), 'x y -> x y*')

Arrays and trees: `einshard`, `make_sharding`, `gather`, `from_local`. Functions: `sharded` with
`Sharded`, `per_device`, `einsum`. Models: `Rules`, `shard_largest`, `for_optimizer`, `axis_rules`
with `TRAINING_AXES` and `DECODING_AXES`. What is where: `describe`, `show`, `device_mesh`. What the
compiler made of it: `explain`, `topology`, `assert_collectives`; and beforehand `parallelism`. What
is wrong: `EinshardError`, `UnexpectedCollectives`. `clear_caches` forgets.
"""

from ._annotations import Sharded as Sharded
from ._axis_rules import axis_rules as axis_rules
from ._cache import clear_caches as clear_caches
from ._describe import describe as describe
from ._errors import EinshardError as EinshardError
from ._gather import gather as gather
from ._local import from_local as from_local
from ._mesh import device_mesh as device_mesh
from ._model_axes import DECODING_AXES as DECODING_AXES
from ._model_axes import TRAINING_AXES as TRAINING_AXES
from ._optimizer import for_optimizer as for_optimizer
from ._per_device.per_device import per_device as per_device
from ._pictures.draw import show as show
from ._placement import einshard as einshard
from ._promises import UnexpectedCollectives as UnexpectedCollectives
from ._reports.assertion import assert_collectives as assert_collectives
from ._reports.explain import explain as explain
from ._rules import Rules as Rules
from ._rules import shard_largest as shard_largest
from ._sharded import sharded as sharded
from ._sharding import make_sharding as make_sharding
from ._theory.einsum import einsum as einsum
from ._theory.parallelism import parallelism as parallelism
from ._topology import topology as topology
from ._version import __version__ as __version__
