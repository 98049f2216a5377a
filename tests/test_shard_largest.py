"""shard_largest with mesh axes: fully sharded data parallelism, also on top of other specs."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on, shardings, struct
from refusal import refusal

from einshard import Rules, describe, einshard, for_optimizer, make_sharding, shard_largest, sharded

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESH = mesh_of(fsdp=4, tp=2)
TP = 'd f -> d f@tp'


def spec_of(x, spec, mesh=MESH):
    return einshard(x, spec, mesh=mesh).sharding.spec


@pytest.mark.parametrize(
    ('shape', 'expected'),
    [
        ((8, 16), P(None, 'fsdp')),
        ((16, 8), P('fsdp')),
        ((8, 8), P('fsdp')),
        ((16, 6), P('fsdp')),
        ((15, 8), P(None, 'fsdp')),
        ((15, 7), P()),
        ((8,), P('fsdp')),
        ((), P()),
        ((0, 8), P(None, 'fsdp')),
    ],
)
def test_the_largest_axis_that_the_mesh_axis_divides(shape, expected):
    assert spec_of(struct(*shape), shard_largest('fsdp')) == expected


@pytest.mark.parametrize(
    ('shape', 'expected'),
    [
        ((16, 16), P('fsdp', 'tp')),
        # on a device the second axis has 32, the first 16
        ((16, 64), P(None, ('tp', 'fsdp'))),
        ((3, 64), P(None, ('tp', 'fsdp'))),
        ((16, 6), P('fsdp', 'tp')),
        # no axis is divisible by fsdp any more
        ((3, 4), P(None, 'tp')),
    ],
)
def test_on_top_of_tensor_parallelism(shape, expected):
    assert spec_of(struct(*shape), shard_largest('fsdp', spec=TP)) == expected


def test_several_mesh_axes():
    mesh, axes = mesh_of(data=2, fsdp=2, tp=2), ('data', 'fsdp')
    # in mesh order
    for given in (axes, ['fsdp', 'data']):
        assert spec_of(struct(16, 8), shard_largest(given), mesh) == P(axes)
    # all of them on one axis, or none
    assert spec_of(struct(2, 6), shard_largest(axes), mesh) == P()
    # an axis that shards the array already is not used again
    on_rows = shard_largest(axes, spec='x y -> x@fsdp y')
    assert spec_of(struct(8, 8), on_rows, mesh) == P('fsdp', 'data')
    # without names: all that are free
    assert spec_of(struct(8, 8), shard_largest(spec=TP), mesh) == P(('data', 'fsdp'), 'tp')


@pytest.mark.parametrize('types', [(AUTO, EXPLICIT), (EXPLICIT, AUTO)])
@pytest.mark.parametrize('how', [jax.jit, jax.vmap, lambda f: f])
def test_explicit_mesh_axes_come_first(types, how):
    """JAX can shard a traced value in no other order."""
    mesh = mesh_of(types=types, data=4, tp=2)
    in_order = ('data', 'tp') if types[0] == EXPLICIT else ('tp', 'data')
    zero = for_optimizer(jnp.ones((3, 16)), 'd f -> * d f', zero=True)
    with jax.set_mesh(mesh):
        for spec in (shard_largest, shard_largest(('data', 'tp')), zero):
            x = how(lambda x, spec=spec: einshard(x, spec))(jnp.ones((5, 3, 16)))
            expected = NamedSharding(mesh, P(None, None, in_order))
            assert x.sharding.is_equivalent_to(expected, 3)
            fixed = sharded(out=spec)(jnp.copy)(jnp.ones((3, 16)))
            assert fixed.sharding.is_equivalent_to(NamedSharding(mesh, P(None, in_order)), 2)
        gradient = jax.grad(lambda x: (einshard(x, shard_largest) ** 2).sum())
        np.testing.assert_array_equal(gradient(jnp.ones((3, 16))), np.full((3, 16), 2.0))
    # the axis is not split by the Explicit axis, which would become major and move data
    with_rows = shard_largest('tp' if types[0] == AUTO else 'data', spec=P(in_order[1]))
    assert spec_of(struct(64, 16), with_rows, mesh) == P(in_order[1], in_order[0])


def test_on_the_canonical_mesh():
    on = jax.devices()[:8]
    assert describe(einshard(struct(16, 8), shard_largest(min_bytes=1), mesh=on)) == 'a b -> a8 b'
    both = shard_largest(spec='d f -> * d f2')
    assert describe(einshard(struct(16, 8), both, mesh=on)) == 'a b -> a4 b2'


@pytest.mark.parametrize('sign', ['=', '+'])
def test_partial_sums_are_kept(sign):
    mesh = mesh_of(types=EXPLICIT, data=4, tp=2)
    signed = einshard(struct(8, 8), f'a b -> a@data b {sign}@tp', mesh=mesh).sharding
    for axes, spec in ((None, 'a b -> a b'), ('data', 'a b -> a b'), (None, 'a b -> a@data b')):
        spec = shard_largest(*filter(None, [axes]), spec=f'{spec} {sign}@tp')
        assert einshard(struct(8, 8), spec, mesh=mesh).sharding == signed


def test_memory_kinds():
    for spec in (shard_largest(), for_optimizer(struct(16), 'a*', zero=True)):
        placed = einshard(struct(16), spec, memory_kind='pinned_host')
        assert placed.sharding == make_sharding('a*', memory_kind='pinned_host')


def test_small_arrays_keep_their_spec():
    spec = shard_largest('fsdp', spec=TP, min_bytes=1024)
    assert spec_of(struct(16, 16), spec) == P('fsdp', 'tp')  # 1,024 bytes
    assert spec_of(struct(16, 16, dtype=jnp.bfloat16), spec) == P(None, 'tp')
    assert spec_of(struct(16, 15), shard_largest('fsdp', min_bytes=1024)) == P()


def test_hsdp_on_top_of_tensor_parallelism():
    """Hybrid sharding: parameters are sharded over fsdp, and replicated over data."""
    mesh = mesh_of(data=2, fsdp=4, tp=2)
    params = {'q': struct(64, 64), 'o': struct(64, 64), 'norm': struct(64)}
    params |= {'up': struct(64, 256), 'down': struct(256, 64)}
    tensor = Rules([('^(o|down)$', P('tp')), ('norm', P()), ('', P(None, 'tp'))])
    spec = shard_largest('fsdp', spec=tensor, min_bytes=1024)
    expected = {
        'q': P('fsdp', 'tp'),
        'up': P(None, ('tp', 'fsdp')),
        'down': P(('tp', 'fsdp')),
        'o': P('tp', 'fsdp'),
        'norm': P(),
    }
    assert shardings(einshard(params, spec, mesh=mesh)) == on(mesh, expected)
    # optimizer states too, and over data with ZeRO
    state = {'mu': params}
    moments = einshard(state, for_optimizer(params, spec), mesh=mesh)['mu']
    assert shardings(moments) == on(mesh, expected)
    zero = einshard(state, for_optimizer(params, spec, zero='data'), mesh=mesh)['mu']
    assert zero['down'].sharding.spec == P(('tp', 'fsdp'), 'data')


# -------------------------------------------------------------------------------- where it is used


def test_in_rules_traces_and_on_two_meshes_in_turn():
    rules = Rules([('w', shard_largest('fsdp', spec=TP))], default=shard_largest('fsdp'))
    tree = {'w': np.ones((16, 16), np.float32), 'v': np.ones((4, 32), np.float32)}
    constrained = jax.jit(lambda tree: einshard(tree, rules))
    for _ in range(2):
        for mesh, w, v in (
            (MESH, P('fsdp', 'tp'), P(None, 'fsdp')),
            (mesh_of(fsdp=2, tp=4), P('fsdp', 'tp'), P(None, 'fsdp')),
            (mesh_of(fsdp=1, tp=8), P(None, 'tp'), P()),
        ):
            with jax.set_mesh(mesh):
                for placed in (einshard(tree, rules), constrained(tree)):
                    for name, spec in (('w', w), ('v', v)):
                        expected = NamedSharding(mesh, spec)
                        assert placed[name].sharding.is_equivalent_to(expected, 2)


def test_a_copy_and_a_pickle_do_the_same():
    spec = shard_largest('fsdp', spec=Rules([('w', TP)]), min_bytes=64)
    for again in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        placed = einshard({'w': struct(16, 16)}, again, mesh=MESH)
        assert placed['w'].sharding == make_sharding('d f -> d@fsdp f@tp', mesh=MESH)


def test_leaves_that_are_not_arrays_and_leaves_without_a_spec():
    tree = {'w': struct(8, 8), 'skip': struct(8, 8), 'f': max, 'name': 'x'}
    rules = Rules([('skip', None), ('', '... -> * ...')])
    placed = einshard(tree, shard_largest('fsdp', spec=rules), mesh=MESH)
    assert placed['w'].sharding.spec == P('fsdp')
    assert placed['skip'].sharding is None
    assert (placed['f'], placed['name']) == (max, 'x')


# ------------------------------------------------------------------------------------------ errors


def test_errors():
    for bad in ('1k', -1, True, None, 0.5):
        assert refusal(shard_largest, 'fsdp', min_bytes=bad).sentence == (
            f'min_bytes= must be a non-negative number of bytes, not {bad!r}'
        )
    assert '3 is not a spec' in refusal(shard_largest, 'fsdp', spec=3).sentence
    assert 'one spec for all arrays' in refusal(shard_largest, 'fsdp', spec={'w': TP}).sentence
    x = struct(8, 8)
    error = refusal(einshard, x, shard_largest('fdsp'), mesh=MESH)
    assert "names 'fdsp', but the mesh has no such axis" in error.sentence
    assert error.fix == "shard_largest('fsdp')"
    tree = {'w': struct(8, 7), 'v': struct(8, 5)}
    error = refusal(einshard, tree, shard_largest('fsdp', spec=Rules([('', TP)])), mesh=MESH)
    assert error.facts['rule'] == "''"
    assert error.facts['array'] == "float32[8,5], leaf 'v'"
    assert error.facts['also'].startswith("float32[8,7], leaf 'w': axis 'f' (size 7) is not div")
    mesh = AbstractMesh((4,), ('fsdp',))
    unmatched = shard_largest('fsdp', spec=Rules([('u', TP)], default=TP))
    assert refusal(einshard, tree, unmatched, mesh=mesh).sentence == (
        'no rule matches any path of the tree'
    )
