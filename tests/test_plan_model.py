"""The model that `plan` finds by tracing, and the costs that it estimates."""

import collections

import jax
import jax.numpy as jnp
import pytest
from placed import struct as f32
from planned import MLP_RULES, Sizes, experts_step, mlp_step, transformer_step

from einshard import Chip, Rules, einshard, plan, sharded

# private: names and costs of each operation, of which a plan shows sums
from einshard._plan.candidate import Candidate
from einshard._plan.costly_ops import CostlyOp, OpArray
from einshard._plan.estimate import Estimator
from einshard._plan.model import find_model
from einshard._plan.strategy import MeshAxis, fastest_strategy

# one byte per second to other devices, and one product per second
SLOW = Chip('slow', {'bf16': 1.0}, memory=1e9, memory_bandwidth=1.0, link=1.0)


def text(product):
    """A product by the names of its axes, such as 'batch act, embed mlp -> batch mlp'."""
    *operands, out = (
        ' '.join('+'.join(names) or '.' for names in side.names)
        for side in (*product.operands, product.out)
    )
    return f'{", ".join(operands)} -> {out}'


def products(model):
    return {text(product): product for product in model.costly_ops if product.flops}


# --- names ----------------------------------------------------------------------------------------


def test_model_of_an_mlp():
    model = find_model(*mlp_step(), {})
    assert model.name == 'step'
    assert model.sizes == {'mlp': 32, 'embed': 16, 'batch': 64, 'act': 16}
    assert [(x.names, x.is_state, x.donated, x.bytes) for x in model.arrays] == [
        ((('mlp',), ('embed',)), True, True, 2048),
        ((('embed',), ('mlp',)), True, True, 2048),
        ((('batch',), ('act',)), False, False, 4096),
    ]
    assert model.results == ()  # the loss is a scalar, the weights take the memory of the old ones
    assert set(products(model)) == {
        'batch act, embed mlp -> batch mlp',
        'batch mlp, mlp embed -> batch act',
        'batch act, batch mlp -> embed mlp',  # named as the weight that it updates
        'batch act, mlp embed -> batch mlp',
        'batch mlp, batch act -> mlp embed',
    }


@pytest.mark.parametrize('pieces', [1, 4])
def test_products_in_scans_are_counted(pieces):
    c = Sizes()
    model = find_model(*transformer_step(c, pieces), {})
    runs = collections.Counter()
    for product in model.costly_ops:
        runs[text(product)] += product.executions
    n = pieces * c.layers
    assert runs['batch norm_seq act, embed mlp -> batch seq mlp'] == 2 * n  # again in the remat
    assert runs['batch seq mlp, mlp embed -> batch norm_seq act'] == n  # nothing needs it again
    assert runs['batch seq mlp, batch norm_seq act -> mlp embed'] == n  # a gradient
    up = products(model)['batch norm_seq act, embed mlp -> batch seq mlp']
    assert up.flops == 2 * c.batch // pieces * c.seq * c.embed * c.mlp


def test_names_go_through_the_program():
    model = find_model(*transformer_step(), {})
    found = products(model)
    # scores: the heads of queries are split into groups, of which the major axis keeps the name
    assert 'batch seq kv head, batch seq heads head . -> batch kv seq seq .' in found
    assert 'batch seq heads head, heads head embed -> batch norm_seq act' in found
    # the gradient of the tied table, as a product and as a lookup
    assert 'batch seq vocab, batch norm_seq act -> vocab embed' in found
    lookups = [text(product) for product in model.costly_ops if product.dtype == 's32']
    assert lookups == [
        'batch seq ., vocab embed -> batch norm_seq act',
        'batch seq ., batch norm_seq act -> vocab embed',
    ]


def test_arrays_that_scans_store():
    c = Sizes()
    model = find_model(*transformer_step(c), {})
    stored = {array for live_set in model.live_sets for array, _ in live_set}
    n_bytes = 2 * c.layers * c.batch * c.seq * c.embed  # the input of every layer, in bf16
    assert ((('layers',), ('batch',), ('norm_seq',), ('act',)), n_bytes) in stored


def test_experts():
    found = products(find_model(*experts_step(), {}))
    assert 'batch expert place, batch act -> expert place act' in found
    assert 'expert place act, expert embed mlp -> expert place mlp' in found
    assert 'expert place act, expert place mlp -> expert embed mlp' in found


def test_convolution():
    @sharded(
        'high wide colors features', 'batch h w colors', out=('high wide colors features', None)
    )
    def step(kernel, images):
        def loss(kernel):
            y = jax.lax.conv_general_dilated(
                images, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
            )
            return jnp.sum(einshard(y, 'batch h w features') ** 2)

        return kernel - jax.grad(loss)(kernel), 0

    model = find_model(step, (f32(3, 3, 4, 8), f32(16, 32, 32, 4)), {})
    found = products(model)
    flops = 2 * 16 * 32 * 32 * 3 * 3 * 4 * 8
    assert {name: product.flops for name, product in found.items()} == {
        'batch h w colors, high wide colors features -> batch h w features': flops,
        'batch h w colors, batch h w features -> high wide colors features': flops,
    }


