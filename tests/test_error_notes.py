"""Notes that `sharded` adds to errors of JAX."""

import contextlib
import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import is_of_sharding_types, mesh_of

from einshard import (
    EinshardError,
    Rules,
    device_mesh,
    einshard,
    explain,
    make_sharding,
    per_device,
    sharded,
)

EXPLICIT = AxisType.Explicit
MESH = mesh_of(types=EXPLICIT, data=4, tensor=2)
AUTO = mesh_of(data=4, tensor=2)
X, W_IN, W_OUT = (np.ones(shape, np.float32) for shape in ((32, 64), (64, 128), (128, 16)))
SPECS = 'batch x -> batch@data x', 'x y -> x y@tensor', 'y z -> y@tensor z'


@sharded(*SPECS)
def mlp(x, w_in, w_out):
    hidden = jax.nn.relu(x @ w_in)
    return hidden @ w_out


def raised(function, *args, mesh=MESH):
    """What a call raises on a mesh."""
    with pytest.raises(Exception) as caught, jax.set_mesh(mesh):  # noqa: PT011
        function(*args)
    return caught.value


def notes_of(error):
    return [note for note in getattr(error, '__notes__', []) if note.startswith('einshard: ')]


def note_of(function, *args, mesh=MESH):
    """The one note on the ShardingTypeError of a call."""
    error = raised(function, *args, mesh=mesh)
    assert is_of_sharding_types(error), repr(error)
    (note,) = notes_of(error)
    return note


def facts_of(note):
    return dict(re.findall(r'^  ([\w ]+): +(.*)$', note, re.MULTILINE))


def line_of(text):
    """The line of this file with a text, as notes show it."""
    lines = Path(__file__).read_text(encoding='utf-8').splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.strip() == text)
    return f'test_error_notes.py:{number}: {text}'


def test_jax_has_a_class_of_this_name():
    # if it moves, look at is_sharding_type_error; if it is public, use it there
    def add(x):
        return x + x.T

    error = raised(jax.jit(add), jax.device_put(X[:, :32], NamedSharding(MESH, P('data'))))
    assert is_of_sharding_types(error), type(error)
    assert not hasattr(jax.errors, 'ShardingTypeError')


def test_note_of_a_contraction():
    line = line_of('return hidden @ w_out')
    assert note_of(mlp, X, W_IN, W_OUT) == textwrap.dedent(f"""\
        einshard: JAX cannot infer a sharding in mlp, because the mesh axes are Explicit
          line:           {line}
          operand 0:      float32[32@data,128@tensor]: axis 1 is sharded over 'tensor'
          operand 1:      float32[128@tensor,16], parameter 'w_out': \
axis 'y' is sharded over 'tensor'
          try:            out_sharding=make_sharding(expression), or einshard.einsum
          with Auto axes: jax.make_mesh((4, 2), ('data', 'tensor'), \
axis_types=(jax.sharding.AxisType.Auto,) * 2)""")


def test_the_mesh_of_the_note_works():
    auto = facts_of(note_of(mlp, X, W_IN, W_OUT))['with Auto axes']
    with jax.set_mesh(eval(auto)):
        result = mlp(X, W_IN, W_OUT)
    np.testing.assert_array_equal(result, np.full((32, 16), 64.0 * 128))


def test_auto_axes_of_the_canonical_mesh_and_of_operands():
    @sharded
    def add(x):
        return x + x.T

    note = note_of(sharded('a b -> a8 b2')(add), X[:, :32], mesh=device_mesh(axis_types=EXPLICIT))
    assert facts_of(note)['with Auto axes'] == 'device_mesh()'
    # without a mesh in context it is that of the operands
    x = jax.device_put(X[:, :32], NamedSharding(MESH, P('data')))
    with pytest.raises(Exception, match='add operation') as caught:
        add(x)
    (note,) = notes_of(caught.value)
    facts = facts_of(note)
    assert facts['with Auto axes'].startswith("jax.make_mesh((4, 2), ('data', 'tensor')")
    assert facts['operand 0'].endswith("parameter 'x': axis 0 is sharded over 'data'")


