"""The tk command: what it prints, and errors as one line with exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys


def tk(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tk_core", *args], capture_output=True, text=True, timeout=600)


def test_info_lists_versions_backends_and_the_matrix():
    data = json.loads(tk("info", "--json").stdout)
    assert data["versions"]["tk-core"] == "2.0.0.dev0"
    assert {b["name"] for b in data["backends"]} >= {"reference"}
    assert data["operators"]["quant.per_token_cast"]["reference"] == "native"
    text = tk("info").stdout
    assert "quant.per_token_cast" in text
    assert "usable" in text


def test_check_passes_on_the_reference(tmp_path):
    done = tk("check", "moe.normalize_weight", "--backend", "reference", "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["operators"]["moe.normalize_weight"]["passed"] > 0


def test_errors_are_one_line():
    for args, text in (
        (("check", "quant.per_tokn_cast"), "did you mean quant.per_token_cast"),
        (("check", "--backend", "nowhere"), "backend 'nowhere' is not installed"),
        (("check", "--level", "deep"), "--level must be quick, full, large, got 'deep'"),
    ):
        done = tk(*args)
        assert done.returncode == 2
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


def test_without_the_extra_the_message_says_what_to_install(tmp_path):
    (tmp_path / "rich.py").write_text("raise ImportError('no rich', name='rich')")
    done = subprocess.run(
        [sys.executable, "-m", "tk_core", "info"], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 2
    assert "pip install './packages/tk-core[cli]'" in done.stderr
