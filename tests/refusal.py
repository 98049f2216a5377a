"""The errors of einshard."""

import pytest

from einshard import EinshardError


def refusal(function, *args, **kwargs):
    """The EinshardError that a call raises."""
    with pytest.raises(EinshardError) as caught:
        function(*args, **kwargs)
    assert '\n' not in caught.value.sentence
    return caught.value
