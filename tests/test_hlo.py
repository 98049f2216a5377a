"""einshard compiles to what a mesh, PartitionSpecs and `jax.jit` by hand compile to.

On eight CPU devices and, ahead of time, on slices of TPU v5e. The optimised programs are compared
line by line in a canonical form: without metadata, with instructions and computations numbered as
they appear, and with the groups of a collective written out. XLA writes some in the axes of the
mesh, `mesh['d0'=2,'d1'=2,'d2'=2] {'d0','d1'}` or `mesh['data'=4,'model'=2] {'data'}`, others as
`[2,4]<=[4,2]T(1,0)`: all three are {0,2,4,6},{1,3,5,7}. Nothing else has to be made equal. A
program numbers its devices from 0 whichever they are, so the shardings of arguments and results
are compared too.
"""

import difflib
import itertools
import os
import re
from collections import Counter
from typing import Any, NamedTuple

import handwritten
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformer
from jax.sharding import AxisType, Mesh

from einshard import device_mesh, einshard, sharded

# libtpu guards the chips of a machine by a lock file; several test workers may describe slices
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

# by devices, and into how many parts the model is cut; data takes the rest
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


def mesh_by_hand(devices, model):
    """A mesh such as people make, over the devices in einshard's order."""
    in_order = np.array(device_mesh(devices).devices).reshape(-1, model)
    return Mesh(in_order, ('data', 'model'), axis_types=(AxisType.Auto,) * 2)


# --- the programs, as in handwritten.py but for the shardings -----------------------------------


def mlp_forward(devices, m):
    batch = f'b x -> b* x {m}'

    @sharded((f'x y -> * x y{m}', f'y z -> * y{m} z'), batch, out=batch, mesh=devices)
    def forward(weights, x):
        w_in, w_out = weights
        return einshard(jax.nn.relu(x @ w_in), f'b y -> b* y{m}') @ w_out

    return forward


def mlp_step(devices, m):
    batch, weights_spec = f'b x -> b* x {m}', (f'x y -> * x y{m}', f'y z -> * y{m} z')

    def mean_loss(weights, x, y):
        w_in, w_out = weights
        predicted = einshard(jax.nn.relu(x @ w_in), f'b y -> b* y{m}') @ w_out
        return jnp.mean((predicted - y) ** 2)

    @sharded(weights_spec, batch, batch, out=(weights_spec, None), mesh=devices, donate_argnums=0)
    def step(weights, x, y):
        loss, gradient = jax.value_and_grad(mean_loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), loss

    return step


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


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


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
    platform = devices[0].platform
    assert_same_program(
        compiled(ours, *arguments, platform=platform),
        compiled(by_hand, *arguments, platform=platform),
    )


@pytest.mark.parametrize(
    ('name', 'parallelism', 'tied'),
    [
        ('cpu', 'data', True),
        ('cpu', 'tensor', True),
        ('cpu', 'both', False),
        ('v5e:4x4', 'tensor', False),
        ('v5e:4x4', 'both', True),
        ('v5e:16x16', 'data', True),
        ('v5e:16x16', 'both', False),
    ],
)
def test_transformer_is_that_of_hand_written_jax(name, parallelism, tied):
    devices = _devices(name)
    n = len(devices)
    model = {'data': 1, 'tensor': n, 'both': 2}[parallelism]
    c = transformer.Config(
        n_layers=2,
        d_model=32,
        n_heads=32,
        n_kv_heads=16,
        d_head=4,
        d_ff=64,
        tied=tied,
        sequence=16,
        batch=n,
    )
    state = jax.eval_shape(lambda: transformer.init_state(jax.random.key(0), c))
    tokens = jax.ShapeDtypeStruct((n, c.sequence + 1), np.int32)
    ours = transformer.make_model(c, transformer.PLACEMENTS[parallelism], mesh=devices).train_step
    by_hand = handwritten.transformer_step(c, mesh_by_hand(devices, model))
    platform = devices[0].platform
    ours = compiled(ours, state, tokens, platform=platform)
    assert_same_program(ours, compiled(by_hand, state, tokens, platform=platform))
    # nothing is gathered: sums alone, over the devices that share the model or the batch
    row = np.arange(n).reshape(-1, model)
    partners = {str_of(numbers) for numbers in (row, row.T) if numbers.shape[1] > 1}
    found = {(kind, among) for kind, _, among in collectives(ours.lines)}
    if name != 'cpu' and jax.__version_info__ < (0, 10):
        # which cannot read the groups that libtpu 0.0.51 writes in the axes of a mesh
        found.discard(('all-reduce', '{}'))
        assert found <= {('all-reduce', among) for among in partners}
    else:
        assert found == {('all-reduce', among) for among in partners}


# --- the canonical form -------------------------------------------------------------------------


class Compiled(NamedTuple):
    lines: list[str]  # in the canonical form
    shardings: list[tuple[Any, int]]  # of arguments and results, with their ranks


def compiled(function, *arguments, platform='cpu'):
    # on a CPU half the time would go to LLVM, which comes after the HLO
    options = {'xla_backend_optimization_level': 0} if platform == 'cpu' else None
    program = function.lower(*arguments).compile(compiler_options=options)
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


_STRING = r'"(?:[^"\\]|\\.)*"'
_METADATA = re.compile(rf', metadata=\{{(?:[^{{}}"]|{_STRING}|\{{[^{{}}]*\}})*\}}')
_STACK_FRAMES = re.compile(
    r'^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)+\n*', re.MULTILINE
)
_NAME = re.compile(r'%[\w.-]+')
_HEADER = re.compile(r'^(?:ENTRY )?%\d+ \(.*\{$', re.MULTILINE)  # of a computation
_PARAMETER = re.compile(r'(?<=[( ])[\w.-]+(?=: )')
_GROUPS = re.compile(
    r'replica_groups=(\{\}|\{\{[\d,{} ]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?'
    r'|mesh\[[^\]]*\](?:, device_ids=\(\[[\d,]+\](?:T\([\d,]+\))?\))? \{[^}]*\})(?=[,\n])'
)
_COLLECTIVE = re.compile(
    r' = (\S.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\('
)


