"""The disk cache: what it serves, what it refuses, and that damage and crowds do not harm it. Needs no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tk_cuda import cache
from tk_cuda.moe import normalize_weight

TOOLKIT = "13.0.88"
PAYLOAD = b"\x7fELF" + bytes(range(256)) * 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty own folder, and no others."""
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.delenv("TK_CACHE_PATH", raising=False)
    monkeypatch.setattr(cache, "_shipped", lambda: None)
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "own" / "cuda"


def _identity(**changes: Any) -> dict[str, Any]:
    return {**cache.environment(), "builder": "test.tiny", "arch": "sm_90a", "key": "(1,)", **changes}


def _stored(toolkit: str = TOOLKIT, **changes: Any) -> tuple[str, dict[str, Any], Path]:
    identity = _identity(**changes)
    stem = cache.stem_of(identity)
    path = cache.store(stem, toolkit, PAYLOAD, {"identity": identity, "entry": "main"})
    assert path is not None
    return stem, identity, path


def test_round_trip(folder: Path) -> None:
    stem, identity, path = _stored()
    found = cache.find(stem, identity, TOOLKIT)
    assert found is not None
    assert found.payload == PAYLOAD
    assert found.facts == {"identity": identity, "entry": "main", "toolkit": TOOLKIT}
    assert path.parent == folder
    assert path.read_bytes().startswith(PAYLOAD)
    assert [row["problem"] for row in cache.contents(folder)] == [None]


@pytest.mark.parametrize("place", [0, len(PAYLOAD) // 2, len(PAYLOAD) + 3, -1, -20, -44])
def test_damaged_entry_is_removed_and_made_anew(folder: Path, place: int) -> None:
    stem, identity, path = _stored()
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="removed"):
        assert cache.find(stem, identity, TOOLKIT) is None
    assert not path.exists()
    _stored()
    assert cache.find(stem, identity, TOOLKIT) is not None


@pytest.mark.parametrize("kept", [0, 10, 47, len(PAYLOAD), -1])
def test_truncated_entry_is_removed(folder: Path, kept: int) -> None:
    stem, identity, path = _stored()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.warns(RuntimeWarning, match="truncated"):
        assert cache.find(stem, identity, TOOLKIT) is None
    assert not path.exists()


def test_entry_under_another_name_is_refused(folder: Path) -> None:
    _, _, path = _stored()
    other = _identity(key="(2,)")
    shutil.copyfile(path, folder / f"{cache.stem_of(other)}-cuda{TOOLKIT}.so")
    with pytest.warns(RuntimeWarning, match="made from something else"):
        assert cache.find(cache.stem_of(other), other, TOOLKIT) is None


def test_entry_that_others_can_write_is_refused(folder: Path) -> None:
    stem, identity, path = _stored()
    path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="others can write it"):
        assert cache.find(stem, identity, TOOLKIT) is None


def test_folder_that_others_can_write_is_neither_read_nor_written(folder: Path) -> None:
    stem, identity, _ = _stored()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write it"):
        assert cache.find(stem, identity, TOOLKIT) is None
    assert cache.store(stem, TOOLKIT, PAYLOAD, {"identity": identity}) is None
    assert "others can write it" in cache.report()[0]["reason"]


def test_foreign_owner_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stem, identity, path = _stored()
    facts = list(path.stat())
    facts[4] = os.getuid() + 7
    foreign = os.stat_result(facts)
    assert cache.untrusted(path) is None
    assert f"belongs to user {os.getuid() + 7}" in str(cache.untrusted(path, foreign))
    monkeypatch.setattr(os, "fstat", lambda number: foreign)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        assert cache.find(stem, identity, TOOLKIT) is None


def test_own_folder_serves_only_the_toolkit_here(folder: Path) -> None:
    stem, identity, path = _stored("12.9.41")
    assert cache.find(stem, identity, TOOLKIT) is None
    assert path.exists()
    found = cache.find(stem, identity, None)
    assert found is not None
    assert found.path == path
    _, _, newer = _stored("13.0.88")
    found = cache.find(stem, identity, None)
    assert found is not None
    assert found.path == newer


