"""The commands explain and table of python -m einshard."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from command import main
from counting import counting

import einshard

TOO_MANY = 'JAX supports at most 2147483647 devices in a mesh'

MODEL = """
from dataclasses import dataclass
import jax
import jax.numpy as jnp
from einshard import Rules, sharded


@sharded('b x -> b* x', 'x y -> x y*', None, out='b y -> b* y')
def layer(x, w, scale=1.0):
    return jax.nn.relu(x @ w['kernel']) * scale


def rows(n, d=2):
    return jax.ShapeDtypeStruct((n, d), 'float32')


def plain(x):
    return x * 2


def init(n=64):
    return {'kernel': jnp.zeros((32, n)), 'bias': jnp.zeros(n)}


def weights():
    return {'kernel': jnp.zeros((32, 64))}


def both():
    return jnp.zeros((16, 32)), weights()


def rated(x):
    return 2 * x['rate']


class Config:
    size = 3

    def __init__(self):
        self.rate = 0.1


config = Config()


@jax.tree_util.register_dataclass
@dataclass
class Net:
    kernel: jax.Array

    def __call__(self, x):
        return x @ self.kernel


net = Net(jnp.zeros((32, 64)))


def loss(net, x):
    return net(x).sum()


rules = Rules([('kernel', 'i o -> i o*')], default='... -> * ...')
shapes = jax.eval_shape(init)
"""

WITH_DEVICES = """
import jax
from einshard import device_mesh, einshard, sharded
from jax.sharding import NamedSharding, PartitionSpec as P


@jax.jit
def jitted(x, mesh=1.0):
    return einshard(x, 'b x -> b* x').sum() * mesh


@jax.jit
def double(x, mesh=1.0):
    return x * 2 * mesh


mesh = device_mesh(jax.devices()[:8], data=8)
own = sharded('b x -> b@data x', mesh=mesh)(lambda x: x * 2)
rows = einshard(jax.ShapeDtypeStruct((16, 8), 'float32'), 'b x -> b@data x', mesh=mesh)


def make():
    return jax.numpy.ones((16, 8))


def shapes(mesh):
    return jax.ShapeDtypeStruct((16, 8), 'float32', sharding=NamedSharding(mesh, P('a', 'b')))


def in_context():
    mesh = jax.sharding.get_abstract_mesh()
    return jax.ShapeDtypeStruct((16, 8), 'float32', sharding=NamedSharding(mesh, P('a', 'b')))


def by_einshard():
    return einshard(make(), 'x y -> x@a y@b')


def by_constraint(mesh):
    return jax.lax.with_sharding_constraint(make(), NamedSharding(mesh, P('a', 'b')))


def by_device_put(mesh):
    return jax.device_put(make(), NamedSharding(mesh, P('a', 'b')))


def by_jit(mesh):
    return jax.jit(make, out_shardings=NamedSharding(mesh, P('a', 'b')))()


inside = jax.jit(by_einshard)
in_named_mesh = sharded('a b -> a@tp b')(lambda x: x)


@sharded('b x -> b* x', None, None, None)
def options(x, mesh, chip=1.0, fn=1.0):
    return x.sum() * mesh * chip * fn
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    (tmp_path / 'model_on_command.py').write_text(MODEL)
    (tmp_path / 'devices_on_command.py').write_text(WITH_DEVICES)
    (tmp_path / 'broken_on_command.py').write_text('import no_such_module_of_test')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])  # --devices changes it
    yield 'model_on_command'
    for name in ('model_on_command', 'devices_on_command'):
        sys.modules.pop(name, None)


def printed(capsys, command, *more):
    assert main([*command.split(), *more]) == 0
    captured = capsys.readouterr()
    assert captured.err == ''
    return captured.out


def refused(capsys, command):
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ''
    return captured.err.removeprefix('einshard.EinshardError: ').rstrip('\n')


def test_explain(capsys, model):
    text = printed(capsys, f'explain {model}:layer --args f32[16,32] {model}:weights scale=2.0')
    assert text.startswith('layer on 16 devices (cpu)\n')
    lines = text.splitlines()
    assert '  x         float32[16,32]  b x -> b16 x         128 B' in lines
    assert '  w/kernel  float32[32,64]  x y -> x y16         512 B' in lines
    assert any(line.startswith('     1  all-gather  f32[32,64]  1 of 16  b|y') for line in lines)


def test_explain_as_json_is_the_report_of_the_function(capsys, model):
    text = printed(capsys, f'explain {model}:plain --args bf16[4] --json')
    import model_on_command

    report = einshard.explain(model_on_command.plain, jax.ShapeDtypeStruct((4,), 'bfloat16'))
    assert json.loads(text) == report.to_dict()


