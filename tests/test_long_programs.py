"""Programs of any length are read, and texts that lack a part are errors with the line.

Chains of operations, nested calls, loops that rotate their state, and stored HLO with changes.
"""

import functools
import random
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo.read import collectives_of, graph_of, read_all
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_collectives import kept, module

from einshard import EinshardError, explain

F8 = 'f32[8]{0}'
SUM = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


# --- long programs --------------------------------------------------------------------------------


def chain(n, line, before=''):
    """A program of `n` operations, each of the one before; `line` writes operation i."""
    ops = [f'%x{i} = {line(i, f"%x{i - 1}")}' for i in range(1, n + 1)]
    body = ''.join(f'  {op}\n' for op in (*ops[:-1], f'ROOT {ops[-1]}'))
    return (
        f'HloModule jit_f, num_partitions=4\n\n{SUM}\n{before}\nENTRY %main (x: f32[8]) -> f32[8] '
        f'{{\n  %zero = s32[] constant(0)\n  %one = f32[1]{{0}} constant({{1}})\n'
        f'  %x0 = {F8} parameter(0)\n{body}}}\n'
    )


def every_hundredth(collective, other):
    return lambda i, x: f'{F8} {other}({x})' if i % 100 else f'{F8} {collective.format(x)}'


ALL_REDUCE = 'all-reduce({}), replica_groups={{{{0,1,2,3}}}}, to_apply=%add'
PERMUTE = 'collective-permute({}), source_target_pairs={{{{0,1}},{{1,0}}}}'
ADD_TWICE = (
    f'%twice (p: f32[8]) -> f32[8] {{\n  %p = {F8} parameter(0)\n  ROOT %q = {F8} add(%p, %p)\n}}'
)
CHAINS = {
    'elementwise': (every_hundredth(ALL_REDUCE, 'negate'), 1000),
    'copies': (every_hundredth(PERMUTE, 'copy'), 1000),
    'bitcasts': (every_hundredth(ALL_REDUCE, 'bitcast'), 1000),
    'fusions': (lambda i, x: f'{F8} fusion({x}), kind=kLoop, calls=%twice', 0),
    'updates': (lambda i, x: f'{F8} dynamic-update-slice({x}, %one, %zero)', 0),
}


@pytest.mark.slow
def test_a_chain_of_100_000_operations():
    line, n_collectives = CHAINS['elementwise']
    assert len(read_all(chain(100_000, line))) == n_collectives


def nested(depth, attribute):
    """Computations that each call the next; the last one all-reduces."""
    texts = [
        f'%f{i} (p: f32[8]) -> f32[8] {{\n  %p{i} = {F8} parameter(0)\n'
        f'  ROOT %r{i} = {F8} {call}\n}}\n'
        for i in range(depth)
        for call in [
            f'{attribute.split("=")[0]}(%p{i}), {attribute.split("=", 1)[1]}=%f{i + 1}'
            if i + 1 < depth
            else ALL_REDUCE.format(f'%p{i}')
        ]
    ]
    call = f'{attribute.split("=")[0]}(%x), {attribute.split("=", 1)[1]}=%f0'
    main = (
        f'ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = {F8} parameter(0)\n'
        f'  ROOT %y = {F8} {call}\n}}\n'
    )
    return f'HloModule jit_f, num_partitions=4\n\n{SUM}\n{"".join(reversed(texts))}\n{main}'


@pytest.mark.parametrize(
    ('depth', 'attribute'), [(10_000, 'call=to_apply'), (1_000, 'fusion=kind=kLoop, calls')]
)
def test_nested_calls(depth, attribute):
    [c] = read_all(nested(depth, attribute))
    assert (c.kind, c.executions, c.of) == ('all-reduce', 1, ('result/0',))


@pytest.mark.slow
def test_1_000_nested_loops():
    def loops(i):
        last = ALL_REDUCE.format(f'%v{i}') if i == 999 else f'get-tuple-element(%l{i}), index=1'
        inner = (
            ''
            if i == 999
            else (
                f'  %z{i} = s32[] constant(0)\n  %t{i} = (s32[], {F8}) tuple(%z{i}, %v{i})\n'
                f'  %l{i} = (s32[], {F8}) while(%t{i}), condition=%test{i + 1}, body=%body{i + 1}\n'
            )
        )
        return (
            f'%test{i} (s: (s32[], f32[8])) -> pred[] {{\n  %a{i} = (s32[], {F8}) parameter(0)\n'
            f'  %b{i} = s32[] get-tuple-element(%a{i}), index=0\n  %c{i} = s32[] constant(1)\n'
            f'  ROOT %d{i} = pred[] compare(%b{i}, %c{i}), direction=LT\n}}\n'
            f'%body{i} (s: (s32[], f32[8])) -> (s32[], f32[8]) {{\n'
            f'  %s{i} = (s32[], {F8}) parameter(0)\n'
            f'  %i{i} = s32[] get-tuple-element(%s{i}), index=0\n'
            f'  %v{i} = {F8} get-tuple-element(%s{i}), index=1\n  %o{i} = s32[] constant(1)\n'
            f'  %n{i} = s32[] add(%i{i}, %o{i})\n{inner}  %w{i} = {F8} {last}\n'
            f'  ROOT %r{i} = (s32[], {F8}) tuple(%n{i}, %w{i})\n}}\n'
        )

    main = (
        f'ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = {F8} parameter(0)\n'
        f'  %z = s32[] constant(0)\n'
        f'  %t = (s32[], {F8}) tuple(%z, %x)\n'
        f'  %l = (s32[], {F8}) while(%t), condition=%test0, body=%body0\n'
        f'  ROOT %y = {F8} get-tuple-element(%l), index=1\n}}\n'
    )
    loops_text = ''.join(map(loops, reversed(range(1000))))
    [c] = read_all(f'HloModule jit_f, num_partitions=4\n\n{SUM}\n{loops_text}\n{main}')
    assert (c.executions, c.is_exact) == (1, True)