IN_X = "float32[8@data,8@tensor], parameter 'x': axis 'a' is sharded over 'data'"
IN_Y = "float32[8@tensor,8@data], parameter 'y': axis 'a' is sharded over 'tensor'"
EINSHARD = 'einshard(operand, expression)'
# operation, the operands of the note, the start of its advice
OPERATIONS = {
    'indexing': (lambda x, y: x[jnp.zeros(4, int)], [IN_X], 'table.at[index].get(out_sharding='),
    'update': (
        lambda x, y: x.at[jnp.zeros(4, int)].set(1.0),
        [IN_X],
        'table.at[index].set(values, out_sharding=',
    ),
    'reshaping': (lambda x, y: x.reshape(2, 32), [IN_X], 'out_sharding=make_sharding(expression)'),
    'addition': (lambda x, y: x + y, [IN_X, IN_Y], EINSHARD),
    'concatenation': (lambda x, y: jnp.concatenate([x, y]), [IN_X, IN_Y], EINSHARD),
    'slicing': (lambda x, y: x[:3], [IN_X], EINSHARD),
}


@pytest.mark.parametrize('operation', OPERATIONS)
def test_notes_of_other_operations(operation):
    function, operands, advice = OPERATIONS[operation]
    decorated = sharded('a b -> a@data b@tensor', 'a b -> a@tensor b@data')(function)
    facts = facts_of(note_of(decorated, np.ones((8, 8), 'f4'), np.ones((8, 8), 'f4')))
    shown = [fact for label, fact in facts.items() if label.startswith('operand')]
    for fact, start in zip(shown[: len(operands)], operands, strict=True):
        assert fact.startswith(start)
    assert facts['try'].startswith(advice)


# --- what the line that calls JAX can do ---------------------------------------------------------

TABLE, LOGITS = (
    np.arange(128, dtype='f4').reshape(16, 8),
    np.arange(512, dtype='f4').reshape(32, 16),
)
IDS, LABELS, KEY = np.arange(16)[::-1] * 3 % 16, np.arange(32) % 16, jax.random.key(0)
COUNTS = np.full(16, 2)
RESHARD = 'einshard(operand, expression), to reshard an operand first'
OPTION = f'out_sharding=make_sharding(expression), or {RESHARD}'
CALL = f'{RESHARD}, or jax.sharding.auto_axes(function, out_sharding=make_sharding(expression))'


def repeat(x, counts, **options):
    return jnp.repeat(x, counts, axis=0, total_repeat_length=32, **options)


def cross_entropy(logits, labels):
    optax = pytest.importorskip('optax')
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def running_sum(x):
    return jax.lax.scan(lambda total, row: (total + row, total + row), jnp.zeros(8), x)[1]


ROW, FEW = 'v@data d', 'b@tensor'
AT = 'table.at[index].get(out_sharding=make_sharding(expression))'
# {name: (function, expressions and values of its operands, the placement of its result, what the
# note says)}
CALLS = {
    'take': (
        lambda t, i: jnp.take(t, i, axis=0),
        {ROW: TABLE, FEW: IDS},
        'b@tensor d',
        CALL,
    ),
    'indexing': (lambda t, i: t[i], {ROW: TABLE, FEW: IDS}, 'b@tensor d', AT),
    'take_along_axis': (
        lambda t, i: jnp.take_along_axis(t, i, axis=0),
        {ROW: TABLE, 'b d': np.tile(IDS[:, None], 8)},
        'b d',
        CALL,
    ),
    'segment_sum': (
        lambda x, i: jax.ops.segment_sum(x, i, 16),
        {ROW: TABLE, 'b@data': IDS},
        'b d@tensor',
        OPTION,
    ),
    'optax': (cross_entropy, {'b@data v@tensor': LOGITS, 'b@data': LABELS}, 'b@data', CALL),
    'permutation': (lambda x: jax.random.permutation(KEY, x), {ROW: TABLE}, 'v d', OPTION),
    'repeat': (repeat, {ROW: TABLE, 'b': COUNTS}, 'v@data d', OPTION),
    'reshape': (lambda x: x.reshape(128), {'v d@tensor': TABLE}, 'n@tensor', OPTION),
    'scan': (running_sum, {ROW: TABLE}, 'v d@tensor', RESHARD),
    'map': (lambda x: jax.lax.map(jnp.cumsum, x), {ROW: TABLE}, 'v@data d', RESHARD),
}
WITH_OPTION = {
    'indexing': lambda t, i, s: t.at[i].get(out_sharding=s),
    'segment_sum': lambda x, i, s: jax.ops.segment_sum(x, i, 16, out_sharding=s),
    'permutation': lambda x, s: jax.random.permutation(KEY, x, out_sharding=s),
    'reshape': lambda x, s: x.reshape(128, out_sharding=s),
    'repeat': lambda x, counts, s: repeat(x, counts, out_sharding=s),
}


