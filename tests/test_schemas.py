"""The JSON of `to_dict` has the schema in einshard/schemas, which describes every field."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planned import mlp_step

import einshard
from einshard import (
    check_same,
    device_mesh,
    explain,
    explain_move,
    parallelism,
    plan,
    sharded,
    topology,
)

jsonschema = pytest.importorskip('jsonschema')
SCHEMAS = Path(einshard.__file__).parent / 'schemas'


def schema_of(name):
    return json.loads((SCHEMAS / f'{name}.json').read_text(encoding='utf-8'))


def closed(schema):
    """The schema, except that an object may have only the fields that it describes."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {key: closed(value) for key, value in schema.items()}
    is_object = schema.get('type') == 'object' and 'properties' in schema and 'if' not in schema
    return {**inside, 'additionalProperties': False} if is_object else inside


def check(name, data):
    schema = closed(schema_of(name))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(data)), schema, jsonschema.Draft202012Validator)


@sharded('b x -> b* x', 'x y -> x y*', out='b y -> b* y', donate_argnums=0)
def layer(x, w):
    def step(carry, _):
        return jax.nn.relu(carry @ w), None

    return jax.lax.scan(step, x, length=3)[0]


ARGUMENTS = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)


def test_report():
    mesh = device_mesh(data=4, tensor=4)
    report = explain(layer, *ARGUMENTS, chip='H100', intermediates=True)
    check('report', report.to_dict())
    check('report', explain(lambda x, w: x @ w, *ARGUMENTS, mesh=mesh).to_dict())
    assert report.collectives
    assert report.bounds
    assert report.intermediates


def test_report_with_a_timeline():
    pytest.importorskip('libtpu', reason='libtpu compiles for TPU, and is not installed')
    for name in ('v5e:2x4', 'v4:2x2x1'):
        report = explain(lambda x, w: x @ w, *ARGUMENTS, mesh=topology(name))
        assert report.timeline
        check('report', report.to_dict())


def test_diff():
    after = explain(sharded('b x -> b* x', None)(layer.__wrapped__), *ARGUMENTS)
    diff = explain(layer, *ARGUMENTS).diff(after)
    data = diff.to_dict()
    check('diff', data)
    assert [row['path'] for row in data['arrays']] == [path for path, *_ in diff.arrays]
    assert [row['bytes'] for row in data['collectives']] == [sent for sent, _ in diff.details]
    assert data['collectives']


def test_plan():
    pytest.importorskip('flatbuffers')
    step, args = mlp_step()
    mesh = device_mesh(jax.devices()[:4])
    found = plan(step, *args, mesh=mesh, chip='H100', compilations=1)
    check('plan', found.to_dict())
    check('diff', found.diff(len(found.choices) - 1).to_dict())


def test_parallelism():
    counts = {'devices': 8, 'sizes': {'b': 64, 'x': 64, 'y': 64}}
    check('parallelism', parallelism('b x, x y -> b y', b=2, x=4, **counts).to_dict())
    check('parallelism', parallelism('b x*, x* y -> b y', devices=8).to_dict())
    chain = ['b x, x y -> b y', 'b y, y z -> b z']
    check('parallelism', parallelism(chain, y=8).to_dict())


def test_comparison():
    function = sharded('b x -> b* x', out='x -> * x')(lambda x: jnp.sin(x).sum(0))
    check('comparison', check_same(function, np.ones((64, 4), np.float32)).to_dict())


def test_move():
    w = einshard.einshard(jax.ShapeDtypeStruct((64, 64), np.float32), 'a b -> a* b')
    check('move', explain_move(w, 'a b -> a b*').to_dict())
    pytest.importorskip('libtpu', reason='libtpu describes TPUs, and is not installed')
    w = einshard.einshard(w, 'a b -> a* b', mesh=topology('v5e:2x4'))
    data = explain_move(w, 'a b -> a b*', mesh=topology('v5e:2x4')).to_dict()
    check('move', data)
    assert data['links'][0]['link'] == 'within'


def test_a_field_without_a_description_is_noticed():
    data = explain(layer, *ARGUMENTS).to_dict()
    data['collectives'][0]['new'] = 1
    with pytest.raises(jsonschema.ValidationError):
        check('report', data)
