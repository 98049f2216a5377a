"""sharded functions inside other wrappers: transformations, type checkers, serializers, frameworks.

Where the object of `jax.jit` works, ours works: each case runs for both, and for per_device.
"""

import copy
import functools
import gc
import inspect
import pickle
import sys
import types
import typing
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, TypeCheckError, jaxtyped
from placed import check_equal, struct

from einshard import EinshardError, explain, per_device, sharded

EIGHT = jax.devices()[:8]
X = np.arange(128, dtype=np.float32).reshape(8, 16) / 128


Matrix = Float[Array, 'a b']


def square(x: Matrix, power: int = 2) -> Matrix:
    """The second power."""
    return x**power


by_jit = jax.jit(square)
on_eight = sharded('a* b', mesh=EIGHT)
by_sharded = on_eight(square)
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

    @on_eight
    @staticmethod
    def thrice(x):
        return 3 * x


class Scaled(typing.NamedTuple):
    factor: int

    @sharded('a* b', mesh=EIGHT, static_argnums=0)
    def times(self, x):
        return x * self.factor


jax.tree_util.register_pytree_node(Model, lambda _: ((), None), lambda *_: Model())


# ------------------------------------------------------------------------- the function itself


def test_wrappers_copy_only_the_attributes_of_the_function(ours):
    """JAX's wrappers and functools.wraps copy the __dict__ of a function."""
    wrapped = functools.wraps(ours)(lambda *args: ours(*args))
    for name in ('lower', 'trace', 'eval_shape', 'in_shardings', 'out_shardings', 'clear_cache'):
        assert hasattr(ours, name)
        assert not hasattr(wrapped, name)

    def tagged(x):
        return x

    tagged.tag = ['mine']
    assert sharded(tagged).tag is tagged.tag


class Shadowing:
    def __init__(self):
        self._call = self.trace = self.lower = self.tag = lambda x: 2 * x

    def __call__(self, x):
        return self._call(x)


@pytest.mark.parametrize('decorate', [on_eight, per_device('a* b', out='a* b', mesh=EIGHT)])
def test_attributes_of_the_function_do_not_hide_methods(decorate):
    function = Shadowing()
    f = decorate(function)
    for result in (f(X), f.lower(X).compile()(X), f.trace(X).lower().compile()(X)):
        np.testing.assert_array_equal(result, 2 * X)
    assert f.tag is function.tag


def test_inspect_sees_the_function(f):
    assert inspect.signature(f) == inspect.signature(square)
    assert f.__doc__ == inspect.getdoc(f) == 'The second power.'
    assert inspect.getsource(f) == inspect.getsource(square)
    assert inspect.unwrap(f) is square
    assert (f.__name__, f.__qualname__, f.__module__) == ('square', 'square', __name__)
    assert f.__annotations__ == square.__annotations__
    assert typing.get_type_hints(f) == typing.get_type_hints(square)
    assert 'square' in repr(f)


def test_inspect_sees_the_method():
    model = Model()
    assert str(inspect.signature(Model.twice)) == '(self, x)'
    assert str(inspect.signature(model.twice)) == '(x)'
    for method in (Model.twice, model.twice):
        assert inspect.getdoc(method) == method.__doc__ == 'Twice.'
        assert method.__name__ == 'twice'
    assert model.twice.__self__ is model
    np.testing.assert_array_equal(model.twice.__wrapped__(X), 2 * X)


def test_as_an_attribute_of_a_class_it_is_a_method(f):
    class Holder:
        method = f
        static = staticmethod(f)

    np.testing.assert_array_equal(Holder().static(X), X**2)
    # the instance is the first argument and not an array: einshard raises for a spec, else jit
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
    gc.collect()
    assert ref() is None


def test_methods_of_one_instance_are_equal():
    model = Model()
    assert model.twice == model.twice != Model().twice
    assert model.twice != Model.twice
    assert len({model.twice, model.twice, Model().twice}) == 2
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def g(method, x):
        traced.append(method)
        return method(x)

    for _ in range(3):
        np.testing.assert_array_equal(g(model.twice, X), 2 * X)
    assert len(traced) == 1


@pytest.mark.parametrize('protocol', range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize('name', ['sharded', 'per_device'])
def test_pickled_by_name(name, protocol, monkeypatch):
    """Like plain functions: the module must have the function under its own name."""
    module, function = types.ModuleType('a_module_of_the_user'), FUNCTIONS[name]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(function, '__module__', module.__name__)
    module.square = function
    assert pickle.loads(pickle.dumps(function, protocol)) is function


def test_methods_are_pickled_as_methods_are():
    assert pickle.loads(pickle.dumps(Model.twice)) is Model.twice
    for bound, expected in (
        (Model().twice, 2 * X),
        (Model.thrice, 3 * X),
        (Scaled(4).times, 4 * X),
    ):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(bound))(X), expected)


UNNAMED = {'a partial': functools.partial(square, power=3), 'an object': Shadowing()}


@pytest.mark.parametrize('name', [*OURS, *UNNAMED])
def test_copies_are_the_function_itself(name):
    f = FUNCTIONS[name] if name in FUNCTIONS else on_eight(UNNAMED[name])
    assert copy.copy(f) is f
    assert copy.deepcopy({'f': f})['f'] is f


@pytest.mark.parametrize('name', UNNAMED)
def test_a_function_without_a_name_is_not_pickled(name):
    with pytest.raises(pickle.PicklingError, match="Can't pickle <sharded function"):
        pickle.dumps(on_eight(UNNAMED[name]))


# ------------------------------------------------ transformed functions describe themselves

