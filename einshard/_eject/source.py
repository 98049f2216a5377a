"""Formats statements and modules as `ruff format` does."""

from __future__ import annotations

import ast
import itertools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .._errors import printable

_WIDTH = 88  # the default of ruff
_IMPORTS = {  # keyed by the names that they define
    're': 'import re\n',
    'jax': 'import jax',
    'np': 'import numpy as np',
    'AxisType Mesh NamedSharding': 'from jax.sharding import {}',
    'P': 'from jax.sharding import PartitionSpec as P',
}


@dataclass(frozen=True, slots=True)
class Brackets:
    """Code in brackets. `start` ends with the opening bracket, as in 'P(' or "'w': [".

    Code that does not fit on one line has its items on the next line if it is a call and they fit
    there. If not, it has one item per line.
    """

    start: str
    items: tuple[Code, ...]
    end: str = ')'

    @property
    def is_call(self) -> bool:
        """Whether the bracket follows a name, as in 'P(' but not in 'x = ('."""
        return re.search(r'\w\($', self.start) is not None

    def __str__(self) -> str:
        is_one_tuple = len(self.items) == 1 and self.start.endswith('(') and not self.is_call
        return f'{self.start}{", ".join(map(str, self.items))}{"," * is_one_tuple}{self.end}'


Code: TypeAlias = str | Brackets


def labeled(label: str, code: Code) -> Code:
    """Puts `label`, such as 'sharding = ' or 'out_shardings=', before an expression."""
    if isinstance(code, str):
        return label + code
    return Brackets(label + code.start, code.items, code.end)


def lines(code: Code, after: str = '', indent: int = 0) -> list[str]:
    """Returns the lines of an expression or a statement, with `after`, such as ',', at the end."""
    pad = ' ' * indent
    line = f'{pad}{code}{after}'
    if isinstance(code, str) or not code.items or len(line) <= _WIDTH:
        return [line]
    body = [f'{pad}    {", ".join(map(str, code.items))}']
    if not code.is_call or len(body[0]) > _WIDTH:
        body = [line for item in code.items for line in lines(item, ',', indent + 4)]
    return [f'{pad}{code.start}', *body, f'{pad}{code.end}{after}']


def statement(code: Code) -> str:
    return '\n'.join(lines(code))


def comment(text: str) -> str:
    """Writes text that may come from the user, such as a name or a path, as a comment."""
    return f'# {printable(text)}'


def docstring(text: str) -> str:
    escaped = printable(text).replace('\\', '\\\\').replace('"', '\\"')
    return f'"""{escaped}"""'


def literal(text: str) -> str:
    # not `repr`, which an Enum with string values replaces by <Axis.DATA: 'data'>
    return str.__repr__(text)


def identifier(name: str) -> str:
    """Makes an identifier of a name: `args_0` of 'args[0]'."""
    name = unicodedata.normalize('NFKC', name)
    words = ''.join(c if f'_{c}'.isidentifier() else ' ' for c in name).split()
    found = '_'.join(words).strip('_') or 'function'
    return found if found.isidentifier() else f'_{found}'


def is_identifier(name: str) -> bool:
    """Whether Python reads a name as it is written: it normalizes identifiers to NFKC."""
    return name.isidentifier() and name == unicodedata.normalize('NFKC', name)


def module(header: str, parts: Sequence[str]) -> str:
    """Returns the text of a module: `header` as a comment, its imports, and the parts."""
    # constraints are written as comments, but users paste them as code, which needs the imports
    code = re.sub(r'^#     (?=x = )', '', '\n'.join(parts), flags=re.MULTILINE)
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    found = ((text, [n for n in names.split() if n in used]) for names, text in _IMPORTS.items())
    imports = '\n'.join(text.format(', '.join(names)) for text, names in found if names)
    text = comment(header)
    for before, part in itertools.pairwise(['', *filter(None, [imports, *parts])]):
        # one blank line between parts, two before and after functions, none after the header
        is_function = re.search('^def ', f'{before}\n{part}', re.MULTILINE)
        text += ('\n\n\n' if is_function else '\n\n') if before else '\n'
        text += part
    return f'{text}\n'
