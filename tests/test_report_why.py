"""`Report.why`, `Finding.reason` and the command `einshard why`."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import main
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from modules import line_of
from placed import struct_on

from einshard import EinshardError, device_mesh, explain, sharded

EIGHT = jax.devices()[:8]
MESH = device_mesh(EIGHT, data=2, tensor=4)
shaped = struct_on(MESH)


X, W_IN, W_OUT = shaped((64, 32), 'data'), shaped((32, 128), None, 'tensor'), shaped((128, 32))
ACROSS = shaped((128, 32), None, 'tensor')


def mlp(x, w_in, w_out):
    return jnp.tanh(x @ w_in) @ w_out


def test_a_row_a_line_and_an_argument():
    report = explain(jax.jit(mlp), X, W_IN, ACROSS, tries=0)
    row = max(report.collectives, key=lambda row: row.total_bytes)
    (reason,) = report.why(row).reasons
    assert reason.cause == row.cause == 'inserted'
    assert {*reason.origins} == {('tensor', 'argument w_in'), ('tensor', 'argument w_out')}
    place = line_of(mlp, 'tanh')
    at_line = report.why(place)
    assert reason in at_line.reasons
    assert [axis.axis for value in at_line.values for axis in value.axes if axis.dimension == 1]
    (value,) = report.why('w_out').values
    assert str(value) == 'w_out, f32[128,32]: tensor on axis 1, as given'
    assert report.why('result').values[0].name == 'result'
    text = str(at_line)
    assert reason.text.split(';')[0] in ' '.join(text.split())
    assert json.loads(json.dumps(at_line.to_dict())) == at_line.to_dict()


def test_findings_have_the_reason_of_their_largest_collective():
    shapes = ((4096, 512), 'data'), ((512, 2048), None, 'tensor'), ((2048, 512), None, 'tensor')
    arguments = [shaped(*one) for one in shapes]
    for tries in (0, 2):
        report = explain(jax.jit(mlp), *arguments, tries=tries)
        # without a change that was tried, it is a note
        (finding,) = report.findings or [n for n in report.notes if n.kind == 'cost']
        assert 'w_out has tensor on axis 1' in finding.reason
        assert f'({finding.reason})' in ' '.join(str(report).split())


def test_places_where_nothing_is():
    report = explain(jax.jit(mlp), X, W_IN, ACROSS, tries=0)
    with pytest.raises(EinshardError, match='no collective and no value at'):
        report.why('model.py:1')
    with pytest.raises(EinshardError, match='no longer has its program'):
        pickle.loads(pickle.dumps(report)).why('w_out')


def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def helped(x, w_in, w_out):
    h = constrain(x @ w_in, 'data', 'tensor')
    h = constrain(jnp.tanh(h), 'data')
    return h @ w_out


def test_the_call_of_a_helper_is_named():
    report = explain(jax.jit(helped), X, W_IN, W_OUT, tries=0)
    (reason,) = (r for row in report.collectives for r in report.why(row).reasons)
    helper = line_of(constrain, 'with_sharding_constraint')
    call = line_of(helped, 'jnp.tanh').rpartition(':')[2]
    assert f'your constraint at {helper}, called at line {call},' in reason.text
    assert reason.cause == 'requested'


def test_results_have_their_paths():
    out = NamedSharding(MESH, P('data'))
    step = jax.jit(lambda x, w: {'new': x @ w}, out_shardings={'new': out})
    report = explain(step, X, W_IN, tries=0)
    (reason,) = report.why(report.collectives[0]).reasons
    assert 'out_shardings of result/new drop it' in reason.text
    assert reason.cause == 'requested'


def test_axes_of_expressions_with_counts():
    @sharded('b x -> b4 x 2', 'x y -> 4 x y2', 'y z -> 4 y z2', out='b z -> b4 z 2')
    def counted(x, w_in, w_out):
        return jnp.tanh(x @ w_in) @ w_out

    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W_IN, W_OUT)]
    report = explain(counted, *arrays, mesh=device_mesh(EIGHT), tries=0)
    text = report.why('x').values[0].text
    assert text == 'x, f32[64,32]: b on axis 0, as given'


def test_an_operation_that_is_not_partitioned():
    mesh = device_mesh(EIGHT, data=8)
    a = shaped((256, 64), 'data', mesh=mesh)
    report = explain(jax.jit(lambda a: jnp.linalg.qr(a * 2)[1]), a, tries=0)
    (reason,) = (r for row in report.collectives for r in report.why(row).reasons)
    assert (reason.cause, reason.origins) == ('inserted', (('data', 'argument a'),))
    assert reason.text.endswith('needs that axis unsharded')


def test_a_program_for_gspmd_is_read_with_shardy():
    if not hasattr(jax.config, 'jax_use_shardy_partitioner'):
        pytest.skip('this JAX has no GSPMD')
    jax.config.update('jax_use_shardy_partitioner', False)
    try:
        report = explain(jax.jit(mlp), X, W_IN, ACROSS, tries=0)
        why = report.why('w_out')
        assert jax.config.jax_use_shardy_partitioner is False
    finally:
        jax.config.update('jax_use_shardy_partitioner', True)
    assert 'partitioned by GSPMD' in why.note
    assert why.values[0].axes[0].origin == 'argument w_out'


def test_a_compiled_program_has_no_reasons():
    compiled = jax.jit(mlp).lower(X, W_IN, ACROSS).compile()
    why = explain(compiled, tries=0).why('w_out')
    assert why.reasons == why.values == ()
    assert 'compiled' in why.note


def placed():
    return X, W_IN, ACROSS


def test_at_the_command_line(capsys, tmp_path, monkeypatch):
    (tmp_path / 'whys.py').write_text(
        'import jax, jax.numpy as jnp\n'
        'def step(x, w_in, w_out):\n'
        '    return jnp.tanh(x @ w_in) @ w_out\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    shapes = ['f32[64,32]', 'f32[32,128]', 'f32[128,32]']
    arguments = ['why', 'whys:step', 'w_out', '--args', *shapes, '--devices', '8']
    assert main(arguments) == 0
    assert 'w_out, f32[128,32]: not sharded' in capsys.readouterr().out
    assert main([*arguments, '--json']) == 0
    ((found,),) = [each['values'] for each in json.loads(capsys.readouterr().out)]
    assert (found['shape'], found['axes']) == ([128, 32], [])
    assert main(['why', 'whys:step', '--args', *shapes, '--devices', '8']) == 0
    assert 'no collectives' in capsys.readouterr().out


def test_shapes_of_devices_agree_with_numpy():
    """The propagated sharding of an argument is that of the array."""
    array = jax.device_put(np.ones((64, 32), np.float32), X.sharding)
    report = explain(jax.jit(jnp.sum), array, tries=0)
    (value,) = report.why(report.arguments[0].path).values
    sizes = [np.prod([MESH.shape[a] for a in axes], dtype=int) for axes in value.value.axes]
    assert [*array.addressable_shards[0].data.shape] == [64 // sizes[0], 32 // sizes[1]]
