"""Notes that `sharded` adds to errors of JAX."""

import contextlib
import re
import textwrap

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


def test_jax_has_a_class_of_this_name():
    # if it moves, look at is_sharding_type_error; if it is public, use it there
    def add(x):
        return x + x.T

    error = raised(jax.jit(add), jax.device_put(X[:, :32], NamedSharding(MESH, P('data'))))
    assert is_of_sharding_types(error), type(error)
    assert not hasattr(jax.errors, 'ShardingTypeError')


TRY = (
    'einshard(operand, expression) before the operation, or '
    'out_sharding=make_sharding(expression) where JAX has this option'
)


def test_note_of_a_contraction():
    assert note_of(mlp, X, W_IN, W_OUT) == textwrap.dedent(f"""\
        einshard: JAX cannot infer a sharding in mlp, because the mesh axes are Explicit
          try:            {TRY}
          with Auto axes: jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n)""")


def test_the_advice_for_a_contraction():
    expected = np.full((32, 16), 64.0 * 128)
    auto = jax.make_mesh((4, 2), ('data', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(auto):
        np.testing.assert_array_equal(mlp(X, W_IN, W_OUT), expected)

    @sharded(*SPECS)
    def with_option(x, w_in, w_out):
        hidden = jax.nn.relu(x @ w_in)
        return jnp.matmul(hidden, w_out, out_sharding=make_sharding('b z -> b@data z'))

    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(with_option(X, W_IN, W_OUT), expected)


# --- the ways out --------------------------------------------------------------------------------

TABLE, LOGITS = (
    np.arange(128, dtype='f4').reshape(16, 8),
    np.arange(512, dtype='f4').reshape(32, 16),
)
IDS, LABELS, KEY = np.arange(16)[::-1] * 3 % 16, np.arange(32) % 16, jax.random.key(0)
COUNTS = np.full(16, 2)


def repeat(x, counts, **options):
    return jnp.repeat(x, counts, axis=0, total_repeat_length=32, **options)


def cross_entropy(logits, labels):
    optax = pytest.importorskip('optax')
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def running_sum(x):
    return jax.lax.scan(lambda total, row: (total + row, total + row), jnp.zeros(8), x)[1]


ROW, FEW = 'v@data d', 'b@tensor'
# {name: (function, expressions and values of its operands, the placement of its result)}
CALLS = {
    'take': (
        lambda t, i: jnp.take(t, i, axis=0),
        {ROW: TABLE, FEW: IDS},
        'b@tensor d',
    ),
    'indexing': (lambda t, i: t[i], {ROW: TABLE, FEW: IDS}, 'b@tensor d'),
    'take_along_axis': (
        lambda t, i: jnp.take_along_axis(t, i, axis=0),
        {ROW: TABLE, 'b d': np.tile(IDS[:, None], 8)},
        'b d',
    ),
    'segment_sum': (
        lambda x, i: jax.ops.segment_sum(x, i, 16),
        {ROW: TABLE, 'b@data': IDS},
        'b d@tensor',
    ),
    'optax': (cross_entropy, {'b@data v@tensor': LOGITS, 'b@data': LABELS}, 'b@data'),
    'permutation': (lambda x: jax.random.permutation(KEY, x), {ROW: TABLE}, 'v d'),
    'repeat': (repeat, {ROW: TABLE, 'b': COUNTS}, 'v@data d'),
    'reshape': (lambda x: x.reshape(128), {'v d@tensor': TABLE}, 'n@tensor'),
    'scan': (running_sum, {ROW: TABLE}, 'v d@tensor'),
    'map': (lambda x: jax.lax.map(jnp.cumsum, x), {ROW: TABLE}, 'v@data d'),
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
def test_notes_say_what_to_write(name, how):
    function, operands, _ = CALLS[name]
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
    assert facts['try'] == TRY
    assert ('line' in facts) == is_ours


@pytest.mark.parametrize('name', CALLS)
def test_each_way_out_gives_the_values_of_one_device(name):
    function, operands, out = CALLS[name]
    args, expected = on_mesh(operands), function(*operands.values())

    def check(way):
        with jax.set_mesh(MESH):
            np.testing.assert_allclose(jax.jit(way)(*args), expected, rtol=1e-6)

    # to reshard the operands helps each of them
    check(lambda *xs: function(*(einshard(x, '... -> ...') for x in xs)))
    with jax.set_mesh(MESH):
        sharding = make_sharding(out)
    if name in ('take', 'take_along_axis', 'optax'):
        check(jax.sharding.auto_axes(function, out_sharding=sharding))
    if name in WITH_OPTION:
        check(lambda *xs: WITH_OPTION[name](*xs, sharding))


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
    assert 'x.mean(0)' in facts_of(note)['without it']


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
