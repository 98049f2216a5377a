"""compare: one program over hardware and sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from .._display import Display, as_json
from .._errors import EinshardError, public, quoted
from .._page import Column, Page, Section
from .._progress import progress
from .._sharding.mesh import device_mesh
from .._sharding.topology import topology
from .._text import first_line, format_bytes, format_seconds, name_of
from .explain import explain
from .frameworks import is_jitted
from .report_rows import compare_steps


@dataclass(frozen=True, slots=True)
class ComparedProgram:
    """What a program costs a device of one target, in one run.

    Attributes:
        target: such as 'h100:1x8', or 'cpu:8'.
        size: that of the arguments, or None.
        n_devices: how many devices run it.
        network_bytes: the bytes that a device sends. None if it does not compile.
        memory, capacity: the bytes of memory that it needs, and that the device has, or None.
        bound: the largest lower bound, in seconds. None if the chip is unknown.
        resource: what has this bound, such as 'network data'.
        step: the seconds of a run by `Report.timeline`, an estimate. None if unknown.
        error: why it could not be compiled, or ''.
    """

    target: str
    size: Any = None
    n_devices: int = 0
    network_bytes: int | None = None
    memory: int | None = None
    capacity: int | None = None
    bound: float | None = None
    resource: str = ''
    step: float | None = None
    error: str = ''

    @property
    def fits(self) -> bool:
        """Whether the device has the memory. True if that is unknown."""
        return not (self.memory and self.capacity) or self.memory <= self.capacity


@dataclass(frozen=True, repr=False)
class Compared(Display):
    """The result of `compare`.

    Attributes:
        name: that of the function.
        rows: a row for each size and target.
    """

    name: str
    rows: tuple[ComparedProgram, ...]
    json_fields: ClassVar[tuple[str, ...]] = ('name', 'rows')

    def to_dict(self) -> dict[str, Any]:
        """Converts the table to dictionaries, lists, strings and numbers, for JSON."""
        return {'schema': 1, **as_json(self)}

    def _page(self) -> Page:
        has_sizes = any(row.size is not None for row in self.rows)
        columns = (Column('size', right=True), *_COLUMNS) if has_sizes else _COLUMNS
        rows = [(*([str(row.size)] if has_sizes else []), *_cells(row)) for row in self.rows]
        errors = tuple(
            f'{row.target}{f", {row.size}" if has_sizes else ""}: {row.error}'
            for row in self.rows
            if row.error
        )
        sizes = dict.fromkeys(row.size for row in self.rows)
        fastest = tuple(filter(None, map(self._fastest, sizes)))
        section = Section('', columns, tuple(rows), (*fastest, *errors))
        return Page(self.name, (section,))

    def _fastest(self, size: Any) -> str:
        """Says which targets are fastest by the estimate; those within 10% are equal."""
        rows = [row for row in self.rows if row.size == size and row.step is not None and row.fits]
        if len(rows) < 2:
            return ''
        best = min(rows, key=lambda row: row.step or 0.0)
        equal = [row for row in rows if compare_steps(row.step, best.step) == 0]
        if len(equal) == len(rows):
            return f'about equal: {quoted([row.target for row in equal])}' + _at(size)
        more = 'are' if len(equal) > 1 else 'is'
        return f'{quoted([row.target for row in equal])} {more} fastest, by the estimate{_at(size)}'


def _at(size: Any) -> str:
    return '' if size is None else f', at size {size}'


_COLUMNS = (
    Column('target'),
    Column('devices', right=True),
    Column('sent', right=True),
    Column('memory', right=True),
    Column('largest bound', right=True),
    Column('of'),
    Column('estimate', right=True),
)


def _cells(row: ComparedProgram) -> tuple[str, ...]:
    n = str(row.n_devices or '')
    if row.error:
        return row.target, n, 'error', '', '', '', ''
    memory = '?' if row.memory is None else format_bytes(row.memory)
    if row.capacity:
        memory = f'{memory} of {format_bytes(row.capacity)}'
    if not row.fits:
        memory = f'does not fit: {memory}'
    bound = '' if row.bound is None else format_seconds(row.bound)
    step = '' if row.step is None else format_seconds(row.step)
    return row.target, n, format_bytes(row.network_bytes or 0), memory, bound, row.resource, step


@public
def compare(
    fn: Any,
    args: tuple[Any, ...] | Callable[..., tuple[Any, ...]],
    targets: Sequence[str],
    sizes: Sequence[Any] | None = None,
    mesh: Mapping[str, int] | Callable[[int], Mapping[str, int]] | None = None,
) -> Compared:
    """Compiles a function for several targets and sizes, and returns one table of its costs.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from einshard import compare, sharded
        >>> @sharded('b* d', 'd f -> * d f')
        ... def layer(x, w):
        ...     return jax.nn.relu(x @ w)
        >>> def arguments(size):
        ...     return jax.ShapeDtypeStruct((size, 64), 'float32'), jnp.ones((64, 128))
        >>> n = jax.device_count()
        >>> table = compare(layer, arguments, [f'cpu:{n}'], sizes=[8 * n, 64 * n])
        >>> [row.network_bytes for row in table.rows]
        [0, 0]

    Nothing is tried and nothing runs: `explain` has suggestions.

    Args:
        fn: as for `explain`.
        args: the arguments of the call, in a tuple; or, with `sizes`, a function that returns them
            for a size. If it has a parameter `mesh`, it is given the mesh of the target, and may
            also be without sizes.
        targets: names as for `topology`, such as 'h100:4x8' and 'v5e:4x4', or 'cpu:8' for devices
            of this process.
        sizes: such as batch sizes.
        mesh: the sizes of the mesh axes by name, or a function that returns them for the number of
            devices. Default: the canonical mesh.

    Returns:
        A `Compared`. A program that does not compile has its error in its row.

    Raises:
        EinshardError: there are no targets, or `args` and `sizes` do not fit together.
    """
    if isinstance(targets, str) or not targets:
        raise EinshardError(f'targets= must be a list of names, not {targets!r}')
    if callable(args) and sizes is None and not _takes_mesh(args):
        raise EinshardError('args= is a function, but there are no sizes=')
    if sizes is not None and not callable(args):
        raise EinshardError(
            'with sizes=, args= must be a function of a size that returns the arguments',
            facts={'example': "lambda size: (params, jax.ShapeDtypeStruct((size, 128), 'int32'))"},
        )
    rows: list[ComparedProgram] = []
    for size in [None] if sizes is None else sizes:
        for target in targets:
            with progress(f'{name_of(fn)} on {target}{_at(size)}'):
                rows.append(_row(fn, args, target, size, mesh))
    return Compared(name_of(fn), tuple(rows))


def _row(fn: Any, args: Any, target: str, size: Any, axes: Any) -> ComparedProgram:
    n = 0
    try:
        mesh = _mesh_of(target, axes)
        n = mesh.size
        given: Any = args
        if callable(args):
            keywords = {'mesh': mesh} if _takes_mesh(args) else {}
            given = args(*([] if size is None else [size]), **keywords)
        report = _explain_on(fn, given, mesh)
    except Exception as error:  # the function may raise anything; the table goes on
        says = error.sentence if isinstance(error, EinshardError) else first_line(error)
        return ComparedProgram(target, size, n, error=says)
    largest, memory = report.bounds.largest, report.memory
    return ComparedProgram(
        target,
        size,
        report.n_devices,
        report.network_bytes,
        memory and memory.total,
        memory and memory.capacity,
        largest and largest.seconds,
        '' if largest is None else f'{largest.resource} {largest.along}'.strip(),
        report.reading.step,
    )


def _explain_on(fn: Any, args: Sequence[Any], mesh: Mesh) -> Any:
    if not isinstance(args, tuple):
        raise EinshardError(f'args= must be a tuple, not {type(args).__name__}')
    # a jitted function takes no mesh=: its arguments or the mesh in context say where it runs
    if getattr(fn, 'has_mesh', None) is None and is_jitted(fn):
        with jax.set_mesh(mesh):
            return explain(fn, *args, tries=0)
    return explain(fn, *args, mesh=mesh, tries=0)


def _mesh_of(target: str, axes: Any) -> Mesh:
    kind, _, count = target.partition(':')
    if kind != 'cpu':
        mesh = topology(target)
        sizes: Any = axes(mesh.size) if callable(axes) else axes
        return topology(target, **sizes) if sizes else mesh
    devices = jax.devices('cpu')
    if not (count.isdecimal() and 0 < int(count) <= len(devices)):
        raise EinshardError(f"there are {len(devices)} CPU devices, not those of '{target}'")
    sizes = axes(int(count)) if callable(axes) else axes
    return device_mesh(devices[: int(count)], **sizes or {})


def _takes_mesh(function: Any) -> bool:
    try:
        return 'mesh' in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
