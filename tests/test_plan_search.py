"""The search of `plan` over candidates with known costs, and how candidates are compiled."""

import functools
import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from placed import struct
from refusal import refusal

from einshard import EinshardError, Rules, device_mesh, einshard, sharded
from einshard._chips.table import as_chip
from einshard._explain.partition import Worker, compile_in_worker

# private: the order of a search with costs known beforehand, and the programs of the worker
from einshard._plan.candidate import Candidate, Evaluation
from einshard._plan.evaluate import Function, Partitioner
from einshard._plan.make_plan import _notes, make_plan
from einshard._plan.plot import scatter_svg
from einshard._plan.result import why_worse
from einshard._plan.search import PlanSearch, is_neighbor
from einshard._program.cost.bounds import Bound, Bounds
from einshard._program.hlo.find_collectives import find_collectives
from einshard._program.hlo.graph import Graph
from einshard._program.hlo.target_collectives import target_collectives
from einshard._program.hlo.text import HloModule

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

    search = PlanSearch(
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


def test_compiles_equal_candidates_once():
    search, calls = run(candidates=[*ALL[:4], *ALL[:4]])
    assert len(search.evaluated) == 4
    assert [source for source, _ in calls].count('partitioner') == 4


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


# --- candidates that are compiled -----------------------------------------------------------------

BATCH, EMBED, MLP = 64, 32, 128
WEIGHTS = 2 * 2 * EMBED * MLP  # bytes of both
RULES = Rules([('up', 'embed mlp'), ('down', 'mlp embed')])


def train(params, x):
    def loss(params):
        h = jax.nn.relu(einshard(x @ params['up'], 'batch mlp'))
        y = einshard(h @ params['down'], 'batch act')
        return jnp.sum((y - x) ** 2)

    return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))


bf16 = functools.partial(struct, dtype='bfloat16')
PARAMS = {'up': bf16(EMBED, MLP), 'down': bf16(MLP, EMBED)}
STEP = sharded(RULES, 'batch act', out=RULES, donate_argnums=0)(train)


def function(fn=STEP, *args):
    args = args or (PARAMS, bf16(BATCH, EMBED))
    devices = device_mesh(jax.devices()[:8])
    return Function(fn, args, {}, devices, as_chip('TPU v5e'))


def candidate(x=4, y=2, **axes):
    named = {'batch': '', 'embed': '', 'mlp': '', 'act': '', **axes}
    return Candidate((('x', x), ('y', y)), tuple((name, tuple(on)) for name, on in named.items()))


@pytest.fixture(scope='module')
def worker():
    worker = Worker(8)
    yield worker
    worker.close()


def evaluate(worker, candidates, *call):
    return list(Partitioner(function(*call), worker).evaluate_all(candidates))


