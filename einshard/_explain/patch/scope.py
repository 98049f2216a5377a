"""The names that an expression can use, with their values in the program."""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding

from ..._program.hlo.sources import is_user_file
from .files import Source

_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
_PATTERNS = ast.ExceptHandler, ast.MatchAs, ast.MatchStar
_COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
_NAMED = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, *_PATTERNS
_ASSIGNMENTS = ast.Assign, ast.AnnAssign, ast.NamedExpr
UNKNOWN = object()  # the value of a variable of a function that has returned
_MAX_ENTRIES = 200  # of an object or dict, in search of a mesh


def functions_around(source: Source, node: ast.AST) -> list[ast.AST]:
    """Returns the functions and comprehensions whose names an expression sees, innermost first."""
    found = list[ast.AST]()
    child = node
    for parent in source.around(node):
        inside = getattr(parent, 'body', ())
        is_body = child is inside or (isinstance(inside, list) and child in inside)
        # decorators, defaults and the first iterable are outside
        is_inside = isinstance(parent, _FUNCTIONS) and is_body
        if isinstance(parent, _COMPREHENSIONS):
            first = parent.generators[0]
            is_inside = child is not first or node not in {*ast.walk(first.iter)}
        if is_inside:
            found.append(parent)
        child = parent
    return found


def bindings(scope: ast.AST) -> dict[str, list[ast.AST]]:
    """Returns what binds each name of a function or comprehension. Parameters are `ast.arg`."""
    found: dict[str, list[ast.AST]] = {}
    outer = set[str]()
    is_comprehension = isinstance(scope, _COMPREHENSIONS)
    if isinstance(scope, _FUNCTIONS):
        arguments = scope.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for each in (*named, arguments.vararg, arguments.kwarg):
            if each is not None:
                found.setdefault(each.arg, []).append(each)
        body = scope.body if isinstance(scope.body, list) else [scope.body]
        pending: list[ast.AST] = [*body]
    else:
        pending = [each.target for each in getattr(scope, 'generators', ())]
    while pending:
        node, names = pending.pop(), list[str]()
        if isinstance(node, ast.Name):
            names = [] if isinstance(node.ctx, ast.Load) else [node.id]
        elif isinstance(node, ast.alias):
            names = [node.asname or node.name.partition('.')[0]]
        elif isinstance(node, ast.Global | ast.Nonlocal):
            outer |= {*node.names}
        elif isinstance(node, _NAMED):
            names = [node.name] if node.name else []
        elif isinstance(node, ast.MatchMapping):
            names = [node.rest] if node.rest else []
        for name in names:
            found.setdefault(name, []).append(node)
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            continue
        if isinstance(node, _COMPREHENSIONS) and not is_comprehension:
            walrus = (each for each in ast.walk(node) if isinstance(each, ast.NamedExpr))
            pending += [each.target for each in walrus]
            continue
        pending += ast.iter_child_nodes(node)
    return {name: nodes for name, nodes in found.items() if name not in outer}


