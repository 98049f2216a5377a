"""One table of the kinds of terms, and what each part of the package does with them.

A new field of `Term` fails this test until the table has a row that sets it, and a row fails until
every consumer handles its term.
"""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from placed import mesh_of

from einshard import (
    EinshardError,
    describe,
    einshard,
    einsum,
    make_sharding,
    parallelism,
    per_device,
    show,
    to_jax,
)

# private: a new field of Term fails this test
from einshard._notation.expression import Term, parse, write
from einshard._notation.layout import fit, lay_out
from einshard._notation.words import SIGNS

MESH = mesh_of(p=2, q=4)
EXPLICIT = jax.make_mesh((2, 4), ('p', 'q'), (AxisType.Explicit,) * 2, devices=jax.devices()[:8])
SIZES = {'p': 2, 'q': 4}
X = np.arange(128, dtype=np.float32).reshape(8, 16)
AXIS, LAST = Term('a'), Term('b')


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of term, and the expression 'a b -> ...' that has it.

    Attributes:
        spec: its PartitionSpec on the mesh p=2, q=4.
        local: the shape of a shard of an array of shape (8, 16).
        needs_explicit: whether the term needs a mesh with Explicit axes.
    """

    term: Term
    text: str
    spec: P
    local: tuple[int, int]
    needs_explicit: bool = False


KINDS = [
    Kind(AXIS, 'a b -> a b', P(), (8, 16)),
    Kind(Term('a', 8), 'a b -> a8 b', P(('p', 'q')), (1, 16)),
    Kind(Term('a', star=True), 'a b -> a* b', P(('p', 'q')), (1, 16)),
    Kind(Term('a', 1, star=True), 'a b -> 2 a1* b', P('q'), (2, 16)),
    Kind(Term('a', mesh_axes=('q',)), 'a b -> a@q b', P('q'), (2, 16)),
    Kind(Term('a', mesh_axes=('q', 'p')), 'a b -> a@(q,p) b', P(('q', 'p')), (1, 16)),
    Kind(Term(count=2), 'a b -> 2 a b4', P(None, 'q'), (8, 4)),
    Kind(Term(star=True), 'a b -> a2 * b', P('p'), (4, 16)),
    Kind(Term('...'), '... b -> ... b*', P(None, ('p', 'q')), (8, 2)),
    Kind(Term(count=2, sign='+'), 'a b -> +2 a4 b', P('q', unreduced={'p'}), (2, 16), True),
    Kind(Term(star=True, sign='='), 'a b -> =* a b', P(reduced={'p', 'q'}), (8, 16), True),
    Kind(
        Term(mesh_axes=('q',), sign='+'), 'a b -> a@p b +@q', P('p', unreduced={'q'}), (4, 16), True
    ),
]


def mesh_for(kind):
    return EXPLICIT if kind.needs_explicit else MESH


def parses_and_writes(kind):
    expression = parse(kind.text)
    assert kind.term in expression.right
    assert write(expression.left, expression.right).text == kind.text
    assert parse(str(expression)) == expression


def is_laid_out(kind):
    """The device grid has the shards, and uses all devices."""
    layout = lay_out(parse(kind.text), X.shape, 8, SIZES, replicates_by_default=True)
    shards = [layout.n_shards.get(axis, 1) for axis in (0, 1)]
    assert [size // n for size, n in zip(X.shape, shards, strict=True)] == list(kind.local)
    assert {split.sign for split in layout.splits} - {''} == {kind.term.sign} - {''}


def fits(kind):
    """The splits take the mesh axes that the PartitionSpec names, those of replicas the rest."""
    layout = lay_out(parse(kind.text), X.shape, 8, SIZES, replicates_by_default=True)
    fitted = fit(layout, SIZES)
    of = {}
    for split, axes in zip(layout.splits, fitted, strict=True):
        of.setdefault((split.axis, split.sign), []).extend(axes)
    entries = [e if isinstance(e, tuple) else (e,) for e in kind.spec.partitions if e is not None]
    sharded = sorted((axis, tuple(axes)) for (axis, _), axes in of.items() if axis is not None)
    assert [axes for _, axes in sharded] == entries
    assert set(of.get((None, '+'), ())) == set(kind.spec.unreduced)
    assert set(of.get((None, '='), ())) == set(kind.spec.reduced)


def lowers(kind):
    sharding = make_sharding(kind.text, ndim=2, mesh=mesh_for(kind))
    assert sharding.spec == kind.spec
    assert sharding.shard_shape(X.shape) == kind.local


def is_described(kind):
    struct = einshard(jax.ShapeDtypeStruct(X.shape, X.dtype), kind.text, mesh=mesh_for(kind))
    text = describe(struct.sharding)
    again = make_sharding(text, ndim=2, mesh=mesh_for(kind))
    assert again.is_equivalent_to(struct.sharding, 2)
    assert set(again.spec.unreduced) == set(kind.spec.unreduced)


def is_drawn(kind):
    picture = show(einshard(jax.ShapeDtypeStruct(X.shape, X.dtype), kind.text, mesh=mesh_for(kind)))
    assert f'[{kind.local[0]},{kind.local[1]}]' in str(picture)


def is_ejected(kind):
    source = to_jax(kind.text, shape=X.shape, mesh=mesh_for(kind))
    for axis in {*kind.spec.unreduced, *kind.spec.reduced}:
        assert repr(axis) in source
    assert ('unreduced' in source) == bool(kind.spec.unreduced)


def runs_on_each_device(kind):
    if kind.needs_explicit:  # `jax.shard_map` has no specs for partial sums
        with pytest.raises(EinshardError, match=r"'[+=]"):
            per_device(kind.text, out=kind.text, mesh=EXPLICIT)(lambda x: x)(X)
        return
    shapes = []
    f = per_device(kind.text, out=kind.text, mesh=MESH)(lambda x: shapes.append(x.shape) or x)
    np.testing.assert_array_equal(f(X), X)
    assert shapes[0] == kind.local


def is_contracted(kind):
    text = f'{kind.text.partition("->")[2].strip()}, b c -> a c'
    y = np.ones((16, 8), np.float32)
    if '...' in text:
        with pytest.raises(EinshardError):
            einsum(text, X, y, mesh=MESH)
    elif kind.spec.unreduced:  # JAX contracts no partial sums
        with pytest.raises(Exception, match='unreduced'):
            einsum(text, X, y, mesh=EXPLICIT)
    else:
        np.testing.assert_allclose(einsum(text, X, y, mesh=mesh_for(kind)), X @ y)


def is_predicted(kind):
    text = f'{kind.text.partition("->")[2].strip()}, b c -> a c'
    if kind.needs_explicit or '...' in text:
        with pytest.raises(EinshardError):
            parallelism(text, devices=8, p=2, q=4)
        return
    axes = {axis: MESH.shape[axis] for axis in kind.term.mesh_axes}
    assert parallelism(text, devices=8, **axes).collectives is not None


CONSUMERS = [
    parses_and_writes,
    is_laid_out,
    fits,
    lowers,
    is_described,
    is_drawn,
    is_ejected,
    runs_on_each_device,
    is_contracted,
    is_predicted,
]


@pytest.mark.parametrize('kind', KINDS, ids=lambda kind: kind.text)
@pytest.mark.parametrize('consumer', CONSUMERS)
def test_every_consumer_handles_every_kind_of_term(consumer, kind):
    consumer(kind)


def test_the_table_has_every_sign():
    assert {kind.term.sign for kind in KINDS} == {'', *SIGNS}
    assert {kind.term.name is None for kind in KINDS} == {True, False}


def test_the_table_has_every_field_of_a_term():
    for field in dataclasses.fields(Term):
        if field.compare:
            values = {getattr(kind.term, field.name) for kind in KINDS}
            assert len(values) > 1, f'add a kind of term that sets {field.name!r}'
