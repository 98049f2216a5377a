"""The command `einshard why`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .explain_command import explain_call
from .options import Parser

_EXAMPLES = """\
examples:
  {prog} why model:step --args model:init_state 'i32[16,64]' --topology v5e:4x4
  {prog} why model:step model.py:34 params/head --args model:init_state --mesh data=4 tp=2
"""


def run(arguments: Sequence[str]) -> str:
    parser = Parser(
        'why',
        'Says why a compiled function has its collectives, and why values are sharded as they are.',
        _EXAMPLES,
    )
    parser.add_function()
    text = 'a line, such as model.py:34, or the path of an argument or result; '
    text += 'without one, all collectives'
    parser.option('places', 'place', text, nargs='*')
    options = parser.parse_args(arguments)
    report = explain_call(options, tries=0)
    found = [report.why(place) for place in options.places or report.collectives]
    if options.json:
        return json.dumps([each.to_dict() for each in found], indent=2)
    return '\n\n'.join(dict.fromkeys(map(str, found))) or 'the program has no collectives'
