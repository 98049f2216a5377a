"""`explain_move`: the routes of a move and what they cost, as a report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .._cache import cached
from .._chips.table import find_chip
from .._display import Display, as_json
from .._errors import plural, public
from .._notation.expression import axis_letters
from .._page import Column, Page, Section
from .._program.cost.network import Network
from .._program.hlo.collective import PERMUTE, Collective
from .._program.hlo.text import ArrayType
from .._sharding.describe import describe
from .._sharding.mesh import MeshLike
from .._text import format_bytes, format_seconds, short_arrays
from .._trees.specs import Spec
from .move import NO_STATISTICS, add_route, make_groups, plan_jobs
from .placed import Placed
from .route import compile_route
from .run import Job
from .tree import read_tree


@dataclass(frozen=True)
class MoveRow:
    """Arrays of a shape and dtype that move alike. Bytes are on a device, for each array.

    Attributes:
        array: such as 'bfloat16[4096,14336]'.
        leaves: how many arrays there are.
        path: the path of the first.
        source, target: the placements as expressions.
        route: the placements on the way, on the source devices. Empty if the array moves directly.
        by_pieces: whether no program moves it on the source devices: it is cut as it is.
        kept: bytes of its new shard that the device that receives most has already.
        sent, received: the most bytes that a device sends, and receives.
        bound: the bound by pieces: what the device with the most missing bytes lacks.
        ratio: `received` by `bound`; None if no device lacks anything.
        temporaries: bytes of temporary arrays.
    """

    array: str
    leaves: int
    path: str
    source: str
    target: str
    route: tuple[str, ...]
    by_pieces: bool
    kept: int
    sent: int
    received: int
    bound: int
    ratio: float | None
    temporaries: int


@dataclass(frozen=True)
class LinkRow:
    """What the move sends over one kind of link.

    Attributes:
        link: 'within' a slice of TPUs or an NVLink domain, or 'between' them.
        bytes: the most that enter or leave a chip.
        seconds: a lower bound on the time, with the published rates of the chip.
    """

    link: str
    bytes: int
    seconds: float


@dataclass(frozen=True, repr=False)
class MoveReport(Display):
    """What a move costs, made by `explain_move`. It prints as text, and notebooks show it as HTML.

    Attributes:
        rows: one for each group of equal moves, those that send the most first.
        n_devices, n_targets: the numbers of devices before and after.
        network_bytes: the bytes that a device sends for all arrays.
        peak_memory: the most bytes of these arrays on a device during the move.
        placed: the number of arrays that are placed already.
        from_host: the number of numpy arrays and numbers, which are not in the rows.
        chip: the chip that `links` are for; None if it is unknown, as for CPUs.
        links: bytes and least time by kind of link. Empty without a chip.
    """

    rows: tuple[MoveRow, ...]
    n_devices: int
    n_targets: int
    network_bytes: int
    peak_memory: int
    placed: int
    from_host: int
    chip: str | None
    links: tuple[LinkRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, for JSON; einshard/schemas/move.json describes it."""
        return {'schema': 1, **as_json(self)}

    def _page(self) -> Page:
        title = f'move of {plural(sum(row.leaves for row in self.rows), "array")}'
        if self.rows:
            title += f' from {plural(self.n_devices, "device")} to {self.n_targets}'
        rows = Section(
            'moves', _COLUMNS, tuple(map(_cells, self.rows)), () if self.rows else ('none',)
        )
        totals = [
            f'sent by a device: {format_bytes(self.network_bytes)}',
            f'peak memory of these arrays on a device: {format_bytes(self.peak_memory)}',
        ]
        totals += [
            f'{_LINKS[link.link]}: {format_bytes(link.bytes)}, at least '
            f'{format_seconds(link.seconds)} ({self.chip})'
            for link in self.links
        ]
        if self.placed:
            totals.append(f'placed already: {plural(self.placed, "array")}')
        if self.from_host:
            totals.append(f'placed from the host: {plural(self.from_host, "array")}')
        return Page(title, (rows, Section('in total', lines=tuple(totals))))


