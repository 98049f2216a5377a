"""Writes the placements of arguments and results, as code to paste or into `in_shardings=`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
from jax.sharding import NamedSharding

from ..._program.edits.call import JittedCall
from ..._program.edits.edit import Edit, placements
from .files import Source, read_source
from .scope import Scope, visible
from .write import Change, Missing, Option, placed


def rules_text(placements: Mapping[str, str], others: Sequence[str]) -> str:
    """Writes `Rules` by path. Layers share a rule, unless that matches one of the `others`.

    >>> from einshard._explain.patch.arguments import rules_text
    >>> print(rules_text({'0/up': 'a b*', '1/up': 'a b*', 'out': 'a* b'}, ['0/down', '1/down']))
    Rules([
        (r'^\\d+/up$', 'a b*'),
        (r'^out$', 'a* b'),
    ], default=None)
    """
    rules: dict[str, str] = {}
    for path, placement in placements.items():
        parts = (r'\d+' if part.isdigit() else re.escape(part) for part in path.split('/'))
        pattern = f'^{"/".join(parts)}$'
        same = {placements.get(each) for each in (*placements, *others) if re.search(pattern, each)}
        rules[pattern if same == {placement} else f'^{re.escape(path)}$'] = placement
    lines = (f'    (r{pattern!r}, {placement!r}),\n' for pattern, placement in rules.items())
    return f'Rules([\n{"".join(lines)}], default=None)'.replace('\\\\', '\\')


def code_to_place(shown: Mapping[str, str], paths: Sequence[str], form: str) -> list[str]:
    """Writes statements that place arrays, one for each parameter that holds some.

    Args:
        shown: {path: placement}.
        paths: those of all arrays.
        form: a statement, such as '{name} = {spec}'.
    """
    by_name: dict[str, dict[str, str]] = {}
    for path, placement in shown.items():
        name, _, rest = path.partition('/')
        by_name.setdefault(name, {})[rest] = placement
    texts: list[str] = []
    for name, leaves in by_name.items():
        others = [
            rest for path in paths for first, _, rest in [path.partition('/')] if first == name
        ]
        spec = repr(leaves['']) if '' in leaves else rules_text(leaves, others)
        texts.append(form.format(name=name, spec=spec))
    return texts


def in_jit(function: Any, call: JittedCall, edits: Sequence[Edit]) -> list[Option]:
    """Returns how to write placements into `in_shardings=` and `out_shardings=` of a function.

    Only those of arrays that are an argument or an element of the result.
    """
    function = inspect.unwrap(function)
    code = getattr(function, '__code__', None)
    source = None if code is None else read_source(code.co_filename)
    if source is None:
        return []
    moved, returned = placements(edits)
    args, _ = call.args_tree.unflatten(range(len(call.leaves)))
    dynamic = {leaf: i for i, leaf in enumerate(call.dynamic)}
    args = [each for each in args if {*jtu.tree_leaves(each)} & {*dynamic}]
    n_results = call.result_tree.num_leaves
    results = call.result_tree.unflatten(range(n_results))
    results = results if isinstance(results, tuple) else (results,)
    shardings: dict[str, list[NamedSharding | None]] = {
        'in_shardings': [
            moved.get(dynamic.get(a, -1)) if isinstance(a, int) else None for a in args
        ],
        'out_shardings': [returned.get(r) if isinstance(r, int) else None for r in results],
    }
    found: list[Option] = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or not _jits(source, node, function.__name__):
            continue
        names, functions = visible(source, node, (), function.__globals__)
        scope = Scope(source, node, names, functions=functions)
        for keyword in node.keywords:
            new, given = shardings.get(keyword.arg or '', []), keyword.value
            elements = given.elts if isinstance(given, ast.Tuple) else [given]
            if len(elements) != len(new):
                continue
            for element, sharding in zip(elements, new, strict=True):
                if sharding is not None:
                    try:
                        found.append(placed(Change('replace', (), sharding, ''), scope, element))
                    except Missing:  # the mesh has no name there: the comment says what to change
                        continue
    return found


def _jits(source: Source, call: ast.Call, name: str) -> bool:
    """Whether a call decorates a function, or has it as its first argument."""
    around = source.parents.get(call)
    if isinstance(around, ast.FunctionDef) and call in around.decorator_list:
        return around.name == name
    return bool(call.args) and getattr(call.args[0], 'id', '') == name
