"""The texts of the errors of sharded and Sharded, whole. A change of wording is a change here."""

import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from einshard import EinshardError, Sharded, einshard, sharded

EIGHT = jax.devices()[:8]
X = np.ones((8, 8), np.float32)


def message(function, *args, **kwargs):
    with pytest.raises(EinshardError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def expected(text):
    return textwrap.dedent(text).strip('\n')


def train_step(params, batch, *, rate=0.1):
    return params


def same(x):
    return x


class Model:
    def apply(self, x):
        return x


def decorate(function, *specs, **options):
    return message(lambda: sharded(*specs, **options)(function))


# -------------------------------------------------------------------------------- at decoration


@pytest.mark.parametrize(
    ('function', 'specs', 'options', 'text'),
    [
        (
            train_step,
            ('a b*', 'a b*', 'a b*'),
            {},
            """
            train_step takes 2 positional parameters, but 3 specs are given
              function:   train_step
              parameters: params, batch
            """,
        ),
        (
            Model.apply,
            ('a b*', 'a b*'),
            {},
            """
            apply takes 1 positional parameter, but 2 specs are given
              function:   apply
              parameters: x
            """,
        ),
        (
            lambda *, x: x,
            ('a b*',),
            {},
            """
            <lambda> takes 0 positional parameters, but 1 spec is given
              function:   <lambda>
              parameters: none
            """,
        ),
        (
            train_step,
            (),
            {'parms': 'a b*'},
            """
            train_step has no parameter 'parms', and jax.jit has no such option
              function:   train_step
              parameters: params, batch, rate
              here:       params=
            """,
        ),
        (
            train_step,
            (),
            {'zzz': 'a b*'},
            """
            train_step has no parameter 'zzz', and jax.jit has no such option
              function:   train_step
              parameters: params, batch, rate
            """,
        ),
        (
            train_step,
            ('a b*',),
            {'static_argname': 'rate'},
            """
            train_step has no parameter 'static_argname', and jax.jit has no such option
              function:   train_step
              parameters: params, batch, rate
              here:       static_argnames=
            """,
        ),
        (
            Model.apply,
            (),
            {'self': 'a b*'},
            """
            apply has no parameter 'self', and jax.jit has no such option
              function:   apply
              parameters: x
            """,
        ),
        (
            train_step,
            ('a b*',),
            {'params': 'a* b'},
            """
            parameter 'params' of train_step has two specs, one by position and one by name
              function:    train_step
              by position: a b*
              by name:     a* b
            """,
        ),
        (
            train_step,
            ('a b*',),
            {'static_argnums': 0},
            """
            parameter 'params' is static: it is no array and takes no spec
              function: train_step
              spec:     a b*
            """,
        ),
        (
            train_step,
            (),
            {'rate': '-> *', 'static_argnames': 'rate'},
            """
            parameter 'rate' is static: it is no array and takes no spec
              function: train_step
              spec:     -> *
            """,
        ),
        (
            train_step,
            ('a b*',),
            {'static_argnums': 7},
            """
            train_step has no parameter number 7
              function:   train_step
              parameters: params, batch
            """,
        ),
        (
            train_step,
            ('a b*',),
            {'donate_argnums': (0, -3)},
            """
            train_step has no parameter number -3
              function:   train_step
              parameters: params, batch
            """,
        ),
        (
            train_step,
            ('a b*',),
            {'in_shardings': None},
            """
            sharded makes in_shardings of the specs and does not take them as an option
              function: train_step
              give:     specs by position or by parameter name, and out=
            """,
        ),
        (
            train_step,
            ('a b*',),
            {'out_shardings': None},
            """
            sharded makes out_shardings of the specs and does not take them as an option
              function: train_step
              give:     specs by position or by parameter name, and out=
            """,
        ),
        (
            same,
            ('a b -> a* c',),
            {},
            """
            'c' is on the right side only
                a b -> a* c
                          ^
              function:  same
              parameter: x
              left side: a b
            """,
        ),
        (
            same,
            ({'layers': ['a b*', 'a -> b']},),
            {},
            """
            'b' is on the right side only
                a -> b
                     ^
              function:  same
              parameter: x
              spec at:   'layers/1'
              left side: a
            """,
        ),
        (
            same,
            (3,),
            {},
            """
            3 is no spec
              function:  same
              parameter: x
              specs are: an expression, None, a function (path, leaf) -> spec, a tree of those
            """,
        ),
    ],
)
def test_decoration(function, specs, options, text):
    assert decorate(function, *specs, **options) == expected(text)


def test_a_wrong_spec_of_the_result_is_not_called_a_parameter():
    text = decorate(same, out='a b -> a* c')
    assert text.startswith("'c' is on the right side only\n    a b -> a* c\n              ^\n")
    assert 'function:  same' in text
    assert 'parameter: out' not in text


def test_shardings_are_no_specs():
    text = decorate(same, P('x'))
    assert ' is no spec\n' in text
    assert "instead:   name the mesh axes in an expression: 'b d -> b@data d'" in text


@pytest.mark.parametrize('options', [{'static_argnames': 'nope'}, {'donate_argnames': ('nope',)}])
def test_names_of_options_that_are_no_parameters(options):
    """jax.jit refuses them too."""
    with pytest.raises(ValueError, match='nope'):
        jax.jit(train_step, **options)
    assert 'train_step' in decorate(train_step, 'a b*', **options)
    assert "'nope'" in decorate(train_step, 'a b*', **options)


def test_static_and_donated():
    options = {'static_argnames': 'rate', 'donate_argnames': 'rate'}
    with pytest.raises(ValueError, match='donate'):
        jax.jit(train_step, **options)
    assert "'rate'" in decorate(train_step, 'a b*', **options)


def generator(x):
    yield x


async def coroutine(x):
    return x


async def asynchronous_generator(x):
    yield x


class Asynchronous:
    __name__ = 'asynchronous'

    async def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ('function', 'what'),
    [
        (Asynchronous(), 'a coroutine'),
        (generator, 'a generator'),
        (coroutine, 'a coroutine'),
        (asynchronous_generator, 'an asynchronous generator'),
    ],
)
def test_functions_that_jax_cannot_trace(function, what):
    text = (
        f'{function.__name__} is {what}, which JAX cannot trace: sharded decorates functions that '
        'return arrays'
    )
    assert decorate(function, 'a*') == text
    assert message(sharded, function) == text


