"""Checks `plan` against exhaustive enumeration, on TPU v5e slices of 8 and 16 chips.

    python -m benchmarks.plan_fidelity                # all programs; takes two hours on two cores
    python -m benchmarks.plan_fidelity mlp v5e:2x4
    python -m benchmarks.plan_fidelity mlp v5e:2x4 0  # without the compiler for TPU v5e

The partitioner compiles all plans that differ and whose sizes divide; of more than 550, the 150
with the best scores and 50 others at random. The compiler for TPU v5e compiles 30 random ones, and
the five that the partitioner finds best. Prints the regret of the search by both, and Spearman's
correlations of the costs.
"""

import itertools
import os
import random
import sys
from contextlib import closing

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import jax.numpy as jnp
from scipy.stats import spearmanr

from einshard import Rules, einshard, sharded, topology
from einshard._chips.table import find_chip
from einshard._plan.evaluate import Function, Partitioner
from einshard._plan.named_program import find_named
from einshard._plan.search import PlanSearch
from einshard._plan.space import Space
from einshard._plan.starts import Starts

BATCH, SEQ, ACT, HEADS, HEAD, MLP, EXPERTS = 16, 256, 1024, 16, 64, 4096, 16
PROGRAMS = 'mlp', 'attention', 'block', 'moe'
SLICES = 'v5e:2x4', 'v5e:4x4'


def norm(x):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def mlp(p, x):
    h = einshard(jnp.einsum('bsd,df->bsf', x, p['up']), 'batch seq mlp')
    return einshard(jnp.einsum('bsf,fd->bsd', jax.nn.gelu(h), p['down']), 'batch seq act')


def attention(p, x):
    def heads(name):
        made = jnp.einsum('bsd,dhe->bshe', x, p[name])
        return einshard(made, 'batch attn_seq heads head')

    q, k, v = map(heads, ('q', 'k', 'v'))
    scores = jnp.einsum('bqhe,bkhe->bhqk', q, k) * HEAD**-0.5
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    y = einshard(jnp.einsum('bhqk,bkhe->bqhe', weights, v), 'batch attn_seq heads head')
    return einshard(jnp.einsum('bshe,hed->bsd', y, p['out']), 'batch seq act')


def block(p, x):
    x = x + attention(p, norm(x))
    return x + mlp(p, norm(x))


def layers(p, x):
    step = jax.checkpoint(lambda x, w: (block(w, x), None))
    return jax.lax.scan(step, x, p)[0]


def moe(p, x):
    s = x.shape[1]
    capacity = 2 * s // EXPERTS
    gates = jax.nn.softmax(jnp.einsum('bsd,de->bse', x, p['gates']).astype(jnp.float32))
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    place = jnp.cumsum(chosen, 1) * chosen - 1
    slots = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=x.dtype)
    sent = jnp.einsum('bsd,bsec->becd', x, slots)
    sent = einshard(sent, 'expert_batch expert capacity act')
    h = jnp.einsum('becd,edf->becf', sent, p['w1'])
    h = einshard(jax.nn.gelu(h), 'expert_batch expert capacity mlp')
    y = jnp.einsum('becf,efd->becd', h, p['w2'])
    y = einshard(y, 'expert_batch expert capacity act')
    weights = (jnp.max(gates, -1)[..., None, None] * slots).astype(x.dtype)
    return einshard(jnp.einsum('becd,bsec->bsd', y, weights), 'batch seq act')


RULES = Rules(
    [
        ('up', '... embed mlp'),
        ('down', '... mlp embed'),
        ('[qkv]', '... embed heads head'),
        ('out', '... heads head embed'),
        ('gates', 'embed expert'),
        ('w1', 'expert embed mlp'),
        ('w2', 'expert mlp embed'),
    ]
)
SIZES = {'embed': ACT, 'mlp': MLP, 'heads': HEADS, 'head': HEAD, 'expert': EXPERTS}
WEIGHTS = {
    'mlp': {'up': 'embed mlp', 'down': 'mlp embed'},
    'attention': {**dict.fromkeys('qkv', 'embed heads head'), 'out': 'heads head embed'},
    'moe': {'gates': 'embed expert', 'w1': 'expert embed mlp', 'w2': 'expert mlp embed'},
}
WEIGHTS['block'] = WEIGHTS['layers'] = {**WEIGHTS['attention'], **WEIGHTS['mlp']}


