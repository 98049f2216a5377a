"""Any input gives a sharding or an EinshardError."""

import contextlib
import os
import random
import re
import traceback

import jax
import numpy as np
import oracle
import pytest
from hypothesis import given
from jax.sharding import AbstractMesh, AxisType
from placed import mesh_of, struct

from einshard import EinshardError, clear_caches, einshard, make_sharding

# private: 100,000 layouts; with a sharding for each, this would take minutes
from einshard._notation.expression import parse
from einshard._notation.layout import fit, lay_out

pytestmark = oracle.ANY_SPACING

CASES = 20_000 if os.environ.get('CI') else 5_000

GOOD = (
    'a b -> 2 a2* b*', 'a ... d -> 4 a2 ... d2', 'a b -> * a* b2*', 'a b c -> a* b* c*', 'x y*',
    'i o -> i2 o4 i2', 'batch d_model -> batch* d_model', '... -> * ...', '-> *', '* ...', '8',
    'b d -> b@data d@(fsdp,tp)', 'b d -> b* d@tp', 'b@( data , fsdp ) d', 'a b->b2 a4',
    '行 列 -> 行* 列', 'größe β -> β2 größe4', 'हिन्दी x -> हिन्दी* x', 'a b -> 3 a5* b',
    'a b -> a b', 'a* b*',
)  # fmt: skip
PIECES = (
    '->', '...', '..', '.', '*', '**', '@', '@(', '(', ')', ',', ' ', '  ', '\t', '\n', '-', '>',
    '_', 'a', 'b', 'c', 'x', 'data', 'tp', '0', '1', '2', '3', '4', '8', '16', '999999999999', '00',
    'a2', 'a*', '2*', 'a@data', 'b@(data,tp)', '→', '=>', '²', '½', '٣', '①', '行', 'e\u0301',
    '\u0301', '\u200b', '\u200d', '\u202e', '\u00a0', '\u3000', '\x00', '\x1b', '\x85', '\ud800',
    '\U0010ffff', '😀', '%', '{', '}', '{0}', '%s', '\\', "'", '"', '/', '#', ':', '[', ']', '|',
    'ﬁ', 'ﬃ', 'İ', '\u1160', '가',
)  # fmt: skip


def random_text(rng):
    return ''.join(random_piece(rng) for _ in range(rng.randrange(12)))


def random_piece(rng):
    if rng.random() < 0.02:
        return chr(rng.randrange(0x110000))
    return rng.choice(PIECES) + rng.choice(('', ' '))


