"""sharded on functions of every kind, with calls of every form."""

import copy
import dataclasses
import functools
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from einshard import EinshardError, make_sharding, sharded

X = np.arange(16, dtype=np.float32).reshape(4, 4)
FOUR = jax.devices()[:4]
ROWS, COLUMNS = 'a b -> a* b', 'a b -> a b*'
ON_ROWS, ON_COLUMNS = (make_sharding(text, mesh=FOUR) for text in (ROWS, COLUMNS))

on_four = functools.partial(sharded, mesh=FOUR)


# --------------------------------------------------------------------------------- forms of call


def weighted(x, y=1.0, *rest, scale=1.0, **more):
    """Weights things."""
    total = scale * (x + 10 * y)
    for i, one in enumerate(rest):
        total = total + 100 * (i + 1) * one
    for i, name in enumerate(sorted(more)):
        total = total + 1000 * (i + 1) * more[name]
    return total


CALLS = [
    ((X,), {}),
    ((X, 2.0), {}),
    ((X,), {'y': 2.0}),
    ((), {'y': 2.0, 'x': X}),
    ((), {'x': X}),
    ((X, X), {'scale': 3.0}),
    ((X,), {'scale': 3.0, 'y': X}),
    ((X, X, X), {}),
    ((X, 2.0, X, 3.0), {'scale': 2.0}),
    ((X,), {'b': X, 'a': 1.0}),
    ((X, X, X), {'scale': 2.0, 'z': X, 'a': X}),
]


def test_every_form_of_call():
    f = on_four(ROWS, None, out=COLUMNS)(weighted)
    for args, kwargs in CALLS + CALLS[::-1]:
        result = f(*args, **kwargs)
        np.testing.assert_allclose(result, weighted(*args, **kwargs))
        assert result.sharding == ON_COLUMNS
        assert f.in_shardings(*args, **kwargs)['x'] == ON_ROWS


def test_specs_for_parameters_of_every_kind():
    f = on_four(x=ROWS, scale=COLUMNS, rest=COLUMNS, a=ROWS, out=COLUMNS)(weighted)
    asked = f.in_shardings(X, 1.0, X, X, scale=X, a=X, b=X)
    assert asked == {
        'x': ON_ROWS,
        'y': None,
        'rest[0]': ON_COLUMNS,
        'rest[1]': ON_COLUMNS,
        'a': ON_ROWS,
        'b': None,
        'scale': ON_COLUMNS,
    }
    np.testing.assert_allclose(
        f(X, 1.0, X, X, scale=X, a=X, b=X), weighted(X, 1.0, X, X, scale=X, a=X, b=X)
    )


def test_specs_of_var_positional_and_var_keyword_parameters():
    shardings = on_four(ROWS, None, COLUMNS, ROWS)(weighted).in_shardings(X, 1.0, X, X, X)
    assert [shardings[f'rest[{i}]'] for i in range(3)] == [ON_COLUMNS, ON_ROWS, None]
    shardings = on_four(x=ROWS, more=COLUMNS)(weighted).in_shardings(X, p=X, q=X)
    assert shardings == {'x': ON_ROWS, 'p': ON_COLUMNS, 'q': ON_COLUMNS}


def test_positional_only():
    def f(x, /, y, *, z=1.0):
        return x + 10 * y + 100 * z

    g = on_four(ROWS, COLUMNS, z=ROWS, out=ROWS)(f)
    np.testing.assert_allclose(g(X, y=X), f(X, X))
    np.testing.assert_allclose(g(X, X, z=X), f(X, X, z=X))
    assert g.in_shardings(X, y=X, z=X) == {'x': ON_ROWS, 'y': ON_COLUMNS, 'z': ON_ROWS}


def test_keyword_with_the_name_of_a_positional_only_parameter():
    f = on_four(ROWS)(lambda x, /, **more: x + more['x'])
    np.testing.assert_allclose(f(X, x=X), 2 * X)


def test_arrays_as_defaults():
    f = on_four(ROWS, COLUMNS, out=ROWS)(lambda x, y=X: x + y)
    np.testing.assert_allclose(f(X), 2 * X)
    np.testing.assert_allclose(f(X, X + 1), 2 * X + 1)


@pytest.mark.parametrize(
    ('args', 'kwargs'),
    [((), {}), ((X, X, X), {}), ((X,), {'x': X}), ((X,), {'nope': X}), ((), {'y': X})],
)
def test_invalid_calls_raise_the_error_of_python(args, kwargs):
    def f(x, y=0.0):
        return x + y

    messages = []
    for function in (f, on_four(ROWS)(f)):
        with pytest.raises(TypeError) as caught:
            function(*args, **kwargs)
        messages.append(str(caught.value).split('f() ')[-1])
    assert messages[0] == messages[1]


