"""Values by hand, where the assertions of coming_from.md and whole_models.md are not enough."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from placed import check_equal, mesh_of

from einshard import DECODING_AXES, TRAINING_AXES, Rules, describe, einshard, gather

DOCS = Path(__file__).parents[1] / 'docs'
MESH = mesh_of(dp=2, fsdp=2, tp=4)
RULES = Rules([('wte', P('tp', 'fsdp')), ('h/0/kernel', P('fsdp', 'tp')), ('', P())])
HOST = {
    'wte': np.arange(96.0, dtype=np.float32).reshape(24, 4),
    'h': [
        {'kernel': np.arange(64, dtype=np.float32).reshape(8, 8) + i, 'bias': np.ones(8, 'f')}
        for i in range(2)
    ],
}
SPECS = {
    'wte': P('tp', 'fsdp'),
    'h': [{'kernel': P('fsdp', 'tp'), 'bias': P()}, {'kernel': P(), 'bias': P()}],
}


def specs(tree):
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def test_shard_and_gather_functions():
    shapes = einshard(jax.eval_shape(lambda: jax.tree.map(jnp.asarray, HOST)), RULES, mesh=MESH)
    assert specs(shapes) == SPECS
    shard_fns = jax.tree.map(lambda text: partial(einshard, spec=text, mesh=MESH), describe(shapes))
    sharded = jax.tree.map(lambda f, x: f(x), shard_fns, HOST)
    assert specs(sharded) == specs(einshard(HOST, describe(shapes), mesh=MESH)) == SPECS
    # device 5 is dp 0, fsdp 1, tp 1
    (shard,) = [s for s in sharded['wte'].addressable_shards if s.device == jax.devices()[5]]
    np.testing.assert_array_equal(shard.data, HOST['wte'][6:12, 2:4])
    check_equal(jax.tree.map(gather, sharded), HOST)


def test_the_table_of_logical_axes():
    page = (DOCS / 'whole_models.md').read_text(encoding='utf-8')
    listed = {}
    for names, training, decoding in re.findall(
        r'^\| (`[^|]*`) \| ([^|]*)\| ([^|]*)\|', page, re.MULTILINE
    ):
        for name in re.findall(r'`(\w+)`', names):
            listed[name] = tuple(text.strip().strip('`') for text in (training, decoding))
    assert listed == {axis: (TRAINING_AXES[axis], DECODING_AXES[axis]) for axis in TRAINING_AXES}
