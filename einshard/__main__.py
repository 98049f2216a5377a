"""python -m einshard: the picture of an expression, on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jax.sharding import AbstractMesh, AxisType

from ._draw import show
from ._errors import EinshardError

_EXAMPLES = """\
examples:
  python -m einshard 'a b -> 2 a2* b*' --shape 4 8 --devices 16
  python -m einshard 'a b -> a4 b2'
  python -m einshard 'b d -> b@data d@tp' --shape 32 512 --mesh data=4 tp=2
  python -m einshard '... -> * ...' --shape --devices 8
"""
_ASCII = str.maketrans('─│┌┬┐├┼┤└┴┘', '-|+++++++++')


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help()
        return 0
    return _draw(parser.parse_args(arguments))


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
        type=_mesh_axis,
        nargs='+',
        metavar='AXIS=SIZE',
        help="a mesh by its axes, slowest first, for expressions such as 'b d -> b@data d'",
    )
    return parser


def _mesh_axis(text: str) -> tuple[str, int]:
    name, _, size = text.partition('=')
    if not name or not size.isdecimal() or int(size) == 0:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a mesh axis with its size, as in data=4 '
            '(the expression goes before --mesh)'
        )
    return name, int(size)


def _draw(options: argparse.Namespace) -> int:
    try:
        devices = options.devices if options.mesh is None else _abstract_mesh(options.mesh)
        picture = show(options.expression, options.shape, devices)
    except EinshardError as error:
        print(f'einshard.EinshardError: {error}', file=sys.stderr)
        return 2
    print(_printable(repr(picture), sys.stdout.encoding))
    return 0


def _abstract_mesh(axes: Sequence[tuple[str, int]]) -> AbstractMesh:
    names = [name for name, _ in axes]
    again = sorted({name for name in names if names.count(name) > 1})
    if again:
        raise EinshardError(f"--mesh gives the axis '{again[0]}' more than once")
    sizes = tuple(size for _, size in axes)
    return AbstractMesh(sizes, tuple(names), axis_types=(AxisType.Auto,) * len(axes))


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
