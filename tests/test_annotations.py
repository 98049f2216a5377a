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
from typing import Annotated, Any, NamedTuple, NewType, TypedDict, TypeVar, get_args, get_type_hints

import annotated_later
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float, Int, PyTree, TypeCheckError, jaxtyped
from placed import by_path

from einshard import EinshardError, Sharded, device_mesh, einshard, make_sharding, sharded

EIGHT = jax.devices()[:8]
X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
ROWS, COLUMNS = (make_sharding(text, mesh=EIGHT) for text in ('a* b', 'a b*'))
ENTRIES = make_sharding('a*', mesh=EIGHT)
W, V = Sharded[Array, 'a* b'], Sharded[Array, 'a b*']
on_eight = sharded(mesh=EIGHT)


# ------------------------------------------------------------------------------- read by @sharded


class Layer(NamedTuple):
    w: Sharded[Float[Array, 'i o'], 'i o*']
    b: Sharded[Float[Array, 'o'], 'o*']
    scale: float = 1.0


class Batch(TypedDict):
    tokens: Sharded[Int[Array, 'b t'], 'b* t']
    mask: Bool[Array, 'b t']


class Untouched(TypedDict):
    mask: typing.NotRequired[Bool[Array, 'b t']]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Network:
    layers: list[Layer]
    head: typing.Final[V]
    name: str = dataclasses.field(default='network', metadata={'static': True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    value: W
    children: 'list[Tree]'


T = TypeVar('T')
Ts = typing.TypeVarTuple('Ts')


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box(typing.Generic[T]):
    w: T


@jax.tree_util.register_dataclass
class BoxOfW(Box[W]):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SubclassOfBoxOfW(BoxOfW):
    v: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class BoxOfArrays(Box[Array], typing.Generic[T]):
    v: V | None = None


class Pair(NamedTuple, typing.Generic[T]):
    first: T
    second: 'dict[str, T]'


class Entry(TypedDict, typing.Generic[T]):
    w: T


class Several(NamedTuple, typing.Generic[*Ts]):
    all: tuple[*Ts, W]


# like optax.OptState: the name in it is defined only in another module
Foreign = typing.Iterable['Elsewhere'] | None
IsW = NewType('IsW', W)
BoundW = TypeVar('BoundW', bound=W)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class BoxOfBound(typing.Generic[BoundW]):
    w: BoundW


LAYER = Layer(X, X[0])
OF_LAYER = [('w', COLUMNS), ('b', ENTRIES)]
HINTS = [
    (Layer, LAYER, {'w': COLUMNS, 'b': ENTRIES}),
    (list[Layer], [0, LAYER, LAYER], {f'{i}/{n}': s for i in '12' for n, s in OF_LAYER}),
    (dict[str, Layer], {'p': LAYER}, {'p/w': COLUMNS, 'p/b': ENTRIES}),
    (dict[str, list[Layer]], {'p': [LAYER]}, {'p/0/w': COLUMNS, 'p/0/b': ENTRIES}),
    (tuple[Layer, ...], (LAYER,), {'0/w': COLUMNS, '0/b': ENTRIES}),
    (tuple[Layer, Array], (LAYER, X), {'0/w': COLUMNS, '0/b': ENTRIES}),
    (tuple[W, V], (X, X), {'0': ROWS, '1': COLUMNS}),
    (tuple[Array, tuple[Array, W]], (X, (X, X)), {'1/1': ROWS}),
    (typing.Optional[W], X, {'': ROWS}),  # noqa: UP045
    (W | None, X, {'': ROWS}),
    (W | float, X, {'': ROWS}),
    (W | None, None, {}),
    (list[W | None], [X, None], {'0': ROWS}),
    (Layer | None, LAYER, {'w': COLUMNS, 'b': ENTRIES}),
    (Annotated[Layer, 'a remark'], LAYER, {'w': COLUMNS, 'b': ENTRIES}),
    (Untouched, {'mask': X}, {}),
    (Network, Network([LAYER], X), {'layers/0/w': COLUMNS, 'layers/0/b': ENTRIES, 'head': COLUMNS}),
    (Sharded[PyTree, '... o -> ... o*'], {'w': X, 'b': X[0]}, {'w': COLUMNS, 'b': ENTRIES}),
    (Sharded[dict[str, Array], {'w': 'a* b', 'b': None}], {'w': X, 'b': X}, {'w': ROWS}),
    # a type that contains itself
    (Tree, Tree(X, [Tree(X, [])]), {'value': ROWS, 'children/0/value': ROWS}),
    # qualified and derived types
    (IsW, X, {'': ROWS}),
    (BoundW, X, {'': ROWS}),
    (IsW | None, X, {'': ROWS}),
    (dict[str, IsW], {'p': X}, {'p': ROWS}),
    (tuple[BoundW, Array], (X, X), {'0': ROWS}),
    (list[NewType('IsLayer', Layer)], [LAYER], {f'0/{n}': s for n, s in OF_LAYER}),
    (TypeVar('Free'), X, {}),
    ('the input', X, {}),
    # names of other modules
    (Foreign, [X], {}),
    (tuple[W, Foreign], (X, [X]), {'0': ROWS}),
    (tuple['Layer', Foreign], (LAYER, X), {f'0/{n}': s for n, s in OF_LAYER}),
    # generic types
    (Box[Array], Box(X), {}),
    (Box, Box(X), {}),
    (BoxOfArrays[Array], BoxOfArrays(X, X), {'v': COLUMNS}),
    (BoxOfBound, BoxOfBound(X), {'w': ROWS}),
    # the type of the leaves of a pytree, and types without leaves
    (PyTree[W] | None, {'p': X, 'q': [X]}, {'p': ROWS, 'q/0': ROWS}),
    (PyTree[W], X, {'': ROWS}),
    (typing.Literal['W'], 1.0, {}),
    (typing.Callable[[W], V] | None, None, {}),
    # keys with a slash
    *[
        (dict[str, tuple[W, V]], {key: (X, X)}, {f'{key}/0': ROWS, f'{key}/1': COLUMNS})
        for key in ['a/b', 'a/0', '/', '1']
    ],
]
if hasattr(typing, 'TypeAliasType'):  # from Python 3.12 on
    Alias = typing.TypeAliasType('Alias', W)
    names = {'W': W}
    exec('type Nested = dict[str, Nested] | W', names)  # no syntax of Python 3.11
    HINTS += [
        (typing.TypeAliasType('Second', Alias), X, {'': ROWS}),
        (dict[str, Alias | None], {'p': X}, {'p': ROWS}),
        (names['Nested'], {'p': {'q': X}, 'r': X}, {'p/q': ROWS, 'r': ROWS}),
    ]


@pytest.mark.parametrize(('hint', 'value', 'expected'), HINTS)
def test_types(hint, value, expected):
    def f(x):
        return jax.tree.map(lambda leaf: leaf + 1, x)

    f.__annotations__ = {'x': hint, 'return': hint}
    assert by_path(on_eight(f).in_shardings(value)['x']) == expected
    result = by_path(on_eight(f)(value))
    assert {path: result[path].sharding for path in expected} == expected
    for path, leaf in by_path(value).items():
        np.testing.assert_array_equal(result[path], np.asarray(leaf) + 1)


def test_equinox_modules():
    eqx = pytest.importorskip('equinox')

    class Linear(eqx.Module):
        w: Sharded[Float[Array, 'i o'], 'i o*']
        b: Sharded[Float[Array, 'o'], 'o*'] | None
        size: int = eqx.field(static=True, default=8)

        @on_eight
        def __call__(self, x: Sharded[Float[Array, 'b i'], 'b* i']) -> Sharded[Array, 'b o*']:
            return x @ self.w + self.b

    class Holder(eqx.Module, typing.Generic[T]):
        held: T

    def f(layers: list[Linear]):
        return 0

    def g(holder: Holder[W]):
        return 0

    with pytest.raises(EinshardError, match=r'specs in .*Holder\[.*\] are not read'):
        on_eight(g)
    found = on_eight(f).in_shardings([Linear(X, X[0]), Linear(X, None)])
    assert by_path(found['layers']) == {'0/w': COLUMNS, '0/b': ENTRIES, '1/w': COLUMNS}
    result = Linear(X, X[0])(X)
    np.testing.assert_allclose(result, X @ X + X[0], rtol=1e-6)
    assert result.sharding == COLUMNS
    assert on_eight(Linear(X, X[0])).in_shardings(X) == {'x': ROWS}


def every_kind(x: W, /, y: V, n, *rest: W, z: V, default: float = 1.0, **more: W) -> V:
    return (x + y + z) * n * default


def add(x: W, y: V, z: W = 1.0) -> V:
    return x + y + z


class Scaler:
    def __call__(self, x: W, scale=2.0) -> V:
        return scale * x

    def method(self, x: W) -> V:
        return 3 * x


@dataclasses.dataclass(frozen=True)
class ScalerWithFields:
    x: float = 2.0
    w: V = 1.0

    def __call__(self: 'ScalerWithFields', x: W) -> V:
        return self.x * self.w * x


@pytest.mark.parametrize(
    ('function', 'args', 'kwargs', 'expected'),
    [
        (every_kind, (X, X, 1, X, X), {'z': X, 'other': X},
         {'x': ROWS, 'y': COLUMNS, 'n': None, 'rest[0]': ROWS, 'rest[1]': ROWS, 'other': ROWS,
          'z': COLUMNS}),
        (Scaler(), (X,), {}, {'x': ROWS}),
        (Scaler().method, (X,), {}, {'x': ROWS}),
        (ScalerWithFields(), (X,), {}, {'x': ROWS}),
        (functools.partial(ScalerWithFields()), (X,), {}, {'x': ROWS}),
        (jax.jit(ScalerWithFields()), (X,), {}, {'x': ROWS}),
        (functools.partial(Scaler(), scale=3.0), (X,), {}, {'x': ROWS}),
        (functools.partial(add, X), (X,), {'z': X}, {'y': COLUMNS, 'z': ROWS}),
        (functools.partial(functools.partial(add, z=2.0), X), (X,), {}, {'y': COLUMNS}),
    ],
)  # fmt: skip
def test_functions(function, args, kwargs, expected):
    f = on_eight(function)
    assert f.in_shardings(*args, **kwargs) == expected
    np.testing.assert_array_equal(f(*args, **kwargs), function(*args, **kwargs))
    assert f(*args, **kwargs).sharding == COLUMNS


def test_annotations_are_left_alone_where_specs_are_given():
    def f(x: W, y=0.0) -> Sharded[Array, 'a* b']:
        return x + y

    assert sharded('a b*', mesh=EIGHT)(f).in_shardings(X) == {'x': COLUMNS}
    assert sharded(x=None, y='a b*', mesh=EIGHT)(f).in_shardings(X, X) == {'x': None, 'y': COLUMNS}
    assert sharded(out='a b*', mesh=EIGHT)(f)(X).sharding == COLUMNS


def test_annotations_beside_options_of_jit():
    def f(x: W, n: int) -> V:
        return x * n

    g = sharded(mesh=EIGHT, static_argnames='n', donate_argnames='x')(f)
    x = einshard(X, 'a* b', mesh=EIGHT)
    np.testing.assert_array_equal(g(x, 3), 3 * X)
    assert x.is_deleted()


def test_annotations_that_are_strings():
    layer = annotated_later.Layer
    parameters = annotated_later.Parameters([layer(X, X[0]), layer(X)], X)
    with jax.set_mesh(device_mesh(EIGHT)):
        found = annotated_later.forward.in_shardings(parameters, X)
        result = annotated_later.forward(parameters, X)
        assert annotated_later.Model(X).make()(X).sharding == COLUMNS
    of_layers = {'layers/0/w': COLUMNS, 'layers/0/b': ENTRIES, 'layers/1/w': COLUMNS}
    assert by_path(found['parameters']) == of_layers
    assert found['x'] == result.sharding == ROWS
    np.testing.assert_allclose(result, (X @ X + X[0]) @ X @ X, rtol=1e-5)


def test_annotations_that_name_later_definitions():
    with jax.set_mesh(device_mesh(EIGHT)):
        bias = annotated_later.Bias(X)
        assert annotated_later.Bias.add.in_shardings(bias, X) == {'self': None, 'x': ROWS}
        assert bias.add(X).b.sharding == COLUMNS
        assert sharded(annotated_later.Bias.add.__wrapped__)(bias, X).b.sharding == COLUMNS


@on_eight
def before_definition(x: typing.Optional['LaterRows'], y: list['LaterRows']):
    return x


LaterRows = W


def test_quoted_names_of_later_definitions():
    found = before_definition.in_shardings(X, [X])
    assert found == {'x': ROWS, 'y': [ROWS]}


def test_annotations_that_cannot_be_resolved():
    """They are errors only for arrays, for which they might be `Sharded` types."""
    config = annotated_later.Config()
    with jax.set_mesh(device_mesh(EIGHT)):
        args = X, X, config, None, None, [X]
        assert annotated_later.with_config(*args).sharding == ROWS
        assert annotated_later.with_config.in_shardings(*args)['x'] == ROWS
        with pytest.raises(EinshardError, match="annotation 'Path' of with_path: name 'Path'"):
            annotated_later.with_path(X)
        assert annotated_later.with_path(1) == 1


@dataclasses.dataclass
class WithoutKeys:
    w: W

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@dataclasses.dataclass
class OtherKeys(WithoutKeys):
    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey('weight'), self.w),), None


