"""From a builder to machine code: TileLang lowers it, nvcc compiles it. Imports TileLang only when asked to compile."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import cache

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""The architectures that every kernel is built for."""

_COMPILE_HOOK = "tilelang_callback_cuda_compile"


class CompileError(RuntimeError):
    """A kernel does not lower or compile; holds what the compiler said."""


class Lowered(NamedTuple):
    """A kernel as CUDA source.

    Attributes:
        entry: name of the function that launches it.
        source: CUDA source.
        dynamic_shared: bytes of dynamic shared memory of each kernel in the source, by its name.
        host: the host module, where one was asked for.
    """

    entry: str
    source: str
    dynamic_shared: dict[str, int]
    host: Any


class Compiled(NamedTuple):
    """A cubin, and what ptxas reported of its resources."""

    cubin: bytes
    log: str


def nvcc_path() -> str | None:
    """The nvcc to compile with, found as TileLang does: CUDA_HOME, PATH, the pip package, /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [os.path.join(home, "bin", "nvcc")] if home else [shutil.which("nvcc"), _pip_nvcc(), _SYSTEM_NVCC]
    for path in candidates:
        if path and os.access(path, os.X_OK):
            return path
    return None


_SYSTEM_NVCC = "/usr/local/cuda/bin/nvcc"


def _pip_nvcc() -> str | None:
    import importlib.metadata

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nvidia-cuda-nvcc") or []:
            if file.name == "nvcc":
                return str(file.locate())
    return None


@functools.cache
def nvcc_version(path: str) -> str:
    """``13.0.88`` for the nvcc at a path."""
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    for word in text.replace(",", " ").split():
        if word.startswith("V") and word[1:2].isdigit():
            return word[1:]
    raise CompileError(f"{path} --version does not name a version: {text!r}")


def prim_func(build: Callable[..., Any], key: tuple[Any, ...], arch: str) -> Any:
    """Run a builder for one key; ``arch`` is passed to builders that have a parameter of that name."""
    if "arch" in inspect.signature(build).parameters:
        return build(*key, arch=arch)
    return build(*key)


def lower(
    build: Callable[..., Any],
    key: tuple[Any, ...],
    arch: str,
    pass_configs: dict[str, Any] | None = None,
    compile_device: Callable[[str], bytes] | None = None,
    waits: bool = False,
) -> Lowered:
    """Lower one key of a builder; with ``compile_device`` (CUDA source to cubin) also make the host module.

    Args:
        waits: launch the kernels programmatically after the one before them, for which they wait first of all. Without
            effect below sm_90, which has no such launches.

    Raises:
        CompileError: what ``compile_device`` raised. Errors of TileLang pass unchanged.
        NoBackendError: TileLang is not installed.
    """
    cache.environment()
    import tilelang
    from tilelang.transform.pass_config import normalize_pass_configs
    from tvm.target import Target

    target = Target({"kind": "cuda", "arch": arch})
    func = prim_func(build, key, arch)
    if waits and int(arch.removeprefix("sm_").rstrip("a")) >= 90:
        func = _waiting(func)
    configs = normalize_pass_configs(dict(pass_configs or {}))
    with _device_compiler(compile_device), tilelang.tvm.transform.PassContext(opt_level=3, config=configs), target:
        artifact = tilelang.lower(
            func,
            target=target,
            target_host="c",
            enable_host_codegen=compile_device is not None,
            enable_device_compile=compile_device is not None,
        )
    shared = {}
    for variable, kernel in artifact.device_mod.functions.items():
        attributes = kernel.attrs or {}
        shared[str(variable.name_hint)] = int(attributes.get("dyn_shared_memory_buf", 0) or 0)
    return Lowered(str(func.attrs["global_symbol"]), artifact.kernel_source, shared, artifact.rt_mod)


def _waiting(func: Any) -> Any:
    """A function whose kernels begin by waiting for the kernel before them; the wait makes TileLang launch them so."""
    from tilelang.cuda.language.pdl import pdl_sync
    from tvm import tirx

    def begin(block: Any) -> Any:
        if block.name_hint != "tilelang_root":
            return block
        body = tirx.SeqStmt([tirx.Evaluate(pdl_sync()), block.body])
        return tirx.SBlock(
            block.iter_vars,
            block.reads,
            block.writes,
            block.name_hint,
            body,
            block.init,
            block.alloc_buffers,
            block.match_buffers,
            block.annotations,
        )

    return func.with_body(tirx.stmt_functor.ir_transform(func.body, None, begin, ["tirx.SBlock"]))


@contextlib.contextmanager
def _device_compiler(compile_device: Callable[[str], bytes] | None) -> Iterator[None]:
    """Have TileLang's device build call us for the cubin: our flags, our cache, none of its files."""
    if compile_device is None:
        yield
        return
    import tvm_ffi

    before = tvm_ffi.get_global_func(_COMPILE_HOOK)
    failures: list[Exception] = []

    def hook(code: str, target: Any, pass_config: Any = None) -> bytearray:
        try:
            return bytearray(compile_device(code))
        except Exception as error:
            failures.append(error)
            raise

    tvm_ffi.register_global_func(_COMPILE_HOOK, hook, override=True)
    try:
        yield
    except Exception as error:
        if failures:  # the original, not what the C++ frames made of it
            raise failures[0] from None
        raise error
    finally:
        tvm_ffi.register_global_func(_COMPILE_HOOK, before, override=True)


