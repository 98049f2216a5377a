"""profile: runs a function, and reports on its program with the times of the run."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.stages import Compiled

from .._chips.chip import Chip
from .._chips.table import as_chip
from .._errors import EinshardError, public
from .._functions.sharded_function import ShardedFunction
from .._progress import progress
from .._text import array_text, first_line, name_of
from .call_checks import suggest_partial
from .explain import explain_stages
from .findings.facts import Facts
from .findings.next_call import next_arguments
from .frameworks import is_jitted, jax_stage
from .report import Report
from .stages import Stages
from .trace_call import trace_to_compile

# the profiler runs one trace at a time in a process
_tracing = threading.Lock()

NO_GRAPHS: dict[str, str | bool] = {'xla_gpu_enable_command_buffer': ''}


@public
def profile(
    fn: Any,
    *args: Any,
    runs: int = 5,
    chip: Chip | str | None = None,
    tries: int = 12,
    **kwargs: Any,
) -> Report:
    """Runs a function, and reports on its program as `explain` does, with measured times.

        >>> import jax.numpy as jnp
        >>> from einshard import profile, sharded
        >>> @sharded('x* y', out='* x y')
        ... def gathered(x):
        ...     return x * 2
        >>> report = profile(gathered, jnp.ones((1024, 8)), runs=2, tries=0)
        >>> report.profile.runs
        2

    It compiles the function once, warms up, and traces `runs` calls with `jax.profiler`. A function
    that returns the next values of its arguments, such as a train step, is called with them, as the
    next step would be. Arguments that are donated, but not returned, are copied before each call.
    So no array of yours is deleted. A module of Flax NNX is updated by each call. Calls in several
    threads wait for each other's traces.

    On GPUs, the program is compiled without command buffers, which hide its instructions from the
    profiler. On simulated CPU devices, which share the cores, times show what is joined with what,
    not what it costs.

    Args:
        fn: a function, as for `explain`, that runs on the devices of this process.
        args, kwargs: arguments of the call.
        runs: how many calls to trace.
        chip, tries: as for `explain`.

    Raises:
        EinshardError: `explain` raises it; an argument is a ShapeDtypeStruct; or the profiler does
            not start, as while the program itself takes a trace.
    """
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise EinshardError(f'runs= must be a positive integer, not {runs!r}')
    if jax_stage(fn) is not None:
        raise EinshardError(
            f'profile needs the function, not its {type(fn).__name__.lower()} form', code='profile'
        )
    with suggest_partial(fn, 'chip'):
        chip = None if chip is None else as_chip(chip)
    _check_values(name_of(fn), (args, kwargs))
    if callable(fn) and not isinstance(fn, ShardedFunction) and not is_jitted(fn):
        fn = jax.jit(fn)  # once, so that the report and the calls share one compilation
    stages = trace_to_compile(fn, args, kwargs, None)
    _refuse_libtpu()
    compiled, notes = None, list[str]()
    if jax.default_backend() == 'gpu':
        compiled, note = compile_without_graphs(stages)
        notes.append(note)
    report = explain_stages(stages, chip, tries=tries, compiled=compiled)
    call = fn if compiled is None else compiled
    with tempfile.TemporaryDirectory() as folder, _tracing:
        Calls(call, args, kwargs, report.reading).trace(runs, folder)
        report = report.with_profile(folder)
    assert report.profile is not None
    measured = replace(report.profile, path='', notes=(*notes, *report.profile.notes))
    return replace(report, profile=measured)


def _refuse_libtpu() -> None:
    """Raises an error where JAX's profiler ends the process: in 0.10 with a newer libtpu."""
    maps = Path('/proc/self/maps')
    is_old = tuple(map(int, jax.__version__.split('.')[:2])) < (0, 12)
    if not is_old or jax.default_backend() == 'tpu' or not maps.exists():
        return
    if b'libtpu' not in maps.read_bytes():
        return
    found = version('libtpu')
    expected = [r for r in requires('jax') or () if r.startswith('libtpu==')]  # of jax[tpu]
    if not any(f'{found}.'.startswith(r[len('libtpu==') :].partition('*')[0]) for r in expected):
        raise EinshardError(
            f'the profiler of JAX {jax.__version__} crashes in a process that has loaded libtpu '
            f'{found}',
            code='profile',
            facts={'instead': "install the libtpu of this JAX: pip install 'jax[tpu]'"},
        )


