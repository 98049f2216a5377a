"""axis_rules with lists of pairs, as in Flax and MaxText."""

import jax
import jax.numpy as jnp
import maxtext_axes
import numpy as np
import pytest
from beartype import beartype
from counting import counted
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, jaxtyped
from placed import mesh_of
from test_axis_rules import MESH, spec

from einshard import (
    EinshardError,
    Sharded,
    axis_rules,
    describe,
    device_mesh,
    einshard,
    explain,
    make_sharding,
    per_device,
    sharded,
)

SIZE_ONE = mesh_of(data=4, fsdp=1, tp=2)
FALLBACKS = [('batch', ('data', 'fsdp')), ('embed', ('fsdp', 'tp')), ('embed', 'tp'), ('mlp', 'tp')]


def entries(spec, mesh):
    """The mesh axes of each array axis that shard it."""
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    kept = [tuple(axis for axis in entry if mesh.shape[axis] > 1) for entry in axes]
    while kept and not kept[-1]:
        kept.pop()
    return kept


# ------------------------------------------------------------------------------------------- Flax

# sizes of MaxText's mesh axes; the others have size 1
MAXTEXT_MESHES = {
    'every axis': dict.fromkeys(maxtext_axes.MESH_AXES, 2),
    'fsdp': {'fsdp': 16},
    'data and fsdp': {'data': 2, 'fsdp': 8},
    'fsdp and tensor': {'fsdp': 4, 'tensor': 4},
    'expert': {'fsdp': 4, 'expert': 4, 'tensor': 2},
    'transposed': {'fsdp': 4, 'fsdp_transpose': 2, 'tensor': 2},
    'context': {'data': 2, 'fsdp': 2, 'context': 4, 'tensor_sequence': 2},
    'inference': {'autoregressive': 4, 'tensor': 2},
}


@pytest.mark.parametrize('sizes', MAXTEXT_MESHES.values(), ids=MAXTEXT_MESHES)
def test_the_rules_of_maxtext_as_flax_reads_them(sizes):
    spmd = pytest.importorskip('flax.linen')
    sizes = {axis: sizes.get(axis, 1) for axis in maxtext_axes.MESH_AXES}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    rules, tuples = maxtext_axes.rules(), maxtext_axes.tuples()
    assert (len(rules), len(tuples)) == (76, 136)
    differ = {}
    with axis_rules(rules, taken='next'):
        for names in tuples:
            by_flax = spmd.logical_to_mesh_sharding(P(*names), mesh, rules)
            words = [name or f'unnamed{"x" * i}' for i, name in enumerate(names)]
            ours = make_sharding(' '.join(words), mesh=mesh)
            assert isinstance(ours, NamedSharding)
            if entries(ours.spec, mesh) != entries(by_flax.spec, mesh):
                differ[names] = entries(ours.spec, mesh), entries(by_flax.spec, mesh)
    assert differ == {}


# ------------------------------------------------------------------------------------- taken='next'


def test_a_rule_whose_mesh_axes_are_taken_is_skipped():
    with axis_rules(FALLBACKS, taken='next'):
        assert spec('batch embed') == P(('data', 'fsdp'), 'tp')
        assert spec('embed d') == P(('fsdp', 'tp'))
        # rules apply in their order, not in the order of the axes
        assert spec('mlp embed batch') == P(None, 'tp', ('data', 'fsdp'))
        # placements in the expression come first
        assert spec('batch embed d@tp') == P(('data', 'fsdp'), None, 'tp')
        assert spec('batch@tp embed') == P('tp')


def test_rules_that_raise_come_first():
    with axis_rules(FALLBACKS, taken='next'), axis_rules(mlp='@tp'):
        assert spec('embed mlp') == P(None, 'tp')
    with axis_rules(mlp='@tp'), axis_rules(FALLBACKS[:3], taken='next'):
        assert spec('embed mlp') == P(None, 'tp')


def test_inner_rules_replace_the_outer_ones_of_an_axis():
    with axis_rules(FALLBACKS, taken='next'):
        with axis_rules([('mlp', 'tp'), ('embed', 'data')], taken='next'):
            assert spec('batch embed mlp') == P(None, 'data', 'tp')
        with axis_rules(embed=''):
            assert spec('batch embed') == P(('data', 'fsdp'))


def test_a_list_of_pairs_without_fallbacks():
    pairs = [('batch', ['data', 'fsdp']), ('d', None), ('heads', '@tp'), ('rows', '2')]
    with axis_rules(pairs, mlp='@tp'):
        assert spec('batch heads d') == P(('data', 'fsdp'), 'tp')
        assert spec('mlp') == P('tp')
    with pytest.raises(EinshardError, match="two rules for axis 'embed'"):
        axis_rules(FALLBACKS)
    with axis_rules(pairs), pytest.raises(EinshardError, match="'tp' is used 2 times"):
        spec('heads d@tp')