jax.tree_util.register_pytree_node_class(WithoutKeys)
jax.tree_util.register_pytree_with_keys_class(OtherKeys)


@pytest.mark.parametrize(
    ('hint', 'value', 'message'),
    [
        (WithoutKeys, WithoutKeys(X), "WithoutKeys has specs, but the key '0'"),
        (list[WithoutKeys | None], [WithoutKeys(X)], 'register_dataclass'),
        (OtherKeys, OtherKeys(X), "the key 'weight' of its pytree is not a field"),
    ],
)
def test_types_in_which_a_leaf_is_not_found(hint, value, message):
    def f(x):
        return x

    f.__annotations__ = {'x': hint}
    with pytest.raises(EinshardError, match=message):
        on_eight(f)(value)


class EntryOfW(Entry[W]):
    pass


def of_dict(**more: typing.Unpack[Batch]):
    return more


def of_tuple(*rest: *tuple[W, ...]):
    return rest


def of_list(x: 'list[Batch | None]') -> int:
    return 0


@pytest.mark.parametrize(
    ('hint', 'unread'),
    [
        (Batch, 'Batch'),
        (dict[str, list[Batch] | None], 'Batch'),
        (Entry[W], "Entry[Sharded[Array, 'a* b']]"),
        (EntryOfW, "Entry[Sharded[Array, 'a* b']]"),
        (tuple[V, *tuple[Layer, ...]], "tuple[Sharded[Array, 'a b*'], *tuple[Layer, ...]]"),
        (tuple[*tuple[Array, ...], W], "tuple[*tuple[Array, ...], Sharded[Array, 'a* b']]"),
        (Box[W], "Box[Sharded[Array, 'a* b']]"),
        (list[Box[Box[W]]], "Box[Sharded[Array, 'a* b']]"),
        (Pair[Layer] | None, 'Pair[Layer]'),
        (BoxOfW, 'BoxOfW'),
        (SubclassOfBoxOfW, 'SubclassOfBoxOfW'),
        (BoxOfArrays[W], "BoxOfArrays[Sharded[Array, 'a* b']]"),
        (Several, 'tuple['),
        (typing.ClassVar[W], "ClassVar[Sharded[Array, 'a* b']]"),
        (PyTree[Box[W]], "Box[Sharded[Array, 'a* b']]"),
        (of_dict, 'Batch'),
        (of_tuple, "*tuple[Sharded[Array, 'a* b'], ...]"),
        (of_list, 'Batch'),
    ],
)
def test_types_in_which_specs_are_not_read(hint, unread):
    """They are an error at the decoration, also in a result."""

    def f(x):
        return x

    f.__annotations__ = {'return': hint}
    with pytest.raises(EinshardError) as caught:
        sharded(hint if getattr(hint, '__name__', '').startswith('of_') else f)
    assert str(caught.value).startswith(f'specs in {unread}')
    assert 'are not read\n' in str(caught.value)
    assert {'annotation of', 'annotation', 'instead'} <= caught.value.facts.keys()


