"""show: the blocks that a picture is drawn from, its text, color and SVG."""

import itertools
import sys
import textwrap
from unicodedata import east_asian_width
from unittest.mock import patch
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of, struct
from refusal import refusal

from einshard import einshard, explain, make_sharding, sharded, show

MESH = mesh_of(data=4, tp=2)
EIGHT = jax.devices()[:8]


def blocks_of(grid, axes):
    """Block -> devices, from a device grid [(axis or '', count), ...]."""
    blocks = {}
    counts = [count for _, count in grid]
    for device, place in enumerate(itertools.product(*map(range, counts))):
        part = dict.fromkeys(axes, 0)
        for (axis, count), index in zip(grid, place, strict=True):
            if axis:
                part[axis] = part[axis] * count + index
        blocks.setdefault(tuple(part.values()), []).append(device)
    return blocks


def drawn_blocks(picture):
    blocks = picture.blocks
    return {place: blocks.holders(i) for i, place in enumerate(np.ndindex(*blocks.parts))}


def text_blocks(picture):
    """Block -> devices, read from the boxes of the text."""
    rows = [line for line in str(picture).splitlines() if '│' in line]
    rows = [[cell.strip() for cell in row.split('│')[1:-1]] for row in rows]
    rows = [row for row in rows if any(row)]
    return {(i, j): cell for i, row in enumerate(rows) for j, cell in enumerate(row)}


@st.composite
def grids(draw):
    axes = 'abcd'[: draw(st.integers(0, 4))]
    owners = st.sampled_from(['', *axes])
    terms = draw(st.lists(st.tuples(owners, st.sampled_from([2, 3, 4])), min_size=1, max_size=4))
    missing = [(axis, None) for axis in axes if axis not in dict(terms)]
    sizes = [draw(st.sampled_from([2**8 * 3**4, 100 * 2**8 * 3**4])) for _ in axes]
    return axes, draw(st.permutations([*terms, *missing])), draw(st.sampled_from([None, sizes]))


@settings(max_examples=150, deadline=None)
@given(grids())
def test_any_grid(case):
    axes, terms, shape = case
    right = ' '.join(f'{axis}{count or ""}' for axis, count in terms)
    picture = show(f'{" ".join(axes)} -> {right}', shape)
    want = blocks_of([(axis, count or 1) for axis, count in terms], axes)
    assert drawn_blocks(picture) == want
    assert all(len(line) <= 100 for line in str(picture).splitlines())
    assert boxes_of(picture.svg) == sorted(map(tuple, want.values()))
    # neither a table nor without some of its rows
    if len(axes) == 2 and '│' in str(picture) and picture.blocks.parts[0] <= 64:
        texts = text_blocks(picture)
        assert texts.keys() == want.keys()
        for block, text in texts.items():
            assert '..' in text or '-' in text or text == ','.join(map(str, want[block]))


NAMED = mesh_of(x=2, y=2, z=2)
REVERSED = mesh_of(EIGHT[::-1], data=4, tp=2)


@pytest.mark.parametrize(
    ('expression', 'shape', 'mesh'),
    [
        ('a b -> 2 a2 b2', (8, 4), EIGHT),
        ('i o -> i2 o2 i2', (8, 4), EIGHT),
        ('... -> * ...', (), EIGHT),
        ('a ... -> a* ...', (8, 3, 2), EIGHT),
        ('a b -> a8 b', (0, 4), EIGHT),
        ('a b -> a@z b@(y,x)', (8, 8), NAMED),
        ('a b -> a@y b*', (8, 8), NAMED),
        ('a b -> * a b', (8, 8), NAMED),
    ],
)
def test_arrays_are_drawn_as_jax_places_them(expression, shape, mesh):
    x = einshard(np.zeros(shape, np.float32), expression, mesh=mesh)
    annotated = jax.ShapeDtypeStruct(shape, np.float32, sharding=x.sharding)
    abstract = mesh if mesh is EIGHT else mesh.abstract_mesh
    for picture in (
        show(x),
        show(annotated),
        show(x.sharding, shape),
        show(expression, shape, mesh),
        show(expression, shape, abstract),
    ):
        assert_same_as_jax(picture, x)


