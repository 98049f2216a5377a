"""Runs Shardy's passes on a copy of a lowered module.

Only this file and the attribute names that it exports know how jaxlib spells passes, options and
attributes, none of which JAX promises to keep: tests/test_traced.py notices if one moves.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

# an MLIR operation: jaxlib's stubs don't name what its extension modules return
Op: TypeAlias = Any

_DEBUG = 'debug-sharding-origins=true debug-propagation-edge-sharding=true'
# In the order of XLA (addPropagationPipeline of Shardy), without what it adds for partitioning. The
# first passes are the same whatever the shardings are.
IMPORT_PASSES = (
    'sdy-import-pipeline',
    # before the next pass each call gets a function of its own, with shardings of its own
    'sdy-flatten-call-graph',
    'symbol-dce',
    'sdy-import-func-calls',
    'symbol-dce',
)
PASSES = (
    *IMPORT_PASSES,
    f'sdy-apply-sharding-constraints{{{_DEBUG}}}',
    'sdy-sharding-group-import',
    f'sdy-user-priority-propagate{{{_DEBUG} keep-sharding-rules=true}}',
)
# without notes of origins and rules, half of the time
QUICK_PASSES = (
    'sdy-apply-sharding-constraints',
    'sdy-sharding-group-import',
    'sdy-user-priority-propagate',
)
RULE_PASSES = ('func.func(sdy-populate-op-sharding-rules)',)
# up to a module in which each reshard and each sum is an operation
EXPLICIT_PASSES = (
    *QUICK_PASSES,
    'func.func(sdy-sharding-constraint-to-reshard)',
    'func.func(sdy-insert-explicit-reshards{enable-full-version=true})',
    'func.func(sdy-reshard-to-collectives)',
    *RULE_PASSES,
)
# attributes that the passes write
SHARDING = 'sdy.sharding'  # of the results of an operation, or of an argument or result of `main`
EDGE_SHARDING = 'sharding'  # of a constraint or a data-flow edge
IN_SHARDINGS, OUT_SHARDINGS = 'in_shardings', 'out_shardings'  # of a manual computation
OUT_SHARDING, REDUCTION_AXES = 'out_sharding', 'reduction_axes'  # of a collective
RULE = 'sdy.sharding_rule'
ORIGINS = 'sdy.sharding_origins'
ORIGIN_NAME = 'sdy.sharding_origin_name'
EDGES = 'sdy.propagation_edges'
# attributes that `propagated` writes on the operations that it replaces or adds
REPLACED = 'einshard.replaced'  # the name of the operation that stood here
ADDED = 'einshard.added'  # on an operation that only separates two others
# attribute that `read_outline` writes: the position of an operation before the passes
POSITION = 'einshard.position'

# a custom call for which Shardy has a rule, unlike for chlo.top_k; XLA reads top_k as this, too
_TOP_K = 'mhlo.topk'
_GSPMD = 'mhlo.sharding'

# One pass manager at a time: contexts of JAX may have multithreading switched off, and then MLIR
# doesn't guard its tables of types and attributes, which all copies of a module share.
_lock = threading.RLock()


class NotPropagated(Exception):
    """Shardy could not read a module. The message says why, for the report."""


def is_gspmd(module: Op) -> bool:
    """Whether a module was lowered for GSPMD, with `jax_use_shardy_partitioner` off.

    Such a module has shardings, but not in Shardy's form, so it can't be propagated.
    """
    ops = [view.operation for view in module.operation.regions[0].blocks[0].operations]
    if any(op.name == 'sdy.mesh' for op in ops):
        return False
    for op in ops:
        for key in ('arg_attrs', 'res_attrs'):
            if key in op.attributes and any(_GSPMD in given for given in op.attributes[key]):
                return True
    return any(_GSPMD in op.attributes for op in all_ops(module.operation))


@contextmanager
def propagated(module: Op) -> Generator[Op]:
    """Yields a copy of a module in which every value has the sharding that XLA will use.

    The copy must be read inside the `with` block, which holds a lock. The passes change what they
    run on, and JAX compiles the module later, hence the copy.

    Args:
        module: from `lowered.compiler_ir('stablehlo')`.

    Raises:
        NotPropagated: if the module was lowered for GSPMD, or the passes are missing or fail.
    """
    with imported(module, ()) as copy:
        run(copy, PASSES)
        yield copy


@contextmanager
def imported(module: Op, passes: Sequence[str] = IMPORT_PASSES) -> Generator[Op]:
    """Yields a copy of a module that can be propagated, in its context and with the lock."""
    try:
        from jax.extend.mlir import ir
    except ImportError as error:
        raise NotPropagated(f'this JAX has no jax.extend.mlir: {error}') from error
    if is_gspmd(module):
        raise NotPropagated('the program was lowered for GSPMD (jax_use_shardy_partitioner is off)')
    with locked(module):
        copy = module.operation.clone()
        try:
            _replace_operations(copy, ir)
        except (ValueError, RuntimeError, ir.MLIRError) as error:
            raise _failed(error) from error
        run(copy, passes)
        yield copy


@contextmanager
def locked(module: Op) -> Generator[None]:
    """Enters the context of a module. Other threads run no passes meanwhile."""
    from jax.extend.mlir import ir

    with _lock, module.context, ir.Location.unknown():
        yield


def run(module: Op, passes: Sequence[str]) -> None:
    """Runs passes on a copy of a module, inside `locked`."""
    from jax.extend.mlir import ir, passmanager

    if not passes:
        return
    try:
        manager = passmanager.PassManager.parse(f'builtin.module({",".join(passes)})')
        # with JAX 0.10, notes on the edges of loops don't pass the verifier
        manager.enable_verifier(False)
        manager.run(module)
    except (ValueError, RuntimeError, ir.MLIRError) as error:
        raise _failed(error) from error


def _failed(error: Exception) -> NotPropagated:
    reason = str(error).strip().partition('\n')[0]
    return NotPropagated(f"Shardy's passes failed: {reason}")


def all_ops(op: Op) -> list[Op]:
    """Returns an operation and all inside it. A loop: `Operation.walk` takes twice the time."""
    found = [op]
    for op in found:
        for region in op.regions:
            for block in region.blocks:
                found += [view.operation for view in block.operations]
    return found


def _replace_operations(module: Op, ir: Any) -> None:
    """Replaces operations on which the passes stop or crash by similar ones."""
    for op in all_ops(module):
        if op.name == 'chlo.top_k':
            attributes = {'call_target_name': ir.StringAttr.get(_TOP_K)}
            _replace(op, 'stablehlo.custom_call', attributes, ir)
        elif op.name.startswith('chlo.'):
            # Shardy has no rules for CHLO, which XLA expands before it propagates. JAX registers
            # no pass that does, but all that counts here is that axes correspond.
            shapes = {tuple(v.type.shape) for v in (*op.operands, *op.results) if _is_array(v, ir)}
            if len(shapes) == 1 and len(op.operands) <= len(_ELEMENTWISE) and len(op.results) == 1:
                _replace(op, _ELEMENTWISE[len(op.operands) - 1], {}, ir)
        elif op.name == 'sdy.manual_computation':
            # With debug-sharding-origins, Shardy crashes (jaxlib 0.10.2 and 0.12.0.1) if an operand
            # comes straight from a loop, a branch, a call or a barrier, or is the argument of one:
            # an operation in between prevents it.
            for i, operand in enumerate(op.operands):
                if _is_array(operand, ir):
                    attributes = {ADDED: ir.UnitAttr.get()}
                    added = _create(_ELEMENTWISE[0], [operand], [operand.type], attributes, op, ir)
                    op.operands[i] = added.results[0]


def inline_calls(module: Op) -> None:
    """Moves the operations of called functions to the calls. The module has been imported.

    Shardy propagates less through calls than XLA does, which inlines them: of an array that the
    loop of a gradient reads through `dynamic_index_in_dim`, it loses the batch axis. A loop that
    gathers this array in each step seemed to take 2,390 us instead of 475.
    """
    # first, as edges that are erased below must not be read
    calls = [op for op in all_ops(module) if op.name == 'sdy.named_computation']
    for call in calls:
        if IN_SHARDINGS in call.attributes or OUT_SHARDINGS in call.attributes:
            continue
        block = call.regions[0].blocks[0]
        for argument, operand in zip(list(block.arguments), list(call.operands), strict=True):
            _drop_edges(argument)
            argument.replace_all_uses_with(operand)
        for result in call.results:
            _drop_edges(result)
        *inner, end = [view.operation for view in block.operations]
        for op in inner:
            op.move_before(call)
        for result, value in zip(call.results, list(end.operands), strict=True):
            result.replace_all_uses_with(value)
        call.erase()


def merge_constants(module: Op) -> None:
    """Makes equal scalar constants of a block one, at its start. The module has been imported.

    The import pipeline gives each use its own, a third of the operations of a train step. Scalars
    have no dimension along which anything propagates.
    """
    ops = all_ops(module)
    # first, as constants that are erased below must not be read
    blocks = [block for op in ops for region in op.regions for block in region.blocks]
    for block in blocks:
        found: dict[str, Op] = {}
        for view in list(block.operations):
            op = view.operation
            if op.name != 'sdy.constant' or op.results[0].type.shape:
                continue
            key = str(op).partition(' = ')[2]  # JAX has no Python type for some attributes
            if key in found:
                op.results[0].replace_all_uses_with(found[key].results[0])
                op.erase()
            else:
                op.move_before(block.operations[0])
                found[key] = op


def _drop_edges(value: Any) -> None:
    for use in list(value.uses):
        edge = use.owner.operation
        if edge.name == 'sdy.data_flow_edge':
            edge.results[0].replace_all_uses_with(value)
            edge.erase()


# with one and with two operands; the passes don't fold them away
_ELEMENTWISE = ('stablehlo.negate', 'stablehlo.add')


def _is_array(value: Any, ir: Any) -> bool:
    return isinstance(value.type, ir.RankedTensorType)


def _replace(op: Op, name: str, attributes: dict[str, Any], ir: Any) -> None:
    attributes = {**attributes, REPLACED: ir.StringAttr.get(op.name)}
    types = [v.type for v in op.results]
    new = _create(name, list(op.operands), types, attributes, op, ir)
    for old, value in zip(op.results, new.results, strict=True):
        old.replace_all_uses_with(value)
    op.erase()


def _create(name: str, operands: list[Any], types: list[Any], given: Any, at: Op, ir: Any) -> Op:
    place = ir.InsertionPoint(at)
    return ir.Operation.create(name, types, operands, given, loc=at.location, ip=place)
