"""Edits of traced programs, against the same constraints written into the source."""

import ast
import inspect
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import explain

# private: edits of jaxprs, before a suggestion chooses among them
from einshard._program.edits.apply import apply
from einshard._program.edits.call import read_call
from einshard._program.edits.edit import Constrain
from einshard._program.jaxpr.spans import Span

SHARDED = P('data', None, 'tensor')


def held(x, spec=SHARDED):
    """Marks the expressions that are edited. Tests replace it by a constraint."""
    return x


def dense(x, w):
    return x @ w


@jax.custom_vjp
def doubled(x):
    return 2 * jnp.sin(x)


doubled.defvjp(lambda x: (doubled(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def plain(w, x):
    h = jnp.tanh(held(x @ w['up'])) @ w['down']
    return jnp.mean((x + h) ** 2)


def residual(w, x):
    h = held(x + jnp.tanh(x @ w['square']))
    return jnp.mean(jax.nn.relu(h @ w['up']) @ w['down'])


def library(w, x):
    h = held(jax.nn.silu(x @ w['up'])) * jax.nn.silu(x @ w['gate'])
    return jnp.mean(jax.nn.softmax(h @ w['down']) ** 2)


def helper(w, x):
    h = jax.nn.relu(dense(x, w['gate'])) * held(dense(x, w['up']))
    return jnp.mean(dense(h, w['down']) ** 2)


def scanned(w, x):
    def layer(x, _):
        h = held(jnp.einsum('btd,df->btf', x, w['up']))
        return x + jnp.tanh(jax.nn.silu(h) @ w['down']), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, None, length=3)
    return jnp.mean(x**2)


def unrolled(w, x):
    def layer(x):
        return x + jnp.tanh(held(x @ w['up'])) @ w['down']

    for _ in range(2):
        x = layer(x)
    return jnp.mean(x**2)


def branches(w, x):
    h = jax.lax.cond(
        jnp.sum(x) > 0, lambda x: held(x @ w['up']), lambda x: jnp.sin(x) @ w['gate'], x
    )
    return jnp.mean((h @ w['down']) ** 2)


def custom(w, x):
    h = held(doubled(x @ w['up']))
    return jnp.mean((h @ w['down']) ** 2)


def looped(w, x):
    x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(held(x @ w['square'])), x)
    return jnp.mean((x @ w['up'] @ w['down']) ** 2)


def twice(w, x):
    h = held(x @ w['up'])
    return jnp.mean((jnp.sin(h) @ w['down']) ** 2) + jnp.mean(h)


def mesh():
    return jax.make_mesh((4, 2), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2)


def arguments(on):
    shapes = {'up': (32, 64), 'gate': (32, 64), 'down': (64, 32), 'square': (32, 32)}
    rng = np.random.default_rng(0)
    w = {
        name: jax.device_put(
            np.asarray(rng.standard_normal(shape) * 0.1, np.float32),
            NamedSharding(on, P(None, 'data')),
        )
        for name, shape in shapes.items()
    }
    x = np.asarray(rng.standard_normal((8, 4, 32)), np.float32)
    return w, jax.device_put(x, NamedSharding(on, P('data')))


def marked(function):
    """Returns the span of the expression that `held` marks in the source of a function."""
    lines, first = inspect.getsourcelines(function)
    source = textwrap.dedent(''.join(lines))
    indent = len(lines[0]) - len(lines[0].lstrip())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'held':
            one = node.args[0]
            line, end = one.lineno + first - 1, one.end_lineno + first - 1
            columns = one.col_offset + indent, one.end_col_offset + indent
            return Span(function.__code__.co_filename, line, columns[0], end, columns[1])
    raise AssertionError('nothing is marked')


def step_of(loss):
    def step(w, x, rate):
        value, g = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, b: a - rate * b, w, g), value

    return jax.jit(step, donate_argnums=0)


def read(loss, *args):
    step = step_of(loss)
    return read_call(step, args, {}, jax.tree.structure(jax.eval_shape(step, *args)))


