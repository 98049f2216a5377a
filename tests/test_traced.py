"""Shardy's propagation, read from JAX's lowered modules, against the compiled programs."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import programs
from hlo.programs import matmul, partitioner
from jax.extend.mlir import passmanager
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import struct_on

from einshard._program.hlo.text import HloModule as Text
from einshard._program.traced import origins, shardy
from einshard._program.traced.conflicts import DISAGREE, DROPPED, REDUCE, WHOLE, Conflicts
from einshard._program.traced.origins import origin, travelled
from einshard._program.traced.propagated import LOOP, MANUAL_IN, MANUAL_OUT, Frame
from einshard._program.traced.read import read_program


def mesh_of(kind=AxisType.Auto):
    grid = np.array(jax.devices()[:8]).reshape(2, 4)
    return Mesh(grid, ('data', 'model'), axis_types=(kind,) * 2)


MESH = mesh_of()
struct = struct_on(MESH)


def on(*spec, mesh=MESH):
    return NamedSharding(mesh, P(*spec))


X = struct((8, 64), 'data', 'model')


def read(function, *arguments, names=None):
    lowered = jax.jit(function).lower(*arguments)
    return read_program(lowered.compiler_ir('stablehlo'), names)


def find(program, kind):
    return [op for op in program.operations if op.kind == kind]


# --- against the compiled program -------------------------------------------------------------

# operations of optimized HLO that have the shape of the traced operation, if they have its name
KINDS = {
    'dot': 'dot_general',
    **{kind: kind for kind in ('add', 'multiply', 'tanh', 'sine', 'subtract', 'negate')},
    'all-reduce': 'all_reduce',
    'all-gather': 'all_gather',
    'reduce-scatter': 'reduce_scatter',
    'collective-permute': 'collective_permute',
}
SCATTERED = 'the product is of the full sum, which the CPU reduces and then slices'
EXCEPTIONS = {
    ('product_scattered', 'dot_general'): SCATTERED,
    ('fully_sharded', 'dot_general'): SCATTERED,
}
# programs of which the compiled text has none of these operations by their name
WITHOUT = {'transposed'}


def sizes_agree(lowered):
    """For each operation of compiled HLO: (kind, whether a traced one has its size)."""
    program = read_program(lowered.compiler_ir('stablehlo'))
    text = Text(lowered.compile().as_text())
    for ops in text.computations.values():
        for op in ops:
            kind = KINDS.get(op.opcode)
            same = [o for o in program.by_path.get(op.op_name, ()) if o.kind == kind]
            if same:
                sizes = {program.local_size(o.results[0]) for o in same}
                yield kind, prod(op.results[0].shape) in sizes


@pytest.mark.parametrize('name', programs.PROGRAMS)
def test_local_sizes_are_those_of_the_compiled_program(name):
    function, arguments = programs.PROGRAMS[name](programs.mesh_of('cpu_8'))
    found = list(sizes_agree(function.lower(*arguments)))
    assert bool(found) == (name not in WITHOUT)
    differ = {kind for kind, agrees in found if not agrees}
    assert differ <= {kind for program, kind in EXCEPTIONS if program == name}


def layer(x, w):
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    y = jax.nn.gelu(y @ w['up'], approximate=False)
    return x + jax.lax.with_sharding_constraint(y @ w['down'], on('data'))


def make_step(layers, unrolled=False, remat=False):
    """A train step of a residual network: the function and its arguments."""
    run = jax.checkpoint(layer) if remat else layer
    up, down = (64, 128), (128, 64)

    def loss(w, x):
        if unrolled:
            for each in w:
                x = run(x, each)
        else:
            x, _ = jax.lax.scan(lambda x, each: (run(x, each), None), x, w)
        return jnp.mean(x * x)

    def step(w, x):
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w, x))

    if unrolled:
        one = {'up': struct(up, 'data', 'model'), 'down': struct(down, 'model', 'data')}
        w = [one] * layers
    else:
        w = {
            'up': struct((layers, *up), None, 'data', 'model'),
            'down': struct((layers, *down), None, 'model', 'data'),
        }
    out = jax.tree.map(lambda leaf: leaf.sharding, w)
    return jax.jit(step, out_shardings=out), (w, struct((16, 64), 'data'))


@pytest.mark.parametrize('unrolled', [True, False])
@pytest.mark.parametrize('remat', [True, False])
def test_local_sizes_of_a_train_step(unrolled, remat):
    function, arguments = make_step(2, unrolled, remat)
    found = list(sizes_agree(function.lower(*arguments)))
    assert len(found) > 20
    # gradients of weights: SCATTERED
    assert {kind for kind, agrees in found if not agrees} <= {'dot_general'}
    assert sum(not agrees for _, agrees in found) <= 4


# --- what jaxlib calls things -----------------------------------------------------------------


def test_passes_options_and_attributes_have_their_names():
    lowered = jax.jit(lambda x, w: jax.lax.with_sharding_constraint(x @ w, on('data'))).lower(
        X, struct((64, 16), 'model')
    )
    module = lowered.compiler_ir('stablehlo')
    with module.context:
        # an unknown pass or option raises
        for each in (*shardy.PASSES, *shardy.EXPLICIT_PASSES):
            passmanager.PassManager.parse(f'builtin.module({each})')
    with shardy.propagated(module) as copy:
        text = str(copy)
    for name in (shardy.SHARDING, shardy.RULE, shardy.ORIGINS, shardy.ORIGIN_NAME, shardy.EDGES):
        assert name in text
    with shardy.imported(module, (*shardy.IMPORT_PASSES, *shardy.EXPLICIT_PASSES)) as copy:
        given = [op.attributes for op in shardy.all_ops(copy.operation)]
        for name in (shardy.OUT_SHARDING, shardy.REDUCTION_AXES):
            assert any(name in attributes for attributes in given)


def test_missing_passes_are_said(monkeypatch):
    monkeypatch.setattr(shardy, 'PASSES', ('sdy-moved-elsewhere',))
    with pytest.raises(shardy.NotPropagated, match=r"Shardy's passes failed.*sdy-moved"):
        read(jnp.sin, X)


def test_the_module_stays_as_it_was():
    lowered = jax.jit(lambda x: jax.lax.top_k(jax.scipy.special.erfinv(x), 4)).lower(X)
    module = lowered.compiler_ir('stablehlo')
    before = str(module)
    read_program(module)
    assert str(module) == before


def test_gspmd_is_said():
    with partitioner('gspmd'):
        lowered = jax.jit(jnp.sin).lower(X)
        inside = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, on('data'))).lower(
            jax.ShapeDtypeStruct((8, 8), 'float32')
        )
    assert shardy.is_gspmd(lowered.compiler_ir('stablehlo'))
    assert shardy.is_gspmd(inside.compiler_ir('stablehlo'))
    with pytest.raises(shardy.NotPropagated, match='lowered for GSPMD'):
        read_program(lowered.compiler_ir('stablehlo'))
    assert not shardy.is_gspmd(jax.jit(jnp.sin).lower(X).compiler_ir('stablehlo'))
    unsharded = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((8, 8), 'float32'))
    assert not shardy.is_gspmd(unsharded.compiler_ir('stablehlo'))


# --- operations without rules -----------------------------------------------------------------


@pytest.mark.parametrize(
    'function',
    [jax.scipy.special.erfinv, jax.lax.tan, jax.lax.lgamma, lambda x: jax.lax.nextafter(x, x + 1)],
)
def test_chlo_passes_shardings_on(function):
    program = read(function, X)
    assert program.results[0].axes == (('data',), ('model',))


def test_chlo_keeps_its_name():
    assert find(read(jax.scipy.special.erfinv, X), 'erf_inv')


def test_top_k_needs_its_axis_in_full():
    program = read(lambda x: jax.lax.top_k(x, 4), X)
    values, indices = program.results
    assert values.axes == indices.axes == (('data',), ())
    assert (values.shape, values.dtype, indices.dtype) == ((8, 4), 'f32', 's32')
    [op] = find(program, 'top_k')
    [conflict] = Conflicts(program)(op, 'model')
    assert (conflict.kind, conflict.position, conflict.size) == (WHOLE, 0, 4 * 64)
    assert not Conflicts(program)(op, 'data')


# --- loops, branches, calls, shard_map --------------------------------------------------------


def test_loop_carries_one_sharding():
    def function(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    w = struct((3, 64, 64), None, None, 'model')
    program = read(function, struct((8, 64), 'data'), w, names={0: 'x', 1: 'w'})
    [tanh] = find(program, 'tanh')
    [carry] = [op.results[0] for op in find(program, LOOP) if op.results[0].shape == (8, 64)]
    assert tanh.results[0].axes == carry.axes == (('data',), ('model',))
    assert origin(program, carry, 'model').value.name == 'w'
    assert origin(program, tanh.results[0], 'data').value.name == 'x'
    [dot] = find(program, 'dot_general')
    kinds = {c.kind for c in Conflicts(program)(dot, 'model')}
    assert kinds == {REDUCE, DISAGREE} or kinds == {DISAGREE}
    assert [op for op in find(program, LOOP) if op.edges]


def test_branches_share_a_sharding():
    def function(x, i):
        def constrained(x):
            return jax.lax.with_sharding_constraint(x, on(None, 'model'))

        return jax.lax.switch(i, [lambda x: x * 2, constrained], x)

    program = read(function, struct((8, 64)), jax.ShapeDtypeStruct((), 'int32'))
    [branch] = find(program, 'branch')
    assert len(branch.operands) == 2
    assert branch.results[0].axes == ((), ('model',))
    found = origin(program, branch.results[0], 'model')
    assert found.kind == origins.ASKED
    assert found.operation.kind == 'sharding_constraint'


def test_inner_functions_have_paths_and_calls():
    @jax.jit
    def inner(x):
        return jnp.sin(x) @ x.T

    def outer(x):
        return inner(x) + inner(x * 2)

    program = read(outer, X)
    sines = find(program, 'sine')
    assert len(sines) == 2
    for sine in sines:
        assert sine.path == 'jit(outer)/jit(inner)/sin'
        lines = [frame.line for frame in sine.user_frames[:2]]
        assert lines[1] - lines[0] == 3  # the call in `outer`


def test_frames_have_columns():
    program = read(lambda x: jnp.sin(x) + jnp.cos(x), X)
    [sine], [cosine] = find(program, 'sine'), find(program, 'cosine')
    with open(__file__) as file:
        line = file.read().splitlines()[sine.frame.line - 1]
    assert isinstance(sine.frame, Frame)
    assert line[sine.frame.column - 1 : sine.frame.end_column - 1] == 'jnp.sin(x)'
    assert line[cosine.frame.column - 1 : cosine.frame.end_column - 1] == 'jnp.cos(x)'


ON_BOTH = P('data', 'model')


def mapped(function, spec=ON_BOTH, out=ON_BOTH):
    return jax.shard_map(function, mesh=MESH, in_specs=spec, out_specs=out)


def twice(x):
    return mapped(lambda x: x * 2)(x)


# Without an operation between them, Shardy crashes the process in all but the first two.
@pytest.mark.parametrize(
    'function',
    [
        twice,
        lambda x: jax.lax.scan(lambda x, _: (x * 2, None), twice(x), length=3)[0],
        lambda x: jax.lax.scan(lambda x, _: (twice(x), None), x, length=3)[0],
        lambda x: twice(jax.lax.scan(lambda x, _: (x * 2, None), x, length=3)[0]),
        lambda x: twice(jax.jit(jnp.sin)(x)),
        lambda x: jax.jit(twice)(x),
        lambda x: jax.jit(mapped(lambda x: ~x))(x > 0),
        lambda x: twice(jax.lax.optimization_barrier(x)),
        lambda x: twice(jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)),
        lambda x: twice(jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x)),
    ],
)
def test_shard_map_after_anything(function):
    program = read(function, X)
    [entry], [end] = find(program, MANUAL_IN), find(program, MANUAL_OUT)
    assert entry.results[0].axes == end.results[0].axes == (('data',), ('model',))
    assert program.results[0].axes == (('data',), ('model',))
    [inner] = [
        op
        for op in program.operations
        if op.kind in ('multiply', 'not') and op.results[0].shape == (4, 16)
    ]
    assert program.local_shape(inner.results[0]) == (4, 16)
    assert 'einshard' not in {op.kind for op in program.operations}


def test_specs_of_shard_map_conflict_with_the_value():
    program = read(mapped(lambda x: x * 2, P('data'), P('data')), X)
    [entry] = find(program, MANUAL_IN)
    [conflict] = Conflicts(program)(entry, 'model')
    assert (conflict.kind, conflict.size) == (DROPPED, 4 * 64)
    assert not Conflicts(program)(entry, 'data')
    assert origin(program, program.results[0], 'data').kind == origins.MANUAL


# --- origins ----------------------------------------------------------------------------------


def test_origin_is_an_argument_a_constraint_or_a_result():
    def function(x, w):
        y = jax.lax.with_sharding_constraint(jnp.tanh(x @ w) * 2, on(None, 'model'))
        return y, jnp.ones((16, 4)) * 3

    jitted = jax.jit(function, out_shardings=(None, on('data')))
    lowered = jitted.lower(struct((8, 64), 'data'), struct((64, 16)))
    program = read_program(lowered.compiler_ir('stablehlo'), {0: 'x', 1: 'w'})
    [tanh], [constraint] = find(program, 'tanh'), find(program, 'sharding_constraint')
    [dot] = find(program, 'dot_general')
    assert origin(program, dot.operands[0], 'data').value is program.arguments[0]
    assert origin(program, tanh.results[0], 'model').operation is constraint
    threes = program.results[1].producer.operands[0]
    found = origin(program, threes, 'data')
    assert (found.kind, found.value) == (origins.RESULT, program.results[1])


def test_constraint_without_the_axis_is_not_its_origin():
    def function(x):
        y = jax.lax.with_sharding_constraint(x * 2, on('data'))
        return y + x

    program = read(function, X, names={0: 'x'})
    for op in program.operations:
        for value in op.results:
            if value.dimension('model') is not None:
                found = origin(program, value, 'model')
                assert found.value is program.arguments[0], (op.kind, found)


def test_travelled_lists_the_lines():
    def function(x):
        y = jnp.sin(x)
        z = jnp.cos(y)
        return z * 2

    program = read(function, X)
    start = function.__code__.co_firstlineno
    lines = [frame.line - start for frame in travelled(program.results[0], 'model')]
    assert lines == [1, 2, 3]


def test_explicit_types_are_walked_through():
    mesh = mesh_of(AxisType.Explicit)

    def function(x, w):
        y = jnp.tanh(x) * 2
        z = jax.sharding.reshard(y, P('data', None))
        return jnp.einsum('bd,df->bf', z, w, out_sharding=P('data', 'model'))

    x = struct((8, 64), 'data', 'model', mesh=mesh)
    with jax.set_mesh(mesh):
        program = read(function, x, struct((64, 16), mesh=mesh), names={0: 'x', 1: 'w'})
    [tanh], [dot] = find(program, 'tanh'), find(program, 'dot_general')
    assert origin(program, tanh.results[0], 'model').value.name == 'x'
    made = origin(program, dot.results[0], 'model')
    assert made.kind == origins.TYPE
    assert made.operation.path.endswith('dot_general')
    [reshard] = [op for op in program.operations if op.path.endswith('reshard')]
    assert origins.is_asked(reshard)
    [conflict] = Conflicts(program)(reshard, 'model')
    assert conflict.kind == DROPPED


# --- the rule of an operation -------------------------------------------------------------------


def test_conflicts_of_a_product():
    program = read(matmul, struct((8, 64), None, 'model'), struct((64, 16), 'model'))
    [dot] = find(program, 'dot_general')
    left, right = Conflicts(program)(dot, 'model')
    assert (left.kind, left.position, left.others, left.size) == (REDUCE, 0, (1,), 8 * 16)
    assert (right.kind, right.position, right.others) == (REDUCE, 1, (0,))


def test_reshape_shards_the_major_factor():
    program = read(lambda x: x.reshape(4, 2, 64) * 2, X)
    assert program.results[0].axes == (('data',), (), ('model',))
    [reshape] = find(program, 'reshape')
    assert not Conflicts(program)(reshape, 'data')


def test_parts_of_axes():
    program = read(lambda x: x.reshape(2, 4, 8) * 2, struct((8, 8), 'model'))
    value = program.results[0]
    assert value.axes == (('model:(1)2',), ('model:(2)2',), ())
    assert program.local_shape(value) == (1, 2, 8)
    assert value.dimension('model') == 0
    assert value.dimension('model:(2)2') == 1
    assert origin(program, value, 'model:(2)2').value is program.arguments[0]


# --- threads and names ---------------------------------------------------------------------------


def test_threads_read_at_once(in_threads):
    function, arguments = make_step(2)
    module = function.lower(*arguments).compiler_ir('stablehlo')

    def summary(_):
        program = read_program(module)
        return [(op.kind, op.path, [v.axes for v in op.results]) for op in program.operations]

    found = in_threads(4, summary)
    assert all(each == found[0] for each in found)


def test_names_of_arguments():
    program = read(lambda w: w['a'] * 2, {'a': X})
    assert [(v.name, v.path) for v in program.arguments] == [("w['a']", "w['a']")]
    assert [v.name for v in program.results] == ['result']
    named = read(lambda w: w['a'] * 2, {'a': X}, names={0: 'w/a'})
    assert named.arguments[0].name == 'w/a'
