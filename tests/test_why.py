"""Why a program has each collective: small programs, each with one planted mistake."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo.programs import partitioner
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from modules import line_of
from placed import struct_on

from einshard._explain.why import find_reasons, why_value
from einshard._program.hlo.find_collectives import find_collectives
from einshard._program.hlo.graph import Graph
from einshard._program.hlo.sources import full_names
from einshard._program.hlo.text import HloModule as Text
from einshard._program.traced import shardy
from einshard._program.traced.read import read_program

AXES = ('data', 'model')


def mesh_of(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), AXES, axis_types=(kind,) * 2)


MESH = mesh_of()
struct = struct_on(MESH)


def on(*spec, mesh=MESH):
    return NamedSharding(mesh, P(*spec))


def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, on(*spec))


def with_axes(row):
    """The collective with the mesh axes that its groups span, as `explain` finds them."""
    from dataclasses import replace

    ids = np.arange(8).reshape(2, 4)
    groups = {frozenset(group) for group in row.device_groups}
    spans = {
        frozenset(map(frozenset, ids.T.tolist())): {'data'},
        frozenset(map(frozenset, ids.tolist())): {'model'},
        frozenset((frozenset(range(8)),)): {'data', 'model'},
    }
    return replace(row, mesh_axes=frozenset(spans.get(frozenset(groups), ())))


def reasons(function, *arguments, names=(), **options):
    """The reasons of the collectives of a function, whose arguments have these names."""
    lowered = jax.jit(function, **options).lower(*arguments)
    graph = Graph(Text(lowered.compile().as_text()))
    program = read_program(lowered.compiler_ir('stablehlo'), dict(enumerate(names)))
    return program, find_reasons(program, map(with_axes, find_collectives(graph)))


# --- planted mistakes: (function, arguments, options, what the reason of a row has to name) -------

X, W = struct((16, 64), 'data'), struct((64, 128), None, 'model')
MISTAKES = {}


def mistake(*arguments, names, says, kind, cause='inserted', **options):
    def decorate(function):
        MISTAKES[function.__name__] = (function, arguments, names, options, says, kind, cause)
        return function

    return decorate


@mistake(
    X, struct((64, 128), 'data'), names=('x', 'w'), says='w has data on axis 0', kind='all-reduce'
)
def weight_on_the_axis_of_the_batch(x, w):
    return jnp.tanh(x @ w)


@mistake(X, W, names=('x', 'w'), says='drops it', kind='all-gather', cause='requested')
def constraint_drops_an_axis(x, w):
    y = jnp.tanh(x @ w)
    return constrain(y, 'data', None) * 2


@mistake(
    struct((16, 64), None, 'model'),
    struct((64, 32), 'model'),
    names=('x', 'w'),
    says='w has model on axis 0',
    kind='all-reduce',
)
def contracted_axis(x, w):
    return jnp.tanh(x @ w)


@mistake(
    struct((16, 64), 'data', 'model'), names=('x',), says='x has model on axis 1', kind='all-to-all'
)
def sorted_along_a_sharded_axis(x):
    return jnp.sort(x, axis=1)


@mistake(
    struct((16, 64), 'data', 'model'),
    names=('x',),
    says='out_shardings of result drop it',
    kind='all-gather',
    cause='requested',
    out_shardings=on('data', None),
)
def result_without_the_axis(x):
    return jnp.tanh(x)


@mistake(
    struct((16, 64), 'data'),
    struct((64, 64), 'model'),
    names=('x', 'table'),
    says='table has model on axis 0',
    kind='all-reduce',
)
def lookup_in_a_sharded_table(x, table):
    return table[x[:, 0].astype(int)] * 2


@mistake(
    struct((16, 64), 'model'),
    struct((16, 64), None, 'model'),
    names=('left', 'right'),
    says=('left has model on axis 0', 'right has model on axis 1'),
    kind='all-to-all',
)
def sum_of_different_shardings(left, right):
    return left + right


@mistake(
    struct((16, 64), 'data', 'model'),
    names=('x',),
    says='in_specs of the shard_map at',
    kind='all-gather',
    cause='requested',
)
def specs_drop_an_axis(x):
    return jax.shard_map(lambda x: x * 2, mesh=MESH, in_specs=P('data'), out_specs=P('data'))(x)


@mistake(
    struct((16, 64), 'data'),
    names=('x',),
    says='you wrote it at',
    kind='all-reduce',
    cause='requested',
)
def written_by_hand(x):
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, 'data'), mesh=MESH, in_specs=P('data'), out_specs=P()
    )
    return total(x)


@mistake(
    struct((16, 64), 'data'),
    struct((4, 64, 64), None, 'data', 'model'),
    names=('x', 'layers'),
    says='layers has data on axis 1',
    kind='all-gather',
)
def weights_of_a_loop(x, layers):
    def body(x, w):
        return constrain(jnp.tanh(x @ w), 'data'), None

    return jax.lax.scan(body, x, layers)[0]


@mistake(
    struct((64, 128), 'data', 'model'),
    X,
    names=('w', 'x'),
    says='sums over that axis',
    kind='all-reduce',
)
def gradient(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


@mistake(
    struct((16, 64), None, 'model'), names=('x',), says='x has model on axis 1', kind='all-reduce'
)
def mean_over_a_sharded_axis(x):
    return x - jnp.mean(x, axis=1, keepdims=True)


@mistake(
    struct((16, 64), 'data', 'model'),
    names=('x',),
    says='x has model on axis 1',
    kind='collective-permute',
)
def shifted_along_a_sharded_axis(x):
    return x[:, 1:] - x[:, :-1]


@pytest.mark.parametrize('name', MISTAKES)
def test_names_what_is_wrong(name):
    function, arguments, names, options, says, kind, cause = MISTAKES[name]
    _, found = reasons(function, *arguments, names=names, **options)
    says = (says,) if isinstance(says, str) else says
    rows = [r for r in found if r.row.kind == kind and all(text in r.text for text in says)]
    assert rows, [(r.row.kind, r.row.mesh_axes, r.text) for r in found]
    assert {r.cause for r in rows} == {cause}
    assert all(r.short in r.text for r in found)


@pytest.mark.parametrize('name', MISTAKES)
def test_knows_all_collectives(name):
    function, arguments, names, options, *_ = MISTAKES[name]
    _, found = reasons(function, *arguments, names=names, **options)
    assert 'unknown' not in {r.cause for r in found}, [r.text for r in found]


# --- the lines that a reason names ----------------------------------------------------------------


def test_names_the_line_of_a_constraint():
    def function(x, w):
        y = jnp.tanh(x @ w)
        return jax.lax.with_sharding_constraint(y, on('data', None)) * 2

    _, found = reasons(function, X, W, names=('x', 'w'))
    [reason] = [r for r in found if r.row.kind == 'all-gather']
    assert f'your constraint at {line_of(function, "with_sharding")} drops it' in reason.short
    assert ('model', 'argument w') in reason.origins
    assert line_of(function, 'x @ w') in reason.travelled[0]


def test_names_the_call_of_a_helper():
    def function(x, w):
        y = constrain(x * 2, 'data')
        z = constrain(jnp.tanh(y @ w), 'data', None)
        return z * 2

    _, found = reasons(function, X, W, names=('x', 'w'))
    [reason] = [r for r in found if r.row.kind == 'all-gather']
    called = line_of(function, 'z = constrain').rpartition(':')[2]
    at = line_of(constrain, 'return jax')
    assert reason.short.endswith(f'your constraint at {at}, called at line {called}, drops it')
    assert reason.cause == 'requested'


def test_backward_passes_name_the_forward_line():
    def function(w, x):
        def loss(w):
            y = jnp.tanh(x @ w)
            return jnp.sum(y * y)

        return jax.grad(loss)(w)

    _, found = reasons(function, struct((64, 128)), X, names=('w', 'x'))
    [reason] = [r for r in found if r.row.kind == 'all-reduce']
    assert line_of(function, 'x @ w') in reason.text
    assert 'x has data on axis 0' in reason.text


def test_combined_collectives_have_a_conflict_for_each():
    def function(w, x):
        def loss(w):
            return jnp.sum(jnp.tanh(x @ w['a']) @ w['b'])

        return jax.grad(loss)(w)

    w = {'a': struct((64, 128)), 'b': struct((128, 32))}
    _, found = reasons(function, w, X, names=('w/a', 'w/b', 'x'))
    [reason] = [r for r in found if len(r.row.results) > 1]
    assert {c.size for c in reason.conflicts} == {64 * 128, 128 * 32}
    assert line_of(function, 'return jnp.sum') in reason.text


def test_explicit_axes_name_the_operand_whose_type_decides():
    mesh = mesh_of(AxisType.Explicit)

    def function(x, w):
        y = jnp.tanh(x) * 2
        return jax.sharding.reshard(y, P('data', None)) @ w

    x = struct((16, 64), 'data', 'model', mesh=mesh)
    with jax.set_mesh(mesh):
        _, found = reasons(function, x, struct((64, 32), mesh=mesh), names=('x', 'w'))
    [reason] = found
    line = line_of(function, 'reshard')
    assert reason.cause == 'requested'
    assert f'your constraint at {line} drops it' in reason.text
    assert ('model', 'argument x') in reason.origins


def test_explicit_out_sharding_is_named():
    mesh = mesh_of(AxisType.Explicit)

    def function(x, w):
        return jnp.einsum('bd,df->bf', x, w, out_sharding=P('data'))

    x, w = struct((16, 64), 'data', 'model', mesh=mesh), struct((64, 32), 'model', mesh=mesh)
    with jax.set_mesh(mesh):
        _, found = reasons(function, x, w, names=('x', 'w'))
    [reason] = found
    assert (reason.row.kind, reason.cause) == ('all-reduce', 'inserted')
    assert 'w has model on axis 0' in reason.text


def test_what_does_not_fit_is_unknown():
    """A collective of another size than any value, as XLA makes it where it decides differently."""
    from dataclasses import replace

    lowered = jax.jit(contracted_axis).lower(
        struct((16, 64), None, 'model'), struct((64, 32), 'model')
    )
    [row] = find_collectives(Graph(Text(lowered.compile().as_text())))
    program = read_program(lowered.compiler_ir('stablehlo'))
    arrays = tuple(replace(a, shape=(7, 11)) for a in row.operands)
    [reason] = find_reasons(program, [replace(row, operands=arrays, results=arrays, nodes=())])
    assert reason.cause == 'unknown'
    line = line_of(contracted_axis, 'x @ w')
    assert reason.text == f'no shardings of an array of this size disagree at {line}'


def test_differs_from_what_xla_computes():
    """The reason does not use a propagation that the row's own operand contradicts."""
    arguments = struct((16, 64), None, 'model'), struct((64, 32), 'model')
    lowered = jax.jit(contracted_axis).lower(*arguments)
    [row] = find_collectives(Graph(Text(lowered.compile().as_text())))
    # the same function for another size: as if XLA had computed less of it
    other = jax.jit(contracted_axis).lower(struct((48, 64), None, 'model'), arguments[1])
    program = read_program(other.compiler_ir('stablehlo'))
    [reason] = find_reasons(program, [row])
    assert reason.cause == 'unknown'
    assert reason.text.endswith('as f32[16,32] on each device, and Shardy propagates [48,32]')


