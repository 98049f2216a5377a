"""What collectives send: roles, paths and executions that follow from how a program is written."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from hlo.read import collectives_of, origins_of, outputs_from, payloads_of, reshards_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of, shardings

from einshard import explain, topology

PLATFORMS = ['cpu', 'tpu']


def mesh_for(platform, **axes):
    if platform == 'tpu':
        pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
        return topology('v5e:2x4', **axes)
    return mesh_of(**axes)


def shaper(mesh):
    """A function that makes shapes: sizes, then the mesh axis of each array axis."""

    def shape(*sizes, spec=(), dtype='float32'):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    return shape


def held(mesh, *spec):
    return lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def sent(report, kind=''):
    """(role, paths, whether in the backward pass, executions) of each collective."""
    return {
        (c.role, c.of, c.is_backward, c.executions)
        for c in report.collectives
        if c.kind.startswith(kind)
    }


def sgd(loss):
    def step(params, *data):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, *data))

    return step


def trained(step, params, *data):
    jitted = jax.jit(step, donate_argnums=0, out_shardings=shardings(params))
    return explain(jitted, params, *data, tries=0)


# --- scanned weights ----------------------------------------------------------------------------

N = 4  # layers


@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('stacked', ['before', 'inside'])
@pytest.mark.parametrize('d', [128, 512])
def test_scanned_weights(platform, stacked, d):
    """FSDP: each weight is gathered in each layer of both passes; on TPU, small ones together."""
    mesh = mesh_for(platform, fsdp=8)
    shape, batch = shaper(mesh), held(mesh, 'fsdp')

    def loss(params, x):
        if stacked == 'inside':
            params = jax.tree.map(lambda *w: jnp.stack(w), *params)

        def layer(x, w):
            return batch(x + jax.nn.relu(x @ w['up']) @ w['down']), None

        return lax.scan(layer, x, params)[0].mean()

    f = 4 * d
    if stacked == 'inside':
        up, down = shape(d, f, spec=['fsdp']), shape(f, d, spec=[None, 'fsdp'])
        params = [{'up': up, 'down': down}] * N
        paths = [tuple(f'params/{i}/{name}' for i in range(N)) for name in ('up', 'down')]
    else:
        up, down = shape(N, d, f, spec=[None, 'fsdp']), shape(N, f, d, spec=[None, None, 'fsdp'])
        params = {'up': up, 'down': down}
        paths = [('params/up',), ('params/down',)]
    report = trained(sgd(loss), params, shape(1024, d, spec=['fsdp']))
    expected = {('weights', of, backward, N) for of in paths for backward in (False, True)}
    assert sent(report, 'all-gather') == expected
    assert {c.role for c in report.collectives} == {'weights', 'gradients'}
    for c in report.collectives:  # the paths of 'result' are those of 'params'
        assert c.role == 'weights' or set(c.of) <= {f'result{p[6:]}' for of in paths for p in of}


@pytest.mark.parametrize('platform', PLATFORMS)
def test_weights_of_collective_matmuls(platform):
    """libtpu gathers `up` in pieces, and multiplies those it has."""
    d, f = 1024, 4096
    mesh = mesh_for(platform, fsdp=8)
    shape, batch = shaper(mesh), held(mesh, 'fsdp')

    def loss(params, x):
        up, down = (params[name].astype(x.dtype) for name in ('up', 'down'))
        return jnp.mean(batch(x + jax.nn.silu(x @ up) @ down).astype('float32') ** 2)

    params = {'up': shape(d, f, spec=['fsdp']), 'down': shape(f, d, spec=[None, 'fsdp'])}
    x = shape(16, 512, d, spec=['fsdp'], dtype='bfloat16')
    report = explain(jax.jit(sgd(loss)), params, x, tries=0)
    if platform == 'tpu':
        assert any(c.sent is not None for c in report.collectives)
    paths = {(c.role, path) for c in report.collectives for path in c.of}
    assert paths == {
        (role, f'{tree}/{name}')
        for role, tree in (('weights', 'params'), ('gradients', 'result'))
        for name in params
    }
    assert all(c.of for c in report.collectives)


# --- weights that change in the step ------------------------------------------------------------

D = 256


@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('loop', [False, True])
def test_weights_that_the_step_updates_twice(platform, loop):
    """Two steps of gradient descent in one program: the second gathers new weights."""
    mesh = mesh_for(platform, fsdp=8)
    shape, batch = shaper(mesh), held(mesh, 'fsdp')
    step = sgd(lambda p, x: jnp.mean(batch(jnp.tanh(x @ p['w'])) ** 2))

    def unrolled(params, x):
        return step(step(params, x[0]), x[1])

    def looped(params, x):
        return lax.scan(lambda p, x: (step(p, x), None), params, x)[0]

    params, x = {'w': shape(D, D, spec=['fsdp'])}, shape(2, 512, D, spec=[None, 'fsdp'])
    report = trained(looped if loop else unrolled, params, x)
    gathers = [c for c in report.collectives if c.kind == 'all-gather']
    assert [(c.role, c.of, c.executions) for c in gathers] == (
        [('weights', ('params/w',), 2)] if loop else 2 * [('weights', ('params/w',), 1)]
    )
    sums = [c for c in report.collectives if c.kind != 'all-gather']
    assert {(c.role, c.of) for c in sums} == {('gradients', ('result/w',))}


def test_a_carry_that_starts_as_an_argument_is_not_the_argument():
    """Activations start as the batch, and each iteration adds to them."""
    mesh = mesh_of(data=4, tensor=2)
    shape = shaper(mesh)

    def loss(params, x):
        def layer(x, w):
            y = held(mesh, 'data')(x) @ w  # the rows of x are also sharded over tensor
            return held(mesh, ('data', 'tensor'))(x + y), None

        return jnp.mean(lax.scan(layer, x, params['w'])[0] ** 2)

    params = {'w': shape(N, D, D)}
    report = explain(jax.jit(sgd(loss)), params, shape(64, D, spec=[('data', 'tensor')]), tries=0)
    gathers = [c for c in report.collectives if c.kind == 'all-gather']
    assert {(c.role, c.of, c.executions) for c in gathers} == {('activations', (), N)}


# --- inference ----------------------------------------------------------------------------------


def test_a_cache_of_a_loop_over_tokens():
    """Each token is added to a cache that is sharded over its length; attention reads all of it."""
    mesh = mesh_of(data=8)
    shape, on_all = shaper(mesh), held(mesh)
    b, t = 8, 64

    def decode(params, cache, x):
        def token(carry, i):
            cache, x = carry
            k = lax.dynamic_update_slice_in_dim(cache['k'], (x @ params['k'])[:, None], i, 1)
            k = held(mesh, None, 'data')(k)
            scores = jnp.einsum('bd,btd->bt', x @ on_all(params['q']), on_all(k))
            return ({'k': k}, x + jnp.tanh(jnp.einsum('bt,btd->bd', scores, k))), None

        return lax.scan(token, (cache, x), jnp.arange(16))[0]

    report = explain(
        jax.jit(decode, donate_argnums=1),
        {'k': shape(D, D), 'q': shape(D, D, spec=['data'])},
        {'k': shape(b, t, D, spec=[None, 'data'])},
        shape(b, D),
        tries=0,
    )
    roles = {c.of: (c.role, c.executions) for c in report.collectives if c.kind == 'all-gather'}
    assert roles['cache/k',] == ('cache', 16)
    assert roles['params/q',][0] == 'weights'


@pytest.mark.parametrize('platform', PLATFORMS)
def test_quantized_weights(platform):
    mesh = mesh_for(platform, fsdp=8)
    shape, on_all, on_rows = shaper(mesh), held(mesh), held(mesh, 'fsdp')

    def apply(params, x):
        return on_rows(x @ (on_all(params['q']).astype('float32') * params['scale']))

    params = {'q': shape(D, D, spec=['fsdp'], dtype='int8'), 'scale': shape(D)}
    [gather] = explain(jax.jit(apply), params, shape(512, D, spec=['fsdp']), tries=0).collectives
    assert (gather.kind, gather.role, gather.of) == ('all-gather', 'weights', ('params/q',))


# --- several arrays in one collective, and gathers in another form ------------------------------

HEADER = """HloModule jit_step, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (w: f32[8,8], s: f32[8], v: f32[8,8], x: f32[8,8]) -> (f32[8,8], f32[8], f32[32,8]) {
  %w = f32[8,8]{1,0} parameter(0)
  %s = f32[8]{0} parameter(1)
  %v = f32[8,8]{1,0} parameter(2)
  %x = f32[8,8]{1,0} parameter(3)
  %zero = f32[] constant(0)
  %zeros = f32[8,8]{1,0} broadcast(%zero), dimensions={}
  %change = f32[8,8]{1,0} multiply(%w, %x), metadata={op_name="jit(step)/transpose(jvp())/mul"}
  %new_w = f32[8,8]{1,0} subtract(%w, %change)
  %new_s = f32[8]{0} reduce(%change, %zero), dimensions={0}, to_apply=%add
  %wide = f32[8,8]{1,0} broadcast(%s), dimensions={1}
  %scaled = f32[8,8]{1,0} multiply(%w, %wide)
  %is_even = pred[8,8]{1,0} compare(%x, %v), direction=LT
  %chosen = f32[8,8]{1,0} select(%is_even, %zeros, %w)
  %mixed = f32[8,8]{1,0} add(%w, %x)
  %row = f32[1,8]{1,0} reshape(%new_s)
  %first = s32[] constant(0)
  %patched = f32[8,8]{1,0} dynamic-update-slice(%v, %row, %first, %first)
"""
FOOTER = """
  ROOT %out = (f32[8,8]{1,0}, f32[8]{0}, f32[32,8]{1,0}) tuple(%new_w, %new_s, %y)
}
"""
COMBINED = f"""{HEADER.rstrip()}
  %both = (f32[32,8]{{1,0}}, f32[32,8]{{1,0}}) all-gather(%FIRST, %SECOND), \
