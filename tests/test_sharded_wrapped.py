"""sharded functions inside other wrappers: transformations, type checkers, serializers, frameworks.

Where `jax.jit`'s own object works, ours works: each case runs for both, and for per_device.
"""

import copy
import functools
import inspect
import pickle
import types
import typing
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, TypeCheckError, jaxtyped

from einshard import EinshardError, Sharded, describe, explain, per_device, sharded

EIGHT = jax.devices()[:8]
X = np.arange(128, dtype=np.float32).reshape(8, 16) / 128


Matrix = Float[Array, 'a b']
Rows, Columns = Sharded[Matrix, 'a* b'], Sharded[Matrix, 'a b*']


def square(x: Matrix, power: int = 2) -> Matrix:
    """The second power."""
    return x**power


by_jit = jax.jit(square)
by_sharded = sharded('a* b', mesh=EIGHT)(square)
by_device = per_device('a* b', out='a* b', mesh=EIGHT, static_argnames='power')(square)
bare = sharded(square)

FUNCTIONS = {'jit': by_jit, 'sharded': by_sharded, 'per_device': by_device, 'bare': bare}
OURS = [name for name in FUNCTIONS if name != 'jit']


@pytest.fixture(params=FUNCTIONS)
def f(request):
    return FUNCTIONS[request.param]


@pytest.fixture(params=OURS)
def ours(request):
    return FUNCTIONS[request.param]


class Model:
    @sharded('a* b', mesh=EIGHT)
    def twice(self, x):
        """Twice."""
        return 2 * x


jax.tree_util.register_pytree_node(Model, lambda _: ((), None), lambda *_: Model())


# ---------------------------------------------------------------------------- one returned type


def test_functions_and_methods_are_of_one_type():
    assert {type(one) for one in (by_sharded, by_device, bare, Model.twice)} == {type(by_sharded)}
    assert type(by_sharded).__name__ == 'ShardedFunction'


def test_no_state_of_ours_is_in_the_dict(ours):
    """Wrappers copy it: JAX's own as well as functools.wraps."""
    theirs = set(vars(functools.wraps(square)(lambda x: x)))
    names = {'__name__', '__qualname__', '__module__', '__doc__', '__annotations__'}
    assert set(vars(ours)) <= theirs | names | {'__type_params__', '__wrapped__'}
    wrapped = functools.wraps(ours)(lambda *args: ours(*args))
    for name in ('lower', 'trace', 'eval_shape', 'in_shardings', 'out_shardings', 'clear_cache'):
        assert hasattr(ours, name)
        assert not hasattr(wrapped, name)


def test_attributes_of_the_function_are_kept():
    def tagged(x):
        return x

    tagged.tag = ['mine']
    assert sharded(tagged).tag is tagged.tag
    assert not hasattr(bare, 'tag')


# ------------------------------------------------ transformed functions describe themselves

TRANSFORMED = {
    'grad': lambda f: jax.grad(f),
    'value_and_grad': lambda f: jax.value_and_grad(f),
    'jacfwd': lambda f: jax.jacfwd(f),
    'jacrev': lambda f: jax.jacrev(f),
    'hessian': lambda f: jax.hessian(f),
    'vmap': lambda f: jax.vmap(f, in_axes=0),
    'checkpoint': lambda f: jax.checkpoint(f),
    'grad of grad': lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
    'named_call': lambda f: jax.named_call(f, name='named'),
    'wraps': lambda f: functools.wraps(f)(lambda *args: (f(*args), 1.0)),
    'partial': lambda f: functools.partial(f),
}
SCALAR = ('sharded', 'method', 'per_device')


def scalar(kind):
    """A scalar function of an array, and of one without sharding."""

    def energy(x):
        return (x**3).sum()

    if kind == 'per_device':
        f = per_device('a*', out='-> *', mesh=EIGHT)(lambda x: jax.lax.psum((x**3).sum(), 'a'))
    elif kind == 'method':

        class Energy:
            @sharded(x='a*', mesh=EIGHT)
            def __call__(self, x):
                return energy(x)

            at = __call__

        jax.tree_util.register_pytree_node(Energy, lambda _: ((), None), lambda *_: Energy())
        f = Energy().at
    else:
        f = sharded('a*', mesh=EIGHT)(energy)
    return f, energy


