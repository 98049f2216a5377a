"""Functions with axis names: names and costs that `plan` finds, and the candidates it compiles."""

import math
import types
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_plan_steps as steps
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import struct
from planned import MLP_RULES, Sizes, experts_step, mlp_step, transformer_step
from test_bounds import tpus

from einshard import Chip, EinshardError, Rules, device_mesh, einshard, plan, sharded
from einshard._chips.table import as_chip

# private: names and costs of which a plan shows sums, and candidates that the search leaves out
from einshard._explain.explain import read_facts
from einshard._explain.trace_call import trace_call
from einshard._plan.candidate import Candidate
from einshard._plan.evaluate import Function, Partitioner
from einshard._plan.named_program import find_named
from einshard._plan.space import AXES, Space, read_pins
from einshard._plan.starts import Starts
from einshard._plan.step import Step
from einshard._program.traced.variants import Variants

# one byte per second to other devices and from memory, and one product per second
SLOW = Chip('slow', {'bf16': 1.0}, memory=1e9, memory_bandwidth=1.0, link=1.0)


def named(fn, args, mesh_axes=None, chip=None):
    devices = jax.devices()[:4]
    mesh = device_mesh(devices, **dict(zip(mesh_axes or (), (2, 2), strict=False)))
    return find_named(fn, args, {}, mesh, chip, is_kept=mesh_axes is not None)


def find_model(fn, args, mesh_axes=None):
    found = named(fn, args, mesh_axes)
    return found and found.model


# --- names ----------------------------------------------------------------------------------------


def test_model_of_an_mlp():
    model = find_model(*mlp_step())
    assert model.name == 'step'
    assert model.sizes == {'mlp': 32, 'embed': 16, 'batch': 64, 'act': 16}
    assert [(x.names, x.is_state, x.donated, x.bytes) for x in model.arrays] == [
        ((('mlp',), ('embed',)), True, True, 2048),
        ((('embed',), ('mlp',)), True, True, 2048),
        ((('batch',), ('act',)), False, False, 4096),
    ]


def test_decoding():
    rules = Rules([('w', 'embed mlp')])

    @sharded(rules, 'batch length mlp', 'batch embed', donate_argnames='cache')
    def decode(weights, cache, x):
        new = einshard(x @ weights['w'], 'batch mlp')
        return jax.lax.dynamic_update_slice(cache, new[:, None], (0, 3, 0))

    model = find_model(decode, ({'w': struct(16, 32), 'b': None}, struct(8, 10, 32), struct(8, 16)))
    assert [x.is_state for x in model.arrays] == [False, True, False]


@pytest.mark.parametrize('options', [{}, {'donate_argnames': 'weights'}])
def test_a_batch_may_be_a_pytree(options):
    @sharded(MLP_RULES, 'batch act', out=(MLP_RULES, None), **options)
    def step(weights, batch):
        h = einshard(jax.nn.relu(batch['x'] @ weights['up']), 'batch mlp')
        return weights, jnp.sum((h @ weights['down'] - batch['y']) ** 2)

    weights, batch = (
        {'up': struct(16, 32), 'down': struct(32, 16)},
        {'x': struct(64, 16), 'y': struct(64, 16)},
    )
    model = find_model(step, (weights, batch))
    assert [x.is_state for x in model.arrays] == [True, True, False, False]


def test_jitted_function_with_names_inside():
    @jax.jit
    def mlp(weights, x):
        weights = einshard(weights, MLP_RULES)
        h = jax.nn.relu(einshard(x, 'batch act') @ weights['up'])
        return einshard(h @ weights['down'], 'batch act')

    weights = {'up': struct(16, 32), 'down': struct(32, 16)}
    model = find_model(mlp, (weights, struct(64, 16)))
    names = [x.names for x in model.arrays]
    assert names == [(('mlp',), ('embed',)), (('embed',), ('mlp',)), (('batch',), ('act',))]


