"""Shared fixtures: which tk_core is under test, and backends installed as real distributions."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from tk_core import op


@pytest.fixture
def distribution(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Install a distribution with one module and one ``tk.backends`` entry point into a folder for a subprocess."""

    def install(name: str, source: str, attribute: str = "BACKEND") -> pathlib.Path:
        module = f"tk_{name}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tk-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[tk.backends]\n{name} = {module}:{attribute}\n")
        (info / "RECORD").write_text(f"{module}.py,,\n")
        return tmp_path

    return install


@pytest.fixture
def python(tmp_path: pathlib.Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a snippet in a fresh interpreter that also sees the distributions installed for this test."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path, "TK_BACKENDS": "", **environment}
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=300
        )

    return run


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan calls on the CPU as on a device, from nothing."""
    monkeypatch.setattr(op, "_plan_on_cpu", True)
    op.forget_plans()
    yield
    op.forget_plans()
