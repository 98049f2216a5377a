"""Changes of a traced program against programs written by hand, and the places of changes."""

import ast
import inspect
import re
import textwrap
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from modules import spans

from einshard import device_mesh, explain

# private: edits of jaxprs and of marked modules, before a suggestion chooses among them
from einshard._explain.search.words import Words
from einshard._program.edits import edit as edits
from einshard._program.edits.apply import apply
from einshard._program.edits.call import read_call
from einshard._program.edits.edit import (
    Constrain,
    MoveThrough,
    PlaceArguments,
    PlaceResults,
    RemoveConstraint,
    ReplaceConstraint,
    combine,
    placements,
)
from einshard._program.edits.per_device import RunPerDevice
from einshard._program.edits.sites import Sites
from einshard._program.edits.tags import tag_in
from einshard._program.jaxpr.graph import flatten
from einshard._program.jaxpr.spans import Span
from einshard._program.traced.outline import Place
from einshard._program.traced.read import read_program
from einshard._program.traced.variants import Variants

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


def path_to(function, call):
    """Returns the path of the marked expression through all calls of the user."""
    span = marked(function)
    for op in flatten(call.jaxpr).ops:
        if span in op.site.frames and not op.site.is_backward:
            return op.site.frames[op.site.frames.index(span) :]
    raise AssertionError('the expression is not evaluated')


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


@pytest.mark.slow
@pytest.mark.parametrize('is_at_call', [False, True], ids=['all calls', 'at the call'])
@pytest.mark.parametrize('loss', LOSSES, ids=lambda loss: loss.__name__)
def test_constraint_is_what_the_source_would_do(loss, is_at_call, monkeypatch):
    if loss is looped:  # JAX does not differentiate it in reverse

        def step_of_forward(loss):
            return jax.jit(lambda w, x, rate: rate * loss(w, x))

        monkeypatch.setitem(globals(), 'step_of', step_of_forward)
    on = mesh()
    args = *arguments(on), 0.1
    spec = P('data', None, 'tensor')
    call = read(loss, *args)
    unedited = apply(call)
    path = path_to(loss, call) if is_at_call else (marked(loss),)
    assert len(path) > 1 or not is_at_call
    edited = apply(call, [Constrain(path, NamedSharding(on, spec))])
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
    expected, found = explain(by_hand), explain(edited.function, *edited.args, tries=0)
    assert found.collectives.counts == expected.collectives.counts
    assert found.network_bytes == expected.network_bytes
    assert found.network_bytes != explain(step, *args, tries=0).network_bytes or loss in (helper,)
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


def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P(*spec)))


def placed(x, w, scores=('data', None, 'tensor'), residual=('data', 'tensor', None)):
    """Places two values with one helper, in a loop over layers."""
    for _ in range(2):
        s = constrain(jnp.einsum('btd,bsd->bts', x @ w, x), *scores)
        x = constrain(x + jnp.einsum('bts,bsd->btd', jax.nn.softmax(s), x), *residual)
    return jnp.mean(x**2)


def constraints_of(call):
    """Returns the call paths of constraints, each with the number of times it is evaluated."""
    ops = flatten(call.jaxpr).ops
    return Counter(
        op.site.frames
        for op in ops
        if op.primitive == 'sharding_constraint' and not op.site.is_backward
    )


