"""The plan that `plan` returns: code to paste, comparisons, reports and limits."""

import itertools
import re
import textwrap
from dataclasses import replace
from unittest import mock

import jax
import numpy as np
import planned
import pytest
from command import main
from jax.sharding import Mesh
from placed import struct

from einshard import (
    EinshardError,
    Rules,
    axis_rules,
    describe,
    device_mesh,
    einshard,
    make_sharding,
    plan,
    sharded,
    to_jax,
    topology,
)

EIGHT = device_mesh(jax.devices()[:8])
CHIP = 'TPU v5e'
MLP_STEP = planned.mlp_step(8192, 512, 2048)


@pytest.fixture(scope='module', autouse=True)
def one_worker():
    with planned.one_worker(8):
        yield


@pytest.fixture(scope='module')
def found():
    step, args = MLP_STEP
    return plan(step, *args, mesh=EIGHT, chip=CHIP, compilations=3)


def test_the_rules_run(found):
    step, (weights, x) = MLP_STEP
    with jax.set_mesh(found.mesh), axis_rules(found.rules):
        placed = einshard(
            jax.tree.map(lambda s: np.ones(s.shape, s.dtype), weights), planned.MLP_RULES
        )
        updated, _ = step(placed, np.ones(x.shape, x.dtype))
    assert describe(updated) == describe(einshard(weights, rules_of(found), mesh=found.mesh))


MESHES = {
    'all devices': device_mesh(),
    'the first devices': EIGHT,
    'the last devices': device_mesh(jax.devices()[8:]),
    'every other device': device_mesh(jax.devices()[::2]),
    'a mesh of the user': Mesh(np.array(jax.devices()[8:][::-1]).reshape(4, 2), ('data', 'in')),
    'parameters of device_mesh': Mesh(EIGHT.devices.reshape(4, 2), ('devices', 'axis_types')),
}


def test_the_printed_code_runs(found):
    code = str(found).split('\n\n', 1)[1].split('\nplans (')[0].split('\n', 1)[1]
    calls = []

    def step(_):
        calls.append((jax.sharding.get_mesh(), make_sharding('embed mlp')))

    names = {'step': step}
    exec(textwrap.dedent(code), names)
    with jax.set_mesh(found.mesh), axis_rules(found.rules):
        assert calls == [(found.mesh, make_sharding('embed mlp'))]
    assert names['rules'] == found.rules


@pytest.mark.parametrize('what', MESHES)
def test_the_code_of_the_mesh(found, what):
    mesh = MESHES[what]
    names = mesh.axis_names if len(mesh.axis_names) == 2 else ('x', 'y')
    expected = Mesh(device_mesh(mesh).devices.reshape(-1, 2), names)
    code = code_of_mesh(found, mesh, expected)
    assert eval(code, {'jax': jax, 'device_mesh': device_mesh}) == expected


def test_the_code_of_the_mesh_of_a_topology(found):
    mesh = pytest.importorskip('libtpu') and topology('v5e:4x4', x=4, y=4)
    # to run on such a slice
    assert code_of_mesh(found, mesh, mesh) == 'device_mesh(x=4, y=4)'


def code_of_mesh(found, devices, mesh):
    """The code of the mesh of a plan that had found this one for these devices."""
    best = replace(found.best, candidate=replace(found.best.candidate, mesh=(*mesh.shape.items(),)))
    return re.search('mesh = (.*)', str(replace(found, devices=devices, choices=(best,))))[1]


def rules_of(found):
    """The rules that the plan prints."""
    code = '\n'.join(line for line in found.code if not line.startswith('x = '))
    return eval(code.removeprefix('weights = '), {'Rules': Rules})


def test_to_jax(found):
    names, text = {}, to_jax(found)
    exec(text, names)
    step, args = MLP_STEP
    assert names['mesh'] == found.mesh
    with jax.set_mesh(found.mesh), axis_rules(found.rules):
        expected = step.in_shardings(*args)
        constraint = make_sharding('batch mlp')
    with mock.patch.object(jax, 'jit', lambda f, **options: options):
        options = names['jit_step'](None)
    assert options['in_shardings'] == tuple(expected.values())
    [call] = re.findall("'batch mlp'\n#     x = (.*)", text)
    with mock.patch.object(jax.lax, 'with_sharding_constraint', lambda x, sharding: sharding):
        assert eval(call, names, {'x': None}) == constraint
    with pytest.raises(EinshardError, match='a Plan already has its arguments and mesh'):
        to_jax(found, *args)


