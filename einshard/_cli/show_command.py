"""The command `einshard show`, whose name may be omitted."""

from __future__ import annotations

from collections.abc import Sequence

from .._draw.show import show
from .arguments import abstract_mesh
from .options import Parser

_EXAMPLES = """\
examples:
  {prog} 'a b -> 2 a2* b*' --shape 4 8 --devices 16
  {prog} 'a b -> a4 b2'
  {prog} 'b d -> b@data d@tp' --shape 32 512 --mesh data=4 tp=2
  {prog} '... -> * ...' --shape --devices 8
  {prog} explain model:step --args model:init_state 'i32[16,64]' --topology v5e:4x4
other commands ('show' may be omitted):
  {prog} explain --help     compile a function and list its collectives
  {prog} profile --help     run a function, and report on it with measured times
  {prog} why --help         say why a function has its collectives
  {prog} plan --help        find the sharding of a function
  {prog} compare --help     compile a function for several targets and sizes
  {prog} check --help       say what a change of the code does to its programs
  {prog} move --help        show what it costs to move arrays to other placements
  {prog} table --help       show how rules shard the arrays of a model
  {prog} eject --help       write a sharding as plain JAX
  {prog} doctor --help      say what is installed, and what that allows
  {prog} skill --help       print the path of the skill for coding agents
"""


def show_parser() -> Parser:
    text = 'Draws which devices hold which block of an array.\nThe devices do not have to exist.'
    parser = Parser('', text, _EXAMPLES)
    parser.add_mesh()
    parser.add_argument('expression', help="the placement, such as 'a b -> 2 a2* b*'")
    text = 'the shape of the array; if omitted, the parts of each axis are numbered'
    parser.option('--shape', 'SIZE', text, type=int, nargs='*')
    return parser


def run(arguments: Sequence[str]) -> str:
    options = show_parser().parse_args(arguments)
    devices = options.devices if options.mesh is None else abstract_mesh(options.mesh)
    return repr(show(options.expression, options.shape, devices))