def train_step(name):
    apply = globals()[name]

    @sharded(RULES, 'batch seq act', out=(RULES, None), donate_argnums=0)
    def step(params, x):
        def loss(params):
            half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
            return jnp.mean((apply(half, x) - x).astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    stacked = (4,) if name == 'layers' else ()
    params = {
        key: jax.ShapeDtypeStruct((*stacked, *(SIZES[axis] for axis in axes.split())), jnp.float32)
        for key, axes in WEIGHTS[name].items()
    }
    return step, (params, jax.ShapeDtypeStruct((BATCH, SEQ, ACT), jnp.bfloat16))


class Evaluators:
    """Evaluates the candidates of one program, and remembers what it has compiled."""

    def __init__(self, function, partitioner, known=None):
        self.function, self.partitioner = function, partitioner
        self.known = {} if known is None else known

    def fast(self, plans):
        yield from self._evaluate('partitioner', plans, self.partitioner.evaluate_all)

    def slow(self, plans):
        yield from self._evaluate('compiler', plans, self.function.evaluate_all)

    def of(self, source):
        return [one for (which, _), one in self.known.items() if which == source]

    def _evaluate(self, source, plans, compile_all):
        for one in compile_all([one for one in plans if (source, one) not in self.known]):
            self.known[source, one.candidate] = one
        yield from (self.known[source, one] for one in plans)


def check(name, slice_name, n_sampled=30, known=None):
    mesh = topology(slice_name)
    chip = find_chip(mesh.devices.flat[0].device_kind)
    step, args = train_step(name)
    named = find_named(step, args, {}, mesh, chip)
    space = Space(named.model, mesh.size)
    scores = {one: named.score(one) for one in every_candidate(space)}
    every = sorted(scores, key=lambda one: scores[one].seconds)
    mixed = random.Random(0).sample(every, len(every))
    chosen = every if len(every) < 550 else list(dict.fromkeys([*every[:150], *mixed]))[:200]
    function = Function(step, args, {}, mesh, chip)
    with closing(Partitioner(function)) as partitioner:
        evaluators = Evaluators(function, partitioner, known)
        searched = search(named, space, evaluators.fast, evaluators.slow if n_sampled else None)
        by_cost = sorted(evaluators.fast(chosen), key=cost)
        fast = {one.candidate: one for one in by_cost if not one.error}
        sample = [one for one in mixed if one in fast][:n_sampled]
        best = list(fast)[:5] if sample else []
        slow = {one.candidate: one for one in evaluators.slow([*sample, *best])}
    print(f'{name} on {slice_name}, {len(fast)} of {len(every)} plans compiled')
    mine = min(cost(evaluators.known['partitioner', one]) for one in searched.evaluated)
    least = min(map(cost, evaluators.of('partitioner')))
    figure = rho((scores[one].seconds for one in fast), map(cost, fast.values()))
    print(f'  regret {mine / least - 1:.1%}, scores and partitioner: {figure:.2f}', flush=True)
    if sample:
        compare(
            searched, evaluators, [(fast[one], slow[one]) for one in sample if not slow[one].error]
        )


def compare(searched, evaluators, both):
    """Compares the partitioner with the compiler for TPU, and prints the regret by the latter."""
    least = min(map(cost, evaluators.of('compiler')))
    n = sum(one.costs_from == 'compiler' for one in searched.evaluated.values())
    regret = cost(searched.ranking()[0]) / least - 1
    print(f'  regret by the TPU compiler, which compiled {n} plans: {regret:.1%}')
    for what, of in FIGURES.items():
        figure = rho(*zip(*((of(a), of(b)) for a, b in both), strict=True))
        print(f'  partitioner and TPU compiler, {what} of {len(both)}: {figure:.2f}', flush=True)


def every_candidate(space):
    """All plans, without those that differ only by the names of mesh axes of one size."""
    found = {}
    for sizes in space.shapes():
        each = [list(name_sets(space, size)) for size in sizes]
        for names in itertools.product(*each):
            point = sizes, names
            if space.is_valid(point) and space.merged(point) == point:
                axes = sorted((size, sorted(one)) for size, one in zip(*point, strict=True))
                found.setdefault((sizes, str(axes)), space.candidate(point))
    return [*found.values()]


def name_sets(space, size):
    """The sets of names that a mesh axis may shard: no array has two of them."""
    names = [name for name, n in space.model.divisors.items() if n % size == 0]
    for n in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, n):
            if all(b not in space.conflicts[a] for a, b in itertools.combinations(chosen, 2)):
                yield frozenset(chosen)


def search(named, space, fast, slow):
    """Searches as `plan` does."""
    memory = int(named.chip.memory)
    found = Starts(named, space, memory).find()
    searched = PlanSearch(found, [], fast, slow, 'bound', memory, compilations=40)
    searched.run()
    return searched


def cost(evaluation):
    return evaluation.cost('bound')[0]


def rho(ours, theirs):
    return spearmanr(list(ours), list(theirs)).statistic


FIGURES = {'bound': cost, 'bytes': lambda one: one.network_bytes, 'memory': lambda one: one.memory}


def main(name='', slice_name='', n_sampled='30'):
    for one in PROGRAMS:
        for other in SLICES:
            if name in ('', one) and slice_name in ('', other):
                check(one, other, int(n_sampled))


if __name__ == '__main__':
    main(*sys.argv[1:])
