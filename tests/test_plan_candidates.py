"""The candidates that `plan` compiles, chosen by estimates."""

import math

import jax.numpy as jnp
import pytest
from placed import struct
from planned import Sizes, experts_step, mlp_step, transformer_step
from test_bounds import tpus

from einshard import EinshardError, sharded

# private: the candidates that the search leaves out
from einshard._plan import find_candidates as candidates
from einshard._plan.estimate import Estimator
from einshard._plan.find_candidates import find_candidates
from einshard._plan.model import find_model
from einshard._plan.space import AXES, Space, read_pins
from einshard._program.cost.chips import as_chip

V5E, V5P = as_chip('TPU v5e'), as_chip('TPU v5p')
GIB = 2**30


DEVICES = tpus(4, 2)


def mlp_model(**sizes):
    return find_model(*mlp_step(**sizes), {})


def find(model, devices=DEVICES, *, memory=None, objective='bound', **options):
    space, estimator = Space(model, len(devices), **options), Estimator(model, devices, V5E)
    return find_candidates(space, estimator, memory=memory, objective=objective)


def best(model, **options):
    """The best candidate as text, such as 'x=4, y=2: batch@x, mlp@y'."""
    return str(find(model, **options).ranked[0])


def estimates(model, **options):
    estimator = Estimator(model, DEVICES, V5E)
    ranked = find(model, **options).ranked
    return [estimator.evaluate(candidate) for candidate in ranked]


# --- the scaling book, by bounds alone ------------------------------------------------------------


def cheapest_mesh(step, args, devices, meshes, *, tensor):
    """The sizes of FSDP and tensor parallelism that take the least time on v5p."""
    model = find_model(step, args, {})
    estimator = Estimator(model, devices, V5P)
    space = Space(model, len(devices))
    name_sets = frozenset({'batch', 'embed'}), frozenset(tensor)
    return min(meshes, key=lambda sizes: estimator.totals(space.axes((sizes, name_sets))).seconds)


def test_book_mlp():
    # chapter 5: FSDP over full dimensions of the torus, sqrt(2 x 64 x 48 Ki / 32,768) = 14 at best
    @sharded('batch act', 'embed mlp', 'mlp embed', out='batch act')
    def mlp(x, up, down):
        return (x @ up) @ down

    shapes = (48 * 1024, 8192), (8192, 32768), (32768, 8192)
    args = [struct(*shape, dtype='bfloat16') for shape in shapes]
    meshes = [(64, 1), (16, 4), (4, 16), (1, 64)]
    assert cheapest_mesh(mlp, args, tpus(4, 4, 4), meshes, tensor=['mlp']) == (16, 4)