@pytest.mark.parametrize('kind', SCALAR)
@pytest.mark.parametrize('how', TRANSFORMED)
def test_transformed_functions_describe_themselves(how, kind):
    mapped = kind == 'per_device' and how in ('jacfwd', 'hessian', 'vmap')
    if mapped and jax.__version_info__ < (0, 9):
        pytest.skip('JAX cannot map a psum of shard_map')
    f, by_hand = scalar(kind)
    shape = (8, 8) if how == 'vmap' else (8,)
    x = jnp.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 8
    # jax.jit's object is asked the same: the wrapped one must not answer for the wrapper
    ours, theirs = TRANSFORMED[how](f), TRANSFORMED[how](jax.jit(by_hand))
    expected = theirs(x)
    for got in (
        jax.eval_shape(ours, x),
        jax.eval_shape(jax.jit(ours), x),
        jax.jit(ours).lower(x).out_info,
        jax.jit(ours).trace(x).out_info,
        jax.jit(ours)(x),
    ):
        assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == jax.tree.map(
            lambda a: (jnp.shape(a), jnp.result_type(a)), expected
        )
    for own in (ours, jax.jit(ours)):
        for one, other in zip(jax.tree.leaves(own(x)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
    compiled = jax.jit(ours).lower(x).compile()
    for one, other in zip(jax.tree.leaves(compiled(x)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_export_of_a_gradient_is_the_gradient():
    pytest.importorskip('flatbuffers')
    f, _ = scalar('sharded')
    exported = jax.export.export(jax.jit(jax.grad(f)))(jax.ShapeDtypeStruct((8,), np.float32))
    assert [a.shape for a in exported.out_avals] == [(8,)]


@pytest.mark.parametrize('kind', ['sharded', 'per_device'])
def test_explain_of_a_gradient_is_of_the_gradient(kind):
    f, _ = scalar(kind)
    report = explain(jax.grad(f), jax.ShapeDtypeStruct((8,), np.float32), mesh=None)
    assert [row.array for row in report.results] == ['float32[8]']


# ----------------------------------------------------------------------------------- inspection


def test_what_inspect_says(f):
    assert inspect.signature(f) == inspect.signature(square)
    assert inspect.getdoc(f) == 'The second power.'
    assert f.__doc__ == 'The second power.'
    assert inspect.getsource(f) == inspect.getsource(square)
    assert inspect.unwrap(f) is square
    assert inspect.isroutine(by_jit)  # of objects Python knows only its own
    assert callable(f)
    assert (f.__name__, f.__qualname__, f.__module__) == ('square', 'square', __name__)
    assert f.__annotations__ == square.__annotations__
    assert typing.get_type_hints(f) == typing.get_type_hints(square)


def test_a_method_of_an_instance_says_the_same():
    bound = Model().twice
    assert str(inspect.signature(bound)) == '(x)'
    assert inspect.getdoc(bound) == inspect.getdoc(Model.twice) == 'Twice.'
    assert (bound.__name__, bound.__self__.__class__) == ('twice', Model)


def test_as_an_attribute_of_a_class_it_is_a_method(f):
    class Holder:
        method = f
        static = staticmethod(f)

    np.testing.assert_array_equal(Holder().static(X), X**2)
    # the instance is the first argument, and not an array: a spec says so, else jit does
    refused = TypeError if f in (by_jit, bare) else EinshardError
    with pytest.raises(refused, match='Holder'):
        Holder().method()


def test_hashing_weak_references_and_leaves(f):
    assert {f: 1}[f] == 1
    assert weakref.ref(f)() is f
    assert jax.tree.leaves({'f': f}) == [f]
    g = jax.jit(lambda g, x: g(x), static_argnums=0)
    np.testing.assert_array_equal(g(f, X), X**2)


def test_a_function_is_freed_with_its_last_reference():
    f = sharded('a* b', mesh=EIGHT)(lambda x: x + 1)
    f(X)
    ref = weakref.ref(f)
    del f
    import gc

    gc.collect()
    assert ref() is None


@pytest.mark.parametrize('protocol', range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize('name', ['by_sharded', 'by_device'])
def test_pickled_by_name(name, protocol, monkeypatch):
    """As functions are: the module must have it under its own name."""
    module = types.ModuleType('a_module_of_the_user')
    made = FUNCTIONS[name.removeprefix('by_').replace('device', 'per_device')]
    monkeypatch.setitem(__import__('sys').modules, module.__name__, module)
    monkeypatch.setattr(made, '__module__', module.__name__)
    module.square = made
    assert pickle.loads(pickle.dumps(made, protocol)) is made


def test_a_method_is_pickled_as_methods_are():
    assert pickle.loads(pickle.dumps(Model.twice)) is Model.twice
    bound = pickle.loads(pickle.dumps(Model().twice))
    np.testing.assert_array_equal(bound(X), 2 * X)


def test_copies_are_the_function_itself(ours):
    assert copy.copy(ours) is ours
    assert copy.deepcopy({'f': ours})['f'] is ours


# --------------------------------------------------------------------------------- type checkers


def test_jaxtyped_above_and_below():
    beartype = pytest.importorskip('beartype').beartype
    below = sharded('a* b', mesh=EIGHT)(jaxtyped(typechecker=beartype)(square))
    np.testing.assert_array_equal(below(jnp.asarray(X)), X**2)
    with pytest.raises(EinshardError, match='1 dimension'):
        below(jnp.asarray(X)[0])
    for make in (sharded('a* b', mesh=EIGHT), sharded):
        above = jaxtyped(typechecker=beartype)(make(square))
        np.testing.assert_array_equal(above(jnp.asarray(X)), X**2)
        with pytest.raises(TypeCheckError):
            above(jnp.asarray(X)[0])
        with pytest.raises(TypeCheckError):
            above(jnp.asarray(X), 'two')
    without = jaxtyped(typechecker=None)(by_sharded)
    np.testing.assert_array_equal(without(X), X**2)


def test_jaxtyped_reads_annotations_that_are_text():
    beartype = pytest.importorskip('beartype').beartype

    def late(x: 'Matrix') -> 'Matrix':
        return x

    checked = jaxtyped(typechecker=beartype)(sharded('a* b', mesh=EIGHT)(late))
    np.testing.assert_array_equal(checked(jnp.asarray(X)), X)
    with pytest.raises(TypeCheckError):
        checked(jnp.asarray(X)[0])


def test_beartype_above_and_below():
    beartype = pytest.importorskip('beartype').beartype
    roar = pytest.importorskip('beartype.roar')
    other = sharded('a* b', mesh=EIGHT)(lambda x: x + 1)
    above = beartype(sharded('a* b', mesh=EIGHT)(square))
    below = sharded('a* b', mesh=EIGHT)(beartype(square))
    np.testing.assert_array_equal(above(jnp.asarray(X)), X**2)
    np.testing.assert_array_equal(below(jnp.asarray(X)), X**2)
    with pytest.raises(roar.BeartypeCallHintViolation):
        above('no array')
    # other sharded functions are not checked because one is
    np.testing.assert_array_equal(other(X), X + 1)
    np.testing.assert_array_equal(by_sharded(X), X**2)


def test_annotations_with_a_placement_above_beartype():
    beartype = pytest.importorskip('beartype').beartype

    @sharded
    @jaxtyped(typechecker=beartype)
    def twice(x: Rows) -> Columns:
        return 2 * x

    assert describe(twice(np.ones((16, 16), np.float32))) == 'a b -> a b16'


# ------------------------------------------------------------------------------------ frameworks


def test_functools(f):
    np.testing.assert_array_equal(functools.partial(f)(X), X**2)
    np.testing.assert_array_equal(functools.singledispatch(f)(X), X**2)
    assert functools.wraps(f)(lambda x: x).__wrapped__ is f


def test_equinox(f):
    eqx = pytest.importorskip('equinox')
    x = jnp.asarray(X)
    np.testing.assert_array_equal(eqx.filter_jit(f)(x), X**2)
    np.testing.assert_allclose(eqx.filter_grad(lambda x: f(x).sum())(x), 2 * X)

    class Layer(eqx.Module):
        function: typing.Any = eqx.field(static=True)

        def __call__(self, x):
            return self.function(x)

    np.testing.assert_array_equal(eqx.filter_jit(Layer(f))(x), X**2)


def test_flax_nnx(f):
    nnx = pytest.importorskip('flax.nnx')
    x = jnp.asarray(X)
    np.testing.assert_array_equal(nnx.jit(f)(x), X**2)
    np.testing.assert_allclose(nnx.grad(lambda x: f(x).sum())(x), 2 * X)