def test_a_parameter_with_two_values():
    class Model:
        def method(self, x):
            return x

    Model.sharded = on_four(ROWS)(Model.method)
    f = on_four(ROWS)(weighted)
    for _ in range(2):  # then on the fast path
        for name, call in [
            ('weighted() got multiple values for argument .x', lambda: f(X, x=3)),
            ('weighted() got multiple values for argument .y', lambda: f(X, X, 2, y=3)),
            ('Model.method() got multiple values for argument .x', lambda: Model().sharded(X, x=3)),
        ]:
            with pytest.raises(TypeError, match=name.replace('()', r'\(\)')):
                call()
        f(X)


@pytest.mark.parametrize(
    ('option', 'value'),
    [
        ('static_argnums', 'x'),
        ('static_argnums', 2.5),
        ('static_argnums', np.array(0)),
        ('donate_argnums', ('x',)),
        ('static_argnames', 0),
        ('donate_argnames', ['x', 0]),
    ],
)
def test_invalid_options_of_jit(option, value):
    with pytest.raises(EinshardError, match=f'{option}= must be (names|indices) of parameters'):
        sharded('a*', **{option: value})(weighted)


@pytest.mark.parametrize(
    'options',
    [
        {'static_argnames': 'nope'},
        {'donate_argnames': ('nope',)},
        {'static_argnames': 'scale', 'donate_argnames': 'scale'},
    ],
)
def test_what_jit_refuses_is_refused(options):
    def scaled(x, *, scale=1.0):
        return scale * x

    with pytest.raises(ValueError, match=r'nope|donate'):
        jax.jit(scaled, **options)
    with pytest.raises(EinshardError, match=r"'nope'|'scale'") as caught:
        sharded('a b*', **options)(scaled)
    assert 'scaled' in str(caught.value)


def test_numbers_of_numpy_name_parameters():
    for number in (np.int64(2), [np.int64(2)]):
        g = on_four(ROWS, static_argnums=number)(weighted)
        np.testing.assert_array_equal(g(X, X, 2.0), weighted(X, X, 2.0))


def test_names_that_are_words_of_sharded():
    """Parameters called as an argument of sharded or an option of jit take specs by position."""

    def f(out, mesh, inline):
        return out + mesh + inline

    g = on_four(ROWS, COLUMNS, ROWS, out=ROWS)(f)
    np.testing.assert_allclose(g(X, mesh=X, inline=X), 3 * X)
    assert g.in_shardings(X, X, X) == {'out': ON_ROWS, 'mesh': ON_COLUMNS, 'inline': ON_ROWS}


def test_names_of_other_scripts_and_of_keywords():
    def f(größe, lambda_, *class_):
        return größe + lambda_ + sum(class_)

    g = on_four(lambda_=COLUMNS, größe=ROWS)(f)
    np.testing.assert_allclose(g(X, X, X), 3 * X)
    assert g.in_shardings(X, X, X) == {'größe': ON_ROWS, 'lambda_': ON_COLUMNS, 'class_[0]': None}


# ------------------------------------------------------------------------------ kinds of functions


def test_decorated_bare_with_parentheses_and_called():
    for f in (
        sharded(lambda x: x + 1),
        sharded()(lambda x: x + 1),
        on_four()(lambda x: x + 1),
        on_four(ROWS)(lambda x: x + 1),
        on_four(ROWS)(on_four(COLUMNS)(lambda x: x + 1)),
        on_four(ROWS)(jax.jit(lambda x: x + 1)),
        jax.jit(on_four(ROWS)(lambda x: x + 1)),
    ):
        np.testing.assert_array_equal(f(X), X + 1)


@pytest.mark.parametrize('function', [jnp.sin, jax.nn.relu, jax.lax.neg, jnp.add, jnp.square])
def test_functions_of_jax(function):
    args = (X, X) if function is jnp.add else (X,)
    result = on_four(ROWS, out=COLUMNS)(function)(*args)
    np.testing.assert_allclose(result, function(*args), rtol=1e-6)
    assert result.sharding == ON_COLUMNS