def test_things_that_are_no_functions():
    assert decorate(3, 'a*') == 'sharded decorates a function, not 3'
    assert decorate(None) == 'sharded decorates a function, not None'
    assert message(sharded('a*'), 1, 2) == 'sharded decorates a function, not 2 arguments'
    assert message(sharded('a*'), x=1) == 'sharded decorates a function, not 1'


def test_a_function_given_beside_options():
    def step(x):
        return x

    # jax.jit would take it for the function
    text = """
        sharded decorates a function, not [0, 1, 2, 3, 4, 5, ...]
          given first:    step, which beside options is taken for a spec
          to decorate it: sharded(...)(step)
    """
    assert message(sharded(step, donate_argnums=0), list(range(100))) == expected(text)


@pytest.mark.parametrize('mesh', ['data', 3])
def test_things_that_are_no_mesh_name_the_function(mesh):
    """At decoration: to see that it is none needs no devices."""
    assert decorate(same, 'a b*', mesh=mesh) == expected(
        f"""
        mesh= is {mesh!r}, which is no mesh
          function: same
          give:     a Mesh, an AbstractMesh or a sequence of devices
        """
    )


# ------------------------------------------------------------------------------------- at a call

TREE = {'layers': [{'w': X, 'b': np.ones(8, np.float32)}]}