channel_id=1, replica_groups=[1,4]<=[4], dimensions={{0}}, use_global_device_ids=true
  %y = f32[32,8]{{1,0}} get-tuple-element(%both), index=1{FOOTER}"""
PADDED = f"""{HEADER.rstrip()}
  %places = f32[32,8]{{1,0}} broadcast(%zero), dimensions={{}}
  %device = u32[] partition-id()
  %offsets = s32[4]{{0}} constant({{0, 8, 16, 24}})
  %mine = s32[1]{{0}} dynamic-slice(%offsets, %device), dynamic_slice_sizes={{1}}
  %start = s32[] reshape(%mine)
  %none = s32[] constant(0)
  %padded = f32[32,8]{{1,0}} dynamic-update-slice(%places, %SHARD, %start, %none)
  %y = f32[32,8]{{1,0}} all-reduce(%padded), channel_id=1, replica_groups=[1,4]<=[4], \
to_apply=%add{FOOTER}"""


def payload_of(text, **operands):
    """The payload of the only collective of a step that updates w and s, and reads v and x."""
    for name, operand in operands.items():
        text = text.replace(name, operand)
    [collective] = payloads_of(text, 'wsvx', {0: 'out/w', 1: 'out/s'})
    return collective.role, collective.of


@pytest.mark.parametrize(
    ('first', 'second', 'payload'),
    [
        ('w', 'w', ('weights', ('w',))),
        ('scaled', 'scaled', ('weights', ('w', 's'))),
        ('w', 'x', ('weights', ('w', 'x'))),  # that of the first, of equal sizes
        ('x', 'w', ('activations', ('x', 'w'))),
        ('v', 'x', ('activations', ('v', 'x'))),  # v is no weight: the step does not update it
        ('mixed', 'mixed', ('activations', ())),
        ('patched', 'patched', ('activations', ())),  # v, of which a row is another value
    ],
)
def test_the_payload_of_several_arrays(first, second, payload):
    assert payload_of(COMBINED, FIRST=first, SECOND=second) == payload


@pytest.mark.parametrize(
    ('shard', 'payload'),
    [
        ('w', ('weights', ('w',))),
        ('new_w', ('weights', ('w',))),  # the new weight, in place of the old one
        ('scaled', ('weights', ('w', 's'))),
        ('chosen', ('weights', ('w',))),
        ('x', ('activations', ('x',))),
        ('mixed', ('activations', ())),
    ],
)
def test_an_all_reduce_of_padded_shards_gathers_them(shard, payload):
    assert payload_of(PADDED, SHARD=shard) == payload


def test_a_kernel_without_operands():
    text = """HloModule jit_f, num_partitions=4