def canonical(text):
    """The lines of an optimised program, without what may differ between equal ones."""
    text = _STACK_FRAMES.sub('', _METADATA.sub('', text))
    text = re.sub(r'^HloModule [\w.-]+', 'HloModule', text)
    numbers = {}
    text = _NAME.sub(lambda found: numbers.setdefault(found[0], f'%{len(numbers)}'), text)
    text = _HEADER.sub(lambda found: _PARAMETER.sub('_', found[0]), text)
    n_groups = text.count('replica_groups=')
    assert len(_GROUPS.findall(text)) == n_groups, 'groups in a form that is not known here'
    text = _GROUPS.sub(lambda found: f'replica_groups={groups(found[1])}', text)
    return text.splitlines()


def groups(text):
    """The groups of a collective in plain numbers, whichever form they are written in."""
    if text.startswith('{'):
        listed = [[int(n) for n in g.split(',')] for g in re.findall(r'\{([\d, ]+)\}', text)]
    elif text.startswith('['):
        shape, dims, order = re.fullmatch(r'\[(.*)\]<=\[(.*?)\](?:T\((.*)\))?', text).groups()
        listed = _iota(_numbers(dims), _numbers(order or '')).reshape(_numbers(shape)).tolist()
    else:
        listed = _groups_of_mesh(text)
    return str_of(listed)


def str_of(listed):
    rows = sorted([int(number) for number in group] for group in listed)
    return '{' + ','.join('{' + ','.join(map(str, row)) + '}' for row in rows) + '}'


def _groups_of_mesh(text):
    """mesh['a'=2,'b'=4] {'b'}; {'b':(1)2} is the slower half of b, {'b':(2)2} the faster one.

    Device ids, if any, say which devices form the mesh: device_ids=([4,2]T(1,0)).
    """
    mesh, shape, order, axes = re.fullmatch(
        r'mesh\[(.*?)\](?:, device_ids=\(\[(.*?)\](?:T\((.*?)\))?\))? \{(.*)\}', text
    ).groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)
    ]
    dims, at = [], {}  # mesh axes, cut where a part begins or ends; and where each part is
    for name, size in sizes.items():
        edges = {1, size}
        for other, before, part in parts:
            edges |= {before, before * part} if other == name else set()
        for before, end in itertools.pairwise(sorted(edges)):
            at[name, before] = len(dims)
            dims.append(end // before)
    last = [at[name, before] for name, before, size in parts if size > 1]
    first = [i for i in range(len(dims)) if i not in last]
    n_groups = int(np.prod([dims[i] for i in first], dtype=int))
    ids = _iota(_numbers(shape) if shape else dims, _numbers(order or '')).reshape(dims)
    return ids.transpose(first + last).reshape(n_groups, -1).tolist()


def _iota(dims, order):
    numbers = np.arange(np.prod(dims, dtype=int)).reshape(dims)
    return numbers.transpose(order) if order else numbers


def _numbers(text):
    return [int(number) for number in text.split(',') if number]


def collectives(lines):
    """How often there is each kind of collective, by shape of the result and by groups."""
    found = Counter()
    for line in lines:
        if match := _COLLECTIVE.search(line):
            among = re.search(r'(?:replica_groups|source_target_pairs)=(\{\}|\{\{.*?\}\})', line)
            found[match[2], match[1], among and among[1]] += 1
    return found


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


@pytest.mark.parametrize('parts', [1, 4, 8])
def test_another_placement_is_another_program(devices8, parts):
    arguments = ARGUMENTS['mlp_step'](8)
    ours = compiled(mlp_step(devices8, 2), *arguments)
    by_hand = compiled(handwritten.mlp_step(mesh_by_hand(devices8, parts)), *arguments)
    assert collectives(ours.lines) != collectives(by_hand.lines)
    with pytest.raises(AssertionError):
        assert_same_program(ours, by_hand)


def test_other_groups_are_another_program(devices8):
    """As many parts, but the devices of a group are no neighbours."""
    arguments = ARGUMENTS['mlp_forward'](8)
    mesh = mesh_by_hand(devices8, 2)
    turned = Mesh(mesh.devices.reshape(2, 4), ('model', 'data'), axis_types=mesh.axis_types)
    ours = compiled(mlp_forward(devices8, 2), *arguments)
    by_hand = compiled(handwritten.mlp_forward(turned), *arguments)
    (ours, *other), (by_hand, *others) = collectives(ours.lines), collectives(by_hand.lines)
    assert not other + others
    assert ours == ('all-reduce', 'f32[2,32]{1,0}', '{{0,1},{2,3},{4,5},{6,7}}')
    assert by_hand == ('all-reduce', 'f32[2,32]{1,0}', '{{0,4},{1,5},{2,6},{3,7}}')


def test_other_devices_are_another_program(devices8):
    arguments = ARGUMENTS['mlp_forward'](8)
    mesh = mesh_by_hand(devices8, 2)
    reversed_ = Mesh(mesh.devices[::-1, ::-1], mesh.axis_names, axis_types=mesh.axis_types)
    ours = compiled(mlp_forward(devices8, 2), *arguments)
    by_hand = compiled(handwritten.mlp_forward(reversed_), *arguments)
    assert ours.lines == by_hand.lines
    with pytest.raises(AssertionError):
        assert_same_program(ours, by_hand)