@pytest.mark.parametrize('n', [1, 2])
def test_constraints_under_vmap(n):
    """The axes that it adds come first, and have no names."""

    def inner(x, w):
        return einshard(jax.nn.relu(x @ w), 'seq mlp')

    for _ in range(n):
        inner = jax.vmap(inner, (0, None))
    step = sharded('... batch seq act' if n == 2 else 'batch seq act', 'act mlp')(inner)
    found = named(step, (struct(*(4,) * (n - 1), 8, 16, 32), struct(32, 64)))
    (names,) = (x for place, x in found._names.items() if place.kind == 'constraint')
    assert names == ((),) * n + (('seq',), ('mlp',))
    assert ('seq', 'mlp') in found.model.array_names


def test_flax_names():
    linen = pytest.importorskip('flax.linen')
    init = linen.with_logical_partitioning(linen.initializers.ones, ('embed', 'mlp'))
    layer = linen.Dense(32, kernel_init=init, use_bias=False)
    weights = jax.eval_shape(layer.init, jax.random.key(0), struct(8, 16))
    model = find_model(layer.apply, (weights, struct(8, 16)))
    assert model.sizes == {'embed': 16, 'mlp': 32}


def named_weights():
    """A Flax model of two layers with axis names in its metadata, and its weights."""
    linen = pytest.importorskip('flax.linen')

    def init(*names):
        return linen.with_logical_partitioning(linen.initializers.ones, names)

    class Model(linen.Module):
        @linen.compact
        def __call__(self, tokens, dropout=None):
            x = linen.Embed(256, 64, embedding_init=init('vocab', 'embed'))(tokens)
            for _ in range(2):
                h = linen.relu(linen.Dense(256, kernel_init=init('embed', 'mlp'))(x))
                x = x + linen.Dense(64, kernel_init=init('mlp', 'embed'))(h)
            if dropout is not None:
                x = x * jax.random.bernoulli(dropout, 0.9, x.shape)
            return x

    model = Model()
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    return model, jax.eval_shape(model.init, jax.random.key(0), tokens), tokens


@pytest.mark.slow
def test_data_without_names():
    """What carries the batch is named; states, keys and biases are not."""
    model, weights, tokens = named_weights()
    key = jax.eval_shape(lambda: jax.random.key(0))

    def loss(weights, batch, key, scale):
        out = model.apply(weights, batch['tokens'], key)
        return jnp.mean((out * scale - batch['targets'].sum()) ** 2)

    def named(weights, batch, key, scale):
        batch = einshard(batch, 'batch ...')
        return loss(weights, batch, key, scale)

    batch = {'tokens': tokens, 'targets': tokens}
    rest = batch, key, struct(64)
    for function in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.jit(jax.value_and_grad(loss))):
        found = find_model(function, (weights, *rest))
        assert found.unnamed_data == ("'batch/tokens' int32[16,32]",)
    for function in (jax.grad(named), jax.jit(jax.grad(named))):
        assert find_model(function, (weights, *rest)).unnamed_data == ()
    for spec in ('batch ...', 'batch seq'):
        specs = {'weights': None, 'batch': spec, 'key': None, 'scale': None}
        assert find_model(sharded(**specs)(jax.grad(loss)), (weights, *rest)).unnamed_data == ()


def test_data_without_names_gets_one():
    """Names of weights alone would leave the batch whole."""
    model, weights, tokens = named_weights()
    options = {'mesh': jax.devices()[:4], 'chip': 'TPU v5e', 'compilations': 2}
    found = plan(model.apply, weights, tokens, **options)
    assert found.warnings == ()
    assert {'batch', 'vocab', 'embed', 'mlp'} <= {*found.rules}
    assert found.rules['batch'] == '@x'


def test_names_that_are_not_valid():
    """plan leaves them out, and says so."""
    linen = pytest.importorskip('flax.linen')
    init = linen.with_logical_partitioning(linen.initializers.ones, ('embed', 'mlp2'))
    layer = linen.Dense(32, kernel_init=init, use_bias=False)
    weights = jax.eval_shape(layer.init, jax.random.key(0), struct(8, 16))
    found = plan(
        layer.apply,
        weights,
        struct(8, 16),
        mesh=jax.devices()[:4],
        objective='bytes',
        compilations=1,
    )
    assert 'embed' in found.rules
    assert 'mlp2' not in found.rules
    assert found.notes[0] == "names in metadata that are not valid axis names are not used: 'mlp2'"


