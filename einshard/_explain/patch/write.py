"""Writes a change of a value into source code, in the ways that may do it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._arrays.place import einshard
from ..._program.edits.jaxprs import has_explicit_axes
from ..._program.jaxpr.spans import Span
from ..._sharding.describe import Description, describe_named
from .check import Entry
from .files import Piece, Source, around
from .observe import Seen
from .scope import Scope, bindings

_SPEC, _SHARDING = 'jax.sharding.PartitionSpec', 'jax.sharding.NamedSharding'
_OURS = 'einshard.einshard'
_CONSTRAIN, _RESHARD = 'jax.lax.with_sharding_constraint', 'jax.sharding.reshard'
_ATOMS = ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Constant, ast.List, ast.Dict


@dataclass(frozen=True)
class Change:
    """A change of the value of an expression.

    Attributes:
        kind: 'constrain' the value; 'replace' or 'remove' the constraint that it is; constrain its
            'operand', and keep the constraint.
        path: the expression, and calls of the function that it is in. A shorter path is that of
            all calls.
        sharding: of the value as the expression sees it. None if it is removed.
        text: what to change, in words.
        placement: the sharding as an expression, or '' to name its axes a, b, c, ...
        missing: what code cannot say about it, or ''.
    """

    kind: Literal['constrain', 'replace', 'remove', 'operand']
    path: tuple[Span, ...]
    sharding: NamedSharding | None
    text: str
    placement: str = ''
    missing: str = ''

    @property
    def new(self) -> NamedSharding:
        assert self.sharding is not None
        return self.sharding

    @property
    def expression(self) -> str | None:
        text = self.placement or describe_named(self.new, len(self.new.spec))
        return None if isinstance(text, Description) else text

    def covers(self, path: Sequence[Span]) -> bool:
        return tuple(path[: len(self.path)]) == self.path

    def is_like(self, other: Change) -> bool:
        return (self.kind, self.sharding) == (other.kind, other.sharding)


@dataclass(frozen=True)
class Option:
    """A way to write a change.

    Attributes:
        source, pieces: the file, and what to replace in it.
        is_sure: whether the code says what it does. Else a trace decides.
        assumed: what is not known about the names in it, or ''.
        note: what else it changes, or ''.
        entries: the entries of dictionaries that it changes, which code of the module makes.
        instead: why the code of the expression itself stays, or ''.
    """

    source: Source
    pieces: tuple[Piece, ...]
    is_sure: bool = True
    assumed: str = ''
    note: str = ''
    entries: tuple[Entry, ...] = ()
    instead: str = ''


class Missing(Exception):
    """What an expression cannot name."""


def options(change: Change, changes: Collection[Change], seen: Collection[Seen]) -> list[Option]:
    """Returns the ways to write a change, the best first. Raises `Missing` if there is none."""
    if change.missing:
        raise Missing(change.missing)
    alike = [each for each in changes if each.is_like(change)]
    ways = [each for each in seen if each.path[0] == change.path[0]]
    found = next((each for each in ways if change.covers(each.path)), ways[0] if ways else None)
    if found is None:
        raise Missing('its function was not called when the program was traced again')
    reasons, written, last = list[str](), list[Option](), list[Option]()
    for level in range(len(found.frames)):
        # an edit here changes all that is evaluated through this call
        changed = [each.path for each in ways if each.path[: level + 1] == found.path[: level + 1]]
        is_shared = not all(any(one.covers(path) for one in alike) for path in changed)
        scope = found.scope(level)
        if scope is None:
            reasons.append(f'the source of {found.path[level].source} cannot be read')
            break
        others = _other_calls(scope, [each.path for each in ways], level)
        if is_shared or (others and _is_helper(scope)):
            reasons.append(f'{_name_of(scope)} is also called elsewhere')
            continue
        try:
            way = list(_ways(change, scope, is_at_call=level > 0))
        except Missing as missing:
            reasons.append(str(missing))
            continue
        note = f'also changes the calls in {", ".join(others)}' if others else ''
        why, is_sure = reasons[0] if reasons else '', not level
        way = [replace(w, is_sure=w.is_sure and is_sure, note=note, instead=why) for w in way]
        if level or not _is_given(change, scope):
            written += way
        else:  # the helper only if its call cannot say it
            last = way
        if written and not level:
            break
        if level > 1:
            break
    written += last
    if not written:
        raise Missing(reasons[0] if reasons else 'it cannot be written there')
    return written


def _is_helper(scope: Scope) -> bool:
    """Whether a function returns the constraint of one of its parameters."""
    if not scope.functions or not isinstance(scope.node, ast.Call) or not scope.node.args:
        return False
    function, first = scope.functions[0], scope.node.args[0]
    bound = bindings(function).get(getattr(first, 'id', ''), [])
    if not any(isinstance(each, ast.arg) for each in bound):
        return False
    around = [*itertools.takewhile(lambda n: n is not function, scope.source.around(scope.node))]
    returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
    assigned = {
        ast.unparse(target) for n in around if isinstance(n, ast.Assign) for target in n.targets
    }
    return (
        isinstance(function, ast.Lambda)
        or any(isinstance(n, ast.Return) for n in around)
        or any(ast.unparse(each) in assigned for each in returned)
    )


def _is_given(change: Change, scope: Scope) -> bool:
    """Whether the placement of a constraint is made of parameters of the function around it."""
    if change.kind != 'replace' or not scope.functions or not isinstance(scope.node, ast.Call):
        return False
    node = _placement(scope.node)
    if isinstance(node, ast.Call) and scope.value(node.func) is NamedSharding:
        node = next((each.value for each in node.keywords if each.arg == 'spec'), None) or (
            node.args[1] if len(node.args) > 1 else None
        )
    bound = bindings(scope.functions[0])
    # an attribute of `self` or of a configuration is not written in the call
    return node is not None and any(
        isinstance(bound.get(each.id, [None])[0], ast.arg)
        for each in ast.walk(node)
        if isinstance(each, ast.Name)
        and not isinstance(scope.source.parents.get(each), ast.Attribute)
    )


def _placement(call: ast.Call) -> ast.expr | None:
    """Returns the argument of a constraint that is its placement."""
    given = {each.arg: each.value for each in call.keywords}
    names = ('shardings', 'out_shardings', 'out_sharding', 'spec')
    placement = next((given[name] for name in names if name in given), None)
    return call.args[1] if placement is None and len(call.args) > 1 else placement


def _name_of(scope: Scope) -> str:
    return next((name for each in scope.functions if (name := getattr(each, 'name', ''))), 'it')


def _other_calls(scope: Scope, paths: Sequence[Sequence[Span]], level: int) -> list[str]:
    """Returns the lines of its module that call the function, but not in the program."""
    name, source = _name_of(scope), scope.source
    # a decorated function is not called by the next frame
    known = {span for path in paths for span in path[level + 1 :]}
    nodes = {source.node(span) for span in known}
    return [
        f'line {node.lineno}'
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, 'id', None) == name
        and node not in nodes
        and not any(each in nodes for each in source.around(node))
    ]


def _ways(change: Change, scope: Scope, is_at_call: bool) -> Iterator[Option]:
    """Yields the ways to write a change of an expression, or of what a call of it returns."""
    node, source = scope.node, scope.source
    if change.kind == 'constrain':
        yield _constrained(change, scope, node)
        return
    if not isinstance(node, ast.Call):
        raise Missing('it is not a call that constrains its argument')
    out = next((each for each in node.keywords if each.arg == 'out_sharding'), None)
    if change.kind == 'remove' and out is not None and not is_at_call:
        yield Option(source, (_without(source, node, out),))
        return
    if change.kind == 'replace' and not is_at_call:
        if (placement := _placement(node)) is None:
            raise Missing('its placement is not an argument')
        is_expression = scope.value(node.func) is einshard
        if not is_expression and (way := _in_call(change, scope, placement)) is not None:
            yield way
        yield placed(change, scope, placement, is_expression=is_expression)
        return
    if not node.args:
        raise Missing('it is not a call that constrains its argument')
    first = node.args[0]
    if change.kind == 'operand':
        yield _constrained(change, scope, first)
    elif change.kind == 'remove':
        yield _only(scope, first)
    else:
        yield from _in_arguments(change, scope, node)
        yield from _in_rules(change, scope, node)
        # the helper may only constrain, or do more
        writer = _Writer(change, scope)
        opened, closed = writer.call()
        yield writer.option(
            Piece(source.start(node), source.start(first), opened),
            Piece(source.end(first), source.end(node), closed),
        )
        yield _constrained(change, scope, node)


def _in_call(change: Change, scope: Scope, made: ast.expr) -> Option | None:
    """Writes a placement as the arguments of a function that makes it, as `to('data', None)`."""
    if not isinstance(made, ast.Call) or made.keywords or _is_spec(scope, made):
        return None
    given = made.args
    is_spec = any(isinstance(each, ast.Constant | ast.Tuple) for each in given)
    if not is_spec or any(isinstance(each, ast.Starred) for each in given):
        return None
    source, writer = scope.source, _Writer(change, scope)
    piece = Piece(source.start(given[0]), source.end(given[-1]), writer.entries())
    return replace(writer.option(piece), is_sure=False)


def _in_arguments(change: Change, scope: Scope, call: ast.Call) -> Iterator[Option]:
    """Yields the ways to write a placement into the arguments of a call."""
    for argument in [*call.args[1:], *(each.value for each in call.keywords)]:
        if _is_spec(scope, argument) or isinstance(argument, ast.Tuple | ast.List):
            yield placed(change, scope, argument)
        elif isinstance(argument, ast.Constant) and ' ' in str(argument.value).strip():
            yield placed(change, scope, argument, is_expression=True)
    rest = call.args[1:]
    if all(isinstance(each, ast.Constant | ast.Tuple) for each in rest) and change.new.spec:
        writer, end = _Writer(change, scope), scope.source.end(call.args[0])
        last = scope.source.end(rest[-1]) if rest else end
        yield writer.option(Piece(end, last, f', {writer.entries()}'))


def _in_rules(change: Change, scope: Scope, call: ast.Call) -> Iterator[Option]:
    """Yields the ways to change a rule that a call names, if nothing else names it."""
    source = scope.source
    given = [*call.args[1:], *(each.value for each in call.keywords)]
    keys = {each.value for each in given if isinstance(each, ast.Constant)}
    for node in source.tree.body:
        rules = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, 'target', None)
        held = scope.value(target)
        if not isinstance(rules, ast.Dict) or type(held) is not dict:
            continue
        for key, value in zip(rules.keys, rules.values, strict=True):
            if not isinstance(key, ast.Constant) or key.value not in keys & {*held}:
                continue
            uses = (n for n in ast.walk(source.tree) if isinstance(n, ast.Constant))
            if sum(each.value == key.value for each in uses) == 2:  # the rule, and this call
                is_text = isinstance(held[key.value], str)
                way = placed(change, scope, value, is_expression=is_text)
                pieces = tuple(piece._replace(is_once=True) for piece in way.pieces)
                new = Entry(held, str(key.value), _like(change, held[key.value]))
                yield replace(way, pieces=pieces, entries=(new,))


def _like(change: Change, old: Any) -> Any:
    """Returns the new placement, in the form of the old one."""
    if isinstance(old, str):
        return change.expression
    if isinstance(old, tuple | list):
        return type(old)(change.new.spec)
    return change.new.spec if isinstance(old, PartitionSpec) else change.new


def _is_spec(scope: Scope, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and scope.value(node.func) in (PartitionSpec, NamedSharding)


class _Writer:
    """Writes the placement of a change with the names that an expression can use.

    Attributes:
        imports: those that the names need.
        assumed: what is not known about them, or ''.
    """

    def __init__(self, change: Change, scope: Scope):
        self.change, self.scope, self.source = change, scope, scope.source
        self.imports: list[Piece] = []
        self.assumed = ''

    def option(self, *pieces: Piece) -> Option:
        return Option(self.source, (*pieces, *self.imports), assumed=self.assumed)

    def name(self, dotted: str) -> str:
        """Returns an expression for a public object of JAX."""
        if (text := self.scope.spell(dotted)) is not None:
            return text
        module, _, name = dotted.rpartition('.')
        if 'jax' not in self.scope.names:
            self.imports.append(self.source.imported('import jax'))
            return dotted
        if name in self.scope.names:
            raise Missing(f'jax and {name} are other names there')
        self.imports.append(self.source.imported(f'from {module} import {name}'))
        return name

    def entries(self) -> str:
        """Returns the arguments of the PartitionSpec."""
        texts = list[str]()
        for axes in self.change.new.spec:
            if axes is PartitionSpec.UNCONSTRAINED:
                texts.append(f'{self.name(_SPEC)}.UNCONSTRAINED')
            else:
                texts.append(repr(axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes))
        return ', '.join(texts)

    def mesh(self) -> str:
        mesh = self.change.new.mesh
        assert isinstance(mesh, Mesh)
        found = self.scope.mesh(mesh)
        if found is None and (other := self.scope.mesh(mesh, other_types=True)) is not None:
            # `jax.make_mesh` has made it with Explicit axes
            made = self.name('jax.sharding.Mesh')
            found = f'{made}({other[0]}.devices, {other[0]}.axis_names)', True
        if found is None:
            axes = ', '.join(f'{name!r}: {size}' for name, size in mesh.shape.items())
            raise Missing(
                f"no expression in {_name_of(self.scope)} has the program's mesh, ({axes})"
            )
        text, is_known = found
        self.assumed = '' if is_known else f"{text} is taken for the program's mesh"
        return text

    def sharding(self) -> str:
        """Writes the sharding for JAX."""
        mesh = self.change.new.mesh
        assert isinstance(mesh, Mesh)
        text = f'{self.name(_SPEC)}({self.entries()})'
        if _is_equal(mesh, self.scope.bare_mesh):
            return text
        named = self.name(_SHARDING)
        try:
            name = self.mesh()
        except Missing:
            # arrays in a trace have a mesh, also where none is in context: an abstract one
            if (array := self.scope.array(mesh)) is None:
                raise
            name = f'{self.name("jax.typeof")}({array}).sharding.mesh'
        return f'{named}({name}, {text})'

    def call(self) -> tuple[str, str]:
        """Returns what to write before and after a value, to constrain it."""
        new, function, expression = self.change.new, self.scope.spell(_OURS), self.change.expression
        if function is not None and expression is not None:
            if _is_equal(new.mesh, self.scope.einshard_mesh):
                return f'{function}(', f', {expression!r})'
            try:
                return f'{function}(', f', {expression!r}, mesh={self.mesh()})'
            except Missing:  # einshard takes no abstract mesh that is not in context; JAX does
                pass
        text = self.sharding()
        # on Explicit axes, a constraint only checks the type of its operand
        function = self.name(_RESHARD if has_explicit_axes(new) else _CONSTRAIN)
        return f'{function}(', f', {text})'


def _is_equal(mesh: Any, other: Any) -> bool:
    return other is not None and other in (mesh, mesh.abstract_mesh)


def _constrained(change: Change, scope: Scope, node: ast.AST) -> Option:
    source, writer = scope.source, _Writer(change, scope)
    opened, closed = writer.call()
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name | ast.Attribute):
        rest = source.utf8[source.end(node.target) : source.end(node)]
        operator, value = (part.lstrip() for part in rest.split(b'=', 1))
        target, end = source.segment(node.target), source.end(node)
        # parentheses around the value are not part of its node
        left, right = '()' if source.start(node.value) == end - len(value) else ('', '')
        begin = f'{target} = {opened}{target} {operator.decode().rstrip()} {left}'
        pieces = (
            Piece(source.start(node), end - len(value), begin),
            Piece(end, end, f'{right}{closed}', source.start(node)),
        )
    elif isinstance(node, ast.expr) and not isinstance(node, ast.Starred):
        pieces = around(source.start(node), source.end(node), opened, closed)
    else:
        raise Missing('it is not an expression')
    return writer.option(*pieces)


def _only(scope: Scope, operand: ast.expr) -> Option:
    """Puts the operand of a call in its place, or removes a statement that does only this."""
    source, node = scope.source, scope.node
    statement = source.parents.get(node)
    if isinstance(statement, ast.Assign) and isinstance(operand, ast.Name):
        around = source.parents[statement]
        blocks = (getattr(around, name, ()) for name in ('body', 'orelse', 'finalbody'))
        is_needed = any(each == [statement] for each in blocks)
        first, end = source.starts[statement.lineno - 1], statement.end_lineno or 0
        last = source.starts[end] if end < len(source.starts) else len(source.utf8)
        rest = source.utf8[source.end(statement) : last].strip()
        is_alone = not source.utf8[first : source.start(statement)].strip()
        is_alone = is_alone and (not rest or rest.startswith(b'#'))
        names = [getattr(target, 'id', '') for target in statement.targets]
        if is_alone and not is_needed and names == [operand.id]:
            return Option(source, (Piece(first, last, ''),))
    before, after = ('', '') if isinstance(operand, _ATOMS) else ('(', ')')
    pieces = (
        Piece(source.start(node), source.start(operand), before),
        Piece(source.end(operand), source.end(node), after),
    )
    return Option(source, pieces)


def _without(source: Source, call: ast.Call, keyword: ast.keyword) -> Piece:
    start, end = source.start(keyword), source.end(keyword)
    before = [source.end(each) for each in (*call.args, *call.keywords) if source.end(each) < start]
    return Piece(max(before, default=start), end, '')


def placed(change: Change, scope: Scope, node: ast.expr, is_expression: bool = False) -> Option:
    """Writes another placement in the place of an expression for one."""
    source, writer = scope.source, _Writer(change, scope)
    made = scope.value(node.func) if isinstance(node, ast.Call) else None
    if isinstance(node, ast.Constant) and is_expression and change.expression is not None:
        text = repr(change.expression)
    elif isinstance(node, ast.List):
        text = f'[{writer.entries()}]'
    elif isinstance(node, ast.Tuple):
        text = f'({writer.entries()}{"," * (len(change.new.spec) == 1)})'
    elif isinstance(node, ast.Call) and made is PartitionSpec:
        text = f'{source.segment(node.func)}({writer.entries()})'
    elif (
        isinstance(node, ast.Call)
        and made is NamedSharding
        and len(node.args) > 1
        and scope.value(node.args[0]) == change.new.mesh
    ):
        node = node.args[1]
        if isinstance(node, ast.Call) and scope.value(node.func) is PartitionSpec:
            return placed(change, scope, node)
        text = f'{writer.name(_SPEC)}({writer.entries()})'
    else:
        text = writer.sharding()
    return writer.option(source.replace(node, text))