def test_explain_has_bounds_for_a_chip(capsys, model):
    text = printed(capsys, f'explain {model}:plain --args bf16[4] --chip H100')
    assert 'HBM at least' in text


@pytest.mark.parametrize(
    ('text', 'array'),
    [
        ('f32[8,128]', 'float32[8,128]'),
        ('float16[ 3 ]', 'float16[3]'),
        ('i8[]', 'int8[]'),
        ('pred[2,2]', 'bool[2,2]'),
        ('0.5', 'float32[]'),
        ('3', 'int32[]'),
        ('x=u32[2]', 'uint32[2]'),
    ],
)
def test_arguments(capsys, model, text, array):
    plain = json.loads(printed(capsys, f'explain {model}:plain --json --args', text))
    (row,) = plain['arguments']
    shape = ','.join(map(str, row['shape']))
    assert (row['path'], f'{row["dtype"]}[{shape}]') == ('x', array)


def test_values_of_a_tuple_are_arguments(capsys, model):
    options = '--devices 8 --tries 0 --json'
    one_by_one = printed(
        capsys, f'explain {model}:layer --args f32[16,32] {model}:weights {options}'
    )
    assert printed(capsys, f'explain {model}:layer --args *{model}:both {options}') == one_by_one
    assert refused(capsys, f'explain {model}:layer --args {model}:both {options}').endswith(
        'instead:    write * before argument 1, which has 2 values'
    )
    assert refused(capsys, f'explain {model}:layer --args *{model}:weights {options}') == (
        f"'*{model}:weights' is not a tuple, but dict"
    )


def test_functions_are_called_with_values(capsys, model):
    for call, shape in (('rows(8)', [8, 2]), ('rows(8,4)', [8, 4])):
        plain = printed(capsys, f'explain {model}:plain --json --args {model}:{call}')
        assert json.loads(plain)['arguments'][0]['shape'] == shape
    assert refused(capsys, f'explain {model}:plain --args {model}:rows(n)') == (
        f"'n' in '{model}:rows(n)' are not numbers or strings"
    )


@pytest.mark.parametrize('text', ["{'rate': 0.1}", "x={'rate': 0.1}"])
def test_a_dict_with_a_colon_is_a_value(capsys, model, text):
    found = json.loads(printed(capsys, f'explain {model}:rated --json --args', text))
    assert [row['path'] for row in found['arguments']] == ['x/rate']


def test_explain_on_other_devices(capsys, model):
    command = f'explain {model}:layer --args f32[16,32] {model}:weights'
    text = printed(capsys, f'{command} --mesh data=2 tp=4')
    assert text.startswith('layer on 8 devices (cpu; data=2, tp=4)\n')
    assert 'b x -> b@(data,tp) x' in text
    assert printed(capsys, f'{command} --devices 4').startswith('layer on 4 devices (cpu)\n')


def test_explain_for_a_tpu(capsys, model):
    pytest.importorskip('libtpu')
    command = f'explain {model}:layer --args f32[16,32] {model}:weights --topology v5e:2x2'
    assert printed(capsys, command).startswith('layer on 4 devices (TPU v5 lite)\n')
    text = printed(capsys, f'{command} --mesh data=4')
    assert text.startswith('layer on 4 devices (TPU v5 lite; data=4)\n')
    text = refused(capsys, f'{command} --mesh data=8')
    assert text == '--mesh has 8 devices, but v5e:2x2 has 4'
    text = refused(capsys, f'{command} --devices 4')
    assert text == '--topology and --devices cannot be combined'


@pytest.mark.gpu
def test_explain_for_gpus(capsys, model):
    command = f'explain {model}:layer --args f32[16,32] {model}:weights --topology h100:2x4'
    assert printed(capsys, command).startswith('layer on 8 devices (NVIDIA H100 80GB HBM3)\n')
    text = printed(capsys, f'{command} --mesh data=8')
    assert text.startswith('layer on 8 devices (NVIDIA H100 80GB HBM3; data=8)\n')


