"""The command `einshard eject`."""

from __future__ import annotations

from collections.abc import Sequence

from .._eject.to_jax import to_jax
from .arguments import load, mesh_of
from .options import ARGUMENT_HELP, Parser, abstract_mesh_of, mesh_for, read_call

_EXAMPLES = """\
examples:
  {prog} eject 'a b -> a2* b*' --devices 8
  {prog} eject 'b d -> b@data d@tp' --mesh data=4 tp=2
  {prog} eject model:rules --args model:init_params --mesh data=4 tp=2
  {prog} eject model:step --args model:init_state 'i32[16,64]' --topology v5e:4x4
"""


def run(arguments: Sequence[str]) -> str:
    parser = Parser(
        'eject',
        'Writes an expression, rules or a sharded function as plain JAX, without einshard.',
        _EXAMPLES,
    )
    parser.add_mesh()
    parser.add_argument('what', help='an expression, or module:name for rules or a function')
    parser.option('--shape', 'SIZE', 'the shape of the array', type=int, nargs='*')
    parser.add_args(f'the pytree that rules shard, or {ARGUMENT_HELP}')
    parser.add_topology()
    options = parser.parse_args(arguments)
    is_expression = ':' not in options.what
    if is_expression and options.topology is None:
        mesh = abstract_mesh_of(options)
    else:
        mesh = mesh_of(options.devices, options.mesh, options.topology)
    what = options.what if is_expression else load(options.what)
    what, args, kwargs = read_call(to_jax, what, mesh, options)
    with mesh_for(what, mesh, options) as mesh_option:
        return to_jax(what, *args, mesh=mesh_option, shape=options.shape, **kwargs)
