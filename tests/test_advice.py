"""What explain advises on planted mistakes, against the same step written right."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mistakes import BOTH, FSDP, MEGATRON, Choices, arguments, make_step
from modules import spans
from placed import struct

from einshard import device_mesh, explain, sharded

# private: changes by hand
from einshard._explain.search.words import Words
from einshard._program.edits import edit as edits
from einshard._program.edits.per_device import RunPerDevice

CHIP, TRIES = 'TPU v5e', 12
WITHOUT_DATA = {name: spec.replace('@data', '') for name, spec in FSDP.items()}


def mesh_for(c):
    """16 devices, along the mesh axes that the choices name."""
    axes = {'data': 4, 'tensor': 4} if 'tensor' in str(c) else {'data': 16}
    return device_mesh(jax.devices()[:16], **axes)


def seconds(report):
    """The sum of the lower bounds."""
    return sum(bound.seconds for bound in report.bounds)


def without(*names):
    return MEGATRON | {name: MEGATRON[name].replace('@tensor', '') for name in names}


EMBED_OVER_D = MEGATRON | {'embed': 'v d@tensor'}
WRONG = {
    'no constraint after the lookup': (Choices(BOTH, embedded=None), Choices(BOTH)),
    'a weight over the wrong axis': (
        Choices(MEGATRON | {'down': 'f d@tensor'}),
        Choices(MEGATRON),
    ),
    'activations sharded like the table': (
        Choices(EMBED_OVER_D, embedded=None),
        Choices(EMBED_OVER_D),
    ),
    'attention that devices repeat': (Choices(without('q', 'k', 'v', 'o')), Choices(MEGATRON)),
    'feed-forward that devices repeat': (Choices(without('gate', 'up', 'down')), Choices(MEGATRON)),
    'a head that devices repeat': (Choices(without('head')), Choices(MEGATRON)),
    'microbatches that devices share': (
        Choices(WITHOUT_DATA, microbatches=4, in_blocks=True, embedded=None),
        Choices(WITHOUT_DATA, microbatches=4, in_blocks=True, parts='a b s -> a b@data s'),
    ),
}


def first_and_slow(names):
    """The names, of which all but the last are of tests that run once, with the newest JAX."""
    *slow, last = names
    return [*(pytest.param(name, marks=pytest.mark.slow) for name in slow), last]


@pytest.mark.parametrize('name', first_and_slow(WRONG))
def test_a_mistake_in_a_train_step_is_recovered(name):
    wrong, right = WRONG[name]
    mesh, values = mesh_for(right), arguments(wrong.layers)
    report = explain(make_step(wrong, mesh), *values, chip=CHIP, tries=TRIES)
    best = seconds(explain(make_step(right, mesh), *values, chip=CHIP, tries=0))
    fixed = seconds(explain(report.fixed_function(), *values, chip=CHIP, tries=0))
    assert fixed <= best + 0.2 * (seconds(report) - best)
    for finding in report.findings:
        assert finding.suggestion
        assert finding.tried.bound < finding.tried.before.bound


def test_a_mesh_axis_that_nothing_uses():
    mesh = device_mesh(jax.devices()[:16], data=4, tensor=4)
    values = struct(16384, 512), struct(512, 2048), struct(2048, 512)

    def make(batch):
        def forward(x, up, down):
            return jax.nn.relu(x @ up) @ down

        return sharded(f'{batch} d', 'd@data f', 'f d@data', mesh=mesh)(forward)

    report = explain(make('b@data'), *values, chip=CHIP, tries=TRIES)
    best = seconds(explain(make('b@(data,tensor)'), *values, chip=CHIP, tries=0))
    fixed = seconds(explain(report.fixed_function(), *values, chip=CHIP, tries=0))
    assert seconds(report) > 1.5 * best
    assert fixed <= 1.03 * best


CORRECT = {
    'data': Choices(WITHOUT_DATA),
    'FSDP': Choices(FSDP),
    'FSDP with remat': Choices(FSDP, remat=True),
    'FSDP with microbatches': Choices(FSDP, microbatches=4),
    'ZeRO-1': Choices(WITHOUT_DATA, states=FSDP),
    'Megatron': Choices(MEGATRON),
    'FSDP and Megatron': Choices(BOTH),
}


@pytest.mark.parametrize('name', first_and_slow(CORRECT))
def test_what_is_advised_on_correct_steps_is_cheaper(name):
    """These steps are small, so that other placements may be better: then that must be true."""
    c, values = CORRECT[name], arguments(2)
    report = explain(make_step(c, mesh_for(c)), *values, chip=CHIP, tries=TRIES)
    if report.findings:
        after = explain(report.fixed_function(), *values, chip=CHIP, tries=0)
        assert seconds(after) < 0.97 * seconds(report)


def gated(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def test_arguments_that_have_to_move_together():
    """Moving one of the two gathers the other's product."""
    mesh = device_mesh(jax.devices()[:8], tensor=8)
    specs = {'gate': 'd@tensor f', 'up': 'd@tensor f', 'down': 'f@tensor d'}
    values = [struct(512, 1024)] + [struct(1024, 4096)] * 2 + [struct(4096, 1024)]
    step = sharded('b d', *specs.values(), mesh=mesh)(gated)
    report = explain(step, *values, chip=CHIP, tries=TRIES)
    assert report.findings[0].suggestion.startswith("shard {gate,up} with 'd f -> d f@tensor'")
    right = sharded('b d', 'd f@tensor', 'd f@tensor', 'f@tensor d', mesh=mesh)(gated)
    best = seconds(explain(right, *values, chip=CHIP, tries=0))
    fixed = seconds(explain(report.fixed_function(), *values, chip=CHIP, tries=0))
    assert fixed <= 1.03 * best


