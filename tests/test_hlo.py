"""einshard compiles to what a mesh, PartitionSpecs and `jax.jit` by hand compile to.

On eight CPU devices and, ahead of time, on slices of TPU v5e. The optimized programs are compared
line by line in the canonical form of benchmarks/_canonical.py. A program numbers its devices from 0
whichever they are, so the shardings of arguments and results are compared too.
"""

import difflib
import itertools
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from einshard import einshard, sharded

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import _handwritten as handwritten
from benchmarks._canonical import canonical, collectives, groups, str_of
from benchmarks._handwritten import transformer
from benchmarks._models import floats, mesh_by_hand, mlp_forward, mlp_step

# libtpu guards the chips of a machine by a lock file; several test workers may describe slices
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

# by devices, the number of shards of the model; the batch is sharded over the rest
MACHINES = {'cpu': 2, 'v5e:4x4': 4, 'v5e:16x16': 16}


@pytest.fixture(scope='module', params=MACHINES)
def machine(request):
    return request.param, _devices(request.param)


def _devices(name):
    if name == 'cpu':
        return jax.devices()[:8]
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    from jax.experimental.topologies import get_topology_desc

    return get_topology_desc(name, 'tpu').devices


# --- the programs, as in benchmarks/_handwritten.py but for the shardings ------------------------


def attention(devices, m):
    stream, heads, w_in = f'b s d -> b* s d {m}', f'b s h e -> b* s h{m} e', f'd h e -> * d h{m} e'

    @sharded(stream, w_in, w_in, w_in, f'h e d -> * h{m} e d', out=stream, mesh=devices)
    def attend(x, w_q, w_k, w_v, w_o):
        q = einshard(jnp.einsum('bsd,dhe->bshe', x, w_q), heads)
        k = einshard(jnp.einsum('bsd,dhe->bshe', x, w_k), heads)
        v = einshard(jnp.einsum('bsd,dhe->bshe', x, w_v), heads)
        shares = jax.nn.softmax(jnp.einsum('bshe,bthe->bhst', q, k) * q.shape[-1] ** -0.5)
        return jnp.einsum('bshe,hed->bsd', jnp.einsum('bhst,bthe->bshe', shares, v), w_o)

    return attend


def scan(devices, m):
    batch = f'b x -> b* x {m}'

    @sharded((f'l x y -> * l x y{m}', f'l y x -> * l y{m} x'), batch, out=batch, mesh=devices)
    def layers(stacked, x):
        def layer(x, weights):
            w_in, w_out = weights
            hidden = einshard(jax.nn.relu(x @ w_in), f'b y -> b* y{m}')
            return einshard(x + hidden @ w_out, batch), None

        return jax.lax.scan(layer, x, stacked)[0]

    return layers


WEIGHTS = (floats(32, 64), floats(64, 32))
ARGUMENTS = {
    'mlp_forward': lambda n: (WEIGHTS, floats(n, 32)),
    'mlp_step': lambda n: (WEIGHTS, floats(n, 32), floats(n, 32)),
    'attention': lambda n: (floats(n, 8, 32), *[floats(32, 16, 4)] * 3, floats(16, 4, 32)),
    'scan': lambda n: ((floats(3, 32, 64), floats(3, 64, 32)), floats(n, 32)),
}
PROGRAMS = {program.__name__: program for program in (mlp_forward, mlp_step, attention, scan)}


@pytest.mark.parametrize('name', PROGRAMS)
def test_program_is_that_of_hand_written_jax(machine, name):
    kind, devices = machine
    model = MACHINES[kind]
    arguments = ARGUMENTS[name](len(devices))
    ours = PROGRAMS[name](devices, model)
    by_hand = getattr(handwritten, name)(mesh_by_hand(devices, model))
    assert_same_program(compiled(ours, *arguments), compiled(by_hand, *arguments))


@pytest.mark.parametrize(
    ('name', 'parallelism', 'tied'),
    [
        ('cpu', 'both', False),
        pytest.param('cpu', 'data', True, marks=pytest.mark.slow),
        pytest.param('v5e:4x4', 'both', True, marks=pytest.mark.slow),
    ],
)
def test_transformer_is_that_of_hand_written_jax(name, parallelism, tied):
    devices = _devices(name)
    n = len(devices)
    model = {'data': 1, 'both': 2}[parallelism]
    sizes = {'d_model': 32, 'n_heads': 32, 'n_kv_heads': 16, 'd_head': 4, 'd_ff': 64}
    c = transformer.Config(n_layers=2, **sizes, tied=tied, sequence=16, batch=n)
    state = jax.eval_shape(lambda: transformer.init_state(jax.random.key(0), c))
    tokens = jax.ShapeDtypeStruct((n, c.sequence + 1), np.int32)
    ours = transformer.make_model(c, transformer.PLACEMENTS[parallelism], mesh=devices).train_step
    by_hand = handwritten.transformer_step(c, mesh_by_hand(devices, model))
    ours = compiled(ours, state, tokens)
    assert_same_program(ours, compiled(by_hand, state, tokens))
    # nothing is gathered: sums alone, over the devices that share the model or the batch
    row = np.arange(n).reshape(-1, model)
    partners = {str_of(numbers) for numbers in (row, row.T) if numbers.shape[1] > 1}
    found = {(kind, among) for kind, _, among in collectives(ours.lines)}
    assert found == {('all-reduce', among) for among in partners}