def test_unions_of_different_specs():
    def f(x):
        return x

    for hint in (W | V, W | None | V, dict[str, W | V], Box[W | V]):
        f.__annotations__ = {'x': hint}
        with pytest.raises(EinshardError, match='different specs'):
            sharded(f)
    f.__annotations__ = {'x': W | list[V]}
    with pytest.raises(EinshardError, match='different specs'):
        on_eight(f)([X])
    f.__annotations__ = {'x': Layer | Tree}
    assert on_eight(f).in_shardings(LAYER)['x'].w == COLUMNS
    assert on_eight(f).in_shardings(Tree(X, []))['x'].value == ROWS
    f.__annotations__ = {'x': W | Sharded[Int[Array, 'a b'], 'a* b']}
    assert on_eight(f)(X).sharding == ROWS


# ------------------------------------------------------------------------- Sharded[...] as a type


def test_sharded_is_annotated():
    matrix = Float[Array, 'x y']  # each such expression makes another type
    hint = Sharded[matrix, 'x y*']
    assert typing.get_origin(hint) is Annotated
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


@pytest.mark.parametrize('array_type', [Array, jax.Array, Any, PyTree[Float[Array, '...']]])
def test_types_without_names_are_not_compared(array_type):
    assert get_args(Sharded[array_type, 'x y*'])[0] is array_type