def nvcc_flags(arch: str) -> list[str]:
    """The flags of every compilation; include paths are added where it runs. No fast math."""
    return ["--cubin", "-O3", "-std=c++20", f"-arch={arch}", "-Xptxas", "-v"]


def toolkit() -> str | None:
    """Version of the nvcc here, or None without one."""
    path = nvcc_path()
    return None if path is None else nvcc_version(path)


def compile_cuda(source: str, arch: str) -> Compiled:
    """Compile CUDA source; equal sources are compiled once and kept in the cache.

    Raises:
        CompileError: nvcc is missing or refuses the source.
    """
    version = toolkit()
    if version is None:
        raise CompileError("no nvcc found; install the CUDA toolkit, or tilelang[nvcc] from pip")
    identity = {
        **cache.environment(),
        "builder": "object",
        "arch": arch,
        "flags": nvcc_flags(arch),
        "source": hashlib.sha256(source.encode()).hexdigest(),
    }
    stem = cache.stem_of(identity)
    found = cache.find(stem, identity, version, "cubin")
    if found is not None:
        return Compiled(found.payload, found.facts["log"])
    compiled = _run_nvcc(source, arch)
    cache.store(stem, version, compiled.cubin, {"identity": identity, "log": compiled.log}, "cubin")
    return compiled


def _run_nvcc(source: str, arch: str) -> Compiled:
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    nvcc = str(nvcc_path())
    host = os.environ.get("CXX")
    with tempfile.TemporaryDirectory(prefix="tk-nvcc-") as folder:
        (Path(folder) / "kernel.cu").write_text(source)
        chosen = ["-ccbin", host] if host else []
        includes = [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
        done = subprocess.run(
            [nvcc, *nvcc_flags(arch), *chosen, *includes, "-o", "kernel.cubin", "kernel.cu"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise CompileError(f"nvcc failed for {arch}:\n{done.stdout}\n--- source ---\n{source}")
        return Compiled((Path(folder) / "kernel.cubin").read_bytes(), done.stdout)


def link(lowered: Lowered) -> bytes:
    """The host launcher and its cubin as one shared library."""
    with tempfile.TemporaryDirectory(prefix="tk-link-") as folder:
        path = os.path.join(folder, "kernel.so")
        lowered.host.export_library(path)
        return Path(path).read_bytes()
