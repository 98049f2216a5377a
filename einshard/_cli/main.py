"""The command `einshard`: what each command does is in a module of its name."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from .._errors import EinshardError
from .._progress import log_progress
from .arguments import with_options
from .options import cannot_write, program
from .show_command import show_parser

# each is in <name>_command.py, which is imported when it runs
_COMMANDS = (
    *('show', 'explain', 'profile', 'why', 'plan', 'move', 'table', 'eject', 'compare', 'check'),
    *('doctor', 'skill'),
)
_ASCII = str.maketrans('─│┌┬┐├┼┤└┴┘█░', '-|+++++++++#.')


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            text, status = _run(arguments) if arguments else (show_parser().format_help(), 0)
        except SystemExit:  # argparse has printed help or an error
            _print('')
            raise
        _print(text.rstrip('\n') + '\n')
    except EinshardError as error:
        print(f'einshard.EinshardError: {with_options(error, arguments)}', file=sys.stderr)
        return 2
    return status


def _run(arguments: Sequence[str]) -> tuple[str, int]:
    """Returns what a command prints, and its exit status."""
    name = arguments[0]
    # a misspelled command is also a valid expression, with one unsharded axis
    near = difflib.get_close_matches(name, _COMMANDS, n=1, cutoff=0.7)
    if near and name not in _COMMANDS:
        raise EinshardError(
            f"'{name}' is not a command", code='command', fix=f'{program()} {near[0]}'
        )
    if name in _COMMANDS:
        arguments = arguments[1:]
    else:
        name = 'show'
    done = importlib.import_module(f'.{name}_command', __package__).run(arguments)
    return done if isinstance(done, tuple) else (done, 0)


def _print(text: str) -> None:
    """Prints text, with ASCII or '?' for characters that the encoding lacks.

    Raises an EinshardError if standard output cannot be written, as on a full disk.
    """
    encoding = sys.stdout.encoding or 'utf-8'
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, 'replace').decode(encoding)
    try:
        print(text, end='', flush=True)
    except OSError as error:
        # Python flushes stdout again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # of a reader such as `head`
            raise cannot_write('standard output', error) from None


def script() -> int:
    """Runs the command of this process, with the current folder on `sys.path`."""
    log_progress()
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    return main()