TRANSFORMED = {
    'grad': jax.grad,
    'value_and_grad': jax.value_and_grad,
    'jacfwd': jax.jacfwd,
    'jacrev': jax.jacrev,
    'hessian': jax.hessian,
    'vmap': jax.vmap,
    'checkpoint': jax.checkpoint,
    'grad of grad': lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
    'named_call': lambda f: jax.named_call(f, name='named'),
    'wraps': lambda f: functools.wraps(f)(lambda *args: (f(*args), 1.0)),
    'partial': functools.partial,
}


def energy(x):
    return (x**3).sum()


class Energy:
    @sharded(x='a*', mesh=EIGHT)
    def __call__(self, x):
        return energy(x)

    at = __call__


jax.tree_util.register_pytree_node(Energy, lambda _: ((), None), lambda *_: Energy())

SCALAR = {
    'sharded': sharded('a*', mesh=EIGHT)(energy),
    'method': Energy().at,
    'per_device': per_device('a*', out='-> *', mesh=EIGHT)(lambda x: jax.lax.psum(energy(x), 'a')),
}


def types_of(tree):
    return jax.tree.map(lambda a: (a.shape, a.dtype), tree)


def check_results(ours, theirs, x):
    """A function has the results of another one, and says so without running."""
    as_arrays = functools.partial(jax.tree.map, jnp.asarray)
    expected, jitted = as_arrays(theirs(x)), jax.jit(ours)
    lowered = jitted.lower(x)
    for results in (ours(x), jitted(x), lowered.compile()(x)):
        check_equal(as_arrays(results), expected, rtol=1e-5)
    shapes = [jax.eval_shape(f, x) for f in (ours, jitted)]
    for tree in (*shapes, lowered.out_info, jitted.trace(x).out_info):
        assert types_of(tree) == types_of(expected)


@pytest.mark.parametrize('kind', SCALAR)
@pytest.mark.parametrize('how', TRANSFORMED)
def test_transformed_functions_describe_themselves(how, kind):
    x = jnp.arange(8, dtype=np.float32) / 8
    # as with jax.jit: the attributes of the wrapped function must not describe the wrapper
    ours, theirs = (TRANSFORMED[how](f) for f in (SCALAR[kind], jax.jit(energy)))
    check_results(ours, theirs, jnp.stack([x] * 8) if how == 'vmap' else x)


@pytest.mark.parametrize('kind', ['sharded', 'per_device'])
def test_explain_of_a_gradient_is_of_the_gradient(kind):
    report = explain(jax.grad(SCALAR[kind]), struct(8), mesh=None)
    assert [row.array for row in report.results] == ['float32[8]']


# --------------------------------------------------------------------------------- type checkers


def late(x: 'Matrix', power: int = 2) -> 'Matrix':
    return x**power


# where the type checker is, what checks, and the error for an array of one dimension
CHECKED = {
    'jaxtyped below': (lambda typed, _: on_eight(typed(square)), EinshardError),
    'jaxtyped above': (lambda typed, _: typed(on_eight(square)), TypeCheckError),
    'jaxtyped above, bare': (lambda typed, _: typed(sharded(square)), TypeCheckError),
    'jaxtyped above text': (lambda typed, _: typed(on_eight(late)), TypeCheckError),
    'jaxtyped without a checker': (
        lambda *_: jaxtyped(typechecker=None)(on_eight(square)),
        EinshardError,
    ),
    'beartype below': (lambda _, beartype: on_eight(beartype(square)), EinshardError),
    'beartype above': (lambda _, beartype: beartype(on_eight(square)), Exception),
}


@pytest.mark.parametrize('how', CHECKED)
def test_type_checkers_above_and_below(how):
    beartype = pytest.importorskip('beartype').beartype
    decorate, error = CHECKED[how]
    if how == 'beartype above':
        error = pytest.importorskip('beartype.roar').BeartypeCallHintViolation
    checked = decorate(jaxtyped(typechecker=beartype), beartype)
    np.testing.assert_array_equal(checked(jnp.asarray(X)), X**2)
    with pytest.raises(error):
        checked(jnp.asarray(X)[0])
    if 'above' in how:
        with pytest.raises(error):
            checked(jnp.asarray(X), 'two')
    # other sharded functions are not checked because one is
    np.testing.assert_array_equal(by_sharded(X), X**2)


# ------------------------------------------------------------------------------------ frameworks


def layer(eqx, f):
    class Layer(eqx.Module):
        function: typing.Any = eqx.field(static=True)

        def __call__(self, x):
            return self.function(x)

    return eqx.filter_jit(Layer(f))


# module, wrapper, and whether it is the gradient
FRAMEWORKS = {
    'partial': ('functools', lambda functools, f: functools.partial(f), False),
    'singledispatch': ('functools', lambda functools, f: functools.singledispatch(f), False),
    'filter_jit': ('equinox', lambda eqx, f: eqx.filter_jit(f), False),
    'filter_grad': ('equinox', lambda eqx, f: eqx.filter_grad(lambda x: f(x).sum()), True),
    'a field': ('equinox', layer, False),
    'nnx.jit': ('flax.nnx', lambda nnx, f: nnx.jit(f), False),
    'nnx.grad': ('flax.nnx', lambda nnx, f: nnx.grad(lambda x: f(x).sum()), True),
}


@pytest.mark.parametrize('how', FRAMEWORKS)
def test_frameworks(how, f):
    module, wrap, is_gradient = FRAMEWORKS[how]
    result = wrap(pytest.importorskip(module), f)(jnp.asarray(X))
    np.testing.assert_allclose(result, 2 * X if is_gradient else X**2, rtol=1e-6)