def test_partials():
    f = functools.partial(weighted, scale=2.0)
    g = on_four(ROWS, out=ROWS)(f)
    np.testing.assert_allclose(g(X), f(X))
    np.testing.assert_allclose(g(X, y=X, scale=3.0), f(X, y=X, scale=3.0))
    bound = functools.partial(weighted, X)
    h = on_four(COLUMNS)(bound)  # the first that is left
    assert h.in_shardings(X) == {'y': ON_COLUMNS}
    np.testing.assert_allclose(h(X), bound(X))
    by_name = functools.partial(weighted, y=X)
    np.testing.assert_allclose(on_four(ROWS)(by_name)(X), by_name(X))


class Scaler:
    """Scales."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x, *, plus=0.0):
        return self.scale * x + plus

    def method(self, x):
        return self.scale * x


def test_callable_objects_and_bound_methods():
    scaler = Scaler(3)
    for f in (scaler, scaler.method):
        g = on_four(ROWS, out=COLUMNS)(f)
        np.testing.assert_array_equal(g(X), 3 * X)
        assert g(X).sharding == ON_COLUMNS
    np.testing.assert_array_equal(on_four(ROWS, plus=ROWS)(scaler)(X, plus=X), 4 * X)
    assert list(on_four(ROWS)(scaler.method).in_shardings(X)) == ['x']


# ------------------------------------------------------------------------------------ in a class


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    w: jax.Array
    name: str = dataclasses.field(default='linear', metadata={'static': True})

    @on_four(ROWS, out=COLUMNS)
    def __call__(self, x):
        """Applies."""
        return x @ self.w

    @on_four(ROWS, COLUMNS, out=ROWS)
    def blend(self, x, y=0.0, *, times=1.0):
        return times * (x @ self.w) + y

    @on_four(ROWS, static_argnames='self')
    def constant(self, x):
        assert isinstance(self.w, np.ndarray)
        return x @ self.w

    __hash__ = object.__hash__

    @staticmethod
    @on_four(ROWS, out=COLUMNS)
    def double(x):
        return 2 * x

    @on_four(ROWS, out=COLUMNS)
    @staticmethod
    def triple(x):
        return 3 * x

    @classmethod
    @on_four(ROWS, out=COLUMNS)
    def named(cls, x):
        return x + len(cls.__name__)

    @on_four(ROWS, out=COLUMNS)
    @classmethod
    def called(cls, x):
        return x - len(cls.__name__)

    @sharded
    def bare(self, x):
        return x @ self.w


class Special(Linear):
    def blend(self, x, y=0.0, *, times=1.0):
        return 1 + super().blend(x, y, times=times)


def test_methods():
    linear = Linear(X)
    for _ in range(2):
        result = linear(X)
        np.testing.assert_allclose(result, X @ X)
        assert result.sharding == ON_COLUMNS
        np.testing.assert_allclose(linear.blend(X, X, times=2.0), 2 * X @ X + X)
        np.testing.assert_allclose(linear.blend(y=X, x=X), X @ X + X)
        np.testing.assert_allclose(Linear.blend(linear, X), X @ X)
        np.testing.assert_allclose(linear.bare(X), X @ X)
    asked = linear.blend.in_shardings(X, y=X)
    assert asked == {'self': None, 'x': ON_ROWS, 'y': ON_COLUMNS}
    assert linear.blend.out_shardings(X) == ON_ROWS
    assert linear.blend.lower(X).compile()(linear, X).sharding == ON_ROWS
    assert linear.blend.eval_shape(X, X).shape == (4, 4)
    assert linear.blend.trace(X).jaxpr.in_avals[-1].shape == (4, 4)


def test_the_instance_is_data_not_a_constant():
    """A new weight is a new result, without a new trace."""
    np.testing.assert_allclose(Linear(X).blend(X), X @ X)
    np.testing.assert_allclose(Linear(2 * X).blend(X), 2 * X @ X)
    gradient = jax.grad(lambda linear: linear(X).sum())(Linear(jnp.asarray(X)))
    np.testing.assert_allclose(gradient.w, X.T @ np.ones((4, 4)))


def test_a_static_instance():
    linear = Linear(X)
    np.testing.assert_allclose(linear.constant(X), X @ X)
    np.testing.assert_allclose(linear.constant(x=X), X @ X)


def test_static_and_class_methods_in_both_orders():
    for of in (Linear, Linear(X)):
        np.testing.assert_array_equal(of.double(X), 2 * X)
        np.testing.assert_array_equal(of.triple(x=X), 3 * X)
        np.testing.assert_array_equal(of.named(X), X + 6)
        np.testing.assert_array_equal(of.called(x=X), X - 6)
        for method in (of.double, of.triple, of.named, of.called):
            assert method(X).sharding == ON_COLUMNS
        # of class methods Python gives these functions without the class, as it does for jax.jit
        for method in (of.double, of.triple):
            assert method.in_shardings(X)['x'] == ON_ROWS
    np.testing.assert_array_equal(Special.named(X), X + 7)
    np.testing.assert_array_equal(Special.called(X), X - 7)


def test_a_method_that_is_overridden():
    jax.tree_util.register_dataclass(Special, ['w'], ['name'])
    np.testing.assert_allclose(Special(X).blend(X, X), 1 + X @ X + X)


def test_metadata_of_methods():
    assert Linear.blend.__name__ == Linear(X).blend.__name__ == 'blend'
    assert list(inspect.signature(Linear.blend).parameters) == ['self', 'x', 'y', 'times']
    assert list(inspect.signature(Linear(X).blend).parameters) == ['x', 'y', 'times']
    assert Linear.__call__.__doc__ == Linear(X).__call__.__doc__ == 'Applies.'
    assert Linear(X).blend.__doc__ is None


def test_methods_of_equinox_modules():
    eqx = pytest.importorskip('equinox')

    class Module(eqx.Module):
        w: jax.Array
        activation: object = eqx.field(static=True)

        @on_four(ROWS, out=COLUMNS)
        def __call__(self, x):
            return self.activation(x @ self.w)

        @on_four(ROWS, out=COLUMNS)
        def method(self, x, y=1.0):
            return self.activation(x @ self.w) * y

    module = Module(jnp.asarray(X), jnp.tanh)
    for f in (module, module.method, lambda x: module.method(x=x)):
        np.testing.assert_allclose(f(X), np.tanh(X @ X), rtol=1e-6)
        assert f(X).sharding == ON_COLUMNS
    assert module.method.in_shardings(X)['x'] == ON_ROWS
    assert jax.tree.structure(jax.grad(lambda m: m(X).sum())(module)) == jax.tree.structure(module)


def test_a_method_named_later():
    """A function that becomes a method only when a class is given it."""

    class Thing:
        pass

    @on_four(None, ROWS, static_argnums=0)
    def method(self, x):
        return x + 1

    Thing.method = method
    np.testing.assert_array_equal(Thing().method(X), X + 1)


# ------------------------------------------------------------------------------- what is kept of it


def test_name_doc_signature_and_wrapped():
    f = on_four(ROWS)(weighted)
    assert f.__wrapped__ is weighted
    assert (f.__name__, f.__qualname__, f.__module__) == ('weighted', 'weighted', __name__)
    assert f.__doc__ == 'Weights things.'
    assert inspect.signature(f) == inspect.signature(weighted)
    assert inspect.unwrap(f) is weighted
    assert 'weighted' in repr(f)


def test_the_program_bears_the_names_of_function_and_parameters():
    text = on_four(ROWS)(weighted).lower(X, y=1.0, scale=2.0).as_text(debug_info=True)
    assert 'jit_weighted' in text
    for name in ('x', 'y', 'scale'):
        assert f'"{name}"' in text


@on_four(ROWS, out=COLUMNS)
def of_the_module(x):
    return x + 1


def test_pickles_copies_and_weak_references():
    assert pickle.loads(pickle.dumps(of_the_module)) is of_the_module
    assert copy.deepcopy(of_the_module) is of_the_module
    assert weakref.ref(of_the_module)() is of_the_module
    for bound, x, expected in ((Linear.triple, X, 3 * X), (Scaled(3).times, np.ones(8), 3.0)):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(bound))(x), expected)


class Scaled(NamedTuple):
    factor: int

    @sharded('a*', mesh=jax.devices()[:8], static_argnums=0)
    def times(self, x):
        return x * self.factor


def test_pickled_in_one_process_and_loaded_in_another(tmp_path, monkeypatch):
    (tmp_path / 'theirs.py').write_text(
        textwrap.dedent("""
        from einshard import sharded

        @sharded('a -> * a')
        def f(x):
            return x + 1
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    import theirs

    (tmp_path / 'f.pickle').write_bytes(pickle.dumps(theirs.f))
    program = "import numpy, pickle; print(pickle.load(open('f.pickle', 'rb'))(numpy.ones(2)))"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    result = subprocess.run(
        [sys.executable, '-c', program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, 'PYTHONPATH': path},
    )
    assert result.stdout.strip() == '[2. 2.]', result.stderr
