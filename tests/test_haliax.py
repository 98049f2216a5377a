"""Functions that Haliax jits are explained as lowered functions."""

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


def test_named_jit_is_explained(x):
    by_hand = explain(jax.jit(lambda x: jnp.sum(x * 2, 0)), x.array)
    for report in explain(total, x), explain(total.lower(x)):
        assert report.collectives.counts == by_hand.collectives.counts == {'all-reduce': 1}
        assert report.memory == by_hand.memory
        (reason,) = report.why(report.collectives[0]).reasons
        assert reason.cause == 'inserted'


def test_to_jax_refuses_named_jit(x):
    with pytest.raises(EinshardError, match='cannot read the constraints'):
        to_jax(total, x)


def test_check_same_runs_it(x):
    check_same(total, x)