def on_mesh(operands):
    with jax.set_mesh(MESH):
        return [einshard(x, spec) for spec, x in operands.items()]


@pytest.mark.parametrize('how', ['sharded', 'explain', 'explain in a mesh'])
@pytest.mark.parametrize('name', CALLS)
def test_notes_say_what_the_line_can_do(name, how):
    function, operands, _, fix = CALLS[name]
    if name == 'optax':
        pytest.importorskip('optax')
    args = on_mesh(operands)
    if name == 'segment_sum' and how == 'explain':
        pytest.skip('JAX needs a mesh in context here')
    if how == 'sharded':
        error = raised(sharded(*operands)(function), *args)
    else:
        context = jax.set_mesh(MESH) if how == 'explain in a mesh' else contextlib.nullcontext()
        with context, pytest.raises(Exception, match=r'(?i)shard|replicated') as caught:
            explain(jax.jit(function), *args)
        error = caught.value
    is_ours = isinstance(error, EinshardError)
    assert is_ours == (how != 'sharded' and name in ('repeat', 'scan', 'map'))
    text = str(error) if is_ours else '\n'.join(notes_of(error))
    facts = facts_of(text)
    assert facts['try'] == fix
    assert 'test_error_notes.py:' in facts['line']
    assert ('library line' in facts) == (name == 'optax')


@pytest.mark.parametrize('name', CALLS)
def test_each_way_out_gives_the_values_of_one_device(name):
    function, operands, out, fix = CALLS[name]
    args, expected = on_mesh(operands), function(*operands.values())

    def check(way):
        with jax.set_mesh(MESH):
            np.testing.assert_allclose(jax.jit(way)(*args), expected, rtol=1e-6)

    # to reshard the operands helps each of them
    check(lambda *xs: function(*(einshard(x, '... -> ...') for x in xs)))
    with jax.set_mesh(MESH):
        sharding = make_sharding(out)
    if fix == CALL:
        check(jax.sharding.auto_axes(function, out_sharding=sharding))
    if name in WITH_OPTION:
        check(lambda *xs: WITH_OPTION[name](*xs, sharding))


def test_operands_of_each_kind_in_notes():
    @sharded(Rules([('w', 'x y -> x@tensor y')], default='... -> * ...'), None)
    def layer(params, x):
        return x @ params['up']['w']

    with jax.set_mesh(MESH):
        x = einshard(X, 'a b -> a b@tensor')
    facts = facts_of(note_of(layer, {'up': {'w': W_IN}, 'b': X}, x))
    assert facts['operand 0'].startswith("float32[32,64@tensor], parameter 'x': axis 1 is sharded")
    assert facts['operand 1'].startswith(
        "float32[64@tensor,128], parameter 'params/up/w': axis 'x' is sharded over 'tensor'"
    )

    @per_device('b x -> b@data x', 'x y -> x y', out='b y -> b@data y', axis_names='data')
    def product(x, w):
        return einshard(x, 'b x -> b x@tensor') @ einshard(w, 'x y -> x@tensor y')

    facts = facts_of(note_of(product, X, W_IN))
    assert facts['operand 0'] == "float32[8,64@tensor]{V:data}: axis 1 is sharded over 'tensor'"


