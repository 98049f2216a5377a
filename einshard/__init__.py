"""Sharding for JAX in one line of notation: 'x y -> x y*'."""

from ._annotations import Sharded as Sharded
from ._axis_rules import axis_rules as axis_rules
from ._cache import clear_caches as clear_caches
from ._describe import describe as describe
from ._draw import show as show
from ._errors import EinshardError as EinshardError
from ._gather import gather as gather
from ._mesh import device_mesh as device_mesh
from ._placement import einshard as einshard
from ._rules import Rules as Rules
from ._rules import shard_largest as shard_largest
from ._sharded import sharded as sharded
from ._sharding import make_sharding as make_sharding
from ._version import __version__ as __version__