def test_book_llama():
    # chapter 6: LLaMA 3 70B with 4 Mi tokens on 8,192 v5p: FSDP over 2,048 chips, tensor over 4
    c = Sizes(80, 8192, heads=64, kv=8, head=128, mlp=28672, vocab=128256, seq=2048, batch=2048)
    step, args = transformer_step(c)
    tensor = ['heads', 'kv', 'mlp', 'vocab']
    meshes = [(8192 // n, n) for n in (1, 2, 4, 8)]
    assert cheapest_mesh(step, args, tpus(16, 16, 32), meshes, tensor=tensor) == (2048, 4)


# --- what theory says -----------------------------------------------------------------------------


def test_data_parallelism_for_small_weights():
    assert best(mlp_model(tokens=2**16, width=64, hidden=256)) == 'x=8: batch@x'


def test_fsdp_if_the_weights_do_not_fit():
    model = mlp_model(tokens=2**16, width=1024, hidden=4096)
    assert best(model) == 'x=8: batch@x'
    replicated = estimates(model)[0].memory
    # parameters of 32 MiB, and their gradients
    assert best(model, memory=replicated - 2**24) == 'x=8: embed@x, batch@x'


def test_tensor_parallelism_for_few_tokens():
    assert best(mlp_model(tokens=8, width=1024, hidden=4096)) == 'x=8: mlp@x'


def test_fsdp_and_tensor_parallelism():
    c = Sizes(8, 4096, heads=32, kv=32, head=128, mlp=16384, vocab=1024, seq=1024, batch=32)
    model = find_model(*transformer_step(c), {})
    space = {'mesh': (('x', 8), ('y', 4)), 'pinned': {'act': ()}}
    found = [find(model, tpus(8, 4), memory=n * GIB, **space).ranked for n in (3, 1.2)]
    roomy, tight = (dict(ranked[0].axes) for ranked in found)
    for axes in (roomy, tight):
        assert axes['batch'] == axes['embed'] == ('x',)
        assert axes['mlp'] == axes['heads'] == axes['kv'] == ('y',)
    # arrays between the layers take a fourth of the memory if their sequences are sharded too
    assert (roomy['norm_seq'], tight['norm_seq']) == ((), ('y',))


def test_experts():
    assert best(find_model(*experts_step(), {})) == 'x=8: expert@x'


# --- the space ------------------------------------------------------------------------------------


def test_a_beam_finds_the_best_of_all(monkeypatch):
    model = mlp_model(tokens=4096, width=1024, hidden=4096)
    everything = find(model)
    monkeypatch.setattr(candidates, 'MAX_ENUMERATED', 0)
    beam = find(model)
    assert beam.pruned != everything.pruned  # the beam has compared other plans
    assert beam.ranked[0] == everything.ranked[0]
    assert find(model).ranked == beam.ranked  # deterministic


def test_no_mesh_axis_twice_and_all_sizes_divide():
    model = find_model(*transformer_step(Sizes(heads=12, kv=6, batch=24)), {})
    found = find(model).ranked
    assert len(found) > 20
    for c in found:
        axes, sizes = dict(c.axes), dict(c.mesh)
        assert math.prod(sizes.values()) == 8
        for names in model.array_names:
            used = [axis for name in names for axis in axes[name]]
            assert len(used) == len(set(used))
        for name, over in axes.items():
            assert model.divisors[name] % math.prod(sizes[axis] for axis in over) == 0


def test_pruned():
    pruned = find(mlp_model(tokens=6)).pruned
    assert pruned['indivisible'] > 0  # of 6 tokens by 4 and 8
    assert pruned['two axes of an array over one mesh axis'] > 0
    assert pruned['equal to a plan with fewer mesh axes'] > 0


def test_a_pruned_plan_is_counted_once():
    model = mlp_model()
    space, estimator = Space(model, 8), Estimator(model, DEVICES, V5E)
    search = candidates._CandidateSearch(space, estimator, None, 'bound')
    search.evaluate(search.all_points())
    ranked, pruned = search.ranked(), dict(search.pruned)
    assert pruned['equal after renaming mesh axes'] > 0
    assert (search.ranked(), search.pruned) == (ranked, pruned)


def test_objectives():
    model = mlp_model(tokens=4096)
    for objective in ('bound', 'bytes', 'memory'):
        found = estimates(model, objective=objective)
        costs = [float(f'{c.cost(objective)[0]:.9g}') for c in found]
        assert costs == sorted(costs)
        assert len(set(costs)) > 1


def test_plans_that_do_not_fit_come_last():
    memories = [c.memory for c in estimates(mlp_model(), memory=0)]
    assert memories == sorted(memories)


@pytest.mark.parametrize('enumerated', [20_000, 0])
@pytest.mark.parametrize(('pin', 'axes'), [('@y', ('y',)), ('@(z,x)', ('z', 'x'))])
def test_pins(pin, axes, enumerated, monkeypatch):
    monkeypatch.setattr(candidates, 'MAX_ENUMERATED', enumerated)
    pinned = read_pins({'embed': pin, 'act': ''}, AXES)
    found = find(mlp_model(), pinned=pinned).ranked
    assert {dict(c.axes)['embed'] for c in found} == {axes}
    assert {dict(c.axes)['act'] for c in found} == {()}


def test_named_mesh():
    found = find(mlp_model(), mesh=(('data', 4), ('tensor', 2))).ranked
    assert {c.mesh for c in found} == {(('data', 4), ('tensor', 2))}


@pytest.mark.parametrize('enumerated', [20_000, 0])
def test_mesh_axes_in_specs_shard_no_other_axis_of_the_array(enumerated, monkeypatch):
    monkeypatch.setattr(candidates, 'MAX_ENUMERATED', enumerated)
    x = struct(64, 64)
    model = find_model(sharded('a b@tp', 'b@tp c')(jnp.matmul), (x, x), {}, ['data', 'tp'])
    found = find(model, mesh=(('data', 4), ('tp', 2))).ranked
    assert {axes for c in found for _, axes in c.axes} == {(), ('data',)}


def test_slices_shard_only_the_batch():
    found = find(mlp_model(tokens=4096), tpus(2, 2, slices=2), n_slices=2).ranked
    assert found
    for c in found:
        assert c.mesh[0] == ('x', 2)
        assert [name for name, axes in c.axes if 'x' in axes] == ['batch']


def test_nothing_to_shard_by():
    # no size is divisible by 2, so all devices compute the same
    assert best(mlp_model(tokens=5, width=3, hidden=7)) == 'x=8: everything replicated'


@pytest.mark.parametrize(
    ('pin', 'mesh', 'message'),
    [
        ({'enbed': '@x'}, None, "pin= has 'enbed', but step has no such axis name"),
        ({'embed': '@data'}, None, "pin= shards 'embed' over 'data', but the mesh has only"),
        ({'embed': '@x', 'mlp': '@x'}, None, "'mlp' and 'embed', over mesh axis 'x'"),
        ({'embed': '@x', 'batch': '@y'}, None, 'pin= does not fit any mesh of 8 devices'),
        ({'embed': '@a'}, (('a', 8),), 'pin= does not fit the mesh: axis'),
        ({'embed': '4'}, None, "pin= must name the mesh axes of 'embed', not '4'"),
    ],
)
def test_bad_pins(pin, mesh, message):
    model = mlp_model(tokens=5, width=12)
    with pytest.raises(EinshardError, match=message):
        Space(model, 8, mesh=mesh, pinned=read_pins(pin, dict(mesh or ()) or AXES))
