"""Groups the places of a program whose shardings have to change together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from ..._program.jaxpr.spans import Span
from ..._program.traced.outline import Place
from ..._program.traced.program import Axes
from ..._program.traced.variants import Variants

# a constraint on a smaller value than this part of the largest is not tried
_MIN_SIZE = 1 / 16
_WORD = re.compile(r'[^\W\d]\w*')


@dataclass(frozen=True)
class Group:
    """Sites that change together.

    Attributes:
        key: the same for the same group of another variant of the program.
        kind: 'argument' for arguments and the results that replace them, 'data', 'result',
            'constraint', or 'value' for values without a constraint.
        path: of a constraint or a value, the expression and its calls, innermost first.
        names: of arguments and results.
    """

    key: Hashable
    kind: str
    sites: tuple[Place, ...]
    path: tuple[Span, ...] = ()
    names: tuple[str, ...] = ()


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
    that replace them are one group. Arguments of one shape and sharding, such as the two up
    projections of a gated layer, are a second group, and so are constraints of one line, which a
    helper or a loop over a tree has.
    """
    return [*_ends(variants, named), *_values(variants)]


# --- arguments and results ------------------------------------------------------------------------


def _ends(variants: Variants, named: Named) -> Iterable[Group]:
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

    def owner(site: Place) -> Hashable:
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

    groups: dict[Hashable, dict[Place, None]] = defaultdict(dict)
    for site in names:
        if not shape[site]:
            continue
        if site.kind == 'result' and site.index in replaced:
            # what replaces an argument is sharded as it, or the module may not compile
            groups[owner(Place('argument', replaced[site.index]))][site] = None
        else:
            groups[owner(site)][site] = None
    alike: dict[Hashable, list[Hashable]] = defaultdict(list)
    for key, sites in groups.items():
        first = next(iter(sites))
        is_data = isinstance(key, tuple) and key[0] == 'data'
        kind = 'data' if is_data else first.kind
        yield Group(key, kind, tuple(sites), names=tuple(names[site] for site in sites))
        ranks = {len(shape[site]) for site in sites}
        if kind == 'data' and len(ranks) > 1:  # together, they move by their leading dimensions
            for site in sites:
                if len(shape[site]) > min(ranks):
                    yield Group(('data', site), kind, (site,), names=(names[site],))
        if kind == 'argument':
            alike[shape[first], _stripped(given[first])].append(key)
    for key, keys in alike.items():
        if len(keys) > 1:
            sites = tuple(chain.from_iterable(groups[each] for each in keys))
            each = tuple(names[site] for site in sites)
            yield Group(('together', key), 'argument', sites, names=each)


def _words(path: str) -> tuple[str, ...]:
    """The keys of a path below the argument, without the numbers of layers and of states."""
    inner = path.partition('/')[2] or path
    return tuple(_WORD.findall(inner.removesuffix('/value')))  # NNX ends the path of a Variable so


def _stripped(axes: Axes | None) -> Axes:
    found = list(axes or ())
    while found and not found[-1]:
        found.pop()
    return tuple(found)


# --- constraints ----------------------------------------------------------------------------------


def _values(variants: Variants) -> Iterable[Group]:
    groups: dict[Hashable, list[Place]] = defaultdict(list)
    paths: dict[Hashable, tuple[Span, ...]] = {}
    sizes = [prod(variants.shape(site)) for site in variants.given]
    smallest = _MIN_SIZE * max(sizes, default=0)
    for site, axes in variants.given.items():
        if site.kind != 'constraint' or not variants.shape(site):
            continue
        path = variants.paths[site]
        if not path:
            continue
        kind = 'value' if axes is None else 'constraint'
        if kind == 'value' and prod(variants.shape(site)) < smallest:
            continue
        key = kind, path, variants.shape(site)
        groups[key].append(site)
        paths[key] = path
    by_line: dict[tuple[Span, Axes], list[Hashable]] = defaultdict(list)
    for key, sites in groups.items():
        kind = 'value' if variants.given[sites[0]] is None else 'constraint'
        yield Group(key, kind, tuple(sites), paths[key])
        if kind == 'constraint':
            by_line[paths[key][0], _stripped(variants.given[sites[0]])].append(key)
    for (span, _), keys in by_line.items():
        if len(keys) > 1:
            sites = tuple(chain.from_iterable(groups[key] for key in keys))
            yield Group(('together', *keys), 'constraint', sites, (span,))
