"""The command `einshard plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .._plan.plan import plan
from .arguments import load, mesh_of
from .options import function_parser, positive_int, read_call, text_of

_EXAMPLES = """\
examples:
  {prog} plan model:step --args model:init_state 'i32[16,64]' --topology v5e:4x4
  {prog} plan model:step --args model:init_state 'i32[16,64]' --devices 8 --chip H100
  {prog} plan model:step --args model:init_state --topology v5e:4x4 --pin embed=@x layers=
"""


def run(arguments: Sequence[str]) -> str:
    parser = function_parser(
        'plan',
        'Finds how to shard a function that names its axes.\n'
        '--mesh fixes the mesh shape, so that only the placement of each named axis is planned.',
        _EXAMPLES,
    )
    parser.add_argument('--memory', metavar='SIZE', help="the limit per device, such as '14 GB'")
    parser.add_argument(
        '--objective',
        default='bound',
        metavar='NAME',
        help='what to minimize: bound (the default), bytes or memory',
    )
    parser.add_argument(
        '--pin',
        type=_pin,
        nargs='+',
        default=[],
        metavar='NAME=@AXIS',
        help='fix the placement of a named axis; NAME= keeps it unsharded',
    )
    parser.add_argument(
        '--compilations',
        type=positive_int,
        default=40,
        metavar='N',
        help='compile at most N candidates',
    )
    parser.add_argument('--seconds', type=float, metavar='S', help='stop after S seconds')
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
