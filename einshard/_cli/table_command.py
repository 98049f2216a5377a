"""The command `einshard table`."""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import EinshardError
from .._trees.rules import Rules
from .arguments import is_plain_function, load, read_arguments, result_shapes
from .options import Parser, abstract_mesh_of

_EXAMPLES = """\
examples:
  {prog} table model:rules model:init_params --devices 8
  {prog} table model:rules model:init_params --args 'u32[2]' --mesh data=4 tp=2
"""


def run(arguments: Sequence[str]) -> str:
    parser = Parser('table', 'Shows how rules shard the arrays of a model.', _EXAMPLES)
    parser.add_mesh()
    parser.add_argument('rules', metavar='module:rules')
    parser.option('tree', 'module:init', 'a pytree of arrays, or a function that returns one')
    parser.add_args()
    options = parser.parse_args(arguments)
    rules, tree = load(options.rules), load(options.tree)
    if not isinstance(rules, Rules):
        raise EinshardError(
            f'{options.rules} is of type {type(rules).__name__}, not Rules', code='command'
        )
    args, kwargs = read_arguments(options.args)
    if is_plain_function(tree):
        tree = result_shapes(tree, args, kwargs)
    elif args or kwargs:
        kind = type(tree).__name__
        raise EinshardError(
            f'{options.tree} is of type {kind}, which takes no arguments', code='command'
        )
    return str(rules.table(tree, mesh=abstract_mesh_of(options)))