def test_devices_are_simulated_in_a_process_of_its_own(model, tmp_path):
    path = os.pathsep.join([str(tmp_path), str(Path(einshard.__file__).parents[1])])
    environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    command = f'explain {model}:layer --devices 8 --args f32[24,32] {model}:weights'
    done = subprocess.run(
        [sys.executable, '-m', 'einshard', *command.split()],
        env={**environment, 'PYTHONPATH': path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('layer on 8 devices (cpu)\n')


def test_table(capsys, model):
    import model_on_command

    expected = str(model_on_command.rules.table(model_on_command.shapes)) + '\n'
    for tree in ('init', 'shapes'):
        assert printed(capsys, f'table {model}:rules {model}:{tree}') == expected
    command = f'table {model}:rules {model}:init'
    text = printed(capsys, f'{command} --args n=4096 --devices 512')
    row = 'kernel float32[32,4096] kernel i o -> i o* [32,8] 1.0 KiB'
    assert row.split() in [line.split() for line in text.splitlines()]
    assert 'per device on 512 devices' in text
    assert 'per device on 16 devices' in printed(capsys, f'{command} --mesh data=4 tp=4')


def test_a_callable_pytree_is_not_called(capsys, model):
    text = printed(capsys, f'explain {model}:loss --args {model}:net f32[8,32]')
    assert '  net/kernel  float32[32,64]' in text
    assert 'kernel  float32[32,64]' in printed(capsys, f'table {model}:rules {model}:net')
    assert 'RULES = [' in printed(capsys, f'eject {model}:rules --args {model}:net')


NO_ARGUMENT = (
    "the arguments do not match the parameters of plain: missing a required argument: 'x'\n"
    '  parameters: x\n'
    '  arguments:  none'
)
# a command, and its error
BAD_INPUT = [
    ('explain MODEL', "'MODEL' does not have the form module:name\n  example: model:step"),
    (
        'explain no_module_of_test.inner:f',
        "no module named 'no_module_of_test'\n  searched: the current folder and sys.path",
    ),
    (
        'explain MODEL:layr',
        "module 'MODEL' has no 'layr'\n"
        '  module has: Config, Net, both, config, init, layer, loss, net, plain, rated, rows, '
        'rules, shapes, weights',
    ),
    ('explain MODEL:Config.siez', "module 'MODEL' has no 'Config.siez'\n  Config has: size"),
    ('explain MODEL:config.lr', "module 'MODEL' has no 'config.lr'\n  config has: rate, size"),
    (
        'explain MODEL:plain --args f33[2]',
        "'f33' in 'f33[2]' is not a JAX dtype\n"
        '  dtypes: bf16, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64, c64, pred, '
        'or the full names, such as float32',
    ),
    (
        'explain MODEL:plain --args f32[2',
        "'f32[2' is not a valid argument\n  arrays: 'f32[8,128]'\n  values: 0.1, True, module:name",
    ),
    ('explain MODEL:plain', NO_ARGUMENT),
    (
        'explain MODEL:Config.size',
        '3 (int) is not a function\n  expected: a function, or a lowered function: f.lower(...)',
    ),
    ('explain MODEL:plain --args f32[2] --mesh a=2 a=2', "--mesh lists axis 'a' more than once"),
    (
        'explain MODEL:plain --args f32[2] --devices 64',
        'JAX has already started with 16 CPU devices, so 64 devices cannot be simulated',
    ),
    ('table MODEL:layer MODEL:init', 'MODEL:layer is of type ShardedFunction, not Rules'),
    (
        'explain MODEL:plain --args f32[2] --devices 100000000',
        'cannot simulate 100000000 devices\n  at most: 16384',
    ),
    (
        'explain MODEL:plain --args f32[2] --mesh a=4 b=5000',
        'cannot simulate 20000 devices\n  at most: 16384',
    ),
    (
        'explain .MODEL:plain',
        "'.MODEL' is a relative import; use the full name of the module\n"
        '  example: package.model:step',
    ),
    ('table MODEL:rules MODEL:plain', NO_ARGUMENT),
    ('explain MODEL:plain --args MODEL:plain', NO_ARGUMENT),
    (
        'table MODEL:rules MODEL:init --devices 99999999999999999999',
        f"{TOO_MANY}\n  mesh: 'd0': 99999999999999999999 (Auto, canonical mesh)",
    ),
    (
        'table MODEL:rules MODEL:init --mesh a=65536 b=32768',
        f'{TOO_MANY}\n'
        "  array: float32[64], leaf 'bias'\n"
        '  rule:  default=\n'
        "  mesh:  'a': 65536, 'b': 32768 (Auto)\n"
        "  also:  float32[32,64], leaf 'kernel'",
    ),
    ('tabel MODEL:rules', "'tabel' is not a command\n  try: python -m einshard table"),
    ('explian', "'explian' is not a command\n  try: python -m einshard explain"),
    (
        'table MODEL:rules MODEL:shapes --args 3',
        'MODEL:shapes is of type dict, which takes no arguments',
    ),
]


@pytest.mark.parametrize(('command', 'text'), BAD_INPUT)
def test_bad_input(capsys, model, command, text):
    jax.devices()  # started, as by the tests before this one
    assert refused(capsys, command.replace('MODEL', model)) == text.replace('MODEL', model)


def test_an_import_error_in_the_module_is_unchanged(model):
    with pytest.raises(ModuleNotFoundError, match='no_such_module_of_test'):
        main(['explain', 'broken_on_command:f'])


def test_save(capsys, model, tmp_path):
    file = tmp_path / 'report.html'
    text = printed(capsys, f'explain {model}:plain --args f32[2] --save', str(file))
    assert text.startswith('plain on ')
    assert file.read_text('utf-8').startswith('<!DOCTYPE html>')


def test_timeline(capsys, model, tmp_path):
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    command = (
        f'explain {model}:layer --args f32[16,32] {model}:weights --topology v5e:2x2 --tries 0'
    )
    file = tmp_path / 'step.svg'
    text = printed(capsys, f'{command} --timeline --save {file}')
    assert 'estimate, not measured' in text
    assert file.read_text('utf-8').startswith('<svg ')
    data = json.loads(printed(capsys, f'{command} --timeline --json'))
    assert data['timeline']['totals']['step'] > 0
    assert json.loads(printed(capsys, f'{command} --json'))['timeline'] is None
    assert 'timeline' not in printed(capsys, command)
    text = refused(capsys, f'explain {model}:plain --args f32[2] --timeline')
    assert text.startswith('there is no timeline of a program that is compiled for CPUs')


@pytest.mark.parametrize(
    ('name', 'words'), [('', 'is a directory'), ('no/r.html', 'does not exist')]
)
def test_save_fails_before_anything_is_compiled(capsys, model, tmp_path, name, words):
    with counting() as counts:
        status = main(
            [*f'explain {model}:plain --args f32[2] --save'.split(), str(tmp_path / name)]
        )
    assert (status, counts.compiled) == (2, [])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize('command', ['explain', 'table'])
def test_help(capsys, command):
    assert main([command, '--help']) == 0
    assert f'python -m einshard {command} model:' in capsys.readouterr().out


@pytest.mark.parametrize('option', ['--devices 0', '--devices many', '--mesh data'])
def test_options_that_are_not_devices(capsys, model, option):
    assert main(f'explain {model}:plain --args f32[2] {option}'.split()) == 2
    assert option.split()[1] in capsys.readouterr().err


def test_jitted_functions(capsys, model):
    """They take no mesh: --devices only simulates, --mesh and --topology enter a mesh."""
    text = printed(capsys, 'explain devices_on_command:jitted --args f32[16,8] --devices 16')
    assert text.startswith('jitted on 16 devices (cpu)\n')
    text = printed(capsys, 'explain devices_on_command:jitted --args f32[16,8] --mesh a=4 b=2')
    assert text.startswith('jitted on 8 devices (cpu; a=4, b=2)\n')
    text = printed(
        capsys, 'explain devices_on_command:double --args devices_on_command:rows --devices 16'
    )
    assert text.startswith('double on 8 devices (cpu; data=8)\n')
    assert refused(
        capsys, 'explain devices_on_command:double --args f32[16,8] --devices 16'
    ).startswith(
        'devices_on_command:double is already jitted, and neither it nor its arguments are '
        'sharded, so it runs on 1 device and not on 16\n'
    )
    text = printed(capsys, 'eject devices_on_command:jitted --args f32[16,8] --mesh a=4 b=2')
    assert "jax.make_mesh((4, 2), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)" in text


PLACED = [
    'shapes', 'in_context', 'by_einshard', 'by_constraint', 'by_device_put', 'by_jit', 'inside',
]  # fmt: skip


@pytest.mark.parametrize('made', PLACED)
def test_a_jitted_function_with_arguments_that_a_function_places(capsys, model, made):
    command = f'explain devices_on_command:double --args devices_on_command:{made}'
    text = printed(capsys, f'{command} --mesh a=4 b=2')
    assert text.startswith('double on 8 devices (cpu; a=4, b=2)\n')
    assert '  x     float32[16,8]  a b -> a@a b@b' in text
    if made in ('shapes', 'by_device_put'):
        pytest.importorskip('libtpu')
        text = printed(capsys, f'{command} --topology v5e:2x4 --mesh a=4 b=2')
        assert text.startswith('double on 8 devices (TPU v5 lite; a=4, b=2)\n')
        assert '  x     float32[16,8]  a b -> a@a b@b' in text


def test_a_function_that_needs_a_mesh(capsys, model):
    assert refused(
        capsys, 'explain devices_on_command:double --args devices_on_command:shapes'
    ) == (
        "devices_on_command:shapes has a parameter 'mesh', so the command needs a mesh\n"
        "  looked up: 'a' and 'b'\n"
        '  options:   --mesh a=4 b=2 or --topology v5e:4x4 --mesh a=4 b=4'
    )


def test_fail_on_findings(capsys, model):
    """8 devices compute the same product, which is a finding; with a sharded batch, none."""
    command = f'explain {model}:loss --args {model}:net f32[4096,32] --mesh a=8'
    command += ' --tries 2 --fail-on findings'
    assert main(command.split()) == 3
    assert '\nfindings\n' in capsys.readouterr().out
    assert main([*command.split(), '--json']) == 3
    kinds = {each['kind'] for each in json.loads(capsys.readouterr().out)['findings']}
    assert kinds
    ignored = [option for kind in kinds for option in ('--ignore', kind)]
    assert main([*command.split(), *ignored]) == 0
    assert main([*command.split(), '--ignore', 'slow network']) == 3
    assert main([*command.split(), '--ignore', 'slow']) == 2
    assert "'slow network'" in capsys.readouterr().err
    printed(capsys, f'explain {model}:plain --args f32[8] --mesh a=8 --fail-on findings')


@pytest.mark.parametrize(
    ('options', 'error'),
    [
        ('--devices 8 --chip X', '--chip X is not a known chip\n  known chips: TPU v4, '),
        ('--topology v5e:2x2 --chip X', '--chip X is not a known chip\n  known chips: TPU v4, '),
    ],
)
def test_errors_name_the_options_of_the_command(capsys, model, options, error):
    text = refused(capsys, f'explain {model}:plain --args f32[8] {options}')
    assert text.startswith(error)
    assert 'chip=' not in text


def test_a_mesh_that_is_missing_is_an_option(capsys, model):
    command = 'explain devices_on_command:in_named_mesh --args f32[16,8]'
    assert refused(capsys, command).endswith('\n  expected: --mesh AXIS=SIZE')
    text = refused(capsys, f'{command} --devices 4')
    assert '\n  expected: a mesh with named axes: --mesh tp=4\n' in text


@pytest.mark.parametrize(
    ('options', 'error'),
    [
        (
            '--devices 4',
            '--objective bound needs a chip, but the chip of these devices is unknown\n'
            '  devices: cpu\n'
            "  instead: --chip 'TPU v5e', --topology v5e:4x4, or --objective bytes",
        ),
        ('--devices 4 --objective x', "--objective must be 'bound', 'bytes' or 'memory', not 'x'"),
        ('--devices 4 --objective bytes --memory x', "'x' is not a valid size for --memory\n"),
    ],
)
def test_errors_of_plan_name_the_options_of_the_command(capsys, model, options, error):
    text = refused(capsys, f'plan {model}:loss --args {model}:net f32[8,32] {options}')
    assert text.startswith(error)


def test_functions_with_a_mesh(capsys, model):
    text = printed(capsys, 'explain devices_on_command:own --args f32[16,8] --devices 16')
    assert text.startswith('<lambda> on 8 devices (cpu; data=8)\n')
    for option in ('--mesh x=8', '--topology v5e:2x4'):
        assert refused(capsys, f'explain devices_on_command:own --args f32[16,8] {option}') == (
            f'devices_on_command:own has its own mesh, so {option.split()[0]} cannot be given\n'
            '  instead: omit it; --devices N simulates N devices'
        )


@pytest.mark.parametrize('function', ['jitted', 'options', 'double'])
@pytest.mark.parametrize('value', ['0.1', 'f32[]'])
def test_parameters_with_names_of_options(capsys, model, function, value):
    command = f'explain devices_on_command:{function} --args f32[16,8] mesh={value} --json'
    arguments = json.loads(printed(capsys, command))['arguments']
    assert [row['path'] for row in arguments][:2] == ['x', 'mesh']


def test_parameters_with_names_of_options_of_sharded_functions(capsys, model):
    command = (
        'explain devices_on_command:options --args f32[16,8] mesh=0.1 fn=f32[] chip=f32[] --json'
    )
    names = {row['path'] for row in json.loads(printed(capsys, command))['arguments']}
    assert names == {'x', 'mesh', 'chip', 'fn'}
