"""python -m einshard: pictures of expressions, reports of functions, tables of rules."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence

from ._commands import abstract_mesh, mesh_axis, run_explain, run_table
from ._errors import EinshardError
from ._pictures.draw import show

_EXAMPLES = """\
examples:
  python -m einshard 'a b -> 2 a2* b*' --shape 4 8 --devices 16
  python -m einshard 'a b -> a4 b2'
  python -m einshard 'b d -> b@data d@tp' --shape 32 512 --mesh data=4 tp=2
  python -m einshard '... -> * ...' --shape --devices 8
other commands:
  python -m einshard explain --help     what the compiler made of a function
  python -m einshard table --help       what rules make of the arrays of a model
"""
_ASCII = str.maketrans('─│┌┬┐├┼┤└┴┘', '-|+++++++++')


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        _parser().print_help()
        return 0
    commands = {'explain': run_explain, 'table': run_table}
    try:
        if arguments[0] in commands:
            text = commands[arguments[0]](arguments[1:])
        else:
            _check_command(arguments[0], commands)
            text = _draw(arguments)
    except EinshardError as error:
        print(f'einshard.EinshardError: {error}', file=sys.stderr)
        return 2
    print(_printable(text, sys.stdout.encoding))
    return 0


def _check_command(word: str, commands: Iterable[str]) -> None:
    """Raises for a command with a slip in it, which as an expression is an axis that is not cut."""
    near = difflib.get_close_matches(word, commands, n=1, cutoff=0.7)
    if near:
        raise EinshardError(f"'{word}' is no command", fix=f'python -m einshard {near[0]}')


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m einshard',
        description='Draws which devices hold which block of an array,\n'
        'from an expression alone: the devices need not exist.',
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('expression', help="the placement, as in 'a b -> 2 a2* b*'")
    parser.add_argument(
        '--shape',
        type=int,
        nargs='*',
        metavar='SIZE',
        help='the shape of the array; without it the blocks are numbered',
    )
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument(
        '--devices',
        type=int,
        metavar='N',
        help='how many devices; needed where the expression has a star',
    )
    devices.add_argument(
        '--mesh',
        type=mesh_axis,
        nargs='+',
        metavar='AXIS=SIZE',
        help="a mesh by its axes, slowest first, for expressions such as 'b d -> b@data d'",
    )
    return parser


def _draw(arguments: Sequence[str]) -> str:
    options = _parser().parse_args(arguments)
    devices = options.devices if options.mesh is None else abstract_mesh(options.mesh)
    return repr(show(options.expression, options.shape, devices))


def _printable(text: str, encoding: str | None) -> str:
    """The text with plain boxes where the output has no characters for them, as in cp1252."""
    try:
        text.encode(encoding or 'utf-8')
    except UnicodeEncodeError:
        plain = text.translate(_ASCII).encode(encoding or 'utf-8', 'replace')
        return plain.decode(encoding or 'utf-8')
    return text


if __name__ == '__main__':
    sys.exit(main())
