"""Texts and choices do not depend on the order of sets, which differs between processes."""

from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from placed import struct

from einshard import EinshardError, axis_rules, einshard, sharded

# private: sets in the order of another process
from einshard._explain.explain import _devices
from einshard._explain.findings.slow_network import slow_network
from einshard._sharding.mesh import partition_text

# a set of these has their order once in 3 million processes
NAMES = tuple('abcdefghij')


def test_findings_about_the_network_between_slices():
    mesh = AbstractMesh((2,) * 11, (*NAMES, 'inner'))
    collectives = [
        SimpleNamespace(device_groups=((0, 1),), total_bytes=8, mesh_axes=frozenset([name]))
        for name in NAMES
    ]
    facts = SimpleNamespace(mesh=mesh, slices=[0, 1], collectives=collectives)
    texts = [finding.text for finding in slow_network(facts)]
    assert texts == [
        f'8 B are sent along {name} between slices, and 0 B along inner within them'
        for name in NAMES
    ]


def test_an_axis_that_may_be_any_of_several_misspelled():
    rules = {f'batch{name}': '@x' for name in NAMES}
    with (
        axis_rules(rules),
        pytest.raises(EinshardError, match="'batch' has no rule, but 'batcha' has one"),
    ):
        einshard(struct(8), 'batch', mesh=AbstractMesh((4,), ('x',)))


def test_several_unknown_parameters():
    with pytest.raises(EinshardError, match="static_argnames includes 'a'"):
        sharded('b -> b*', static_argnames=NAMES)(lambda x: x)


def test_specs_with_partial_axes():
    text = ', '.join(map(repr, NAMES))
    assert partition_text(P(unreduced={*NAMES})) == f'P(unreduced={{{text}}})'


def test_devices_of_a_sharding_without_a_mesh():
    devices = jax.devices()
    assert _devices([SimpleNamespace(device_set={*devices})]) == devices