def test_a_computation_that_calls_itself():
    text = nested(3, 'call=to_apply').replace('to_apply=%f2', 'to_apply=%f1')
    with pytest.raises(EinshardError, match=r'line \d+ of the compiled program is in %f1, and ca'):
        read_all(text)


@pytest.fixture(scope='module')
def mesh():
    return jax.make_mesh((8,), ('m',), axis_types=(AxisType.Auto,))


@pytest.fixture
def array(mesh):
    sharding = NamedSharding(mesh, P('m'))
    return jax.ShapeDtypeStruct((64, 64), np.float32, sharding=sharding)


def logistic(x, n):
    for _ in range(n):
        x = 3.7 * x * (1 - x)
    return x.mean()


@pytest.mark.parametrize('tries', [0, 2])
def test_a_chain_is_explained(array, tries):
    report = explain(jax.jit(functools.partial(logistic, n=200)), array, tries=tries)
    assert report.collectives.counts == {'all-reduce': 1}


# --- loops that rotate their state ----------------------------------------------------------------


def rotated(n, loop):
    """A loop whose state of `n` arrays moves on by one in each iteration."""

    def step(state):
        return (*state[1:], state[0] * 2), sum(jnp.sum(x) for x in state)

    def run(*arrays):
        if loop == 'scan':
            return lax.scan(lambda s, _: step(s), arrays, None, length=6)
        if loop == 'dict':
            names = [f'x{i}' for i in range(n)]
            state, sums = lax.scan(
                lambda s, _: (
                    dict(zip(names, (out := step(tuple(s.values())))[0], strict=True)),
                    out[1],
                ),
                dict(zip(names, arrays, strict=True)),
                None,
                length=6,
            )
            return tuple(state.values()), sums
        if loop == 'nested':
            inner = lambda s, _: step(s)  # noqa: E731
            outer = lambda s, _: lax.scan(inner, (*s[1:], s[0]), None, length=2)  # noqa: E731
            return lax.scan(outer, arrays, None, length=3)
        return lax.while_loop(
            lambda s: s[0] < 6,
            lambda s: (s[0] + 1, *step(s[1:])[0]),
            (0, *arrays),
        )

    return run


@pytest.mark.parametrize('loop', ['scan', 'while', 'dict', 'nested'])
@pytest.mark.parametrize('n', [2, 3, 5])
def test_loops_that_rotate_their_arrays(array, n, loop):
    report = explain(jax.jit(rotated(n, loop)), *[array] * n, tries=0)
    assert {row.kind for row in report.collectives} <= {'all-reduce'}
    assert bool(report.collectives) == (loop != 'while')


def test_a_step_that_returns_its_next_key(mesh):
    """`jax.random.split` compiles to a loop that rotates four counters."""

    def step(w, x, key):
        key, sub = jax.random.split(key)
        kept = x * jax.random.bernoulli(sub, 0.9, x.shape)
        loss, g = jax.value_and_grad(lambda w: jnp.mean((kept @ w) ** 2))(w)
        return w - 0.1 * g, loss, key

    w = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=NamedSharding(mesh, P('m')))
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        report = explain(jax.jit(step), w, x, key, tries=0)
        assert [row.of for row in report.collectives if row.role == 'gradients']


# --- texts that lack a part -----------------------------------------------------------------------

START = f'%s = ({F8}, {F8}) all-reduce-start(%x), replica_groups={{{{0,1,2,3}}}}, to_apply=%add'
LOOP = """%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[8]{0} get-tuple-element(%s), index=1
  %r = f32[8]{0} all-reduce(%v), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %r)
}
"""


