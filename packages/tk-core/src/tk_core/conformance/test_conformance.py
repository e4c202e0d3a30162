"""The conformance suite itself; run it with the plugin (see plugin.py)."""

from __future__ import annotations

from typing import Any

import pytest

from . import engine


def test_sample(tk_sample: Any, tk_outcomes: list[engine.Outcome]) -> None:
    """Equal to the reference, or refused with a reason."""
    name, sample, deep, backend = tk_sample
    if sample is None:
        pytest.fail(f"operator {name} has no cases")
    outcome = engine.Check(name, sample, backend, deep).run()
    tk_outcomes.append(outcome)
    if outcome.problems:
        pytest.fail("\n".join(outcome.problems), pytrace=False)


def test_error(tk_error: Any, tk_outcomes: list[engine.Outcome]) -> None:
    """Calls outside the domain raise the declared error before anything is written."""
    name, sample, _, backend = tk_error
    if sample is None:
        pytest.fail(f"operator {name} has no cases")
    outcome = engine.check_error(name, sample, backend)
    tk_outcomes.append(outcome)
    if outcome.problems:
        pytest.fail("\n".join(outcome.problems), pytrace=False)