@dataclass
class Scope:
    """The names that an expression can use, innermost first, with their values.

    Attributes:
        names: the value of each, or `UNKNOWN`.
        source, node: the expression.
        bare_mesh: the mesh of a constraint with a PartitionSpec there, or None.
        einshard_mesh: the mesh of an expression of einshard there without `mesh=`.
    """

    source: Source
    node: ast.AST
    names: Mapping[str, Any]
    bare_mesh: Any = None
    einshard_mesh: Any = None
    functions: Sequence[ast.AST] = field(default_factory=tuple)

    def value(self, node: ast.AST | None) -> Any:
        """Returns the value of a name, an attribute or an entry. UNKNOWN for other expressions."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute | ast.Subscript):
            found = self.value(node.value)
            try:
                if found is UNKNOWN:
                    return UNKNOWN
                if isinstance(node, ast.Attribute):
                    return getattr(found, node.attr)
                return found[ast.literal_eval(node.slice)]
            except Exception:  # whatever the property of an object raises
                return UNKNOWN
        return UNKNOWN

    def spell(self, dotted: str) -> str | None:
        """Returns an expression for a public object such as 'jax.sharding.NamedSharding'."""
        parts = dotted.split('.')
        for n in range(len(parts), 0, -1):
            target = resolve(parts[:n])
            for name, value in self.names.items():
                if value is target:
                    return '.'.join([name, *parts[n:]])
        return None

    def mesh(self, mesh: Mesh, other_types: bool = False) -> tuple[str, bool] | None:
        """Returns an expression whose value is a mesh, and whether that is known or assumed.

        Args:
            other_types: whether it has other types of axes, and the devices and names of the mesh.
        """
        values = [*self._values()]
        values += [(text, self._read(node)) for text, node in _meant(self.source.tree)]
        known = [text for text, value in values if _is_mesh(value, mesh, other_types)]
        bound = [pair for each in self.functions for pair in bindings(each).items()]
        parameters = {name for name, nodes in bound if isinstance(nodes[0], ast.arg)}
        given = parameters & {*self.names}
        unknown = {name for name, value in self.names.items() if value is UNKNOWN}
        around = [each for function in self.functions for each in _meant(function)]
        found = {text for text, _ in around if _name(text) in unknown}
        # a function may be called with another mesh: that of a parameter is before a global one
        is_given = any(_name(text) in given for text in known)
        found = {text for text in found if not known or (_name(text) in given and not is_given)}
        if len(found) == 1 and not other_types:
            return found.pop(), False
        if not known:
            return None
        in_use = {text for text, _ in _meant(self.source.tree)}
        here = self.source.segment(self.functions[-1]) if self.functions else ''
        return min(
            known,
            key=lambda text: (
                _name(text) not in given,
                text.count('.') + text.count('['),
                text not in in_use,
                text not in here,
            ),
        ), True

    def array(self, mesh: Mesh) -> str | None:
        """Returns an expression for a traced array on a mesh, if possible one of the function."""
        own = bindings(self.functions[0]) if self.functions else {}
        found = [
            text
            for text, value in self._values()
            if isinstance(value, Tracer) and '._' not in text
            if getattr(getattr(jax.typeof(value), 'sharding', None), 'mesh', None)
            == mesh.abstract_mesh
        ]
        rank = {text: (_name(text) not in own, text.count('.') + text.count('[')) for text in found}
        return min(found, key=rank.__getitem__, default=None)

    def _read(self, node: ast.AST) -> Any:
        """The value of what the file uses as a mesh, such as `self.mesh` or `mesh()`."""
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            function = self.value(node.func)
            try:
                return UNKNOWN if function is UNKNOWN else function()
            except Exception:
                return UNKNOWN
        return self.value(node)

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Yields expressions for what may be or hold a mesh, with their values."""
        for name, value in self.names.items():
            yield name, value
            for suffix, entry in _entries(value):
                yield name + suffix, entry
                for end, inner in _entries(entry):
                    yield f'{name}{suffix}{end}', inner


def _name(expression: str) -> str:
    return expression.partition('.')[0].partition('[')[0].partition('(')[0]


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, NamedSharding):
        yield '.mesh', value.mesh
    elif isinstance(value, types.ModuleType):
        if is_user_file(getattr(value, '__file__', None) or ''):
            yield from ((f'.{name}', each) for name, each in [*vars(value).items()])
    elif type(value) is dict and len(value) < _MAX_ENTRIES:
        yield from ((f'[{key!r}]', each) for key, each in value.items() if isinstance(key, str))
    elif isinstance(value, tuple) and hasattr(value, '_fields'):
        yield from ((f'.{name}', getattr(value, name)) for name in value._fields)  # type: ignore[reportAttributeAccessIssue]
    elif not isinstance(value, type) and not type(value).__module__.startswith(('jax', 'numpy')):
        held = getattr(value, '__dict__', None)
        if (
            type(held) is dict
            and len(held) < _MAX_ENTRIES
            and not callable(held.get('__wrapped__'))
        ):
            names = (name for name in held if isinstance(name, str) and name.isidentifier())
            yield from ((f'.{name}', held[name]) for name in names)