def test_gspmd_programs_cannot_be_read():
    with partitioner('gspmd'):
        lowered = jax.jit(contracted_axis).lower(X, W)
        with pytest.raises(shardy.NotPropagated, match='GSPMD'):
            read_program(lowered.compiler_ir('stablehlo'))


# --- values ---------------------------------------------------------------------------------------


def two_layers(x, w):
    y = jnp.tanh(x @ w)
    return y * 2


def test_why_a_value_is_sharded():
    lowered = jax.jit(two_layers).lower(X, W)
    program = read_program(lowered.compiler_ir('stablehlo'), {0: 'x', 1: 'w'})
    place = line_of(two_layers, 'y * 2')
    [value] = [v for v in why_value(program, place) if 'multiplication' in v.name]
    assert [(a.axis, a.dimension, a.origin) for a in value.axes] == [
        ('data', 0, 'argument x'),
        ('model', 1, 'argument w'),
    ]
    before = line_of(two_layers, 'x @ w')
    assert str(value) == (
        f'the multiplication at {place}, f32[16,128]: data on axis 0, from argument x '
        f'(through {before} > {place}); model on axis 1, from argument w '
        f'(through {before} > {place})'
    )
    assert why_value(program, f'/elsewhere/{place}') == ()


def test_why_an_argument_is_sharded():
    lowered = jax.jit(two_layers).lower(X, W)
    program = read_program(lowered.compiler_ir('stablehlo'), {0: 'x', 1: 'w'})
    [value] = why_value(program, 'w')
    assert str(value) == 'w, f32[64,128]: model on axis 1, as given'


def test_names_of_combined_operations():
    assert full_names('jit(f)/jvp(a,b->c)/dot_general') == ['jit(f)/jvp(a,b->c)/dot_general']
    assert full_names('jit(f)/(a:(b:c))/d') == ['jit(f)/(a:(b:c))/d']
    assert full_names('(jit(f)/mul:jit(f)/(dot_general:reduce_sum))') == [
        'jit(f)/mul',
        'jit(f)/dot_general',
        'jit(f)/reduce_sum',
    ]
    assert full_names('') == []
