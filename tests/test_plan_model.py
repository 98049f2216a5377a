"""The axis names that `plan` finds by tracing, and what candidates cost by them."""

from contextlib import closing

import jax
import jax.numpy as jnp
import pytest
from placed import struct as f32
from planned import MLP_RULES, Sizes, mlp_step, transformer_step

from einshard import Chip, Rules, device_mesh, einshard, plan, sharded

# private: names and costs of which a plan shows sums
from einshard._plan.candidate import Candidate
from einshard._plan.evaluate import Function, Partitioner
from einshard._plan.named_program import find_named

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

    model = find_model(decode, ({'w': f32(16, 32), 'b': None}, f32(8, 10, 32), f32(8, 16)))
    assert [x.is_state for x in model.arrays] == [False, True, False]


@pytest.mark.parametrize('options', [{}, {'donate_argnames': 'weights'}])
def test_a_batch_may_be_a_pytree(options):
    @sharded(MLP_RULES, 'batch act', out=(MLP_RULES, None), **options)
    def step(weights, batch):
        h = einshard(jax.nn.relu(batch['x'] @ weights['up']), 'batch mlp')
        return weights, jnp.sum((h @ weights['down'] - batch['y']) ** 2)

    weights, batch = {'up': f32(16, 32), 'down': f32(32, 16)}, {'x': f32(64, 16), 'y': f32(64, 16)}
    model = find_model(step, (weights, batch))
    assert [x.is_state for x in model.arrays] == [True, True, False, False]


def test_jitted_function_with_names_inside():
    @jax.jit
    def mlp(weights, x):
        weights = einshard(weights, MLP_RULES)
        h = jax.nn.relu(einshard(x, 'batch act') @ weights['up'])
        return einshard(h @ weights['down'], 'batch act')

    weights = {'up': f32(16, 32), 'down': f32(32, 16)}
    model = find_model(mlp, (weights, f32(64, 16)))
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
    found = named(step, (f32(*(4,) * (n - 1), 8, 16, 32), f32(32, 64)))
    (names,) = (x for place, x in found._names.items() if place.kind == 'constraint')
    assert names == ((),) * n + (('seq',), ('mlp',))
    assert ('seq', 'mlp') in found.model.array_names


def test_flax_names():
    linen = pytest.importorskip('flax.linen')
    init = linen.with_logical_partitioning(linen.initializers.ones, ('embed', 'mlp'))
    layer = linen.Dense(32, kernel_init=init, use_bias=False)
    weights = jax.eval_shape(layer.init, jax.random.key(0), f32(8, 16))
    model = find_model(layer.apply, (weights, f32(8, 16)))
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
    rest = batch, key, f32(64)
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
    weights = jax.eval_shape(layer.init, jax.random.key(0), f32(8, 16))
    found = plan(
        layer.apply, weights, f32(8, 16), mesh=jax.devices()[:4], objective='bytes', compilations=1
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
        w = Variable(f32(16, 32), out_sharding=names)
        model = find_model(lambda x, w: x @ w.value, (f32(8, 16), w))
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
    model = find_model(nnx.jit(lambda m, x: m.down(nnx.relu(m.up(x)))), (module, f32(8, 16)))
    assert model.sizes == {'mlp': 16, 'embed': 16}
    assert model.unnamed_data == ("'x' float32[8,16]",)


def test_mesh_axes_in_expressions():
    @sharded('batch act', 'embed mlp@tensor')
    def up(x, w):
        return x @ w

    model = find_model(up, (f32(8, 16), f32(16, 32)), ('data', 'tensor'))
    assert model.sizes == {'batch': 8, 'act': 16, 'embed': 16}


def test_no_names():
    def up(weights, x):
        return x @ weights['w']

    assert find_model(up, ({'w': f32(16, 32), 'b': f32(32)}, f32(8, 16))) is None


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
    step = sharded('x y', 'y z')(jnp.matmul), (f32(64, 16), f32(16, 32))
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
