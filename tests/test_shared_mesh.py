"""The mesh that several expressions share: known meshes, and a brute-force search.

The search tries every order of the axes, with replicas in every position, and compares the
coordinates of each device with those in every expression.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import examples

from einshard import EinshardError

# private: the joint mesh of more devices than JAX can simulate here
from einshard._notation.expression import parse
from einshard._per_device.joint_mesh import joint_mesh
from einshard._per_device.spec_axes import SpecAxes


def shared(n, *texts):
    members = tuple(SpecAxes(f"parameter '{i}'", parse(text)) for i, text in enumerate(texts))
    return joint_mesh(members, n)


def row(n, *texts):
    return ' '.join(f'{name or ""}{count}' for name, count in shared(n, *texts).axes)


@pytest.mark.parametrize(
    ('n', 'texts', 'expected'),
    [
        (8, ['b x -> b4 x2', 'x y -> x2 y', 'b y -> b4 y'], 'b4 x2'),
        (8, ['x y -> x2 y', 'b x -> b4 x2'], 'b4 x2'),
        (8, ['b x -> b4 x2', 'x y -> 4 x2 y'], 'b4 x2'),
        (8, ['x y -> 4 x2 y', 'b y -> b4 y'], 'b4 x2'),
        (8, ['b x -> x2 b4', '... -> * ...', 'y -> y'], 'x2 b4'),
        # stars
        (8, ['b x -> b* x2', 'x y -> x2 y', 'b y -> b* y'], 'b4 x2'),
        (8, ['b x -> b* x', 'x y -> x2 y', 'b x -> b* x2'], 'b4 x2'),
        (8, ['b x -> b4 x*', 'x y -> x* y'], 'b4 x2'),
        (8, ['b* x*', 'x4 y'], 'b2 x4'),
        (16, ['b* x*', 'x* y'], 'b4 x4'),
        (8, ['b4 x*', 'x y -> x* y'], 'b4 x2'),
        (8, ['b x -> b* x2', 'x y -> * x2 y'], 'b4 x2'),
        (8, ['b x -> b* x2', '... -> * ...'], 'b4 x2'),
        (6, ['b x -> 2 b* x', 'b y -> b* y'], '2 b3'),
        (16, ['b x -> * b* x2', 'x2 y'], None),
        (8, ['b x -> * b* x2', 'x2 y'], '2 b2 x2'),
        # replicas that no expression names
        (16, ['b x -> 2 b4 x2', 'x2 y', 'b4 y'], '2 b4 x2'),
        (16, ['b x -> b4 2 x2', 'x y -> 8 x2 y'], 'b4 2 x2'),
        (24, ['b x -> 2 b2 3 x2', 'y -> 4 y3 2'], '2 b2 y3 x2'),
        (24, ['b x -> 2 b2 3 x2', 'y -> 2 y2 6'], None),  # the devices of b
        (24, ['b x -> 2 b2 3 x2', '... -> 24 ...'], '2 b2 3 x2'),
        (8, ['x -> * x', 'y -> y'], '8'),
        # several orders match until one expression decides
        (8, ['b -> b4 2', 'x -> x2'], 'b4 x2'),
        (8, ['b -> b4', 'x -> x2'], None),
        (24, ['a -> a2', 'b -> 2 b3 4', 'c -> c4', 'b c -> b3 c4'], 'a2 b3 c4'),
        # an axis over the devices of another
        (4, ['b x -> b* x', 'x y -> x@b y', 'b y -> b4 y'], 'b4'),
        (8, ['b x -> b4 x2', 'b y -> b4 y@x'], 'b4 x2'),
        (8, ['b x -> b4 x2', 'y -> y@(b,x)'], 'b4 x2'),
        (8, ['b x -> b4 x2', 'z y -> 4 z y@x'], 'b4 x2'),
        (8, ['b x -> b4 x2', 'z y -> z4 y@x'], None),
        # one device, and axes of one part
        (1, ['b x -> b* x', 'x y -> x* y'], 'b1 x1'),
        (1, ['x -> x'], '1'),
        (4, ['b x -> b* x1', 'x1 y'], 'b4 x1'),
    ],
)
def test_known_meshes(n, texts, expected):
    if expected is None:
        with pytest.raises(EinshardError):
            shared(n, *texts)
    else:
        assert row(n, *texts) == expected


@pytest.mark.parametrize(
    ('n', 'texts', 'complete', 'by_name'),
    [
        (8, ['x y -> x2 y', 'b4 x2'], 'x y -> 4 x2 y', 'x y -> x@(x) y'),
        (8, ['b y -> b4 y@x', 'b4 x2'], 'b y -> b4 y2', 'b y -> b@(b) y@(x)'),
        (8, ['y z -> y@(b,x) z', 'b4 x2'], 'y z -> y4 y2 z', 'y z -> y@(b,x) z'),
        (16, ['... y -> ... y2', '2 b4 y2'], '... y -> 2 4 y2 ...', '... y -> y@(y) ...'),
        (8, ['...', 'b* c'], '... -> 8 ...', '... -> * ...'),
        (1, ['b*'], 'b -> 1 b', 'b -> b@(b)'),
    ],
)
def test_expression_for_all_devices(n, texts, complete, by_name):
    mesh, expression = shared(n, *texts), parse(texts[0])
    assert mesh.complete(expression).text == complete
    assert mesh.use_mesh_axes(expression) == parse(by_name)
    assert parse(complete) == mesh.complete(expression)


def test_replicas_have_names_that_no_array_axis_has():
    mesh = shared(16, 'b x -> 2 b4 2 x', 'b4 y')
    assert mesh.mesh_shape == {'replica0': 2, 'b': 4, 'replica1': 2}


# --------------------------------------------------------------------------- the brute-force search


def coordinates(cells):
    """The coordinates of each device along a row of axes and replicas."""
    shape = [count for _, count in cells]
    grid = np.unravel_index(np.arange(math.prod(shape)), shape) if shape else ()
    return {name: grid[i].tolist() for i, (name, _) in enumerate(cells) if name is not None}


def fits(candidate, expression):
    """Whether devices in the order of `candidate` match an expression."""
    names_all_devices, cells = expression
    where = coordinates(candidate)
    if names_all_devices:
        return all(where[name] == places for name, places in coordinates(cells).items())
    named = [name for name, _ in cells]
    return [name for name, _ in candidate if name in named] == named


def candidates(sizes, n):
    """Every order of the axes, with replicas in every position."""
    replicas = n // math.prod(sizes.values())
    divisors = [d for d in range(1, replicas + 1) if replicas % d == 0]
    for names in itertools.permutations(sizes):
        for counts in itertools.product(divisors, repeat=len(names) + 1):
            if math.prod(counts) == replicas:
                gaps = [[(None, count)] if count > 1 else [] for count in counts]
                cells = [
                    [*gap, (name, sizes[name])] for gap, name in zip(gaps, names, strict=False)
                ]
                yield tuple(itertools.chain(*cells, gaps[-1]))


@st.composite
def functions(draw):
    """(n, expressions) for one row of axes; some may have it in another order.

    An expression is (whether it names all devices, [(axis or None for replicas, count), ...]).
    """
    cells = draw(
        st.lists(
            st.tuples(st.sampled_from('abc') | st.none(), st.sampled_from([2, 3, 4])), max_size=4
        )
    )
    names = [name for name, _ in cells if name]
    if len(set(names)) != len(names):
        cells = [(name, count) for name, count in cells if name is None or names.count(name) == 1]
    n = math.prod(count for _, count in cells)
    expressions = []
    for _ in range(draw(st.integers(1, 4))):
        named = draw(st.sets(st.sampled_from('abc')))
        names_all_devices = draw(st.booleans())
        row = [(name if name in named else None, count) for name, count in cells]
        if draw(st.integers(0, 5)) == 0:
            row = draw(st.permutations(row))
        row = [cell for cell in row if names_all_devices or cell[0]]
        names_all_devices = names_all_devices and any(name is None for name, _ in row)
        expressions.append((names_all_devices, merged(row) if names_all_devices else row))
    return n, expressions


def merged(row):
    """Merges adjacent replicas."""
    cells = []
    for name, replicas in itertools.groupby(row, key=lambda cell: cell[0]):
        counts = [count for _, count in replicas]
        cells.append((name, math.prod(counts)))
    return cells


@given(functions())
@examples(150)
def test_the_mesh_is_the_only_candidate_that_fits_all(function):
    n, expressions = function
    sizes = {name: count for _, cells in expressions for name, count in cells if name}
    texts = []
    for _, cells in expressions:
        terms = [f'{name or ""}{count}' for name, count in cells]
        unplaced = [name for name in 'abc' if name not in {name for name, _ in cells}]
        texts.append(f'a b c -> {" ".join([*terms, *unplaced])}')
    found = {c for c in candidates(sizes, n) if all(fits(c, e) for e in expressions)}
    has_all_devices = any(names_all for names_all, _ in expressions)
    has_all_devices |= math.prod(sizes.values()) == n
    if has_all_devices and len(found) == 1:
        (expected,) = found
        assert shared(n, *texts).axes == (expected or ((None, 1),))
        return
    with pytest.raises(EinshardError) as caught:
        shared(n, *texts)
    reason = 'ambiguous device order' if found else 'disagree on the device order'
    assert (reason if has_all_devices else "add '*' to replicate over") in str(caught.value)