# what a device sends for groups of 4 or of 2, by the formulas for rings
KNOWN = {
    'data parallel': (candidate(batch='x'), {('all-reduce', 'gradients'): 2 * 3 * WEIGHTS // 4}),
    'fully sharded': (
        candidate(batch='x', embed='x'),
        {
            ('all-gather', 'weights'): 3 * WEIGHTS // 4,
            ('reduce-scatter', 'gradients'): 3 * WEIGHTS // 4,
        },
    ),
    'tensor parallel': (
        candidate(mlp='x'),
        {('all-reduce', 'activations'): 2 * 3 * 2 * BATCH * EMBED // 4},
    ),
    'both': (
        candidate(batch='x', embed='x', mlp='y'),
        {
            ('all-gather', 'weights'): 3 * WEIGHTS // 8,
            ('reduce-scatter', 'gradients'): 3 * WEIGHTS // 8,
            ('all-reduce', 'activations'): 2 * BATCH // 4 * EMBED,
        },
    ),
}


def test_the_bytes_of_known_shardings(worker):
    candidates, sent_by = zip(*KNOWN.values(), strict=True)
    evaluated = evaluate(worker, candidates)
    assert [plan.error for plan in evaluated] == [''] * len(KNOWN)
    assert [dict(plan.sent_by) for plan in evaluated] == [*sent_by]
    assert [set(plan.sent) for plan in evaluated] == [{'x'}, {'x'}, {'x'}, {'x', 'y'}]
    assert [plan.bounds.largest.resource for plan in evaluated] == ['network'] * len(KNOWN)


def test_a_candidate_that_cannot_be_traced_does_not_disturb_the_others(worker):
    wrong, right = candidate(batch='x', act='x'), candidate(batch='x')
    first, second = evaluate(worker, [wrong, right])
    assert first.error == "mesh axis 'x' is used 2 times; each mesh axis can be used only once"
    assert (first.candidate, second.candidate, second.error) == (wrong, right, '')


def test_results_take_the_memory_of_donated_arguments(worker):
    def halve(params):
        return jax.tree.map(lambda w: w / 2, params)

    tensor = [candidate(mlp='x')]
    donating, keeping = sharded(RULES, out=RULES, donate_argnums=0), sharded(RULES, out=RULES)
    [in_place] = evaluate(worker, tensor, donating(halve), PARAMS)
    [with_copy] = evaluate(worker, tensor, keeping(halve), PARAMS)
    assert with_copy.memory - in_place.memory == WEIGHTS // 4


class State:
    """A pytree that JAX cannot serialize."""

    def __init__(self, *leaves):
        self.leaves = leaves


jax.tree_util.register_pytree_node(
    State, lambda s: (s.leaves, None), lambda _, leaves: State(*leaves)
)


def test_any_pytree_and_unused_arguments(worker):
    @jax.jit
    def product(state, x):
        w, _ = state.leaves
        y = einshard(einshard(x, 'batch act') @ einshard(w, 'act mlp'), 'batch mlp')
        return State(y)

    state = State(bf16(EMBED, MLP), bf16(1000, 1000))
    [plan] = evaluate(worker, [candidate(act='x')], product, state, bf16(BATCH, EMBED))
    assert plan.error == ''
    assert plan.sent_by == {('all-reduce', 'activations'): 2 * 3 * 2 * BATCH * MLP // 4}
    assert plan.memory < 1000 * 1000


def test_a_program_that_cannot_be_lowered_for_cpu_is_compiled_for_the_target(worker):
    def product(x, w):
        y = einshard(einshard(x, 'batch act') @ einshard(w, 'act mlp'), 'batch mlp')
        jax.debug.callback(print, y[0, 0])
        return y

    args = bf16(BATCH, EMBED), bf16(EMBED, MLP)
    [plan] = evaluate(worker, [candidate(batch='x')], product, *args)
    assert (plan.costs_from, plan.error) == ('compiler', '')


def test_a_candidate_compiled_for_the_target():
    fsdp = candidate(batch='x', embed='x')
    evaluated = function().evaluate(fsdp)
    assert (evaluated.candidate, evaluated.costs_from, evaluated.error) == (fsdp, 'compiler', '')
    assert evaluated.sent_by['all-gather', 'weights'] > 0


def test_a_process_that_ends_drops_one_candidate(worker):
    candidates = [candidate(batch='x'), candidate(batch='y'), candidate(batch='x', embed='x')]
    expected = evaluate(worker, candidates)
    evaluations = Partitioner(function(), worker).evaluate_all(candidates)
    first = worker.pid
    # the process may end before or after it has the first program
    os.kill(first, signal.SIGKILL)
    found = list(evaluations)
    assert worker.pid not in (None, first)
    assert found[0].error == 'the process that compiles for 8 simulated devices has ended'
    assert [one.candidate for one in found] == candidates
    assert found[1:] == expected[1:]


ABORT = """
Traceback of another program
I0000 00:00:1795.1 7 cpu_client.cc:1] TfrtCpuClient created.
F0000 00:00:1795.2 7 spmd_partitioner_util.cc:9] Check failed: shard_size == 4 (3 vs. 4) Wrong
*** Check failure stack trace: ***
    @     0x7f2e0  (unknown)
    @     0x7f2e1  (unknown)
    @     0x7f2e2  (unknown)
    @     0x7f2e3  start_thread
    @     0x7f2e4  (unknown)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ('log', 'sentence', 'output'),
    [
        (ABORT, ABORT.splitlines()[3], None),
        ('LLVM ERROR: out of memory\n0. Program arguments', 'LLVM ERROR: out of memory', None),
        ('a\nb\nc\nd\ne\nModuleNotFoundError: jax', None, 'b\nc\nd\ne\nModuleNotFoundError: jax'),
        ('', None, 'none; the process may have run out of memory'),
    ],
)
def test_why_a_process_has_ended(log, sentence, output):
    worker = Worker(8)
    worker.submit({'program': b''})
    worker.result()  # an error of the compiler, so the process is there
    worker._log.write_text(log)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EinshardError) as error:
        worker.result()
    text = 'the process that compiles for 8 simulated devices has ended'
    assert error.value.sentence == (f'{text}: {sentence}' if sentence else text)
    assert error.value.facts.get('last output') == output


def test_the_next_program_starts_a_process_and_an_interrupt_ends_it(worker, monkeypatch):
    started = []

    def interrupt(_):
        started.append(worker.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(pickle, 'load', interrupt)
    with pytest.raises(KeyboardInterrupt):
        evaluate(worker, [candidate(batch='x')])
    with pytest.raises(ProcessLookupError):
        os.kill(*started, 0)


def test_an_interrupt_leaves_no_response_for_the_next_request(monkeypatch):
    submit = Worker.submit

    def interrupted(self, request):
        submit(self, request)
        raise KeyboardInterrupt

    def moved(n):
        stages = ((2,), ((0,),)), ((2,), ((),))
        return compile_in_worker(2, {'shape': (n,), 'dtype': 'float32', 'stages': stages})

    with monkeypatch.context() as patch:
        patch.setattr(Worker, 'submit', interrupted)
        with pytest.raises(KeyboardInterrupt):
            moved(8)
    assert 'f32[16]' in moved(16).text


PROGRAM_WITH_WORKER = """
import os, signal, time
import jax
from einshard._explain.partition import Worker
worker = Worker(2)
worker.submit({'program': b''})
worker.result()
print(worker._log.parent, worker.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_no_folder_is_left_after_sigterm():
    command = [sys.executable, '-c', PROGRAM_WITH_WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        folder, pid = process.stdout.readline().split()
        assert Path(folder).is_dir()
        process.terminate()
    deadline = time.monotonic() + 30
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists()
    while Path(f'/proc/{pid}/exe').exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f'/proc/{pid}/exe').exists()


def test_flatbuffers_are_missing(monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda _: None)
    with pytest.raises(EinshardError, match="pip install 'einshard\\[plan\\]'"):
        Partitioner(function())


# --- collectives of the target --------------------------------------------------------------------

PROGRAM = """HloModule jit_f, num_partitions=4

%fused (p0: f32[8], p1: f32[8], i: u32[]) -> f32[2] {
  %p0 = f32[8]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %i = u32[] parameter(2)
  %added = f32[8]{0} add(%p0, %p1)
  ROOT %slice = f32[2]{0} dynamic-slice(%added, %i), dynamic_slice_sizes={2}
}

ENTRY %main (a: f32[8], b: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %i = u32[] partition-id()
LINES
}
"""
OF_4, OF_2, ACROSS = (
    'replica_groups=[1,4]<=[4]',
    'replica_groups=[2,2]<=[4]',
    'replica_groups=[2,2]<=[2,2]T(1,0)',
)
SLICED = 'f32[2]{{0}} dynamic-slice(%{}, %i), dynamic_slice_sizes={{2}}'
BOTH_SUMMED = [
    f'%r = (f32[8]{{0}}, f32[8]{{0}}) all-reduce(%a, %b), {OF_4}, to_apply=%add',
    '%first = f32[8]{0} get-tuple-element(%r), index=0',
    '%second = f32[8]{0} get-tuple-element(%r), index=1',
]
FORMS = {
    'one of two arrays is sliced': (
        [
            *BOTH_SUMMED,
            f'%mine = {SLICED.format("second")}',
            'ROOT %out = (f32[8]{0}, f32[2]{0}) tuple(%first, %mine)',
        ],
        [('all-reduce', 4, 'f32[8]'), ('reduce-scatter', 4, 'f32[8]')],
    ),
    'a slice smaller than a part': (
        [
            f'%r = f32[8]{{0}} all-reduce(%a), {OF_2}, to_apply=%add',
            f'ROOT %mine = {SLICED.format("r")}',
        ],
        [('all-reduce', 2, 'f32[8]')],
    ),
    'terms that are added and sliced': (
        [
            *BOTH_SUMMED,
            'ROOT %f = f32[2]{0} fusion(%first, %second, %i), kind=kLoop, calls=%fused',
        ],
        [('reduce-scatter', 4, 'f32[8]')],
    ),
    'one after another': (
        [
            f'%r = f32[8]{{0}} all-reduce(%a), {OF_2}, to_apply=%add',
            '%c = f32[8]{0} copy(%r)',
            f'ROOT %s = f32[8]{{0}} all-reduce(%c), {ACROSS}, to_apply=%add',
        ],
        [('all-reduce', 4, 'f32[8]')],
    ),
    'gathered twice': (
        [
            f'%g = f32[32]{{0}} all-gather(%a), channel_id=1, {OF_4}, dimensions={{0}}',
            f'%h = f32[32]{{0}} all-gather(%a), channel_id=2, {OF_4}, dimensions={{0}}',
            'ROOT %out = (f32[32]{0}, f32[32]{0}) tuple(%g, %h)',
        ],
        [('all-gather', 4, 'f32[32]')],
    ),
}


@pytest.mark.parametrize('form', FORMS)
def test_the_collectives_that_a_tpu_would_run(form):
    lines, expected = FORMS[form]
    graph = Graph(HloModule(PROGRAM.replace('LINES', '\n'.join(f'  {line}' for line in lines))))
    found = target_collectives(graph, find_collectives(graph))
    assert [(c.kind, c.group_size, c.arrays) for c in found] == expected
