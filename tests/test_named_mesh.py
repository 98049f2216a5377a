"""Named meshes: device_mesh(data=4, tensor=2), and the same for TPU slices."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from placed import mesh_of
from refusal import refusal

from einshard import device_mesh, einshard, sharded, topology

DEVICES = jax.devices()


@pytest.mark.parametrize(
    ('axes', 'sizes'),
    [
        ({'data': 16}, (16,)),
        ({'data': 4, 'tensor': 4}, (4, 4)),
        ({'data': 8, 'tensor': 2}, (8, 2)),
        ({'data': -1, 'tensor': 2}, (8, 2)),
        ({'pod': 1, 'data': -1, 'tensor': 4}, (1, 4, 4)),
        ({'data': 16, 'tensor': -1}, (16, 1)),
        ({'devices_': 2, 'd\u00e9': 8}, (2, 8)),
        ({'data': np.int64(4), 'tensor': np.int32(-1)}, (4, 4)),
    ],
)
def test_axes_divide_the_devices_row_by_row(axes, sizes):
    mesh = device_mesh(**axes)
    assert mesh == Mesh(np.array(DEVICES).reshape(sizes), tuple(axes))
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert device_mesh(**axes) is mesh
    assert device_mesh(DEVICES[::-1], **axes) is mesh
    assert device_mesh(mesh, **axes) is mesh


def test_explicit_axes():
    mesh = device_mesh(data=4, tensor=4, axis_types=AxisType.Explicit)
    assert mesh == mesh_of(types=AxisType.Explicit, data=4, tensor=4)


def test_some_devices_and_abstract_meshes():
    assert device_mesh(DEVICES[:6], data=3, tensor=2) == mesh_of(data=3, tensor=2)
    abstract = device_mesh(AbstractMesh((24,), ('x',)), data=-1, tensor=4)
    types = (AxisType.Auto,) * 2
    assert abstract == AbstractMesh((6, 4), ('data', 'tensor'), axis_types=types)


def test_sizes_are_suggested_if_every_one_is_wrong():
    error = refusal(device_mesh, a=3, b=5, c=7)
    assert error.facts['sizes that fit'] == 'a=16, b=1, c=1'
    assert error.fix == 'device_mesh(a=16, b=1, c=1)'


@pytest.mark.parametrize('size', [-2, 2.0, True])
def test_invalid_sizes(size):
    sentence = f"the size of mesh axis 'a' must be a positive integer or -1, not {size}"
    assert refusal(device_mesh, a=size).sentence == sentence


@pytest.mark.parametrize('name', ['a b', '', 'a->b', 'e\u0301'])
def test_invalid_names(name):
    sentence = f'{name!a} is not a valid mesh axis name'
    assert refusal(device_mesh, **{name: 16}).sentence == sentence


def test_invalid_axis_types():
    assert str(refusal(device_mesh, data=16, axis_types=AxisType.Manual)) == (
        'axis_types= must be one AxisType for all axes, not Manual\n'
        '  expected: AxisType.Auto or AxisType.Explicit'
    )


# --- TPU slices ----------------------------------------------------------------------------------


def coordinates(mesh):
    return np.array([device.coords for device in mesh.devices.flat]).reshape(*mesh.axis_sizes, 3)


@pytest.fixture
def libtpu():
    return pytest.importorskip('libtpu', reason='libtpu describes TPUs, and is not installed')


def test_axes_of_a_slice(libtpu):
    mesh = topology('v5e:4x4', data=4, tensor=-1)
    assert mesh.axis_names == ('data', 'tensor')
    assert topology('v5litepod-16', data=4, tensor=4) is mesh
    assert coordinates(mesh).tolist() == [[[x, y, 0] for y in range(4)] for x in range(4)]
    explicit = topology('v5e:4x4', data=4, tensor=4, axis_types=AxisType.Explicit)
    assert set(explicit.axis_types) == {AxisType.Explicit}
    assert topology('v5e:4x4', axis_types=AxisType.Explicit).axis_names == ('d0', 'd1', 'd2', 'd3')


def test_slices_are_on_the_left(libtpu):
    mesh = topology('v5e:2x2', n_slices=4, pod=2, data=2, tensor=4)
    slices = [[{d.slice_index for d in row} for row in pod] for pod in mesh.devices]
    assert slices == [[{0}, {1}], [{2}, {3}]]


def test_sizes_that_do_not_fit_a_slice(libtpu):
    sentence = 'data=4, tensor=8 need 32 devices, but there are only 16'
    assert refusal(topology, 'v5e:4x4', data=4, tensor=8).sentence == sentence
    error = refusal(topology, 'v5e:2x2', n_slices=2, data=3)
    assert error.fix == "topology('v5e:2x2', n_slices=2, data=8)"


def test_a_slice_holds_no_arrays(libtpu):
    mesh = topology('v5e:2x2', data=2, tensor=2)
    f = sharded('b@data', mesh=mesh, reshard=True)(lambda x: x + 1)
    errors = [
        *(refusal(einshard, tree, 'b@data', mesh=mesh) for tree in (np.ones(4), [np.ones(4)] * 2)),
        *(refusal(f, x) for x in (np.ones(4), einshard(np.ones(4), 'b -> * b'))),
    ]
    assert all('can neither hold arrays nor run programs' in e.sentence for e in errors)
    assert f.lower(np.ones(4, np.float32)).compile() is not None
