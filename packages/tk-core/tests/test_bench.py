"""``tk bench``: rows that can be read later, candidates checked before they are timed, revisions compared."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import tk_core
from tk_core.bench import adapters, first_call, records, runner, worker
from tk_core.cases import Maker, cases_of
from tk_core.conformance.engine import specified
from tk_core.errors import InvalidArgumentError
from tk_core.registry import ReferenceBackend

POINT = ("moe.normalize_weight", "v3-decode-64")


def tk(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tk_core", *args], capture_output=True, text=True, timeout=600)


def test_the_command_writes_rows_a_table_and_a_plot(tmp_path):
    json_file, table, plot = (tmp_path / name for name in ("rows.json", "rows.md", "rows.png"))
    done = tk(
        "bench", POINT[0], "--match", POINT[1], "--backend", "reference", "--vs", "torch,flag-gems", "--first-call",
        "--json", str(json_file), "--markdown", str(table), "--plot", str(plot),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "candidate flag-gems is left out: not installed here" in done.stdout
    assert "times of the PyTorch reference on the CPU" in " ".join(done.stdout.split())
    rows = records.read(json_file)
    assert [r["candidate"] for r in rows] == ["tk", "torch"]
    for row in rows:
        assert (row["op"], row["point"], row["against_reference"]) == (*POINT, "equal")
        assert row["torch"] == torch.__version__
        assert row["bytes"] == 64 * (8 * 4 * 2 + 4)
        assert all(row[k][1] <= row[k][0] <= row[k][2] for k in ("device_us", "cold_us", "host_us"))
        assert row["copy_gbps"] > 0
    calls = rows[0]["first_call_ms"]
    assert calls["first_of_process"]
    assert calls["warm"] > 0
    assert calls["cold"] > 0
    assert f"| {POINT[0]} | {POINT[1]} |" in table.read_text()
    assert f"| {POINT[0]} (first of the process) |" in table.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_no_point_is_an_error_of_one_line():
    done = tk("bench", POINT[0], "--match", "no such point")
    assert done.returncode == 2
    assert "no benchmark point of moe.normalize_weight" in done.stderr
    assert done.stderr.count("\n") == 1


def test_unknown_candidates_are_errors():
    with pytest.raises(InvalidArgumentError, match=r"no candidate is named 'cutlass'; there are .*torchao"):
        adapters.adapter("cutlass")


def _run(machine: runner.Bench) -> list[dict]:
    op, cases, point = next(p for p in runner.points([POINT[0]]) if p[2].name == POINT[1])
    return machine.run(op, cases, point)


def test_a_wrong_candidate_says_so_and_is_never_the_best_other(monkeypatch):
    right = adapters.adapter("torch").bind

    def wrong(*args):
        call = right(*args)
        return lambda: tuple(t + 1 for t in call())

    monkeypatch.setattr(adapters.adapter("torch"), "bind", wrong)
    rows = _run(runner.Bench(ReferenceBackend(), ["torch"]))
    assert rows[1]["against_reference"].startswith("differs: ")
    assert records.best_other(rows, rows[0]) is None


def test_what_is_unspecified_in_results_is_not_compared():
    cases = cases_of("quant.swiglu_forward")
    calls = (sample.make(Maker(torch.device("cpu"), ReferenceBackend().layout)) for sample in cases.samples)
    for call in calls:
        result = tk_core.quant.swiglu_forward(*call.args, **call.kwargs)
        [specified_part] = specified(cases, call, [torch.ones_like(result)])
        if specified_part.any() and not specified_part.all():  # some rows are valid, others are not
            break
    expected = specified(cases, call, [result])
    other_garbage = torch.where(specified_part != 0, result, 7.0)
    assert runner._verdict(cases, call, expected, [other_garbage]) == "equal"
    assert runner._verdict(cases, call, expected, [other_garbage + 1]).startswith("differs: ")


def test_a_candidate_that_cannot_run_is_a_row_with_its_reason(monkeypatch):
    def broken():
        raise RuntimeError("out of luck")

    monkeypatch.setattr(adapters.adapter("torch"), "bind", lambda *args: broken)
    rows = _run(runner.Bench(ReferenceBackend(), ["torch"]))
    assert rows[1]["error"] == "RuntimeError: out of luck"
    assert "device_us" in rows[0]
    assert "out of luck" not in records.markdown(rows)


def test_a_worker_times_in_a_process_of_its_own(tmp_path):
    rows = _run(machine := runner.Bench(ReferenceBackend(), [f"torch@{tmp_path}"]))
    assert rows[1]["candidate"] == "torch"
    assert rows[1]["against_reference"] == "equal"
    machine.workers[0].close()
    with pytest.raises(worker.WorkerError, match=r"has ended|died"):
        machine.workers[0].time("host")


def test_first_calls_of_a_broken_process_say_why():
    with pytest.raises(RuntimeError, match=r"first calls on nowhere failed: .*nowhere"):
        first_call.measure("nowhere", [POINT])


def test_comparison_has_a_neutral_zone():
    def rows(*times):
        return [{"op": "a.b", "point": str(i), "candidate": "tk", "device_us": [t, t, t]} for i, t in enumerate(times)]

    verdicts = [v for *_, v in records.compare(rows(100, 100, 100, 1.0), rows(104, 106, 94, 1.4))]
    assert verdicts == ["neutral", "slower", "faster", "neutral"]
