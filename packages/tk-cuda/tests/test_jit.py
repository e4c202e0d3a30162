"""Builders, their launchers' way through the cache, and building ahead of time.

TileLang is the real one. nvcc is a script that counts its runs, so that the tests need neither CUDA toolkit nor GPU.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tk_core import config
from tk_core.backend import Refused, locate
from tk_core.bench import runner
from tk_core.cli.precompile import meta_calls
from tk_core.errors import InvalidArgumentError
from tk_core.op import OPERATORS
from tk_cuda import ci, compiler, jit, precompile
from tk_cuda import inspect as resources
from tk_cuda.backend import BACKEND
from tk_cuda.moe import normalize_weight

NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 13.0, V$TK_TEST_NVCC_VERSION"; exit 0 ;;
  *-ptx*) echo 'ld.global.v4.u32 {%r1}; ld.global.nc.u16 %r2; st.global.v2.f32 [%r3];' > kernel.ptx; exit 0 ;;
esac
echo $PPID >> "$TK_TEST_LOG"
while [ -e "$TK_TEST_LOG.hang" ]; do sleep 0.05; done
echo "ptxas info    : Used 37 registers, used 1 barriers, 2048 bytes smem, 8 bytes spill stores"
printf machine-code > kernel.cubin
"""

KERNEL = """
from typing import Any

from tk_cuda.jit import Builder
from tk_cuda.tile.function import prim_func


def _build(columns, dtype):
    import tilelang.language as T

    rows = T.dynamic("rows")

    def fill(x: Any) -> None:
        with T.Kernel(rows, threads=32) as row:
            x[row, 0] = T.cast(columns, dtype)

    return prim_func(fill, T.Tensor((rows, columns), dtype))


TINY = Builder("test.tiny", _build)
"""

PROCESS = """
import sys, importlib.util
spec = importlib.util.spec_from_file_location("tiny", sys.argv[1])
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)
if sys.argv[2] == "build":
    print(tiny.TINY.build_entry((8, "float32"), "sm_90a"))
else:
    function = tiny.TINY.load((8, "float32"), "sm_90a")
    print(callable(function), "tilelang" in sys.modules)
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a counting nvcc; the file has a line for each compilation, the process that asked for it."""
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TK_TEST_LOG", str(log))
    monkeypatch.setenv("TK_TEST_NVCC_VERSION", "13.0.88")
    monkeypatch.delenv("TK_CACHE_PATH", raising=False)
    return log


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[ModuleType]:
    """A module with one small kernel."""
    yield _module(tmp_path / "tiny.py")
    del jit.BUILDERS["test.tiny"], jit.BUILDERS["test.tiny.waits"]


def _module(path: Path) -> ModuleType:
    path.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location("tiny", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _process(path: Path, what: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROCESS, str(path), what], stdout=subprocess.PIPE, text=True)


def _runs(log: Path) -> int:
    return len(log.read_text().split())


def test_compile_once_then_load_without_tilelang(log: Path, tiny: ModuleType, tmp_path: Path) -> None:
    key = (8, "float32")
    assert tiny.TINY.build_entry(key, "sm_90a") == "compiled"
    assert tiny.TINY.build_entry(key, "sm_90a") == "cached"
    assert callable(tiny.TINY.load(key, "sm_90a"))
    assert _runs(log) == 1
    assert tiny.TINY.build_entry((4, "float32"), "sm_90a") == "compiled"
    assert _runs(log) == 2
    elsewhere = tmp_path / "other" / "tiny.py"
    elsewhere.parent.mkdir()
    shutil.copyfile(tmp_path / "tiny.py", elsewhere)
    loaded = _process(elsewhere, "load")
    assert loaded.communicate(timeout=120)[0].split() == ["True", "False"]
    assert _runs(log) == 2