@pytest.mark.parametrize(
    ('specs', 'argument', 'text'),
    [
        (
            {'layers': ['a b*']},
            {'layers': [X, X]},
            """
            the specs are no prefix of the tree: they differ at 'layers'
              of:    parameter 'x' of same
              specs: list with 0
              tree:  list with 0, 1
            """,
        ),
        (
            {'layers': [{'w': 'a b*'}]},
            TREE,
            """
            the specs are no prefix of the tree: they differ at 'layers/0'
              of:    parameter 'x' of same
              specs: dict with w
              tree:  dict with b, w
            """,
        ),
        (
            {'layers': 'a b*'},
            X,
            """
            the specs are no prefix of the tree: they differ at the top
              of:    parameter 'x' of same
              specs: dict with layers
              tree:  float32[8,8]
            """,
        ),
        (
            'a b*',
            np.ones(8, np.float32),
            """
            the expression names 2 axes, but the array has 1 dimension
                a b*
                ^ ^^
              array: float32[8], parameter 'x' of same
            """,
        ),
        (
            ['a b*', {'bias': 'a*'}],
            [X, {'bias': X}],
            """
            the expression names 1 axis, but the array has 2 dimensions
                a*
                ^^
              array: float32[8,8], parameter 'x/1/bias' of same
            """,
        ),
        (
            'a* b',
            np.ones((6, 8), np.float32),
            """
            axis 'a' has size 6, which 8 parts do not divide
                a* b
                ^^
              array:      float32[6,8], parameter 'x' of same
              devices:    8
              works with: 1, 2 parts
            """,
        ),
        (
            'a16 b',
            X,
            """
            the counts ask for 16 devices, more than the 8 there are
                a16 b
                ^^^
              array:      float32[8,8], parameter 'x' of same
              devices:    8
              works with: 16 devices, or a multiple of 16 with a replica '*'
            """,
        ),
        (
            'a* b',
            einshard(X, 'a b*', mesh=EIGHT),
            """
            the argument is partitioned otherwise: it is 'a b -> a b8'
                a* b
                ^^
              array:      float32[8,8], parameter 'x' of same
              to move it: einshard(x, ...) before the call, or sharded(..., reshard=True)
            """,
        ),
        (
            {'layers': [{'w': 'rows* columns', 'b': None}]},
            {'layers': [{'w': einshard(X, 'a2 b2 2', mesh=EIGHT), 'b': X}]},
            """
            the argument is partitioned otherwise: it is 'rows columns -> rows2 columns2 2'
                rows* columns
                ^^^^^
              array:      float32[8,8], parameter 'x/layers/0/w' of same
              to move it: einshard(x, ...) before the call, or sharded(..., reshard=True)
            """,
        ),
    ],
)  # fmt: skip
def test_arguments(specs, argument, text):
    f = sharded(x=specs, mesh=EIGHT)(same)
    for call in (lambda: f(argument), lambda: f(x=argument)):
        assert message(call) == expected(text)


@pytest.mark.parametrize('later', [False, True])
def test_an_argument_on_other_devices(later):
    f = sharded('a* b', mesh=EIGHT)(lambda x, y: x + y)
    if later:
        f(X, X)
    assert message(f, X, jax.device_put(X, EIGHT[3])) == expected(f"""
        an argument without a spec is held by 1 of the 8 devices
          array: float32[8,8], parameter 'y' of <lambda>
          it is: on one device: {EIGHT[3]}
          give:  a spec: y='... -> * ...' puts it on every device
        """)


@pytest.mark.parametrize(
    ('out', 'function', 'text'),
    [
        (
            {'a': 'a b*'},
            lambda x: {'a': x, 'b': x},
            """
            the specs are no prefix of the tree: they differ at the top
              of:    the result of <lambda>
              specs: dict with a
              tree:  dict with a, b
            """,
        ),
        (
            ('a b*', '... b*'),
            lambda x: (x, x, x),
            """
            the specs are no prefix of the tree: they differ at the top
              of:    the result of <lambda>
              specs: tuple with 0, 1
              tree:  tuple with 0, 1, 2
            """,
        ),
        (
            ['a b*', 'a b*'],
            lambda x: (x, x),
            """
            the specs are no prefix of the tree: they differ at the top
              of:    the result of <lambda>
              specs: list with 0, 1
              tree:  tuple with 0, 1
            """,
        ),
        (
            {'a': 'a b c*', 'b': None},
            lambda x: {'a': x, 'b': x},
            """
            the expression names 3 axes, but the array has 2 dimensions
                a b c*
                ^ ^ ^^
              array: float32[8,8], result 'a' of <lambda>
            """,
        ),
        (
            'a* b',
            lambda x: x[:6],
            """
            axis 'a' has size 6, which 8 parts do not divide
                a* b
                ^^
              array:      float32[6,8], result of <lambda>
              devices:    8
              works with: 1, 2 parts
            """,
        ),
    ],
)
def test_results(out, function, text):
    assert message(sharded(out=out, mesh=EIGHT)(function), X) == expected(text)