def _is_mesh(value: Any, mesh: Mesh, other_types: bool) -> bool:
    if not isinstance(value, Mesh) or not other_types:
        return isinstance(value, Mesh) and value == mesh
    has_auto_axes = {*mesh.axis_types} == {AxisType.Auto}
    return has_auto_axes and Mesh(value.devices, value.axis_names) == mesh


def _meant(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields the expressions that code uses as a mesh: names, attributes, and calls of a getter."""
    for node in ast.walk(tree):
        given = list[ast.expr]()
        if isinstance(node, ast.Call):
            name = getattr(node.func, 'id', getattr(node.func, 'attr', ''))
            given += [each.value for each in node.keywords if each.arg == 'mesh']
            given += node.args[:1] if name in ('NamedSharding', 'set_mesh', 'use_mesh') else []
        elif isinstance(node, ast.With | ast.AsyncWith):  # what else is called there has effects
            items = (each.context_expr for each in node.items)
            given += [each for each in items if not isinstance(each, ast.Call)]
        elif isinstance(node, ast.arg) and node.annotation is not None:
            is_mesh = 'Mesh' in ast.unparse(node.annotation)
            given += [ast.Name(node.arg, ast.Load())] if is_mesh else []
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = getattr(node.value.func, 'id', getattr(node.value.func, 'attr', ''))
            given += node.targets if made in ('Mesh', 'make_mesh', 'device_mesh') else []
        for each in given:
            is_getter = isinstance(each, ast.Call) and not each.args and not each.keywords
            if is_getter or isinstance(each, ast.Name | ast.Attribute | ast.Subscript):
                yield ast.unparse(each), each


def resolve(parts: Sequence[str]) -> Any:
    found: Any = importlib.import_module(parts[0])
    for n, part in enumerate(parts[1:], 2):
        found = getattr(found, part, None) or importlib.import_module('.'.join(parts[:n]))
    return found


def visible(
    source: Source,
    node: ast.AST,
    variables: Sequence[tuple[str, Mapping[str, Any]]],
    globals_: Mapping[str, Any],
) -> tuple[dict[str, Any], list[ast.AST]]:
    """Returns the names that an expression sees, with their values, and the functions around it.

    Args:
        variables: the names and the variables of the functions around it that had not returned,
            innermost first. Those of the first include what it has captured.
    """
    functions = functions_around(source, node)
    running = [*variables]
    captured = running[0][1] if running else {}
    names, hidden = dict[str, Any](), set[str]()
    for i, function in enumerate(functions):
        # from Python 3.12 on, most comprehensions have no frame
        held = running.pop(0)[1] if running and running[0][0] == _code_name(function) else None
        for name, nodes in bindings(function).items():
            if name in hidden:
                continue
            hidden.add(name)
            value = (captured if held is None else held).get(name, UNKNOWN)
            is_before = i > 0 or isinstance(nodes[0], ast.arg)
            binds = (each for each in source.around(nodes[0]) if isinstance(each, _ASSIGNMENTS))
            is_bound = next(binds, None) not in {*source.around(node)}  # not `h = f(node)`
            is_before |= is_bound and source.end(nodes[0]) <= source.start(node)
            if len(nodes) == 1 and is_before and (value is not UNKNOWN or held is None):
                names[name] = value
    return names | {k: v for k, v in globals_.items() if k not in hidden}, functions


def _code_name(node: ast.AST) -> str:
    names = {'ListComp': '<listcomp>', 'SetComp': '<setcomp>', 'DictComp': '<dictcomp>'}
    names |= {'GeneratorExp': '<genexpr>', 'Lambda': '<lambda>'}
    return names.get(type(node).__name__, getattr(node, 'name', ''))