def test_mesh_axes_of_size_one_are_never_taken():
    pairs = [('batch', ('data', 'fsdp')), ('embed', ('fsdp', 'tp')), ('mlp', 'data')]
    with axis_rules(pairs):
        assert spec('batch embed', SIZE_ONE) == P(('data', 'fsdp'), 'tp')
        assert spec('embed batch', SIZE_ONE) == P('tp', ('data', 'fsdp'))
        assert spec('batch@(data,fsdp) embed', SIZE_ONE) == P(('data', 'fsdp'), 'tp')
        with pytest.raises(EinshardError, match="'data' is used 2 times"):
            spec('batch mlp', SIZE_ONE)
    with axis_rules(pairs, taken='next'):
        assert spec('batch embed mlp', SIZE_ONE) == P(('data', 'fsdp'), 'tp')


def test_missing_mesh_axes_count_as_size_one():
    pairs = [('batch', ('pod', 'data')), ('embed', ('pod', 'tp')), ('embed', 'fsdp')]
    with axis_rules(pairs, taken='next', missing='replicate'):
        assert spec('batch embed') == P('data', 'tp')
    with axis_rules(pairs, taken='next'), pytest.raises(EinshardError, match="no axis 'pod'"):
        spec('batch embed')


def test_traces_are_per_list_of_rules():
    """JAX caches the traces of scan bodies by their function; the rules are part of its key."""

    @counted
    def body(carry, x):
        return carry, einshard(x + carry, 'batch embed', mesh=MESH)

    x = jnp.ones((3, 8, 8))
    run = jax.jit(lambda x: jax.lax.scan(body, 0.0, x)[1])
    swapped = FALLBACKS[1:] + FALLBACKS[:1]
    for _ in range(2):
        with axis_rules(FALLBACKS, taken='next'):
            assert run(x).sharding.spec == P(None, ('data', 'fsdp'), 'tp')
        with axis_rules(swapped, taken='next'):
            assert run(x).sharding.spec == P(None, None, ('fsdp', 'tp'))
    assert body.runs == 2


def test_two_meshes_that_take_turns():
    other = mesh_of(data=2, fsdp=4, tp=1)

    @sharded('batch embed', out='embed batch')
    def transposed(x):
        return einshard(x, 'batch embed').T

    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    with axis_rules(FALLBACKS, taken='next'):
        for _ in range(2):
            for mesh, embed in ((MESH, 'tp'), (other, None)):
                with jax.set_mesh(mesh):
                    y = transposed(x)
                expected = NamedSharding(mesh, P(embed, ('data', 'fsdp')))
                assert y.sharding.is_equivalent_to(expected, 2)
                np.testing.assert_array_equal(y, x.T)


# ----------------------------------------------------------------------- indivisible='replicate'


def test_indivisible_axes_of_these_rules_are_replicated():
    x = np.zeros((6, 3, 8), np.float32)
    with axis_rules(batch='@(data,fsdp)', heads='@tp', indivisible='replicate'):
        assert einshard(x, 'batch heads d', mesh=MESH).sharding.spec == P()
        assert einshard(x, 'heads batch d', mesh=MESH).sharding.spec == P('tp')
        # only axes with such a rule
        with pytest.raises(EinshardError, match=r"axis 'd' \(size 3\) is not divisible by 2"):
            einshard(x, 'batch d@tp rows', mesh=MESH)
        error = pytest.raises(EinshardError, match=r"'heads' \(size 3\) is not divisible by 2")
        with axis_rules(heads='@tp'), error:
            einshard(x, 'batch heads d', mesh=MESH)


def test_indivisible_axes_in_traces_and_sharded_functions():
    body = counted(lambda x: einshard(x, 'batch d').T)
    transposed = sharded('batch d', out='d batch', mesh=MESH)(body)
    with axis_rules(batch='@(data,fsdp)', indivisible='replicate'):
        for _ in range(2):
            for n, axes in ((8, ('data', 'fsdp')), (6, None), (4, ('data', 'fsdp'))):
                x = np.arange(2.0 * n, dtype=np.float32).reshape(n, 2)
                y = transposed(x)
                assert y.sharding.is_equivalent_to(NamedSharding(MESH, P(None, axes)), 2)
                np.testing.assert_array_equal(y, x.T)
    assert body.runs == 3


def test_indivisible_axes_of_einshard():
    tree = {'a': np.zeros((6, 8), np.float32), 'b': np.zeros((8, 8), np.float32)}
    placed = einshard(tree, 'x y -> x4 y2', mesh=jax.devices()[:8], indivisible='replicate')
    assert describe(placed) == {'a': 'a b -> 4 a b2', 'b': 'a b -> a4 b2'}
    placed = einshard(tree['a'], 'x y@tp', mesh=MESH, indivisible='replicate')
    assert placed.sharding.spec == P(None, 'tp')
    f = jax.jit(lambda x: einshard(x, 'x@data y@tp', mesh=MESH, indivisible='replicate'))
    assert f(np.zeros((3, 4))).sharding.spec == P(None, 'tp')