def _check_values(name: str, tree: Any) -> None:
    for path, leaf in jtu.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise EinshardError(
                f'profile runs {name}, so its arguments must be arrays',
                code='profile',
                facts={'got': f'{type(leaf).__name__} {array_text(leaf)}', 'at': jtu.keystr(path)},
            )


def compile_without_graphs(stages: Stages) -> tuple[Compiled | None, str]:
    """Compiles a program for GPUs so that each kernel says which instruction it is of.

    A function with static arguments, or of Flax or Equinox, is called as it is.
    """
    is_plain = stages.framework is None and stages.program is None and not stages.is_filtered
    args, kwargs = stages.jitted[1:] if stages.jitted is not None else ((), {})
    lowered = stages.lower()
    if is_plain and jtu.tree_structure((tuple(args), dict(kwargs))) == lowered.in_tree:
        return (
            lowered.compile(compiler_options=NO_GRAPHS),
            'compiled without command buffers, which hide instructions: '
            "xla_gpu_enable_command_buffer=''",
        )
    return None, (
        'command buffers hide the instructions of kernels in them; to avoid that, pass '
        "compiler_options={'xla_gpu_enable_command_buffer': ''} to jax.jit"
    )


class Calls:
    """The calls of a function, each with the results of the one before, where it returns them.

    Args:
        facts: its program, which says which results are the next values of which arguments.
    """

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], facts: Facts
    ):
        self.fn, self.facts = fn, facts
        self.leaves, self.tree = jtu.tree_flatten((tuple(args), dict(kwargs)))
        arrays = [i for i, leaf in enumerate(self.leaves) if hasattr(leaf, 'dtype')]
        n = len(facts.arguments)
        # which leaf each argument of the program is; static arguments are none
        everything = range(len(self.leaves))
        known = next((at for at in (everything, arrays) if len(at) == n), None)
        self.places = [] if known is None else [*known]
        is_donated = [info.donated for info in jtu.tree_leaves(facts.stages.lower().args_info)]
        if known is None or len(is_donated) != n:
            donated = arrays  # unknown, so all are copied
        else:
            donated = [i for i, donates in zip(known, is_donated, strict=True) if donates]
        if facts.stages.framework == 'nnx':  # updates the module
            donated = []
        self.donated = set[int](donated)
        self.fed: dict[int, Any] = {}  # the values of arguments that the last call has returned

    def once(self) -> None:
        leaves = [
            self.fed[i] if i in self.fed else self._copied(leaf) if i in self.donated else leaf
            for i, leaf in enumerate(self.leaves)
        ]
        jax.block_until_ready(leaves)
        args, kwargs = self.tree.unflatten(leaves)
        result = jax.block_until_ready(self.fn(*args, **kwargs))
        self.fed = self._next_values(jtu.tree_leaves(result), leaves)

    def _copied(self, leaf: Any) -> Any:
        return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf

    def _next_values(self, results: Sequence[Any], leaves: Sequence[Any]) -> dict[int, Any]:
        """Returns the results that replace arguments, by leaf, unless they would compile again."""
        found: dict[int, Any] = {}
        facts = self.facts
        if len(results) != len(facts.results) or not self.places:
            return found
        for result, argument in next_arguments(facts).items():
            i = self.places[argument]
            old, new = leaves[i], results[result]
            if isinstance(old, jax.Array) and _is_alike(old, new):
                found[i] = new
        return found

    def trace(self, runs: int, folder: str) -> None:
        for _ in range(2):  # the second is the first with results of the program
            self.once()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # would take most of the trace
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise EinshardError(
                'the profiler does not start, as while another trace is running',
                code='profile',
                facts={'it says': first_line(error)},
            ) from error
        try:
            with progress('profiling'):
                for _ in range(runs):
                    self.once()
        finally:
            jax.profiler.stop_trace()


def _is_alike(old: jax.Array, new: jax.Array) -> bool:
    # not of the arrays: a key of random numbers has no `weak_type`
    types: list[Any] = [jax.typeof(old), jax.typeof(new)]
    same = len({(aval.shape, aval.dtype, aval.weak_type) for aval in types}) == 1
    return same and old.committed == new.committed and new.sharding == old.sharding
