"""sharded on functions of every kind, with calls of every form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted

from einshard import EinshardError, Sharded, make_sharding, per_device, sharded

X = np.arange(16, dtype=np.float32).reshape(4, 4)
FOUR = jax.devices()[:4]
ROWS, COLUMNS = 'a b -> a* b', 'a b -> a b*'
ON_ROWS, ON_COLUMNS = (make_sharding(text, mesh=FOUR) for text in (ROWS, COLUMNS))

on_four = functools.partial(sharded, mesh=FOUR)


# --------------------------------------------------------------------------------- forms of call


def weighted(x, y=1.0, *rest, scale=1.0, **more):
    total = scale * (x + 10 * y)
    for i, z in enumerate(rest):
        total = total + 100 * (i + 1) * z
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
    ((X,), {'y': X, 'scale': 3.0}),
    ((X, X, X), {}),
    ((X, 2.0, X, 3.0), {'scale': 2.0}),
    ((X,), {'b': X, 'a': 1.0}),
    ((X, X, X), {'scale': 2.0, 'z': X, 'a': X}),
]


def test_every_form_of_call():
    """The same values by position and by keyword, in every order, are traced once."""
    body = counted(weighted)
    f = on_four(ROWS, None, rest=None, scale=None, more=None, out=COLUMNS)(body)
    for args, kwargs in CALLS + CALLS[::-1]:
        result = f(*args, **kwargs)
        np.testing.assert_allclose(result, weighted(*args, **kwargs))
        assert result.sharding == ON_COLUMNS
    assert body.runs == 7  # sets of parameters


def positional_only(x, /, y, *, z=1.0):
    return x + 10 * y + 100 * z


def named_like_options(out, mesh, inline):
    return out + mesh + inline


def of_other_scripts(größe, lambda_, *class_):
    return größe + lambda_ + sum(class_)


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x, *, plus=0.0):
        return self.scale * x + plus

    def method(self, x):
        return self.scale * x


STATIC = {'static_argnums': 3, 'static_argnames': 'n'}

# function, specs by position and by name, a call, and specs of its arguments in that order
SIGNATURES = {
    'by name': (
        (
            weighted,
            (),
            {'x': ROWS, 'y': None, 'scale': COLUMNS, 'rest': COLUMNS, 'a': ROWS, 'b': None},
        ),
        ((X, 1.0, X, X), {'scale': X, 'a': X, 'b': X}),
        {'x': ON_ROWS, 'y': None, 'rest[0]': ON_COLUMNS, 'rest[1]': ON_COLUMNS}
        | {'scale': ON_COLUMNS, 'a': ON_ROWS, 'b': None},
    ),
    'of var-positional parameters': (
        (weighted, (ROWS, None, COLUMNS, ROWS, None), {}),
        ((X, 1.0, X, X, X), {}),
        {'x': ON_ROWS, 'y': None, 'rest[0]': ON_COLUMNS, 'rest[1]': ON_ROWS, 'rest[2]': None},
    ),
    'static, of var-positional and var-keyword parameters': (
        (weighted, (ROWS, None, COLUMNS), {'rest': COLUMNS, 'more': ROWS} | STATIC),
        ((X, 1.0, X, 2.0, X), {'n': 3.0, 'z': X}),
        {'x': ON_ROWS, 'y': None, 'rest[0]': ON_COLUMNS, 'rest[1]': None, 'rest[2]': ON_COLUMNS}
        | {'n': None, 'z': ON_ROWS},
    ),
    'a keyword with the name of var-positional parameters': (
        (weighted, (None, None), {'rest': COLUMNS, 'more': ROWS}),
        ((X, 1.0, X), {'rest': X}),
        {'x': None, 'y': None, 'rest[0]': ON_COLUMNS, "more['rest']": ON_ROWS},
    ),
    'a static keyword with the name of var-positional parameters': (
        (weighted, (ROWS, None), {'rest': COLUMNS, 'more': ROWS, 'static_argnames': 'rest'}),
        ((X, 1.0, X), {'rest': 2.0}),
        {'x': ON_ROWS, 'y': None, 'rest[0]': ON_COLUMNS, "more['rest']": None},
    ),
    'of var-keyword parameters': (
        (weighted, (), {'x': ROWS, 'more': COLUMNS}),
        ((X,), {'p': X, 'q': X}),
        {'x': ON_ROWS, 'p': ON_COLUMNS, 'q': ON_COLUMNS},
    ),
    'positional only': (
        (positional_only, (ROWS, COLUMNS), {'z': ROWS}),
        ((X, X), {'z': X}),
        {'x': ON_ROWS, 'y': ON_COLUMNS, 'z': ON_ROWS},
    ),
    'positional only, and a keyword': (
        (positional_only, (ROWS, COLUMNS), {'z': ROWS}),
        ((X,), {'y': X, 'z': X}),
        {'x': ON_ROWS, 'y': ON_COLUMNS, 'z': ON_ROWS},
    ),
    'the names of options': (
        (named_like_options, (ROWS, COLUMNS, ROWS), {}),
        ((X,), {'mesh': X, 'inline': X}),
        {'out': ON_ROWS, 'mesh': ON_COLUMNS, 'inline': ON_ROWS},
    ),
    'names of other scripts': (
        (of_other_scripts, (), {'lambda_': COLUMNS, 'größe': ROWS, 'class_': None}),
        ((X, X, X), {}),
        {'größe': ON_ROWS, 'lambda_': ON_COLUMNS, 'class_[0]': None},
    ),
    'a partial with an argument': (
        (functools.partial(weighted, X), (COLUMNS,), {}),  # a spec for the next parameter
        ((X,), {}),
        {'y': ON_COLUMNS},
    ),
    'an object': (
        (Scaler(3), (ROWS,), {'plus': ROWS}),
        ((X,), {'plus': X}),
        {'x': ON_ROWS, 'plus': ON_ROWS},
    ),
    'a bound method': ((Scaler(3).method, (ROWS,), {}), ((X,), {}), {'x': ON_ROWS}),
}


@pytest.mark.parametrize('case', SIGNATURES)
def test_specs_of_parameters_of_every_kind(case):
    (function, by_position, by_name), (args, kwargs), expected = SIGNATURES[case]
    f = on_four(*by_position, out=COLUMNS, **by_name)(function)
    assert f.in_shardings(*args, **kwargs) == expected
    result = f(*args, **kwargs)
    np.testing.assert_allclose(result, function(*args, **kwargs))
    assert result.sharding == ON_COLUMNS


@pytest.mark.parametrize(
    ('function', 'others', 'args', 'kwargs'),
    [
        (lambda x, /, **more: x + more['x'], ['more'], (X,), {'x': X}),
        (
            lambda x, **more: x + sum(more.values()),
            ['more'],
            (X,),
            {'0.w': X, 'a b': X, 'a²': X, '': X},
        ),
        (lambda x, y=X: x + y, [], (X,), {}),
        (lambda x, y=X: x + y, ['y'], (X, X + 1), {}),
        (functools.partial(weighted, scale=2.0), [], (X,), {}),
        (functools.partial(weighted, scale=2.0), ['y', 'scale'], (X,), {'y': X, 'scale': 3.0}),
        (functools.partial(weighted, y=X), [], (X,), {}),
        (jnp.sin, [], (X,), {}),
        (jnp.add, ['args'], (X, X), {}),
        (jnp.square, [], (X,), {}),
        (jax.nn.relu, [], (X,), {}),
        (jax.lax.neg, [], (X,), {}),
        (jax.jit(lambda x: x + 1), [], (X,), {}),
        (on_four(COLUMNS)(lambda x: x + 1), [], (X,), {}),
    ],
)
def test_functions_of_every_kind(function, others, args, kwargs):
    """`others` are the parameters that the compiler shards."""
    specs = dict.fromkeys(others)
    result = on_four(ROWS, out=COLUMNS, **specs)(function)(*args, **kwargs)
    np.testing.assert_allclose(result, function(*args, **kwargs), rtol=1e-6)
    assert result.sharding == ON_COLUMNS


@pytest.mark.parametrize(
    ('function', 'specs', 'args'),
    [
        (lambda x, w: x + w, (ROWS,), (X, X)),
        (lambda x, w: x + w, (None,), (X, 1.0)),
        (lambda x, w: x + w, (ROWS, None), (X, X)),
        (lambda x, y=1.0: x + y, (ROWS,), (X,)),
        (lambda x, y=1.0: x + y, (ROWS,), (X, 2.0)),
        (lambda x, y=None: x, (ROWS,), (X, None)),
        (lambda x, y=1.0: x + y, (ROWS, None), (X, 2.0)),
        (lambda x, *rest: x + sum(rest), (ROWS,), (X,)),
        (lambda x, *rest: x + sum(rest), (ROWS,), (X, X)),
        (lambda x, *rest: x + sum(rest), (ROWS, ROWS), (X, X)),
        (lambda *args: sum(args), (ROWS,), (X, X)),
        (jnp.add, (ROWS,), (X, X)),
        (functools.partial(lambda x, w, y: x + w + y, X), (ROWS,), (X, X)),
        (Scaler(3).method, (ROWS,), (X,)),
    ],
)
def test_a_missing_spec_is_an_error_as_in_jit(function, specs, args):
    """`jax.jit` accepts a call if `in_shardings` has an entry for each argument."""
    in_shardings = tuple(None if spec is None else ON_ROWS for spec in specs)
    hand = jax.jit(lambda *args: function(*args), in_shardings=in_shardings)
    outcomes = []
    for make in (lambda: hand, lambda: on_four(*specs)(function)):
        try:
            np.testing.assert_array_equal(make()(*args), function(*args))
            outcomes.append('accepted')
        except ValueError as error:
            text = str(error)
            assert 'wrong length' in text or ' no spec' in text, text
            outcomes.append('refused')
    assert outcomes[0] == outcomes[1]


def test_parameters_that_need_no_spec():
    f = on_four(ROWS, static_argnames='times', out=ROWS)(lambda x, *, times: x * times)
    np.testing.assert_array_equal(f(X, times=2), 2 * X)
    for decorate in (on_four(), on_four(out=ROWS), on_four(None, None)):  # no specs at all
        np.testing.assert_array_equal(decorate(lambda x, w: x + w)(X, X), 2 * X)

    @on_four()
    def annotated(x: Sharded[jax.Array, ROWS], w: jax.Array, times=2):
        return x + w * times

    np.testing.assert_array_equal(annotated(X, X, 3), 4 * X)
    assert annotated.in_shardings(X, X) == {'x': ON_ROWS, 'w': None}


def test_a_keyword_named_self():
    f = on_four(ROWS, None, out=COLUMNS)(lambda self, x: self + x)
    np.testing.assert_array_equal(f(self=X, x=X), 2 * X)
    assert f.in_shardings(self=X, x=X) == {'self': ON_ROWS, 'x': None}
    assert f.out_shardings(self=X, x=X) == ON_COLUMNS
    assert f.eval_shape(self=X, x=X).shape == X.shape
    for stage in (f.trace(self=X, x=X), f.lower(self=X, x=X)):
        assert stage.out_info.shape == X.shape


@pytest.mark.parametrize('decorate', [sharded, sharded(), on_four(), on_four(ROWS)])
def test_decorated_with_and_without_parentheses(decorate):
    f = decorate(lambda x: x + 1)
    for call in (f, jax.jit(f)):
        np.testing.assert_array_equal(call(X), X + 1)


def plus(x, y=0.0):
    return x + y


class Model:
    def method(self, x):
        return x


@pytest.mark.parametrize('called_before', [False, True])
@pytest.mark.parametrize(
    ('function', 'args', 'kwargs'),
    [
        (plus, (), {}),
        (plus, (X, X, X), {}),
        (plus, (X,), {'x': X}),
        (plus, (X,), {'nope': X}),
        (plus, (), {'y': X}),
        (weighted, (X, X, 2), {'y': 3}),
        (Model.method, (Model(), X), {'x': 3}),
    ],
)
def test_invalid_calls_raise_the_error_of_python(function, args, kwargs, called_before):
    others = ['y', 'rest', 'scale', 'more'] if function is weighted else ['y'][: function is plus]
    f = on_four(x=ROWS, **dict.fromkeys(others))(function)
    if called_before and function is not Model.method:
        f(X)
    messages = []
    for call in (function, f):
        with pytest.raises(TypeError) as caught:
            call(*args, **kwargs)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


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


@pytest.mark.parametrize('number', [np.int64(2), [np.int64(2)]])
def test_numbers_of_numpy_name_parameters(number):
    g = on_four(ROWS, None, static_argnums=number)(weighted)
    np.testing.assert_array_equal(g(X, X, 2.0), weighted(X, X, 2.0))


def on_shards(*specs, **options):
    return per_device(*specs, out=specs[0], axis_names=iter(['a']), **options)


@pytest.mark.parametrize('decorator', [sharded, on_shards])
def test_options_are_copied_when_they_are_given(decorator):
    devices, names = FOUR[:2], ['x']
    decorates = [
        decorator(ROWS, mesh=mesh, static_argnames=iter(['n']), donate_argnames=names)
        for mesh in (devices, iter(FOUR))
    ]
    devices += FOUR[2:]
    names += ['no parameter']
    for decorate, n_devices in zip(decorates, (2, 4), strict=True):
        for _ in range(2):  # the first function does not use up the options

            @decorate
            def f(x, n):
                assert type(n) is int
                assert decorator is sharded or len(x) < 4
                return x + n

            np.testing.assert_array_equal(f(X, n=2), X + 2)
            assert len(f(X, n=2).sharding.device_set) == n_devices


def test_the_program_bears_the_names_of_function_and_parameters():
    text = (
        on_four(ROWS, y=None, scale=None)(weighted)
        .lower(X, y=1.0, scale=2.0)
        .as_text(debug_info=True)
    )
    for name in ('jit_weighted', '"x"', '"y"', '"scale"'):
        assert name in text


# ------------------------------------------------------------------------------------ in a class


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    w: jax.Array
    name: str = dataclasses.field(default='linear', metadata={'static': True})

    @on_four(ROWS, out=COLUMNS)
    def __call__(self, x):
        return x @ self.w

    @on_four(ROWS, COLUMNS, times=None, out=ROWS)
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Special(Linear):
    def blend(self, x, y=0.0, *, times=1.0):
        return 1 + super().blend(x, y, times=times)


def test_methods():
    linear = Linear(X)
    for _ in range(2):
        assert linear(X).sharding == ON_COLUMNS
        for result, expected in (
            (linear(X), X @ X),
            (linear.blend(X, X, times=2.0), 2 * X @ X + X),
            (linear.blend(y=X, x=X), X @ X + X),
            (Linear.blend(linear, X), X @ X),
            (jax.jit(linear.blend)(X), X @ X),
            (Special(X).blend(X, X), 1 + X @ X + X),
            (linear.bare(X), X @ X),
            (linear.constant(X), X @ X),
            (linear.constant(x=X), X @ X),
        ):
            np.testing.assert_allclose(result, expected)
    asked = linear.blend.in_shardings(X, y=X)
    assert asked == {'self': None, 'x': ON_ROWS, 'y': ON_COLUMNS}
    assert linear.blend.out_shardings(X) == ON_ROWS
    assert linear.blend.lower(X, y=X).compile()(linear, X, y=X).sharding == ON_ROWS
    assert linear.blend.eval_shape(X, X).shape == (4, 4)
    assert linear.blend.trace(X).jaxpr.in_avals[-1].shape == (4, 4)


def test_the_instance_is_data_not_a_constant():
    """A new weight is a new result."""
    np.testing.assert_allclose(Linear(X).blend(X), X @ X)
    np.testing.assert_allclose(Linear(2 * X).blend(X), 2 * X @ X)
    gradient = jax.grad(lambda linear: linear(X).sum())(Linear(jnp.asarray(X)))
    np.testing.assert_allclose(gradient.w, X.T @ np.ones((4, 4)))


@pytest.mark.parametrize('of', [Linear, Linear(X), Special])
def test_static_and_class_methods_in_both_orders(of):
    n = len((of if isinstance(of, type) else type(of)).__name__)
    for method, expected in (
        (of.double, 2 * X),
        (of.triple, 3 * X),
        (of.named, X + n),
        (of.called, X - n),
    ):
        for result in (method(X), method(x=X)):
            np.testing.assert_array_equal(result, expected)
            assert result.sharding == ON_COLUMNS
    # of class methods Python gives these functions without the class, as it does for jax.jit
    for method in (of.double, of.triple):
        assert method.in_shardings(X)['x'] == ON_ROWS


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


def test_a_function_that_becomes_a_method_later():
    class Thing:
        pass

    Thing.method = on_four(None, ROWS, static_argnums=0)(lambda self, x: x + 1)
    np.testing.assert_array_equal(Thing().method(X), X + 1)
