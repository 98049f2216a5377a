"""Applies axis rules to expressions, and suggests rules in errors."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from .._cache import cached
from .._errors import EinshardError, RuleSuggestion, Suggestion
from .._notation.expression import Expression, Term, check_mesh_axes, parse, write_short
from .._working_fixes import works
from .context import AxisRule, AxisRules, Context, Fallback
from .leaf_spec import AnySpec, as_leaf_spec


class AppliedRules(NamedTuple):
    expression: Expression  # with placements from the rules, and without ignored mesh axes
    missing_axes: tuple[str, ...] = ()  # named in it or an applied rule, but not in the mesh
    # array axes to replicate if they are not divisible
    replicate_indivisible: frozenset[str] = frozenset()


def apply_axis_rules(
    expression: Expression,
    rules: AxisRules,
    axis_sizes: Mapping[str, int],
    on_missing: Fallback = 'error',
) -> AppliedRules:
    """Applies axis rules to an expression, on a mesh with the axes `axis_sizes`.

    Rules apply only to expressions without an arrow. A mesh axis that the mesh lacks is removed if
    `on_missing` is 'replicate', or if it comes from a rule with `missing='replicate'`.
    """
    if on_missing == 'replicate':
        rules = tuple(rule._replace(ignores_missing=True) for rule in rules)
    pairs = _apply_to_terms(expression, rules, axis_sizes)
    mesh_axes = dict.fromkeys(axis for term, _ in pairs for axis in term.mesh_axes)
    missing = tuple(axis for axis in mesh_axes if axis not in axis_sizes)
    may_replicate = {str(term.name) for term, rule in pairs if rule and rule.replicates_indivisible}
    if expression.short and rules:
        expression = _with_placements(expression, pairs, axis_sizes)
    if on_missing == 'replicate' and missing:
        right = tuple(_keep_mesh_axes(term, axis_sizes) for term in expression.right)
        if not any(term.spans_devices for term in right):  # '*' replicates
            right = (Term(star=True), *right)
        expression = replace(expression, right=right)
    return AppliedRules(expression, missing, frozenset(may_replicate))


def _with_placements(
    expression: Expression,
    pairs: Sequence[tuple[Term, AxisRule | None]],
    axis_sizes: Mapping[str, int],
) -> Expression:
    """Replaces the terms with those in `pairs`. Raises if two of these share a mesh axis."""
    terms = [
        _keep_mesh_axes(term, axis_sizes) if rule and rule.ignores_missing else term
        for term, rule in pairs
    ]
    has_counts = any(term.is_counted for term in terms)
    has_mesh_axes = any(term.mesh_axes for term in terms)
    if not any(term.star for term in terms) and (has_counts or not has_mesh_axes):
        # with counts, or without mesh axes, replicating over unused devices needs a star
        terms.insert(0, Term(star=True))
    placed = write_short(terms)
    try:
        check_mesh_axes(placed)
    except EinshardError as error:
        raise error.about(
            before_axis_rules=f"'{expression.text}'",
            to_leave_one_axis_unsharded="axis_rules(..., taken='next'), or use a name without "
            'a rule',
        ) from None
    return placed


def _apply_to_terms(
    expression: Expression, rules: AxisRules, axis_sizes: Mapping[str, int]
) -> list[tuple[Term, AxisRule | None]]:
    """Applies rules to the terms of an expression. Pairs each new term with its rule, or None."""
    pairs: list[tuple[Term, AxisRule | None]] = [(term, None) for term in expression.right]
    if not (expression.short and rules):
        return pairs
    # rules apply only to names written without a placement
    index_of = {term.name: i for i, term in enumerate(expression.right) if term == Term(term.name)}
    used = {axis for term in expression.right for axis in term.mesh_axes}
    for rule in rules:
        i = index_of.get(rule.name)
        if i is None or pairs[i][1] is not None:
            continue
        term = replace(
            _parse_placement(rule.placement), name=rule.name, span=expression.right[i].span
        )
        taken = used.intersection(term.mesh_axes)
        # a missing mesh axis that the rule ignores counts as a mesh axis of size 1
        size_if_missing = 1 if rule.ignores_missing else None
        conflicts = any(axis_sizes.get(axis, size_if_missing) != 1 for axis in taken)
        if rule.skips_taken and conflicts:
            continue
        # a mesh axis of size 1 shards nothing, so rules for several array axes may name it
        axes = tuple(a for a in term.mesh_axes if a not in taken or axis_sizes.get(a) != 1)
        used.update(axes)
        pairs[i] = replace(term, mesh_axes=axes), rule
    names = dict.fromkeys(rule.name for rule in rules)
    for term in expression.right:
        if term != Term(term.name) or term.name is None or term.name in names:
            continue
        for name in names:
            if name not in expression.names and _is_misspelled(term.name, name):
                start, end = term.span
                raise expression.error(
                    f"axis '{term.name}' has no rule, but '{name}' has one",
                    [term],
                    code='axis-rules',
                    fix=Suggestion(f'{expression.text[:start]}{name}{expression.text[end:]}'),
                    to_leave_it_unsharded=f"axis_rules({term.name}='')",
                )
    return pairs


def _is_misspelled(name: str, other: str) -> bool:
    """Whether `name` and `other` differ by one letter, or by a swap of two adjacent letters.

    Stricter than difflib, for which 'q_heads' is close to 'kv_heads'. Returns False for names that
    may well differ on purpose, such as 'w_q' and 'w_k', or if one has fewer than 4 letters (3 for
    a swap).
    """
    different = {*name.split('_')} ^ {*other.split('_')}
    shortest = min(len(name), len(other))
    if shortest < 3 or any(len(word) == 1 for word in different):
        return False
    start = _common_prefix_length(name, other)
    name, other = name[start:], other[start:]
    end = _common_prefix_length(name[::-1], other[::-1])
    name, other = name[: len(name) - end], other[: len(other) - end]
    is_swap = len(name) == 2 and name == other[::-1]
    return is_swap or (shortest > 3 and max(len(name), len(other)) == 1)


def _common_prefix_length(name: str, other: str) -> int:
    pairs = zip(name, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _keep_mesh_axes(term: Term, mesh_axes: Container[str]) -> Term:
    return replace(term, mesh_axes=tuple(axis for axis in term.mesh_axes if axis in mesh_axes))


@cached
def _parse_placement(placement: str) -> Term:
    """Parses the placement of a rule, such as '@data', into a term named 'x'."""
    (term,) = parse(f'x{placement}').right
    return term


def fix_in_axis_rules(
    fix: str | None, error: EinshardError, spec: AnySpec, context: Context
) -> str | None:
    """Suggests "axis_rules(batch='@data')" if a fix changes one placement, which came from a rule.

    Returns any other fix unchanged.
    """
    if not isinstance(fix, Suggestion) or error.expression is None:
        return fix
    if not context.axis_rules or not works(lambda: as_leaf_spec(spec)):
        return fix
    terms = zip(parse(error.expression).right, parse(fix.expression).right, strict=False)
    changed = [new for old, new in terms if new != old]
    name = changed[0].name if len(changed) == 1 else None
    if name is None or name not in {rule.name for rule in context.axis_rules}:
        return fix
    if Term(name) not in as_leaf_spec(spec).expression.right:  # the user wrote the placement
        return fix
    return RuleSuggestion(name, str(changed[0]).removeprefix(name))
