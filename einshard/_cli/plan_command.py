"""The command `einshard plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .._plan.plan import plan
from .arguments import load, mesh_of
from .options import Parser, positive_int, read_call, text_of

_EXAMPLES = """\
examples:
  {prog} plan model:step --args model:init_state 'i32[16,64]' --topology v5e:4x4
  {prog} plan model:step --args model:init_state 'i32[16,64]' --devices 8 --chip H100
  {prog} plan model:step --args model:init_state --topology v5e:4x4 --pin embed=@x layers=
"""


def run(arguments: Sequence[str]) -> str:
    parser = Parser(
        'plan',
        'Finds how to shard a function that names its axes.\n'
        '--mesh fixes the mesh shape, so that only the placement of each named axis is planned.',
        _EXAMPLES,
    )
    parser.add_function()
    parser.option('--memory', 'SIZE', "the limit per device, such as '14 GB'")
    text = 'what to minimize: bound (the default), bytes or memory'
    parser.option('--objective', 'NAME', text, default='bound')
    text = 'fix the placement of a named axis; NAME= keeps it unsharded'
    parser.option('--pin', 'NAME=@AXIS', text, type=_pin, nargs='+', default=[])
    text = 'compile at most N candidates'
    parser.option('--compilations', 'N', text, type=positive_int, default=40)
    parser.option('--seconds', 'S', 'stop after S seconds', type=float)
    options = parser.parse_args(arguments)
    mesh = mesh_of(options.devices, options.mesh, options.topology)
    function, args, kwargs = read_call(plan, load(options.function), mesh, options)
    found = plan(
        function,
        *args,
        mesh=mesh,
        chip=options.chip,
        memory=options.memory,
        objective=options.objective,
        pin=dict(options.pin),
        compilations=options.compilations,
        seconds=options.seconds,
        **kwargs,
    )
    return text_of(found, options)


def _pin(text: str) -> tuple[str, str]:
    """Reads a pinned placement: ('embed', '@x') for 'embed=@x'."""
    name, equals, placement = text.partition('=')
    if not (name and equals):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not an axis name with its placement, such as embed=@x'
        )
    return name, placement