def test_code_to_paste():
    rules = Rules([(r'\bw$', 'embed mlp'), ('b', 'mlp')], default='... -> * ...')

    @sharded(rules, ('batch embed', 'batch'))
    def f(weights, xs):
        return xs[0] @ weights['w'] + weights['b'] + xs[1][:, None]

    args = ({'w': struct(64, 64), 'b': struct(64)}, (struct(64, 64), struct(64)))
    found = plan(
        f, *args, mesh=EIGHT, chip=CHIP, pin={'batch': '@x', 'mlp': '', 'embed': ''}, compilations=1
    )
    assert found.code == (
        'weights = Rules([',
        r"    (r'\bw$', 'embed mlp'),",
        "    ('b', 'mlp'),",
        "], default='... -> * ...')",
        "xs = ('batch@x embed', 'batch@x')",
    )
    assert found.rules == {'embed': '', 'mlp': '', 'batch': '@x'}


def test_code_of_an_argument_in_args():
    @sharded('batch')
    def f(*args):
        return args[0] * 2

    pin = {'batch': '@x'}
    found = plan(f, struct(64), mesh=EIGHT, chip=CHIP, pin=pin, compilations=1)
    assert found.code == ("args_0 = 'batch@x'",)


def test_plans_are_compared(found):
    assert found.fits
    best, second = found.choices[:2]
    assert best.cost('bound') <= second.cost('bound')
    names = [name for name, *_ in found.diff(1).arrays if name != 'mesh shape']
    ours, theirs = best.candidate.placements, second.candidate.placements
    assert set(names) == {name for name in ours if ours[name] != theirs[name]}
    report = found.explain()
    assert report.n_devices == 8
    assert dict(report.mesh) == dict(best.candidate.mesh)
    assert str(found.why('mlp')).startswith(f'mlp{found.rules["mlp"]}: bound')
    assert found.plot().count('<circle') == len(found.choices)
    data = found.to_dict()
    assert (data['rules'], data['fits'], len(data['choices'])) == (found.rules, True, 3)
    for wrong in (lambda: found.explain(99), lambda: found.why('nothing')):
        with pytest.raises(EinshardError):
            wrong()


def test_nothing_fits():
    step, args = MLP_STEP
    found = plan(step, *args, mesh=EIGHT, chip=CHIP, memory='1 MB', compilations=1)
    assert not found.fits
    [warning] = found.warnings
    assert warning.startswith('no plan fits into memory: the closest one needs')
    assert 'per device, more than 976.6 KiB. To fit, ' in warning
    assert warning.endswith(' Weights and other state take 8.0 MiB before sharding')


def test_candidates_of_the_user_are_evaluated():
    step, args = MLP_STEP
    ours = {'data': 4, 'tensor': 2}, {'batch': '@data', 'mlp': '@tensor', 'heads': '@tensor'}
    found = plan(step, *args, mesh=EIGHT, objective='bytes', candidates=[ours], compilations=2)
    assert ours[0] in [dict(choice.candidate.mesh) for choice in found.choices]
    network_bytes = [choice.network_bytes for choice in found.choices]
    assert network_bytes[0] == min(network_bytes)