@pytest.mark.parametrize(("arch", "waits"), [("sm_90a", True), ("sm_120a", True), ("sm_89", False)])
def test_programmatic_launches_wait_first(arch: str, waits: bool, tiny: ModuleType) -> None:
    plain = compiler.lower(tiny.TINY.build, (8, "float32"), arch).source
    source = compiler.lower(tiny.TINY.build, (8, "float32"), arch, waits=True).source
    assert "cudaGridDependencySynchronize" not in plain
    assert ("cudaGridDependencySynchronize();" in source) == waits
    if waits:
        body = source[source.index("{", source.index('extern "C"')) + 1 :]
        assert body.lstrip().startswith("cudaGridDependencySynchronize();")


def test_the_setting_chooses_the_kernels_that_wait(tiny: ModuleType) -> None:
    meta = torch.device("meta")
    try:
        with jit.recording("sm_90a") as plain:
            tiny.TINY.compile((8, "float32"), meta)
        config.set_pdl(True)
        with jit.recording("sm_90a") as waiting:
            tiny.TINY.compile((8, "float32"), meta)
    finally:
        config.set_pdl(False)
    assert [job.builder.name for job in plain] == ["test.tiny"]
    assert [job.builder.name for job in waiting] == ["test.tiny.waits"]
    assert tiny.TINY.identity((8, "float32"), "sm_90a") != tiny.TINY.waiting.identity((8, "float32"), "sm_90a")


def test_damaged_library_is_compiled_again(log: Path, tiny: ModuleType, tmp_path: Path) -> None:
    key = (8, "float32")
    tiny.TINY.build_entry(key, "sm_90a")
    (path,) = (tmp_path / "cache" / "cuda").glob("test.tiny-*.so")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.warns(RuntimeWarning, match="truncated"):
        assert callable(tiny.TINY.load(key, "sm_90a"))
    assert _runs(log) == 1  # the cubin was still there
    assert tiny.TINY.build_entry(key, "sm_90a") == "cached"


