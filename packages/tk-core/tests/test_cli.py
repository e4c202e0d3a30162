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


def test_errors_are_one_line(tmp_path):
    nowhere = str(tmp_path / "nowhere" / "file")
    for args, text in (
        (("nosuch",), "tk: No such command 'nosuch'; see tk --help"),
        (("check", "--nosuch"), "tk check: No such option: --nosuch; see tk check --help"),
        (("quantize", "model"), "tk quantize: Missing argument 'target'"),
        (("quantize", "a", "b"), "tk quantize: Missing option '--recipe'"),
        (("info", "extra"), "tk info: Got unexpected extra argument"),
        (("precompile", "--jobs", "many"), "tk precompile: Invalid value for '--jobs'"),
        (("precompile", "--jobs", "0"), "--jobs must be at least 1, got 0"),
        (("check", "--json", nowhere), f"--json must name a file in a folder that exists, got '{nowhere}'"),
        (("bench", "--plot", str(tmp_path)), f"--plot must name a file, got the folder '{tmp_path}'"),
        (("bench", "--plot", "times.gif2"), "--plot must name a .png file, got 'times.gif2'"),
        (("bench", "--backend", ""), "backend '' is not installed"),
        (("quantize", "a", "b", "--recipe", "mxfp8", "--report", nowhere), "--report must name a file"),
        (("check", "quant.per_tokn_cast"), "did you mean quant.per_token_cast"),
        (("check", "--backend", "nowhere"), "backend 'nowhere' is not installed"),
        (("check", "--level", "deep"), "--level must be quick, full, large, got 'deep'"),
    ):
        done = tk(*args)
        assert done.returncode == 2
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


def test_the_command_alone_prints_its_help():
    done = tk()
    assert done.returncode == 0
    assert "quantize" in done.stdout


def test_without_the_extra_the_message_says_what_to_install(tmp_path):
    (tmp_path / "rich.py").write_text("raise ImportError('no rich', name='rich')")
    done = subprocess.run(
        [sys.executable, "-m", "tk_core", "info"], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 2
    assert "pip install './packages/tk-core[cli]'" in done.stderr
