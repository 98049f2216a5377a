"""The pytest plugin: fixtures `assert_collectives` and `einshard_golden`, `--einshard-update`.

It is installed beside the package, as a module of its own: a part of the package would import
einshard and with it JAX whenever pytest starts, which takes seconds, and would do so before a
conftest.py can set the variables that JAX reads when it is imported. pyproject.toml has it so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from einshard._reports.report import Report

_WRITTEN = 'einshard_golden'


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup('einshard').addoption(
        '--einshard-update',
        action='store_true',
        help='write the golden files of the tests that run, those of einshard_golden',
    )


@pytest.fixture
def assert_collectives() -> Callable[..., None]:
    """The function `einshard.assert_collectives`."""
    import einshard

    return einshard.assert_collectives


@pytest.fixture
def einshard_golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compares a report with its golden file: `einshard_golden(explain(step, x))`.

    The file is golden/<test file>/<test>.txt beside the test file. The second one of a test ends in
    +2, one with a name in that: `einshard_golden(report, name='forward')`. A test whose file is not
    there fails; only `pytest --einshard-update` writes.
    """
    from einshard._reports.golden import Goldens

    classes = [node.name for node in request.node.listchain() if isinstance(node, pytest.Class)]
    goldens = Goldens(
        request.path.parent / 'golden' / request.path.stem,
        '.'.join([*classes, request.node.name]),
        shown_from=request.config.rootpath,
        update=bool(request.config.getoption('--einshard-update')),
    )

    def compare(report: Report, name: str | None = None) -> None:
        __tracebackhide__ = True
        difference = goldens.differs(report, name)
        if difference:
            pytest.fail(difference)
        # reports of tests carry these, also from the processes of pytest-xdist
        properties = request.node.user_properties
        properties.extend((_WRITTEN, line) for line in goldens.written)
        goldens.written.clear()

    return compare


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for some in terminalreporter.stats.values() for report in some]
    properties = [pair for report in reports for pair in getattr(report, 'user_properties', ())]
    written = dict.fromkeys(line for name, line in properties if name == _WRITTEN)
    if written:
        terminalreporter.section('einshard: golden files')
        for line in written:
            terminalreporter.line(line)
