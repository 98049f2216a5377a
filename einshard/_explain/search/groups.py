"""Groups the places of a program whose shardings have to change together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from ..._program.jaxpr.spans import Span
from ..._program.traced.axis_classes import AxisClasses
from ..._program.traced.outline import Place
from ..._program.traced.propagated import Axes
from ..._program.traced.variants import Variants

# a constraint on a smaller value than this part of the largest is not tried
_MIN_SIZE = 1 / 16
_WORD = re.compile(r'[^\W\d]\w*')
_NUMBER = re.compile(r'_\d+$')


@dataclass(frozen=True)
class Group:
    """Sites that change together.

    Attributes:
        key: the same for the same group of another variant of the program.
        kind: 'argument' for arguments and the results that replace them, 'data', 'result',
            'axis' for all arguments with an axis of one class, 'constraint', 'value' for values
            without a constraint, or 'through' for what moves from one placement to another.
        path: of a constraint or a value, the expression and its calls, innermost first.
        names: of arguments and results.
        dims: the dimension of each site that changes, if only one does.
    """

    key: Hashable
    kind: str
    sites: tuple[Place, ...]
    path: tuple[Span, ...] = ()
    names: tuple[str, ...] = ()
    dims: tuple[int, ...] = ()


@dataclass(frozen=True)
class Named:
    """What the caller knows about the arguments and results of a module.

    Attributes:
        arguments, results: their paths, such as 'params/layers/0/w' and 'result/0/w'.
        data: the numbers of arguments that are neither weights nor states, such as tokens.
        replaced: {result: the argument that it replaces in the next call}.
    """

    arguments: Sequence[str]
    results: Sequence[str]
    data: Collection[int] = ()
    replaced: Mapping[int, int] | None = None


def find_groups(variants: Variants, named: Named) -> list[Group]:
    """Returns the groups of a program, each site in one or more of them.

    A parameter, the same one of other layers, its optimizer states and averages, and the results
    that replace them are one group. Arguments of one shape and sharding with axes of the same
    classes, such as the two up projections of a gated layer, are a second group, and so are
    constraints of one line, which a helper or a loop over a tree has. All arguments with an axis of
    one class are a group for that axis, such as a batch with what is cached for it.
    """
    classes = AxisClasses(variants.outline)
    ends = [*_ends(variants, named, classes)]
    return [*ends, *_axes(variants, ends, classes), *_values(variants)]


# --- arguments and results ------------------------------------------------------------------------


def _ends(variants: Variants, named: Named, classes: AxisClasses) -> Iterable[Group]:
    outline, given = variants.outline, variants.given
    shape = {site: variants.shape(site) for site in given if site.kind != 'constraint'}
    names = {
        Place(kind, i): name
        for kind, each in (('argument', named.arguments), ('result', named.results))
        for i, name in enumerate(each)
    }
    words = {site: _words(name) for site, name in names.items()}
    # of a result, the argument that it replaces in the next call, or whose memory it has
    replaced = {r: a for a, r in outline.aliases.items()} | dict(named.replaced or {})
    owners = {
        (words[site], shape[site])
        for site in names
        if site.kind == 'argument' and site.index not in named.data
    }

    def owner(site: Place) -> tuple[Hashable, ...]:
        """The parameter: the argument of this shape with the shortest path that ends the site's."""
        if site.kind == 'argument' and site.index in named.data:
            return 'data', shape[site][:1]
        own = words[site]
        alike = [
            each
            for each in owners
            if each[1] == shape[site] and own[len(own) - len(each[0]) :] == each[0]
        ]
        return min(alike, key=lambda each: len(each[0]), default=('result', names[site]))

    groups: dict[tuple[Hashable, ...], dict[Place, None]] = defaultdict(dict)
    for site in names:
        if not shape[site]:
            continue
        if site.kind == 'result' and site.index in replaced:
            # what replaces an argument is sharded as it, or the module may not compile
            groups[owner(Place('argument', replaced[site.index]))][site] = None
        else:
            groups[owner(site)][site] = None
    for key, sites in groups.items():
        first = next(iter(sites))
        is_data = key[0] == 'data'
        kind = 'data' if is_data else first.kind
        yield Group(key, kind, tuple(sites), names=tuple(names[site] for site in sites))
        ranks = {len(shape[site]) for site in sites}
        if kind == 'data' and len(ranks) > 1:  # together, they move by their leading dimensions
            for site in sites:
                if len(shape[site]) > min(ranks):
                    yield Group(('data', site), kind, (site,), names=(names[site],))
        for site in [*sites][1:] if kind == 'argument' else ():
            # the layers of a model may have nothing else in common
            classes.link_all(variants.value(first), variants.value(site), len(shape[first]))
    alike: dict[Hashable, list[tuple[Hashable, ...]]] = defaultdict(list)
    for key, sites in groups.items():
        first = next(iter(sites))
        if first.kind == 'argument' and key[:1] != ('data',):
            axes = [classes.of((variants.value(first), d)) for d in range(len(shape[first]))]
            alike[shape[first], tuple(axes), _stripped(given[first])].append(key)
    for key, keys in alike.items():
        if len(keys) > 1:
            sites = tuple(chain.from_iterable(groups[each] for each in keys))
            each = tuple(names[site] for site in sites)
            yield Group(('together', key), 'argument', sites, names=each)