def test_functions_of_the_path_that_give_no_spec():
    f = sharded(x=lambda path, leaf: 3, mesh=EIGHT)(same)
    assert message(f, {'w': X}) == expected("""
        a function of the path gave 3 for a leaf, which is no spec for one
          of:    parameter 'x' of same
          array: float32[8,8], leaf 'w'
          give:  an expression or None
        """)
    assert "leaf ''" not in message(f, X)


def test_per_device_functions():
    mesh = Mesh(np.array(EIGHT).reshape(2, 4), ('p', 'q'))
    f = jax.shard_map(sharded('a* b')(same), mesh=mesh, in_specs=P(), out_specs=P())
    assert message(f, X) == expected("""
        every mesh axis is manual here: in a per-device function each device has its own array, which cannot be sharded
            a* b
          array: float32[8,8], parameter 'x' of same
          mesh:  'p': 2, 'q': 4 (Manual)
        """)  # noqa: E501


def test_per_device_functions_and_another_mesh():
    mesh = Mesh(np.array(EIGHT).reshape(2, 4), ('p', 'q'))
    f = jax.shard_map(sharded('a* b', mesh=EIGHT)(same), mesh=mesh, in_specs=P(), out_specs=P())
    assert message(f, X) == expected("""
        in a per-device function another mesh cannot be used: each device has its own array
          function:    same
          mesh around: 'p': 2, 'q': 4 (Manual)
          mesh given:  'd0': 2, 'd1': 2, 'd2': 2 (Auto)
        """)


# ------------------------------------------------------------------------------------ annotations


def test_sharded_takes_a_type_and_a_spec():
    text = expected("""
        Sharded takes an array type and a spec
          as in: Sharded[Float[Array, 'x y'], 'x y*']
        """)
    assert message(lambda: Sharded['x']) == text
    assert message(lambda: Sharded[Array, 'x', 'y']) == text
    assert message(lambda: Sharded[Array, 3]) == expected("""
        3 is no spec
          specs are: an expression, None, a function (path, leaf) -> spec, a tree of those
        """)
    assert message(lambda: Sharded[Array, 'x -> y']) == expected("""
        'y' is on the right side only
            x -> y
                 ^
          left side: x
        """)


@pytest.mark.parametrize(
    ('dims', 'spec', 'text'),
    [
        (
            'x y',
            'x z*',
            """
            the expression names the axes 'x z', but the type has 'x y'
                x z*
                ^ ^^
              type: Float[Array, 'x y']
            """,
        ),
        (
            'batch x y',
            'x y -> x* y',
            """
            the expression names the axes 'x y', but the type has 'batch x y'
                x y -> x* y
                ^ ^
              type: Float[Array, 'batch x y']
            """,
        ),
        (
            'x y',
            'y x -> y* x',
            """
            the expression names the axes 'y x', but the type has 'x y'
                y x -> y* x
                ^ ^
              type: Float[Array, 'x y']
            """,
        ),
    ],
)
def test_names_that_disagree_with_the_type(dims, spec, text):
    assert message(lambda: Sharded[Float[Array, dims], spec]) == expected(text)


def test_annotations_that_cannot_be_read():
    def f(x: 'Missing') -> Array:  # noqa: F821
        return x

    assert message(sharded, f) == expected("""
        the annotations of f cannot be read: name 'Missing' is not defined
          function: f
          define:   'Missing' in the module, before the function is decorated
        """)


def plus(x, y=0.0):
    return x + y


def test_things_that_are_no_arrays():
    assert message(sharded('a* b')(plus), 'hello') == expected("""
        str is no array, and no tree that JAX knows
          it is: str, parameter 'x' of plus
          give:  no spec for it; jit takes it if it is static
    """)


def test_a_list_of_specs():
    text = message(sharded(['a b -> a* b', 'b c -> * b c'])(plus), np.ones((8, 8), np.float32))
    assert 'instead: a spec for each parameter, not a list: sharded(spec, spec, ...)' in text


def test_errors_of_jax_name_the_function_and_not_ours():
    def chosen(x, flag):
        return x if flag else x + 1

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        sharded('a*')(chosen)(np.ones(16), True)
    assert f'the function chosen at {__file__}' in str(caught.value)