def loss(x, w_in, w_out):
    return mlp(x, w_in, w_out).sum()


def with_out():
    return sharded(*SPECS, out=lambda path, leaf: '... -> * ...')(mlp.__wrapped__)


@pytest.mark.parametrize(
    'call',
    {
        'lower': with_out().lower,
        'trace': with_out().trace,
        'eval_shape': with_out().eval_shape,
        'out_shardings': with_out().out_shardings,
        'jit': jax.jit(loss),
        'grad': jax.grad(loss),
        'vmap': jax.jit(jax.vmap(loss, in_axes=(None, None, None), axis_size=2)),
        'another sharded': sharded(lambda *args: mlp(*args) * 2),
    }.values(),
)
def test_the_innermost_function_adds_the_only_note(call):
    note = note_of(call, X, W_IN, W_OUT)
    assert ' in mlp, ' in note
    assert facts_of(note)['line'] == line_of('return hidden @ w_out')


def test_in_a_scan_the_line_is_that_of_the_body():
    @sharded('layer x y -> layer x@tensor y', 'b x -> b x@tensor')
    def tower(layers, h):
        def body(h, layer):
            return h @ layer, None

        return jax.lax.scan(body, h, layers)[0]

    facts = facts_of(note_of(tower, np.ones((3, 64, 64), 'f4'), X))
    assert facts['line'] == line_of('return h @ layer, None')


@pytest.mark.parametrize('mode', ['off', 'quiet_remove_frames', 'remove_frames', 'tracebackhide'])
def test_notes_survive_the_filtering_of_tracebacks(mode):
    usual = jax.config.jax_traceback_filtering
    jax.config.update('jax_traceback_filtering', mode)
    try:
        note_of(mlp, X, W_IN, W_OUT)
    finally:
        jax.config.update('jax_traceback_filtering', usual)


class ShardingTypeError(Exception):
    """The user's own."""


@pytest.mark.parametrize(
    'error', [ShardingTypeError('x'), ValueError('got 32 and 64'), TypeError('32 and 64')]
)
def test_exceptions_of_the_user_stay_as_they_are(error):
    @sharded('x y -> x@data y', 'x y -> x y@tensor')
    def fails(x, w):
        raise error

    assert raised(fails, X, W_IN) is error
    assert not notes_of(error)


def test_our_own_errors_have_no_note():
    assert not notes_of(raised(mlp, X[:31], W_IN, W_OUT))


# ---------------------------------------------------------------------- sizes that do not match


def layer(x, w):
    return x @ w


def add(x, w):
    return x + w


def tower(x, params):
    return x @ params['up'] @ params['down']


W_SHORT = W_IN[:62]
BX_XY = 'b x -> b* x', 'x y -> * x y'
X_DIFFERS = "axis 'x' has size 64 in parameter 'x' and 62 in 'w'"
# a function with specs, and the hint in the note
SIZES = {
    'matmul': (sharded(*BX_XY)(layer), X_DIFFERS),
    'einsum of jnp': (sharded(*BX_XY)(lambda x, w: jnp.einsum('bx,xy->by', x, w)), X_DIFFERS),
    'a leaf': (
        sharded('b x -> b* x', {'w': 'x y -> * x y'})(lambda x, w: x @ w['w']),
        "axis 'x' has size 64 in parameter 'x' and 62 in 'w/w'",
    ),
    'an ellipsis': (sharded('... x -> * ... x', 'x ... -> * x ...')(layer), X_DIFFERS),
    'two names': (
        sharded('y x -> y* x', 'x y -> * x y')(add),
        "axis 'y' has size 32 in parameter 'x' and 128 in 'w'; "
        "axis 'x' has size 64 in parameter 'x' and 62 in 'w'",
    ),
    'the same expression': (
        sharded('x y -> * x y', 'x y -> * x y')(add),
        "axis 'x' has size 32 in parameter 'x' and 62 in 'w'; "
        "axis 'y' has size 64 in parameter 'x' and 128 in 'w'",
    ),
    'other names': (sharded('a b -> a* b', 'c d -> * c d')(layer), None),
    'sizes that the error does not name': (sharded('b x -> b* x', 'y b -> * y b')(layer), None),
    'no specs': (sharded(layer), None),
    'PartitionSpecs': (sharded(P(None, 'tensor'), P(None, 'data'), mesh=MESH)(layer), None),
    'leaves that share an expression': (
        sharded('b x -> b* x', Rules([('', 'x y -> * x y')]))(tower),
        None,
    ),
}
# arguments in place of W_SHORT; x is 64 in 'up' and 62 in 'down', as two layers may have it
TREES = {
    'a leaf': {'w': W_SHORT},
    'leaves that share an expression': {'up': W_IN, 'down': W_SHORT},
}


