"""The candidates that `plan` compiles, chosen by their scores."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from placed import struct
from planned import Sizes, experts_step, mlp_step, transformer_step
from test_bounds import tpus

from einshard import EinshardError, Rules, einshard, sharded

# private: the candidates that the search leaves out
from einshard._plan.candidate import Candidate
from einshard._plan.named_program import find_named
from einshard._plan.space import AXES, Space, read_pins
from einshard._plan.starts import Starts
from einshard._program.cost.chips import as_chip
from einshard._program.traced.variants import Variants

V5E, V5P = as_chip('TPU v5e'), as_chip('TPU v5p')
GIB = 2**30


DEVICES = tpus(4, 2)


class Device(types.SimpleNamespace):
    """A device that a mesh takes, as JAX describes it."""

    __hash__ = object.__hash__
    platform, device_kind, process_index = 'tpu', 'TPU v5 lite', 0

    @property
    def client(self):
        return jax.devices()[0].client


def named(step, args, devices=DEVICES, chip=V5E, mesh=None):
    axes = mesh or (('devices', len(devices)),)
    shape = [size for _, size in axes]
    placed = np.array([Device(**vars(device)) for device in devices]).reshape(shape)
    on = jax.sharding.Mesh(placed, [name for name, _ in axes])
    return find_named(step, args, {}, on, chip, is_kept=mesh is not None)


def mlp(**sizes):
    return named(*mlp_step(**sizes))


def starts(scores, memory=None, objective='bound', **options):
    space = Space(scores.model, scores.mesh.size, mesh=scores.mesh_axes, **options)
    return Starts(scores, space, memory, objective)


def find(scores, **options):
    return starts(scores, **options).find()


def best(scores, **options):
    """The best candidate as text, such as 'x=4, y=2: batch@x, mlp@y'."""
    return str(find(scores, **options)[0])


# --- the scaling book, by bounds alone ------------------------------------------------------------


def cheapest_mesh(step, args, devices, meshes, *, tensor):
    """The sizes of FSDP and tensor parallelism that take the least time on v5p."""
    scores = named(step, args, devices, V5P)

    def seconds(sizes):
        axes = {'batch': ('x',), 'embed': ('x',), **dict.fromkeys(tensor, ('y',))}
        mesh = tuple(zip('xy', sizes, strict=True))
        placed = tuple((name, axes.get(name, ())) for name in scores.model.sizes)
        return scores.score(Candidate(mesh, placed)).seconds

    return min(meshes, key=seconds)


def test_book_mlp():
    # chapter 5: FSDP over full dimensions of the torus, sqrt(2 x 64 x 48 Ki / 32,768) = 14 at best
    @sharded('batch act', 'embed mlp', 'mlp embed', out='batch act')
    def mlp(x, up, down):
        return (x @ up) @ down

    shapes = (48 * 1024, 8192), (8192, 32768), (32768, 8192)
    args = [struct(*shape, dtype='bfloat16') for shape in shapes]
    meshes = [(64, 1), (16, 4), (4, 16), (1, 64)]
    assert cheapest_mesh(mlp, args, tpus(4, 4, 4), meshes, tensor=['mlp']) == (16, 4)


@pytest.mark.slow
def test_book_llama():
    # chapter 6: LLaMA 3 70B with 4 Mi tokens on 8,192 v5p: FSDP over 2,048 chips, tensor over 4
    c = Sizes(80, 8192, heads=64, kv=8, head=128, mlp=28672, vocab=128256, seq=2048, batch=2048)
    step, args = transformer_step(c)
    tensor = ['heads', 'kv', 'mlp', 'vocab']
    meshes = [(8192 // n, n) for n in (1, 2, 4, 8)]
    assert cheapest_mesh(step, args, tpus(16, 16, 32), meshes, tensor=tensor) == (2048, 4)


# --- what theory says -----------------------------------------------------------------------------


def test_data_parallelism_for_small_weights():
    assert best(mlp(tokens=2**16, width=64, hidden=256)) == 'x=8: batch@x'


def test_fsdp_if_the_weights_do_not_fit():
    scores = mlp(tokens=2**16, width=1024, hidden=4096)
    replicated = find(scores)[0]
    assert str(replicated) == 'x=8: batch@x'
    memory = scores.peak(replicated, scores.score(replicated))
    # parameters of 32 MiB, and their gradients
    assert best(scores, memory=memory - 2**24) == 'x=8: embed@x, batch@x'


def test_tensor_parallelism_for_few_tokens():
    assert best(mlp(tokens=8, width=1024, hidden=4096)) == 'x=8: mlp@x'


def test_fsdp_and_tensor_parallelism():
    c = Sizes(8, 4096, heads=32, kv=32, head=128, mlp=16384, vocab=1024, seq=1024, batch=32)
    scores = named(*transformer_step(c), tpus(8, 4), mesh=(('x', 8), ('y', 4)))
    found = [find(scores, memory=n * GIB, pinned={'act': ()})[0] for n in (3, 1.2)]
    roomy, tight = (dict(candidate.axes) for candidate in found)
    for axes in (roomy, tight):
        assert axes['batch'] == axes['embed'] == ('x',)
        assert axes['mlp'] == axes['heads'] == axes['kv'] == ('y',)
    # arrays between the layers take a fourth of the memory if their sequences are sharded too
    assert (roomy['norm_seq'], tight['norm_seq']) == ((), ('y',))


def test_experts():
    assert best(named(*experts_step())) == 'x=8: expert@x'


def test_equal_layers_are_scored_once(monkeypatch):
    """One of many unrolled layers stands for the others, in time and memory."""
    rules = Rules([('up', 'embed mlp'), ('down', 'mlp embed')])

    @sharded(rules, 'batch act', out=(rules, None), donate_argnums=0)
    def step(layers, x):
        def loss(layers):
            y = x
            for w in layers:
                h = einshard(jax.nn.relu(y @ w['up']), 'batch mlp')
                y = einshard(y + h @ w['down'], 'batch act')
            return jnp.mean(y**2)

        value, gradients = jax.value_and_grad(loss)(layers)
        return jax.tree.map(lambda w, g: w - g, layers, gradients), value

    weights = {'up': struct(64, 256), 'down': struct(256, 64)}
    args = [weights] * 12, struct(512, 64)
    folded = named(step, args)
    monkeypatch.setattr(Variants, 'fold', lambda self, groups: 1)
    whole = named(step, args)
    assert folded.n_operations < whole.n_operations / 2
    for axes in ({'batch': ('x',)}, {'batch': ('x',), 'embed': ('x',)}, {'mlp': ('x',)}):
        candidate = Candidate(
            (('x', 8),), tuple((name, axes.get(name, ())) for name in whole.model.sizes)
        )
        ours, theirs = (scores.score(candidate) for scores in (folded, whole))
        assert ours.seconds == pytest.approx(theirs.seconds, rel=0.02)
        assert ours.memory == theirs.memory
        peaks = folded.peak(candidate, ours), whole.peak(candidate, theirs)
        assert peaks[0] == pytest.approx(peaks[1], rel=0.15)


# --- the space ------------------------------------------------------------------------------------


def test_deterministic():
    scores = mlp(tokens=4096, width=1024, hidden=4096)
    assert find(scores) == find(scores)


def test_no_mesh_axis_twice_and_all_sizes_divide():
    scores = named(*experts_step(tokens=24, width=12, hidden=24, experts=6))
    found, model = find(scores), scores.model
    assert len(found) > 20
    for c in found:
        axes, sizes = dict(c.axes), dict(c.mesh)
        assert math.prod(sizes.values()) == 8
        for names in model.array_names:
            used = [axis for name in names for axis in axes[name]]
            assert len(used) == len(set(used))
        for name, over in axes.items():
            assert model.divisors[name] % math.prod(sizes[axis] for axis in over) == 0


def test_objectives():
    """The first candidates are those of least time, or of least memory."""
    scores = mlp(tokens=4096)
    for objective in ('bound', 'memory'):
        candidates = find(scores, objective=objective)
        pairs = [(one, scores.score(one)) for one in candidates]
        costs = [s.seconds if objective == 'bound' else scores.peak(c, s) for c, s in pairs]
        assert costs[0] == pytest.approx(min(costs), rel=1e-3)
        assert len(set(costs)) > 1


def test_plans_that_need_least_come_first_if_none_fits():
    scores = mlp()
    found = find(scores, memory=0)
    memories = [scores.peak(one, scores.score(one)) for one in found]
    assert memories[0] == min(memories) < max(memories)


@pytest.mark.parametrize(('pin', 'axes'), [('@y', ('y',)), ('@(z,x)', ('z', 'x'))])
def test_pins(pin, axes):
    pinned = read_pins({'embed': pin, 'act': ''}, AXES)
    found = find(mlp(), pinned=pinned)
    assert {dict(c.axes)['embed'] for c in found} == {axes}
    assert {dict(c.axes)['act'] for c in found} == {()}


def test_named_mesh():
    found = find(named(*mlp_step(), mesh=(('data', 4), ('tensor', 2))))
    assert {c.mesh for c in found} == {(('data', 4), ('tensor', 2))}


def test_mesh_axes_in_specs_shard_no_other_axis_of_the_array():
    x = struct(64, 64)
    step = sharded('a b@tp', 'b@tp c')(jnp.matmul)
    found = find(named(step, (x, x), mesh=(('data', 4), ('tp', 2))))
    assert {axes for c in found for _, axes in c.axes} == {(), ('data',)}


def test_slices_shard_only_the_batch():
    found = find(named(*mlp_step(tokens=4096), tpus(2, 2, slices=2)), n_slices=2)
    assert {c.mesh[0] for c in found} == {('x', 2)}
    across = [[name for name, axes in c.axes if 'x' in axes] for c in found]
    assert across == [['batch']] * len(found)


def test_nothing_to_shard_by():
    # no size is divisible by 2, so all devices compute the same
    assert best(mlp(tokens=5, width=3, hidden=7)) == 'x=8: everything replicated'


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
    model = mlp(tokens=5, width=12).model
    with pytest.raises(EinshardError, match=message):
        Space(model, 8, mesh=mesh, pinned=read_pins(pin, dict(mesh or ()) or AXES))