ENTRY %main () -> f32[8] {
  ROOT %k = f32[8]{0} custom-call(), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"has_communication":true}}
}
"""
    [c] = payloads_of(text, [], {0: 'result'})
    assert (c.kind, c.role, c.of) == ('custom-call', 'activations', ('result',))


@pytest.mark.parametrize(
    ('sizes', 'payload'),
    [
        ((1 << 20, 1), ('activations', ())),  # the large array reaches no output
        ((1, 1 << 20), ('gradients', ('out/w', 'out/nu/w'))),
        ((1 << 20, 1, 1 << 19), ('activations', ())),
        ((2, 1, 2), ('activations', ())),  # of equal sizes, the first
    ],
)
def test_a_collective_of_several_arrays_is_named_after_most_bytes(sizes, payload):
    """As the all-reduce of logits, of a weight gradient and of the loss."""
    arrays = [f'f32[{n}]{{0}}' for n in (*sizes, 4)[:3]]
    text = f"""HloModule jit_f, num_partitions=4

ENTRY %main (a: f32[], b: f32[], c: f32[]) -> (f32[], f32[], f32[], f32[]) {{
  %a = {arrays[0]} parameter(0)
  %b = {arrays[1]} parameter(1)
  %c = {arrays[2]} parameter(2)
  %sums = ({', '.join(arrays)}) all-reduce(%a, %b, %c), replica_groups=[1,4]<=[4], to_apply=%add
  %x = {arrays[0]} get-tuple-element(%sums), index=0
  %gradient = {arrays[1]} get-tuple-element(%sums), index=1
  %loss = {arrays[2]} get-tuple-element(%sums), index=2
  %norm = f32[] dot(%x, %x), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}, \
metadata={{op_name="jit(f)/transpose(jvp())/dot_general"}}
  %w = {arrays[1]} parameter(3)
  %new = {arrays[1]} subtract(%w, %gradient)
  ROOT %both = (f32[], {arrays[1]}, {arrays[1]}, {arrays[2]}) \
tuple(%norm, %new, %gradient, %loss)
}}
"""
    outputs = {0: 'out/norm', 1: 'out/w', 2: 'out/nu/w', 3: 'out/loss'}
    [collective] = payloads_of(text, 'abcw', outputs)
    assert (collective.role, collective.of) == payload


def test_operands_of_a_collective_have_their_own_results():
    text = """HloModule jit_f, num_partitions=4

