"""Edits as attributes of one lowered module, against the same edits applied to the trace."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einshard import explain

# private: a search scores marked modules
from einshard._program.edits.apply import apply
from einshard._program.edits.call import read_call
from einshard._program.edits.edit import (
    Constrain,
    MoveThrough,
    PlaceArguments,
    PlaceResults,
    RemoveConstraint,
    ReplaceConstraint,
)
from einshard._program.edits.sites import Sites
from einshard._program.edits.tags import tag_in
from einshard._program.jaxpr.graph import flatten
from einshard._program.traced.outline import Place
from einshard._program.traced.read import read_program
from einshard._program.traced.variants import Variants

MESH = jax.make_mesh((4, 2), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2)
UP, X = 2, 3  # in the order of the leaves: down, scale, up, x


def placed(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def layer(x, w):
    h = jax.nn.silu(x @ w['up'])
    return x + placed(h @ w['down'], 'data', None, None), None


def loss(w, x):
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, {'up': w['up'], 'down': w['down']})
    x = jax.vmap(lambda x: x @ w['up'][0].T)(x @ w['up'][0])
    return jnp.mean(placed(x, 'data', 'tensor') ** 2)


def step(w, x):
    value, g = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), value


def given():
    rng = np.random.default_rng(0)

    def array(shape, *spec):
        values = np.asarray(rng.standard_normal(shape) * 0.1, np.float32)
        return jax.device_put(values, NamedSharding(MESH, P(*spec)))

    w = {
        'up': array((3, 32, 64), None, 'data', 'tensor'),
        'down': array((3, 64, 32), None, 'tensor', 'data'),
        'scale': array((32,)),
    }
    return w, array((8, 4, 32), 'data')


def call_of(step, *args):
    jitted = jax.jit(step, donate_argnums=0)
    return read_call(jitted, args, {}, jax.tree.structure(jax.eval_shape(step, *args)))


CALL = call_of(step, *given())


def paths_of(*primitives):
    """The call paths of operations of the forward pass, in order."""
    ops = flatten(CALL.jaxpr, keep_unused=True).ops
    found = [op for op in ops if op.primitive in primitives and not op.site.is_backward]
    return [*dict.fromkeys(op.site.frames for op in found)]


def sharding(*spec):
    return NamedSharding(MESH, P(*spec))


PRODUCTS = paths_of('dot_general')
CONSTRAINTS = paths_of('sharding_constraint')
THROUGH = [
    MoveThrough(('argument', X), sharding(None, 'tensor')),
    MoveThrough(('result', 0), sharding(None, 'data')),
    MoveThrough(('constraint', CONSTRAINTS[0]), sharding(None, 'tensor')),
]
VALUES = [*PRODUCTS, *paths_of('add', 'transpose', 'mul', 'sub')]


def propagated(module):
    """The shardings of all values of a module that no constraint computes."""
    program = read_program(module)
    found = Counter()
    for op in program.operations:
        if op.kind != 'sharding_constraint':
            for value in op.results:
                found[op.kind, value.shape, value.axes, value.replicated] += 1
    return found, [value.axes for value in (*program.arguments, *program.results)]


def collectives(lowered):
    report = explain(lowered.compile())
    return report.collectives.counts, report.network_bytes


def test_open_constraints_change_nothing():
    sites = Sites(CALL, VALUES, MESH, THROUGH)
    assert {*PRODUCTS} <= {*sites.values}
    assert {*sites.constraints} == {*CONSTRAINTS}
    plain = apply(CALL)
    lowered = plain.function.lower(*plain.args)
    # of values and their cotangents, in the forward pass, the backward pass and what it recomputes
    assert str(sites.module).count('sdy.sharding_constraint') > 4 * len(PRODUCTS)
    module = lowered.compiler_ir('stablehlo')
    assert propagated(sites.module) == propagated(module)
    assert collectives(sites.lowered) == collectives(lowered)
    args = given()
    for one, other in zip(
        jax.tree.leaves(sites.edited.function(*args)), jax.tree.leaves(step(*given())), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


EDITS = {
    'product in a loop': [Constrain(PRODUCTS[0], sharding('data', None, None))],
    'axis of a product': [Constrain(PRODUCTS[1], sharding(None, 'data', 'tensor'))],
    'under vmap': [Constrain(PRODUCTS[3], sharding('tensor', None))],
    'replaced': [ReplaceConstraint(CONSTRAINTS[0], sharding(None, ('data', 'tensor'), None))],
    'removed': [RemoveConstraint(CONSTRAINTS[1])],
    'removed in a loop': [RemoveConstraint(CONSTRAINTS[0])],
    'arguments': [
        PlaceArguments({UP: sharding(None, None, 'data')}, {UP: sharding(None, None, 'data')})
    ],
    'results': [PlaceResults({3: sharding(), 0: sharding(None, 'data', 'tensor')})],
    'through an argument': [THROUGH[0]],
    'through a result': [THROUGH[1]],
    'through a constraint': [THROUGH[2]],
    'several': [
        Constrain(PRODUCTS[0], sharding(('data', 'tensor'))),
        PlaceArguments({X: sharding(('data', 'tensor'))}, {}),
        ReplaceConstraint(CONSTRAINTS[0], sharding(('data', 'tensor'))),
    ],
}


def stripped(axes):
    return axes if any(axes) else ()


def changes_of(edits, variants):
    """Edits as other shardings of the places of a module."""
    found = {}

    def entries(sharding, ndim):
        axes = [(e,) if isinstance(e, str) else tuple(e or ()) for e in sharding.spec]
        return (*axes, *((),) * (ndim - len(axes)))

    for place, site in variants.sites.items():
        for edit in edits:
            (key, n_mapped) = site or ((), 0)
            if key and key in edit.key:
                ndim = len(variants.shape(place))
                removed = isinstance(edit, RemoveConstraint)
                axes = None if removed else entries(edit.sharding, ndim - n_mapped)
                found[place] = None if removed else ((),) * n_mapped + axes
    for edit in edits:
        if isinstance(edit, PlaceArguments):
            for i, to in edit.arguments.items():
                found[Place('argument', i)] = entries(to, len(variants.shape(Place('argument', i))))
        if isinstance(edit, PlaceArguments | PlaceResults):
            for i, to in edit.results.items():
                found[Place('result', i)] = entries(to, len(variants.shape(Place('result', i))))
    return found


@pytest.mark.parametrize('name', EDITS)
def test_other_shardings_of_places_are_the_applied_edit(name):
    edits = EDITS[name]
    sites = Sites(CALL, VALUES, MESH, THROUGH)
    module, keys = sites.module, sites.keys
    variants = Variants(module, lambda text: (tag := tag_in(text)) and (keys[tag[0]], tag[1]))
    edited = apply(CALL, edits)
    assert edited.is_complete
    # calls are inlined, as XLA does before it propagates
    expected = Variants(edited.function.lower(*edited.args).compiler_ir('stablehlo'))
    assert axes_of(variants, changes_of(edits, variants)) == axes_of(expected, {})


def axes_of(variants, changes):
    found, outline = variants.propagate(changes), variants.outline
    ends = [stripped(found[value].axes) for value in (*outline.arguments, *outline.ends)]
    products = Counter(
        (step.form.kind, stripped(found[step.results[0]].axes))
        for step in outline.steps
        if step.form.kind in ('dot_general', 'reduce', 'multiply')
    )
    return ends, products


def test_places_of_arguments_are_not_those_of_values():
    """Both have numbers, and those of eight arguments are also positions of operations."""

    def sums(x, *others, constrain=lambda x: x):
        for other in others:
            x = constrain(x + other)
        return x

    def with_types(x, *others):
        return sums(x, *others, constrain=lambda x: placed(x, None, None))

    args = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 8
    lowered = jax.jit(with_types).lower(*args)
    variants = Variants(lowered.compiler_ir('stablehlo'), has_types=True)
    for i in range(8):
        found = variants.propagate({Place('argument', i): (('data',), ('tensor',))})
        edit = PlaceArguments({i: sharding('data', 'tensor')}, {})
        edited = apply(call_of(sums, *args), [edit])
        program = read_program(edited.function.lower(*edited.args).compiler_ir('stablehlo'))
        expected = [op.results[0].axes for op in program.operations if op.kind == 'add']
        adds = [step for step in variants.outline.steps if step.form.kind == 'add']
        assert [found[add.results[0]].axes for add in adds] == expected
        assert any(map(any, expected))