_COLUMNS = (
    Column('arrays', right=True),
    Column('array', shorten='middle'),
    Column('from'),
    Column('through'),
    Column('to'),
    Column('kept', right=True),
    Column('sent', right=True),
    Column('received', right=True),
    Column('bound', right=True),
    Column('ratio', right=True),
    Column('temporaries', right=True),
    Column('first', below=True),
)
_LINKS = {'within': 'within a slice or domain', 'between': 'between slices or domains'}


def _cells(row: MoveRow) -> tuple[str, ...]:
    through = ', '.join(row.route) or ('pieces' if row.by_pieces else 'directly')
    sizes = (row.kept, row.sent, row.received, row.bound)
    return (
        str(row.leaves),
        short_arrays(row.array),
        row.source,
        through,
        row.target,
        *map(format_bytes, sizes),
        '' if row.ratio is None else f'{row.ratio:.2f}',
        format_bytes(row.temporaries),
        row.path,
    )


@public
def explain_move(tree: Any, spec: Spec, mesh: MeshLike | None = None) -> MoveReport:
    """Says by which routes `move` moves arrays, and what that costs. Moves nothing.

        >>> import jax
        >>> from einshard import einshard, explain_move
        >>> w = jax.ShapeDtypeStruct((64 * jax.device_count(), 64 * jax.device_count()), 'float32')
        >>> report = explain_move(einshard(w, 'in out -> in* out'), 'in out -> in out*')
        >>> report.rows[0].route
        ()

    The routes are those of `move`: they are compiled in a process of its own, for simulated CPU
    devices, whose collectives send what those of GPUs and TPUs send.

    Args:
        tree: arrays, or ShapeDtypeStructs with shardings, also on a `topology`.
        spec, mesh: as for `move`.

    Raises:
        EinshardError: a spec does not fit its array or the mesh, or an array has no sharding.
    """
    found = read_tree(tree, spec, mesh, only_shapes=True)
    jobs = plan_jobs(found.moving)
    for job in jobs:
        add_route(job)
    grouped: dict[Any, list[Job]] = {}
    for job in jobs:
        leaf = job.leaves[0]
        key = job.shape, leaf.array.dtype, leaf.array.sharding, leaf.sharding
        grouped.setdefault(key, []).append(job)
    costs = [(_Cost(group[0]), group) for group in grouped.values()]
    rows = [_row(cost, group, found.path(group[0].leaves[0].number)) for cost, group in costs]
    n_moving = sum(len(job.leaves) for job in jobs)
    n_arrays = sum(isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for leaf in found.leaves)
    chip, links = _links([(cost, len(group)) for cost, group in costs])
    return MoveReport(
        rows=tuple(sorted(rows, key=lambda row: -row.sent * row.leaves)),
        n_devices=max((len(job.transfer.devices) for job in jobs), default=0),
        n_targets=max((len(job.transfer.target_devices) for job in jobs), default=0),
        network_bytes=sum(cost.sent * len(group) for cost, group in costs),
        peak_memory=_peak(jobs),
        placed=n_arrays - n_moving,
        from_host=len(found.from_host),
        chip=chip,
        links=links,
    )


class _Cost:
    """What one array sends and receives.

    Attributes:
        sent, received: the most bytes of any device.
        pieces: (source, target): bytes of the pieces that change device, which are numbered as in
            `Transfer.all_devices`.
    """

    def __init__(self, job: Job):
        transfer, route = job.transfer, job.route
        self.job = job
        self.pieces = Counter[tuple[int, int]]()
        n = len(transfer.all_devices)
        sent, received = np.zeros(n, np.int64), np.zeros(n, np.int64)
        if route is not None:
            sent[: len(transfer.devices)] += route.sent
            received[: len(transfer.devices)] += route.sent
        number = {device: i for i, device in enumerate(transfer.all_devices)}
        for device, (pieces, _) in zip(transfer.target_devices, transfer.pieces, strict=False):
            for piece in pieces:
                pair = number[transfer.devices[piece.source]], number[device]
                sizes = [cut.stop - cut.start for cut in piece.inside]
                if pair[0] != pair[1]:
                    self.pieces[pair] += math.prod(sizes) * transfer.itemsize
        for (source, target), n_bytes in self.pieces.items():
            sent[source] += n_bytes
            received[target] += n_bytes
        self.sent, self.received = int(sent.max(initial=0)), int(received.max(initial=0))

    def collectives(self) -> list[Collective]:
        """Returns those on the source devices, and the pieces that change device as permutes."""
        transfer, route = self.job.transfer, self.job.route
        found: list[Collective] = []
        if route is not None and route.sent and transfer.move is not None:
            # a route that another process has found comes without them
            known = route if route.collectives else compile_route(transfer.move, route.through)
            found += known.collectives if known is not None else ()
        n = len(transfer.all_devices)
        for pair, size in self.pieces.items():
            array = (ArrayType('s8', (size,)),)
            found.append(Collective(PERMUTE, 'piece', array, array, (pair,), (pair,), n))
        return found


