"""The search of plan, over candidates whose costs are known."""

import functools
import itertools
import types

import pytest
from refusal import refusal

# private: the order of a search with costs known beforehand
from einshard._plan.candidate import Candidate, Evaluation
from einshard._plan.make_plan import _notes, make_plan
from einshard._plan.plot import scatter_svg
from einshard._plan.result import why_worse
from einshard._plan.search import Search, is_neighbor
from einshard._program.cost.bounds import Bound, Bounds

NAMES = ('batch', 'embed', 'mlp')


# all ways to shard three names over two meshes
ALL = [
    Candidate((('x', x), ('y', y)), tuple(zip(NAMES, axes, strict=True)))
    for x, y in ((8, 2), (4, 4))
    for axes in itertools.product([(), ('x',), ('y',), ('x', 'y')], repeat=3)
]


def evaluated(candidate, source, seconds, memory=1, **more):
    bounds = Bounds([Bound('network', 'x', seconds)])
    return Evaluation(candidate, source, bounds, memory=memory, **more)


def estimated(candidate):
    """The true cost times a factor from 1 to 3 that depends on the candidate."""
    return TRUE[candidate] * (1 + 0.5 * (ALL.index(candidate) * 7 % 5))


# distinct costs without a pattern that the search could use
TRUE = {candidate: 1 + (37 * i) % 128 for i, candidate in enumerate(ALL)}


def run(compilations=40, memory=lambda _: 1, **more):
    """A search that has run, and its compilations: (source, candidate) in order."""
    calls = []

    def compile_all(source, candidates):
        for candidate in candidates:
            calls.append((source, candidate))
            yield evaluated(candidate, source, TRUE[candidate], memory(candidate))

    search = Search(
        **{
            'candidates': sorted(ALL, key=estimated),
            'user_candidates': [],
            'partitioner': functools.partial(compile_all, 'partitioner'),
            'compiler': functools.partial(compile_all, 'compiler'),
            'objective': 'bound',
            'limit': 10,
            'compilations': compilations,
            **more,
        }
    )
    search.run()
    return search, calls


BEST = min(ALL, key=TRUE.__getitem__)


def test_finds_the_best_within_the_budget():
    search, calls = run()
    kinds = [kind for kind, _ in calls]
    assert search.ranking()[0].candidate == BEST
    assert kinds.count('partitioner') == 40
    assert kinds.count('compiler') <= 5
    assert len(set(calls)) == len(calls)  # nothing is compiled twice
    assert run()[1] == calls  # deterministic


def test_compiles_all_of_a_small_space_once():
    search, calls = run(compilations=1000, compiler=None)
    assert sorted(map(str, search.evaluated)) == sorted(map(str, ALL))
    assert len(calls) == len(ALL)
    assert [plan.candidate for plan in search.ranking()] == sorted(ALL, key=TRUE.__getitem__)


def test_a_plan_that_does_not_fit_loses():
    search, _ = run(memory=lambda candidate: 11 if candidate == BEST else 1)
    assert search.ranking()[0].fits(10)
    assert search.ranking()[0].candidate != BEST


def test_without_a_plan_that_fits_the_closest_comes_first():
    search, _ = run(compilations=1000, compiler=None, memory=lambda c: 10 + TRUE[c])
    best = search.ranking()[0]
    assert (best.candidate, best.fits(10)) == (BEST, False)


def test_the_user_s_candidates_are_compiled_once():
    worst = max(ALL, key=TRUE.__getitem__)
    best_estimate = min(ALL, key=estimated)
    _, calls = run(user_candidates=[worst, best_estimate, worst])
    assert {('partitioner', worst), ('compiler', worst)} <= set(calls)
    assert len(set(calls)) == len(calls)


def test_the_compiler_has_the_last_word():
    # the partitioner takes the second-best for the best
    def partitioner(candidates):
        for c in candidates:
            yield evaluated(c, 'partitioner', 1000 if c == BEST else TRUE[c])

    second = sorted(ALL, key=TRUE.__getitem__)[1]
    search, _ = run(partitioner=partitioner)
    assert search.ranking()[0].candidate == second


def test_the_compiler_decides_whether_a_plan_fits():
    def compiler(candidates):
        for c in candidates:
            yield evaluated(c, 'compiler', TRUE[c], memory=9)

    search, _ = run(compiler=compiler, memory=lambda c: 13 if c == BEST else 1)
    assert search.ranking()[0].candidate == BEST


