"""NamedSharding and PartitionSpec wherever a spec is expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of, struct
from refusal import refusal

from einshard import (
    EinshardError,
    Rules,
    Sharded,
    axis_rules,
    describe,
    device_mesh,
    einshard,
    explain,
    for_optimizer,
    from_local,
    per_device,
    shard_largest,
    sharded,
)

DEVICES = jax.devices()
AUTO = device_mesh(DEVICES[:8], data=4, tensor=2)
EXPLICIT = device_mesh(AUTO, data=4, tensor=2, axis_types=AxisType.Explicit)
MIXED = mesh_of(types=(AxisType.Explicit, AxisType.Auto), data=4, tensor=2)
MESHES = pytest.mark.parametrize('mesh', [AUTO, EXPLICIT, MIXED], ids=['auto', 'explicit', 'mixed'])
X = np.arange(64, dtype=np.float32).reshape(8, 8)
DATA, REPLICATED = (NamedSharding(AUTO, spec) for spec in (P('data'), P()))
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
    """Whether an array is sharded as this PartitionSpec on this mesh."""
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
def test_the_sharding_is_the_one_that_was_given(mesh, spec):
    given = NamedSharding(mesh, spec)
    f = sharded(given, out=given)(lambda x: x + 1)
    struct = einshard(jax.ShapeDtypeStruct(X.shape, X.dtype), given)
    for x in (einshard(X, given), einshard({'w': X}, given)['w'], struct):
        assert x.sharding == given
    assert f.in_shardings(X)['x'] == f.out_shardings(X) == given
    cube = np.ones((8, 8, 8), np.float32)
    assert einshard(cube, given).sharding == given


@MESHES
@pytest.mark.parametrize('spec', [P(), *SPECS[3:8]], ids=str)
def test_traced_values(mesh, spec):
    if mesh is MIXED and spec == P(('tensor', 'data'), None):
        spec = P(('data', 'tensor'))  # JAX needs the explicit axis first
    # the sharding of a traced value is on an abstract mesh
    given = [spec, NamedSharding(mesh, spec), NamedSharding(mesh.abstract_mesh, spec)]
    with jax.set_mesh(mesh):
        for target in given:
            x = jax.jit(lambda x, target=target: einshard(x + 1, target))(X)
            assert placed(x, mesh, spec)
            assert np.array_equal(x, X + 1)
    if mesh is AUTO:  # without a mesh in context
        assert placed(jax.jit(lambda x: einshard(x + 1, given[1]))(X), mesh, spec)
        g = jax.grad(lambda x: (einshard(x, spec, mesh=mesh) ** 2).sum())
        assert np.array_equal(g(X), 2 * X)


# --- wherever a spec is expected ------------------------------------------------------------------


def same(x):
    return x


def annotated(spec, mesh):
    @sharded(mesh=mesh)
    def f(x: Sharded[jax.Array, P()]) -> Sharded[jax.Array, spec]:
        return x

    return f(X)


# what places X by a spec; mesh= is None where the spec is a NamedSharding
USES = {
    'sharded': lambda spec, mesh: sharded(spec, mesh=mesh)(same)(X),
    'out=': lambda spec, mesh: sharded(out=spec, mesh=mesh)(same)(X),
    'sharded trees': lambda spec, mesh: sharded(
        {'w': spec, 'b': P()}, out={'w': spec, 'b': P()}, mesh=mesh
    )(same)({'w': X, 'b': X[0]})['w'],
    'annotations': annotated,
    'per_device': lambda spec, mesh: per_device(spec, out=spec, mesh=mesh)(same)(X),
    'a leaf': lambda spec, mesh: einshard(
        {'w': X, 'b': X[0]}, {'w': spec, 'b': '* ...'}, mesh=mesh
    )['w'],
    'all leaves': lambda spec, mesh: einshard([X, {'w': X}], spec, mesh=mesh)[1]['w'],
    'a function': lambda spec, mesh: einshard([X], lambda path, leaf: spec, mesh=mesh)[0],
    'Rules': lambda spec, mesh: einshard({'w': X}, Rules([('w', spec)]), mesh=mesh)['w'],
    'a function of Rules': lambda spec, mesh: einshard(
        {'w': X}, Rules([('w', lambda path, leaf: spec)]), mesh=mesh
    )['w'],
    'default of Rules': lambda spec, mesh: einshard([X], Rules([], default=spec), mesh=mesh)[0],
    'Rules of a leaf': lambda spec, mesh: einshard([X], [Rules([('', spec)])], mesh=mesh)[0],
    'for_optimizer': lambda spec, mesh: einshard(
        {'mu': {'w': X}}, for_optimizer({'w': X}, spec), mesh=mesh
    )['mu']['w'],
    'from_local': lambda spec, mesh: from_local(X, spec, mesh=mesh),
    'structs': lambda spec, mesh: einshard(struct(8, 8), spec, mesh=mesh),
    'the sharding of an array': lambda spec, mesh: einshard(
        X, einshard(X, spec, mesh=mesh).sharding
    ),
}


@MESHES
@pytest.mark.parametrize('use', USES)
def test_wherever_a_spec_is_expected(use, mesh):
    spec = P(None, 'tensor') if use == 'out=' else P('data')
    for given, given_mesh in ((spec, mesh), (NamedSharding(mesh, spec), None)):
        assert placed(USES[use](given, given_mesh), mesh, spec)


@MESHES
def test_sharded_checks_shapes_and_shows_shardings(mesh):
    given = NamedSharding(mesh, P('data'))
    for spec, options in ((given, {}), (P('data'), {'mesh': mesh}), ('a@data b', {'mesh': mesh})):
        f = sharded(spec, out=NamedSharding(mesh, P(None, 'tensor')), **options)(lambda x: x + 1)
        for _ in range(2):
            assert placed(f(X), mesh, P(None, 'tensor'))
            assert f.in_shardings(X)['x'].is_equivalent_to(given, 2)
        assert '(size 3) is not divisible by 4' in refusal(f, X[:3]).sentence
    with jax.set_mesh(mesh):
        assert placed(sharded(given, out=P('tensor'))(same)(X), mesh, P('tensor'))


def test_one_trace_for_equal_specs():
    body = counted(same)
    f = sharded(out=P('data'), mesh=AUTO)(body)
    for spec in (P('data'), P(('data',)), P('data', None), DATA, 'a@data b'):
        f(einshard(X, spec, mesh=AUTO))
    assert body.runs == 1


@MESHES
def test_per_device(mesh):
    def body(x, y):
        return jax.lax.psum(x @ y, 'tensor')

    specs = P('data', 'tensor'), P('tensor')
    theirs = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P('data')))
    on = [NamedSharding(mesh, spec) for spec in specs]
    expected = theirs(*(jax.device_put(X, sharding) for sharding in on))
    ours = per_device(*specs, out=P('data'), mesh=mesh)(body)
    assert np.array_equal(ours(X, X), expected)
    assert placed(ours(X, X), mesh, P('data'))
    assert np.array_equal(per_device(*on, out=P('data'))(body)(X, X), expected)


@pytest.mark.parametrize('counts', ['a b -> a4 b3', 'a b -> b3 2 a2'])
def test_factors_of_the_canonical_mesh(counts):
    square = np.ones((12, 12))
    x = einshard(square, counts, mesh=DEVICES[:12])
    for given in ({}, {'mesh': DEVICES[:12]}):
        for y in (
            einshard(square, x.sharding, **given),
            sharded(x.sharding, out=x.sharding, **given)(lambda x: x + 1)(x),
            per_device(x.sharding, out=x.sharding, **given)(lambda x: x + 1)(x),
            per_device(x.sharding, out=counts, **given)(lambda x: x + 1)(x),
        ):
            assert y.sharding.is_equivalent_to(x.sharding, 2)
    error = refusal(einshard, square, x.sharding, mesh=DEVICES[4:])
    assert 'the NamedSharding is on' in error.sentence


def test_zero_takes_the_axes_that_a_spec_leaves():
    specs = for_optimizer({'w': X}, DATA, zero=True)
    assert placed(einshard({'mu': {'w': X}}, specs)['mu']['w'], AUTO, P('data', 'tensor'))


@MESHES
@pytest.mark.parametrize(
    ('names', 'spec'),
    [
        ('batch mlp', P('data', 'tensor')),
        ('heads d', P(('data', 'tensor'))),
        ('seq d', P()),
    ],
)
def test_values_of_axis_rules(mesh, names, spec):
    rules = {'batch': P('data'), 'heads': P(('data', 'tensor')), 'd': P(), 'seq': P(None)}
    with axis_rules(rules, mlp=NamedSharding(mesh, P('tensor'))):
        assert placed(einshard(X, names, mesh=mesh), mesh, spec)


def test_memory_kinds():
    assert einshard(X, ON_HOST).sharding == ON_HOST
    assert einshard(X, DATA, memory_kind='pinned_host').sharding == ON_HOST


def test_abstract_meshes():
    abstract = AbstractMesh((4, 2), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(abstract, P('data'))
    assert einshard(struct(8, 8), sharding).sharding == sharding
    f = sharded(P('data'), out='a b@tensor')(lambda x: x + 1)
    for mesh in (AUTO, EXPLICIT) * 2:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            assert f.eval_shape(X).sharding.spec == P(None, 'tensor')
            assert 'cannot run on an abstract mesh' in refusal(f, X).sentence
        with jax.set_mesh(mesh):
            assert placed(f(X), mesh, P(None, 'tensor'))
            assert placed(jax.jit(lambda x: f(x))(X), mesh, P(None, 'tensor'))


def test_explain_and_specs_without_a_mesh():
    report = explain(sharded(P('data'), mesh=AUTO)(lambda x: x.sum(0)), X)
    assert [collective.kind for collective in report.collectives] == ['all-reduce']
    for spec in (P(), P(None, None)):
        assert einshard(X, spec).is_fully_replicated


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
    'use', ['sharded', 'out=', 'per_device', 'a leaf', 'Rules', 'from_local', 'for_optimizer']
)
def test_unconstrained_outside_a_trace(use):
    error = refusal(USES[use], P(P.UNCONSTRAINED, 'data'), AUTO)
    assert error.sentence.startswith('P.UNCONSTRAINED is only for values in a traced function')


@pytest.mark.parametrize('struct', [jax.ShapeDtypeStruct((8, 8), 'f4'), jax.new_ref(X)], ids=type)
def test_unconstrained_structs_and_refs_in_a_trace(struct):
    f = jax.jit(lambda x: einshard([x, struct], P(P.UNCONSTRAINED, 'data'), mesh=AUTO)[0])
    error = refusal(f, X)
    assert error.sentence == 'P.UNCONSTRAINED is only for values in a traced function'


@pytest.mark.parametrize('constant', [X, jnp.asarray(X)], ids=['numpy', 'jax'])
def test_unconstrained_constants(constant):
    def f(x):
        return (einshard(constant, P(P.UNCONSTRAINED, 'data'), mesh=AUTO) * x).sum()

    assert np.array_equal(jax.grad(f)(X), X)
    assert np.array_equal(jax.jit(jax.grad(f))(X), X)


@pytest.mark.parametrize('mesh', [EXPLICIT, MIXED])
def test_unconstrained_on_explicit_axes(mesh):
    with jax.set_mesh(mesh), pytest.raises(EinshardError, match='without Explicit axes'):
        jax.jit(lambda x: einshard(x, P(P.UNCONSTRAINED)))(X)


# --- errors -----------------------------------------------------------------------------------

FREE = P(P.UNCONSTRAINED)
OTHER = NamedSharding(device_mesh(DEVICES[:8], x=8), P('x'))
ON_HOST = DATA.with_memory_kind('pinned_host')


def on_devices(devices):
    mesh = device_mesh(devices, data=4, tensor=-1)
    return per_device(DATA, out=P('data'), mesh=mesh)(same)(X)


def in_shard_map(spec):
    f = jax.shard_map(lambda x: einshard(x, spec), mesh=AUTO, in_specs=P(), out_specs=P())
    return f(X)


def in_explicit_jit(spec):
    with jax.set_mesh(EXPLICIT):
        return jax.jit(lambda x: einshard(x, spec))(X)


# calls whose refusal messages.md does not have
REFUSALS = [
    (lambda: einshard(X, P(unreduced={'data'}), mesh=AUTO), 'a mesh whose axes are all Explicit'),
    (lambda: einshard(X, P('data', 'data'), mesh=AUTO), "mesh axis 'data' is used 2 times"),
    (lambda: einshard(X, OTHER, mesh=AUTO), 'on a different mesh from mesh='),
    (lambda: in_shard_map(OTHER), 'on a different mesh from the mesh in context'),
    (lambda: in_explicit_jit(OTHER), 'mesh in context'),
    (lambda: on_devices(DEVICES[8:]), 'the NamedSharding is on'),
    (lambda: on_devices(DEVICES), 'the NamedSharding is on'),
    (lambda: sharded(OTHER, out=REPLICATED)(same), 'the specs are on different meshes'),
    (lambda: einshard(X, ON_HOST, memory_kind='device'), "has memory kind 'pinned_host', but"),
    (lambda: per_device(ON_HOST, out=P()), 'does not move arrays to pinned_host memory'),
    (
        lambda: per_device('a* b (in pinned_host)', out='...')(lambda x: x),
        'does not move arrays to pinned_host memory',
    ),
    (
        lambda: Rules([('', FREE)]).table({'x': X}, mesh=AUTO),
        'only for values in a traced function',
    ),
    (lambda: axis_rules(batch=FREE), 'but a rule is for one array axis'),
    (lambda: axis_rules(batch=P('data', unreduced={'tensor'})), 'but a rule is for one array axis'),
]


@pytest.mark.parametrize(('call', 'text'), REFUSALS)
def test_refusals(call, text):
    assert text in refusal(call).sentence


@pytest.mark.parametrize('devices', [DEVICES[:8][::-1], DEVICES[2:8]], ids=['reversed', 'six'])
def test_a_named_sharding_brings_its_mesh_to_other_leaves(devices):
    mesh = Mesh(np.reshape(devices, (-1, 2)), ('data', 'tensor'))
    w = jax.device_put(np.ones((12, 12), np.float32), NamedSharding(mesh, P('data')))
    for spec in (
        {'mu': w.sharding, 'count': '...'},
        Rules([('mu', w.sharding)]),
        {'mu': shard_largest('data', spec=w.sharding), 'count': shard_largest},
        for_optimizer(w, w.sharding),
        Rules([], default=for_optimizer(w, w.sharding, zero='tensor')),
    ):
        state = {'mu': w, 'count': np.int32(2)}
        placed = einshard(state, spec)
        assert placed['count'].sharding.mesh == mesh
        np.testing.assert_array_equal(jax.jit(lambda s: s['mu'] * s['count'])(placed), 2 * w)
        by_sharded = sharded(spec, reshard=True)(lambda s: s)(state)
        assert describe(by_sharded) == describe(placed)
        if not isinstance(spec, dict):
            assert spec.table(state).n_devices == len(devices)
    two = einshard({'a': w, 'b': w}, {'a': w.sharding, 'b': DATA})
    assert two['a'].sharding.mesh == mesh
    assert two['b'].sharding.mesh == AUTO


def test_an_array_may_be_on_another_mesh_than_that_in_context():
    with jax.set_mesh(AUTO):
        assert placed(einshard(X, OTHER), OTHER.mesh, P('x'))


@pytest.mark.parametrize('spec', [P(unreduced={'data'}), P(None, reduced={'tensor'})])
def test_unreduced_axes(spec):
    placed_as = einshard(X, spec, mesh=EXPLICIT).sharding.spec
    assert placed_as.update(partitions=()) == spec.update(partitions=())


@pytest.mark.parametrize(
    ('spec', 'fix'),
    [
        (P('dta'), "P('data')"),
        (P(None, ('data', 'tensr')), "P(None, ('data', 'tensor'))"),
        (P(P.UNCONSTRAINED, 'dta'), "P(P.UNCONSTRAINED, 'data')"),
    ],
)
def test_a_misspelled_mesh_axis(spec, fix):
    assert refusal(jax.jit(lambda x: einshard(x, spec, mesh=AUTO)), X).fix == fix
    if P.UNCONSTRAINED not in spec:
        assert refusal(sharded(spec, mesh=AUTO)(same), X).fix == fix


@pytest.mark.parametrize('spec', ['b@dta', P('dta')])
def test_a_misspelled_mesh_axis_of_an_indivisible_axis(spec):
    error = refusal(einshard, np.ones(3), spec, mesh=AUTO)
    assert error.sentence == "the mesh has no axis 'dta'"
    assert error.fix is None  # missing='replicate' would hide the misspelling