# --- the comparison ------------------------------------------------------------------------------


class Compiled(NamedTuple):
    lines: list[str]  # in the canonical form
    shardings: list[tuple[Any, int]]  # of arguments and results, with their ranks


def compiled(function, *arguments):
    program = function.lower(*arguments).compile()
    shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
    ranks = [len(leaf.shape) for leaf in jax.tree.leaves((program.in_avals, program.out_info))]
    return Compiled(canonical(program.as_text()), list(zip(shardings, ranks, strict=True)))


def assert_same_program(ours, by_hand):
    assert collectives(ours.lines) == collectives(by_hand.lines)
    assert collectives(ours.lines), 'a program without collectives shows nothing'
    if ours.lines != by_hand.lines:  # pytest would take minutes to explain it
        apart = difflib.unified_diff(by_hand.lines, ours.lines, 'by hand', 'ours', n=0, lineterm='')
        pytest.fail('\n'.join(line[:500] for line in itertools.islice(apart, 40)))
    assert len(ours.shardings) == len(by_hand.shardings)
    for (sharding, n_dims), (other, _) in zip(ours.shardings, by_hand.shardings, strict=True):
        assert sharding.is_equivalent_to(other, n_dims)


# --- that the canonical form keeps what matters -------------------------------------------------


@pytest.mark.parametrize(
    'text',
    [
        '{{1,3,5,7},{0,2,4,6}}',
        '[2,4]<=[4,2]T(1,0)',
        "mesh['d0'=2,'d1'=2,'d2'=2] {'d0','d1'}",
        "mesh['data'=4,'model'=2] {'data'}",
        "mesh['data'=4,'model'=2] {'data':(1)2,'data':(2)2}",
        "mesh['x'=8,'y'=1] {'x':(1)4}",
        "mesh['x'=2,'y'=1,'z'=4], device_ids=([4,2]T(1,0)) {'z'}",
    ],
)
def test_groups_are_the_same_in_each_form(text):
    assert groups(text) == '{{0,2,4,6},{1,3,5,7}}'


@pytest.mark.parametrize(
    ('text', 'written_out'),
    [
        ("mesh['d0'=2,'d1'=2,'d2'=2] {'d2'}", '{{0,1},{2,3},{4,5},{6,7}}'),
        ("mesh['d0'=2,'d1'=2,'d2'=2] {'d1','d0'}", '{{0,4,2,6},{1,5,3,7}}'),  # another order
        ("mesh['x'=8] {'x':(2)2}", '{{0,2},{1,3},{4,6},{5,7}}'),
        ('[1,4]<=[4]', '{{0,1,2,3}}'),
        ('[4,1]<=[4]', '{{0},{1},{2},{3}}'),
        ('{}', '{}'),
    ],
)
def test_groups(text, written_out):
    assert groups(text) == written_out


def forward_and_by_hand(devices, mesh):
    arguments = ARGUMENTS['mlp_forward'](8)
    by_hand = handwritten.mlp_forward(mesh)
    return compiled(mlp_forward(devices, 2), *arguments), compiled(by_hand, *arguments)


@pytest.mark.parametrize('parts', [1, 4, 8])
def test_another_placement_is_another_program(devices8, parts):
    arguments = ARGUMENTS['mlp_step'](8)
    ours = compiled(mlp_step(devices8, 2), *arguments)
    by_hand = compiled(handwritten.mlp_step(mesh_by_hand(devices8, parts)), *arguments)
    assert collectives(ours.lines) != collectives(by_hand.lines)
    with pytest.raises(AssertionError):
        assert_same_program(ours, by_hand)


def test_other_groups_are_another_program(devices8):
    """The same number of shards, but the devices of a group are not neighbors."""
    mesh = mesh_by_hand(devices8, 2)
    turned = Mesh(mesh.devices.reshape(2, 4), ('model', 'data'), axis_types=mesh.axis_types)
    ours, by_hand = forward_and_by_hand(devices8, turned)
    (ours, *other), (by_hand, *others) = collectives(ours.lines), collectives(by_hand.lines)
    assert not other + others
    assert ours == ('all-reduce', 'f32[2,32]{1,0}', '{{0,1},{2,3},{4,5},{6,7}}')
    assert by_hand == ('all-reduce', 'f32[2,32]{1,0}', '{{0,4},{1,5},{2,6},{3,7}}')


def test_other_devices_are_another_program(devices8):
    mesh = mesh_by_hand(devices8, 2)
    reversed_ = Mesh(mesh.devices[::-1, ::-1], mesh.axis_names, axis_types=mesh.axis_types)
    ours, by_hand = forward_and_by_hand(devices8, reversed_)
    assert ours.lines == by_hand.lines
    with pytest.raises(AssertionError):
        assert_same_program(ours, by_hand)