def test_ragged_dot():
    step = sharded('tokens act', 'expert embed mlp', 'expert')(jax.lax.ragged_dot)
    shapes = f32(64, 8), f32(4, 8, 16), f32(4, dtype='int32')
    (product,) = find_model(step, shapes, {}).costly_ops
    assert text(product) == 'tokens act, expert embed mlp -> tokens mlp'
    assert product.flops == 2 * 64 * 8 * 16


def test_decoding():
    rules = Rules([('w', 'embed mlp')])

    @sharded(rules, 'batch length mlp', 'batch embed', donate_argnames='cache')
    def decode(weights, cache, x):
        new = einshard(x @ weights['w'], 'batch mlp')
        return jax.lax.dynamic_update_slice(cache, new[:, None], (0, 3, 0))

    model = find_model(decode, ({'w': f32(16, 32), 'b': None}, f32(8, 10, 32), f32(8, 16)), {})
    assert [x.is_state for x in model.arrays] == [False, True, False]
    assert model.results == ()
    assert list(products(model)) == ['batch embed, embed mlp -> batch mlp']


@pytest.mark.parametrize('options', [{}, {'donate_argnames': 'weights'}])
def test_a_batch_may_be_a_pytree(options):
    @sharded(MLP_RULES, 'batch act', out=(MLP_RULES, None), **options)
    def step(weights, batch):
        h = einshard(jax.nn.relu(batch['x'] @ weights['up']), 'batch mlp')
        return weights, jnp.sum((h @ weights['down'] - batch['y']) ** 2)

    weights, batch = {'up': f32(16, 32), 'down': f32(32, 16)}, {'x': f32(64, 16), 'y': f32(64, 16)}
    model = find_model(step, (weights, batch), {})
    assert [x.is_state for x in model.arrays] == [True, True, False, False]


def test_jitted_function_with_names_inside():
    @jax.jit
    def mlp(weights, x):
        weights = einshard(weights, MLP_RULES)
        h = jax.nn.relu(einshard(x, 'batch act') @ weights['up'])
        return einshard(h @ weights['down'], 'batch act')

    weights = {'up': f32(16, 32), 'down': f32(32, 16)}
    model = find_model(mlp, (weights, f32(64, 16)), {})
    names = [x.names for x in model.arrays]
    assert names == [(('mlp',), ('embed',)), (('embed',), ('mlp',)), (('batch',), ('act',))]
    found = set(products(model))
    assert found == {'batch act, embed mlp -> batch mlp', 'batch mlp, mlp embed -> batch act'}


def test_flax_names():
    linen = pytest.importorskip('flax.linen')
    init = linen.with_logical_partitioning(linen.initializers.ones, ('embed', 'mlp'))
    layer = linen.Dense(32, kernel_init=init, use_bias=False)
    weights = jax.eval_shape(layer.init, jax.random.key(0), f32(8, 16))
    model = find_model(layer.apply, (weights, f32(8, 16)), {})
    assert model.sizes == {'embed': 16, 'mlp': 32}
    assert list(products(model)) == ['. ., embed mlp -> . mlp']


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
        found = find_model(function, (weights, *rest), {})
        assert found.unnamed_data == ("'batch/tokens' int32[16,32]",)
    for function in (jax.grad(named), jax.jit(jax.grad(named))):
        assert find_model(function, (weights, *rest), {}).unnamed_data == ()
    for spec in ('batch ...', 'batch seq'):
        specs = {'weights': None, 'batch': spec, 'key': None, 'scale': None}
        assert find_model(sharded(**specs)(jax.grad(loss)), (weights, *rest), {}).unnamed_data == ()


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
        model = find_model(lambda x, w: x @ w.value, (f32(8, 16), w), {})
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
    model = find_model(nnx.jit(lambda m, x: m.down(nnx.relu(m.up(x)))), (module, f32(8, 16)), {})
    assert model.sizes == {'mlp': 16, 'embed': 16}
    assert [*products(model)] == ['. ., embed mlp -> . mlp', '. mlp, mlp embed -> . embed']
    assert model.unnamed_data == ("'x' float32[8,16]",)


def test_mesh_axes_in_expressions():
    @sharded('batch act', 'embed mlp@tensor')
    def up(x, w):
        return x @ w

    model = find_model(up, (f32(8, 16), f32(16, 32)), {}, ['data', 'tensor'])
    assert model.sizes == {'batch': 8, 'act': 16, 'embed': 16}
    assert list(products(model)) == ['batch act, embed tensor -> batch tensor']


def test_no_names():
    def up(weights, x):
        return x @ weights['w']

    assert find_model(up, ({'w': f32(16, 32), 'b': f32(32)}, f32(8, 16)), {}) is None


# --- costs, by hand -------------------------------------------------------------------------------

