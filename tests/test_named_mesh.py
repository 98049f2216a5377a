"""Named meshes: device_mesh(data=4, tensor=2), the same for TPU slices, and names of the cloud."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from placed import mesh_of
from refusal import refusal

from einshard import device_mesh, einshard, sharded, topology

# private: names of slices also without libtpu, and of slices that it takes minutes to describe
from einshard._sharding.tpu_names import not_offered, topology_name

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


# from https://cloud.google.com/tpu/docs/v5p, v5e and v6e; v4 also from xpk's table
@pytest.mark.parametrize(
    ('cloud', 'name'),
    [
        ('v2-8', 'v2:2x2'),
        ('v3-32', 'v3:4x4'),
        ('v4-8', 'v4:2x2x1'),
        ('v4-32', 'v4:2x2x4'),
        ('v4-1536', 'v4:8x8x12'),
        ('v5p-8', 'v5p:2x2x1'),
        ('v5p-16', 'v5p:2x2x2'),
        ('v5p-64', 'v5p:2x4x4'),
        ('v5p-128', 'v5p:4x4x4'),
        ('v5p-256', 'v5p:4x4x8'),
        ('v5p-512', 'v5p:4x8x8'),
        ('v5p-1024', 'v5p:8x8x8'),
        ('v5p-2048', 'v5p:8x8x16'),
        ('v5p-4096', 'v5p:8x16x16'),
        ('v5p-8192', 'v5p:16x16x16'),
        ('v5p-12288', 'v5p:16x16x24'),
        ('v5litepod-1', 'v5e:1x1'),
        ('v5litepod-4', 'v5e:2x2'),
        ('v5litepod-8', 'v5e:2x4'),
        ('v5litepod-32', 'v5e:4x8'),
        ('v5litepod-128', 'v5e:8x16'),
        ('v5e-64', 'v5e:8x8'),
        ('v6e-256', 'v6e:16x16'),
        ('v5e:4x4', 'v5e:4x4'),
    ],
)
def test_default_shapes_of_the_cloud(cloud, name):
    assert topology_name(cloud) == name


@pytest.mark.parametrize(
    ('name', 'counts'),
    [
        ('v5p-100', 'valid numbers of TensorCores: 8, 16, 32, 64, 128, 256, 384, ..., 12288'),
        ('v5p-9', 'valid numbers of TensorCores: 8, 16, 32, 64, 128, 256, 384, ..., 12288'),
        ('v2-4', 'valid numbers of TensorCores: 8, 32, 128, 256, 512'),
        ('v6e-512', 'valid numbers of chips: 1, 4, 8, 16, 32, 64, 128, 256'),
        ('v5litepod-0', 'valid numbers of chips: 1, 4, 8, 16, 32, 64, 128, 256'),
    ],
)
def test_sizes_that_the_cloud_does_not_have(name, counts):
    error = refusal(topology, name)
    assert error.sentence == f"'{name}' is not a Cloud accelerator type"
    assert counts in str(error)


@pytest.mark.parametrize(
    ('name', 'fix'),
    [
        (' v5e:4x4', "'v5e:4x4'"),
        ('V5E:4X4', "'v5e:4x4'"),
        ('v5e: 4 x 4', "'v5e:4x4'"),
        ('v5e-4x4', "'v5e:4x4'"),
        ('V5P-128 ', "'v5p-128'"),
        ('v4 Lite:2x2', "'v4 lite:2x2'"),
        ('v5e-16x', None),
        ('v5p-\uff11\uff12\uff18', None),
        ('H100', "'h100:8'"),
    ],
)
def test_other_spellings(name, fix):
    assert refusal(topology, name).fix == fix


def test_a_slice_holds_no_arrays(libtpu):
    mesh = topology('v5e:2x2', data=2, tensor=2)
    f = sharded('b@data', mesh=mesh, reshard=True)(lambda x: x + 1)
    errors = [
        *(refusal(einshard, tree, 'b@data', mesh=mesh) for tree in (np.ones(4), [np.ones(4)] * 2)),
        *(refusal(f, x) for x in (np.ones(4), einshard(np.ones(4), 'b -> * b'))),
    ]
    assert all('can neither hold arrays nor run programs' in e.sentence for e in errors)
    assert f.lower(np.ones(4, np.float32)).compile() is not None


@pytest.mark.parametrize(
    ('name', 'instead'),
    [
        ('v5p:16x16', 'v5p:4x8x8'),
        ('v5p:2x2x8', 'v5p:2x4x4'),
        ('v5p:8x8x1', 'v5p:4x4x4'),
        ('v5p:1x1x1', None),
        ('v5p:16x24x24', None),  # 9,216 chips
        ('v4:2x4x8', 'v4:4x4x4'),
        ('v5e:2x8', 'v5e:4x4'),
        ('v5e:16x32', None),
        ('v6e:1x8', 'v6e:2x4'),
        ('v3:8x32', 'v3:16x16'),
    ],
)
def test_shapes_that_the_cloud_does_not_offer(name, instead):
    warning = not_offered(name)
    assert warning.startswith(f"Google Cloud does not offer slices '{name}'")
    assert (instead is None) == ('it offers' not in warning)
    assert instead is None or f"it offers '{instead}'" in warning
    assert instead is None or not_offered(instead) is None


@pytest.mark.parametrize(
    'name',
    # the tables at docs.cloud.google.com/tpu/docs/v5p and /v5e
    [f'v5p:{shape}' for shape in ('2x2x1', '2x2x2', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8')]
    + [f'v5p:{shape}' for shape in ('8x8x16', '8x16x16', '16x16x16', '16x16x24')]
    + [f'v5e:{shape}' for shape in ['1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16']]
    + ['v5e:8x4', 'v5e:2x2x1', 'v4:4x4x12', 'v5p:4x4x8_twisted', 'tpu7x:2x2x1', 'v4 lite:2x2'],
)
def test_shapes_that_the_cloud_offers(name):
    assert not_offered(name) is None


def test_topology_warns_about_shapes():
    with pytest.warns(
        UserWarning, match="does not offer slices 'v5e:2x8'; with 16 chips, it offers"
    ):
        assert topology('v5e:2x8').size == 16


def test_a_name_of_tpu7x():
    assert refusal(topology, 'v7x:2x2x1').fix == "'tpu7x:2x2x1'"