def _row(cost: _Cost, group: Sequence[Job], path: str) -> MoveRow:
    job = cost.job
    leaf, route, transfer = job.leaves[0], job.route, job.transfer
    missing = transfer.missing()
    most = int(missing.argmax())
    bound = int(missing[most])
    held = int(transfer.after.volumes()[most]) * transfer.itemsize
    array = leaf.array
    return MoveRow(
        array=f'{array.dtype}[{",".join(map(str, array.shape))}]',
        leaves=sum(len(each.leaves) for each in group),
        path=path,
        source=_text(array.sharding, array.ndim),
        target=_text(leaf.sharding, array.ndim),
        route=tuple(map(_expression, route.through)) if route is not None else (),
        by_pieces=route is None,
        kept=held - bound,
        sent=cost.sent,
        received=cost.received,
        bound=bound,
        ratio=cost.received / bound if bound else None,
        temporaries=route.temporaries if route is not None else transfer.new_bytes,
    )


@cached
def _text(sharding: Any, ndim: int) -> str:
    if isinstance(sharding, SingleDeviceSharding):
        return 'one device'
    return describe(jax.ShapeDtypeStruct((0,) * ndim, 'bool', sharding=sharding))


@cached
def _expression(placed: Placed) -> str:
    """Writes a placement as an expression with counts, or as mesh axes if that cannot be."""
    names = [name for name, _ in zip(axis_letters(), placed.entries, strict=False)]
    of_axis = {axis: i for i, axes in enumerate(placed.entries) for axis in axes}
    if any(list(axes) != sorted(axes) for axes in placed.entries):
        spec = ', '.join(' '.join(f'd{axis}' for axis in axes) or '-' for axes in placed.entries)
        return f'{" x ".join(map(str, placed.sizes))}: {spec}'
    terms: list[tuple[str, int]] = []
    for axis, size in enumerate(placed.sizes):
        name = names[of_axis[axis]] if axis in of_axis else ''
        if terms and terms[-1][0] == name:
            terms[-1] = (name, terms[-1][1] * size)
        else:
            terms.append((name, size))
    terms += [(name, 1) for i, name in enumerate(names) if i not in of_axis.values()]
    right = (f'{name}{count}' if count > 1 else name for name, count in terms)
    return f'{" ".join(names)} -> {" ".join(right)}'


def _peak(jobs: Sequence[Job]) -> int:
    """Returns the most bytes on a device while the groups of `move` move one after another."""
    held = peak = sum(job.transfer.old_bytes for job in jobs)
    for group in make_groups(jobs, NO_STATISTICS, donate=True, kept=set()):
        peak = max(peak, held + sum(job.growth for job in group))
        held += sum(job.transfer.new_bytes - job.transfer.old_bytes for job in group)
    return peak


def _links(costs: Sequence[tuple[_Cost, int]]) -> tuple[str | None, tuple[LinkRow, ...]]:
    """Returns the chip and what all arrays send by kind of link, if the chip is known."""
    totals: dict[str, tuple[int, float]] = {'within': (0, 0.0), 'between': (0, 0.0)}
    networks: dict[Any, Network] = {}
    name = None
    for cost, n in costs:
        devices = cost.job.transfer.all_devices
        chip = find_chip(devices[0].device_kind) if devices else None
        if chip is None:
            return None, ()
        name = chip.name
        if devices not in networks:
            networks[devices] = Network(devices, chip)
        for link, (n_bytes, seconds) in networks[devices].by_link(*cost.collectives()).items():
            before = totals[link]
            totals[link] = before[0] + n * n_bytes, before[1] + n * seconds
    return name, tuple(LinkRow(link, *total) for link, total in totals.items() if total[0])