def _axes(variants: Variants, ends: Sequence[Group], classes: AxisClasses) -> Iterable[Group]:
    values = {
        variants.value(site): site
        for site in variants.given
        if site.kind == 'argument' or (site.kind == 'result' and variants.given[site] is not None)
    }
    names = {
        site: name for group in ends for site, name in zip(group.sites, group.names, strict=True)
    }
    for found in classes.members({v: len(variants.shape(site)) for v, site in values.items()}):
        sites = tuple(values[v] for v in found)
        if sum(site.kind == 'argument' for site in sites) > 1:
            each = tuple(names[site] for site in sites)
            yield Group(('axis', *found.items()), 'axis', sites, (), each, tuple(found.values()))


def _words(path: str) -> tuple[str, ...]:
    """The keys of a path below the argument, without the numbers of layers and of states."""
    inner = path.partition('/')[2] or path
    words = _WORD.findall(inner.removesuffix('/value'))  # NNX ends the path of a Variable so
    # layers of Flax are layer_0, layer_1, ...; Dense_0 and Dense_1 of a layer are different weights
    return (*(_NUMBER.sub('', word) for word in words[:-2]), *words[-2:])


def _stripped(axes: Axes | None) -> Axes:
    found = list(axes or ())
    while found and not found[-1]:
        found.pop()
    return tuple(found)


# --- constraints ----------------------------------------------------------------------------------


def _values(variants: Variants) -> Iterable[Group]:
    groups: dict[tuple[str, Any, tuple[int, ...]], list[Place]] = defaultdict(list)
    n_mapped: dict[Hashable, int] = {}
    sizes = [prod(variants.shape(site)) for site in variants.given]
    smallest = _MIN_SIZE * max(sizes, default=0)
    for site in variants.given:
        if site.kind != 'constraint' or not variants.shape(site):
            continue
        found = variants.sites[site]
        if found is None:
            continue
        (kind, what), mapped = found
        if kind != 'constraint' and prod(variants.shape(site)) < smallest:
            continue
        key = kind, what, variants.shape(site)
        groups[key].append(site)
        n_mapped[key] = mapped
    by_line: dict[tuple[Span, Axes], list[Any]] = defaultdict(list)
    for key, sites in groups.items():
        kind, what, _ = key
        path: tuple[Span, ...] = what if kind in ('constraint', 'value') else ()
        yield Group(key, kind, tuple(sites), path)
        if kind == 'constraint' and not n_mapped[key]:
            by_line[what[0], _stripped(variants.given[sites[0]])].append(key)
    for (span, _), keys in by_line.items():
        if len(keys) > 1:
            sites = tuple(chain.from_iterable(groups[key] for key in keys))
            yield Group(('together', *keys), 'constraint', sites, (span,))