def test_flax_variables():
    class Variable:
        """Has the metadata of an nnx.Variable."""

        def __init__(self, value, **metadata):
            self.value, self.metadata = value, metadata

        def get_metadata(self):
            return self.metadata

    jax.tree_util.register_pytree_node(
        Variable,
        lambda variable: ((variable.value,), tuple(variable.metadata.items())),
        lambda metadata, children: Variable(children[0], **dict(metadata)),
    )
    mesh = jax.sharding.AbstractMesh((1,), ('embed',))
    for names in (
        ('embed', None),
        jax.sharding.PartitionSpec('embed', None),
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('embed', None)),
    ):
        w = Variable(struct(16, 32), out_sharding=names)
        model = find_model(lambda x, w: x @ w.value, (struct(8, 16), w))
        assert model.sizes == {'embed': 16}
        assert model.arrays[1].names == (('embed',), ())


def test_modules_that_nnx_jit_passes_in_a_list():
    """The list has the arrays without their variables. The kernels have the same shape."""
    nnx = pytest.importorskip('flax.nnx')
    init = nnx.initializers.lecun_normal()

    class Two(nnx.Module):
        def __init__(self, rngs):
            up = nnx.with_partitioning(init, ('embed', 'mlp'))
            down = nnx.with_partitioning(init, ('mlp', 'embed'))
            self.up = nnx.Linear(16, 16, kernel_init=up, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(16, 16, kernel_init=down, use_bias=False, rngs=rngs)

    with nnx.use_eager_sharding(False):
        module = nnx.eval_shape(lambda: Two(nnx.Rngs(0)))
    model = find_model(nnx.jit(lambda m, x: m.down(nnx.relu(m.up(x)))), (module, struct(8, 16)))
    assert model.sizes == {'mlp': 16, 'embed': 16}
    assert model.unnamed_data == ("'x' float32[8,16]",)


def test_mesh_axes_in_expressions():
    @sharded('batch act', 'embed mlp@tensor')
    def up(x, w):
        return x @ w

    model = find_model(up, (struct(8, 16), struct(16, 32)), ('data', 'tensor'))
    assert model.sizes == {'batch': 8, 'act': 16, 'embed': 16}


def test_no_names():
    def up(weights, x):
        return x @ weights['w']

    assert find_model(up, ({'w': struct(16, 32), 'b': struct(32)}, struct(8, 16))) is None


# --- costs, by hand -------------------------------------------------------------------------------

T, D, F = 64, 16, 32
GRADIENTS = WEIGHTS = 2 * 4 * D * F
X = ('x',)
FAST = 1e30


def scored(chip, step=None, mesh=(('x', 4),), **axes):
    """The program, a candidate, and its score on four devices."""
    found = named(*(step or mlp_step(T, D, F)), chip=chip)
    candidate = Candidate(mesh, tuple((name, axes.get(name, ())) for name in found.model.sizes))
    return found, candidate, found.score(candidate)


def seconds(resource, step=None, **options):
    """What one resource takes, with one byte or product per second, and others take nothing."""
    of = {**dict.fromkeys(('compute', 'hbm', 'network'), FAST), resource: 1.0}
    chip = Chip(
        'slow', {'bf16': of['compute']}, 1e9, memory_bandwidth=of['hbm'], link=of['network']
    )
    return scored(chip, step, **options)[2].seconds


@pytest.mark.parametrize(
    ('axes', 'sent'),
    [
        # all-reduces, at best by the network itself, and that of the loss
        ({'batch': X}, GRADIENTS + 4),
        ({'batch': X, 'embed': X}, (WEIGHTS + GRADIENTS) * 3 / 4 + 4),  # gathers, reduce-scatters
        ({'mlp': X}, 4 * T * D),
        ({}, 0),
    ],
    ids=['data', 'fsdp', 'tensor', 'replicated'],
)
def test_what_an_mlp_sends_and_computes(axes, sent):
    assert seconds('network', **axes) == pytest.approx(sent, abs=1e-6)
    parts = 4 if axes else 1
    assert seconds('compute', **axes) == pytest.approx(5 * 2 * T * D * F / parts)


def test_what_an_mlp_reads_and_writes():
    # arguments are read, the weights and the loss are written
    found = seconds('hbm', batch=X, embed=X)
    assert found == pytest.approx((2 * WEIGHTS + 4 * T * D) / 4 + 4)


def test_axes_with_the_names_of_mesh_axes():
    step = sharded('x y', 'y z')(jnp.matmul), (struct(64, 16), struct(16, 32))
    axes = {'mesh': (('x', 2), ('y', 2)), 'x': (), 'y': ('x',), 'z': ('y',)}
    found = seconds('network', step, **axes)
    assert found == pytest.approx(2 * (4 * 64 * 32 // 2) * 1 / 2)  # an all-reduce of columns


def test_gathers_of_a_scan():
    c = Sizes()
    found = seconds('network', transformer_step(c), batch=X, embed=X)
    each = 2 * c.embed * c.head * c.heads + c.embed * c.head * c.kv + 2 * c.embed * c.mlp
    table = c.vocab * c.embed
    # in bf16: forward and backward, and the gradients; once more for what is rounded up
    least = 2 * 3 * c.layers * each
    most = 2 * least + 2 * 2 * 5 * table
    assert least * 3 / 4 <= found <= most * 3 / 4


@pytest.mark.slow
def test_accumulated_gradients_are_reduced_for_each_piece():
    one, four = (seconds('network', transformer_step(pieces=n), batch=X, embed=X) for n in (1, 4))
    assert four == pytest.approx(4 * one, rel=0.1)


def test_memory():
    """That of arguments and results, and of what the backward pass needs."""
    c = Sizes()
    (step, args), sizes = transformer_step(c), {}
    for name, axes in (('replicated', {}), ('sharded', {'batch': X, 'embed': X})):
        found, candidate, score = scored(SLOW, (step, args), **axes)
        assert found.peak(candidate, score) > score.memory
        sizes[name] = score.memory, found.peak(candidate, score)
    weights, _, tokens = args
    states = 3 * 4 * sum(weight.size for weight in weights.values())
    for name, parts in (('replicated', 1), ('sharded', 4)):
        assert sizes[name][0] == pytest.approx((states + 4 * tokens.size) / parts, rel=0.01)
    # the inputs of the layers, in bf16, which the scan stacks
    stacked = 2 * c.layers * c.batch * c.seq * c.embed
    assert sizes['replicated'][1] - sizes['replicated'][0] > stacked
    assert sizes['sharded'][1] < sizes['replicated'][1] / 3


@pytest.mark.slow
def test_memory_is_about_that_of_the_compiler():
    """Of a transformer whose activations take most of it."""
    c = Sizes(4, 64, 8, 4, 8, 256, 256, seq=256, batch=32)
    step, args = transformer_step(c)
    for axes in ({'batch': X}, {'batch': X, 'embed': X}, {'norm_seq': X, 'mlp': X}):
        found, candidate, score = scored(SLOW, (step, args), **axes)
        function = Function(step, args, {}, found.mesh, None)
        with closing(Partitioner(function)) as partitioner:
            [compiled] = partitioner.evaluate_all([candidate])
        assert 0.6 < found.peak(candidate, score) / compiled.memory < 1.2


# --- candidates, chosen by their scores -----------------------------------------------------------

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


def named_on(step, args, devices=DEVICES, chip=V5E, mesh=None):
    axes = mesh or (('devices', len(devices)),)
    shape = [size for _, size in axes]
    placed = np.array([Device(**vars(device)) for device in devices]).reshape(shape)
    on = jax.sharding.Mesh(placed, [name for name, _ in axes])
    return find_named(step, args, {}, on, chip, is_kept=mesh is not None)


def mlp(**sizes):
    return named_on(*mlp_step(**sizes))


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
    scores = named_on(step, args, devices, V5P)

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


@pytest.mark.slow
def test_fsdp_and_tensor_parallelism():
    c = Sizes(8, 4096, heads=32, kv=32, head=128, mlp=16384, vocab=1024, seq=1024, batch=32)
    scores = named_on(*transformer_step(c), tpus(8, 4), mesh=(('x', 8), ('y', 4)))
    found = [find(scores, memory=n * GIB, pinned={'act': ()})[0] for n in (3, 1.2)]
    roomy, tight = (dict(candidate.axes) for candidate in found)
    for axes in (roomy, tight):
        assert axes['batch'] == axes['embed'] == ('x',)
        assert axes['mlp'] == axes['heads'] == axes['kv'] == ('y',)
    # arrays between the layers take a fourth of the memory if their sequences are sharded too
    assert (roomy['norm_seq'], tight['norm_seq']) == ((), ('y',))


def test_experts():
    assert best(named_on(*experts_step())) == 'x=8: expert@x'


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
    folded = named_on(step, args)
    monkeypatch.setattr(Variants, 'fold', lambda self, groups: 1)
    whole = named_on(step, args)
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
    scores = named_on(*experts_step(tokens=24, width=12, hidden=24, experts=6))
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
    found = find(named_on(*mlp_step(), mesh=(('data', 4), ('tensor', 2))))
    assert {c.mesh for c in found} == {(('data', 4), ('tensor', 2))}


def test_mesh_axes_in_specs_shard_no_other_axis_of_the_array():
    x = struct(64, 64)
    step = sharded('a b@tp', 'b@tp c')(jnp.matmul)
    found = find(named_on(step, (x, x), mesh=(('data', 4), ('tp', 2))))
    assert {axes for c in found for _, axes in c.axes} == {(), ('data',)}


def test_slices_shard_only_the_batch():
    found = find(named_on(*mlp_step(tokens=4096), tpus(2, 2, slices=2)), n_slices=2)
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


# --- names of steps that have none ----------------------------------------------------------------


def step_of(f, *args, mesh=None):
    mesh = mesh or Mesh(steps.EIGHT.devices.reshape(-1), ('x',))
    replicated = NamedSharding(mesh, P())
    args = jax.tree.map(lambda x: struct(*x.shape).update(sharding=replicated), args)
    stages = trace_call(f, args, {}, mesh=None)
    return Step(read_facts(stages), stages.call)


def test_layers_of_modules_share_names():
    linen = pytest.importorskip('flax.linen')

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            for i in range(3):
                h = linen.relu(linen.Dense(512, name=f'up_{i}', use_bias=False)(x))
                x = x + linen.Dense(128, name=f'down_{i}', use_bias=False)(h)
            return x

    model, x = Model(), struct(1024, 128)
    weights = jax.eval_shape(model.init, jax.random.key(0), x)
    names = step_of(jax.jit(model.apply), weights, x).named.sizes
    of_weights = [n for name, [n] in names.items() if not name.startswith('activation')]
    assert sorted(of_weights) == [128, 512, 512, 512, 1024]


def test_a_cache_is_data():
    def decode(w, cache, x):
        cache = jnp.concatenate([cache[:, 1:], (x @ w['k'])[:, None]], 1)
        return cache, jnp.einsum('btd,bd->bt', cache, x @ w['q'])

    w = {'k': struct(64, 64), 'q': struct(64, 64)}
    made = step_of(jax.jit(decode, donate_argnums=1), w, struct(32, 256, 64), struct(32, 64))
    states = {a.shape for a in made.model.arrays if a.is_state}
    assert states == {(64, 64)}


@pytest.mark.parametrize('sizes', [(8,), (2, 4), (4, 2), (2, 2, 2)])
def test_a_module_on_another_mesh_propagates_as_if_lowered_for_it(sizes):
    """Against a lowering for the mesh itself."""
    axes = ('x', 'y', 'z')[: len(sizes)]
    moved, own = (
        step_of(jax.jit(steps.step), *steps.ARGUMENTS),
        Mesh(steps.EIGHT.devices.reshape(sizes), axes),
    )
    lowered = step_of(jax.jit(steps.step), *steps.ARGUMENTS, mesh=own)
    moved.variants.move_to(dict(zip(axes, sizes, strict=True)))
    places = [place for place in moved.variants.given if place.kind == 'argument']
    changes = {
        place: tuple(
            (axes[-1],) if d == 1 else (axes[0],) if d == 0 and len(axes) > 1 else ()
            for d in range(len(moved.variants.shape(place)))
        )
        for place in places
    }
    each = [one.variants.propagate(changes) for one in (moved, lowered)]
    assert [s.axes for s in each[0]] == [s.axes for s in each[1]]
    assert any(any(s.axes) for s in each[0])