def edited(rng, text):
    """A valid expression with random edits."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at, to = sorted(rng.randrange(len(text) + 1) for _ in 'ab')
        match rng.randrange(6):
            case 0:
                text = text[:at] + rng.choice(PIECES) + text[at:]
            case 1:
                text = text[:at] + text[at + 1 :]
            case 2:
                text = text[:at] + rng.choice(PIECES) + text[at + 1 :]
            case 3:
                text = text[:to] + text[at:to] + text[to:]
            case 4:
                text = text[:at] + text[to:]
            case 5:
                words = text.split(' ')
                rng.shuffle(words)
                text = ' '.join(words)
    return text


def texts(rng):
    while True:
        draw = rng.random()
        yield random_text(rng) if draw < 0.3 else edited(rng, rng.choice(GOOD))


def check_error(error):
    """Checks the form that all error messages have."""
    lines = str(error).split('\n')
    rows = len(error.facts) + (error.fix is not None)
    shown = 0 if error.expression is None else 1 + bool(error.spans)
    assert len(lines) == 1 + shown + rows
    # no control characters, and nothing that cannot be encoded
    assert all(line.isprintable() for line in lines), lines
    assert error.sentence == error.sentence.strip() != ''
    for start, end in error.spans:
        assert 0 <= start < end <= len(error.expression) + 1


@contextlib.contextmanager
def checked_errors():
    try:
        yield
    except EinshardError as error:
        check_error(error)


def ascii_of_the_traceback():
    # the text of the case may not be printable
    return traceback.format_exc().encode('ascii', 'backslashreplace').decode()


MESHES = [
    *(jax.devices()[:n] for n in (1, 2, 3, 8, 12, 16)),
    mesh_of(data=4, tp=2),
    mesh_of(types=AxisType.Explicit, fsdp=3, tp=4),
    AbstractMesh((4, 4, 4), ('data', 'fsdp', 'tp'), axis_types=(AxisType.Auto,) * 3),
]
# numbers of devices, and mesh axes or None
GRIDS = (1, None), (8, None), (12, None), (16, {'data': 4, 'fsdp': 2, 'tp': 2})


def test_only_einshard_errors():
    rng = random.Random(20_240_229)
    clear_caches()
    n_refused = n_layouts = n_shardings = 0
    for number, text in zip(range(CASES), texts(rng), strict=False):
        ndim = rng.choice((None, 0, 1, 2, 2, 3, 4))
        try:
            expression = None
            with checked_errors():
                expression = parse(text)
            n_refused += expression is None
            for n, axis_sizes in GRIDS if expression else ():
                with checked_errors():
                    layout = lay_out(expression, ndim, n, axis_sizes)
                    fit(layout, axis_sizes or {'x': n})
                    n_layouts += 1
            if number % 10 == 0:
                with checked_errors():
                    make_sharding(text, ndim=ndim, mesh=rng.choice(MESHES))
                    n_shardings += 1
            if number % 50 == 0:
                with checked_errors():
                    einshard(struct(4, 6), text, mesh=rng.choice(MESHES))
        except Exception:
            pytest.fail(f'case {number}, {text!r}, ndim={ndim}:\n{ascii_of_the_traceback()}')
    # the edits must give both valid and invalid expressions
    assert 0.2 < n_refused / CASES < 0.9
    assert n_layouts > CASES // 20
    assert n_shardings > CASES // 1000


def test_every_fix_works():
    # on the same devices, with the same number of dimensions
    rng = random.Random(7)
    clear_caches()
    fixed, wrong = 0, []
    for _, text in zip(range(CASES), texts(rng), strict=False):
        ndim = rng.choice((None, 1, 2, 2, 3))
        mesh = rng.choice(MESHES)
        try:
            make_sharding(text, ndim=ndim, mesh=mesh)
        except EinshardError as error:
            if error.fix is None:
                continue
            fixed += 1
            fix = re.fullmatch("'(.*)'", error.fix, re.DOTALL)
            try:
                make_sharding(fix[1] if fix else '', ndim=ndim, mesh=mesh)
            except EinshardError as again:
                wrong.append(f'{text!r}, ndim={ndim}, {mesh}:\n{error}\nand then: {again}')
    assert fixed > CASES // 50
    assert not wrong, f'{len(wrong)} of {fixed} fixes do not work\n\n' + '\n\n'.join(wrong[:5])


@oracle.examples(300)
@given(case=oracle.cases())
def test_one_more_device(case):
    n = case.n_devices % 16 + 1
    try:
        sharding = make_sharding(case.text, ndim=case.n_dims, mesh=jax.devices()[:n])
    except EinshardError as error:
        check_error(error)
    else:
        assert len(sharding.device_set) == n


@pytest.mark.parametrize(
    'spec',
    [None, 3, 2.5, b'a*', (), [], {}, object(), 'a b ' * 300, ['a*'], ('a* b', 'a b*'), {'a': 'a*'},
     {'a': 1}, [None], lambda path, leaf: 3, lambda path, leaf: ['a*'], lambda path, leaf: None],
)  # fmt: skip
@pytest.mark.parametrize(
    'x',
    [np.ones((8, 4)), 1.0, None, [], {}, [np.ones(8)], {'a': np.ones((8,))}, 'text', object()],
)  # fmt: skip
def test_specs_and_values_of_any_kind(x, spec, devices8):
    with contextlib.suppress(EinshardError):  # and nothing else
        einshard(x, spec, mesh=devices8)


@pytest.mark.parametrize(
    'mesh',
    ['data', 3, {}, [], (), [1, 2], [[1], 2], [None], object(), {'data': 2}, np.ones(3),
     np.ones((2, 2)), b'', 1.5, True],
)  # fmt: skip
def test_meshes_of_any_kind(mesh):
    with pytest.raises(EinshardError):
        make_sharding('a b -> a* b', mesh=mesh)


@pytest.mark.parametrize(
    ('option', 'values'),
    [
        ('ndim', [-1, '2', 2.0, [2], True, object()]),
        ('memory_kind', ['', 'hbm', 3, ['device'], b'device']),
        ('expression', [None, 3, b'a*', ['a*'], ('a*',), object(), {'a': 1}, str]),
    ],
)
def test_options_of_any_kind(option, values, devices8):
    for value in values:
        with pytest.raises(EinshardError):
            make_sharding(**{'expression': 'a b -> a* b', 'mesh': devices8, option: value})