def test_a_forgotten_batch():
    mesh = device_mesh(jax.devices()[:8], data=8)

    @sharded('b s', 'v d', 'd f', 'f d', mesh=mesh)
    def forward(tokens, table, up, down):
        x = table[tokens]
        return x + jax.nn.relu(x @ up) @ down

    values = struct(64, 64, dtype=np.int32), struct(512, 256), struct(256, 1024), struct(1024, 256)
    report = explain(forward, *values, chip=CHIP, tries=TRIES)
    assert report.findings[0].suggestion.startswith('shard tokens with')
    assert '@data' in report.findings[0].suggestion


def test_what_was_ranked_and_compiled_is_said():
    mesh = mesh_for(MEGATRON)
    wrong = Choices(MEGATRON | {'down': 'f d@tensor'})
    report = explain(make_step(wrong, mesh), *arguments(2), chip=CHIP, tries=TRIES)
    assert ' changes ranked, ' in report.total[-1]
    assert ' compiled' in report.total[-1]


def test_nothing_is_compiled_where_nothing_can_be_better(monkeypatch):
    from einshard._explain.search import trials

    runs = []
    run = trials.Trials.run
    monkeypatch.setattr(
        trials.Trials, 'run', lambda self, edits: runs.append(edits) or run(self, edits)
    )
    mesh = device_mesh(jax.devices()[:8], data=8)

    @sharded('b@data d', 'd f', out='b@data f', mesh=mesh)
    def forward(x, w):
        return jnp.tanh(x @ w)

    report = explain(forward, struct(1024, 512), struct(512, 512), chip=CHIP, tries=TRIES)
    assert not report.findings
    assert len(runs) <= 1


def test_costs_are_notes_without_tries():
    mesh = device_mesh(jax.devices()[:8], tensor=8)

    @sharded('b d', 'd f@tensor', 'f@tensor d', mesh=mesh)
    def forward(x, up, down):
        return jnp.tanh(x @ up) @ down

    report = explain(forward, struct(1024, 512), struct(512, 2048), struct(2048, 512), tries=0)
    (note,) = [note for note in report.notes if note.kind == 'cost']
    assert note.text.startswith('all-reduce of activations along tensor sends ')
    assert 'sums over that axis' in note.reason
    assert not note.suggestion


SAID = device_mesh(jax.devices()[:8], data=8)


def constrained(x, w):
    return jax.lax.with_sharding_constraint(x @ w, NamedSharding(SAID, P('data', None)))


def test_every_kind_of_edit_is_said():
    x, w = (
        jax.ShapeDtypeStruct((64, 64), np.float32, sharding=NamedSharding(SAID, P(axis)))
        for axis in ('data', None)
    )
    report = explain(jax.jit(constrained), x, w, tries=0)
    to = NamedSharding(SAID, P(None, 'data'))
    product = (spans(__file__, 'x @ w')[0],)
    text = "jax.lax.with_sharding_constraint(x @ w, NamedSharding(SAID, P('data', None)))"
    constraint = (spans(__file__, text)[0],)
    line = f'test_advice.py:{product[0].line}'
    said = {
        edits.PlaceArguments({1: to}, {}): "shard w with 'a b -> a b@data'",
        edits.PlaceResults({0: to}): "shard result with 'a b -> a b@data'",
        edits.Constrain(product, to): (
            f"constrain `x @ w` in {line}: einshard(..., 'a b -> a b@data')"
        ),
        edits.ReplaceConstraint(constraint, to): (
            f"change the constraint in {line} to 'a b -> a b@data'"
        ),
        edits.RemoveConstraint(constraint): f'remove the constraint in {line}',
        edits.MoveThrough(('argument', 0), to): (
            "reshard in two steps, at the start of the function: x = einshard(x, 'a b -> a b@data')"
        ),
    }
    words = Words(report.reading)
    assert {edit: words.say([edit]) for edit in said} == said
    # what runs per device is said by the finding that it was tried for
    kinds = {type(edit) for edit in said} | {RunPerDevice}
    abstract = {each for each in edits.Edit.__subclasses__() if each.__name__.startswith('_')}
    known = {*edits.Edit.__subclasses__(), *(k for a in abstract for k in a.__subclasses__())}
    assert known - abstract == kinds


def test_silence_says_what_was_tried():
    add = sharded('a* b', '* b')(lambda x, y: x + y)
    (nothing,) = explain(add, struct(16, 8), struct(8), tries=TRIES).total
    assert nothing.startswith('no device sends anything')
    small = sharded('a b*', out='* a b')(jnp.sin)
    report = explain(small, struct(8, 16), chip=CHIP, tries=TRIES)
    (line,) = report.total
    assert report.findings == ()
    said = re.match(r'no change lowers the bounds by 3%: (\d+) changes? ranked, \d+ compiled', line)
    assert int(said[1])
    assert 'The program is too small: its lower bounds on ' in line
    assert line in ' '.join(str(report).split())
