"""Limits on the collectives and the memory of a function, checked when its programs compile."""

from __future__ import annotations

import difflib
import functools
import math
import numbers
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import EinshardError, plural
from .._sharding.collective_axes import ShardedBy, along_text
from .._sharding.tracing import is_staging, is_tracing, user_stacklevel
from .._text import first_line, format_bytes, short_arrays, short_source
from .compile_events import listen, loaded_text, sees_compilations, this_thread

if TYPE_CHECKING:
    from .._program.hlo.collective import Collective

# Functions that read programs import `_program` when they run: it takes a third of the time to
# import einshard, and most functions have no limits.

# The collectives that a program may have: a kind such as 'all-reduce', several kinds, or the limit
# of each kind.
Promise: TypeAlias = str | Collection[str] | Mapping[str, int]
# The limit of each allowed kind. math.inf allows any number.
Allowed: TypeAlias = Mapping[str, float]


class UnexpectedCollectives(EinshardError):
    """A compiled program has collectives that are not allowed; the message lists them."""

    code = 'collectives'


class MemoryExceeded(EinshardError):
    """A compiled program needs more memory than allowed."""

    code = 'memory'


# tracebacks show their public names
UnexpectedCollectives.__module__ = MemoryExceeded.__module__ = 'einshard'


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on each compiled program of a function. None means no limit."""

    collectives: Allowed | None
    memory: int | None  # bytes on each device


def read_limits(collectives: Promise | None, memory: str | int | None) -> Limits | None:
    if collectives is None and memory is None:
        return None
    from .._program.hlo.memory import parse_bytes

    allowed = None if collectives is None else read_promise(collectives)
    return Limits(allowed, None if memory is None else parse_bytes(memory, 'memory='))


def read_promise(promise: Promise, given_as: str = 'collectives=') -> Allowed:
    """Returns the limit of each kind, such as {'all-reduce': math.inf} for 'all-reduce'."""
    from .._program.hlo.collective import KINDS

    if isinstance(promise, str):
        return read_promise((promise,), given_as)
    if not isinstance(promise, Collection):  # type: ignore[reportUnnecessaryIsInstance]
        raise EinshardError(
            f'{given_as} must name collectives, not {promise!r}',
            facts={
                'examples': "() for none, 'all-reduce', ('all-reduce', 'all-gather'), "
                "{'all-reduce': 1}"
            },
        )
    for kind in promise:
        if kind not in KINDS:
            near = difflib.get_close_matches(str(kind), KINDS, n=1)
            raise EinshardError(
                f'{kind!r} is not a kind of collective',
                facts={
                    'kinds': f'{", ".join(KINDS[:-1])}, and {KINDS[-1]} for a Pallas kernel that '
                    'communicates'
                },
                fix=repr(near[0]) if near else None,
            )
    if not isinstance(promise, Mapping):
        return dict.fromkeys(promise, math.inf)
    for kind, limit in promise.items():
        if not isinstance(limit, numbers.Integral) or isinstance(limit, bool) or limit < 0:
            raise EinshardError(
                f"the limit for '{kind}' must be a non-negative integer, not {limit!r}",
                facts={'to allow any number': f"{given_as}'{kind}'"},
            )
    return {kind: int(limit) for kind, limit in promise.items()}


def check_promise(
    name: str, compiled: Any, allowed: Allowed, sharded_by: Callable[[Any], ShardedBy] | None
) -> None:
    """Raises if a compiled program has collectives that are not allowed.

    Args:
        sharded_by: a function that returns the mesh axes that shard each named axis, for the
            error, or None if there are no specs. It takes the ShapeDtypeStructs of the result, or
            None if they are unknown.
    """
    from .._program.hlo.find_collectives import read_collectives

    too_many = exceeding(allowed, read_collectives(program_text(name, compiled)))
    if not too_many:
        return
    try:
        results = compiled.out_info
    except ValueError:  # the program uses a jax.Ref
        results = None
    shardings = jtu.tree_leaves(compiled.input_shardings)
    shardings += [result.sharding for result in jtu.tree_leaves(results)]
    meshes = list(dict.fromkeys(s.mesh for s in shardings if isinstance(s, NamedSharding)))
    by_name = {} if sharded_by is None else sharded_by(results)
    with_axes = [(x, along_text(x.device_groups, x.pairs, meshes, by_name)) for x in too_many]
    raise _unexpected(name, allowed, with_axes) from None


def find_unexpected(name: str, text: str, allowed: Allowed) -> UnexpectedCollectives | None:
    from .._program.hlo.find_collectives import read_collectives

    too_many = exceeding(allowed, read_collectives(text))
    return _unexpected(name, allowed, [(x, '') for x in too_many]) if too_many else None


def _unexpected(
    name: str, allowed: Allowed, with_axes: Sequence[tuple[Collective, str]]
) -> UnexpectedCollectives:
    """Returns the error that lists collectives and the axes that they run along."""
    facts = {'allowed': allowed_text(allowed)}
    counts = Counter((x.kind, _collective_text(x, axes)) for x, axes in with_axes)
    n_distinct = Counter(kind for kind, _ in counts)
    number: Counter[str] = Counter()
    for (kind, text), n in counts.items():
        number[kind] += 1
        label = kind if n_distinct[kind] == 1 else f'{kind} {number[kind]}'
        facts[label] = text if n == 1 else f'{n} times: {text}'
    found = counts_text([collective for collective, _ in with_axes])
    return UnexpectedCollectives(f'{name} has unexpected collectives: {found}', facts=facts)


def check_memory(name: str, compiled: Any, limit: int) -> None:
    from .._program.hlo.graph import Graph
    from .._program.hlo.memory import read_memory
    from .._program.hlo.temporaries import largest_temporaries
    from .._program.hlo.text import HloModule

    memory = read_memory(compiled)
    if memory is None:
        raise EinshardError(f'cannot read the memory of {name}: the backend does not report it')
    if memory.total <= limit:
        return
    text = compiled.as_text()
    largest = largest_temporaries(Graph(HloModule(text)), 3) if text else ()
    texts: list[str] = []
    for x in largest:
        source = f', {short_source(x.source)}' if x.source else ''
        array = f'{x.count} x {x.array}' if x.count > 1 else x.array
        texts.append(f'{array} ({format_bytes(x.bytes)}){source}')
    raise MemoryExceeded(
        f'{name} needs {format_bytes(memory.total)} of memory on each device',
        facts={
            'allowed': format_bytes(limit),
            **memory.parts,
            **{f'largest temporary {i}': temporary for i, temporary in enumerate(texts, 1)},
        },
    ) from None


def exceeding(allowed: Allowed, collectives: Sequence[Collective]) -> list[Collective]:
    counts = Counter(x.kind for x in collectives)
    return [x for x in collectives if counts[x.kind] > allowed.get(x.kind, 0)]


def counts_text(collectives: Sequence[Collective]) -> str:
    """Returns '2 all-reduces, 1 all-gather'."""
    counts = Counter(x.kind for x in collectives)
    return ', '.join(plural(n, kind) for kind, n in counts.items())


def program_text(name: str, compiled: Any) -> str:
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:  # as JAX 0.10 for tpu7x, with libtpu 0.0.52
        raise EinshardError(
            f'JAX {jax.__version__} cannot read the compiled program of {name}',
            code='does-not-compile',
            facts={
                'it says': first_line(error),
                'instead': "install the compiler of this version of JAX: pip install 'jax[tpu]'",
            },
        ) from error
    if text is None:
        raise EinshardError(
            f'cannot read the collectives of {name}: the backend does not expose the compiled '
            'program'
        )
    return text


def allowed_text(allowed: Allowed) -> str:
    """Returns 'at most 1 all-reduce, any number of all-gathers'."""
    texts = [
        f'any number of {kind}s' if limit == math.inf else f'at most {plural(int(limit), kind)}'
        for kind, limit in allowed.items()
        if limit
    ]
    return ', '.join(texts) or 'no collectives'


def _collective_text(collective: Collective, axes: str) -> str:
    array = f'{short_arrays(collective.arrays)} ({format_bytes(collective.bytes)})'
    groups = f'{collective.groups} groups of ' if collective.groups > 1 else ''
    along_axes = f' along {axes}' if axes not in ('', 'all') else ''  # 'along all' is redundant
    among = f'{groups}{plural(collective.group_size, "device")}{along_axes}'
    executions = f', {collective.executions} executions' if collective.executions != 1 else ''
    unknown = '' if collective.is_exact else ', in a loop of unknown length'
    source = f', {short_source(collective.source)}' if collective.source else ''
    return f'{array}, {among}{executions}{unknown}{source}'


class Budget:
    """Checks the limits of a function on collectives and memory."""

    def __init__(self, name: str, limits: Limits):
        self.name = name
        self.limits = limits
        self._warned = False

    def check(self, compiled: Any, sharded_by: Callable[[Any], ShardedBy] | None) -> None:
        limits = self.limits
        if limits.collectives is not None:
            check_promise(self.name, compiled, limits.collectives, sharded_by)
        if limits.memory is not None:
            check_memory(self.name, compiled, limits.memory)

    def allows(self, compiled: Any) -> bool:
        try:
            self.check(compiled, None)
        except EinshardError:
            return False
        return True

    def warn_unchecked(self) -> None:
        """Warns once that no limits are checked under a transformation outside `jax.jit`.

        Inside `jax.jit`, the function is part of another program, so its limits do not apply.
        """
        if self._warned or is_staging():
            return
        self._warned = True
        limits = {'collectives=': self.limits.collectives, 'memory=': self.limits.memory}
        options = [option for option, limit in limits.items() if limit is not None]
        verb = 'is' if len(options) == 1 else 'are'
        arguments = ', '.join(f'{option}...' for option in options)
        warnings.warn(
            f'{" and ".join(options)} of {self.name} {verb} not checked inside jax.grad, jax.vmap '
            'or another transformation that runs outside jax.jit; '
            f'use sharded(..., {arguments})(jax.grad({self.name}))',
            stacklevel=user_stacklevel(),
        )


@dataclass(eq=False)
class CheckedJit:
    """A jitted function that checks the limits on collectives and memory of its programs.

    A program is checked when it has been compiled, before it runs: JAX reports each compilation to
    `compile_events`, and an error raised there stops the call, and is raised again by the next one.
    Checks inside the trace would make later calls take jit's slow path (80 to 250 us).

    If JAX does not report compilations (a version with other events, or after
    `jax.monitoring.clear_event_listeners`), the first program is checked before it runs, and others
    before their result is returned: each compilation follows a trace, so the function records its
    traces. A thread may run a program that another thread has traced but not checked, so a call
    checks its program if any trace is unchecked, or if a failed check replaced the function.
    """

    budget: Budget
    function: Callable[..., Any]
    sharded_by: Callable[[Sequence[Any], Any], ShardedBy]
    mesh: Callable[[], Any]
    options: Mapping[str, Any]
    nested: Callable[..., Any]

    def __post_init__(self) -> None:
        # stored, so that callers can compare it with `is`: each `self._call` is a new object
        self.call = self._call
        self._reset()

    def _call(self, *values: Any) -> Any:
        if is_tracing():
            self.budget.warn_unchecked()
            return self.nested(*values)
        jitted = self._jitted
        if not jitted.first_is_checked:
            listen()
            if not sees_compilations():
                self._check(jitted, values)
        calls = this_thread.calls
        calls.append(jitted)
        try:
            result = jitted.function(*values)
        except BaseException as error:
            calls.pop()
            if isinstance(error, _Stopped):
                return self._check_stopped(jitted, values, error.program)
            if jitted.unchecked_threads:
                self._reset()  # JAX keeps the trace, but its program was not checked
            raise
        calls.pop()
        if jitted.unchecked_threads or self._jitted is not jitted:
            self._check(self._jitted, values)
        return result

    def clear_cache(self) -> None:
        self._jitted.function.clear_cache()
        self._reset()

    def _reset(self) -> None:
        """Replaces the jitted function, so that all programs are checked again."""
        self._jitted = _Jitted(self.budget, self.function, self.options)

    def _check(self, jitted: _Jitted, values: Sequence[Any]) -> None:
        # no lock: tracing runs user code, which may wait for a thread that calls this function
        try:
            compiled = jitted.function.trace(*values).lower().compile()
            self.budget.check(compiled, functools.partial(self.sharded_by, values))
        except BaseException:
            self._reset()
            raise
        jitted.mark_checked()

    def _check_stopped(self, jitted: _Jitted, values: Sequence[Any], program: Any) -> Any:
        """Checks the program of a call that `on_compiled` has stopped, and runs it if allowed.

        JAX keeps no program of a stopped call, so no other thread can run it.
        """
        sharded_by = functools.partial(self.sharded_by, values)
        if program is not None:
            shardings = [x.sharding for x in jtu.tree_leaves(values) if isinstance(x, jax.Array)]
            shardings.append(NamedSharding(self.mesh(), PartitionSpec()))
            result = jitted.function.eval_shape(*values)
            self.budget.check(_Loaded(program, shardings, result), sharded_by)
        # another jitted function, whose program no other thread can run before it is checked
        again = _Jitted(self.budget, self.function, self.options).function
        self.budget.check(again.trace(*values).lower().compile(), sharded_by)
        this_thread.calls.append(None)
        try:
            return jitted.function(*values)
        finally:
            this_thread.calls.pop()


class _Stopped(Exception):
    """Stops a call whose program is not allowed, or was not found (`program` is None)."""

    def __init__(self, program: Any):
        super().__init__()
        self.program = program


class _Jitted:
    """A jitted function, and the state of its checks."""

    def __init__(
        self, budget: Budget, function: Callable[..., Any], options: Mapping[str, Any]
    ) -> None:
        self._budget = budget
        self.first_is_checked = False
        # ids of threads that have traced, but not checked, a program
        self.unchecked_threads = unchecked_threads = set[int]()

        @functools.wraps(function)
        def record_trace(*values: Any) -> Any:
            unchecked_threads.add(threading.get_ident())
            this_thread.calls.append(None)  # programs compiled in the trace are not this one
            try:
                return function(*values)
            finally:
                this_thread.calls.pop()

        self.function: Any = jax.jit(record_trace, **options)

    def mark_checked(self) -> None:
        self.unchecked_threads.discard(threading.get_ident())
        self.first_is_checked = True

    def on_compiled(self, name: str, programs: Sequence[Any]) -> None:
        if name != self.function.__name__:  # a transfer of an argument
            return
        self.mark_checked()
        rejected = [x for x in programs if not self._budget.allows(_Loaded(x))]
        if rejected or not programs:
            raise _Stopped(rejected[0] if len(programs) == 1 else None)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A loaded program, with the methods of `jax.stages.Compiled` that checks need."""

    program: Any
    input_shardings: Sequence[Any] = ()
    out_info: Any = None

    def as_text(self) -> str:
        return loaded_text(self.program)

    def memory_analysis(self) -> Any:
        try:
            return self.program.get_compiled_memory_stats()
        except jax.errors.JaxRuntimeError:  # some backends do not report it
            return None
