"""The command `einshard profile`."""

from __future__ import annotations

from collections.abc import Sequence

from .._explain.profile import profile
from .arguments import load, mesh_of, replicated, zeros
from .options import Parser, mesh_for, positive_int, read_call, save_report, text_of

_EXAMPLES = """\
examples:
  {prog} profile model:step --args model:init_state 'i32[16,64]'
  {prog} profile model:step --args model:init_state --runs 10 --save step.html
  {prog} profile model:step --args model:init_state --mesh data=4 tp=2
The last one simulates 8 devices on one CPU: its times show what is joined, not what it costs.
"""


def run(arguments: Sequence[str]) -> str:
    parser = Parser(
        'profile',
        'Runs a function on the devices of this machine, and reports on it with measured times.\n'
        'Arrays of --args are zeros.',
        _EXAMPLES,
    )
    parser.add_function(has_topology=False)
    parser.add_save()
    parser.option('--runs', 'N', 'trace N calls (default: 5)', type=positive_int, default=5)
    text = 'compile up to N changes in search of suggestions (default: 0)'
    parser.option('--tries', 'N', text, type=int, default=0)
    options = parser.parse_args(arguments)
    mesh = mesh_of(options.devices, options.mesh, None)
    function, args, kwargs = read_call(profile, load(options.function), mesh, options)
    with mesh_for(function, mesh, options) as mesh_option:
        if mesh_option is not None:  # a plain function: as `explain` with mesh=, replicated
            args, kwargs = replicated((args, kwargs), mesh_option)
        args, kwargs = zeros((args, kwargs))
        report = profile(
            *(function, *args),
            runs=options.runs,
            chip=options.chip,
            tries=options.tries,
            **kwargs,
        )
    save_report(report, options)
    return text_of(report, options)
