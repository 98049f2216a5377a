"""The command `einshard move`."""

from __future__ import annotations

from collections.abc import Sequence

from .._move.explain_move import explain_move
from .arguments import (
    call_with_mesh,
    is_plain_function,
    is_spec_function,
    load,
    mesh_of,
    read_arguments,
)
from .options import Parser, output_file, save_report, text_of

_EXAMPLES = """\
examples:
  {prog} move model:trained model:serving --devices 8
  {prog} move model:trained model:serving --topology h100:2x8 --mesh fsdp=8 tp=2
  where model.py has:
    def trained(mesh):  # a parameter of this name is given the mesh
        sharding = NamedSharding(mesh, P('fsdp', 'tp'))
        return {'w': jax.ShapeDtypeStruct((4096, 14336), 'bfloat16', sharding=sharding)}

    def serving(mesh):
        return NamedSharding(mesh, P(None, 'tp'))
"""


def run(arguments: Sequence[str]) -> str:
    parser = Parser(
        'move',
        'Shows what it costs to move arrays to other placements, and by which route.',
        _EXAMPLES,
    )
    parser.add_mesh('simulated CPU devices')
    text = 'a pytree of arrays or shapes with shardings, or a function that returns one'
    parser.option('tree', 'module:tree', text)
    text = 'where they go: an expression, rules, shardings, or a function that returns them'
    parser.option('spec', 'module:shardings', text)
    parser.add_topology()
    parser.add_json()
    parser.option('--save', 'FILE', "write a page if the name ends in '.html'", type=output_file)
    options = parser.parse_args(arguments)
    mesh = mesh_of(options.devices, options.mesh, options.topology)
    [tree], _ = read_arguments([options.tree], mesh)
    is_name = ':' in options.spec and '->' not in options.spec
    spec = load(options.spec) if is_name else options.spec
    if is_plain_function(spec) and not is_spec_function(spec):
        spec = call_with_mesh(spec, options.spec, mesh)
    report = explain_move(tree, spec, mesh)
    save_report(report, options)
    return text_of(report, options)
