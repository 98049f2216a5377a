"""How often jax traces and compiles, as jax itself reports it."""

import contextlib
import re
from dataclasses import dataclass, field

import jax
import numpy as np

_TRACED = '/jax/core/compile/jaxpr_trace_duration'
_COMPILED = '/jax/core/compile/backend_compile_duration'
_open: list['Counts'] = []


@dataclass
class Counts:
    """Names of the functions traced and of the programs compiled, in order.

    From jax 0.9 on a trace is also reported where it is found in the cache of traces: what counts
    then is how often the body of the function runs.
    """

    traced: list[str] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)

    def of(self, name):
        """(traces, compilations) of the function called so."""
        return self.traced.count(name), self.compiled.count(f'jit({name})')


def _listen(event, duration, **about):
    for counts in _open:
        if event == _TRACED:
            counts.traced.append(str(about.get('fun_name')))
        elif event == _COMPILED:
            counts.compiled.append(str(about.get('fun_name')))


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def counting():
    """Counts what is traced and compiled while it is entered, in every thread."""
    counts = Counts()
    _open.append(counts)
    try:
        yield counts
    finally:
        _open.remove(counts)


def program(compiled):
    """The optimised program of `lower(...).compile()`, up to names and where its lines come from.

    Groups of devices are written as lists: newer compilers write them by the names of mesh axes.
    """
    text = re.sub(r', metadata=\{[^}]*\}', '', compiled.as_text())
    text = re.sub(r', (origin|stack_frame_id)=[^,\n]*', '', text)
    text = re.sub(r'=mesh\[([^\]]*)\] ?\{([^}]*)\}', _groups, text)
    # before the first computation: the name of the module, and tables of files and lines
    return text[re.search(r'^(%|ENTRY)', text, re.MULTILINE).start() :]


def _groups(found):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
    axes = re.findall(r"'(\w+)'", found[2])
    grid = np.arange(np.prod([int(size) for size in sizes.values()])).reshape(
        [int(size) for size in sizes.values()]
    )
    names = list(sizes)
    last = [names.index(axis) for axis in axes]
    others = [i for i in range(len(names)) if i not in last]
    parties = np.prod([grid.shape[i] for i in last])
    return f'={np.transpose(grid, (*others, *last)).reshape(-1, parties).tolist()}'
