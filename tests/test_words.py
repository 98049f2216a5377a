"""Sizes and widths of texts, against values known beforehand."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from einshard import EinshardError, Rules, explain


@pytest.mark.parametrize(
    ('text', 'width'),
    [
        ('', 0),
        ('ab', 2),
        ('行3', 3),
        ('e\u0301', 1),
        ('か\u309a', 2),  # the mark is listed as wide itself, and stands over the letter
        ('a\u200b', 2),  # printed as U+FFFD
        ('\u1112\u1161\u11ab', 2),  # one Hangul syllable, decomposed
    ],
)
def test_display_width(text, width):
    # a caret stands below the mark after the text
    error = EinshardError('', expression=f'{text}!', spans=[(len(text), len(text) + 1)])
    assert str(error).splitlines()[-1] == f'    {" " * width}^'


@pytest.mark.parametrize(
    ('n_bytes', 'text'),
    [
        (0, '0 B'),
        (1023, '1023 B'),
        (1536, '1.5 KiB'),
        (2**20 - 52, '1023.9 KiB'),
        (2**20 - 1, '1.0 MiB'),
        (2**50, '1024.0 TiB'),
    ],
)
def test_format_bytes(n_bytes, text):
    array = jax.ShapeDtypeStruct((n_bytes,), 'int8')
    table = Rules([], default='... -> * ...').table(array, mesh=AbstractMesh((1,), ('x',)))
    assert str(table).splitlines()[2].endswith(f' {text}')


@pytest.mark.parametrize(
    ('n', 'text'),
    [(1, '1 flop'), (999.4e6, '999 Mflop'), (999.9e6, '1 Gflop'), (1.5e9, '1.5 Gflop')],
)
def test_format_flops(n, text):
    x = np.ones((2, 2), np.float32)
    report = dataclasses.replace(explain(lambda x: x @ x, x), flops=n)
    assert f'compute: {text} in ' in str(report)
