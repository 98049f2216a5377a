# ruff: noqa: F722, F821
"""Sharded[...]: read by @sharded, checked by beartype, an array type to type checkers."""

import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
import typing
from typing import (
    Annotated,
    Any,
    Final,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    Required,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import annotated_later
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float, Int, PyTree, TypeCheckError, jaxtyped

from einshard import EinshardError, Sharded, device_mesh, einshard, make_sharding, sharded

EIGHT = jax.devices()[:8]
X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
ROWS, COLUMNS = (make_sharding(text, mesh=EIGHT) for text in ('a* b', 'a b*'))
ENTRIES = make_sharding('a*', mesh=EIGHT)
on_eight = sharded(mesh=EIGHT)


def asked(function, *args, **kwargs):
    """The shardings that a function asks of the leaves of its arguments, by path."""
    tree = function.in_shardings(*args, **kwargs)
    return {
        jax.tree_util.keystr(path, simple=True, separator='/'): sharding
        for path, sharding in jax.tree_util.tree_leaves_with_path(tree)
    }


# ------------------------------------------------------------------------------- read by @sharded


def test_arguments_and_result():
    def f(x: Sharded[Float[Array, 'a b'], 'a* b'], y, z: float = 1.0) -> Sharded[Array, 'a b*']:
        return (x + y) * z

    g = on_eight(f)
    assert g.in_shardings(X, X, 2.0) == {'x': ROWS, 'y': None, 'z': None}
    result = g(X, y=X, z=3.0)
    np.testing.assert_array_equal(result, 6 * X)
    assert result.sharding == COLUMNS


def test_the_mesh_is_that_of_each_call():
    @sharded
    def f(x: Sharded[Array, 'a* b']) -> Sharded[Array, 'a b*']:
        return 2 * x

    for devices in (EIGHT, jax.devices()[:4]):
        with jax.set_mesh(device_mesh(devices)):
            assert f(X).sharding.device_set == set(devices)


def test_parameters_of_every_kind():
    def f(
        x: Sharded[Array, 'a* b'],
        /,
        y: Sharded[Array, 'a b*'],
        *rest: Sharded[Array, 'a* b'],
        z: Sharded[Array, 'a b*'],
        **more: Sharded[Array, 'a* b'],
    ):
        return x + y + z

    assert on_eight(f).in_shardings(X, X, X, X, z=X, other=X) == {
        'x': ROWS, 'y': COLUMNS, 'rest[0]': ROWS, 'rest[1]': ROWS, 'other': ROWS, 'z': COLUMNS,
    }  # fmt: skip


class Layer(NamedTuple):
    w: Sharded[Float[Array, 'i o'], 'i o*']
    b: Sharded[Float[Array, 'o'], 'o*']
    scale: float = 1.0


class Batch(TypedDict):
    tokens: Sharded[Int[Array, 'b t'], 'b* t']
    mask: Bool[Array, 'b t']


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Network:
    layers: list[Layer]
    head: Sharded[Array, 'i o*']
    name: str = dataclasses.field(default='network', metadata={'static': True})


LAYER = Layer(X, X[0])
OF_LAYER = [('w', COLUMNS), ('b', ENTRIES)]


@pytest.mark.parametrize(
    ('hint', 'value', 'expected'),
    [
        (Layer, LAYER, {'w': COLUMNS, 'b': ENTRIES}),
        (list[Layer], [0, LAYER, LAYER], {f'{i}/{n}': s for i in '12' for n, s in OF_LAYER}),
        (dict[str, Layer], {'p': LAYER}, {'p/w': COLUMNS, 'p/b': ENTRIES}),
        (dict[str, list[Layer]], {'p': [LAYER]}, {'p/0/w': COLUMNS, 'p/0/b': ENTRIES}),
        (tuple[Layer, ...], (LAYER,), {'0/w': COLUMNS, '0/b': ENTRIES}),
        (tuple[Layer, Array], (LAYER, X), {'0/w': COLUMNS, '0/b': ENTRIES}),
        (tuple[Sharded[Array, 'a* b'], Sharded[Array, 'a b*']], (X, X), {'0': ROWS, '1': COLUMNS}),
        (tuple[Array, tuple[Array, Sharded[Array, 'a* b']]], (X, (X, X)), {'1/1': ROWS}),
        (Optional[Sharded[Array, 'a* b']], X, {'': ROWS}),  # noqa: UP045
        (Sharded[Array, 'a* b'] | None, X, {'': ROWS}),
        (Sharded[Array, 'a* b'] | float, X, {'': ROWS}),
        (Sharded[Array, 'a* b'] | None, None, {}),
        (list[Sharded[Array, 'a* b'] | None], [X, None], {'0': ROWS}),
        (Layer | None, LAYER, {'w': COLUMNS, 'b': ENTRIES}),
        (Annotated[Layer, 'a remark'], LAYER, {'w': COLUMNS, 'b': ENTRIES}),
        (Batch, {'tokens': X, 'mask': X}, {'tokens': ROWS}),
        (
            Network,
            Network([LAYER], X),
            {'layers/0/w': COLUMNS, 'layers/0/b': ENTRIES, 'head': COLUMNS},
        ),
        (Sharded[PyTree, '... o -> ... o*'], {'w': X, 'b': X[0]}, {'w': COLUMNS, 'b': ENTRIES}),
        (Sharded[dict[str, Array], {'w': 'a* b', 'b': None}], {'w': X, 'b': X}, {'w': ROWS}),
    ],
)  # fmt: skip
def test_types_of_trees(hint, value, expected):
    def f(x):
        return jax.tree.map(lambda leaf: leaf + 1, x)

    f.__annotations__ = {'x': hint}
    g = on_eight(f)
    found = {path.removeprefix('x').removeprefix('/'): one for path, one in asked(g, value).items()}
    assert found == expected
    for ours, leaf in zip(jax.tree.leaves(g(value)), jax.tree.leaves(value), strict=True):
        np.testing.assert_array_equal(ours, np.asarray(leaf) + 1)


def test_types_of_results():
    def f(x) -> tuple[Sharded[Array, 'a b*'], dict[str, Layer], Array]:
        return x, {'p': Layer(x, x[0], x.sum())}, x

    result = on_eight(f)(X)
    assert result[0].sharding == COLUMNS
    assert result[1]['p'].w.sharding == COLUMNS
    assert result[1]['p'].b.sharding == ENTRIES

    def g(x) -> Network:
        return Network([Layer(x, x[0])], x)

    assert on_eight(g)(X).layers[0].b.sharding == ENTRIES


def test_equinox_modules():
    eqx = pytest.importorskip('equinox')

    class Linear(eqx.Module):
        w: Sharded[Float[Array, 'i o'], 'i o*']
        b: Sharded[Float[Array, 'o'], 'o*'] | None
        size: int = eqx.field(static=True, default=8)

        @on_eight
        def __call__(self, x: Sharded[Float[Array, 'b i'], 'b* i']) -> Sharded[Array, 'b o*']:
            return x @ self.w + self.b

    class Model(eqx.Module):
        layers: list[Linear]
        head: Linear

    model = Model([Linear(X, X[0])], Linear(X, None))

    def f(model: Model, x: Sharded[Array, 'b* i']) -> Model:
        return jax.tree.map(lambda leaf: leaf * 2, model)

    found = asked(on_eight(f), model, X)
    assert found == {
        'model/layers/0/w': COLUMNS,
        'model/layers/0/b': ENTRIES,
        'model/head/w': COLUMNS,
        'x': ROWS,
    }
    assert on_eight(f)(model, X).head.w.sharding == COLUMNS
    linear = model.layers[0]
    np.testing.assert_allclose(linear(X), X @ X + X[0], rtol=1e-6)
    assert linear(X).sharding == COLUMNS


def test_annotations_of_callable_objects_and_methods():
    class Scaler:
        def __call__(self, x: Sharded[Array, 'a* b']) -> Sharded[Array, 'a b*']:
            return 2 * x

        def method(self, x: Sharded[Array, 'a* b']) -> Sharded[Array, 'a b*']:
            return 3 * x

    for f in (Scaler(), Scaler().method):
        assert on_eight(f).in_shardings(X) == {'x': ROWS}
        assert on_eight(f)(X).sharding == COLUMNS


W = Sharded[Array, 'a* b']
IsW = NewType('IsW', W)
BoundW = TypeVar('BoundW', bound=W)


class Behind(TypedDict):
    required: Required[W]
    not_required: NotRequired[W]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Constant:
    w: Final[W]


@pytest.mark.parametrize(
    ('hint', 'value', 'expected'),
    [
        (Behind, {'required': X, 'not_required': X}, {'required': ROWS, 'not_required': ROWS}),
        (Behind, {'required': X}, {'required': ROWS}),
        (Constant, Constant(X), {'w': ROWS}),
        (IsW, X, {'': ROWS}),
        (BoundW, X, {'': ROWS}),
        (IsW | None, X, {'': ROWS}),
        (dict[str, IsW], {'p': X}, {'p': ROWS}),
        (tuple[BoundW, Array], (X, X), {'0': ROWS}),
        (list[NewType('IsLayer', Layer)], [LAYER], {f'0/{n}': s for n, s in OF_LAYER}),
        (TypeVar('Free'), X, {}),
    ],
)
def test_qualified_and_derived_types(hint, value, expected):
    test_types_of_trees(hint, value, expected)


@pytest.mark.skipif(not hasattr(typing, 'TypeAliasType'), reason='Python has it from 3.12 on')
def test_aliases():
    alias = typing.TypeAliasType('Alias', W)
    test_types_of_trees(alias, X, {'': ROWS})
    test_types_of_trees(typing.TypeAliasType('Second', alias), X, {'': ROWS})
    test_types_of_trees(dict[str, alias | None], {'p': X}, {'p': ROWS})
    names = {'W': W}
    exec('type Nested = dict[str, Nested] | W', names)  # no syntax of Python 3.11
    test_types_of_trees(names['Nested'], {'p': {'q': X}, 'r': X}, {'p/q': ROWS, 'r': ROWS})


@pytest.mark.skipif(not hasattr(typing, 'ReadOnly'), reason='Python has it from 3.13 on')
def test_read_only():
    names = {'w': typing.ReadOnly[W], 'v': typing.NotRequired[typing.ReadOnly[W]]}
    frozen = TypedDict('frozen', names)
    test_types_of_trees(frozen, {'w': X, 'v': X}, {'w': ROWS, 'v': ROWS})


def test_keywords_of_a_typed_dict():
    def f(x, **more: Unpack[Behind]):
        return x

    found = on_eight(f).in_shardings(X, required=X, not_required=X)
    assert found == {'x': None, 'required': ROWS, 'not_required': ROWS}


def test_partials():
    def f(x: W, y: Sharded[Array, 'a b*'], z: W = 1.0) -> Sharded[Array, 'a b*']:
        return x + y + z

    first = on_eight(functools.partial(f, X))
    assert first.in_shardings(X, z=X) == {'y': COLUMNS, 'z': ROWS}
    assert first(X).sharding == COLUMNS
    by_name = on_eight(functools.partial(functools.partial(f, z=2.0), X))
    assert by_name.in_shardings(X) == {'y': COLUMNS}
    np.testing.assert_array_equal(by_name(X), 2 * X + 2)

    class Scaler:
        def __call__(self, x: W, scale):
            return x * scale

    assert on_eight(functools.partial(Scaler(), scale=3.0)).in_shardings(X) == {'x': ROWS}


def test_keys_with_a_slash():
    hint = dict[str, tuple[W, Sharded[Array, 'a b*']]]
    for key in ['a/b', 'a/0', '/', '1']:
        expected = {f'{key}/0': ROWS, f'{key}/1': COLUMNS}
        assert _asked_of(hint, {key: (X, X)}) == expected


def _asked_of(hint, value):
    def f(x):
        return 0

    f.__annotations__ = {'x': hint}
    found = asked(on_eight(f), value)
    return {path.removeprefix('x/'): sharding for path, sharding in found.items()}


def test_types_that_contain_themselves():
    found = on_eight(with_tree).in_shardings(Tree(X, [Tree(X, [])]))['tree']
    assert found.value == found.children[0].value == ROWS


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    value: Sharded[Array, 'a* b']
    children: 'list[Tree]'


def with_tree(tree: Tree):
    return tree.value


def test_annotations_are_left_alone_where_specs_are_given():
    def f(x: Sharded[Array, 'a* b'], y=0.0) -> Sharded[Array, 'a* b']:
        return x + y

    assert sharded('a b*', mesh=EIGHT)(f).in_shardings(X) == {'x': COLUMNS}
    assert sharded(y='a b*', mesh=EIGHT)(f).in_shardings(X, X) == {'x': None, 'y': COLUMNS}
    assert sharded(out='a b*', mesh=EIGHT)(f)(X).sharding == COLUMNS


def test_annotations_beside_options_of_jit():
    def f(x: Sharded[Array, 'a* b'], n: int) -> Sharded[Array, 'a b*']:
        return x * n

    g = sharded(mesh=EIGHT, static_argnames='n', donate_argnames='x')(f)
    x = einshard(X, 'a* b', mesh=EIGHT)
    np.testing.assert_array_equal(g(x, 3), 3 * X)
    assert x.is_deleted()


def test_annotations_that_are_strings():
    parameters = annotated_later.Parameters(
        [annotated_later.Layer(X, X[0]), annotated_later.Layer(X)], X
    )
    with jax.set_mesh(device_mesh(EIGHT)):
        found = asked(annotated_later.forward, parameters, X)
        assert found == {
            'parameters/layers/0/w': COLUMNS,
            'parameters/layers/0/b': ENTRIES,
            'parameters/layers/1/w': COLUMNS,
            'x': ROWS,
        }
        result = annotated_later.forward(parameters, X)
        np.testing.assert_allclose(result, (X @ X + X[0]) @ X @ X, rtol=1e-5)
        assert result.sharding == ROWS
        assert annotated_later.Model(X).make()(X).sharding == COLUMNS


# --------------------------------------------------------------------- what Sharded[...] itself is


def test_sharded_is_annotated():
    matrix = Float[Array, 'x y']  # of jaxtyping every such type is another
    hint = Sharded[matrix, 'x y*']
    assert get_origin(hint) is Annotated
    assert get_args(hint)[0] is matrix
    assert Sharded[matrix, 'x y*'] == hint
    assert hash(Sharded[matrix, 'x y*']) == hash(hint)
    assert Sharded[matrix, 'x* y'] != hint

    def f(x: hint) -> hint:
        return x

    assert get_type_hints(f) == {'x': matrix, 'return': matrix}
    assert get_type_hints(f, include_extras=True) == {'x': hint, 'return': hint}


@pytest.mark.parametrize(
    ('dims', 'spec'),
    [
        ('x y', 'x y*'),
        ('x y', 'x y -> y* x'),
        ('batch d_model', 'batch* d_model'),
        ('*batch d', '... d -> ... d*'),
        ('... d', '... d -> ... d*'),
        ('x y z', 'x ... -> x* ...'),
        ('x y z', '... z -> ... z*'),
        ('x y', '... -> * ...'),
        ('_ y', 'anything y*'),
        ('3 y', 'rgb y*'),
        ('x+1 y', 'more y*'),
        ('#x y', 'x y*'),
        ('dim1 y', 'dim y*'),
        ('', '-> *'),
        ('', '... -> * ...'),
    ],
)
def test_names_that_agree_with_the_type(dims, spec):
    array_type = Float[Array, dims]
    assert get_args(Sharded[array_type, spec])[0] is array_type


@pytest.mark.parametrize(
    ('dims', 'spec'),
    [
        ('x y', 'x z*'),
        ('x y', 'y x*'),
        ('x y', 'x*'),
        ('x', 'x y*'),
        ('*batch d', 'batch d*'),
        ('x y', '... z -> ... z*'),
        ('', 'x*'),
        ('x y', '-> *'),
        ('#x y', 'z y*'),
    ],
)
def test_names_that_differ_from_the_type(dims, spec):
    with pytest.raises(EinshardError, match='the expression names the axes'):
        Sharded[Float[Array, dims], spec]


def test_types_without_names_are_not_compared():
    for array_type in (Array, jax.Array, Any, PyTree[Float[Array, '...']]):
        assert get_args(Sharded[array_type, 'x y*'])[0] is array_type


# ------------------------------------------------------------------------------ under type checkers

checkers = pytest.mark.parametrize(
    'check', [beartype, jaxtyped(typechecker=beartype)], ids=['beartype', 'jaxtyped']
)
Placed = Sharded[Float[Array, 'x y'], 'x y*']


def on(spec, x=X, mesh=None):
    return einshard(x, spec, mesh=mesh)


SIXTEEN = np.ones((16, 16), np.float32)


@checkers
def test_arrays_sharded_as_annotated_pass(check):
    @check
    def f(x: Placed, y: Placed | None = None) -> Placed:
        return x

    x = on('a b*', SIXTEEN)
    assert f(x) is x
    assert f(x, x) is x
    assert f(on('x y -> x y16', SIXTEEN), None) is not None


@checkers
@pytest.mark.parametrize('spec', ['a* b', '* a b', 'a4 b4', 'a b4 4'])
def test_errors_show_both_expressions(check, spec):
    @check
    def f(x: Placed):
        return x

    with pytest.raises(EinshardError) as caught:
        f(on(spec, SIXTEEN))
    text = str(caught.value)
    assert 'x y*\n' in text
    described = spec.replace('a', 'x').replace('b', 'y').replace('*', '16').replace('16 x', '16 x')
    assert f"sharded as 'x y -> {described}'" in text
    assert 'float32[16,16]' in text
    assert type(caught.value).__name__ == 'EinshardError'


@checkers
def test_results_are_checked(check):
    @check
    def f(x) -> Placed:
        return x

    with pytest.raises(EinshardError, match="sharded as 'x y -> x16 y'"):
        f(on('a* b', SIXTEEN))


@checkers
def test_arrays_on_one_device_are_errors(check):
    @check
    def f(x: Placed):
        return x

    for x in (jnp.asarray(SIXTEEN), jax.device_put(SIXTEEN, jax.devices()[3])):
        with pytest.raises(EinshardError, match='x y\\*'):
            f(x)


@checkers
def test_arrays_that_the_spec_cannot_fit(check):
    @check
    def f(x: Sharded[Array, '... y -> ... y*']):
        return x

    assert f(on('... y -> ... y*', SIXTEEN)) is not None
    with pytest.raises(EinshardError):
        f(jnp.float32(3))


def test_the_type_is_still_checked():
    def f(x: Placed):
        return x

    wrong = on('a b*', np.ones((16, 16), np.int32))
    with pytest.raises(TypeCheckError):
        jaxtyped(typechecker=beartype)(f)(wrong)
    with pytest.raises(TypeCheckError):
        jaxtyped(typechecker=beartype)(f)(on('a b c*', np.ones((2, 2, 16), np.float32)))
    with pytest.raises(BeartypeCallHintViolation):
        beartype(f)('text')


def test_sizes_are_still_bound_across_arguments():
    @jaxtyped(typechecker=beartype)
    def f(x: Sharded[Float[Array, 'x y'], 'x y*'], y: Sharded[Float[Array, 'y z'], 'y* z']):
        return x @ y

    f(on('a b*', SIXTEEN), on('a* b', SIXTEEN))
    with pytest.raises(TypeCheckError):
        f(on('a b*', SIXTEEN), on('a* b', np.ones((32, 4), np.float32)))


def test_host_arrays_have_no_placement():
    @beartype
    def f(x: Sharded[Any, 'x y*']):
        return x

    assert f(X) is X


@checkers
def test_inside_containers(check):
    @check
    def f(tree: dict[str, list[Placed]]):
        return tree

    f({'a': [on('a b*', SIXTEEN)]})
    with pytest.raises(EinshardError, match="sharded as 'x y -> x16 y'"):
        f({'a': [on('a* b', SIXTEEN)]})


@checkers
@pytest.mark.parametrize('order', ['checker outside', 'checker inside'])
def test_both_orders_of_decorators(check, order):
    def f(x: Placed, y: Any = 1.0) -> Sharded[Float[Array, 'x y'], 'x* y']:
        return x * y

    g = check(sharded(f)) if order == 'checker outside' else sharded(check(f))
    x = on('a b*', SIXTEEN)
    for _ in range(2):
        result = g(x, 3.0)
        np.testing.assert_array_equal(result, 3 * SIXTEEN)
        assert result.sharding == make_sharding('a* b')
    np.testing.assert_array_equal(g(x=x, y=2.0), 2 * SIXTEEN)
    with pytest.raises(EinshardError) as caught:
        g(on('a* b', SIXTEEN), 3.0)
    assert "'x y -> x16 y'" in str(caught.value)
    assert 'x y*' in str(caught.value)


@checkers
def test_traced_values_on_auto_axes_pass(check):
    """Their type does not say where they are."""
    seen = []

    @check
    def inner(x: Placed):
        seen.append(jax.typeof(x))
        return x + 1

    f = jax.jit(lambda x: inner(einshard(x, 'a* b')))
    np.testing.assert_array_equal(f(SIXTEEN), SIXTEEN + 1)
    assert len(seen) == 1
    np.testing.assert_array_equal(jax.grad(lambda x: inner(x).sum())(on('a* b', SIXTEEN)), SIXTEEN)


@checkers
def test_traced_values_on_explicit_axes_are_checked(check):
    @check
    def inner(x: Placed):
        return x + 1

    with jax.set_mesh(device_mesh(EIGHT, axis_types=AxisType.Explicit)):
        right = jax.jit(lambda x: inner(einshard(x, 'a b*')))
        np.testing.assert_array_equal(right(X), X + 1)
        wrong = jax.jit(lambda x: inner(einshard(x, 'a* b')))
        with pytest.raises(EinshardError, match=r"sharded as 'x y -> x@\(d0,d1,d2\) y'|x8 y"):
            wrong(X)


def test_a_decorated_function_beside_jaxtyped_in_one_line():
    """As documented by jaxtyping: jaxtyped outside, the checker given to it."""

    @sharded
    @jaxtyped(typechecker=beartype)
    def f(x: Sharded[Float[Array, 'x y'], 'x y*']) -> Sharded[Float[Array, 'y x'], 'y x*']:
        return x.T

    assert f(SIXTEEN).sharding == make_sharding('a b*')


# ------------------------------------------------------------------------------------- for pyright

RIGHT_CODE = textwrap.dedent("""
    from typing import assert_type

    import jax
    from jaxtyping import Array, Float

    from einshard import Sharded, einshard, sharded

    Weights = Sharded[Float[Array, 'x y'], 'x y*']


    @sharded
    def bare(x: Weights, scale: float = 1.0) -> Weights:
        assert_type(x, Float[Array, 'x y'])
        return x * scale


    @sharded('x y*', out='x* y', static_argnames='scale')
    def with_specs(x: Array, *, scale: int) -> tuple[Array, int]:
        return x * scale, scale


    class Layer:
        @sharded('x y*')
        def __call__(self, x: Array, y: str = '') -> Array:
            return x

        @sharded
        def method(self, x: Weights) -> Weights:
            return einshard(x, 'x y*')


    def use(x: Array, layer: Layer) -> None:
        array: jax.Array = bare(x)
        assert_type(bare(x, scale=2.0), Float[Array, 'x y'])
        assert_type(with_specs(x, scale=3), tuple[Array, int])
        assert_type(layer(x, y='a'), Array)
        assert_type(layer.method(x), Float[Array, 'x y'])
        assert_type(einshard(array, 'x y*'), Array)
        bare.lower(x, 2.0).compile()
""")
WRONG_CODE = textwrap.dedent("""
    from jaxtyping import Array

    from einshard import sharded


    @sharded('x y*')
    def f(x: Array, *, scale: int) -> Array:
        return x * scale


    class Layer:
        @sharded('x y*')
        def method(self, x: Array) -> Array:
            return x


    def use(x: Array, layer: Layer) -> str:
        f(x)  # wrong
        f(x, scale='a')  # wrong
        f(x, 3)  # wrong
        layer.method(x, x)  # wrong
        layer.method('a')  # wrong
        return f(x, scale=3)  # wrong
""")


@pytest.fixture(scope='module')
def pyright(tmp_path_factory):
    """The lines of the errors that pyright finds in two files of user code, by file."""
    command = shutil.which('pyright', path=f'{sys.prefix}/bin') or shutil.which('pyright')
    if command is None:
        pytest.skip('pyright is not installed: it belongs to the extra dev')
    folder = tmp_path_factory.mktemp('pyright')
    (folder / 'right.py').write_text(RIGHT_CODE)
    (folder / 'wrong.py').write_text(WRONG_CODE)
    package = importlib.util.find_spec('einshard').submodule_search_locations[0]
    settings = {'extraPaths': [os.path.dirname(package)], 'typeCheckingMode': 'standard'}
    (folder / 'pyrightconfig.json').write_text(json.dumps(settings))
    result = subprocess.run(
        [command, '--outputjson', '--pythonpath', sys.executable, '-p', str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    output = json.loads(result.stdout)
    assert output['summary']['filesAnalyzed'] == 2
    found = {'right.py': {}, 'wrong.py': {}}
    for one in output['generalDiagnostics']:
        line = one['range']['start']['line'] + 1
        found[os.path.basename(one['file'])].setdefault(line, []).append(one['message'])
    return found


def test_pyright_sees_the_array_type(pyright):
    assert pyright['right.py'] == {}


def test_pyright_refuses_wrong_calls(pyright):
    lines = enumerate(WRONG_CODE.splitlines(), 1)
    assert sorted(pyright['wrong.py']) == [i for i, line in lines if '# wrong' in line]
