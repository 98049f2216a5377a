"""The EinshardError of a call, for tests."""

import pytest

from einshard import EinshardError


def refusal(function, *args, **kwargs):
    """The EinshardError that a call raises; its sentence must be one line."""
    with pytest.raises(EinshardError) as caught:
        function(*args, **kwargs)
    assert '\n' not in caught.value.sentence
    return caught.value