T, D, F = 64, 16, 32
GRADIENTS = WEIGHTS = 2 * 4 * D * F


def evaluate(chip=SLOW, step=None, **axes):
    """The estimate for four devices along x; `step` is a function with its arguments."""
    model = find_model(*(step or mlp_step(T, D, F)), {})
    names = tuple((name, axes.get(name, ())) for name in model.sizes)
    return Estimator(model, jax.devices()[:4], chip).evaluate(Candidate((('x', 4),), names))


def bound(evaluation, resource):
    return {bound.resource: bound.seconds for bound in evaluation.bounds}[resource]


X = ('x',)


@pytest.mark.parametrize(
    ('axes', 'sent_by'),
    [
        ({'batch': X}, {('all-reduce', 'gradients'): 2 * GRADIENTS * 3 // 4}),
        (
            {'batch': X, 'embed': X},
            {
                ('all-gather', 'weights'): WEIGHTS * 3 // 4,
                ('reduce-scatter', 'gradients'): GRADIENTS * 3 // 4,
            },
        ),
        ({'mlp': X}, {('all-reduce', 'activations'): 2 * 4 * T * D * 3 // 4}),
        ({}, {}),
    ],
    ids=['data', 'fsdp', 'tensor', 'replicated'],
)
def test_bytes_that_an_mlp_sends(axes, sent_by):
    found = evaluate(**axes)
    assert found.sent_by == sent_by
    assert found.network_bytes == sum(sent_by.values())
    parts = 4 if axes else 1
    assert bound(found, 'compute') == 5 * 2 * T * D * F / parts
    assert found.costs_from == 'estimate'


def test_bounds_of_an_mlp():
    found = evaluate(batch=X, embed=X)
    # each device is sent 3/4 of the weights, and of the terms of the gradients
    assert bound(found, 'network') == WEIGHTS * 3 / 4 + GRADIENTS * 3 / 4
    # arguments are read, the weights are written
    assert bound(found, 'HBM') == (2 * WEIGHTS + 4 * T * D) / 4
    assert evaluate(chip=None, batch=X, embed=X).bounds == ()
    assert evaluate(chip=None, batch=X, embed=X).sent == {'x': 3 * (WEIGHTS + GRADIENTS) // 4}


def test_axes_with_the_names_of_mesh_axes():
    model = find_model(sharded('x y', 'y z')(jnp.matmul), (f32(64, 16), f32(16, 32)), {})
    candidate = Candidate((('x', 2), ('y', 2)), (('x', ()), ('y', ('x',)), ('z', ('y',))))
    found = Estimator(model, jax.devices()[:4], SLOW).evaluate(candidate)
    assert found.sent == {'x': 2 * (4 * 64 * 32 // 2) * 1 // 2}  # an all-reduce of columns


def test_gathers_of_a_scan():
    c = Sizes()
    sent_by = evaluate(step=transformer_step(c), batch=X, embed=X).sent_by
    each = 2 * c.embed * c.head * c.heads + c.embed * c.head * c.kv + 2 * c.embed * c.mlp
    # in bf16: forward and backward, and the table for the lookup and the logits, forward and back
    table = c.vocab * c.embed
    least = 2 * 2 * c.layers * each
    most = least + 2 * 3 * table + 4 * c.layers * c.embed
    assert least * 3 / 4 <= sent_by['all-gather', 'weights'] <= most * 3 / 4


def test_accumulated_gradients_are_reduced_for_each_piece():
    one, four = (
        evaluate(step=transformer_step(pieces=n), batch=X, embed=X).sent_by for n in (1, 4)
    )
    ratio = four['reduce-scatter', 'gradients'] / one['reduce-scatter', 'gradients']
    assert ratio == pytest.approx(4, rel=0.01)


def test_memory():
    step = transformer_step()
    replicated, fully_sharded = evaluate(step=step), evaluate(step=step, batch=X, embed=X)
    _, (weights, *_) = step
    states = 3 * 4 * sum(weight.size for weight in weights.values())
    assert replicated.memory > states
    assert fully_sharded.memory < replicated.memory / 3


def test_a_sum_is_scattered_before_the_rest_is_reduced():
    """The einsum 'b k, k n -> b n' with k over two mesh axes, and b of the result over one."""
    x, y = MeshAxis(4, 2), MeshAxis(1, 4)
    left, right = OpArray((0, 1), ((), ('k',)), 2**20), OpArray((1, 2), (('k',), ()), 2**20)
    out = OpArray((0, 2), (('b',), ()), 2**10)
    matmul = CostlyOp('contraction', (left, right), out, 2**30, 'f32', 1)
    strategy = fastest_strategy(matmul, {'k': (x, y), 'b': (x,)}, 1.0, lambda kind, axes: 1e-6)
    found = [(c.kind, c.axes, c.bytes) for c in strategy.collectives]
    assert found == [('reduce-scatter', (x,), 2**10), ('all-reduce', (y,), 2**9)]