ENTRY %main (g: f32[8], h: f32[8]) -> (f32[8], f32[8], f32[32]) {
  %g = f32[8]{0} parameter(0)
  %h = f32[8]{0} parameter(1)
  %sums = (f32[8]{0}, f32[8]{0}) all-reduce(%g, %h), replica_groups=[1,4]<=[4], to_apply=%add
  %a = f32[8]{0} get-tuple-element(%sums), index=0
  %b = f32[8]{0} get-tuple-element(%sums), index=1
  %all = (f32[32]{0}, f32[32]{0}) all-gather(%g, %h), replica_groups=[1,4]<=[4], dimensions={0}
  %c = f32[32]{0} get-tuple-element(%all), index=1
  ROOT %out = (f32[8]{0}, f32[8]{0}, f32[32]{0}) tuple(%b, %a, %c)
}
"""
    uses = outputs_from(text)
    assert (uses['g'], uses['h']) == ({1}, {0, 2})
    assert origins_of(text, 2) == ({1}, False)


LOOP = """HloModule jit_f, num_partitions=4

%body (state: (s32[], f32[32,8], f32[8,8])) -> (s32[], f32[32,8], f32[8,8]) {
  %state = (s32[], f32[32,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %all = f32[32,8]{1,0} get-tuple-element(%state), index=1
  %sum = f32[8,8]{1,0} get-tuple-element(%state), index=2
BODY
  ROOT %new = (s32[], f32[32,8]{1,0}, f32[8,8]{1,0}) tuple(%next, %new_all, %new_sum)
}

%condition (state: (s32[], f32[32,8], f32[8,8])) -> pred[] {
  %state = (s32[], f32[32,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %five), direction=LT
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
BEFORE
  %zero = s32[] constant(0)
  %before = (s32[], f32[32,8]{1,0}, f32[8,8]{1,0}) tuple(%zero, %g, %x)
  %after = (s32[], f32[32,8]{1,0}, f32[8,8]{1,0}) while(%before), condition=%condition, body=%body
  ROOT %out = f32[8,8]{1,0} get-tuple-element(%after), index=2
}
"""
SLICED_LATER = """
  %device = u32[] partition-id()
  %offsets = s32[4]{0} constant({0, 8, 16, 24})
  %mine = s32[1]{0} dynamic-slice(%offsets, %device), dynamic_slice_sizes={1}
  %start = s32[] reshape(%mine)
  %zero = s32[] constant(0)
  %block = f32[8,8]{1,0} dynamic-slice(%all, %start, %zero), dynamic_slice_sizes={8,8}
  %new_sum = f32[8,8]{1,0} add(%sum, %block)
"""
SUMMED = """
  %wide = f32[32,8]{1,0} concatenate(%sum, %sum, %sum, %sum), dimensions={0}
  %change = f32[32,8]{1,0} custom-call(%wide), custom_call_target="f"
  %summed = f32[32,8]{1,0} all-reduce(%change), replica_groups=[1,4]<=[4], to_apply=%add
  %new_sum = f32[8,8]{1,0} slice(%all), slice={[0:8], [0:8]}
"""


def loop_of(before, body, new_all):
    """A loop over five iterations that begins with %g."""
    text = LOOP.replace('BEFORE', before).replace('BODY', body.strip('\n'))
    return text.replace('%new_all', new_all)


def test_a_gathered_array_that_a_loop_slices():
    """Each device keeps one block of what is gathered before the loop."""
    gather = '  %g = f32[32,8]{1,0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}'
    [reshard] = reshards_of(loop_of(gather, SLICED_LATER, new_all='%all'))
    assert reshard.after == ((0, 1, 2, 3), (0, 0, 0, 0))


def test_a_sum_that_a_later_iteration_uses():
    """As of gradients that are applied one step late."""
    filled = '  %nil = f32[] constant(0)\n  %g = f32[32,8]{1,0} broadcast(%nil), dimensions={}'
    assert outputs_from(loop_of(filled, SUMMED, new_all='%summed'))['summed'] == {0}


def test_a_collective_of_a_computation_that_a_branch_calls():
    text = """HloModule jit_f, num_partitions=4

%summed (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %sum = f32[8]{0} all-reduce(%a), replica_groups=[1,4]<=[4], to_apply=%add
}

%yes (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %called = f32[8]{0} call(%b), to_apply=%summed
}

%no (c: f32[8]) -> f32[8] {
  ROOT %c = f32[8]{0} parameter(0)
}

ENTRY %main (p: pred[], x: f32[8]) -> f32[8] {
  %p = pred[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %y = f32[8]{0} conditional(%p, %x, %x), true_computation=%yes, false_computation=%no
}
"""
    [collective] = collectives_of(text)
    assert collective.in_branch
    assert origins_of(text, 0) == ({1}, True)  # the sum, and x of the other branch


@pytest.mark.parametrize('platform', PLATFORMS)
def test_sums_of_activations_before_an_embedding(platform):
    """The gradient of a table is a scatter, which XLA expands to a loop over its rows."""
    mesh = mesh_for(platform, data=2, tensor=4)
    shape = shaper(mesh)
    d, f = 128, 512

    def loss(params, tokens):
        x = params['table'][tokens]
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True))  # its gradient has x itself
        x = x + jax.nn.relu(x @ params['up']) @ params['down']
        return (x**4).mean()

    up, down = shape(d, f, spec=[None, 'tensor']), shape(f, d, spec=['tensor'])
    params = {'table': shape(256, d), 'up': up, 'down': down}
    report = trained(sgd(loss), params, shape(16, 64, spec=['data'], dtype='int32'))
    found = {(c.along, c.role) for c in report.collectives}
    assert found == {('tensor', 'activations'), ('data', 'gradients')}


# --- executions and columns ---------------------------------------------------------------------


def test_a_known_loop_in_an_unknown_one():
    mesh = mesh_of(data=2, tensor=4)
    shape = shaper(mesh)
    d, f, rows, length = 256, 512, 64, 4

    def known(w, x, n):
        layer = lambda x, _: (jnp.tanh(x @ w['a']) @ w['b'], None)  # noqa: E731
        return lax.scan(layer, x, None, length=length)[0]

    def unknown(w, x, n):
        def body(state):
            return known(w, state[0], n), state[1] + 1

        return lax.while_loop(lambda state: state[1] < n, body, (x, 0))[0]

    w = {'a': shape(d, f, spec=[None, 'tensor']), 'b': shape(f, d, spec=['tensor'])}
    arguments = w, shape(rows, d, spec=['data']), shape(dtype='int32')
    reports = [explain(jax.jit(g), *arguments, chip='TPU v5e', tries=0) for g in (known, unknown)]
    for report, is_exact in zip(reports, (True, False), strict=True):
        [c] = report.collectives
        assert (c.kind, c.executions, c.is_exact) == ('all-reduce', length, is_exact)
        # a ring of 4 sends 2 * 3/4 of the array
        assert c.total_bytes == length * (rows // 2 * d * 4) * 2 * 3 // 4
        assert report.network_bytes == c.total_bytes
        assert report.flops == length * 2 * 2 * (rows // 2) * d * (f // 4)
    for resource in ('compute', 'network'):
        first, second = (
            [bound.seconds for bound in report.bounds if bound.resource == resource]
            for report in reports
        )
        assert first == second
        assert first
    assert f'1 x {length} x ?' in str(reports[1].collectives)
    assert '?' not in str(reports[0].collectives)


def test_two_matmuls_on_one_line():
    """Both sum over devices; the line and the arrays are the same, but not the columns."""
    mesh = mesh_of(tensor=8)
    shape, on_all = shaper(mesh), held(mesh)
    in_columns = held(mesh, None, 'tensor')

    def f(x, a, b):
        return on_all(in_columns(on_all(x @ a)) @ b)

    x, w = shape(64, D, spec=[None, 'tensor']), shape(D, D, spec=['tensor'])
    report = explain(jax.jit(f), x, w, w, tries=0)
    lines, first = inspect.getsourcelines(f)
    [number] = [first + i for i, line in enumerate(lines) if 'return' in line]
    [text] = [line for line in lines if 'return' in line]
    columns = {text.index(product) + 1 for product in ('x @ a', 'in_columns(')}
    rows = report.collectives
    assert {c.source for c in rows} == {f'{__file__}:{number}'}
    assert {c.column for c in rows} == columns
    for column in columns:
        assert f'test_explain_roles.py:{number}:{column}' in str(rows)


JOINED = """HloModule jit_step, num_partitions=4

ENTRY %main (a: f32[8], b: f32[4], c: f32[2]) -> (f32[8], f32[4], f32[2]) {
  %a = f32[8]{0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %c = f32[2]{0} parameter(2)
  %joined = f32[14]{0} concatenate(%a, %b, %c), dimensions={0}
  %sum = f32[14]{0} all-reduce(%joined), replica_groups=[1,4]<=[4], to_apply=%add
  %first = f32[8]{0} slice(%sum), slice={[0:8]}
  %rest = f32[6]{0} slice(%sum), slice={[8:14]}
  %second = f32[4]{0} slice(%rest), slice={[0:4]}
  %third = f32[2]{0} slice(%SOURCE), slice={[START:END]}
  ROOT %all = (f32[8]{0}, f32[4]{0}, f32[2]{0}) tuple(%first, %second, %third)
}
"""


@pytest.mark.parametrize(
    ('third', 'uses'),
    [
        (('sum', '12', '14'), {'a': {0}, 'b': {1}, 'c': {1, 2}}),
        (('rest', '4', '6'), {'a': {0}, 'b': {1, 2}, 'c': {1, 2}}),
    ],
)
def test_arrays_that_xla_joins_for_one_all_reduce(third, uses):
    """A slice of their sum has one or several of them: 'first' one, and 'rest' two."""
    text = JOINED
    for name, value in zip(('SOURCE', 'START', 'END'), third, strict=True):
        text = text.replace(name, value)
    found = outputs_from(text)
    assert {name: found[name] for name in 'abc'} == uses