@pytest.mark.parametrize(
    ('dims', 'spec'),
    [
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


# ------------------------------------------------------------------------------ under type checkers

checkers = pytest.mark.parametrize(
    'check', [beartype, jaxtyped(typechecker=beartype)], ids=['beartype', 'jaxtyped']
)
SIXTEEN = np.ones((16, 16), np.float32)
AT_ROWS, AT_COLUMNS = einshard(SIXTEEN, 'a* b'), einshard(SIXTEEN, 'a b*')
Placed = Sharded[Float[Array, 'x y'], 'x y*']
Last = Sharded[Array, '... y -> ... y*']
CHECKED = [
    # hint, value, and a part of the error; None: the value passes
    (Placed, AT_COLUMNS, None),
    (Placed, einshard(SIXTEEN, 'x y -> x y16'), None),
    (Placed, AT_ROWS, "sharded as 'x y -> x16 y'"),
    (Placed, einshard(SIXTEEN, '* a b'), "sharded as 'x y -> 16 x y'"),
    (Placed, einshard(SIXTEEN, 'a b4 4'), "sharded as 'x y -> x y4 4'"),
    (Placed, jnp.asarray(SIXTEEN), 'on one device'),
    (Placed, jax.device_put(SIXTEEN, jax.devices()[3]), 'on one device'),
    (Placed | None, None, None),
    (Placed | None, AT_COLUMNS, None),
    (dict[str, list[Placed]], {'a': [AT_COLUMNS]}, None),
    (dict[str, list[Placed]], {'a': [AT_ROWS]}, "sharded as 'x y -> x16 y'"),
    (Last, einshard(SIXTEEN, '... y -> ... y*'), None),
    (Last, jnp.float32(3), 'float32[]'),
    (Sharded[Any, 'x y*'], X, None),  # arrays of the host have no sharding
]


@checkers
@pytest.mark.parametrize(('hint', 'value', 'wrong'), CHECKED)
def test_shardings_are_checked(check, hint, value, wrong):
    def argument(x):
        return x

    def result(x):
        return x

    argument.__annotations__, result.__annotations__ = {'x': hint}, {'return': hint}
    for f in map(check, (argument, result)):
        if wrong is None:
            assert f(value) is value
        else:
            with pytest.raises(EinshardError) as caught:
                f(value)
            assert wrong in str(caught.value)
            assert 'y*\n' in str(caught.value)  # the spec


def test_types_and_sizes_are_still_checked():
    def f(x: Placed, y: Sharded[Float[Array, 'y z'], 'y* z']):
        return x @ y

    checked = jaxtyped(typechecker=beartype)(f)
    checked(AT_COLUMNS, AT_ROWS)
    for x, y in (
        (einshard(np.ones((16, 16), np.int32), 'a b*'), AT_ROWS),
        (einshard(np.ones((2, 2, 16), np.float32), 'a b c*'), AT_ROWS),
        (AT_COLUMNS, einshard(np.ones((32, 4), np.float32), 'a* b')),  # y: 16 and 32
    ):
        with pytest.raises(TypeCheckError):
            checked(x, y)
    with pytest.raises(BeartypeCallHintViolation):
        beartype(f)('text', AT_ROWS)


@checkers
@pytest.mark.parametrize('order', ['checker outside', 'checker inside'])
def test_both_orders_of_decorators(check, order):
    def f(x: Placed, y: Any = 1.0) -> Sharded[Float[Array, 'x y'], 'x* y']:
        return x * y

    g = check(sharded(f)) if order == 'checker outside' else sharded(check(f))
    for result in (g(AT_COLUMNS, 3.0), g(AT_COLUMNS, 3.0), g(x=AT_COLUMNS, y=3.0)):
        np.testing.assert_array_equal(result, 3 * SIXTEEN)
        assert result.sharding == make_sharding('a* b')
    with pytest.raises(EinshardError, match="'x y -> x16 y'"):
        g(AT_ROWS, 3.0)


@checkers
def test_traced_values(check):
    @check
    def inner(x: Placed):
        return x + 1

    # the type of a value on Auto axes does not say where it is
    np.testing.assert_array_equal(jax.jit(lambda x: inner(einshard(x, 'a* b')))(SIXTEEN), 2)
    np.testing.assert_array_equal(jax.grad(lambda x: inner(x).sum())(AT_ROWS), SIXTEEN)
    with jax.set_mesh(device_mesh(EIGHT, axis_types=AxisType.Explicit)):
        right = jax.jit(lambda x: inner(einshard(x, 'a b*')))
        np.testing.assert_array_equal(right(X), X + 1)
        wrong = jax.jit(lambda x: inner(einshard(x, 'a* b')))
        with pytest.raises(EinshardError, match="sharded as 'x y -> x8 y'"):
            wrong(X)


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


def test_pyright_sees_array_types_and_refuses_wrong_calls(tmp_path):
    command = shutil.which('pyright', path=f'{sys.prefix}/bin') or shutil.which('pyright')
    if command is None:
        pytest.skip('pyright is not installed: it belongs to the extra dev')
    (tmp_path / 'right.py').write_text(RIGHT_CODE)
    (tmp_path / 'wrong.py').write_text(WRONG_CODE)
    package = importlib.util.find_spec('einshard').submodule_search_locations[0]
    settings = {'extraPaths': [os.path.dirname(package)], 'typeCheckingMode': 'standard'}
    (tmp_path / 'pyrightconfig.json').write_text(json.dumps(settings))
    result = subprocess.run(
        [command, '--outputjson', '--pythonpath', sys.executable, '-p', str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    output = json.loads(result.stdout)
    assert output['summary']['filesAnalyzed'] == 2
    found = {
        (os.path.basename(diagnostic['file']), diagnostic['range']['start']['line'])
        for diagnostic in output['generalDiagnostics']
    }
    lines = enumerate(WRONG_CODE.splitlines())
    assert found == {('wrong.py', i) for i, line in lines if '# wrong' in line}
