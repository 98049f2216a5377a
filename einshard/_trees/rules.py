"""Rules: specs for the leaves of a pytree, by regular expressions on their paths."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .._cache import cached, remember
from .._errors import EinshardError, combine_errors, plural, public, quoted
from .._notation.layout import axis_positions
from .._notation.words import ELLIPSIS
from .._sharding.axis_rules import check_flag, check_option
from .._sharding.context import Fallback
from .._sharding.leaf_spec import (
    LEAF_SPECS,
    REPLICATED,
    AnySpec,
    LeafSpec,
    as_leaf_spec,
    with_fallbacks,
    with_ndim,
)
from .._sharding.mesh import MeshLike
from .._text import first_of
from .._working_fixes import works
from .axis_names import rules_from_names
from .paths import leaf_text, path_and_array
from .specs import Spec, check_registered_pytree, check_signature, is_function, meshes_of, shape_of

if TYPE_CHECKING:
    from .table import Table

_NO_DEFAULT: Any = ...  # unlike an object(), it survives copy and pickle
# The rule of a leaf, and its spec. The rule is an index into `Rules.rules`; 'scalar', 'small',
# 'default' or 'not an array'; or None if no rule matches and there is no default.
_RuleAndSpec: TypeAlias = tuple[int | str | None, AnySpec | None]


class Rules:
    """Specs for the leaves of a pytree: (regular expression, spec) pairs, tried in order.

        >>> import jax
        >>> import numpy as np
        >>> from einshard import Rules, einshard
        >>> rules = Rules([
        ...     (r'kernel$', 'x y -> x y*'),
        ...     (r'bias$', '... -> * ...'),
        ... ])
        >>> n = 8 * jax.device_count()
        >>> params = {'mlp': {'kernel': np.ones((32, n)), 'bias': np.ones(n)}}
        >>> kernel = einshard(params, rules)['mlp']['kernel']
        >>> kernel.sharding.shard_shape(kernel.shape)
        (32, 8)

    The path of a leaf is its keys joined by '/', such as 'layers/0/w'. A leaf gets the spec of the
    first pattern that `re.search` finds in its path. Use `Rules` wherever a spec is expected, such
    as in `einshard` and `sharded`, for arrays and for `jax.eval_shape` results. A pattern without
    '^' also matches the optax moments of a parameter, because their paths end in its path. Scalar
    arrays are replicated. Leaves that are not arrays, such as Python numbers, are skipped.

    Args:
        rules: (pattern, spec) pairs. A spec is an expression, None for no spec, a `PartitionSpec`,
            a `NamedSharding`, or a function `(path, leaf) -> spec`.
        default: the spec of leaves that no pattern matches. If omitted, such a leaf is an error. A
            tree whose paths match no pattern at all is an error even with a default.
        indivisible: what to do if the size of an axis is not divisible by its number of shards:
            'error', or 'replicate' to replicate that axis only. `table` lists the replicated axes.
        missing: what to do with mesh axes that a spec names but the mesh lacks: 'error', or
            'replicate' to ignore them. `table` lists the ignored axes.
        min_size: leaves with fewer elements are replicated.
        strict: whether a rule that matches no path of a tree is an error.

    Raises:
        EinshardError: a pattern is not a regular expression, a rule is not a pair, or a spec is
            invalid. When applied: no rule matches a leaf, the spec of a leaf does not fit its rank
            or sizes, or rules match no path. The error lists all such leaves or rules.
    """

    @public
    def __init__(
        self,
        rules: Iterable[tuple[str, Spec]],
        *,
        default: Spec = _NO_DEFAULT,
        indivisible: Fallback = 'error',
        missing: Fallback = 'error',
        min_size: int = 0,
        strict: bool = False,
    ):
        if isinstance(rules, str | Mapping) or not isinstance(rules, Iterable):
            raise EinshardError(
                f'rules must be a list of (pattern, spec) pairs, not {rules!r}',
                code='rules',
                facts={'example': "Rules([(r'kernel$', 'x y -> x y*')])"},
            )
        self.rules = tuple(_read_rule(i, rule) for i, rule in enumerate(rules))
        self.default = default
        if default is not _NO_DEFAULT:
            _check_rule_spec(default, {'rule': 'default='})
        check_option('indivisible', indivisible)
        check_option('missing', missing)
        self.indivisible: Fallback = indivisible
        self.missing: Fallback = missing
        self.min_size = read_min_size(min_size, 'min_size=', 'elements')
        check_flag('strict', strict, 'rules')
        self.strict = strict
        self.meshes = meshes_of([spec for _, spec in self.rules] + [default])
        self.patterns = [re.compile(pattern) for pattern, _ in self.rules]
        self._matches: dict[str, int | None] = {}
        self._by_path_and_shape: dict[tuple[str, tuple[int, ...]], _RuleAndSpec] = {}
        self._checked_paths: dict[tuple[str, ...], None] = {}

    @classmethod
    @public
    def from_axis_names(
        cls, tree: Any, rules: Iterable[tuple[str, Spec]] = (), **options: Any
    ) -> Rules:
        """Makes rules from the axis names that Flax or Haliax keep with the arrays of a tree.

            >>> import jax
            >>> from einshard import Rules
            >>> from flax import linen as nn
            >>> init = nn.with_logical_partitioning(nn.initializers.ones, ('embed', 'mlp'))
            >>> dense = nn.Dense(8, kernel_init=init)
            >>> shapes = jax.eval_shape(dense.init, jax.random.key(0), jax.numpy.ones((2, 4)))
            >>> Rules.from_axis_names(shapes, default='... -> * ...')
            Rules([('(^|/)params/kernel$', 'embed mlp')], default='... -> * ...')

        Each array with names gets a rule: its path, and its names as an expression without
        placements, which `axis_rules` shard. Names are those of `nn.with_logical_partitioning`, of
        the metadata of an `nnx.Variable`, and of a `NamedArray`. Layers whose paths differ in a
        number only share a rule. The rules also place trees without names that have the same paths,
        such as those of `nn.unbox`, and the moments of an optimizer.

        Args:
            tree: the arrays, or their shapes, as from `jax.eval_shape`.
            rules: (pattern, spec) pairs, which come first. The names of arrays that they match are
                not used.
            options: those of `Rules`. `default=` is for arrays without names.

        Raises:
            EinshardError: no array has names; or an array has more names than axes or fewer, the
                same name twice, or a name that is not valid in an expression. Lists all of these.
        """
        first = cls(rules, **options)

        def has_rule(path: str) -> bool:
            return first.match(path) is not None

        return cls([*first.rules, *rules_from_names(tree, has_rule)], **options)

    def __repr__(self) -> str:
        options = {
            'indivisible': (self.indivisible, 'error'),
            'missing': (self.missing, 'error'),
            'min_size': (self.min_size, 0),
            'strict': (self.strict, False),
        }
        arguments = [repr(list(self.rules))]
        if self.default is not _NO_DEFAULT:
            arguments.append(f'default={self.default!r}')
        arguments += [f'{name}={x!r}' for name, (x, default) in options.items() if x != default]
        return f'Rules({", ".join(arguments)})'

    def __getstate__(self) -> dict[str, Any]:
        # without the caches, which other threads may change while this one pickles
        return {**self.__dict__, '_matches': {}, '_by_path_and_shape': {}, '_checked_paths': {}}

    def __call__(self, path: str, leaf: Any) -> AnySpec | None:
        """Returns the spec of one leaf."""
        return self.find_all([path], [leaf])[0][1]

    def match(self, path: str) -> int | None:
        """Returns the index of the first rule that matches a path, or None."""
        try:
            return self._matches[path]
        except KeyError:
            matching = (i for i, pattern in enumerate(self.patterns) if pattern.search(path))
            return remember(self._matches, path, next(matching, None))

    def for_leaves(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[AnySpec | None]:
        """Returns the specs of the leaves of a tree.

        The spec of a skipped leaf is None. Raises if another leaf has no valid spec, if the default
        is used but no rule matches any path, or, with `strict`, if a rule matches no path.
        """
        rules_and_specs = self.find_all(paths, leaves)
        rules = {rule for rule, _ in rules_and_specs}
        if self.strict or ('default' in rules and not any(type(rule) is int for rule in rules)):
            self._check_rules_match(tuple(paths))
        return [spec for _, spec in rules_and_specs]

    def find_all(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[_RuleAndSpec]:
        rules_and_specs: list[_RuleAndSpec] = []
        errors: list[EinshardError] = []
        unmatched: list[tuple[str, Any]] = []
        for path, leaf in zip(paths, leaves, strict=True):
            try:
                rules_and_specs.append(self.find(path, leaf))
            except EinshardError as error:
                errors.append(error)
            else:
                if rules_and_specs[-1][0] is None:
                    unmatched.append((path, leaf))
        if unmatched:
            patterns, path = [pattern for pattern, _ in self.rules], unmatched[0][0]
            near = difflib.get_close_matches(path, patterns, n=3, cutoff=0.3)
            verb = 'matches' if len(unmatched) == 1 else 'match'
            raise EinshardError(
                f'{plural(len(unmatched), "path")} {verb} no rule',
                code='rules',
                facts={
                    'paths': first_of([path_and_array(*pair) for pair in unmatched], 8),
                    **({'nearest rules': quoted(near)} if near else {}),
                    **_anchor_note(patterns, path),
                    'expected': "a rule for every path, or default='... -> * ...'",
                },
            )
        if errors:
            raise combine_errors(errors) from None
        return rules_and_specs

    def find(self, path: str, leaf: Any) -> _RuleAndSpec:
        """Returns the rule and the spec of a leaf."""
        shape = shape_of(leaf)
        if shape is None:
            try:
                check_registered_pytree(leaf)
            except EinshardError as error:
                raise error.about(array=leaf_text(path, leaf)) from None
            return 'not an array', None
        # 0.5 us per leaf; without the cache 2 us, and about 10 us more to match 50 patterns
        cached_result = self._by_path_and_shape.get((path, shape))
        if cached_result is not None:
            return cached_result
        if not shape:
            return 'scalar', REPLICATED
        if self.min_size and math.prod(shape) < self.min_size:
            return 'small', REPLICATED
        number, pattern = self.match(path), None
        if number is None:
            if self.default is _NO_DEFAULT:
                return None, None
            name, spec = 'default=', self.default
        else:
            (text, spec), pattern = self.rules[number], self.patterns[number]
            name = f"'{text}'"
        try:
            leaf_spec = _spec_for(spec, path, leaf, pattern)
        except EinshardError as error:
            raise error.about(array=leaf_text(path, leaf), rule=name) from None
        if leaf_spec is not None:
            leaf_spec = with_fallbacks(
                leaf_spec, on_missing=self.missing, on_indivisible=self.indivisible, rule=name
            )
        result: _RuleAndSpec = ('default' if number is None else number, leaf_spec)
        if not callable(spec):  # the result of a function may depend on more than path and shape
            remember(self._by_path_and_shape, (path, shape), result)
        return result

    def table(self, tree: Any, *, mesh: MeshLike | None = None) -> Table:
        """Shows how the rules shard each leaf, with totals, and the rules that never apply.

            >>> import jax
            >>> from einshard import Rules, device_mesh
            >>> mesh = device_mesh(jax.sharding.AbstractMesh((8,), ('d0',)))
            >>> shapes = jax.eval_shape(lambda: {'kernel': jax.numpy.ones((8, 4))})
            >>> table = Rules([('kernel', 'x y -> * x y2')]).table(shapes, mesh=mesh)
            >>> table.rows[0].shard_shape
            (8, 2)

        Uses only shapes and dtypes, and allocates no arrays. The table prints as text, and as HTML
        in notebooks. `mesh` is as for `make_sharding`; an `AbstractMesh` needs no devices.
        """
        from .table import make_table  # with pages and HTML, which other uses do not need

        return make_table(self, tree, mesh, self.patterns)

    def _check_rules_match(self, paths: tuple[str, ...]) -> None:
        """Raises if no rule matches any path. With `strict`, raises if a rule matches no path.

        Skips a single array, whose path is '', and `Rules` with only a default.
        """
        if paths in self._checked_paths or not self.rules or paths == ('',):
            return
        unused = [p.pattern for p in self.patterns if not any(map(p.search, paths))]
        all_unused = len(unused) == len(self.patterns)
        if unused and (self.strict or all_unused):
            verb = 'matches' if len(unused) == 1 else 'match'
            no_match = f'{plural(len(unused), "rule")} {verb} no'
            subject = 'no rule matches any' if all_unused else no_match
            facts = {
                'rules': first_of([f"'{pattern}'" for pattern in unused], 8),
                'paths': first_of([f"'{path}'" for path in paths], 8) or 'none',
            }
            facts |= _anchor_note(unused, paths[0]) if paths else {}
            if all_unused and self.default is not _NO_DEFAULT:
                facts['to use default= for all leaves'] = 'pass the default spec instead of Rules'
            raise EinshardError(f'{subject} path of the tree', code='rules', facts=facts)
        remember(self._checked_paths, paths, None, limit=256)


def _anchor_note(patterns: Sequence[str], path: str) -> dict[str, str]:
    """Returns a note if a pattern without its '^' or '$' matches `path`, and {} otherwise."""
    for pattern in patterns:
        for anchor, rest in (('$', pattern.removesuffix('$')), ('^', pattern.removeprefix('^'))):
            if rest != pattern and not rest.endswith('\\') and re.search(rest, path):
                return {'note': f"without '{anchor}', '{pattern}' would match '{path}'"}
    return {}


def _part_of_word_note(pattern: re.Pattern[str], path: str) -> dict[str, str]:
    """Returns a note if a pattern such as 'o' matches part of a longer word, such as 'down'."""
    text, match = pattern.pattern, pattern.search(path)
    words = rf'\b({text})\b' if '|' in text else rf'\b{text}\b'
    if not match or not re.fullmatch(r'\w+(\|\w+)*', text) or re.search(words, path):
        return {}
    (word,) = (w[0] for w in re.finditer(r'\w+', path) if w.start() <= match.start() < w.end())
    return {'note': f"'{text}' matches part of '{word}'; r'{words}' matches whole words only"}


def _read_rule(number: int, rule: Any) -> tuple[str, Spec]:
    if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
        raise EinshardError(
            f'rule {number} is not a (pattern, spec) pair: {rule!r}',
            code='rules',
            facts={'example': "(r'kernel$', 'x y -> x y*')"},
        )
    pattern, spec = rule
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        at = getattr(error, 'pos', None)
        raise EinshardError(
            f'rule {number} is not a valid regular expression: {getattr(error, "msg", error)}',
            code='rules',
            expression=pattern,
            spans=[] if at is None else [(at, at + 1)],
        ) from None
    _check_rule_spec(spec, {'rule': f"'{pattern}'"})
    return pattern, spec


def _check_rule_spec(spec: Spec, facts: dict[str, str]) -> None:
    try:
        if isinstance(spec, LEAF_SPECS):
            as_leaf_spec(spec)
        elif spec is not None and is_function(spec):
            check_signature(spec)
        elif spec is not None:
            raise EinshardError(
                f'{spec!r} is not a spec for a rule', code='rules', facts={'expected': _SPECS}
            )
    except EinshardError as error:
        raise error.about(**facts) from None


_SPECS = 'an expression, a PartitionSpec, a NamedSharding, None, or a function (path, leaf) -> spec'


def read_min_size(size: Any, option: str, unit: str) -> int:
    """Reads an option such as `min_size=`. Raises if it is not a non-negative integer."""
    try:
        n = -1 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        n = -1
    if n < 0:
        raise EinshardError(
            f'{option} must be a non-negative number of {unit}, not {size!r}', code='rules'
        )
    return n


def _spec_for(spec: Spec, path: str, leaf: Any, pattern: re.Pattern[str] | None) -> LeafSpec | None:
    if spec is None:
        return None
    if is_function(spec):
        return _spec_for(spec(path, leaf), path, leaf, pattern)
    if not isinstance(spec, LEAF_SPECS):
        raise EinshardError(
            f'the spec function returned {spec!r}, which is not a spec for a rule',
            code='rules',
            facts={'expected': _SPECS},
        )
    leaf_spec = as_leaf_spec(spec)
    try:
        return _fit_to_rank(leaf_spec, len(leaf.shape))
    except EinshardError as error:
        if stacked := _stacked_note(leaf_spec, len(leaf.shape)):
            error = error.with_fix(None)  # 'o* ...', which would shard the layers
        notes = _part_of_word_note(pattern, path) if pattern else {}
        raise error.about(**notes, **stacked) from None


def _stacked_note(spec: LeafSpec, ndim: int) -> dict[str, str]:
    """Says what the spec of one layer is for layers that are stacked for `jax.lax.scan`."""
    if spec.partition is not None or ndim <= len(spec.expression.names):
        return {}
    sides = spec.expression.text.split('->')
    text = ' -> '.join(f'{ELLIPSIS} {side.strip()}' for side in sides)
    fits = works(lambda: _fit_to_rank(as_leaf_spec(text), ndim))
    return {'for_stacked_layers': f"'{text}'"} if fits else {}


@cached
def _fit_to_rank(spec: LeafSpec, ndim: int) -> LeafSpec:
    spec = with_ndim(spec, ndim)
    axis_positions(spec.expression, ndim)  # raises if the rank does not fit
    return spec