@pytest.mark.parametrize(('best', 'n'), [(1, 4), (2, 5), (8, 9)])
def test_compiles_more_if_partitioner_and_compiler_disagree(best, n):
    # the compiler likes plans more, the closer they are to the partitioner's n-th best
    def compiler(candidates):
        for c in candidates:
            is_contrast = TRUE[c] == 6  # the best plan with the other mesh shape
            yield evaluated(c, 'compiler', 99 if is_contrast else 1 + abs(TRUE[c] - best))

    search, _ = run(compilations=1000, compiler=compiler)
    assert TRUE[search.ranking()[0].candidate] == best
    assert sum(plan.costs_from == 'compiler' for plan in search.evaluated.values()) == n


def test_keeps_its_results_when_it_is_interrupted():
    def interrupted(candidates):
        yield evaluated(candidates[0], 'partitioner', 1)
        raise KeyboardInterrupt

    search, _ = run(partitioner=interrupted)
    assert (search.stopped, len(search.evaluated)) == ('interrupted', 1)
    with pytest.raises(KeyboardInterrupt):
        run(partitioner=lambda _: (_ for _ in ()).throw(KeyboardInterrupt))


def test_stops_after_the_given_seconds():
    search, calls = run(seconds=1e-9)
    assert (search.stopped, calls) == ('stopped after 1e-09 s', [])


def test_neighbors():
    c = Candidate((('x', 8), ('y', 2)), (('batch', ('x',)), ('mlp', ('y',))))
    assert is_neighbor(c, Candidate(c.mesh, (('batch', ('x', 'y')), ('mlp', ('y',)))))
    assert is_neighbor(c, Candidate((('x', 4), ('y', 4)), c.axes))
    assert not is_neighbor(c, Candidate(c.mesh, (('batch', ()), ('mlp', ()))))
    assert not is_neighbor(c, c)


def test_reasons():
    better = evaluated(BEST, 'compiler', 1.0, memory=2**30)
    sent = {'sent': {'x': 2**41}, 'sent_by': {('all-gather', 'weights'): 2**41}}
    gathers = evaluated(BEST, 'compiler', 3.0, memory=24 * 2**30, **sent)
    computes = Evaluation(
        BEST, 'compiler', Bounds([Bound('compute', '', 2.0), Bound('network', 'x', 1.5)])
    )
    assert [why_worse(plan, better, 16 * 2**30) for plan in (gathers, computes, better)] == [
        'gathers 2.0 TiB of weights per run (instead of 0 B); '
        'needs 24.0 GiB of memory, more than 16.0 GiB',
        'computes for 2 s (instead of 0 ns)',
        'about equal',
    ]


def ranged(least, most):
    """An evaluation between `least`, its largest bound, and `most`, the sum of its bounds."""
    bounds = Bounds([Bound('network', 'x', least), Bound('compute', '', most - least)])
    return Evaluation(BEST, 'compiler', bounds, memory=1)


@pytest.mark.parametrize(
    ('objective', 'ranges', 'last'),
    [
        ('bound', [(4, 6), (5, 7), (6, 9), (7, 10)], 2),
        ('bound', [(4, 6), (7, 9)], 0),
        # the compiler's best plan comes first; the partitioner's next one is faster
        ('bound', [(4, 6), (2, 3)], 0),
        # in order of memory or bytes
        ('memory', [(4, 6), (5, 7)], 0),
        ('bytes', [(4, 6), (5, 7)], 0),
    ],
)
def test_notes_plans_whose_ranges_overlap(objective, ranges, last):
    search, _ = run(objective=objective)
    model = types.SimpleNamespace(metadata_names=(), sizes={}, asked=(), unnamed=())
    function = types.SimpleNamespace(args=(), kwargs={})
    notes = list(_notes(list(itertools.starmap(ranged, ranges)), search, model, function))
    assert notes == [
        f"plans 0 to {last} are about equal: their ranges in column 'bound' overlap that of plan 0"
    ] * (last > 0)


def test_points_have_the_numbers_of_the_plans():
    plans = [evaluated(ALL[i], 'partitioner', 1.0, memory) for i, memory in enumerate((8, None, 9))]
    svg = scatter_svg(plans, None, n_numbered=3)
    assert ('plan 0:' in svg, 'plan 1:' in svg, 'plan 2:' in svg) == (True, False, True)
    assert ('>1</text>' in svg, '>2</text>' in svg) == (False, True)


def test_no_plan_compiles():
    errors = ['out of memory', 'unsupported', 'unsupported']
    failed = [Evaluation(c, 'compiler', error=e) for c, e in zip(ALL[3:], errors, strict=False)]
    search = types.SimpleNamespace(ranking=lambda: failed)
    model = types.SimpleNamespace(name='step')
    error = refusal(make_plan, search, model, None)
    assert error.sentence == 'step does not compile with any of the 3 plans tried'
    assert error.facts == {
        'the compiler says': 'unsupported',
        'plans with this error': f'2 of 3, such as {ALL[4]}',
    }
