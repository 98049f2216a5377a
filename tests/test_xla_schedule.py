"""The script that compares timelines with XLA's schedules: what it reads, and what it compiles."""

import sys
from pathlib import Path

import pytest
from placed import mesh_of

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from benchmarks import xla_schedule  # noqa: E402

DUMP = (ROOT / 'tests/hlo/schedule-0.12.0.1.pbtxt').read_text()


def test_exposed_collectives():
    """Nothing hides an all-gather of 256 MiB; a product and sums hide part of an all-reduce."""
    found = xla_schedule.read_schedule(DUMP)
    assert found.exposed.keys() == {'all-gather-start', 'all-reduce-start'}
    # read off the dump: the gather starts at 1 us and 730.27 us later it has ended
    assert found.exposed['all-gather-start'] == pytest.approx(728.27e-6)
    names = list(found.seconds)
    between = names[names.index('all-reduce-start') + 1 : names.index('all-reduce-done')]
    hidden = sum(found.seconds[name] for name in between)
    # in a program without other operations, XLA gives this all-reduce 144.28 us
    assert found.exposed['all-reduce-start'] + hidden == pytest.approx(144.28e-6, rel=1e-3)


def test_asynchronous_copies_are_not_collectives():
    text = DUMP.replace('channel_id: 1', '')
    assert xla_schedule.read_schedule(text).exposed == {}


@pytest.mark.slow
@pytest.mark.parametrize('name', xla_schedule.SHARDINGS)
def test_every_sharding_lowers(name, monkeypatch):
    monkeypatch.setattr(xla_schedule, 'topology', lambda chip, **axes: mesh_of(**axes))
    devices, lowered = xla_schedule.lower(name, '')
    assert len(devices) == 8
    assert 'sdy.sharding_constraint' in lowered.as_text()
