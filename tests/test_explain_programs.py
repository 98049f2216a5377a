"""explain on programs whose flops, bytes, executions and roles are known."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hlo.read import collectives_of, flops_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of

from einshard import explain, per_device, sharded

B, D, T = 64, 256, 32


@pytest.fixture(scope='module')
def shaped():
    """A function that makes shapes on a mesh of 4 x 4 devices."""
    mesh = mesh_of(data=4, tensor=4)

    def shape(*sizes, spec=None, dtype='float32'):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec or P()))

    return shape


# --- lines --------------------------------------------------------------------------------------


def test_lines_that_call_the_function_itself(shaped):
    """JAX lowers the reducers of `pmax` and `psum_scatter` with a line, but without its callers."""

    def local(x):
        largest = lax.pmax(x, 'tensor')
        whole = lax.all_gather(largest, 'data', axis=1, tiled=True)
        return lax.psum_scatter(whole, 'data', scatter_dimension=1, tiled=True)

    mesh = shaped().sharding.mesh
    specs = {'in_specs': P('data'), 'out_specs': P('data')}
    mapped = jax.shard_map(local, mesh=mesh, check_vma=False, **specs)
    report = explain(jax.jit(mapped), shaped(B, D, spec=P('data')), tries=0)
    assert len(report.collectives) == 3
    assert {row.called_at for row in report.collectives} == {None}


@pytest.mark.parametrize('decorate', [sharded, per_device])
def test_lines_of_a_sharded_function_in_a_jitted_one(shaped, decorate):
    x, w = shaped(B, D, spec=P('data', 'tensor')), shaped(D, D, spec=P('tensor'))
    mesh = x.sharding.mesh

    @decorate('b@data d@tensor', 'd@tensor f', out='b@data f', mesh=mesh)
    def product(x, w):
        y = x @ w
        return lax.psum(y, 'tensor') if decorate is per_device else y

    nested = jax.jit(lambda x, w: product(x, w))
    (direct,), (inside,) = (explain(f, x, w, tries=0).collectives for f in (product, nested))
    assert inside.source == direct.source


# --- roles --------------------------------------------------------------------------------------


@pytest.mark.parametrize('donated', [(), 1])
def test_weights_of_inference_are_not_the_cache(shaped, donated):
    """The cache and the weights have leaves of the same name."""
    on_all = shaped().sharding

    def decode(params, cache, x, n):
        w = {name: lax.with_sharding_constraint(w, on_all) for name, w in params.items()}
        k = lax.dynamic_update_slice_in_dim(cache['k'], (x @ w['k'])[:, None], n, 1)
        seen = lax.with_sharding_constraint(cache['k'], on_all)
        return jnp.einsum('bk,btk->bt', x @ w['q'], seen), {'k': k}

    report = explain(
        jax.jit(decode, donate_argnums=donated),
        {name: shaped(D, D, spec=P('tensor')) for name in 'kq'},
        {'k': shaped(B, T, D, spec=P('data'))},
        shaped(B, D),
        shaped(dtype='int32'),
    )
    roles = {path: row.role for row in report.collectives for path in row.of}
    assert roles['params/k'] == roles['params/q'] == 'weights'
    assert roles['cache/k'] == 'cache'


@pytest.mark.parametrize('donated', [(), 0])
def test_new_weights_are_gathered_as_weights(shaped, donated):
    """As in ZeRO-1: each device updates a shard of the replicated weights."""
    rows, on_all = shaped(D, B, spec=P('data')).sharding, shaped().sharding

    def step(params, x):
        gradients = jax.grad(lambda p: jnp.sum(jnp.square(x @ p['w'])))(params)
        w, gradient = (lax.with_sharding_constraint(p['w'], rows) for p in (params, gradients))
        return {'w': lax.with_sharding_constraint(w - 0.1 * gradient, on_all)}

    report = explain(
        jax.jit(step, donate_argnums=donated), {'w': shaped(D, B)}, shaped(B, D, spec=P('data'))
    )
    [role] = {row.role for row in report.collectives if row.kind == 'all-gather'}
    assert role == 'weights'


def test_a_single_result_in_place_of_an_argument(shaped):
    """The alias of a single result has no number in the program."""
    report = explain(jax.jit(lambda x: x * 2, donate_argnums=0), shaped(B, D, spec=P('data')))
    assert report.in_place == (('result', 'x'),)


# --- flops --------------------------------------------------------------------------------------

MATRIX_VECTOR = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[8], w: bf16[8,4]) -> (f32[4], f32[4]) {
  %x = bf16[8]{0} parameter(0)
  %w = bf16[8,4]{1,0} parameter(1)
  %wide = bf16[8,4]{1,0} broadcast(%x), dimensions={0}
  %product = bf16[8,4]{1,0} multiply(%wide, %w)
  %exact = f32[8,4]{1,0} convert(%product)
  %zero = f32[] constant(0)
  %y = f32[4]{0} reduce(%exact, %zero), to_apply=%add, metadata={op_name="jit(f)/dot_general"}
  %z = f32[4]{0} reduce(%exact, %zero), to_apply=%add, metadata={op_name="jit(f)/reduce_sum"}
  ROOT %both = (f32[4], f32[4]) tuple(%y, %z)
}
"""


