"""docs/real_code.md: rewritten code compiles to the same programs, or gives the same shards.

The page compares its functions `before` and `after`; here the programs are compared by an
independent reader, with the shardings of arguments and results.
"""

import contextlib
import io
import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_docs import DOCS, code_of
from test_hlo import assert_same_program, compiled

from einshard import einshard

PAGE = DOCS / 'real_code.md'
PROGRAMS = {
    'Constrain values by logical names',
    'Shard the largest axis',
    'Shard a train state',
    'Decode with a cache',
    'Write per-device code',
}
TREES = {'Match parameters against a table', 'Load batches on many hosts'}


def sections(page):
    """The code of a page by heading, with every line where the page has it."""
    lines = code_of(page).splitlines()
    headings = {
        i: line.removeprefix('## ')
        for i, line in enumerate(page.read_text(encoding='utf-8').splitlines())
        if line.startswith('## ')
    }
    edges = [0, *headings, len(lines)]
    for first, last in itertools.pairwise(edges):
        yield headings.get(first, ''), '\n' * first + '\n'.join(lines[first:last])


@pytest.fixture(scope='module')
def page():
    """The names that each section leaves behind, by heading."""
    names, found = {'__name__': PAGE.stem}, {}
    for heading, code in sections(PAGE):
        for name in ('before', 'after', 'arguments'):
            names.pop(name, None)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, str(PAGE), 'exec'), names)
        found[heading] = dict(names)
    return found


# Whether the compiler may choose shardings: with `jax.jit` of `shard_map` it may, `per_device` sets
# the shardings. The tests compare those of the compiled programs.
_FREEDOM = re.compile(r', allow_spmd_sharding_propagation_to_\w+=\{[^}]*\}')


def programs(names):
    with names.get('decoding', contextlib.nullcontext()):
        pair = [compiled(names[side], *names['arguments']) for side in ('before', 'after')]
    return [p._replace(lines=[_FREEDOM.sub('', line) for line in p.lines]) for p in pair]


def test_every_pair_is_compared(page):
    pairs = {heading for heading, names in page.items() if 'before' in names}
    assert pairs == PROGRAMS | TREES
    assert pairs | {'', 'Count collectives in tests'} == set(page)


@pytest.mark.parametrize('heading', sorted(PROGRAMS - {'Shard the largest axis'}))
def test_programs_are_equal(page, heading):
    before, after = programs(page[heading])
    assert_same_program(after, before)


def test_programs_that_initialize_are_equal(page):
    """assert_same_program requires collectives, which these programs do not have."""
    before, after = programs(page['Shard the largest axis'])
    assert before.lines == after.lines
    for (expected, ndim), (found, _) in zip(before.shardings, after.shardings, strict=True):
        assert found.is_equivalent_to(expected, ndim)
    assert any(not sharding.is_fully_replicated for sharding, _ in after.shardings)


@pytest.mark.parametrize(
    ('shape', 'expected'),
    [
        ((16, 64, 256), P(None, None, 'fsdp')), ((256, 16, 64), P('fsdp')),
        ((64, 64), P(None, 'fsdp')), ((8, 64, 64), P(None, None, 'fsdp')),
        ((64, 8, 64), P(None, None, 'fsdp')), ((63, 64, 63), P(None, 'fsdp')),
        ((16, 16), P()), ((16, 32), P(None, 'fsdp')), ((16, 17), P('fsdp')), ((17, 19), P()),
    ],
)  # fmt: skip
def test_the_published_rule_of_the_largest_axis(page, shape, expected):
    """Arrays of exactly 1024 bytes are replicated; of equal axes, the last is sharded."""
    names = page['Shard the largest axis']
    x = jax.ShapeDtypeStruct(shape, np.float32)
    found = einshard({'x': x}, names['published'], mesh=names['mesh'])['x'].sharding
    assert found.is_equivalent_to(NamedSharding(names['mesh'], expected), len(shape))
    assert names['largest'](x) == found
    # independently, as NumPy sorts
    n = names['mesh'].shape['fsdp']
    fits = [i for i in np.argsort(shape, kind='stable') if shape[i] % n == 0]
    by_numpy = P(*[None] * fits[-1], 'fsdp') if fits and x.size * 4 > 1024 else P()
    assert found.is_equivalent_to(NamedSharding(names['mesh'], by_numpy), len(shape))


@pytest.mark.parametrize('heading', sorted(TREES))
def test_shards_are_equal(page, heading):
    before, after = (jax.tree.leaves(page[heading][side]) for side in ('before', 'after'))
    assert any(not x.is_fully_replicated for x in after)
    for x, y in zip(before, after, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        theirs = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(shard.data, theirs.pop(shard.device))
        assert not theirs


@pytest.mark.parametrize(
    ('heading', 'right', 'wrong'),
    [
        ('Constrain values by logical names', "batch='@(data,fsdp)'", "batch='@data'"),
        ('Match parameters against a table', '(params, rules,', "(params, '... -> ...',"),
        ('Load batches on many hosts', 'batch@(data,fsdp,tensor)', 'batch@(data,tensor,fsdp)'),
    ],
)
def test_the_page_notices_another_sharding(page, heading, right, wrong):
    code = dict(sections(PAGE))[heading]
    assert right in code
    changed = code.replace(right, wrong, 1)
    with pytest.raises(AssertionError):
        exec(compile(changed, str(PAGE), 'exec'), dict(page[heading]))
