"""The command `einshard skill`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .options import Parser


def run(arguments: Sequence[str]) -> str:
    Parser(
        'skill',
        'Prints the path of the skill of einshard: a folder that coding agents read.\n'
        'library-skills finds it, too. Without it, copy or link the folder to .agents/skills/.',
    ).parse_args(arguments)
    return str(Path(__file__).parents[1] / '.agents' / 'skills' / 'einshard')