def test_products_that_are_written_as_sums():
    """TPU programs have these for a matrix and a vector. Other sums do not count."""
    assert flops_of(MATRIX_VECTOR) == [2 * 8 * 4]


def test_complex_products():
    x = jax.ShapeDtypeStruct((8, 16), jnp.complex64)
    assert explain(lambda x: x @ x.T, x).flops == 8 * 8 * 16 * 8


# --- groups -------------------------------------------------------------------------------------

NO_GROUPS = """HloModule jit_f, num_partitions=16

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add
}
"""


def test_groups_that_the_program_does_not_list(shaped):
    """At most, this is one group of all devices."""
    [c] = collectives_of(NO_GROUPS)
    assert (c.groups, c.group_size, c.network_bytes) == (0, 16, 60)
    report = explain(lambda x: x, shaped(B), tries=0)
    report = replace(report, collectives=type(report.collectives)([c]))
    assert '  sent in one run: at most 60 B\n' in str(report)


# --- conditionals, and loops of unknown length --------------------------------------------------


def test_bounds_leave_out_branches(shaped):
    """All branches count in flops and in bytes sent, but none in bounds: another may run."""

    def f(p, w, x):
        def product(x):
            return lax.with_sharding_constraint(x @ w, shaped(B, D, spec=P('data')).sharding)

        return lax.cond(p, product, lambda x: jnp.tanh(x), x)

    arguments = shaped(dtype='bool'), shaped(D, D, spec=P('tensor')), shaped(B, D, spec=P('data'))
    report = explain(jax.jit(f), *arguments, chip='TPU v5e')
    assert report.flops
    assert report.network_bytes
    assert all(row.in_branch for row in (*report.products, *report.collectives))
    assert {bound.resource for bound in report.bounds} <= {'HBM'}
    assert 'in one run (all branches counted)' in str(report)


def test_loops_of_unknown_length(shaped):
    def f(w, x, n):
        return lax.fori_loop(0, n, lambda i, x: jnp.tanh(x @ w), x)

    w, x, n = shaped(D, D), shaped(B, D, spec=P('data')), shaped(dtype='int32')
    report = explain(jax.jit(f), w, x, n, chip='TPU v5e')
    assert report.flops == 2 * (B // 4) * D * D
    assert 'one run (TPU v5e; assuming that loops of unknown length run once)' in str(report)
    # with a weight that is gathered in the loop
    w = shaped(D, D, spec=P('tensor'))
    unknown, known = explain(jax.jit(f), w, x, n), explain(jax.jit(lambda w, x: f(w, x, 5)), w, x)
    assert [row[1:] for row in unknown.diff(known).collectives] == [(None, 5)]
    assert ': ? => 5 (' in str(unknown.diff(known))


def test_narrow_products_that_a_cpu_widens(shaped):
    """In fp8, an H100 needs half the time of bf16; on CPU both products are in f32."""
    seconds = {}
    for dtype in ('bfloat16', 'float8_e4m3fn'):
        x = shaped(D, D, dtype=dtype)
        report = explain(lambda x: jnp.dot(x, x, preferred_element_type='float32'), x, chip='H100')
        seconds[dtype] = report.bounds[0].seconds
    assert seconds['bfloat16'] / seconds['float8_e4m3fn'] == pytest.approx(2, rel=0.01)