@pytest.mark.parametrize('kind', ['replaced', 'removed', 'through'])
def test_one_call_of_a_helper_is_edited(kind):
    on = mesh()
    w, x = arguments(on)

    def step(**specs):
        return jax.jit(jax.value_and_grad(lambda w, x: placed(x, w['square'], **specs)))

    given = (w, x)
    call = read_call(step(), given, {}, jax.tree.structure(jax.eval_shape(step(), *given)))
    (scores, residual), counts = zip(*sorted(constraints_of(call).items(), key=str), strict=True)
    assert counts == (2, 2)  # a loop over layers is one call
    assert scores[0] == residual[0]
    spec = P('data', 'tensor', None)
    made = {
        'replaced': ReplaceConstraint(scores, NamedSharding(on, spec)),
        'removed': RemoveConstraint(scores),
        'through': MoveThrough(('constraint', scores), NamedSharding(on, P('data'))),
    }
    edited = apply(call, [made[kind]])
    assert edited.applied == ((2, 2),)
    if kind == 'through':

        def through(x, *spec):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(on, P('data')))
            return jax.lax.with_sharding_constraint(x, NamedSharding(on, P(*spec)))

        def by_hand(x, w):
            for _ in range(2):
                s = through(jnp.einsum('btd,bsd->bts', x @ w, x), 'data', None, 'tensor')
                x = x + jnp.einsum('bts,bsd->btd', jax.nn.softmax(s), x)
                x = constrain(x, 'data', 'tensor', None)
            return jnp.mean(x**2)

        expected = jax.jit(jax.value_and_grad(lambda w, x: by_hand(x, w['square'])))
    elif kind == 'replaced':
        expected = step(scores=spec)
    else:
        anything = P.UNCONSTRAINED, P.UNCONSTRAINED, P.UNCONSTRAINED
        expected = step(scores=anything)
    right = explain(expected, *given, tries=0)
    found = explain(edited.function, *edited.args, tries=0)
    assert found.collectives.counts == right.collectives.counts
    assert found.network_bytes == right.network_bytes
    assert found.network_bytes != explain(step(), *given, tries=0).network_bytes
    for one, other in zip(
        jax.tree.leaves(edited.function(*given)), jax.tree.leaves(step()(*given)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_functions_stay_shared_where_nothing_or_the_same_changes():
    on = mesh()
    w, x = arguments(on)

    @jax.jit
    def block(x, w):
        return jnp.tanh(x @ w)

    def loss(x, w):
        x = block(x, w)
        x = block(x, w)
        x = block(x, w)
        return jnp.sum(x)

    call = read_call(jax.jit(loss), (x, w['square']), {}, jax.tree.structure(0))
    paths = dict.fromkeys(
        op.site.frames for op in flatten(call.jaxpr).ops if op.primitive == 'dot_general'
    )
    assert len(paths) == 3
    # only in `block`, whose products have other paths
    edits = [Constrain(path, NamedSharding(on, SHARDED)) for path in paths]
    for several, n_functions in ((edits[:1], 2), (edits[:2], 2), (edits, 1)):
        edited = apply(call, several)
        assert edited.applied == ((1, 0),) * len(several)
        text = edited.function.lower(*edited.args).as_text()
        assert text.count('func.func private @block') == n_functions
        np.testing.assert_allclose(edited.function(x, w['square']), loss(x, w['square']), rtol=1e-5)


def test_a_later_edit_replaces_what_it_changes_as_well():
    on = mesh()
    one, other = NamedSharding(on, P('data')), NamedSharding(on, P('tensor'))
    span = Span('model.py', 1, 2, 1, 8)
    path, elsewhere = (span, span._replace(line=7)), (span, span._replace(line=9))
    first = [
        PlaceArguments({0: one, 1: one}, {2: one}),
        Constrain(path, one),
        ReplaceConstraint(path, one),
        MoveThrough(('argument', 1), one),
    ]
    later = [
        PlaceArguments({1: other}, {}),
        PlaceResults({2: other}),
        Constrain(elsewhere, other),
        RemoveConstraint(path),
    ]
    both = combine(first, later)
    assert both == (
        PlaceArguments({0: one}, {}),
        Constrain(path, one),
        MoveThrough(('argument', 1), one),
        *later,
    )
    assert combine(both, both) == both
    assert placements(both) == ({0: one, 1: other}, {2: other})
    assert len({*both, *later, *first[1:2]}) == len(both)


# --- places of changes, in the propagated module --------------------------------------------------

MESH = jax.make_mesh((4, 2), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2)
UP, X = 2, 3  # in the order of the leaves: down, scale, up, x


def placed_on(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def layer(x, w):
    h = jax.nn.silu(x @ w['up'])
    return x + placed_on(h @ w['down'], 'data', None, None), None


def loss(w, x):
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, {'up': w['up'], 'down': w['down']})
    x = jax.vmap(lambda x: x @ w['up'][0].T)(x @ w['up'][0])
    return jnp.mean(placed_on(x, 'data', 'tensor') ** 2)


def step(w, x):
    value, g = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), value


def given():
    rng = np.random.default_rng(0)

    def array(shape, *spec):
        values = np.asarray(rng.standard_normal(shape) * 0.1, np.float32)
        return jax.device_put(values, NamedSharding(MESH, P(*spec)))

    w = {
        'up': array((3, 32, 64), None, 'data', 'tensor'),
        'down': array((3, 64, 32), None, 'tensor', 'data'),
        'scale': array((32,)),
    }
    return w, array((8, 4, 32), 'data')


def call_of(step, *args):
    jitted = jax.jit(step, donate_argnums=0)
    return read_call(jitted, args, {}, jax.tree.structure(jax.eval_shape(step, *args)))


CALL = call_of(step, *given())


def paths_of(*primitives):
    """The call paths of operations of the forward pass, in order."""
    ops = flatten(CALL.jaxpr).ops
    found = [op for op in ops if op.primitive in primitives and not op.site.is_backward]
    return [*dict.fromkeys(op.site.frames for op in found)]


def sharding(*spec):
    return NamedSharding(MESH, P(*spec))


PRODUCTS = paths_of('dot_general')
CONSTRAINTS = paths_of('sharding_constraint')
THROUGH = [
    MoveThrough(('argument', X), sharding(None, 'tensor')),
    MoveThrough(('result', 0), sharding(None, 'data')),
    MoveThrough(('constraint', CONSTRAINTS[0]), sharding(None, 'tensor')),
]
VALUES = [*PRODUCTS, *paths_of('add', 'transpose', 'mul', 'sub')]


def propagated(module):
    """The shardings of all values of a module that no constraint computes."""
    program = read_program(module)
    found = Counter()
    for op in program.operations:
        if op.kind != 'sharding_constraint':
            for value in op.results:
                found[op.kind, value.shape, value.axes, value.replicated] += 1
    return found, [value.axes for value in (*program.arguments, *program.results)]


def collectives(lowered):
    report = explain(lowered.compile())
    return report.collectives.counts, report.network_bytes


def test_open_constraints_change_nothing():
    sites = Sites(CALL, VALUES, MESH, THROUGH)
    assert {*PRODUCTS} <= {*sites.values}
    assert {*sites.constraints} == {*CONSTRAINTS}
    plain = apply(CALL)
    lowered = plain.function.lower(*plain.args)
    # of values and their cotangents, in the forward pass, the backward pass and what it recomputes
    assert str(sites.module).count('sdy.sharding_constraint') > 4 * len(PRODUCTS)
    module = lowered.compiler_ir('stablehlo')
    assert propagated(sites.module) == propagated(module)
    assert collectives(sites.lowered) == collectives(lowered)
    args = given()
    for one, other in zip(
        jax.tree.leaves(sites.edited.function(*args)), jax.tree.leaves(step(*given())), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


EDITS = {
    'product in a loop': [Constrain(PRODUCTS[0], sharding('data', None, None))],
    'axis of a product': [Constrain(PRODUCTS[1], sharding(None, 'data', 'tensor'))],
    'under vmap': [Constrain(PRODUCTS[3], sharding('tensor', None))],
    'replaced': [ReplaceConstraint(CONSTRAINTS[0], sharding(None, ('data', 'tensor'), None))],
    'removed': [RemoveConstraint(CONSTRAINTS[1])],
    'removed in a loop': [RemoveConstraint(CONSTRAINTS[0])],
    'arguments': [
        PlaceArguments({UP: sharding(None, None, 'data')}, {UP: sharding(None, None, 'data')})
    ],
    'results': [PlaceResults({3: sharding(), 0: sharding(None, 'data', 'tensor')})],
    'through an argument': [THROUGH[0]],
    'through a result': [THROUGH[1]],
    'through a constraint': [THROUGH[2]],
    'several': [
        Constrain(PRODUCTS[0], sharding(('data', 'tensor'))),
        PlaceArguments({X: sharding(('data', 'tensor'))}, {}),
        ReplaceConstraint(CONSTRAINTS[0], sharding(('data', 'tensor'))),
    ],
}


def stripped(axes):
    return axes if any(axes) else ()


def changes_of(edits, variants):
    """Edits as other shardings of the places of a module."""
    found = {}

    def entries(sharding, ndim):
        axes = [(e,) if isinstance(e, str) else tuple(e or ()) for e in sharding.spec]
        return (*axes, *((),) * (ndim - len(axes)))

    for place, site in variants.sites.items():
        for edit in edits:
            (key, n_mapped) = site or ((), 0)
            if key and key in edit.key:
                ndim = len(variants.shape(place))
                removed = isinstance(edit, RemoveConstraint)
                axes = None if removed else entries(edit.sharding, ndim - n_mapped)
                found[place] = None if removed else ((),) * n_mapped + axes
    for edit in edits:
        if isinstance(edit, PlaceArguments):
            for i, to in edit.arguments.items():
                found[Place('argument', i)] = entries(to, len(variants.shape(Place('argument', i))))
        if isinstance(edit, PlaceArguments | PlaceResults):
            for i, to in edit.results.items():
                found[Place('result', i)] = entries(to, len(variants.shape(Place('result', i))))
    return found


@pytest.mark.parametrize('name', EDITS)
def test_other_shardings_of_places_are_the_applied_edit(name):
    edits = EDITS[name]
    sites = Sites(CALL, VALUES, MESH, THROUGH)
    module, keys = sites.module, sites.keys
    variants = Variants(module, lambda text: (tag := tag_in(text)) and (keys[tag[0]], tag[1]))
    edited = apply(CALL, edits)
    assert edited.is_complete
    # calls are inlined, as XLA does before it propagates
    expected = Variants(edited.function.lower(*edited.args).compiler_ir('stablehlo'))
    assert axes_of(variants, changes_of(edits, variants)) == axes_of(expected, {})


def axes_of(variants, changes):
    found, outline = variants.propagate(changes), variants.outline
    ends = [stripped(found[value].axes) for value in (*outline.arguments, *outline.ends)]
    products = Counter(
        (step.form.kind, stripped(found[step.results[0]].axes))
        for step in outline.steps
        if step.form.kind in ('dot_general', 'reduce', 'multiply')
    )
    return ends, products


def test_places_of_arguments_are_not_those_of_values():
    """Both have numbers, and those of eight arguments are also positions of operations."""

    def sums(x, *others, constrain=lambda x: x):
        for other in others:
            x = constrain(x + other)
        return x

    def with_types(x, *others):
        return sums(x, *others, constrain=lambda x: placed_on(x, None, None))

    args = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 8
    lowered = jax.jit(with_types).lower(*args)
    variants = Variants(lowered.compiler_ir('stablehlo'), has_types=True)
    for i in range(8):
        found = variants.propagate({Place('argument', i): (('data',), ('tensor',))})
        edit = PlaceArguments({i: sharding('data', 'tensor')}, {})
        edited = apply(call_of(sums, *args), [edit])
        program = read_program(edited.function.lower(*edited.args).compiler_ir('stablehlo'))
        expected = [op.results[0].axes for op in program.operations if op.kind == 'add']
        adds = [step for step in variants.outline.steps if step.form.kind == 'add']
        assert [found[add.results[0]].axes for add in adds] == expected
        assert any(map(any, expected))


def test_a_jaxpr_of_12_000_operations():
    def steps(x):
        for _ in range(4000):
            x = 3.7 * x * (1 - x)
        return x

    jaxpr = jax.make_jaxpr(steps)(np.ones((8, 8), np.float32))
    assert len(flatten(jaxpr).ops) == 12_000


SAID = device_mesh(jax.devices()[:8], data=8)


def constrained(x, w):
    return jax.lax.with_sharding_constraint(x @ w, NamedSharding(SAID, P('data', None)))


def test_every_kind_of_edit_is_said():
    x, w = (
        jax.ShapeDtypeStruct((64, 64), np.float32, sharding=NamedSharding(SAID, P(axis)))
        for axis in ('data', None)
    )
    report = explain(jax.jit(constrained), x, w, tries=0)
    to = NamedSharding(SAID, P(None, 'data'))
    text = "jax.lax.with_sharding_constraint(x @ w, NamedSharding(SAID, P('data', None)))"
    constraint = (spans(__file__, text)[0],)
    product = tuple(s for s in spans(__file__, 'x @ w') if s.line == constraint[0].line)
    line = f'test_edits.py:{product[0].line}'
    said = {
        edits.PlaceArguments({1: to}, {}): "shard w with 'a b -> a b@data'",
        edits.PlaceResults({0: to}): "shard result with 'a b -> a b@data'",
        edits.Constrain(product, to): (
            f"constrain `x @ w` in {line}: einshard(..., 'a b -> a b@data', mesh=mesh)"
        ),
        edits.ReplaceConstraint(constraint, to): (
            f"change the constraint in {line} to 'a b -> a b@data'"
        ),
        edits.RemoveConstraint(constraint): f'remove the constraint in {line}',
        edits.MoveThrough(('argument', 0), to): (
            'reshard in two steps, at the start of the function: '
            "x = einshard(x, 'a b -> a b@data', mesh=mesh)"
        ),
    }
    words = Words(report.reading)
    assert {edit: words.say([edit]) for edit in said} == said
    with jax.set_mesh(SAID):
        words = Words(explain(jax.jit(constrained), x, w, tries=0).reading)
    found = {edit: text.replace(', mesh=mesh', '') for edit, text in said.items()}
    assert {edit: words.say([edit]) for edit in said} == found
    # what runs per device is said by the finding that it was tried for
    kinds = {type(edit) for edit in said} | {RunPerDevice}
    abstract = {each for each in edits.Edit.__subclasses__() if each.__name__.startswith('_')}
    known = {*edits.Edit.__subclasses__(), *(k for a in abstract for k in a.__subclasses__())}
    assert known - abstract == kinds
