"""to_jax: writes a spec, a `sharded` function or a plan as plain JAX."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jax.stages import Compiled, Lowered, Traced

from .._arrays.place import einshard
from .._draw.show import checked_shape
from .._errors import EinshardError, plural, printable, public
from .._explain.stages import Stages
from .._explain.trace_call import trace_call
from .._notation.layout import needs_rank
from .._plan.result import Plan
from .._sharding.context import Context
from .._sharding.leaf_spec import (
    LEAF_SPECS,
    REPLICATED,
    as_leaf_spec,
    convert_jax_spec,
    with_fallbacks,
)
from .._sharding.mesh import AnyMesh, MeshLike
from .._sharding.resolve import resolve
from .._sharding.scopes import current_context, mesh_scope
from .._text import name_of
from .._trees.rules import Rules
from .._trees.shard_largest import shard_largest
from .._trees.specs import check_specs, context_of, is_function, without_values
from .jitted import constraint_comment, jit_function
from .path_rules import PathRule, Tables, find_path_rules, matched_patterns
from .shardings import Writer
from .source import labeled, module, statement

_EXPECTED = (
    'an expression, a PartitionSpec, a NamedSharding, Rules, a pytree of these, a sharded function '
    'or a Plan'
)


@public
def to_jax(
    what: Any,
    *args: Any,
    mesh: MeshLike | None = None,
    shape: Sequence[int] | None = None,
    **kwargs: Any,
) -> str:
    """Writes shardings as plain JAX: source text that runs without einshard.

        >>> import jax
        >>> from einshard import to_jax
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ('data', 'tp'))
        >>> text = to_jax('batch d -> batch@data d@tp', mesh=mesh)
        >>> print(text.splitlines()[-1])
        sharding = NamedSharding(mesh, P('data', 'tp'))

    What the text defines depends on `what`:

    * An expression, `PartitionSpec` or `NamedSharding`: `sharding`.
    * `Rules`: `RULES`, a list of patterns with their PartitionSpecs, and `shardings(RULES,
      tree)`, the pytree of shardings for `jax.device_put` or `jax.jit`. `to_jax(rules)` raises an
      error if a sharding depends on the arrays: if a spec is a function, if it shards an axis after
      '...', as in `'... d*'`, or if the rules have `indivisible='replicate'`.
    * A pytree of specs, or `for_optimizer(...)`, with a pytree of arrays: the same, with patterns
      that match the paths of the arrays.
    * A `sharded` function `step` with the arguments of a call: `jit_step(function)`, which calls
      `jax.jit` with the shardings of `step`. If `jit_step` finds the shardings of an argument or
      of the result by path, it also takes a pytree of their arrays or shapes, as in
      `jit_step(function, state)`. A comment lists the sharding constraints inside the function,
      with source lines. For functions that are not `sharded`, the text has only this comment.
    * A `Plan`: the same for its function, with the shardings of the best plan.

    The shardings equal those of einshard: the same PartitionSpecs, and meshes of the same devices
    in the same order. The text calls `jax.make_mesh` if that makes the same mesh; otherwise it
    sorts the devices as `device_mesh` does. The text has none of einshard's checks.

    Args:
        what: a spec, a pytree of specs, a function or a `Plan`.
        args, kwargs: for a spec, a pytree of arrays or ShapeDtypeStructs; for a function, the
            arguments of a call. Bind a parameter that has the name of an option, as in
            `functools.partial(step, mesh=...)`.
        mesh: a mesh or devices, as for `make_sharding`; an `AbstractMesh` needs no devices.
        shape: the shape of the array, for a single spec.

    Returns:
        The source text, formatted as by `ruff format`.

    Raises:
        EinshardError: a spec does not fit the mesh or the arrays, a sharding depends on arrays that
            are not given, or the function is a `per_device` function.
    """
    if isinstance(what, Plan):
        given = ['arguments'] if args or kwargs else []
        given += [f'{name}=' for name, x in (('mesh', mesh), ('shape', shape)) if x is not None]
        if given:
            raise EinshardError(
                'a Plan already has its arguments and mesh',
                code='mesh',
                facts={'got': ', '.join(given), 'expected': 'to_jax(plan)'},
            )
        if what.is_of_step:
            raise EinshardError(
                f'{what.name} has no axis names of its own, so its plan is no code of them',
                code='plan',
                facts={'instead': 'plan.patch(), which writes the plan into its source'},
            )
        title = f'plan for {what.name}: {what.best.candidate}'
        return _write_function(what.trace(), what.mesh, title)
    is_callable_spec = what is shard_largest or hasattr(what, 'for_leaves')
    is_program = is_function(what) or isinstance(what, Lowered | Compiled | Traced)
    if is_callable_spec or not is_program:
        if kwargs or len(args) > 1:
            raise EinshardError(
                f'with a spec, to_jax takes the arrays by position, not as {next(iter(kwargs))}='
                if kwargs
                else f'with a spec, to_jax takes at most one pytree of arrays, not {len(args)}',
                facts={'expected': 'to_jax(spec), or to_jax(spec, tree)'},
            )
        check_specs(what, expected=_EXPECTED)
        context = context_of(what, current_context(mesh))
        is_for_one_array = isinstance(what, LEAF_SPECS) and (not args or jtu.all_leaves(args))
        if is_for_one_array:
            return _write_sharding(what, args, shape, context)
        return _write_rules(what, args, mesh, shape, context)
    if shape is not None:
        raise EinshardError('shape= is for a single spec, not for a function')
    stages = trace_call(what, args, kwargs, mesh)
    program = stages.program
    target = current_context(mesh).lowering_mesh if program is None else program.mesh
    return _write_function(stages, target, stages.name or 'a traced function')


def _write_sharding(spec: Any, args: Sequence[Any], shape: Any, context: Context) -> str:
    if shape is not None:
        if args:
            raise EinshardError('pass either an array or shape= to to_jax, not both')
        shape = checked_shape(shape)
    elif args:
        shape = np.shape(args[0])
    sharding = resolve(convert_jax_spec(spec), shape, context).sharding
    writer = Writer(context.lowering_mesh)
    code = labeled('sharding = ', writer.sharding(sharding))
    return module(_title(spec, sharding.mesh), [*writer.definitions(), statement(code)])


def _write_rules(
    spec: Any, args: Sequence[Any], mesh: MeshLike | None, shape: Any, context: Context
) -> str:
    if shape is not None:
        raise EinshardError(
            'shape= is for a single spec', facts={'instead': 'pass a pytree: to_jax(rules, params)'}
        )
    writer = Writer(context.lowering_mesh)
    tables, early_returns = Tables(writer), list[str]()
    if args:
        rules, skips_non_arrays = _rules_of_tree(spec, args[0], mesh, context, tables)
    elif isinstance(spec, Rules):
        # the written code may be called with leaves that are not arrays
        rules, skips_non_arrays = _rules_of_patterns(spec, context), True
        tables.skips_boxes = 'flax' in sys.modules  # the pytree may have its variables
    else:
        raise _no_tree_error('these specs depend on the paths or shapes of the arrays')
    if skips_non_arrays:
        early_returns += ["if not hasattr(leaf, 'shape'):", '    return None']
    if isinstance(spec, Rules):
        replicated = writer.sharding(resolve(REPLICATED, None, context).sharding)
        or_small = f' or leaf.size < {spec.min_size}' if spec.min_size > 1 else ''
        early_returns += [f'if not leaf.shape{or_small}:', f'    return {replicated}']
    tables.add('RULES', rules)
    parts = tables.parts(early_returns)
    return module(_title(spec, context.lowering_mesh), [*writer.definitions(), *parts])


def _rules_of_tree(
    spec: Any, tree: Any, mesh: MeshLike | None, context: Context, tables: Tables
) -> tuple[list[PathRule], bool]:
    """Returns path rules for a pytree, and whether `Rules` skipped a leaf that is not an array.

    If `spec` is `Rules`, scalars, small arrays and leaves that are not arrays get no path rule.
    """
    shapes = jtu.tree_map(without_values, tree)
    placed = jtu.tree_leaves(einshard(shapes, spec, mesh=mesh))
    shardings = [getattr(leaf, 'sharding', None) for leaf in placed]
    leaves = list(zip(tables.paths(shapes), shardings, strict=True))
    if not isinstance(spec, Rules):
        return find_path_rules(leaves), False
    with mesh_scope(context.mesh):
        labels, patterns = matched_patterns(spec, shapes)
    pairs = [(leaf, i) for leaf, i in zip(leaves, labels, strict=True) if isinstance(i, int)]
    rules = find_path_rules([leaf for leaf, _ in pairs], [i for _, i in pairs], patterns)
    return rules, 'not an array' in labels


def _rules_of_patterns(rules: Rules, context: Context) -> list[PathRule]:
    if rules.indivisible == 'replicate' or context.replicates_indivisible:
        raise _no_tree_error("indivisible='replicate' depends on the shapes of the arrays")
    default = [] if rules.default is ... else [('', rules.default)]
    path_rules: list[PathRule] = []
    for pattern, spec in (*rules.rules, *default):
        if spec is None:
            path_rules.append((pattern, None))
            continue
        if not isinstance(spec, LEAF_SPECS):
            raise _no_tree_error(f"the spec of rule '{pattern}' is a function of the arrays")
        leaf_spec = with_fallbacks(
            convert_jax_spec(spec), on_missing=rules.missing, rule=f"'{pattern}'"
        )
        if needs_rank(leaf_spec.expression):
            raise _no_tree_error(
                f"the sharding of rule '{pattern}' depends on the ndim of the arrays"
            )
        path_rules.append((pattern, resolve(leaf_spec, None, context).sharding))
    return path_rules


def _no_tree_error(reason: str) -> EinshardError:
    return EinshardError(
        f'{reason}, so to_jax needs the arrays or their shapes',
        facts={'expected': 'to_jax(spec, tree); the tree may be a result of jax.eval_shape'},
    )


def _write_function(stages: Stages, mesh: AnyMesh, title: str) -> str:
    if stages.jaxpr is None:
        raise EinshardError(
            'to_jax cannot read the constraints of a lowered or compiled function',
            facts={'instead': 'pass the function with its arguments'},
        )
    writer = Writer(mesh)
    tables = Tables(writer)
    call = jit_function(stages, writer, tables)
    constraints = constraint_comment(stages, writer)
    if not call and not constraints:
        if stages.name:
            sentence = f'{stages.name} has neither specs nor sharding constraints'
            expected = 'a sharded function, or sharding constraints in the function'
        else:
            sentence = (
                'a trace lacks the specs of its function, and this one has no sharding constraints'
            )
            expected = 'a sharded function (not its trace), or constraints in the function'
        raise EinshardError(sentence, facts={'expected': expected})
    parts = [*tables.parts(), *call, *constraints]
    return module(_with_device_count(title, mesh), [*writer.definitions(), *parts])


def _title(spec: Any, mesh: AnyMesh) -> str:
    text = name_of(spec)
    if isinstance(spec, LEAF_SPECS):
        text = f"'{printable(str(as_leaf_spec(spec)))}'"
    return _with_device_count(text, mesh)


def _with_device_count(title: str, mesh: AnyMesh) -> str:
    return f'{title} on {plural(mesh.size, "device")}'