def test_read_only_folder_serves_any_toolkit_and_is_left_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem, identity, path = _stored("12.9.41")
    shared = tmp_path / "shared"
    folder.rename(shared)
    monkeypatch.setenv("TK_CACHE_PATH", f"{tmp_path / 'missing'}:{shared}")
    with pytest.warns(RuntimeWarning, match="does not exist"):
        found = cache.find(stem, identity, TOOLKIT)
    assert found is not None
    assert found.path == shared / path.name
    (shared / path.name).write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="not read"):
        assert cache.find(stem, identity, TOOLKIT) is None
    assert (shared / path.name).exists()


def test_other_version_of_the_compiler_is_another_entry(folder: Path) -> None:
    stem, _, _ = _stored()
    other = _identity(tilelang="0.0.1")
    assert cache.stem_of(other) != stem
    assert cache.find(cache.stem_of(other), other, TOOLKIT) is None


def test_source_digest_depends_on_text_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "kernel.py", tmp_path / "b" / "c" / "kernel.py"
    for path in (first, second):
        path.parent.mkdir(parents=True)
        path.write_text("def build(n):\n    return n\n")
    os.utime(second, (1, 1))
    assert cache.source_digest(first) == cache.source_digest(second)
    changed = tmp_path / "kernel.py"
    changed.write_text("def build(n):\n    return n + 1\n")
    assert cache.source_digest(changed) != cache.source_digest(first)


def test_source_digest_covers_device_code_but_not_the_launching_modules() -> None:
    names = set(cache._sources(Path(normalize_weight.__file__)))
    assert {"moe/normalize_weight.py", "tile/access.py", "tile/function.py"} <= names
    assert not {"jit.py", "cache.py", "compiler.py"} & names


STEMS = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from tk_cuda.jit import plain_key
from tk_cuda.moe import normalize_weight
print(json.dumps([(b.name, b.identity(plain_key(k), "sm_90a")) for b, k, *_ in normalize_weight.CI_KEYS]))
"""


def test_identity_does_not_depend_on_import_order_or_folder(tmp_path: Path) -> None:
    modules = ["tk_cuda.moe.topk_gate", "tk_cuda.transform.apply_rotary", "tk_cuda.quant.cast"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", STEMS, *reversed(modules)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    from tk_cuda.jit import plain_key

    here = [(b.name, b.identity(plain_key(k), "sm_90a")) for b, k, *_ in normalize_weight.CI_KEYS]
    assert json.loads(done.stdout) == json.loads(json.dumps(here))


WORKER = """
import os, sys, time
from pathlib import Path
from tk_cuda import cache
identity = {"builder": "test.tiny", "arch": "sm_90a"}
stem = cache.stem_of(identity)
with cache.locked(stem):
    found = cache.find(stem, identity, "13.0.88")
    if found is None:
        with open(sys.argv[1], "a") as log:
            log.write(f"{os.getpid()}\\n")
        time.sleep(float(sys.argv[2]))
        cache.store(stem, "13.0.88", b"made by one", {"identity": identity})
found = cache.find(stem, identity, "13.0.88")
sys.exit(0 if found is not None and found.payload == b"made by one" else 3)
"""


def _worker(log: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WORKER, str(log), str(seconds)])


def test_processes_that_start_together_make_an_entry_once(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    workers = [_worker(log, 0.3) for _ in range(16)]
    assert [worker.wait(60) for worker in workers] == [0] * 16
    assert len(log.read_text().split()) == 1
    assert not list(folder.glob("*.tmp"))


def test_killed_process_leaves_no_lock_and_no_leftovers(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    victim = _worker(log, 60)
    while not log.read_text() and victim.poll() is None:
        time.sleep(0.01)
    stem = cache.stem_of({"builder": "test.tiny", "arch": "sm_90a"})
    leftover = folder / f".{stem}-cuda13.0.88.so.{victim.pid}.tmp"
    leftover.write_bytes(b"half")
    victim.kill()
    victim.wait(10)
    assert _worker(log, 0).wait(60) == 0
    assert len(log.read_text().split()) == 2
    assert not leftover.exists()
