"""The texts of the errors of per_device, whole."""

import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from einshard import EinshardError, Rules, einshard, per_device

EIGHT = jax.devices()[:8]
X, W = np.ones((8, 6), np.float32), np.ones((6, 4), np.float32)
MESH = Mesh(np.array(EIGHT).reshape(4, 2), ('data', 'tp'), axis_types=(AxisType.Auto,) * 2)


def message(function, *args, **kwargs):
    with pytest.raises(EinshardError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def expected(text):
    return textwrap.dedent(text).strip('\n')


def layer(x, w):
    return jax.lax.psum(x @ w, 'x')


def call(*specs, of=layer, args=(X, W), mesh=EIGHT, **options):
    *in_specs, out = specs
    return per_device(*in_specs, out=out, mesh=mesh, **options)(of)(*args)


def layer_with(function):
    """A function called layer, so that messages do not depend on where it is defined."""

    def layer(x, w):
        return function(x, w)

    return layer


def in_context(function):
    with jax.set_mesh(MESH):
        return function()


GOOD = 'b x -> b4 x2', 'x y -> x2 y', 'b y -> b4 y'

# ------------------------------------------------------------------- expressions that do not agree

DISAGREE = [
    (
        lambda: call('b x -> b4 x2', 'x y -> x4 y', 'b y -> b4 y'),
        """
        axis 'x' has 2 parts in one expression and 4 in another
            b x -> b4 x2
                      ^^
          of:            layer
          parameter 'x': 'b x -> b4 x2'
          parameter 'w': 'x y -> x4 y'
          devices:       8
        """,
    ),
    (
        lambda: call('b x -> * b4 x', 'x y -> x2 y', 'b y -> b4 2 y'),
        """
        two expressions disagree on the order of the devices
            b x -> * b4 x
                   ^ ^^
          of:            layer
          parameter 'x': 'b x -> * b4 x'
          the result:    'b y -> b4 2 y'
          devices:       8, as 'b': 4, 'x': 2
        """,
    ),
    (
        lambda: call('b x -> b3* x2', 'x y', 'b y -> b4 y'),
        """
        'b3*' is a multiple of 3, but the axis has 4 parts
            b x -> b3* x2
                   ^^^
          of:      layer
          spec of: parameter 'x'
        """,
    ),
    (
        lambda: call('b x -> b2* x2', 'b y -> b* y', 'b y'),
        """
        axis 'b' is 'b2*' in one expression and 'b*' in another, and no count decides
            b x -> b2* x2
                   ^^^
          of:            layer
          parameter 'x': 'b x -> b2* x2'
          parameter 'w': 'b y -> b* y'
        """,
    ),
    (
        lambda: call('b x -> b4 x2', 'x y -> x2 4 y', 'b y -> b4 y'),
        """
        two expressions disagree on the order of the devices
            b x -> b4 x2
                   ^^ ^^
          of:            layer
          parameter 'x': 'b x -> b4 x2'
          parameter 'w': 'x y -> x2 4 y'
          devices:       8, as 'b': 4, 'x': 2
        """,
    ),
    (
        lambda: call('a b -> a2 b2', 'b c -> b2 c2', 'c a -> c2 a2'),
        """
        the expressions disagree on the order of the devices
            a b -> a2 b2
                   ^^ ^^
          of:            layer
          parameter 'x': 'a b -> a2 b2'
          parameter 'w': 'b c -> b2 c2'
          the result:    'c a -> c2 a2'
          devices:       8, as 'a': 2, 'b': 2, 'c': 2
        """,
    ),
    (
        lambda: call('b x -> b4 x', 'x y -> x y2', '...'),
        """
        nothing says which of 'b4' and 'y2' changes slower over the devices
          of:                layer
          parameter 'x':     'b x -> b4 x'
          parameter 'w':     'x y -> x y2'
          the result:        '...'
          devices:           8
          a replica says it: 'b x -> b4 2 x' or 'b x -> 2 b4 x', for parameter 'x'
        """,
    ),
    (
        lambda: call('b x -> b2 x2', 'x y -> x2 y', 'b y -> b2 y'),
        """
        'b2' and 'x2' use 4 of 8 devices, and nothing says that the others hold replicas
            b x -> b2 x2
                   ^^ ^^
          of:            layer
          parameter 'x': 'b x -> b2 x2'
          parameter 'w': 'x y -> x2 y'
          the result:    'b y -> b2 y'
          devices:       8
          here:          'b x -> * b2 x2'
        """,
    ),
    (
        lambda: call('x y', 'x y', 'x y'),
        """
        nothing is sharded, and nothing says that 8 devices hold replicas
            x y
            ^ ^
          of:            layer
          parameter 'x': 'x y'
          devices:       8
          here:          '* x y'
        """,
    ),
    (
        lambda: call('b x -> b4 x', 'x y -> x4 y', 'b y -> b4 y', mesh=EIGHT[:4]),
        """
        'b4' and 'x4' together ask for 4 x 4 = 16 devices, more than the 4 there are
          of:            layer
          parameter 'x': 'b x -> b4 x'
          parameter 'w': 'x y -> x4 y'
          the result:    'b y -> b4 y'
          devices:       4
          over the same: 'x@b' cuts x over the devices of b
        """,
    ),
    (
        lambda: call('b x -> b3 x', 'x y', 'b y -> b3 y'),
        """
        'b3' asks for 3 devices, which do not divide the 8 there are
          of:            layer
          parameter 'x': 'b x -> b3 x'
          parameter 'w': 'x y'
          the result:    'b y -> b3 y'
          devices:       8
        """,
    ),
    (
        lambda: call('b* x*', 'x* y', 'b* y'),
        """
        8 devices cannot be shared 1 : 1 between 'b*' and 'x*'
            b* x*
            ^^ ^^
          of:            layer
          parameter 'x': 'b* x*'
          parameter 'w': 'x* y'
          the result:    'b* y'
          devices:       8
          works with:    1, 4, 9, 16, ... devices
        """,
    ),
    (
        lambda: call('b x -> b4 2 x2', 'x* y', 'b* y'),
        """
        the counts ask for 4 x 2 x 2 = 16 devices, more than the 8 there are
            b x -> b4 2 x2
                   ^^ ^ ^^
          of:         layer
          spec of:    parameter 'x'
          devices:    8
          works with: 16 devices, or a multiple of 16 with a replica '*'
        """,
    ),
    (
        lambda: call('i o -> i2 o2 i2', 'x y', 'x y'),
        """
        axis 'i' is cut twice, but the mesh axis of its name is one
            i o -> i2 o2 i2
                   ^^    ^^
          of:      layer
          spec of: parameter 'x'
          instead: a mesh of your own, and its axes by name: 'i@(p,q)'
        """,
    ),
    (
        lambda: call('b x -> b@data x', 'x y', 'b y -> b2 y'),
        """
        'b@data' is over the devices of 'data', an axis that no expression cuts
            b x -> b@data x
                   ^^^^^^
          of:      layer
          spec of: parameter 'x'
          cut:     'b'
          or give: a mesh with such an axis, by mesh= or in context
        """,
    ),
    (
        lambda: call('b x -> b4 x2', 'x y -> x2 y@x', 'b y'),
        """
        'x2' and 'y@x' are over the same devices
            x y -> x2 y@x
                   ^^ ^^^
          of:      layer
          spec of: parameter 'w'
        """,
    ),
    (
        lambda: call('b x -> b4 x2', 'x y -> x2 y', 'b y -> y@(x,b) b'),
        """
        axis 'y' is over 'x' and 'b', which is not the device order
            b y -> y@(x,b) b
                   ^^^^^^^
          of:              layer
          spec of:         the result
          in device order: b, x
        """,
    ),
    (
        lambda: call('b x -> b@data x@tp', 'x y -> x2 y', 'b y -> b@data y', mesh=MESH),
        """
        'x2' uses 2 of 8 devices, and nothing says that the others hold replicas
            x y -> x2 y
                   ^^
          of:            layer
          parameter 'w': 'x y -> x2 y'
          devices:       8
          here:          'x y -> * x2 y'
        """,
    ),
]

# ------------------------------------------------------------ functions and arrays that do not fit

CALLED = [
    (
        lambda: call(*GOOD, of=layer_with(lambda x, w: jax.lax.psum(x @ w, 'y'))),
        """
        a collective over 'y', an axis that no expression cuts
          of:        layer
          there are: 'b': 4, 'x': 2
        """,
    ),
    (
        lambda: call(*GOOD, of=layer_with(lambda x, w: jax.lax.psum(x @ w, ('x', 'y')))),
        """
        a collective over 'y', an axis that no expression cuts
          of:        layer
          there are: 'b': 4, 'x': 2
        """,
    ),
    (
        lambda: call(*GOOD, of=layer_with(lambda x, w: jax.lax.all_gather(x @ w, 'y'))),
        """
        a collective over 'y', an axis that no expression cuts
          of:        layer
          there are: 'b': 4, 'x': 2
        """,
    ),
    (
        lambda: call(*GOOD, of=layer_with(lambda x, w: jax.lax.ppermute(x @ w, 'y', [(0, 1)]))),
        """
        a collective over 'y', an axis that no expression cuts
          of:        layer
          there are: 'b': 4, 'x': 2
        """,
    ),
    (
        lambda: call(*GOOD, of=layer_with(lambda x, w: x @ w + jax.lax.axis_index('data'))),
        """
        a collective over 'data', an axis that no expression cuts
          of:        layer
          there are: 'b': 4, 'x': 2
        """,
    ),
    (
        lambda: call(*GOOD, of=layer_with(lambda x, w: jax.lax.psum(x @ w, 'b')), manual='x'),
        """
        a collective over 'b', which manual= leaves to the compiler
          of:        layer
          there are: 'x': 2
        """,
    ),
    (
        lambda: call(*GOOD, of=layer_with(lambda x, w: x @ w)),
        """
        out= says that devices have the same result along 'x', but each may have another
          of:      layer
          instead: their sum, jax.lax.psum(z, 'x'), or the axis in out=
        """,
    ),
    (
        lambda: call(*GOOD[:2], 'b y', of=layer_with(lambda x, w: x @ w)),
        """
        out= says that devices have the same result along 'b' and 'x', but each may have another
          of:      layer
          instead: their sum, jax.lax.psum(z, 'b'), or the axis in out=
        """,
    ),
    (
        lambda: call(
            *GOOD[:2],
            (GOOD[2], {'sum': '...'}),
            of=layer_with(lambda x, w: (layer(x, w), {'sum': x.sum()})),
        ),
        """
        out= says that devices have the same result along 'b' and 'x', but each may have another
          of:      the result '1/sum' of layer
          instead: their sum, jax.lax.psum(z, 'b'), or the axis in out=
        """,
    ),
    (
        lambda: call(*GOOD, mesh=MESH),
        """
        a collective over 'x', which is no axis of the mesh that is in use
          of:          layer
          there are:   'data': 4, 'tp': 2
          because:     a mesh is in context or given, and collectives name its axes
          'x' is over: 'tp'
        """,
    ),
    (
        lambda: call(*GOOD, manual=('x', 'y')),
        """
        manual= names 'y', which is no axis of the mesh
          of:   layer
          mesh: 'b': 4, 'x': 2
        """,
    ),
    (
        lambda: in_context(lambda: call(*GOOD)),
        """
        the mesh given is not the mesh in context
          of:              layer
          mesh given:      'd0': 2, 'd1': 2, 'd2': 2 (Auto)
          mesh in context: 'data': 4, 'tp': 2 (Auto)
        """,
    ),
    (
        lambda: call(*GOOD, args=(X[:6], W)),
        """
        axis 'b' has size 6, which 4 parts do not divide
            b x -> b4 x2
                   ^^
          of:         parameter 'x' of layer
          array:      float32[6,6]
          devices:    8
          works with: 1, 2 parts
        """,
    ),
    (
        lambda: call(*GOOD, args=(X[0], W)),
        """
        the expression names 2 axes, but the array has 1 dimension
            b x -> b4 x2
            ^ ^
          of:    parameter 'x' of layer
          array: float32[6]
        """,
    ),
    (
        lambda: call(*GOOD, args=(X, {'w': W, 'v': W[:3]})),
        """
        axis 'x' has size 3, which 2 parts do not divide
            x y -> x2 y
                   ^^
          of:         parameter 'w' of layer
          array:      float32[3,4], leaf 'v'
          devices:    8
          works with: 1 part
        """,
    ),
    (
        lambda: call(*GOOD, of=layer_with(lambda x, w: jax.lax.psum(x @ w, 'x')[0])),
        """
        the expression names 2 axes, but the array has 1 dimension
            b y -> b4 y
            ^ ^
          array: float32[4] on each device, the result of layer
        """,
    ),
    (
        lambda: call(*GOOD, of=layer_with(lambda x, w: {'y': jax.lax.psum(x @ w, 'x').sum()})),
        """
        the expression names 2 axes, but the array has 0 dimensions
            b y -> b4 y
            ^ ^
          array: float32[] on each device, the result 'y' of layer
        """,
    ),
    (
        lambda: call(*GOOD[:2], {'y': 'b y -> b4 y'}, of=layer_with(lambda x, w: x)),
        """
        the specs are no prefix of the tree: they differ at the top
          of:    the result of layer
          specs: dict with y
          tree:  float32[2,3]
        """,
    ),
    (
        lambda: call(GOOD[0], GOOD[2]),
        """
        an array without a spec: per device, each has one
          of:                   parameter 'w' of layer
          array:                float32[6,4]
          whole on each device: '...'
        """,
    ),
    (
        lambda: call(*GOOD[:2], None),
        """
        an array without a spec: per device, each has one
          of:                   the result of layer
          array:                float32[2,4]
          whole on each device: '...'
        """,
    ),
    (
        lambda: call(GOOD[0], None, GOOD[2]),
        """
        an array without a spec: per device, each has one
          of:                   parameter 'w' of layer
          array:                float32[6,4]
          whole on each device: '...'
        """,
    ),
    (
        lambda: call(*GOOD, args=(einshard(X, 'b x -> b8 x', mesh=EIGHT), W)),
        """
        the argument is partitioned otherwise: it is 'b x -> b8 x'
            b x -> b4 x2
                   ^^ ^^
          array:      float32[8,6], parameter 'x' of layer
          to move it: einshard(x, ...) before the call, or sharded(..., reshard=True)
        """,
    ),
    (
        lambda: call(
            'b x -> b8 x',
            '...',
            'b x -> b8 x',
            of=layer_with(lambda x, w: per_device('...', out='...')(lambda x: x)(x)),
        ),
        """
        a per-device function cannot be called in another, where each device has its own arrays
          of:          <lambda>
          mesh around: 'b': 8 (Manual)
        """,
    ),
]

# ----------------------------------------------------------------------------------- at decoration

DECORATED = [
    (
        lambda: per_device('b x -> b4', out='...')(layer),
        """
        'x' is on the left side only; an axis that is not sharded is named without a count
            b x -> b4
              ^
          function: layer
          spec of:  parameter 'x'
          here:     'b x -> b4 x'
        """,
    ),
    (
        lambda: per_device('b x', {'w': 'x! y'}, out='...')(layer),
        """
        '!' is not part of the notation
            x! y
             ^
          function:  layer
          spec of:   parameter 'w'
          spec at:   'w'
          terms are: a  a2  a*  a2*  a@axis  a@(axis,axis)  2  *  2*  ...
        """,
    ),
    (
        lambda: per_device('b x', out='b y ->')(layer),
        """
        there is no right side: after '->' comes the placement of every axis
            b y ->
                  ^
          function: layer
          spec of:  the result
          here:     'b y -> * b y'
        """,
    ),
    (
        lambda: per_device('b x', 'x y', 'y z', out='...')(layer),
        """
        layer takes 2 positional parameters, but 3 specs are given
          function:   layer
          parameters: x, w
        """,
    ),
    (
        lambda: per_device('b x', out='...', v='...')(layer),
        """
        layer has no parameter 'v', and jax.jit has no such option
          function:   layer
          parameters: x, w
        """,
    ),
    (
        lambda: per_device('b x', out='...', x='...')(layer),
        """
        parameter 'x' of layer has two specs, one by position and one by name
          function:    layer
          by position: b x
          by name:     ...
        """,
    ),
    (
        lambda: per_device(Rules([('a', 'b')], default='...'), out='...')(layer),
        """
        per_device takes no functions of the path and no Rules: it makes a mesh of expressions
          function: layer
          spec of:  parameter 'x'
          it is:    Rules([('a', 'b')])
        """,
    ),
    (
        lambda: per_device(3, out='...')(layer),
        """
        3 is no spec
          function:  layer
          spec of:   parameter 'x'
          specs are: an expression, None, a function (path, leaf) -> spec, a tree of those
        """,
    ),
    (
        lambda: per_device('b x', out='...', manual=3)(layer),
        """
        manual= is 3, and no names of mesh axes
          function: layer
          as in:    manual=('x',)
        """,
    ),
    (
        lambda: per_device('b x', out='...')(3),
        """
        per_device decorates a function, not 3
        """,
    ),
    (
        lambda: per_device(layer, out='...')(list(range(100))),
        """
        per_device decorates a function, not [0, 1, 2, 3, 4, 5, ...]
          given first:    layer, which beside options is taken for a spec
          to decorate it: per_device(...)(layer)
        """,
    ),
    (
        lambda: per_device('b x', out='...')(X, W),
        """
        per_device decorates a function, not 2 arguments
        """,
    ),
    (
        lambda: per_device('b x', out='...')(layer, x=X),
        """
        per_device decorates a function, not 2 arguments
        """,
    ),
    (
        lambda: per_device('b x', out='...')(),
        """
        per_device decorates a function, not 0 arguments
        """,
    ),
    (
        lambda: per_device('b x', out='...', manual=np.array('a'))(layer),
        """
        manual= is array('a', dtype='<U1'), and no names of mesh axes
          function: layer
          as in:    manual=('x',)
        """,
    ),
]


@pytest.mark.parametrize(('function', 'text'), [*DISAGREE, *CALLED, *DECORATED])
def test_message(function, text):
    assert message(function) == expected(text)
