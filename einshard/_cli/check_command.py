"""The command `einshard check`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .._changes.command import Options, check
from .._changes.config import KINDS, check_kinds
from .options import Parser, output_file

_EXAMPLES = """\
examples:
  {prog} check --update
  {prog} check train --fail-on bytes --fail-on does-not-fit
  {prog} check --base origin/main --markdown comment.md
where pyproject.toml has:
  [[tool.einshard.step]]
  name = "train"
  function = "model:step"
  args = ["model:state", "i32[16,64]"]
  targets = ["h100:4x8", "cpu:8"]
exit status: 0, 2 if a step cannot be compiled, 3 if --fail-on or fail_on finds something
"""


def run(arguments: Sequence[str]) -> tuple[str, int]:
    parser = Parser(
        'check',
        'Says what a change of the code does to the programs of [tool.einshard] in '
        'pyproject.toml.\nCompares them with stored reports, or with those of the merge base.',
        _EXAMPLES,
    )
    parser.option('names', 'name', 'the steps to check (default: all)', nargs='*')
    text = 'only for this target'
    parser.option('--target', 'TARGET', text, action='append', default=[], dest='targets')
    parser.flag('--update', 'write the stored reports, and remove stale ones')
    parser.option('--base', 'REF', 'compare with the merge base of HEAD and REF')
    parser.add_json()
    text = 'also write a comment for a pull request'
    parser.option('--markdown', 'FILE', text, type=output_file)
    parser.option('--save', 'FOLDER', 'also write a page for each report')
    text = f'exit with status 3 for this: {", ".join(KINDS)}'
    parser.option('--fail-on', 'KIND', text, action='append', default=[])
    given = vars(parser.parse_args(arguments))
    given['fail_on'] = check_kinds(given['fail_on'], '--fail-on')
    return check(Options(**given), Path.cwd())
