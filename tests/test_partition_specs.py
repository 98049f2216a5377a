"""NamedSharding and PartitionSpec wherever a spec is expected."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import (
    EinshardError,
    Rules,
    Sharded,
    axis_rules,
    device_mesh,
    einshard,
    explain,
    for_optimizer,
    from_local,
    per_device,
    sharded,
)

DEVICES = jax.devices()
AUTO = device_mesh(DEVICES[:8], data=4, tensor=2)
EXPLICIT = device_mesh(AUTO, data=4, tensor=2, axis_types=AxisType.Explicit)
MIXED = Mesh(AUTO.devices, ('data', 'tensor'), axis_types=(AxisType.Explicit, AxisType.Auto))
MESHES = pytest.mark.parametrize('mesh', [AUTO, EXPLICIT, MIXED], ids=['auto', 'explicit', 'mixed'])
X = np.arange(64, dtype=np.float32).reshape(8, 8)
SPECS = [
    P(),
    P(None),
    P('data'),
    P('data', None),
    P(None, 'tensor'),
    P('tensor', 'data'),
    P(('data', 'tensor')),
    P(('tensor', 'data'), None),
    P(None, ('data', 'tensor')),
]


def placed(x, mesh, spec):
    """Whether an array has the shards that JAX gives it."""
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


@MESHES
@pytest.mark.parametrize('spec', SPECS, ids=str)
def test_arrays(mesh, spec):
    expected = jax.device_put(X, NamedSharding(mesh, spec))
    for x in (
        einshard(X, NamedSharding(mesh, spec)),
        einshard(X, NamedSharding(mesh, spec), mesh=mesh),
        einshard(X, spec, mesh=mesh),
        einshard(jnp.asarray(X), spec, mesh=mesh),
    ):
        assert placed(x, mesh, spec)
        for shard, other in zip(x.addressable_shards, expected.addressable_shards, strict=True):
            assert shard.device == other.device
            assert np.array_equal(shard.data, other.data)
    assert einshard(expected, spec, mesh=mesh) is expected
    with jax.set_mesh(mesh):
        assert placed(einshard(X, spec), mesh, spec)
        assert placed(einshard(X, NamedSharding(mesh, spec)), mesh, spec)


@MESHES
@pytest.mark.parametrize('spec', SPECS, ids=str)
def test_traced_values(mesh, spec):
    if mesh is MIXED and spec == P(('tensor', 'data'), None):
        spec = P(('data', 'tensor'))  # JAX needs the explicit axis first
    with jax.set_mesh(mesh):
        x = jax.jit(lambda x: einshard(x + 1, spec))(X)
        assert placed(x, mesh, spec)
        assert np.array_equal(x, X + 1)
        x = jax.jit(lambda x: einshard(x + 1, NamedSharding(mesh, spec)))(X)
        assert placed(x, mesh, spec)
        # the sharding of a traced value is on an abstract mesh
        abstract = NamedSharding(mesh.abstract_mesh, spec)
        x = jax.jit(lambda x: einshard(x + 1, abstract))(X)
        assert placed(x, mesh, spec)


@pytest.mark.parametrize('spec', SPECS, ids=str)
def test_traced_without_a_mesh_in_context(spec):
    f = jax.jit(lambda x: einshard(x + 1, NamedSharding(AUTO, spec)))
    assert placed(f(X), AUTO, spec)
    g = jax.grad(lambda x: (einshard(x, spec, mesh=AUTO) ** 2).sum())
    assert np.array_equal(g(X), 2 * X)


@MESHES
def test_sharded(mesh):
    given = NamedSharding(mesh, P('data'))
    for f in (
        sharded(given, out=NamedSharding(mesh, P(None, 'tensor')))(lambda x: x + 1),
        sharded(P('data'), out=P(None, 'tensor'), mesh=mesh)(lambda x: x + 1),
        sharded('a@data b', out=NamedSharding(mesh, P(None, 'tensor')))(lambda x: x + 1),
    ):
        for _ in range(2):
            assert placed(f(X), mesh, P(None, 'tensor'))
            assert f.in_shardings(X)['x'].is_equivalent_to(given, 2)
        with pytest.raises(EinshardError, match=r'axis .* \(size 3\) is not divisible by 4'):
            f(X[:3])
    with jax.set_mesh(mesh):
        f = sharded(given, out=P('tensor'))(lambda x: x + 1)
        assert placed(f(X), mesh, P('tensor'))


def test_sharded_trees_and_methods():
    specs = {'w': P(None, 'tensor'), 'b': NamedSharding(AUTO, P())}
    f = sharded(specs, P('data'), out=P('data', 'tensor'))(lambda p, x: x @ p['w'] + p['b'])
    y = f({'w': X, 'b': X[0]}, X)
    assert placed(y, AUTO, P('data', 'tensor'))
    assert np.array_equal(y, X @ X + X[0])


def test_one_trace_for_equal_specs():
    traced = []

    @sharded(out=P('data'), mesh=AUTO)
    def f(x):
        traced.append(1)
        return x

    for spec in (
        P('data'),
        P(('data',)),
        P('data', None),
        NamedSharding(AUTO, P('data')),
        'a@data b',
    ):
        f(einshard(X, spec, mesh=AUTO))
    assert len(traced) == 1


@MESHES
def test_per_device(mesh):
    def body(x, y):
        return jax.lax.psum(x @ y, 'tensor')

    ours = per_device(P('data', 'tensor'), P('tensor'), out=P('data'), mesh=mesh)(body)
    theirs = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(P('data', 'tensor'), P('tensor')), out_specs=P('data')
        )
    )
    on = NamedSharding(mesh, P('data', 'tensor')), NamedSharding(mesh, P('tensor'))
    expected = theirs(jax.device_put(X, on[0]), jax.device_put(X, on[1]))
    assert np.array_equal(ours(X, X), expected)
    assert placed(ours(X, X), mesh, P('data'))
    assert np.array_equal(per_device(*on, out=P('data'))(body)(X, X), expected)


def test_per_device_on_another_mesh():
    given = NamedSharding(AUTO, P('data'))
    for devices in (DEVICES[8:], DEVICES[:16]):
        f = per_device(given, out=P('data'), mesh=device_mesh(devices, data=4, tensor=-1))
        with pytest.raises(EinshardError, match='the NamedSharding is on'):
            f(lambda x: x)(X)
    with pytest.raises(EinshardError, match='does not move arrays to pinned_host memory'):
        per_device(NamedSharding(AUTO, P('data'), memory_kind='pinned_host'), out=P())


@pytest.mark.parametrize('counts', ['a b -> a4 b3', 'a b -> b3 2 a2'])
def test_factors_of_the_canonical_mesh(counts):
    x = einshard(np.ones((12, 12)), counts, mesh=DEVICES[:12])
    for given in ({}, {'mesh': DEVICES[:12]}):
        for y in (
            einshard(np.ones((12, 12)), x.sharding, **given),
            sharded(x.sharding, out=x.sharding, **given)(lambda x: x + 1)(x),
            per_device(x.sharding, out=x.sharding, **given)(lambda x: x + 1)(x),
            per_device(x.sharding, out=counts, **given)(lambda x: x + 1)(x),
        ):
            assert y.sharding.is_equivalent_to(x.sharding, 2)
    with pytest.raises(EinshardError, match='the NamedSharding is on'):
        einshard(np.ones((12, 12)), x.sharding, mesh=DEVICES[4:])


def test_per_device_replicates():
    f = per_device(P('data'), P(), out=P('data'), mesh=AUTO)(lambda x, w: x @ w)
    assert np.array_equal(f(X, X), X @ X)


@pytest.mark.parametrize(
    'specs',
    [
        {'w': P('data'), 'b': NamedSharding(AUTO, P())},
        lambda path, leaf: P('data') if leaf.ndim == 2 else NamedSharding(AUTO, P()),
        Rules([('w', NamedSharding(AUTO, P('data'))), ('b', P())]),
        Rules([('w', lambda path, leaf: P('data'))], default=P()),
        {'w': Rules([('', P('data'))]), 'b': 'x -> x'},
    ],
)
def test_trees(specs):
    tree = {'w': X, 'b': X[0]}
    result = einshard(tree, specs, mesh=AUTO)
    assert placed(result['w'], AUTO, P('data'))
    assert placed(result['b'], AUTO, P())
    f = sharded(specs, mesh=AUTO)(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    assert f.in_shardings(tree)['tree']['w'].is_equivalent_to(result['w'].sharding, 2)
    assert np.array_equal(f(tree)['b'], X[0] + 1)


def test_a_spec_for_all_leaves():
    result = einshard([X, {'x': X}], NamedSharding(AUTO, P('data')))
    assert all(placed(x, AUTO, P('data')) for x in jax.tree.leaves(result))


def test_optimizer_states():
    state = {'mu': {'w': X}}
    result = einshard(state, for_optimizer({'w': X}, NamedSharding(AUTO, P('data')), zero=True))
    assert placed(result['mu']['w'], AUTO, P('data', 'tensor'))
    result = einshard(state, for_optimizer({'w': X}, P(None, 'tensor')), mesh=AUTO)
    assert placed(result['mu']['w'], AUTO, P(None, 'tensor'))


@MESHES
def test_values_of_axis_rules(mesh):
    rules = {'batch': P('data'), 'heads': P(('data', 'tensor')), 'd': P(), 'seq': P(None)}
    with axis_rules(rules, mlp=NamedSharding(mesh, P('tensor'))):
        for names, spec in [
            ('batch mlp', P('data', 'tensor')),
            ('heads d', P(('data', 'tensor'))),
            ('seq d', P()),
        ]:
            assert placed(einshard(X, names, mesh=mesh), mesh, spec)


def test_the_output_of_einshard_is_a_spec():
    x = einshard(X, 'a@data b@tensor', mesh=AUTO)
    assert einshard(X, x.sharding).sharding == x.sharding
    canonical = einshard(X, 'a b -> a4 b2', mesh=jax.devices()[:8])
    assert einshard(X, canonical.sharding).sharding == canonical.sharding
    refactored = einshard(np.ones((12, 12)), 'a b -> a4 b3', mesh=jax.devices()[:12])
    assert einshard(np.ones((12, 12)), refactored.sharding).sharding == refactored.sharding


def test_memory():
    on_host = NamedSharding(AUTO, P('data'), memory_kind='pinned_host')
    assert einshard(X, on_host).sharding.memory_kind == 'pinned_host'
    default = NamedSharding(AUTO, P('data'))
    assert einshard(X, default, memory_kind='pinned_host').sharding == on_host
    with pytest.raises(EinshardError, match="has memory kind 'pinned_host', but memory_kind= is"):
        einshard(X, on_host, memory_kind='device')


def test_structs_and_abstract_meshes():
    abstract = AbstractMesh((4, 2), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2)
    struct = einshard(jax.ShapeDtypeStruct((8, 8), np.float32), NamedSharding(abstract, P('data')))
    assert struct.sharding == NamedSharding(abstract, P('data'))
    report = explain(sharded(P('data'), mesh=AUTO)(lambda x: x.sum(0)), X)
    assert [collective.kind for collective in report.collectives] == ['all-reduce']


def test_missing_axes():
    assert placed(
        einshard(X, P('fsdp', 'tensor'), mesh=AUTO, missing='replicate'), AUTO, P(None, 'tensor')
    )


def test_threads_and_meshes_in_turn():
    other = device_mesh(jax.devices()[:8], data=2, tensor=4)
    failed = []

    def work(mesh):
        for _ in range(20):
            with jax.set_mesh(mesh):
                x = jax.jit(lambda x: einshard(x + 1, P('data', 'tensor')))(X)
            if not placed(x, mesh, P('data', 'tensor')):
                failed.append(mesh)
            if not placed(einshard(X, NamedSharding(mesh, P('tensor'))), mesh, P('tensor')):
                failed.append(mesh)

    threads = [threading.Thread(target=work, args=[mesh]) for mesh in (AUTO, other, AUTO)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# --- P.UNCONSTRAINED ------------------------------------------------------------------------------


@pytest.mark.parametrize('spec', [P(P.UNCONSTRAINED), P(P.UNCONSTRAINED, 'data')], ids=str)
def test_unconstrained(spec):
    f = jax.jit(lambda x: einshard(x @ x, spec, mesh=AUTO))
    by_hand = jax.jit(lambda x: jax.lax.with_sharding_constraint(x @ x, NamedSharding(AUTO, spec)))
    x = jax.device_put(X, NamedSharding(AUTO, P('tensor')))
    assert f.lower(x).as_text() == by_hand.lower(x).as_text()
    assert f(x).sharding.is_equivalent_to(by_hand(x).sharding, 2)
    with jax.set_mesh(AUTO):
        assert jax.jit(lambda x: einshard(x @ x, {'y': spec}['y']))(x).shape == (8, 8)


@pytest.mark.parametrize(
    'call',
    [
        lambda spec: einshard(X, spec, mesh=AUTO),
        lambda spec: einshard({'x': X}, {'x': NamedSharding(AUTO, spec)}),
        lambda spec: sharded(spec, mesh=AUTO)(lambda x: x)(X),
        lambda spec: sharded(out=spec, mesh=AUTO)(lambda x: x)(X),
        lambda spec: per_device(spec, out=P(), mesh=AUTO)(lambda x: x)(X),
        lambda spec: Rules([('', spec)]).table({'x': X}, mesh=AUTO),
    ],
)
def test_unconstrained_outside_a_trace(call):
    with pytest.raises(EinshardError, match='only for values in a traced'):
        call(P(P.UNCONSTRAINED, 'data'))


@pytest.mark.parametrize('constant', [X, jnp.asarray(X)], ids=['numpy', 'jax'])
def test_unconstrained_constants(constant):
    def f(x):
        return (einshard(constant, P(P.UNCONSTRAINED, 'data'), mesh=AUTO) * x).sum()

    assert np.array_equal(jax.grad(f)(X), X)
    assert np.array_equal(jax.jit(jax.grad(f))(X), X)


def test_unconstrained_on_explicit_axes():
    for mesh in (EXPLICIT, MIXED):
        with jax.set_mesh(mesh), pytest.raises(EinshardError, match='without explicit axes'):
            jax.jit(lambda x: einshard(x, P(P.UNCONSTRAINED)))(X)


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize('spec', [P(unreduced={'data'}), P(None, reduced={'tensor'})])
def test_unreduced_axes(spec):
    assert einshard(X, spec, mesh=EXPLICIT).sharding.spec.update(partitions=()) == spec.update(
        partitions=()
    )
    with pytest.raises(EinshardError, match='needs a mesh whose axes are all Explicit'):
        einshard(X, spec, mesh=AUTO)


@pytest.mark.parametrize(
    ('spec', 'fix'),
    [
        (P('dta'), "P('data')"),
        (P(None, ('data', 'tensr')), "P(None, ('data', 'tensor'))"),
        (P(P.UNCONSTRAINED, 'dta'), "P(P.UNCONSTRAINED, 'data')"),
    ],
)
def test_a_misspelled_mesh_axis(spec, fix):
    with pytest.raises(EinshardError) as caught:
        jax.jit(lambda x: einshard(x, spec, mesh=AUTO))(X)
    assert caught.value.fix == fix
    if 'UNC' not in fix:
        with pytest.raises(EinshardError) as caught:
            sharded(spec, mesh=AUTO)(lambda x: x)(X)
        assert caught.value.fix == fix


@pytest.mark.parametrize('spec', ['b@dta', P('dta')])
def test_a_misspelled_mesh_axis_of_an_indivisible_axis(spec):
    with pytest.raises(EinshardError, match="the mesh has no axis 'dta'") as caught:
        einshard(np.ones(3), spec, mesh=AUTO)
    assert caught.value.fix is None  # missing='replicate' would hide the misspelling


def test_an_axis_twice():
    with pytest.raises(EinshardError, match="mesh axis 'data' is used 2 times"):
        einshard(X, P('data', 'data'), mesh=AUTO)


def test_no_mesh():
    with pytest.raises(EinshardError, match='there is no mesh'):
        einshard(X, P('data'))
    assert einshard(X, P()).is_fully_replicated
    assert einshard(X, P(None, None)).is_fully_replicated


def test_another_mesh():
    other = device_mesh(jax.devices()[:8], x=8)
    with pytest.raises(EinshardError, match='the NamedSharding is on another mesh'):
        einshard(X, NamedSharding(other, P('x')), mesh=AUTO)
    with pytest.raises(EinshardError, match='NamedShardings in the specs are on different meshes'):
        sharded(NamedSharding(other, P('x')), out=NamedSharding(AUTO, P()))(lambda x: x)
    with jax.set_mesh(AUTO):  # an array may be on another mesh, as in JAX
        assert placed(einshard(X, NamedSharding(other, P('x'))), other, P('x'))
    with jax.set_mesh(EXPLICIT), pytest.raises(EinshardError, match='mesh in context'):
        jax.jit(lambda x: einshard(x, NamedSharding(other, P('x'))))(X)
    f = jax.shard_map(
        lambda x: einshard(x, NamedSharding(other, P('x'))), mesh=AUTO, in_specs=P(), out_specs=P()
    )
    with pytest.raises(EinshardError, match='the NamedSharding is on another mesh'):
        f(X)


@pytest.mark.parametrize(
    'spec', [P('data', 'tensor'), P(P.UNCONSTRAINED), P('data', unreduced={'tensor'})], ids=str
)
def test_values_of_axis_rules_for_more_than_one_axis(spec):
    with pytest.raises(EinshardError, match='but a rule places one axis'):
        axis_rules(batch=spec)


def test_annotations_and_from_local():
    @sharded(mesh=AUTO)
    def f(x: Sharded[jax.Array, P('data')]) -> Sharded[jax.Array, NamedSharding(AUTO, P())]:
        return x + 1

    assert f.in_shardings(X)['x'].is_equivalent_to(NamedSharding(AUTO, P('data')), 2)
    assert placed(f(X), AUTO, P())
    assert placed(from_local(X, P('data'), mesh=AUTO), AUTO, P('data'))


def test_an_abstract_mesh_in_context():
    f = sharded(P('data'), out='a b@tensor')(lambda x: x + 1)
    for mesh in (AUTO, EXPLICIT):
        for _ in range(2):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                assert f.eval_shape(X).sharding.spec == P(None, 'tensor')
                with pytest.raises(EinshardError, match='cannot run on an abstract mesh'):
                    f(X)
            with jax.set_mesh(mesh):
                assert placed(f(X), mesh, P(None, 'tensor'))
                assert placed(jax.jit(lambda x: f(x))(X), mesh, P(None, 'tensor'))
