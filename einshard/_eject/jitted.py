"""Writes the `jax.jit` call of a `sharded` function, and lists constraints inside functions."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AxisType, NamedSharding

from .._errors import EinshardError
from .._explain.stages import Stages
from .._functions.parameters import CallSignature
from .._functions.program import Program
from .._functions.value_spec import ValueSpec
from .._program.jaxpr.graph import Op, flatten
from .._program.jaxpr.names import dims_of_vmap
from .._sharding.mesh import AnyMesh, partial_axes, partition_spec, spec_axes, unreduced_kind
from .._sharding.scopes import mesh_scope
from .._text import array_text, short_source
from .._trees.rules import Rules
from .._trees.specs import is_none
from .path_rules import Tables, find_path_rules, matched_patterns
from .shardings import Writer
from .source import Brackets, Code, comment, docstring, identifier, is_identifier, labeled, lines

_CONSTRAINTS = {
    'sharding_constraint': 'jax.lax.with_sharding_constraint',
    'reshard': 'jax.sharding.reshard',
}
_MAX_LITERAL_LEAVES = 8
# names that the written module may define or import, so that parameters cannot have them
_RESERVED = re.compile(
    'function|by_position|shardings|hardware_order|jax|np|re|P|AxisType|Mesh|NamedSharding'
    r'|(mesh|devices|\w+_RULES)(_\d+)?'
)


def jit_function(stages: Stages, writer: Writer, tables: Tables) -> list[str]:
    """Writes `def jit_step(function)` for a `sharded` function `step`.

    Returns [] for other functions. Raises an error for `per_device` functions.
    """
    program, traced = stages.program, stages.traced
    if program is None or traced is None:
        return []
    setup, static = program.setup, program.static
    if setup.options.is_per_device:
        raise EinshardError(
            f"to_jax cannot convert '{setup.name}', a per_device function",
            facts={'instead': 'jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)'},
        )
    trees = _TreeWriter(writer, tables, program.mesh)
    wrapper = list[str]()
    rows = list(zip(program.in_shardings, program.arguments, stages.values, strict=True))
    dynamic = [row for i, row in enumerate(rows) if i not in static]
    call = program.call
    arguments: list[Code] = ['function']
    if any(shardings is not None for shardings, _, _ in dynamic):
        if call.keywords:
            wrapper, call = _by_position(program), CallSignature(len(program.names), ())
            arguments = ['by_position']
        arguments.append(Brackets('in_shardings=(', tuple(trees.code(*row) for row in dynamic)))
    if program.out_shardings is not None:
        code = trees.code(program.out_shardings, program.result, traced.out_info)
        arguments.append(labeled('out_shardings=', code))
    donated = program.positions(setup.declaration.donated)
    options = _argument_options('static', static, call)
    options |= _argument_options('donate', donated, call)
    options |= {name: value for name, value in setup.jit_options.items() if _is_literal(value)}
    arguments += [f'{name}={value!r}' for name, value in options.items()]
    signature = f'{setup.name}({", ".join(program.names)})'
    body = [f'    {docstring(f"Jits {signature}.")}']
    if trees.parameters:
        body.append(f'    # {", ".join(trees.parameters)}: arrays, or shapes from jax.eval_shape')
    if omitted := [name for name in setup.jit_options if name not in options]:
        body.append(f'    # omitted: {", ".join(omitted)}= of sharded')
    if AxisType.Explicit in program.mesh.axis_types:
        body.append('    # before a call, enter jax.set_mesh(mesh) and place the arguments')
    head = Brackets(f'def jit_{identifier(setup.name)}(', ('function', *trees.parameters), '):')
    jit = Brackets('return jax.jit(', tuple(arguments))
    return ['\n'.join([*lines(head), *body, *wrapper, *lines(jit, indent=4)])]


def _by_position(program: Program) -> list[str]:
    """Writes a function that takes all arguments of a call by position.

    `jax.jit` with in_shardings takes no keyword arguments, but `sharded` passes some by keyword:
    keyword-only parameters, `**kwargs`, and parameters after one that the call omits.
    """
    n, keywords = program.call.n_positional, program.call.keywords
    parameters = list[str]()
    for name in program.names:
        parameters.append(_unused(name, parameters))
    pairs = list(zip(keywords, parameters[n:], strict=True))
    by_keyword: list[Code] = [f'{name}={parameter}' for name, parameter in pairs]
    if any(keyword.iskeyword(name) or not is_identifier(name) for name in keywords):
        items = tuple(f'{name!r}: {parameter}' for name, parameter in pairs)
        by_keyword = [Brackets('**{', items, '}')]
    return [
        '',
        *lines(Brackets('def by_position(', tuple(parameters), '):'), indent=4),
        *lines(Brackets('return function(', (*parameters[:n], *by_keyword)), indent=8),
        '',
    ]


def _argument_options(prefix: str, positions: Sequence[int], call: CallSignature) -> dict[str, Any]:
    """Returns the jit options for the arguments at `positions`: {'donate_argnums': (0,)}."""
    n = call.n_positional
    numbers = tuple(i for i in positions if i < n)
    names = tuple(call.keywords[i - n] for i in positions if i >= n)
    options = {f'{prefix}_argnums': numbers, f'{prefix}_argnames': names}
    return {option: value for option, value in options.items() if value}


class _TreeWriter:
    """Writes pytrees of shardings.

    Attributes:
        parameters: the names of the pytrees that the written function takes after `function`.
    """

    def __init__(self, writer: Writer, tables: Tables, mesh: AnyMesh):
        self.parameters: list[str] = []
        self._mesh = mesh
        self._writer = writer
        self._tables = tables

    def code(self, shardings: Any, spec: ValueSpec, value: Any) -> Code:
        """Writes one sharding for all leaves, a literal pytree, or a call that uses path rules.

        Args:
            shardings: a pytree of shardings and Nones, which may be a prefix of `value`.
            spec: the spec of `value`. Its name is that of the parameter that is added if path rules
                are used. If it is `Rules`, the path rules have its patterns.
        """
        leaves = jtu.tree_leaves(shardings, is_leaf=is_none)
        if leaves and all(leaf == leaves[0] for leaf in leaves):
            return self._writer.sharding(leaves[0])
        if len(leaves) <= _MAX_LITERAL_LEAVES:
            literal = self._literal(shardings)
            if literal is not None:
                return literal
        parameter = _unused(str(spec.name or 'result'), self.parameters)
        self.parameters.append(parameter)
        subtrees = jtu.tree_structure(shardings, is_leaf=is_none).flatten_up_to(value)
        by_leaf = [
            s for s, subtree in zip(leaves, subtrees, strict=True) for _ in jtu.tree_leaves(subtree)
        ]
        found: tuple[list[int | str], list[str]] = [], []
        if isinstance(spec.spec, Rules):
            with mesh_scope(self._mesh):
                found = matched_patterns(spec.spec, value)
        rules = find_path_rules([*zip(self._tables.paths(value), by_leaf, strict=True)], *found)
        table = self._tables.add(f'{parameter.upper()}_RULES', rules)
        return f'shardings({table}, {parameter})'

    def _literal(self, tree: Any) -> Code | None:
        """Writes shardings in dicts, lists and tuples; returns None for other pytree nodes."""
        if tree is None or isinstance(tree, NamedSharding):
            return self._writer.sharding(tree)
        if type(tree) is dict and all(type(key) in (str, int, bool) for key in tree):
            items = [(f'{key!r}: ', self._literal(value)) for key, value in tree.items()]
            start, end = '{}'
        elif type(tree) in (list, tuple):
            items = [('', self._literal(value)) for value in tree]
            start, end = '[]' if type(tree) is list else '()'
        else:
            return None
        codes = [labeled(label, code) for label, code in items if code is not None]
        return Brackets(start, tuple(codes), end) if len(codes) == len(items) else None


def _is_literal(value: object) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def _unused(name: str, used: Collection[str]) -> str:
    """Makes `name` an identifier, and appends '_' until it is neither used nor reserved."""
    found = identifier(name)
    while found in used or keyword.iskeyword(found) or _RESERVED.fullmatch(found):
        found += '_'
    return found


def constraint_comment(stages: Stages, writer: Writer) -> list[str]:
    """Writes a comment that lists the constraints inside a function. Without any, returns []."""
    jaxpr = stages.jaxpr
    assert jaxpr is not None
    # On Explicit axes, `sharded` reshards arguments with specs before the function uses them.
    # Omit these reshards, because the written code places the arguments.
    program = flatten(jaxpr)
    specs = zip(program.arguments, stages.argument_specs() or (), strict=False)
    resharded = {argument for argument, spec in specs if spec is not None}
    found: dict[tuple[str, str], str] = {}
    for op in filter(_is_forward_constraint, program.ops):
        eqn = op.eqn
        sharding = eqn.params.get('sharding', eqn.params.get('dst_sharding'))
        if eqn.primitive.name == 'reshard' and op.ins[0] in resharded:
            continue
        # einshard makes no unreduced 'max' or 'min'; specs without unreduced axes count as 'sum'
        if isinstance(sharding, NamedSharding) and unreduced_kind(sharding.spec) == 'sum':
            x, names = eqn.outvars[0].aval, op.site.names and op.site.names.of_constraint
            if names is not None:
                x, sharding = _before_vmap(eqn, sharding, len(names))
            axes = f' {" ".join(names)!r}' if names and all(names) else ''
            call = f'{_CONSTRAINTS[op.primitive]}(x, {writer.sharding(sharding)})'
            found.setdefault((op.site.source, call), f'{array_text(x)}{axes}')
    name = stages.name or 'the function'
    text = [comment(f'Constraints inside {name}, instead of einshard(x, ...):')]
    for (line, call), array in found.items():
        where = short_source(line) or 'no source line'
        text += ['#', comment(f'{where}, {array}'), f'#     x = {call}']
    return ['\n'.join(text)] if found else []


def _before_vmap(eqn: Any, sharding: NamedSharding, n_names: int) -> tuple[Any, NamedSharding]:
    """Returns the array and the sharding in a call of einshard, without the axes of `jax.vmap`."""
    aval, added = eqn.outvars[0].aval, dims_of_vmap(eqn, n_names)
    if not added:
        return aval, sharding
    kept = [dim for dim in range(aval.ndim) if dim not in added]
    entries = [entry for dim, entry in enumerate(spec_axes(sharding.spec)) if dim in kept]
    while entries and not entries[-1]:
        entries.pop()
    spec = partition_spec(entries, *partial_axes(sharding))
    shape = [aval.shape[dim] for dim in kept]
    return jax.ShapeDtypeStruct(shape, aval.dtype), NamedSharding(sharding.mesh, spec)


def _is_forward_constraint(op: Op) -> bool:
    if op.primitive not in _CONSTRAINTS or op.site.is_backward:
        return False
    specs = [v.aval.sharding.spec for v in (op.eqn.invars[0], op.eqn.outvars[0])]
    # to compute gradients, JAX adds reshards that do not change the sharding
    return op.primitive != 'reshard' or specs[0] != specs[1]
