"""The fast path of `sharded`: calls after the first one, in traces and with invalid arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from einshard import EinshardError, device_mesh, einshard, make_sharding, sharded


@pytest.mark.parametrize('by_keyword', [False, True])
@pytest.mark.parametrize('on_host', [False, True])
def test_out_holds_in_a_trace_for_constants_after_an_eager_call(by_keyword, on_host):
    x = np.ones((32, 64), np.float32)
    with jax.set_mesh(device_mesh(axis_types=AxisType.Explicit)):
        f = sharded('b d -> b* d', out='b d -> b d*')(lambda x: 2 * x)
        constant = x if on_host else einshard(x, 'b d -> b* d')
        call = functools.partial(f, x=constant) if by_keyword else functools.partial(f, constant)
        types = []

        def outer():
            result = call()
            types.append(jax.typeof(result).sharding.spec)
            return result

        call()
        result = jax.jit(outer)()
        expected = make_sharding('b d -> b d*')
    assert types == [expected.spec]
    assert result.sharding.is_equivalent_to(expected, 2)


def test_out_holds_in_a_trace_without_arguments_after_an_eager_call():
    with jax.set_mesh(device_mesh(axis_types=AxisType.Explicit)):
        f = sharded(out='b d -> b d*')(lambda: jnp.ones((32, 64)))
        f()
        result = jax.jit(lambda: f())()
        assert result.sharding.is_equivalent_to(make_sharding('b d -> b d*'), 2)


@pytest.mark.parametrize('argument', ['text', object()])
def test_an_argument_that_is_not_an_array_after_a_valid_call(argument):
    f = sharded('a b -> a* b')(lambda x: x + 1)
    for _ in range(3):
        with pytest.raises(EinshardError, match=r'\(\w+\) is not an array'):
            f(argument)
        f(np.ones((32, 4), np.float32))
