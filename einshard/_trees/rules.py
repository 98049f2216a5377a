"""Rules by path: where every leaf of a model lives, from a table of regular expressions."""

from __future__ import annotations

import difflib
import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from .._cache import cached
from .._errors import EinshardError, plural, quoted
from .._notation.expression import Expression, Term, axis_letters, check_mesh_axes, parse
from .._notation.layout import axis_positions
from .._notation.write import write, write_short
from .._sharding.axis_rules import Missing, check_missing
from .._sharding.context import current_context, mesh_scope
from .._sharding.leaf_spec import REPLICATED, AnySpec, LeafSpec, as_leaf_spec, lenient
from .._sharding.mesh import MeshLike, entry_axes, sizes_of
from .._text import array_text, first_of
from .paths import leaf_paths, leaf_text
from .specs import Spec, check_visible, is_function
from .table import Table, make_table

_NO_DEFAULT: Any = ...  # stays itself in a copy and in a pickle, as an object() does not
# the position of a rule, or why there is none; and the spec of the leaf
_Found: TypeAlias = tuple[int | str | None, AnySpec | None]


class Rules:
    """Where the leaves of a tree live: (regular expression, spec) pairs, tried in order.

        >>> rules = Rules([
        ...     (r'kernel$', 'x y -> * x y2'),
        ...     (r'bias$', '... -> * ...'),
        ... ])
        >>> params = {'mlp': {'kernel': np.ones((8, 4)), 'bias': np.ones(4)}}
        >>> describe(einshard(params, rules)['mlp']['kernel'])
        'a b -> 8 a b2'

    The spec of a leaf is that of the first pattern which `re.search` finds in its path: the keys of
    the tree, joined by '/'; it begins with a place, '0/w', where rules are part of a tuple of
    specs. `Rules` are a spec, so they go wherever one does: into `einshard` and `sharded`, for
    arrays and for the shapes of `jax.eval_shape`. The moments of an optimizer have the paths of
    their parameters in their own, so the same rules place them. Arrays without dimensions are on
    every device; what is no array, a number of Python too, is left alone.

    Args:
        rules: pairs of a pattern and a spec: an expression, None to leave the leaf alone, a
            `jax.sharding.PartitionSpec`, or a function `(path, leaf) -> spec`.
        default: the spec of leaves that no pattern matches; where left out, they are an error.
        indivisible: what happens to an axis whose parts do not divide its size: 'error', or
            'replicate' that axis and keep the others; `table` lists such axes.
        missing: what becomes of mesh axes that a spec names and the mesh does not have: 'error',
            or 'replicate' to cut nothing over them; `table` lists them.
        min_size: leaves of fewer elements are on every device.

    Raises:
        EinshardError: a pattern is no regular expression, a rule no pair, a spec wrong. In use: no
            rule matches a leaf, or its rule does not fit its rank or its sizes.
    """

    def __init__(
        self,
        rules: Iterable[tuple[str, Spec]],
        *,
        default: Spec = _NO_DEFAULT,
        indivisible: Literal['error', 'replicate'] = 'error',
        missing: Missing = 'error',
        min_size: int = 0,
    ):
        if isinstance(rules, str | Mapping) or not isinstance(rules, Iterable):
            raise EinshardError(
                f'rules are a list of pairs of a pattern and a spec, not {rules!r}',
                facts={'as in': "Rules([(r'kernel$', 'x y -> x y*')])"},
            )
        self.rules = tuple(_checked(i, rule) for i, rule in enumerate(rules))
        self.default = default
        if default is not _NO_DEFAULT:
            _check_rule_spec(default, {'of': 'default='})
        if indivisible not in ('error', 'replicate'):
            raise EinshardError(f"indivisible= is 'error' or 'replicate', not {indivisible!r}")
        check_missing(missing)
        self.indivisible: Missing = indivisible
        self.missing: Missing = missing
        self.min_size = _size(min_size)
        self.patterns = [re.compile(pattern) for pattern, _ in self.rules]
        self._matches: dict[str, int | None] = {}
        self._found: dict[tuple[str, tuple[int, ...]], _Found] = {}

    def __repr__(self) -> str:
        return f'Rules({list(self.rules)!r})'

    def __getstate__(self) -> dict[str, Any]:
        # without the caches, to which other threads may add meanwhile
        return {**self.__dict__, '_matches': {}, '_found': {}}

    def __call__(self, path: str, leaf: Any) -> AnySpec | None:
        """The spec of one leaf."""
        return self.for_leaves([path], [leaf])[0]

    def match(self, path: str) -> int | None:
        """The position of the rule for a path; None where no pattern matches."""
        if path not in self._matches:
            found = (i for i, pattern in enumerate(self.patterns) if pattern.search(path))
            self._matches[path] = next(found, None)
        return self._matches[path]

    def for_leaves(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[AnySpec | None]:
        """The specs of many leaves; one error for all that no rule matches."""
        return [spec for _, spec in self.find_all(paths, leaves)]

    def find_all(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[_Found]:
        """What `find` says of many leaves; one error for all that no rule matches."""
        found = [self.find(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        unmatched = [i for i, (reason, _) in enumerate(found) if reason is None]
        if unmatched:
            raise self._unmatched([(paths[i], leaves[i]) for i in unmatched])
        return found

    def find(self, path: str, leaf: Any) -> _Found:
        """The rule for a leaf, or why it needs none, and the spec that comes of it."""
        # a Mesh has a shape too, but is no array
        shape = leaf.shape if hasattr(leaf, 'dtype') else None
        if shape is None:  # numbers of Python too: modules hold them as settings
            try:
                check_visible(leaf)
            except EinshardError as error:
                raise error.about(array=leaf_text(path, leaf)) from None
            return 'no array', None
        # known: 0.5 us a leaf; else 2 us beside some 10 to match it against 50 patterns
        known = self._found.get((path, shape))
        if known is not None:
            return known
        if not shape:
            return 'scalar', REPLICATED
        if self.min_size and math.prod(shape) < self.min_size:
            return 'small', REPLICATED
        number = self.match(path)
        if number is None:
            if self.default is _NO_DEFAULT:
                return None, None
            rule, spec = 'default', self.default
        else:
            rule, spec = self.rules[number]
        one = _spec_for(spec, path, leaf, rule)
        if one is not None:
            one = lenient(one, on_missing=self.missing, on_indivisible=self.indivisible)
        found: _Found = ('default' if number is None else number, one)
        if not callable(spec):  # a function may look at more than the shape
            self._found[path, shape] = found
        return found

    def table(self, tree: Any, *, mesh: MeshLike | None = None) -> Table:
        """What the rules make of a tree, leaf by leaf, with totals and what is odd about them.

            >>> shapes = jax.eval_shape(lambda: {'kernel': jax.numpy.ones((8, 4))})
            >>> table = Rules([('kernel', 'x y -> * x y2')]).table(shapes)
            >>> table.rows[0].shard_shape
            (8, 2)

        Nothing is allocated: shapes are enough. Printed it is text, in a notebook HTML. `mesh` is
        as for `make_sharding`; an `AbstractMesh` needs no devices.
        """
        context = current_context(mesh)
        with mesh_scope(context.mesh):
            found = self.find_all(leaf_paths(tree), jtu.tree_leaves(tree))
        return make_table(tree, found, self.patterns, context)

    def _unmatched(self, leaves: Sequence[tuple[str, Any]]) -> EinshardError:
        shown = [f"'{path}' {array_text(leaf)}" for path, leaf in leaves]
        patterns = [pattern for pattern, _ in self.rules]
        near = difflib.get_close_matches(leaves[0][0], patterns, n=3, cutoff=0.3)
        facts = {'paths': first_of(shown, 8)}
        if near:
            facts['nearest rules'] = quoted(near)
        path = leaves[0][0]
        too_short = (p for p in patterns if p.endswith('$') and not p.endswith(r'\$'))
        one = next((p for p in too_short if re.search(p[:-1], path)), None)
        if one is not None:
            facts['without its $'] = f"'{one}' would match '{path}'"
        facts['give'] = "a rule that matches, or default='... -> * ...'"
        verb = 'is' if len(leaves) == 1 else 'are'
        return EinshardError(
            f'{plural(len(leaves), "path")} {verb} matched by no rule', facts=facts
        )


def shard_largest(path: str, leaf: Any) -> str:
    """A spec for any array: its largest divisible axis over all devices, else on every device.

    As a `default=` of `Rules`, or alone, this is what fully sharded data parallelism does to
    parameters. Of axes of one size, the first is taken.

        >>> einshard(np.ones((3, 32)), shard_largest).sharding.shard_shape((3, 32))
        (3, 2)
    """
    n_devices = math.prod(sizes_of(current_context().lowering_mesh).values())
    shape: Sequence[int] = np.shape(leaf)
    axes = [axis for axis, size in enumerate(shape) if size % n_devices == 0 and size]
    if not axes or n_devices == 1:
        return REPLICATED
    chosen = max(axes, key=lambda axis: (shape[axis], -axis))
    names = list(itertools.islice(axis_letters(), len(shape)))
    return write_short(Term(name, star=i == chosen) for i, name in enumerate(names)).text


def _checked(number: int, rule: Any) -> tuple[str, Spec]:
    if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
        raise EinshardError(
            f'rule {number} is no pair of a pattern and a spec, but {rule!r}',
            facts={'as in': "(r'kernel$', 'x y -> x y*')"},
        )
    pattern, spec = rule
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        at = getattr(error, 'pos', None)
        raise EinshardError(
            f'rule {number} is no regular expression: {getattr(error, "msg", error)}',
            expression=pattern,
            spans=[] if at is None else [(at, at + 1)],
        ) from None
    _check_rule_spec(spec, {'rule': f"'{pattern}'"})
    return pattern, spec


def _check_rule_spec(spec: Spec, facts: dict[str, str]) -> None:
    try:
        if isinstance(spec, str):
            as_leaf_spec(spec)
        elif isinstance(spec, PartitionSpec):
            _check_partition(spec)
        elif spec is not None and not is_function(spec):
            raise EinshardError(f'{spec!r} is no spec of a rule', facts={'specs are': _SPECS})
    except EinshardError as error:
        raise error.about(**facts) from None


_SPECS = 'an expression, None, a PartitionSpec, a function (path, leaf) -> spec'


def _check_partition(spec: PartitionSpec) -> None:
    """Raises for what a PartitionSpec can say of values in a program, but not of an array."""
    if spec.unreduced or spec.reduced or PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise EinshardError(
            f'{spec} does not say where an array lives',
            facts={'allowed': 'mesh axes, tuples of them, and None'},
        )


def _size(size: Any) -> int:
    try:
        return operator.index(size)
    except TypeError:
        raise EinshardError(f'min_size= is a number of elements, not {size!r}') from None


def _spec_for(spec: Spec, path: str, leaf: Any, rule: str) -> LeafSpec | None:
    """The spec of a rule for one leaf; raises where its rank is another."""
    if spec is None:
        return None
    if is_function(spec):
        return _spec_for(spec(path, leaf), path, leaf, rule)
    try:
        if not isinstance(spec, str | PartitionSpec | LeafSpec):
            raise EinshardError(
                f'a function of the path gave {spec!r}, which is no spec of a rule',
                facts={'specs are': _SPECS},
            )
        return _of_rank(spec, len(leaf.shape))
    except EinshardError as error:
        raise error.about(array=leaf_text(path, leaf), rule=f"'{rule}'") from None


@cached
def _of_rank(spec: AnySpec | PartitionSpec, n_dims: int) -> LeafSpec:
    """The spec of a leaf, read and checked against a rank."""
    if isinstance(spec, PartitionSpec):
        return LeafSpec(_expression_of(spec, n_dims))
    known = as_leaf_spec(spec)
    axis_positions(known.expression, n_dims)
    return known


def _expression_of(spec: PartitionSpec, n_dims: int) -> Expression:
    _check_partition(spec)
    if len(spec) > n_dims:
        raise EinshardError(
            f'{spec} places {plural(len(spec), "axis")}, '
            f'but the array has {plural(n_dims, "dimension")}'
        )
    if not any(spec):
        return parse(REPLICATED)
    names = list(itertools.islice(axis_letters(), n_dims))
    right = [
        Term(name, mesh_axes=tuple(map(str, entry_axes(entry))))
        for name, entry in itertools.zip_longest(names, spec)
    ]
    expression = write(map(Term, names), right)
    check_mesh_axes(expression)
    return expression