def test_compiler_chosen_shardings(devices8):
    x = einshard(np.zeros((8, 8), np.float32), 'a b -> a* b', mesh=devices8)
    y = jax.jit(lambda x: x.reshape(4, 2, 8).T)(x)
    assert_same_as_jax(show(y), y)


def assert_same_as_jax(picture, x):
    """The sharding's own index map, with ids, which are positions on these devices."""
    want = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        bounds = [cut.indices(size)[:2] for cut, size in zip(index, x.shape, strict=True)]
        want.setdefault(tuple(bounds), set()).add(device.id)
    drawn = {}
    for index, held in drawn_blocks(picture).items():
        parts = picture.blocks.parts
        steps = [size // count for size, count in zip(x.shape, parts, strict=True)]
        bounds = [(i * step, (i + 1) * step) for i, step in zip(index, steps, strict=True)]
        drawn.setdefault(tuple(bounds), set()).update(held)
    assert drawn == want


# -- pictures and their text
PICTURES = [
    (
        ('a b -> * a* b2*', (4, 8), 16),
        """
                b 0:2   b 2:4   b 4:6   b 6:8
              ┌───────┬───────┬───────┬───────┐
              │       │       │       │       │
        a 0:2 │  0,8  │  1,9  │ 2,10  │ 3,11  │
              │       │       │       │       │
              ├───────┼───────┼───────┼───────┤
              │       │       │       │       │
        a 2:4 │ 4,12  │ 5,13  │ 6,14  │ 7,15  │
              │       │       │       │       │
              └───────┴───────┴───────┴───────┘
        a is split into 2 parts, b into 4; each shard is replicated on 2 devices;
        a device holds [2,2], 1/8 of the array
        devices, slowest-varying first: 2 replicas x 2 parts of a x 4 parts of b
        """,
    ),
    (
        ('a b c -> a2 b c2 b2', (4, 4, 4), None),
        """
              a 0:2                    a 2:4
                c 0:2   c 2:4            c 0:2   c 2:4
              ┌───────┬───────┐        ┌───────┬───────┐
        b 0:2 │   0   │   2   │  b 0:2 │   4   │   6   │
              ├───────┼───────┤        ├───────┼───────┤
        b 2:4 │   1   │   3   │  b 2:4 │   5   │   7   │
              └───────┴───────┘        └───────┴───────┘
        a is split into 2 parts, b into 2, c into 2; each shard is on one device;
        a device holds [2,2,2], 1/8 of the array
        devices, slowest-varying first: 2 parts of a x 2 parts of c x 2 parts of b
        """,
    ),
    (
        ('... -> * ...', (), 8),
        """
        ┌─────┐
        │ 0-7 │
        └─────┘
        nothing is sharded: each of the 8 devices holds a replica of the scalar
        """,
    ),
    (
        ('b d -> b@data d@tp', (32, 64), mesh_of(data=2, pp=3, tp=2)),
        """
                     d 0:32          d 32:64
                ┌───────────────┬───────────────┐
                │               │               │
         b 0:16 │     0,2,4     │     1,3,5     │
                │               │               │
                ├───────────────┼───────────────┤
                │               │               │
        b 16:32 │    6,8,10     │    7,9,11     │
                │               │               │
                └───────────────┴───────────────┘
        b is split into 2 parts over data, d into 2 over tp; each shard is replicated on 3 devices;
        a device holds [16,32], 1/4 of the array
        mesh axes, slowest-varying first: data (2 parts of b), pp (3 replicas), tp (2 parts of d)
        """,
    ),
    (
        ('a b -> +2 a2 b 2', (4, 4), 8),
        """
                            b 0:4
              ┌───────────────────────────────┐
              │                               │
        a 0:2 │            0,1+4,5            │
              │                               │
              ├───────────────────────────────┤
              │                               │
        a 2:4 │            2,3+6,7            │
              │                               │
              └───────────────────────────────┘
        a is split into 2 parts; each shard is a sum of 2 terms, each replicated on 2 devices;
        a device holds [2,4], 1/2 of the array
        devices, slowest-varying first: 2 terms of a sum x 2 parts of a x 2 replicas
        """,
    ),
    (
        ('a b -> a b +*', (4, 4), 8),
        """
                            b 0:4
              ┌───────────────────────────────┐
              │                               │
              │                               │
              │                               │
        a 0:4 │           0+1+..+7            │
              │                               │
              │                               │
              │                               │
              └───────────────────────────────┘
        nothing is sharded: the full array, [4,4], is a sum of 8 terms on 8 devices
        devices, slowest-varying first: 8 terms of a sum
        """,
    ),
]


@pytest.mark.parametrize(('arguments', 'text'), PICTURES, ids=lambda value: str(value)[:20])
def test_picture(arguments, text):
    assert str(show(*arguments)) == textwrap.dedent(text).strip('\n')


@pytest.mark.parametrize(
    ('make', 'parts'),
    [
        (
            lambda: show(einshard(np.zeros((8, 4), np.uint8), 'a4 2 b', mesh=EIGHT[::-1])),
            [
                'a is split into 4 parts; each shard is replicated on 2 devices;\n'
                'a device holds uint8[2,4], 1/4 of the array\n',
                'devices, slowest-varying first: 4 parts of a x 2 replicas\n',
                "in the notation: 'a b -> a4 b 2'",
            ],
        ),
        (
            lambda: show(einshard(np.zeros((8, 8)), 'a@data b', mesh=REVERSED)),
            [
                'mesh axes, slowest-varying first: data (4 parts of a), tp (2 replicas)\n',
                "in the notation: 'a b -> a@data b'\n",
                'devices are numbered in mesh order; their ids: 7,6,5,4,3,2,1,0',
            ],
        ),
        (
            lambda: show(jax.device_put(jnp.zeros(3), jax.devices()[5])),
            [' 5  ', 'the one device holds the full array, float32[3]\n', 'on one device: '],
        ),
        # a sharding has no sizes
        (lambda: show(einshard(np.zeros((8, 4)), 'a4 2 b', mesh=EIGHT).sharding), ['a part 3']),
        (lambda: show(einshard(np.zeros((8, 4)), 'a4 2 b', mesh=EIGHT).sharding, (8, 4)), ['6:8']),
    ],
)
def test_texts(make, parts):
    text = str(make())
    assert all(part in text for part in parts), text


def test_parts():
    # '...' stands for no axis without a shape
    assert show('a ... d -> 4 a2 ... d2').blocks.parts == (2, 2)
    assert show('a ... d -> 4 a2 ... d2', (2, 5, 6, 4)).blocks.parts == (2, 1, 1, 2)
    with jax.set_mesh(MESH):
        assert show('a b -> a* b@tp').blocks.parts == (4, 2)
        assert show('a b -> a16 b', None, 16).blocks.parts == (16, 1)
    # a traced value on explicit axes
    seen = []
    with jax.set_mesh(mesh_of(types=AxisType.Explicit, data=4, tp=2)):
        x = jax.device_put(jnp.zeros((8, 8)), P('data'))
        jax.jit(lambda x: seen.append(show(x)) or x)(x)
    assert drawn_blocks(seen[0]) == {(i, 0): [2 * i, 2 * i + 1] for i in range(4)}


def test_no_mesh_is_suggested_for_many_mesh_axes():
    names = 'abcdefghijkl'
    assert refusal(show, ' '.join(f'{name}@{name}' for name in names[:6])).fix is not None
    # private: to see that it is not called
    with patch('einshard._draw.draw.factorizations') as factorizations:
        assert refusal(show, ' '.join(f'{name}@{name}' for name in names)).fix is None
    factorizations.assert_not_called()  # there are 1.35 million


# -- large pictures


@pytest.mark.parametrize(
    ('expression', 'shape', 'n', 'first', 'last'),
    [
        ('b d -> b* d*', (1024, 4096), 256, '0', '255'),
        ('b d -> b* d', (1024, 4096), 256, '0', '255'),
        ('b d -> 2 b* d*', None, 512, '0,256', '255,511'),
        ('b d -> 3 b4* d2*', (64, 64), 384, '0,128,..', '127,255,..'),
        ('b d -> b4 d*', (64, 4096), 1024, '0', '1023'),
        ('x -> x*', (2400,), 24, '0', '23'),
        ('x -> x*', None, 1000, '0', '999'),
        ('a b c -> a* b* c*', (16,) * 3, 64, '0', '63'),
        ('a b c d -> a* b* c* d*', (16,) * 4, 256, '0', '255'),
        ('a b c d e f g -> a* b2 c2 d2 e2 f2 g2', (4096,) * 7, 128, '0', '127'),
        ('a b -> a* b*', (9600, 9600), 9216, '0', '9215'),
        ('one_long_name another_long_name -> one_long_name8 another_long_name8',
         None, 64, '0', '63'),
    ],
)  # fmt: skip
def test_hundreds_of_devices_stay_readable(expression, shape, n, first, last):
    lines = str(show(expression, shape, n)).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 140
    cells = {cell for line in lines for cell in line.replace('│', ' ').split()}
    assert {first, last} <= cells


def test_a_table_names_ranges_and_devices():
    lines = str(show('a b c d -> a* b* 2 c* d*', (16,) * 4, 512)).splitlines()
    assert lines[0].split() == ['a', 'b', 'c', 'd', 'devices']
    assert lines[2].split() == ['0:4', '0:4', '0:4', '0:4', '0,16']
    assert lines[9].split() == ['0:4', '0:4', '4:8', '12:16', '7,23']
    assert lines[26].split() == ['..', '..', '..', '..', '224', 'more']
    assert lines[34].split() == ['12:16', '12:16', '12:16', '12:16', '495,511']


@pytest.mark.parametrize(
    ('expression', 'n', 'label'),
    [
        ('a -> 2 a8', 16, '0,8'),
        ('a -> a2 8', 16, '0-7'),
        ('a -> 8 a4', 32, '0,4,..,28'),
        ('a -> 8 a8', 64, '0,8,..,56'),
        ('a -> 8 a10', 80, '0,10,..'),
        ('a -> 16 a2 2', 64, '0-1,4-5,..,60-61'),
        ('a -> 2 a2 8', 32, '0-7,16-23'),
    ],
)
def test_long_lists_of_devices_are_shortened(expression, n, label):
    boxes = str(show(expression, (320,), n)).splitlines()[2]
    assert boxes.split('│')[1].strip() == label


# -- color and SVG


def console_of(width, **options):
    console = pytest.importorskip('rich.console')
    return console.Console(width=width, force_terminal=True, **options)


def printed(picture, width):
    console = console_of(width, color_system=None)
    with console.capture() as capture:
        console.print(picture)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_rich_has_one_color_for_each_block():
    console = console_of(100, color_system='truecolor', no_color=False)
    picture = show('a b -> 2 a2* b*', (4, 8), 16)
    segments = [s for line in console.render_lines(picture) for s in line if s.text.strip()]
    colors = {s.text.strip(): s.style.bgcolor.name for s in segments if s.style and s.style.bgcolor}
    assert colors.keys() == {f'{i},{i + 8}' for i in range(8)}
    assert len(set(colors.values())) == 8


def test_rich_keeps_to_the_width_of_the_terminal():
    lines = printed(show('b d -> b* d*', (1024, 4096), 256), width=60)
    assert max(map(len, lines)) <= 60
    assert 'devices' in lines[0]
    # boxes grow within it
    lines = printed(show('2 y8 z', (8, 800)), width=24)
    assert lines[1:3] == ['      ┌────────────────┐', 'y 0:1 │      0,8       │']
    assert lines[18:20] == ['y is split into 8 parts;', 'each shard is replicated']


@pytest.mark.parametrize(
    ('environment', 'with_rich', 'color'),
    [
        ({}, True, False),
        ({'FORCE_COLOR': '1'}, True, True),
        ({'FORCE_COLOR': '1', 'NO_COLOR': '1'}, True, False),
        ({'FORCE_COLOR': '1'}, False, False),
    ],
)
def test_repr_is_in_color_on_a_terminal(monkeypatch, environment, with_rich, color):
    for name in ('NO_COLOR', 'FORCE_COLOR'):
        monkeypatch.delenv(name, raising=False)
    for name, value in {'TERM': 'xterm-256color', **environment}.items():
        monkeypatch.setenv(name, value)
    if with_rich:
        pytest.importorskip('rich')
    else:
        monkeypatch.setitem(sys.modules, 'rich.console', None)
    picture = show('a b -> a2 b2')
    assert ('\x1b[' in repr(picture)) == color
    assert (repr(picture) == str(picture)) == (not color)


SVG = '{http://www.w3.org/2000/svg}'


def boxes_of(svg):
    """The devices of every block, sorted, from the tooltips."""
    titles = ElementTree.fromstring(svg).iter(f'{SVG}title')
    numbers = (title.text.removeprefix('device ').split(', ') for title in titles)
    return sorted(tuple(map(int, words)) for words in numbers)


def drawn_boxes(svg):
    """(x, y, width, height, fill) of each box."""
    found = []
    for group in ElementTree.fromstring(svg).findall(f'{SVG}g'):
        x, y = map(float, group.get('transform')[len('translate(') : -1].split())
        for rect in group.iter(f'{SVG}rect'):
            at = (x + float(rect.get('x')), y + float(rect.get('y')))
            size = float(rect.get('width')), float(rect.get('height'))
            found.append((*at, *size, rect.get('fill')))
    return found


def device_labels(svg):
    """(text, font size) of each list of devices in a box."""
    groups = ElementTree.fromstring(svg).findall(f'{SVG}g/{SVG}g')
    return [(text.text, float(group.get('font-size'))) for group in groups for text in group]


def luminance(color):
    """The relative luminance of WCAG 2."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return np.dot(linear, [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize('n', [2, 16, 64])
def test_fills_differ_in_gray_print_and_have_readable_text(n):
    levels = [luminance(fill) for *_, fill in drawn_boxes(show('x -> x*', (n,), n).svg)]
    assert sorted(levels, reverse=True) == levels
    assert len(set(levels)) == n
    assert (levels[-1] + 0.05) / 0.05 >= 4.5  # of black text on the darkest fill
    steps = -np.diff(np.cbrt(levels)) * 116  # of CIE lightness; 1 is just visible
    assert n == 64 or min(steps) > 2


@pytest.mark.parametrize(
    ('expression', 'labels', 'note'),
    [
        ('a b -> a4 b2 1', [str(i) for i in range(8)], None),
        ('a b -> 2 a2 b2', ['0,4', '1,5', '2,6', '3,7'], 'hatched: 2 replicas'),
        ('a b -> a2 b 4', ['0,1,2,3', '4,5,6,7'], 'hatched: 4 replicas'),
        ('a b -> 8 a b', ['0-7'], 'hatched: 8 replicas'),
        ('a b -> a4 b +2', ['0+1', '2+3', '4+5', '6+7'], 'a sum of 2 terms'),
        ('a b -> +2 a2 b 2', ['0,1+4,5', '2,3+6,7'], 'a sum of 2 terms, hatched: 2 replicas'),
    ],
)
def test_replicated_blocks_have_one_fill_and_are_hatched(expression, labels, note):
    svg = show(expression, (8, 8), 8).svg
    assert [text for text, _ in device_labels(svg)] == labels
    fills = [fill for *_, fill in drawn_boxes(svg)]
    assert len(fills) == len(set(fills)) == len(labels)
    notes = [text.text for text in ElementTree.fromstring(svg).findall(f'{SVG}text')]
    assert notes == ([note] if note else [])
    assert ('<path' in svg) == ('hatched' in (note or ''))


@pytest.mark.parametrize(
    ('shape', 'expressions'),
    [
        ((16, 16), ['a4 b4', 'a16 b', 'a b16', '* a b', '* a2 b2', 'a b -> b4 a4', 'a2 2 b4']),
        ((16, 4096), ['a4 b4', 'a16 b', '* a b', '16 a b']),
        ((4096, 16), ['a4 b4', 'a b16', '* a b']),
        ((1600,), ['a16', '* a', '2 a8']),
        ((16, 8, 8), ['a4 b4 c', 'a16 b c', '* a b c', 'a2 b2 c4', 'a8 b2 c']),
        ((), ['... -> * ...', '... -> 2 * ...']),
        (None, ['a4 b4', 'a16 b', '* a b']),
    ],
)
def test_an_array_has_one_size_in_all_pictures(shape, expressions):
    sizes = set()
    for expression in expressions:
        picture = show(expression, shape, 16)
        boxes = drawn_boxes(picture.svg)
        width = max(x + w for x, _, w, _, _ in boxes) - min(x for x, *_ in boxes)
        heights = {y: h for _, y, _, h, _ in boxes}  # without the titles of slices
        sizes.add((round(width), round(sum(heights.values()))))
        # on a page of 390 pixels with margins of 16
        full_width = float(ElementTree.fromstring(picture.svg).get('width'))
        labels, scale = device_labels(picture.svg), min(1, 358 / full_width)
        assert len(labels) == len(boxes)
        assert all(size * scale >= 9 for _, size in labels) or shape is None
    assert len(sizes) == 1
    (only,) = sizes
    if shape == (16, 16):
        assert only[0] == only[1]


def test_an_array_has_one_size_in_text():
    pictures = [show(e, (8, 8), 8) for e in ('a4 b2', 'a2 b4', '* a b', '2 a b4', '2 a4 b')]
    boxes = [[line for line in str(p).splitlines() if line[-1] in '┐│┤┘'] for p in pictures]
    assert {(len(lines), *map(len, lines)) for lines in boxes} == {(9, *[39] * 9)}


@pytest.mark.parametrize(
    ('expression', 'shape', 'n'),
    [
        ('a b -> a* b*', (256, 256), 256),
        ('a b -> a* b', (4096, 64), 256),
        ('a b -> a b*', (64, 4096), 256),
        ('a b -> 16 a* b*', (64, 64), 1024),
        ('a b c d -> a* b* c* d*', (16,) * 4, 256),
        ('x -> x*', (9216,), 9216),
        ('... -> * ...', (), 8),
        ('語 b -> 語2 b2', (2, 2), 4),
    ],
)
def test_svg_boxes_fit_the_page_and_do_not_overlap(expression, shape, n):
    svg = show(expression, shape, n).svg
    root = ElementTree.fromstring(svg)
    width, height = (float(root.get(name)) for name in ('width', 'height'))
    assert width <= 600
    assert height <= 1100
    boxes = drawn_boxes(svg)
    for x, y, w, h, _ in boxes:
        assert 0 <= x <= x + w <= width + 0.01
        assert 0 <= y <= y + h <= height + 0.01
    pairs = itertools.pairwise(sorted(boxes, key=lambda box: (box[1], box[0])))
    assert all(a[0] + a[2] <= b[0] + 0.2 for a, b in pairs if a[1] == b[1])


@pytest.mark.parametrize(
    ('limit', 'more'), [(8, ['and 2 more slices']), (12, ['and 1 more slice']), (16, [])]
)
def test_slices_that_are_not_drawn_are_counted(limit, more, monkeypatch):
    # private: a picture with more boxes than the real limit takes seconds
    monkeypatch.setattr('einshard._draw.svg._MAX_BOXES', limit)
    svg = show('a b c d -> 2 a2 b2 c2 d2').svg
    assert len(drawn_boxes(svg)) == limit
    notes = [text.text for text in ElementTree.fromstring(svg).findall(f'{SVG}text')]
    assert notes == [*more, 'hatched: 2 replicas']


@pytest.mark.parametrize(
    ('expression', 'n', 'most'),
    [
        ('a b -> a b16', 16, 16),
        ('a b -> a4 b4', 16, 16),
        ('a b -> a* b*', 256, 256),
        ('a b -> a* b', 256, 20),
        ('a b -> a* b*', 1024, 120),
        ('a b -> 4 a* b*', 1024, 60),
    ],
)
def test_device_labels_fit_their_boxes_or_are_left_out(expression, n, most):
    svg = show(expression, (n, n), n).svg
    labels, boxes = device_labels(svg), drawn_boxes(svg)
    (size,) = {size for _, size in labels}
    assert size >= 9
    assert most / 2 < len(labels) <= most
    if len(labels) == len(boxes):
        assert max(len(text) for text, _ in labels) * 0.6 * size <= boxes[0][2]


def test_notebooks_show_svg_and_text():
    picture = show('a b -> 2 a2* b*', (4, 8), 16)
    page = picture._repr_html_()
    assert picture.svg in page
    assert 'a is split into 4 parts, b into 2' in page
    for outside in ('<script', '<link', 'href', 'src='):
        assert outside not in page


def test_saved_files_support_light_and_dark(tmp_path):
    show('a b -> a2 b2').save(tmp_path / 'picture.svg')
    text = (tmp_path / 'picture.svg').read_text()
    assert 'color-scheme: light dark; color: CanvasText; background: Canvas' in text
    assert boxes_of(text) == [(0,), (1,), (2,), (3,)]


def test_names_cannot_break_out_of_a_page():
    # only the names of a user's mesh axes can need to be escaped
    page = show(NamedSharding(mesh_of(**{'<b>': 2}), P('<b>')), (4,))._repr_html_()
    assert '<b>' not in page
    assert '&lt;b&gt;' in page


# -- trees


def test_a_tree_is_drawn_once_for_each_placement(devices8):
    layer = {'w': np.zeros((8, 4), np.float32), 'b': np.zeros(4, np.float32), 'f': abs}
    spec = {'w': 'x y -> x* y', 'b': 'y -> * y', 'f': None}
    gallery = show(einshard([layer] * 5, [spec] * 5, mesh=devices8))
    captions = [caption for caption, _ in gallery.pictures]
    assert captions == [
        '0/b, 1/b, 2/b and 2 more: float32[4]',
        '0/w, 1/w, 2/w and 2 more: float32[8,4]',
    ]
    shardings = {'w': make_sharding('x y -> x* y', mesh=devices8)}
    [(_, picture)] = show(shardings, (8, 4)).pictures
    assert str(picture) == str(show(shardings['w'], (8, 4)))
    text = str(gallery)
    for caption, picture in gallery.pictures:
        assert f'{caption}\n{picture}' in text
        assert picture.svg in gallery._repr_html_()


def test_large_trees_are_shortened(devices8):
    tree = {f'{n:02}': jax.device_put(np.zeros(n + 1), devices8[0]) for n in range(20)}
    gallery = show(tree)
    assert len(gallery.pictures) == 12
    assert str(gallery).endswith('and 8 more placements')
    assert 'and 8 more placements' in gallery._repr_html_()


def test_a_report_is_drawn():
    @sharded('b x -> b2 x 4', 'x y -> 2 x y4', out='b y -> b2 y4', mesh=EIGHT)
    def layer(x, w):
        return x @ w

    gallery = show(explain(layer, struct(8, 4), struct(4, 16)))
    assert [caption for caption, _ in gallery.pictures] == [
        'x: float32[8,4], b x -> b2 x 4',
        'w: float32[4,16], x y -> 2 x y4',
        'result: float32[8,16], b y -> b2 y4',
    ]
    assert drawn_blocks(gallery.pictures[1][1]) == drawn_blocks(show('x y -> 2 x y4', (4, 16), 8))


def test_a_report_on_a_mesh_with_names_is_drawn():
    x = einshard(np.ones((8, 4), np.float32), 'b x -> b@data x@tp', mesh=MESH)
    gallery = show(explain(lambda x: x + 1, x))
    assert [caption for caption, _ in gallery.pictures] == [
        'x, result: float32[8,4], a b -> a@data b@tp'
    ]
    assert 'over data' in str(gallery)


# -- bad input


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        (('a*', (-8,)), 'shape= must be a sequence of sizes, not (-8,)'),
        (('a*', ('8',)), "shape= must be a sequence of sizes, not ('8',)"),
        *[
            (('a*', (8,), bad), f'devices={bad!r} is neither a number of devices nor a mesh')
            for bad in (True, 0, 2.5, {'a': 2})
        ],
        (('a*', (8,), []), 'a mesh needs at least one device'),
        (('a@tq', (8,), MESH), "the mesh has no axis 'tq'"),
        ((struct(3),), 'nothing to draw: the array has no known'),
        ((NamedSharding(MESH, P('data')), (6,)), 'axis 0 (size 6) is not divisible by 4'),
        ((NamedSharding(MESH, P('data')), ()), 'the sharding needs at least 1 dimension'),
        ((NamedSharding(MESH, P(P.UNCONSTRAINED)),), 'the sharding has unconstrained axes'),
        (('a9999999',), 'a picture of 9999999 devices would be too large'),
        (('a2 ...', (2,) * 64), 'a picture of 64 dimensions would be too large'),
        ((jnp.ones((1,) * 65),), 'a picture of 65 dimensions would be too large'),
        (
            ('a@x', None, AbstractMesh((2**30,), ('x',))),
            'a picture of 1073741824 devices would be too large',
        ),
    ],
)
def test_bad_input(arguments, sentence):
    assert refusal(show, *arguments).sentence.startswith(sentence)


@pytest.mark.parametrize(
    ('arguments', 'mesh'),
    [
        (('b d -> b@data d@tensor', (32, 512), 8), {'data': 4, 'tensor': 2}),
        (('b d -> b@data d@tensor', (2, 512), 8), {'data': 2, 'tensor': 4}),
        (('b d -> b@x d@(y,z)', (3, 16), 16), {'x': 1, 'y': 4, 'z': 4}),
        (('b@data d',), {'data': 2}),
        (('b d -> b@x d@y', (3, 3), 8), None),  # no sizes are divisible
        (('b d -> b@data d2', (32, 512), 8), None),
        (('b d +@data', (32, 512), 8), None),  # needs an explicit mesh
        (('b@data d', None, 8192), None),
    ],
)
def test_a_mesh_is_suggested_if_it_works(arguments, mesh):
    error = refusal(show, *arguments)
    assert 'but there is no mesh' in error.sentence
    if mesh is None:
        assert error.fix is None
        return
    expected = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    assert error.fix == f'devices=AbstractMesh({expected.axis_sizes}, {expected.axis_names})'
    assert show(*arguments[:2], devices=expected).blocks.n_holders == 1


def test_a_traced_value_on_auto_axes_cannot_be_drawn():
    error = refusal(jax.jit(show), np.zeros((8, 4)))
    assert error.sentence == 'nothing to draw: the array has no known sharding'


@pytest.mark.parametrize(
    ('expression', 'shape'), [('a b -> a8 b', (6, 8)), ('a8 b', (8,)), ('a3 b', (3, 3))]
)
def test_the_errors_are_those_of_einshard(expression, shape):
    ours = refusal(show, expression, shape, 8)
    theirs = refusal(einshard, np.zeros(shape), expression, mesh=EIGHT)
    assert (ours.sentence, ours.spans, ours.fix) == (theirs.sentence, theirs.spans, theirs.fix)


def test_as_many_dimensions_as_numpy_has():
    names = [f'{a}{b}' for a in 'abcdefg' for b in 'abcdefghi']
    sizes = (8, *(1,) * 62)
    text = str(show(f'{names[0]}4 {" ".join(names[1:])}', sizes))
    assert 'aa is split into 4 parts' in text
    x = einshard(np.ones(sizes, np.float32), 'a8 ...', mesh=EIGHT)
    assert 'a is split into 8 parts' in str(show(x))


def test_control_characters_in_paths_are_replaced(devices8):
    x = einshard(np.ones((8, 4)), 'a8 b', mesh=devices8)
    text = str(show({'\x1b[2Jw\r\n': x}))
    assert text.startswith('\ufffd[2Jw  : float32[8,4]\n')


def test_lines_of_wide_characters_keep_to_the_width():
    lines = str(show(' '.join(f'{name * 15}2' for name in '行列'))).splitlines()
    wide = [sum(east_asian_width(c) in 'WF' for c in line) for line in lines]
    assert any(wide)
    assert max(len(line) + n for line, n in zip(lines, wide, strict=True)) <= 100
