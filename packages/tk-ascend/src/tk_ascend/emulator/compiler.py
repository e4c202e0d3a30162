"""Compile translated sources and the runtime with g++, cached by content."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tk_ascend.cache import cache_folder, digest
from tk_ascend.emulator.source import Kernel, translate

_NATIVE = Path(__file__).parent / "native"
_FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-gnu-unique",
    "-fno-threadsafe-statics",
    "-fstack-clash-protection",
    "-w",
)
_OPTIMIZED = ("-O2",)
_OBSERVED = ("-O1", "-fsanitize=thread")


class BuildError(RuntimeError):
    """g++ is missing or rejects the source, because it uses something that the emulator does not have."""


@dataclass(frozen=True)
class Program:
    """A compiled source: its shared library and the kernels in it. ``checked`` libraries report every access."""

    library: Path
    kernels: tuple[Kernel, ...]
    checked: bool

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel of that name, or the only one."""
        if name is None and len(self.kernels) == 1:
            return self.kernels[0]
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise ValueError(f"kernel: got {name!r}, the source has {[k.name for k in self.kernels]}")


def build(source: str, checked: bool = True) -> Program:
    """Compile AscendC source for this machine.

    Args:
        source: what TileLang generates for Ascend 950, or the same by hand.
        checked: observe the memory accesses of scalar and SIMT code. Without, the program is faster and only its
            numbers count.

    Returns:
        The program. Equal sources are compiled once and kept in ``<cache>/emulator``.

    Raises:
        BuildError: g++ fails; the message has its first errors.
    """
    translation = translate(source)
    name = digest(_runtime_digest(), translation.scalar, translation.vector or "", str(checked))
    library = cache_folder("emulator") / f"{name}.so"
    if not library.exists():
        scalar_flags = _OBSERVED if checked else _OPTIMIZED
        units = [(translation.scalar, scalar_flags)]
        if translation.vector:
            units.append((translation.vector, _OPTIMIZED))
        _compile(library, units)
    return Program(library, translation.kernels, checked)


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime, loaded once; programs resolve their symbols in it."""
    library = cache_folder("emulator") / f"runtime-{_runtime_digest()}.so"
    if not library.exists():
        _compile(library, [(path.read_text(), _OPTIMIZED) for path in sorted(_NATIVE.glob("*.cpp"))])
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.emu_bind.restype = ctypes.c_void_p
    loaded.emu_report.restype = loaded.emu_note.restype = ctypes.c_char_p
    counters = ("traffic", "vector_instructions", "multiplications", "simt_accesses", "simt_threads", "simt_barriers")
    for name in (f"emu_{counter}" for counter in counters):
        getattr(loaded, name).restype = ctypes.c_uint64
    loaded.emu_report_count.restype = loaded.emu_note_count.restype = ctypes.c_size_t
    return loaded


@functools.cache
def load(library: Path) -> ctypes.CDLL:
    """A program's library, after the runtime."""
    runtime()
    return ctypes.CDLL(str(library))


@functools.cache
def _runtime_digest() -> str:
    """Of everything that a build depends on besides its source."""
    files = sorted(path for path in _NATIVE.rglob("*") if path.suffix in (".h", ".cpp"))
    templates = sorted((_templates() / "tl_templates" / "ascend").glob("*.h"))
    compiler = _run([_compiler(), "-dumpfullversion"]).strip()
    content = [path.read_bytes() for path in (*files, *templates)]
    return digest(compiler, platform.machine(), *_FLAGS, *_OPTIMIZED, *_OBSERVED, *content)


@functools.cache
def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise BuildError("the emulator needs g++ (12 or newer) on the path, or CXX naming one")
    return compiler


@functools.cache
def _templates() -> Path:
    """TileLang's include folder, found without importing TileLang."""
    spec = importlib.util.find_spec("tilelang")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("the emulator needs the package tilelang, for its AscendC templates")
    return Path(spec.submodule_search_locations[0]) / "src"


def _compile(library: Path, units: Sequence[tuple[str, tuple[str, ...]]]) -> None:
    objects = [_object(text, flags) for text, flags in units]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / "built.so"
        _run([_compiler(), "-shared", "-Wl,-Bsymbolic", "-o", str(built), *map(str, objects)])
        os.replace(built, library)


def _object(text: str, flags: tuple[str, ...]) -> Path:
    """The object file of a unit. Variants of a kernel share those of their vector functions."""
    path = cache_folder("emulator") / f"{digest(_runtime_digest(), text, *flags)}.o"
    if path.exists():
        return path
    header = ["-include", str(_precompiled(flags))] if text.startswith("#include <tl_templates") else []
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source, built = Path(folder) / "unit.cpp", Path(folder) / "unit.o"
        source.write_text(text)
        _run([_compiler(), *_FLAGS, *flags, *_includes(), *header, "-c", str(source), "-o", str(built)])
        os.replace(built, path)
    return path


def _precompiled(flags: tuple[str, ...]) -> Path:
    """The headers that every generated source includes, which take most of the time of a small one."""
    folder = cache_folder("emulator") / f"headers-{digest(_runtime_digest(), *flags)}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
            built = Path(parent) / "headers"
            built.mkdir()
            header = built / "all.h"
            names = ("common.h", "debug.h", "simd_inst.h")
            header.write_text("".join(f"#include <tl_templates/ascend/{name}>\n" for name in names))
            command = [_compiler(), *_FLAGS, *flags, *_includes(), "-x", "c++-header", str(header)]
            _run([*command, "-o", str(header.with_suffix(".h.gch"))])
            with contextlib.suppress(OSError):  # another process was faster
                built.rename(folder)
    return folder / "all.h"


def _includes() -> list[str]:
    return [f"-I{_NATIVE}", f"-I{_NATIVE / 'shim'}", f"-I{_templates()}"]


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return result.stdout
    errors = [line for line in result.stderr.splitlines() if "error" in line or "required from" in line][:12]
    raise BuildError("g++ failed:\n" + "\n".join(errors or result.stderr.splitlines()[:12]))
