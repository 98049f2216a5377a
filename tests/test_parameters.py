"""How sharded meets functions of every kind, and calls of every form."""

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


@pytest.mark.parametrize(('args', 'kwargs'), CALLS)
def test_every_form_of_call(args, kwargs):
    f = on_four(ROWS, None, out=COLUMNS)(weighted)
    for _ in range(2):
        result = f(*args, **kwargs)
        np.testing.assert_allclose(result, weighted(*args, **kwargs))
        assert result.sharding == ON_COLUMNS
    assert f.in_shardings(*args, **kwargs)['x'] == ON_ROWS


def test_every_form_of_call_on_one_function_in_turn():
    f = on_four(ROWS, None, out=COLUMNS)(weighted)
    for args, kwargs in CALLS + CALLS[::-1]:
        np.testing.assert_allclose(f(*args, **kwargs), weighted(*args, **kwargs))


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


def test_specs_by_position_reach_into_the_rest():
    f = on_four(ROWS, None, COLUMNS, ROWS)(weighted)
    asked = f.in_shardings(X, 1.0, X, X, X)
    assert [asked[f'rest[{i}]'] for i in range(3)] == [ON_COLUMNS, ON_ROWS, None]


def test_a_spec_for_all_keywords_together():
    f = on_four(x=ROWS, more=COLUMNS)(weighted)
    asked = f.in_shardings(X, p=X, q=X)
    assert asked == {'x': ON_ROWS, 'p': ON_COLUMNS, 'q': ON_COLUMNS}


def test_positional_only():
    def f(x, /, y, *, z=1.0):
        return x + 10 * y + 100 * z

    g = on_four(ROWS, COLUMNS, z=ROWS, out=ROWS)(f)
    np.testing.assert_allclose(g(X, y=X), f(X, X))
    np.testing.assert_allclose(g(X, X, z=X), f(X, X, z=X))
    assert g.in_shardings(X, y=X, z=X) == {'x': ON_ROWS, 'y': ON_COLUMNS, 'z': ON_ROWS}


def test_a_keyword_called_like_a_positional_only_parameter():
    def f(x, /, **more):
        return x + more['x']

    np.testing.assert_allclose(on_four(ROWS)(f)(X, x=X), 2 * X)


def test_defaults_may_be_arrays_and_need_no_spec():
    def f(x, y=X):
        return x + y

    g = on_four(ROWS, COLUMNS, out=ROWS)(f)
    np.testing.assert_allclose(g(X), 2 * X)
    np.testing.assert_allclose(g(X, X + 1), 2 * X + 1)


@pytest.mark.parametrize(
    ('args', 'kwargs'),
    [((), {}), ((X, X, X), {}), ((X,), {'x': X}), ((X,), {'nope': X}), ((), {'y': X})],
)
def test_wrong_calls_raise_what_the_function_raises(args, kwargs):
    def f(x, y=0.0):
        return x + y

    with pytest.raises(TypeError) as plain:
        f(*args, **kwargs)
    with pytest.raises(TypeError) as caught:
        on_four(ROWS)(f)(*args, **kwargs)
    assert str(caught.value).split('f() ')[-1] == str(plain.value).split('f() ')[-1]


def test_a_parameter_given_twice_whatever_the_ranks():
    class Model:
        def method(self, x):
            return x

    model, on_rows = Model(), on_four(ROWS)
    Model.sharded = on_rows(Model.method)
    for plain, ours in [
        (lambda: weighted(X, x=3), lambda: on_rows(weighted)(X, x=3)),
        (lambda: weighted(X, X, 2, y=3), lambda: on_rows(weighted)(X, X, 2, y=3)),
        (lambda: model.method(X, x=3), lambda: model.sharded(X, x=3)),
    ]:
        with pytest.raises(TypeError) as caught:
            plain()
        with pytest.raises(TypeError) as raised:
            ours()
        assert str(raised.value) == str(caught.value)
        assert 'got multiple values for argument' in str(caught.value)
    g = on_rows(weighted)
    np.testing.assert_array_equal(g(X), g(X))  # known, and called by its fast path from here on
    with pytest.raises(TypeError, match='multiple values'):
        g(X, x=3)


@pytest.mark.parametrize(
    ('options', 'text'),
    [
        ({'static_argnums': 'x'}, "static_argnums= must be indices of parameters, not 'x'"),
        ({'static_argnums': 2.5}, 'static_argnums= must be indices of parameters, not 2.5'),
        (
            {'static_argnums': np.array(0)},
            'static_argnums= must be indices of parameters, not array(0)',
        ),
        ({'donate_argnums': ('x',)}, "donate_argnums= must be indices of parameters, not ('x',)"),
        ({'static_argnames': 0}, 'static_argnames= must be names of parameters, not 0'),
        ({'donate_argnames': 0}, 'donate_argnames= must be names of parameters, not 0'),
        (
            {'donate_argnames': ['x', 0]},
            "donate_argnames= must be names of parameters, not ['x', 0]",
        ),
    ],
)
def test_options_of_jit_that_name_no_parameters(options, text):
    (option,) = options
    example = '(0,)' if option.endswith('nums') else "('x',)"
    with pytest.raises(EinshardError) as caught:
        sharded('a*', **options)(weighted)
    assert str(caught.value) == (f'{text}\n  function: weighted\n  example:  {option}={example}')


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


def test_methods_have_name_and_signature():
    assert Linear.blend.__name__ == Linear(X).blend.__name__ == 'blend'
    assert list(inspect.signature(Linear.blend).parameters) == ['self', 'x', 'y', 'times']
    assert list(inspect.signature(Linear(X).blend).parameters) == ['x', 'y', 'times']


def test_methods_have_their_doc():
    assert Linear.__call__.__doc__ == 'Applies.'
    assert Linear(X).__call__.__doc__ == 'Applies.'
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


def test_pickling_by_name():
    again = pickle.loads(pickle.dumps(of_the_module))
    assert again is of_the_module
    again = pickle.loads(pickle.dumps(Linear.triple))
    np.testing.assert_array_equal(again(X), 3 * X)


def test_copies_and_weak_references():
    assert copy.deepcopy(of_the_module) is of_the_module
    assert weakref.ref(of_the_module)() is of_the_module


class Scaled(NamedTuple):
    factor: int

    @sharded('a*', mesh=jax.devices()[:8], static_argnums=0)
    def times(self, x):
        return x * self.factor


def test_a_bound_method_is_pickled_with_its_instance():
    again = pickle.loads(pickle.dumps(Scaled(3).times))
    np.testing.assert_array_equal(again(np.ones(8)), np.full(8, 3.0))


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
