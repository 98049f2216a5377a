"""Texts and choices do not depend on the order of sets, which differs between processes."""

import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from placed import struct
from refusal import refusal

from einshard import EinshardError, axis_rules, einshard, sharded

# a set of these has their order once in 3 million processes
NAMES = tuple('abcdefghij')


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
    mesh = AbstractMesh((1,) * 10, NAMES)
    error = refusal(einshard, struct(8), P(None, None, unreduced={*NAMES}), mesh=mesh)
    text = ', '.join(map(repr, NAMES))
    assert error.facts['spec'] == f'P(None, None, unreduced={{{text}}})'