def test_indivisible_axes_of_sharded():
    body, eight = counted(lambda x: x.T), jax.devices()[:8]
    options = {'mesh': eight, 'indivisible': 'replicate'}
    transposed = sharded('x y -> x4 y2', out='y x -> y8 x', **options)(body)
    for known in (False, True):
        n = body.runs
        for shape, before, after in (
            ((8, 8), 'a b -> a4 b2', 'a b -> a8 b'),
            ((6, 8), 'a b -> 4 a b2', 'a b -> a8 b'),
            ((6, 4), 'a b -> 4 a b2', 'a b -> 8 a b'),
        ):
            x = np.arange(float(np.prod(shape)), dtype=np.float32).reshape(shape)
            assert transposed.in_shardings(x)['x'] == make_sharding(before, mesh=eight)
            y = transposed(x)
            assert describe(y) == after
            np.testing.assert_array_equal(y, x.T)
        assert (body.runs == n) == known


@pytest.mark.parametrize('option', [{'indivisible': 'other'}, {'indivisible': None}])
def test_invalid_options(option):
    with pytest.raises(EinshardError, match="indivisible= must be 'error' or 'replicate'"):
        sharded('x*', **option)
    with pytest.raises(EinshardError, match="must be 'error', 'replicate' or 'pad'"):
        einshard(np.zeros(8), 'x*', **option)


# ------------------------------------------------------------------------------ indivisible='pad'


def test_padded_values_are_what_jax_makes():
    """1003 columns on 8 devices are 126 on each, as in a constraint of plain JAX."""
    mesh = device_mesh(jax.devices()[:8], d=8)
    x, w = np.ones((1000, 512), np.float32), np.ones((512, 1003), np.float32)
    w[:, 1002] = np.linspace(0, 1, 512)

    def by_einshard(x, w):
        return einshard({'h': [x @ w]}, 'a b -> a b@d', mesh=mesh, indivisible='pad')['h'][0].sum(1)

    def by_jax(x, w):
        sharding = NamedSharding(mesh, P(None, 'd'))
        return jax.lax.with_sharding_constraint(x @ w, sharding).sum(1)

    def replicated(x, w):
        h = einshard(x @ w, 'a b -> a b@d', mesh=mesh, indivisible='replicate')
        return h.sum(1)

    arrays = einshard([x, w], 'a b', mesh=mesh)
    for nested in (lambda f: f, lambda f: lambda x, w: jax.jit(f)(x, w), jax.checkpoint):
        for function in (by_einshard, by_jax):
            assert '[1000,126]' in jax.jit(nested(function)).lower(*arrays).compile().as_text()
    np.testing.assert_allclose(jax.jit(by_einshard)(*arrays), (x @ w).sum(1), rtol=1e-5)
    assert explain(jax.jit(by_einshard), *arrays, tries=0).flops == 2 * 1000 * 512 * 126
    assert explain(jax.jit(replicated), *arrays, tries=0).flops == 2 * 1000 * 512 * 1003


def test_only_values_in_programs_are_padded():
    mesh, odd = device_mesh(jax.devices()[:8], d=8), np.ones((4, 1003), np.float32)
    explicit = device_mesh(jax.devices()[:8], axis_types=AxisType.Explicit, d=8)

    def pad(x, mesh=mesh):
        return einshard(x, 'a b -> a b@d', mesh=mesh, indivisible='pad')

    for call in (
        lambda: pad(odd),
        lambda: pad(jnp.asarray(odd)),
        lambda: pad({'x': jax.ShapeDtypeStruct(odd.shape, odd.dtype)}),
        lambda: jax.jit(lambda: pad(odd).sum())(),
        lambda: jax.jit(lambda x: pad(x, explicit))(odd),
    ):
        with pytest.raises(EinshardError, match=r"axis 'b' \(size 1003\) is not divisible by 8"):
            call()
    assert pad(np.ones((4, 16), np.float32)).sharding.spec == P(None, 'd')


# ------------------------------------------------------------------------------- where they apply


def test_in_per_device_functions():
    @per_device('batch embed', out='batch embed', mesh=MESH)
    def shape(x):
        return jnp.full(x.shape, x.shape[1])

    x = np.zeros((8, 8), np.float32)
    with axis_rules(FALLBACKS, taken='next'):
        assert np.asarray(shape(x)).max() == 4  # embed over tp, of size 2
    with axis_rules(FALLBACKS[1:] + FALLBACKS[:1], taken='next'):
        assert np.asarray(shape(x)).max() == 2


def test_annotations_under_rules_that_replicate():
    @sharded
    @jaxtyped(typechecker=beartype)
    def double(x: Sharded[Float[Array, 'batch d'], 'batch d']):  # noqa: F722
        return x * 2

    with jax.set_mesh(MESH), axis_rules(batch='@data', indivisible='replicate'):
        for n, spec in ((8, P('data')), (7, P())):
            x = double(np.ones((n, 2), np.float32))
            assert double.in_shardings(x)['x'].spec == spec
            # beartype checks the placement of an argument that is not traced
            assert double.__wrapped__(einshard(np.ones((n, 2)), 'batch d')).shape == (n, 2)
