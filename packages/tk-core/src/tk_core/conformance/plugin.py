"""The pytest plugin: ``pytest -p tk_core.conformance.plugin --pyargs tk_core.conformance --tk-backend=NAME``.

Nothing loads it by itself. Options::

    --tk-backend NAME   the backend to check (default: reference)
    --tk-op OP          only this operator, or this family; may be repeated
    --tk-level LEVEL    quick, full or large
    --tk-limit N        at most N samples of each operator, evenly spaced; the summary says how many that were
    --tk-report FILE    write the outcome of every sample as JSON
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from .. import op as operators
from .. import registry
from ..cases import LEVELS, cases_of
from . import engine, report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tk conformance")
    group.addoption("--tk-backend", default="reference", help="backend to check")
    group.addoption("--tk-op", action="append", default=[], help="operator or family; may be repeated")
    group.addoption("--tk-level", default="quick", choices=LEVELS, help="quick, full or large")
    group.addoption("--tk-limit", type=int, default=0, help="at most this many samples of each operator")
    group.addoption("--tk-report", default=None, help="write the outcome of every sample to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_OUTCOMES] = []
    config.pluginmanager.register(_FromWorkers(), "tk-from-workers")


_OUTCOMES = pytest.StashKey[list[engine.Outcome]]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not {"tk_sample", "tk_error"} & set(metafunc.fixturenames):
        return
    config = metafunc.config
    backend = registry._by_name(config.getoption("--tk-backend"))
    wanted = config.getoption("--tk-op")
    names = [n for n in operators.OPERATORS if not wanted or n in wanted or n.partition(".")[0] in wanted]
    rows: list[tuple[Any, ...]] = []
    ids: list[str] = []
    for name in names:
        cases = cases_of(name)
        if cases is None:
            rows.append((name, None, False, backend))
            ids.append(f"{name}: no cases")
            continue
        if "tk_error" in metafunc.fixturenames:
            for e in cases.errors:
                rows.append((name, e, False, backend))
                ids.append(f"{name}: {e.why}")
        else:
            level = config.getoption("--tk-level")
            samples = _spaced(engine.samples_of(cases, level), config.getoption("--tk-limit"))
            for i, s in enumerate(samples):
                rows.append((name, s, s.level != "large" and (i < 2 or level != "quick"), backend))
                ids.append(f"{name}: {s.why}")
    fixture = "tk_error" if "tk_error" in metafunc.fixturenames else "tk_sample"
    metafunc.parametrize(fixture, rows, ids=ids)


def _spaced(samples: list[Any], limit: int) -> list[Any]:
    """All samples, or ``limit`` of them at even distances, the first among them."""
    if not 0 < limit < len(samples):
        return samples
    return [samples[i * len(samples) // limit] for i in range(limit)]


@pytest.fixture
def tk_outcomes(request: pytest.FixtureRequest) -> list[engine.Outcome]:
    """Where tests leave their outcomes for the report."""
    return request.config.stash[_OUTCOMES]


def pytest_sessionfinish(session: pytest.Session) -> None:
    outcomes = session.config.stash[_OUTCOMES]
    channel = getattr(session.config, "workeroutput", None)  # a worker of pytest-xdist: the main process reports
    if channel is not None:
        channel["tk_outcomes"] = [dataclasses.asdict(o) for o in outcomes]
        return
    path = session.config.getoption("--tk-report")
    if path:
        backend = registry._by_name(session.config.getoption("--tk-backend"))
        report.write(pathlib.Path(path), backend, outcomes)


class _FromWorkers:
    """Collects what the workers of pytest-xdist found."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        found = getattr(node, "workeroutput", {}).get("tk_outcomes", [])
        node.config.stash[_OUTCOMES] += [engine.Outcome(**o) for o in found]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcomes = config.stash[_OUTCOMES]
    refused = [o for o in outcomes if o.status == "refused"]
    if outcomes:
        name = config.getoption("--tk-backend")
        terminalreporter.write_line(
            f"{name}: {sum(o.status == 'passed' for o in outcomes)} samples equal to the reference, "
            f"{len(refused)} refused with a reason, {sum(o.status == 'failed' for o in outcomes)} wrong"
        )
