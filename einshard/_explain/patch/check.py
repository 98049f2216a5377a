"""Traces a program with patched functions, without running their modules again."""

from __future__ import annotations

import ast
import gc
import inspect
import types
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..._sharding.scopes import fresh_traces
from .files import Piece, Source

_Key = tuple[str, int, tuple[int, int]]


class Entry(NamedTuple):
    """The new value of an entry of a dictionary that a module makes."""

    rules: dict[str, Any]
    key: str
    value: Any


class NotTraced(Exception):
    """Why patched functions cannot be traced."""


@contextmanager
def patched(
    pieces: Mapping[Source, Iterable[Piece]],
    codes: Iterable[types.CodeType],
    entries: Iterable[Entry] = (),
) -> Generator[None]:
    """Gives functions their code in patched files, in a `with` block where JAX traces them again.

    A function keeps its globals, defaults, captured variables and instance, wherever decorators,
    classes and closures hold it: only its code is replaced, in place. Other threads that trace it
    meanwhile trace the patched code, which computes the same. An import is executed apart from the
    module, and its name is a global in the block, where dictionaries have the new `entries`.

    Args:
        codes: those that run when the program is traced.

    Raises:
        NotTraced: a patched function is not in use or captures other variables, or the patched code
            is not in a function.
    """
    with fresh_traces(), ExitStack() as undo:
        changed = {source: _changed(source, each) for source, each in pieces.items()}
        imported = {source: _imported(each) for source, each in pieces.items()}
        functions: list[tuple[Source, types.FunctionType, types.CodeType, types.CodeType]] = []
        by_path = {source.path: source for source in pieces}
        reached: dict[Source, set[_Key]] = {source: set() for source in pieces}
        for code in codes:
            source = by_path.get(Path(code.co_filename).resolve())
            each = None if source is None else changed[source].get(_key(code))
            if source is None or each is None:
                continue
            # Not gc.get_objects(): it also holds tuples that other threads are building, which then
            # fail with a SystemError. After gc.freeze(), older functions are not found.
            for function in gc.get_referrers(code):
                if type(function) is types.FunctionType and function.__code__ is code:
                    functions.append((source, function, code, each.new))
                    reached[source].add(_key(code))
        for source, each in changed.items():
            _check_reached(source, each, reached[source])
        for source, function, code, new in functions:
            if new.co_freevars != code.co_freevars:
                names = ', '.join(sorted({*new.co_freevars} ^ {*code.co_freevars}))
                raise NotTraced(f'{code.co_qualname} does not capture {names} before the change')
            names = function.__globals__
            for name in imported[source].keys() - names.keys():
                undo.callback(names.pop, name, None)
                names[name] = imported[source][name]
            undo.callback(setattr, function, '__code__', code)
            function.__code__ = new
        for rules, key, value in entries:
            undo.callback(rules.__setitem__, key, rules[key])
            rules[key] = value
        yield


def _imported(pieces: Iterable[Piece]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for piece in pieces:
        if piece.is_import:
            exec(piece.text, names)
    return names  # with `__builtins__`, which all modules have


@dataclass(frozen=True)
class _Changed:
    """A function, class or module whose code changes.

    Attributes:
        around: the key of the function, class or module that it is in.
        is_own: whether its own code changes, or only that of a function in it.
    """

    new: types.CodeType
    around: _Key | None
    is_own: bool


def _changed(source: Source, pieces: Iterable[Piece]) -> dict[_Key, _Changed]:
    """Returns what changes, by the key of the old code.

    Where a function changes, that around it does: the inner code is one of its constants.
    """
    text, name = source.edited(each for each in pieces if not each.is_once), str(source.path)
    assert text is not None
    kept = _with_captured(source.tree, ast.parse(text))
    old, new = (compile(each, name, 'exec', dont_inherit=True) for each in (source.text, kept))
    pending: list[tuple[types.CodeType, types.CodeType, _Key | None]] = [(old, new, None)]
    found: dict[_Key, _Changed] = {}
    while pending:
        old, new, around = pending.pop()
        if _contents(old) != _contents(new):
            is_own = _contents(old, inner=False) != _contents(new, inner=False)
            found[_key(old)] = _Changed(new, around, is_own)
        pairs = zip(_inner(old), _inner(new), strict=True)
        pending += [(*pair, _key(old)) for pair in pairs]
    return found


def _with_captured(old: ast.Module, new: ast.Module) -> ast.Module:
    """Adds the names that functions lose to their new code, which never evaluates them.

    A function in use can only get code that captures the same variables.
    """

    def functions(tree: ast.AST) -> list[Any]:
        return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)]

    def names(tree: ast.AST) -> set[str]:
        return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}

    pairs = [*zip(functions(old), functions(new), strict=False)]
    lost = [(after, sorted(names(before) - names(after))) for before, after in pairs]
    for function, gone in lost:
        if not gone:
            continue
        dead = ast.Tuple([ast.Name(name, ast.Load()) for name in gone], ast.Load())
        if isinstance(function, ast.Lambda):
            function.body = ast.IfExp(ast.Constant(True), function.body, dead)
        else:
            function.body.append(ast.If(ast.Constant(False), [ast.Expr(dead)], []))
    return ast.fix_missing_locations(new)


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [each for each in code.co_consts if isinstance(each, types.CodeType)]


def _contents(code: types.CodeType, inner: bool = True) -> tuple[Any, ...]:
    """What a code does, in whatever lines, with or without the functions in it."""
    constants = [repr(c) for c in code.co_consts if not isinstance(c, types.CodeType)]
    own = code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants
    return (*own, *map(_contents, _inner(code))) if inner else own


def _key(code: types.CodeType) -> _Key:
    """What tells the functions of a file apart, also two lambdas in one line.

    The bytecode does not: pytest changes that of functions with `assert`.
    """
    ends = [(e, end) for _, e, _, end in code.co_positions() if e is not None and end is not None]
    return code.co_qualname, code.co_firstlineno, max(ends, default=(0, 0))


def _check_reached(
    source: Source, changed: Mapping[_Key, _Changed], reached: Collection[_Key]
) -> None:
    """Raises `NotTraced` for code that runs only once, and functions that did not run.

    A function that has made one that ran need not run again: what it makes is patched.
    """
    makers = {*reached}
    for key in reached:
        maker: _Key | None = changed[key].around
        while maker is not None and maker in changed:
            makers.add(maker)
            maker = changed[maker].around
    for key, each in changed.items():
        is_function = bool(each.new.co_flags & inspect.CO_OPTIMIZED)
        if not is_function and each.is_own:
            raise NotTraced(f'it changes code of {source.path.name} that runs once, at its import')
        maker = key
        while maker is not None and maker not in makers:
            maker = changed[maker].around
        if is_function and maker is None:
            raise NotTraced(f'{each.new.co_qualname} of {source.path.name} is not in use')