@pytest.mark.parametrize(
    ('lines', 'computations', 'message'),
    [
        (['ROOT %y = f32[8] add(%x, %gone)'], '', r'\d+ .* uses %gone, which no line of %main def'),
        (
            ['%s = f32[8] all-reduce-start(%x)', 'ROOT %y = f32[8] copy(%x)'],
            '',
            r'\d+ .* starts %s',
        ),
        (['%y = f32[8] copy(%x)'], '', r'\d+ .* is the last one of %main, which has no ROOT'),
        (
            ['ROOT %y = f32[8] call(%x), to_apply=%gone'],
            '',
            r'\d+ .* calls %gone, which the program',
        ),
        (
            ['ROOT %y = f32[8] fusion(%x), calls=%gone'],
            '',
            r'\d+ .* calls %gone, which the program',
        ),
        (['ROOT %y = f32[8]'], '', r'\d+ .* is not an instruction'),
        (['ROOT %y = f32[8] copy(%x)'], LOOP[:-2], 'is not an instruction'),
        (['ROOT %y = f32[8] copy(%x)'], LOOP.partition('\n')[2], 'outside of a computation'),
        (['ROOT %y = f32[9223372036854775808] copy(%x)'], '', r'\d+ .* more than 2..63 elements'),
        (
            ['ROOT %y = f32[8] all-reduce(%x), replica_groups={{0,4}}, to_apply=%add'],
            *('', r'\d+ .* names device 4 of 4'),
        ),
        (
            ['ROOT %y = f32[8] all-reduce(%x), replica_groups=[1,9999999999]<=[9999999999]'],
            *('', r'\d+ .* cannot be read: ValueError: more than 1,048,576 devices'),
        ),
    ],
)
def test_missing_parts(lines, computations, message):
    with pytest.raises(EinshardError, match=f'line .*{message}') as error:
        read_all(module(*lines, computations=computations))
    assert error.value.code == 'hlo'


@pytest.mark.parametrize('text', ['HloModule jit_f\n', SUM, module().rpartition('ENTRY')[0]])
def test_texts_without_an_entry(text):
    with pytest.raises(EinshardError, match=r'line \d+ of the compiled program is'):
        collectives_of(text)


def test_huge_trip_count():
    config = 'backend_config={"known_trip_count":{"n":"99999999999999999999"}}'
    test = (
        '%test (s: (s32[], f32[8])) -> pred[] {\n  %p = (s32[], f32[8]) parameter(0)\n'
        '  ROOT %t = pred[] constant(true)\n}\n'
    )
    text = module(
        '%z = s32[] constant(0)',
        '%t = (s32[], f32[8]) tuple(%z, %x)',
        f'ROOT %l = (s32[], f32[8]) while(%t), condition=%test, body=%body, {config}',
        computations=LOOP + test,
    )
    with pytest.raises(EinshardError, match=r'line \d+ .* has a trip count of more than 2\*\*63'):
        read_all(text)


def test_the_operations_of_newer_compilers_are_a_note(mesh, array, monkeypatch):
    compiled = jax.jit(lambda x: jnp.tanh(x).sum()).lower(array).compile()
    text = compiled.as_text()
    monkeypatch.setattr(type(compiled), 'as_text', lambda self: text.replace(' tanh(', ' tanh2('))
    report = explain(compiled)
    assert report.collectives.counts == {'all-reduce': 1}
    [note] = [note for note in report.notes if 'tanh2' in note.text]
    number = next(i for i, line in enumerate(text.split('\n'), 1) if ' tanh(' in line)
    assert f"operation 'tanh2', which the compiled program has once, in line {number}" in note.text


def changed(text, rng):
    lines = text.split('\n')
    kind = rng.choice(('drop', 'drop several', 'cut', 'opcode', 'number'))
    if kind == 'drop':
        del lines[rng.randrange(len(lines))]
    elif kind == 'drop several':
        first = rng.randrange(len(lines))
        del lines[first : first + rng.randrange(2, 12)]
    elif kind == 'cut':
        return kind, text[: rng.randrange(len(text))]
    elif kind == 'opcode':
        i = rng.choice(
            [i for i, line in enumerate(lines) if re.match(r'\s+(ROOT )?%?\S+ = ', line)]
        )
        lines[i] = re.sub(
            r' ([a-z][\w-]*)\(%?', lambda m: m[0].replace(m[1], 'new'), lines[i], count=1
        )
    else:
        number = rng.choice([*re.finditer(r'\d+', text)])
        new = rng.choice(('99999999999', '9' * 19, '9' * 25, '9' * 5000, '4096', '17', '0'))
        return kind, text[: number.start()] + new + text[number.end() :]
    return kind, '\n'.join(lines)


def test_changed_texts_are_read_or_are_errors_with_a_line():
    """Never another exception, and never fewer collectives if lines are missing."""
    rng = random.Random(0)
    texts = [text for *_, text in kept()]
    counts = [Counter(c.kind for c in collectives_of(text)) for text in texts]
    outcomes = Counter()
    for _ in range(300):
        i = rng.randrange(len(texts))
        kind, text = changed(texts[i], rng)
        try:
            found, message = Counter(c.kind for c in read_all(text)), ''
        except EinshardError as error:
            found, message = Counter(), str(error)
        if message:
            assert re.match(r'line \d+ of the compiled program ', message)
        else:
            is_noted = bool(graph_of(text).program.unknown)
            assert kind == 'number' or is_noted or not counts[i] - found
        outcomes[kind, 'error' if message else 'read'] += 1
    assert {kind for kind, outcome in outcomes if outcome == 'error'} == {
        *('cut', 'drop', 'drop several', 'number')
    }