def test_without_compiler_an_absent_kernel_is_refused(
    log: Path, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    with pytest.raises(Refused, match=r"no compiled kernel of test\.tiny for sm_90a"):
        tiny.TINY.load((8, "float32"), "sm_90a")


def test_processes_share_one_compilation_and_survive_a_killed_one(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.py"
    path.write_text(KERNEL)
    hang = Path(f"{log}.hang")
    hang.touch()
    victim = _process(path, "build")
    waiting = [_process(path, "build") for _ in range(2)]
    while not _runs(log) and victim.poll() is None:
        time.sleep(0.05)
    first = next(process for process in (victim, *waiting) if str(process.pid) == log.read_text().strip())
    first.send_signal(signal.SIGKILL)
    hang.unlink()
    said = [process.communicate(timeout=120)[0].strip() for process in (victim, *waiting) if process is not first]
    assert sorted(said) == ["cached", "compiled"]
    assert first.wait(10) == -signal.SIGKILL
    assert not list((tmp_path / "cache" / "cuda").glob(".*.tmp"))


def test_builder_names_are_unique(tiny: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with pytest.raises(TypeError, match=r"Builder 'test\.tiny'"):
        _module(tmp_path / "second" / "tiny.py")


def test_builder_must_not_capture_variables() -> None:
    captured = 3

    def build(n: int) -> int:
        return n + captured

    with pytest.raises(TypeError, match="captures variables"):
        jit.Builder("test.closure", build)


def test_plain_key() -> None:
    key = (torch.bfloat16, 3, None, True, 1.5, (torch.float8_e4m3fn, "x"))
    assert jit.plain_key(key) == ("bfloat16", 3, None, True, 1.5, ("float8_e4m3fn", "x"))
    with pytest.raises(TypeError, match="a kernel key holds"):
        jit.plain_key((torch.device("cpu"),))


def test_meta_calls_record_the_kernels_of_each_architecture() -> None:
    points = list(runner.points(["moe.normalize_weight"]))
    calls = list(meta_calls(BACKEND, BACKEND.recorder(), points))
    assert len(calls) == len(points) > 0
    jobs = [job for call in calls for job in precompile.needed(call, ["sm_80", "sm_90a"])]
    assert {job.builder.name for job in jobs} == {"moe.normalize_weight"}
    assert {job.arch for job in jobs} == {"sm_80", "sm_90a"}
    topk = {point.make(_shapes()).args[0].shape[-1] for _, _, point in points}
    assert {job.key[0] for job in jobs} == topk


def _shapes() -> object:
    from tk_core.cases import ShapeMaker

    return ShapeMaker(BACKEND.layout)


def test_calls_on_meta_tensors_outside_recording_are_refused() -> None:
    with pytest.raises(Refused, match="recording"):
        jit.num_sms(torch.device("meta"))


def test_precompile_fills_the_cache(log: Path) -> None:
    calls = list(meta_calls(BACKEND, BACKEND.recorder(), list(runner.points(["moe.normalize_weight"]))[:1]))
    states: list[str] = []

    def note(done: int, total: int, name: str, state: str) -> None:
        states.append(state)

    assert BACKEND.precompile(calls, ["sm_90a"], 1, note) == []
    assert states == ["compiled"]
    assert BACKEND.precompile(calls, ["sm_90a"], 1, note) == []
    assert states == ["compiled", "cached"]
    assert _runs(log) == 1
    (entry,) = (row for row in BACKEND.cache_info() if row["entries"])
    assert entry["builders"] == ["moe.normalize_weight"]
    with pytest.raises(InvalidArgumentError, match="architecture sm_12 is not one of sm_80"):
        BACKEND.precompile(calls, ["sm_12"], 1, note)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidArgumentError, match="there is no GPU here; name the architectures"):
            BACKEND.precompile(calls, [], 1, note)


def test_inspect_reports_what_the_compiler_said(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.shutil, "which", lambda name: None)
    rows = BACKEND.inspect("moe.normalize_weight", lambda: None)
    assert [row["kernel"] for row in rows] == ["moe.normalize_weight"] * 2
    assert [row["key"] for row in rows] == ["(8, 16, 16)", "(77, 4, 4)"]
    for row in rows:
        assert (row["registers"], row["spilled bytes"], row["shared bytes"]) == (37, 8, 2048)
        assert (row["loads"], row["stores"], row["read from"]) == ("16x1 2x1", "8x1", "PTX")


def test_inspect_finds_the_kernels_of_every_operator() -> None:
    for op in OPERATORS:
        found = locate("tk_cuda", op, "KERNELS")
        assert found is not None
        listed = hasattr(found[0], "CI_KEYS")
        kernels = resources._listed(op, found[0], "sm_90a") if listed else resources._needed(op, "sm_90a")
        assert kernels, op


def test_widths_in_sass() -> None:
    text = "LDG.E.128.CONSTANT R4, [R2]\nLDG.E R1, [R2]\nLDG.E.U16 R1, [R2]\nSTG.E.64 [R2], R4\n"
    loads, stores = resources._count_sass(text)
    assert (resources._shown(loads), resources._shown(stores)) == ("16x1 4x1 2x1", "8x1")


def test_quick_check_builds_each_builder_for_all_and_variants_for_one() -> None:
    archs = ["sm_80", "sm_89", "sm_90a"]
    quick, problems = ci.tasks_of(normalize_weight, archs, full=False)
    full, _ = ci.tasks_of(normalize_weight, archs, full=True)
    assert problems == []
    assert len(full) == len(normalize_weight.CI_KEYS) * 3
    assert [task.arch for task in quick] == [*archs, "sm_90a"] * 2
    assert set(quick) < set(full)


def test_check_names_a_builder_without_keys() -> None:
    module = ModuleType(normalize_weight.__name__)
    module.CI_KEYS = normalize_weight.CI_KEYS[:2]  # type: ignore[attr-defined]
    _, problems = ci.tasks_of(module, ["sm_90a"], full=False)
    assert problems == [f"{module.__name__}.CI_KEYS names no key of builder moe.normalize_weight_backward"]
