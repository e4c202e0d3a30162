"""The wheel of compiled kernels: what it holds, that pip accepts it, and that only its own version reads it."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tk_cuda import cache, cubins

PAYLOAD = b"\x7fELF a library"


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str, dict[str, Any]]:
    """A cache with one kernel, its folder no longer the own one; and the kernel's name and identity."""
    monkeypatch.delenv("TK_CACHE_PATH", raising=False)
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "filled"))
    identity = {"builder": "test.tiny", "arch": "sm_90a"}
    stem = cache.stem_of(identity)
    assert cache.store(stem, "13.0.88", PAYLOAD, {"identity": identity, "entry": "main"}) is not None
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "own"))
    return tmp_path / "filled" / "cuda", stem, identity


@pytest.fixture
def installed(filled: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> Iterator[Path]:
    """A folder on the import path that the wheel is unpacked in."""
    site = tmp_path / "site"
    with zipfile.ZipFile(cubins.build_wheel(filled[0], tmp_path / "dist")) as wheel:
        wheel.extractall(site)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    yield site
    sys.path.remove(str(site))
    importlib.invalidate_caches()


def test_installed_wheel_is_a_read_only_cache(filled: tuple[Path, str, dict[str, Any]], installed: Path) -> None:
    _, stem, identity = filled
    for toolkit in (None, "13.0.88", "12.9.41"):
        found = cache.find(stem, identity, toolkit)
        assert found is not None
        assert found.payload == PAYLOAD
        assert found.path.is_relative_to(installed)
    row = cache.report()[-1]
    assert (row["writable"], row["reason"], row["entries"]) == (False, None, 1)


def test_wheel_of_another_version_is_not_read(
    filled: tuple[Path, str, dict[str, Any]], installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stem, identity = filled
    ours = importlib.metadata.version

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "tk-cuda" else ours(name))
    with pytest.warns(RuntimeWarning, match=r"made for tk-cuda .*, installed is 9\.9"):
        assert cache.find(stem, identity, None) is None


def test_copy_without_metadata_is_not_read(filled: tuple[Path, str, dict[str, Any]], installed: Path) -> None:
    _, stem, identity = filled
    (info,) = installed.glob("*.dist-info")
    shutil.rmtree(info)
    with pytest.warns(RuntimeWarning, match="no version"):
        assert cache.find(stem, identity, None) is None


def test_equal_caches_give_equal_wheels(filled: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    first = cubins.build_wheel(filled[0], tmp_path / "first")
    second = cubins.build_wheel(filled[0], tmp_path / "second")
    assert first.read_bytes() == second.read_bytes()


def test_pip_installs_the_wheel(filled: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    wheel = cubins.build_wheel(filled[0], tmp_path / "dist")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        command = ["uv", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(wheel)], check=True, timeout=60)
    (entry,) = (tmp_path / "site").glob("tk_cuda_cubins/cuda/*.so")
    assert entry.read_bytes() == next(filled[0].glob("*.so")).read_bytes()
    assert cache.untrusted(entry) is None


def test_unusable_folders_are_refused(filled: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        cubins.build_wheel(tmp_path / "missing", tmp_path)
    (tmp_path / "empty").mkdir(mode=0o755)
    with pytest.raises(ValueError, match="holds no kernels"):
        cubins.build_wheel(tmp_path / "empty", tmp_path)
    next(filled[0].glob("*.so")).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="is truncated"):
        cubins.build_wheel(filled[0], tmp_path)
