"""`with mesh:`, which einshard does not use: errors and a warning name `jax.set_mesh`."""

import re
import warnings

import jax
import numpy as np
import pytest
from placed import mesh_of
from refusal import refusal

from einshard import Rules, einshard, einsum, make_sharding, per_device, sharded

X, W = np.ones((32, 64), np.float32), np.ones((64, 128), np.float32)
LEGACY = "einshard does not use the mesh of 'with mesh:'; use 'with jax.set_mesh(mesh):'"


@pytest.fixture
def legacy_mesh():
    """A mesh entered as old code does it."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '.*context manager has been deprecated')
        mesh = mesh_of(data=4, tensor=2)
        with mesh:
            yield mesh


def test_jax_raises_runtime_error_for_a_constraint_without_a_mesh():
    # einshard/_sharding/program_mesh.py relies on it
    def constrain(x):
        return jax.lax.with_sharding_constraint(x, jax.P())

    with pytest.raises(RuntimeError, match='non-empty mesh in context'):
        jax.eval_shape(constrain, 1.0)


@pytest.mark.usefixtures('legacy_mesh')
def test_jax_accepts_a_constraint_under_a_legacy_mesh():
    # einshard asks by it; get_mesh does not see this mesh
    assert jax.sharding.get_abstract_mesh().empty
    jax.eval_shape(lambda x: jax.lax.with_sharding_constraint(x, jax.P()), 1.0)


NAMED = {
    'einshard': lambda: einshard(X, 'a b -> a@data b'),
    'make_sharding': lambda: make_sharding('a b -> a@data b'),
    'sharded': lambda: sharded('a b -> a@data b')(lambda x: x)(X),
    'per_device': lambda: per_device('a b -> a@data b', out='a b -> a@data b')(lambda x: x)(X),
    'rules': lambda: einshard({'w': X}, Rules([('w', 'a b -> a@data b')])),
    'einsum': lambda: einsum('a@data b, b c -> a@data c', X, W),
    'in a trace': lambda: jax.jit(lambda x: einshard(x, 'a b -> a@data b'))(X),
}


@pytest.mark.parametrize('call', NAMED)
def test_errors_about_mesh_axes_name_set_mesh_under_a_legacy_mesh(call, request):
    assert LEGACY not in refusal(NAMED[call]).facts.values()
    mesh = request.getfixturevalue('legacy_mesh')
    assert refusal(NAMED[call]).facts['note'] == LEGACY
    with jax.set_mesh(mesh):
        NAMED[call]()


@pytest.mark.usefixtures('legacy_mesh')
def test_errors_about_something_else_have_no_such_note():
    assert 'note' not in refusal(einshard, X, 'a b -> a3 b').facts


def test_a_trace_under_a_legacy_mesh_warns(legacy_mesh):
    @sharded('a b -> a* b')
    def double(x):
        return x * 2

    with pytest.warns(UserWarning, match=re.escape(f'double: {LEGACY}')) as caught:
        double(X)
    assert [w.filename for w in caught] == [__file__]
    double(X)  # is not traced again
    with jax.set_mesh(legacy_mesh):
        double(X[:16])  # uses that mesh

    @sharded('a b -> a* b', mesh=legacy_mesh)
    def given(x):
        return x * 2

    given(X)
