"""A second implementation of the notation, in plain numpy, and expressions to try both with.

Nothing here is taken from the package. The device numbers are reshaped to the grid that an
expression describes, and each dimension of the grid, slowest-varying first, splits the piece of the
array that its devices hold.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# generated expressions have counts and stars anywhere
ANY_SPACING = pytest.mark.filterwarnings('ignore:in .*, and nothing is sharded')

DEVICE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)


def examples(n: int) -> settings:
    """The same n examples in every run, however slow the machine is."""
    return settings(
        max_examples=n,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Term:
    """A term of the right side: `axis` is a name, '...', or None for a replica."""

    axis: str | None
    count: int | None = None
    star: bool = False
    mesh_axes: tuple[str, ...] = ()

    @property
    def factor(self) -> int:
        return 1 if self.count is None else self.count

    def __str__(self) -> str:
        count = '' if self.count is None else self.count
        axes = ','.join(self.mesh_axes)
        at = f'@({axes})' if len(self.mesh_axes) > 1 else f'@{axes}' if axes else ''
        return f'{self.axis or ""}{count}{"*" if self.star else ""}{at}'


@dataclass(frozen=True)
class Case:
    """An expression in parts, one way to write it, and an array and devices that it fits."""

    left: tuple[str, ...]
    right: tuple[Term, ...]
    text: str
    shape: tuple[int, ...]
    n_devices: int
    mesh: tuple[tuple[str, int], ...] = ()  # (axis, size); () if the case has only devices

    @property
    def n_dims(self) -> int:
        return len(self.shape)

    def index_map(self) -> dict[int, tuple[slice, ...]]:
        return index_map(self.left, self.right, self.shape, self.n_devices, self.mesh)


def solve(terms: Sequence[Term], n: int) -> list[int]:
    """The count of every term, so that their product is n."""
    stars = sum(term.star for term in terms)
    product = math.prod(term.factor for term in terms)
    shares = [r for r in range(1, n + 1) if product * r**stars == n]
    if not shares:
        raise ValueError(f'the terms do not fit {n} devices')
    return [term.factor * (shares[0] if term.star else 1) for term in terms]


def index_map(
    left: Sequence[str],
    right: Sequence[Term],
    shape: Sequence[int],
    n_devices: int,
    mesh: Sequence[tuple[str, int]] = (),
) -> dict[int, tuple[slice, ...]]:
    """{device number: the slice of every array axis that the device holds}"""
    named = [i for i, term in enumerate(right) if term.mesh_axes]
    counted = [i for i, term in enumerate(right) if not term.mesh_axes]
    sizes = dict(mesh)
    ids = np.arange(n_devices)
    if named:
        names = [name for name, _ in mesh]
        taken = [name for i in named for name in right[i].mesh_axes]
        rest = [name for name in names if name not in taken]
        grid = ids.reshape([sizes[name] for name in names])
        ids = grid.transpose([names.index(name) for name in taken + rest])
    counts = {i: math.prod(sizes[name] for name in right[i].mesh_axes) for i in named}
    free = n_devices // math.prod(counts.values())
    terms = [right[i] for i in counted]
    if named and not any(term.star or term.count for term in terms):
        counted, terms = [len(right)], [Term(None, free)]  # mesh axes without a name replicate
    counts |= dict(zip(counted, solve(terms, free), strict=True))
    order = named + counted
    ids = ids.reshape([counts[i] for i in order])
    written = sorted(order)
    ids = ids.transpose([order.index(i) for i in written])
    names = [right[i].axis if i < len(right) else None for i in written]
    axes = [position(left, name, len(shape)) for name in names]
    return split(ids, axes, [range(size) for size in shape])


def position(left: Sequence[str], axis: str | None, n_dims: int) -> int | None:
    """The array axis of a name; None for a replica and for '...', which shard nothing."""
    if axis is None or axis == '...':
        return None
    i = left.index(axis)
    return i - len(left) + n_dims if '...' in left[:i] else i


def split(
    ids: np.ndarray, axes: Sequence[int | None], held: list[range]
) -> dict[int, tuple[slice, ...]]:
    """{device number: slices}: each dimension of `ids` splits its axis of `held`, or replicates."""
    if not axes:
        return {int(ids): tuple(slice(indices.start, indices.stop) for indices in held)}
    axis, *rest = axes
    slices = {}
    for i, part in enumerate(ids):
        piece = list(held)
        if axis is not None:
            size, remainder = divmod(len(held[axis]), len(ids))
            assert remainder == 0
            piece[axis] = held[axis][i * size : (i + 1) * size]
        slices |= split(part, rest, piece)
    return slices


def plain(index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    """An index with start and stop of every axis written out."""
    return tuple(slice(*part.indices(n)[:2]) for part, n in zip(index, shape, strict=True))


def of_sharding(sharding, devices, shape) -> dict[int, tuple[slice, ...]]:
    """The index map of a JAX sharding, by the number of the device among `devices`."""
    numbers = {device: number for number, device in enumerate(devices)}
    found = sharding.devices_indices_map(tuple(shape))
    return {numbers[device]: plain(index, shape) for device, index in found.items()}


def expressible(case: Case) -> bool:
    """Whether the counts of a case fit the mesh axes that its names leave."""
    taken = {name for term in case.right for name in term.mesh_axes}
    free = [size for name, size in case.mesh if name not in taken]
    terms = [term for term in case.right if not term.mesh_axes]
    if taken and not any(term.star or term.count for term in terms):
        return True
    counts = solve(terms, math.prod(free))
    owners = [(term.axis, n) for term, n in zip(terms, counts, strict=True) if n > 1]
    # a border between two owners must be a border between two mesh axes
    borders, product = set(), 1
    for i, (owner, count) in enumerate(owners):
        product *= count
        if i + 1 < len(owners) and owners[i + 1][0] != owner:
            borders.add(product)
    return borders <= {math.prod(free[:i]) for i in range(len(free) + 1)}


# Names in several scripts: Latin, accented, Greek, Cyrillic, Chinese, Hebrew, Devanagari with
# its vowel signs, Hangul. All in NFC; `cases` writes some of them decomposed.
NAMES = tuple(
    unicodedata.normalize('NFC', name)
    for name in (
        'a', 'b', 'c', 'A', 'batch', 'd_model', '_', '_x_', 'é', 'größe', 'ångström', 'β', 'Σ',
        'ось', '行', '列数', 'ציר', 'हिन्दी', '축',
    )
)  # fmt: skip

MESHES = (
    (('data', 4), ('tp', 2)),
    (('data', 2), ('fsdp', 2), ('tp', 4)),
    (('replica', 2), ('data', 2), ('fsdp', 2), ('tp', 2)),
    (('x', 3), ('y', 4)),
    (('row', 2), ('column', 3), ('層', 2)),
    (('one', 1), ('x', 8)),
    (('x', 6), ('one', 1), ('y', 2)),
    (('x', 16),),
)


@st.composite
def cases(draw, device_counts: Sequence[int] = DEVICE_COUNTS, max_dims: int = 5) -> Case:
    """Valid expressions by counts and stars, with an array and a device count for them."""
    n = draw(st.sampled_from(device_counts))
    return _case(draw, n, max_dims, mesh=())


@st.composite
def mesh_cases(draw, meshes=MESHES, max_dims: int = 4) -> Case:
    """Valid expressions on meshes with names: by names, by counts, by both."""
    mesh = draw(st.sampled_from(meshes))
    return _case(draw, math.prod(size for _, size in mesh), max_dims, mesh)


def _case(draw, n: int, max_dims: int, mesh) -> Case:
    n_dims = draw(st.integers(0, max_dims))
    names = draw(st.permutations(NAMES))[:n_dims]
    left, sharded = _left(draw, list(names))
    named = _named(draw, sharded, mesh)
    sizes = dict(mesh)
    taken = math.prod(sizes[axis] for term in named for axis in term.mesh_axes)
    if named and draw(st.booleans()):
        counted = []
    else:
        by_name = {term.axis for term in named}
        counted = _counted(draw, [axis for axis in sharded if axis not in by_name], n // taken)
    terms = named + counted
    placed = {term.axis for term in terms}
    terms += [Term(axis) for axis in left if axis not in placed]
    if not terms:
        terms = [
            draw(st.sampled_from([Term(None, 1), Term(None, None, True), Term(None, 1, True)]))
        ]
    if draw(st.booleans()):
        terms = draw(st.permutations(terms))
    else:
        terms.sort(key=lambda term: left.index(term.axis) if term.axis else draw(st.integers(0, 3)))
    shape = [draw(st.integers(1, 3)) for _ in range(n_dims)]
    counts = solve(counted, n // taken) if counted else []
    factors = [math.prod(sizes[axis] for axis in term.mesh_axes) for term in named] + counts
    for term, factor in zip(named + counted, factors, strict=True):
        at = position(left, term.axis, n_dims)
        if at is not None:
            shape[at] *= factor
    return Case(tuple(left), tuple(terms), _text(draw, left, terms), tuple(shape), n, tuple(mesh))


def _left(draw, names: list[str]) -> tuple[list[str], list[str]]:
    """The left side, '...' for some neighbors perhaps, and the names that are left."""
    if draw(st.integers(0, 2)):
        return names, names
    start = draw(st.integers(0, len(names)))
    stop = draw(st.integers(start, len(names)))
    return [*names[:start], '...', *names[stop:]], names[:start] + names[stop:]


def _named(draw, names: Sequence[str], mesh) -> list[Term]:
    if not mesh or not names:
        return []
    axes = draw(st.permutations([axis for axis, _ in mesh]))
    axes = axes[: draw(st.integers(0, len(axes)))]
    terms = []
    while axes:
        size = draw(st.integers(1, len(axes)))
        group, axes = axes[:size], axes[size:]
        terms.append(Term(draw(st.sampled_from(names)), mesh_axes=tuple(group)))
    return terms


def _counted(draw, names: Sequence[str], n: int) -> list[Term]:
    """Terms whose counts and stars use n devices, on `names` or as replicas."""
    owners = st.sampled_from([None, *names])
    stars = draw(st.sampled_from([0, 0, 1, 1, 2, 2, 3, 4]))
    shares = [r for r in range(1, n + 1) if n % r**stars == 0] if stars else [1]
    share = draw(st.sampled_from(sorted(shares, reverse=True)))
    factors = _factors(draw, n // share**stars)
    terms = []
    for _ in range(stars):
        count = factors.pop() if factors and draw(st.booleans()) else 1
        written = count if count > 1 or draw(st.integers(0, 3)) == 0 else None
        terms.append(Term(draw(owners), written, star=True))
    terms += [Term(draw(owners), count) for count in factors]
    if draw(st.integers(0, 7)) == 0:
        terms.append(Term(draw(owners), 1))
    if terms and math.prod(solve(terms, n)) == 1 and not stars:
        return [term for term in terms if term.count]
    return terms


def _factors(draw, n: int) -> list[int]:
    factors = []
    while n > 1:
        factors.append(draw(st.sampled_from([d for d in range(2, n + 1) if n % d == 0])))
        n //= factors[-1]
    return factors


def _text(draw, left: Sequence[str], terms: Sequence[Term]) -> str:
    """One of the ways to write an expression."""
    space = st.sampled_from([' ', ' ', ' ', '  ', '\t', '\n', ' \u00a0'])
    edge = st.sampled_from(['', '', '', ' ', '\n  '])
    form = draw(st.sampled_from(['NFC', 'NFC', 'NFD']))

    def side(words) -> str:
        written = draw(edge)
        for i, word in enumerate(words):
            written += (draw(space) if i else '') + str(word)
        return unicodedata.normalize(form, written + draw(edge))

    in_order = [term.axis for term in terms if term.axis] == list(left)
    if in_order and draw(st.booleans()):
        return side(terms)
    around = draw(st.sampled_from([' ', ' ', '']))
    return f'{side(left)}{around}->{around}{side(terms)}'


# What a second Python runs: expressions and shapes in, index maps or errors out, as JSON.
_ANSWER = """
import inspect, json, sys
from einshard import make_sharding
answers = []
# called n_dims in the published version 0.2.0
ndim = 'ndim' if 'ndim' in inspect.signature(make_sharding).parameters else 'n_dims'
for text, shape in json.load(sys.stdin):
    try:
        found = make_sharding(text, **{ndim: len(shape)}).devices_indices_map(tuple(shape))
    except Exception as error:
        answers.append(f'{type(error).__name__}: {error}')
        continue
    answers.append({
        device.id: [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
        for device, index in found.items()
    })
json.dump(answers, sys.stdout)
"""


def answers_of(
    python: str, n_devices: int, questions: Sequence[tuple[str, Sequence[int]]], cwd: str
) -> list[dict[int, tuple[slice, ...]] | str]:
    """Index maps from the einshard of another Python, or the texts of its errors."""
    environment = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'} | {
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': f'--xla_force_host_platform_device_count={n_devices}',
        'PYTHONIOENCODING': 'utf-8',
    }
    done = subprocess.run(
        [python, '-c', _ANSWER],
        input=json.dumps([[text, list(shape)] for text, shape in questions]),
        capture_output=True,
        encoding='utf-8',
        env=environment,
        cwd=cwd,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [
        answer
        if isinstance(answer, str)
        else {int(i): tuple(slice(*one) for one in index) for i, index in answer.items()}
        for answer in json.loads(done.stdout)
    ]
