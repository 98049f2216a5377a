"""Names the axes of a step that has no axis names, by what its operations link.

Axes of arrays that operations link or contract are one class, such as a batch or a width. Classes
have two placements: one in weights and other states, one in data and activations. Without two, FSDP
cannot be said: it shards the width of weights, and not that of activations.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .._explain.search.groups import Group
from .._program.traced.axis_classes import AxisClasses, Dim
from .._program.traced.outline import Outline, Place
from .._program.traced.variants import Variants
from .._trees.axis_names import MetadataNames

# keys of weights in modules, which do not say what a weight is
_GENERIC = frozenset(
    ('kernel', 'weight', 'w', 'bias', 'b', 'scale', 'embedding', 'value', 'params', 'array')
)
_WORD = re.compile(r'[^\W\d_]+(?:_[^\W\d_]+)*')
WIDTH, ACTIVATION = 'width', 'activation_'

# the name of each axis of an array; '' for one that is never sharded
Names: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class NamedClasses:
    """The axis names of a step.

    Attributes:
        names: of each argument, and of each value that a constraint may shard.
        sizes: of each name, the distinct sizes of its axes.
        examples: of each name, an axis of an argument that has it, such as 'layers/up axis 1'.
    """

    names: Mapping[Place, Names]
    sizes: Mapping[str, Sequence[int]]
    examples: Mapping[str, str]


def name_classes(
    variants: Variants,
    paths: Sequence[str],
    data: Collection[int],
    groups: Sequence[Group],
    labels: Mapping[int, MetadataNames],
) -> NamedClasses:
    """Names the axes of arguments and of values.

    Args:
        paths: of the arguments.
        data: the numbers of the arguments that are neither weights nor other states.
        groups: those of `find_groups`; the layers of a parameter have the same names.
        labels: the user's names of the axes of arguments. Axes with one name are one class.
    """
    outline = variants.outline
    classes = AxisClasses(outline)
    known = _link(classes, variants, data, groups, labels)
    places = [(Place('argument', i), value) for i, value in enumerate(outline.arguments)]
    arguments = {
        place: [
            classes.of((value, d))
            for d in range(variants.ranks.get(place, len(outline.types[value].shape)))
        ]
        for place, value in places
    }
    data = data or _data(variants, paths, classes)
    # what is kept for a batch, such as a cache, is no weight
    batches = {arguments[p][0] for p in arguments if p.index in data and arguments[p]}
    given = {p: x for p, x in arguments.items() if p.index in data or not batches.isdisjoint(x)}
    weights = {p: x for p, x in arguments.items() if p not in given}
    names = _names(weights, given, paths, known, batches)
    in_weights = {c for dims in weights.values() for c in dims}
    values = {
        p: [classes.of((variants.value(p), d)) for d in range(len(variants.shape(p)))]
        for p, site in variants.sites.items()
        if site is not None and site[0][0] == 'value'
    }
    named: dict[Place, Names] = {}
    for place, dims in (given | weights | values).items():
        prefix = '' if place in weights else ACTIVATION
        # of two axes of a class, as of a square matrix, the first is sharded
        own = tuple(
            (prefix if c in in_weights else '') + names[c]
            if c in names and c not in dims[:d]
            else ''
            for d, c in enumerate(dims)
        )
        # a key of random numbers has one axis more in the module
        named[place] = own + ('',) * (len(variants.shape(place)) - len(own))
    return _described(named, variants, paths)


def _link(
    classes: AxisClasses,
    variants: Variants,
    data: Collection[int],
    groups: Sequence[Group],
    labels: Mapping[int, MetadataNames],
) -> dict[Dim, str]:
    """Links what layers, labels and loops have in common. Returns names that are known so far."""
    outline = variants.outline
    for group in groups:
        sites = [s for s in group.sites if s.kind == 'argument']
        if group.kind == 'argument' and sites and sites[0].index not in data:
            first = sites[0]
            for site in sites[1:]:
                ndim = len(variants.shape(first))
                classes.link_all(variants.value(first), variants.value(site), ndim)
    labelled: dict[str, Dim] = {}
    for i, each in labels.items():
        for d, names in enumerate(each):
            if len(names) == 1:
                dim = outline.arguments[i], d
                classes.link(labelled.setdefault(names[0], dim), dim)
    layers = _link_layers(classes, outline)
    known = {classes.of(dim): name for name, dim in labelled.items()}
    return {**dict.fromkeys(map(classes.of, layers), 'layers'), **known}


def _described(
    named: Mapping[Place, Names], variants: Variants, paths: Sequence[str]
) -> NamedClasses:
    """Finds the sizes of each name, and an example."""
    sizes: dict[str, set[int]] = defaultdict(set)
    examples: dict[str, str] = {}
    for place, each in named.items():
        for d, (name, size) in enumerate(zip(each, variants.shape(place), strict=True)):
            if name and size > 1:
                sizes[name].add(size)
                if place.kind == 'argument':
                    examples.setdefault(name, f'axis {d} of {paths[place.index]}')
    return NamedClasses(named, {name: sorted(each) for name, each in sizes.items()}, examples)


def _data(variants: Variants, paths: Sequence[str], classes: AxisClasses) -> Collection[int]:
    """Guesses which arguments are data, where no gradient tells.

    They are arrays, not trees of arrays, and lead with an axis with which a result leads, too.
    """
    outline = variants.outline
    leading = {classes.of((v, 0)) for v in outline.ends if outline.types[v].shape}
    return {
        i
        for i, v in enumerate(outline.arguments)
        if '/' not in paths[i] and outline.types[v].shape and classes.of((v, 0)) in leading
    }


def _link_layers(classes: AxisClasses, outline: Outline) -> Collection[Dim]:
    """Makes the axes along which loops take one slice after another one class for each length.

    Returns one axis of each class.
    """
    first: dict[int, Dim] = {}
    for form, operands, _, _, _ in outline.steps:
        if form.kind == 'dynamic_slice' and form.slices:
            shape = form.operands[0].shape
            sliced = [d for d, n in enumerate(shape) if form.slices[d] != n]
            if len(sliced) == 1 and form.slices[sliced[0]] == 1:
                dim = operands[0], sliced[0]
                classes.link(first.setdefault(shape[sliced[0]], dim), dim)
    return [*first.values()]


def _names(
    weights: Mapping[Place, Sequence[Dim]],
    data: Mapping[Place, Sequence[Dim]],
    paths: Sequence[str],
    known: Mapping[Dim, str],
    batches: Collection[Dim],
) -> dict[Dim, str]:
    """A name for each class: the batch, the width, or keys of arrays that have it."""
    found: dict[Dim, str] = {}
    taken = Counter[str]()

    def give(c: Dim, name: str) -> None:
        if c not in found:
            taken[name] += 1
            # axis names have no digits
            found[c] = name + f'_{chr(ord("a") + taken[name] - 2)}' * (taken[name] > 1)

    for c, name in known.items():
        give(c, name)
    counts = Counter(c for dims in weights.values() for c in {*dims})
    matrices = [p for p, dims in weights.items() if len(dims) > 1]
    widths = {c: n for c, n in counts.items() if 2 * n > len(weights) and len(matrices) > 1}
    if widths:
        give(max(widths, key=widths.__getitem__), WIDTH)
    for place, dims in sorted(data.items(), key=lambda each: -len(each[1])):
        for c in dims:
            if c not in counts:
                give(c, 'batch' if c in batches else _key(paths[place.index]))
    for c, _ in counts.most_common():
        keys = dict.fromkeys(
            _key(paths[place.index]) for place, dims in weights.items() if c in dims
        )
        give(c, '_'.join([*keys][:2]))
    return found


def _key(path: str) -> str:
    """The last word of a path that says what an array is."""
    words = [w for w in _WORD.findall(path) if w.lower() not in _GENERIC]
    return words[-1] if words else 'axis'