def hlo(compiled):
    """The instructions of a program, without metadata and names."""
    text = re.sub(r', metadata=\{[^}]*\}', '', compiled.as_text())
    text = '\n'.join(line for line in text.splitlines() if re.match(r'\s+(ROOT )?%?\w', line))
    return sorted(re.sub(r'%?[a-zA-Z_][\w.-]*\.\d+', '%', line) for line in text.splitlines())


LOSSES = [plain, residual, library, helper, scanned, unrolled, branches, custom, looped, twice]


@pytest.mark.parametrize('loss', LOSSES, ids=lambda loss: loss.__name__)
def test_constraint_is_what_the_source_would_do(loss, monkeypatch):
    if loss is looped:  # JAX does not differentiate it in reverse

        def step_of_forward(loss):
            return jax.jit(lambda w, x, rate: rate * loss(w, x))

        monkeypatch.setitem(globals(), 'step_of', step_of_forward)
    on = mesh()
    args = *arguments(on), 0.1
    spec = P('data', None, 'tensor')
    call = read(loss, *args)
    unedited = apply(call)
    edited = apply(call, [Constrain((marked(loss),), NamedSharding(on, spec))])
    values, cotangents = edited.applied[0]
    assert values > 0
    assert cotangents > 0 or loss is looped
    with monkeypatch.context() as patch:
        patch.setitem(
            globals(),
            'held',
            lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(on, spec)),
        )
        by_hand = step_of(loss).lower(*args).compile()
    step = step_of(loss)
    expected, found = explain(by_hand), explain(edited.function, *edited.args)
    assert found.collectives.counts == expected.collectives.counts
    assert found.network_bytes == expected.network_bytes
    assert found.network_bytes != explain(step, *args).network_bytes or loss in (helper,)
    assert hlo(unedited.function.lower(*unedited.args).compile()) == hlo(
        step.lower(*args).compile()
    )
    results = jax.tree.leaves(edited.function(*args))
    for result, plain_result in zip(
        results, jax.tree.leaves(step(*arguments(on), 0.1)), strict=True
    ):
        np.testing.assert_allclose(result, plain_result, rtol=1e-4, atol=1e-6)


def test_constraint_in_a_partially_manual_shard_map(monkeypatch):
    on = mesh()
    w, x = arguments(on)
    spec = P(None, None, 'tensor')

    def body(w, x):
        h = held(jnp.tanh(x) @ w)
        return jax.lax.psum(jnp.sum(jnp.sin(h)), 'data')

    def make():
        body_now = body
        return jax.jit(
            jax.shard_map(
                lambda w, x: body_now(w, x),
                mesh=on,
                in_specs=(P(), P('data')),
                out_specs=P(),
                axis_names={'data'},
            )
        )

    up = jax.device_put(np.asarray(w['up']), NamedSharding(on, P()))
    call = read_call(make(), (up, x), {}, jax.tree.structure(0))
    edited = apply(call, [Constrain((marked(body),), NamedSharding(on, spec))])
    assert edited.applied == ((1, 0),)
    compiled = edited.function.lower(*edited.args).compile()
    monkeypatch.setitem(globals(), 'held', lambda x: jax.lax.with_sharding_constraint(x, spec))
    by_hand = make().lower(up, x).compile()
    assert explain(compiled).network_bytes == explain(by_hand).network_bytes
    assert hlo(compiled) == hlo(by_hand)
    np.testing.assert_allclose(edited.function(up, x), make()(up, x), rtol=1e-5)


def test_bodies_that_are_all_manual_are_left_alone():
    on = mesh()
    w, x = arguments(on)

    def body(w, x):
        return jnp.sum(held(x @ w))[None, None]

    step = jax.jit(
        jax.shard_map(body, mesh=on, in_specs=(P(), P('data')), out_specs=P('data', 'tensor'))
    )
    up = jax.device_put(np.asarray(w['up']), NamedSharding(on, P()))
    call = read_call(step, (up, x), {}, jax.tree.structure(0))
    edited = apply(call, [Constrain((marked(body),), NamedSharding(on, P('data')))])
    assert edited.applied == ((0, 0),)