@pytest.mark.parametrize('case', SIZES)
def test_shape_errors_show_the_named_sizes_that_differ(case):
    function, hint = SIZES[case]
    error = ValueError if case == 'einsum of jnp' else TypeError
    with pytest.raises(error) as caught:
        function(X, TREES.get(case, W_SHORT))
    assert type(caught.value) is error
    expected = f'einshard: in the specs of {function.__name__}, {hint}'
    assert notes_of(caught.value) == ([expected] if hint else [])


def test_sizes_that_differ_may_fit():
    f = sharded(*BX_XY)(lambda x, w: x @ w[:64])
    assert f(X, np.ones((65, 8), np.float32)).shape == (32, 8)


# ------------------------------------------------------------------ collectives of global arrays

REDUCED = {
    'sharded': lambda f, x: sharded('b d -> b@data d', mesh=AUTO)(f)(x),
    'lowered': lambda f, x: sharded('b d -> b@data d', mesh=AUTO)(f).lower(x),
    'under grad': lambda f, x: jax.grad(sharded('b d -> b@data d', mesh=AUTO)(f))(x),
    'explain': lambda f, x: explain(f, einshard(x, 'b d -> b@data d', mesh=AUTO)),
    'explain of jit': lambda f, x: explain(jax.jit(f), x),
}


@pytest.mark.parametrize('how', REDUCED)
@pytest.mark.parametrize('call', ['pmean', 'psum', 'all_gather', 'axis_index'])
def test_collectives_of_global_arrays_have_a_note(how, call):
    def loss(x):
        if call == 'axis_index':
            return x.sum() * jax.lax.axis_index('data')
        return getattr(jax.lax, call)(x.mean(), 'data')

    with pytest.raises(NameError) as caught:
        REDUCED[how](loss, X)
    (note,) = notes_of(caught.value)
    assert note.startswith("einshard: loss calls a collective over 'data', but no jax.shard_map")
    assert facts_of(note)['line'].startswith('test_error_notes.py:')
    assert 'x.mean(0)' in facts_of(note)['without them']


def test_the_advice_for_collectives_of_global_arrays():
    x = np.arange(64, dtype=np.float32).reshape(16, 4)
    by_shards = per_device('b d -> b@data d', out='d -> d', mesh=AUTO)(
        lambda x: jax.lax.pmean(x.mean(0), 'data')
    )
    for f in (sharded('b d -> b@data d', mesh=AUTO)(lambda x: x.mean(0)), by_shards):
        np.testing.assert_allclose(f(x), x.mean(0))


def test_other_name_errors_have_no_note():
    for call in (sharded('b d -> b@data d', mesh=AUTO)(lambda x: undefined), explain):  # noqa: F821
        args = [lambda x: undefined, X] if call is explain else [X]  # noqa: F821
        with pytest.raises(NameError, match='undefined') as caught:
            call(*args)
        assert notes_of(caught.value) == []