def test_command(capsys, monkeypatch, tmp_path):
    (tmp_path / 'planned_model.py').write_text(
        'import jax\nfrom einshard import sharded\n\n\n'
        "@sharded('batch embed', 'embed mlp')\ndef up(x, w):\n    return x @ w\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr('einshard._cli.plan_command.mesh_of', lambda *_: EIGHT)
    arguments = ['plan', 'planned_model:up', '--args', 'f32[64,64]', 'f32[64,64]', '--devices', '8']
    options = '--objective bytes --pin batch=@x embed= --compilations 1'
    assert main([*arguments, *options.split()]) == 0
    assert "x = 'batch@x embed'" in capsys.readouterr().out


def test_names_of_flax_shard_the_arguments():
    nn = pytest.importorskip('flax.linen')
    init = nn.with_logical_partitioning(nn.initializers.ones, ('embed', 'mlp'))
    layer, x = nn.Dense(512, use_bias=False, kernel_init=init), struct(128, 256)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    pin = {'embed': '', 'mlp': '@x'}
    found = plan(layer.apply, params, x, mesh=EIGHT, objective='memory', pin=pin, compilations=1)
    [kernel] = [row for row in found.explain().arguments if 'kernel' in row.path]
    assert kernel.placement == 'a b -> a b@x'
    assert found.rules['mlp'] == '@x'
    assert found.warnings == ()


def test_names_of_flax_shard_arguments_without_a_spec():
    """The plan is that of the same names in specs, whatever else the function has specs for."""
    nn = pytest.importorskip('flax.linen')

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.ones
            up = nn.with_logical_partitioning(init, ('embed', 'mlp'))
            down = nn.with_logical_partitioning(init, ('mlp', 'embed'))
            x = nn.Dense(1024, use_bias=False, kernel_init=up)(x)
            return nn.Dense(256, use_bias=False, kernel_init=down)(x)

    def step(x, scale, *, params):
        return scale * Mlp().apply(params, x)

    x = struct(128, 256)
    boxed = jax.eval_shape(Mlp().init, jax.random.key(0), x)
    names = Rules([('Dense_0', 'embed mlp'), ('Dense_1', 'mlp embed')])
    by_flax = sharded('batch act', params=None, static_argnames='scale')(step)
    by_spec = sharded('batch act', params=names, static_argnames='scale')(step)
    # a spec counts, not the names in Flax
    renamed = Rules([('Dense_0', 'in out'), ('Dense_1', 'out in')])
    by_both = sharded('batch act', params=renamed, static_argnames='scale')(step)
    jitted = jax.jit(step, static_argnames='scale')

    def best(step, params, **pin):
        options = {'mesh': EIGHT, 'objective': 'memory', 'compilations': 1}
        found = plan(step, x, 2.0, params=params, pin=pin, **options)
        report = found.explain()
        kernels = [row.bytes for row in report.arguments if 'kernel' in row.path]
        return sorted(found.rules), kernels, report.memory.total

    data = {'batch': '', 'act': ''}
    expected = best(by_spec, nn.unbox(boxed), embed='', mlp='@x', **data)
    assert expected[0] == ['act', 'batch', 'embed', 'mlp']
    assert best(by_flax, boxed, embed='', mlp='@x', **data) == expected
    # without a spec, the batch gets a name of its own
    rules, kernels, memory = best(jitted, boxed, embed='', mlp='@x')
    assert kernels == expected[1]
    assert memory < expected[2]
    assert {'embed', 'mlp'} <= {*rules}
    renamed_plan = best(by_both, boxed, **{'in': '', 'out': '@x'}, **data)
    assert renamed_plan == (['act', 'batch', 'in', 'out'], *expected[1:])


# --- jax.set_mesh, and many names -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('type_', list(jax.sharding.AxisType)[:2])
@pytest.mark.parametrize('of', ['simulated', 'v5e:2x4'])
def test_under_set_mesh(of, type_):
    """A topology has devices on which nothing runs."""
    devices = EIGHT.devices if of == 'simulated' else topology(of).devices
    types = (type_, type_)
    mesh = Mesh(devices.reshape(4, 2), ('data', 'tp'), axis_types=types)
    step, args = planned.mlp_step(8192, 512, 2048)
    options = {'chip': CHIP, 'compilations': 2, 'objective': 'bytes'}
    expected = plan(step, *args, mesh=mesh, **options)
    with jax.set_mesh(mesh):
        found = plan(step, *args, **options)
        assert jax.sharding.get_mesh() == mesh
    assert found.rules == expected.rules
    assert [str(one) for one in found.choices] == [str(one) for one in expected.choices]


def test_bare_partition_specs_under_set_mesh():
    """JAX accepts these only where a mesh is in context."""
    mesh = jax.make_mesh((4, 2), ('data', 'tp'), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @sharded('batch embed', 'embed mlp')
    def up(x, w):
        return jax.lax.with_sharding_constraint(x @ w, jax.sharding.PartitionSpec('data'))

    with jax.set_mesh(mesh):
        found = plan(up, struct(64, 32), struct(32, 16), chip=CHIP, compilations=2)
    assert '@data' in found.rules['batch']


@pytest.mark.parametrize('n', [33, pytest.param(70, marks=pytest.mark.slow)])
def test_many_names(n):
    """An array of devices, and so a Mesh, has at most 32 or 64 axes."""
    letters = 'abcdefghijklmnopqrstuvwxyz'
    names = [f'{a}{b}' for a in letters[:3] for b in letters][:n]
    weights = [f'{one} {other}' for one, other in itertools.pairwise(names)]

    @sharded(weights, f'batch {names[0]}')
    def product(weights, x):
        for w in weights:
            x = x @ w
        return x

    args = [struct(16, 16)] * len(weights), struct(64, 16)
    found = plan(product, *args, mesh=EIGHT, chip=CHIP, compilations=1)
    assert {*found.rules} == {'batch', *names}
    assert any(found.rules.values())
