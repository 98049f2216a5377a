"""The pytest plugin: `assert_collectives`, `einshard_golden` and the option `--einshard-update`.

The wheel installs it as a module next to the package (see pyproject.toml). Inside the package, it
would import einshard and JAX whenever pytest starts: this takes seconds, and a conftest.py could no
longer set the environment variables that JAX reads on import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from einshard._explain.report import Report

_WRITTEN = 'einshard_golden'  # the key of user properties that list written files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup('einshard').addoption(
        '--einshard-update',
        action='store_true',
        help='rewrite the einshard_golden files of the tests that run',
    )


@pytest.fixture
def assert_collectives() -> Callable[..., None]:
    """`einshard.assert_collectives`."""
    import einshard

    return einshard.assert_collectives


@pytest.fixture
def einshard_golden(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Compares a report with its golden file: `einshard_golden(explain(step, x))`.

    The file is golden/<test file>/<test>.golden next to the test file. The second report of a test
    is in <test>+2.golden, and a report with `name='forward'` in <test>+forward.golden. If the file
    is missing, the test fails; `pytest --einshard-update` writes it, and renames those of einshard
    0.5, which end in .txt.
    """
    from einshard._explain.golden_files import Goldens

    node, config = request.node, request.config
    classes = [parent.name for parent in node.listchain() if isinstance(parent, pytest.Class)]
    goldens = Goldens(
        request.path.parent / 'golden' / request.path.stem,
        '.'.join([*classes, node.name]),
        shown_from=config.rootpath,
        update=bool(config.getoption('--einshard-update')),
    )

    def compare(report: Report, name: str | None = None) -> None:
        __tracebackhide__ = True
        difference = goldens.find_difference(report, name)
        if difference:
            pytest.fail(difference)

    yield compare
    # test reports carry user_properties back from pytest-xdist workers
    node.user_properties += [(_WRITTEN, line) for line in goldens.written]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for group in terminalreporter.stats.values() for report in group]
    properties = [pair for report in reports for pair in getattr(report, 'user_properties', ())]
    written = dict.fromkeys(line for name, line in properties if name == _WRITTEN)
    if written:
        terminalreporter.section('einshard: golden files')
        for line in written:
            terminalreporter.line(line)
