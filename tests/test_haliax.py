"""Functions that Haliax jits: refused in words, and explained once they are lowered."""

import warnings
from typing import Any

import jax
import jax._src.tree_util
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import EinshardError, check_same, explain, to_jax

# Haliax 1.3 is older than these versions of JAX and Equinox
if not hasattr(jax._src.tree_util, 'BuiltInKeyEntry'):
    jax._src.tree_util.BuiltInKeyEntry = Any
with warnings.catch_warnings(action='ignore'):
    import haliax as hax

BATCH, FEATURES = hax.Axis('batch', 16), hax.Axis('features', 8)


@hax.named_jit
def total(x):
    return hax.sum(x * 2, 'batch')


@pytest.fixture
def x():
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
    rows = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, P('data')))
    return hax.named(rows, (BATCH, FEATURES))


@pytest.mark.parametrize('call', [explain, to_jax])
def test_named_jit_is_refused_in_words(call, x):
    with pytest.raises(EinshardError, match='total is jitted by haliax') as error:
        call(total, x)
    assert error.value.facts['instead'] == 'pass the lowered function: total.lower(...)'


def test_the_lowered_function_is_explained(x):
    report, by_hand = (
        explain(total.lower(x)),
        explain(jax.jit(lambda x: jnp.sum(x * 2, 0)), x.array),
    )
    assert report.collectives.counts == by_hand.collectives.counts == {'all-reduce': 1}
    assert report.memory == by_hand.memory


def test_check_same_runs_it(x):
    check_same(total, x)
