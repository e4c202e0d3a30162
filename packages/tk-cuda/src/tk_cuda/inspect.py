"""What the compiler made of an operator's kernels: registers, spills, shared memory, widths of global accesses."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

from tk_core import registry
from tk_core.backend import locate
from tk_core.cases import ShapeMaker, cases_of
from tk_core.conformance.engine import public_function

from . import compiler, precompile
from .backend import CudaBackend
from .ci import resources
from .jit import Builder, Key, plain_key

_PTX = re.compile(r"\b(ld|st)\.(?:volatile\.|relaxed\.|weak\.)?global\S*?(?:\.v(\d))?\.[bufs](\d+)")
_SASS = re.compile(r"\b(LDG|STG)\.E\S*")
_SASS_WIDTH = re.compile(r"\.(128|64|U16|S16|U8|S8)")


def report(op: str, arch: str = "sm_90a") -> list[dict[str, Any]]:
    """One row for each kernel of an operator."""
    found = locate("tk_cuda", op, "KERNELS")
    if found is None:
        return []
    rows = []
    for builder, key in _listed(op, found[0], arch) if hasattr(found[0], "CI_KEYS") else _needed(op, arch):
        lowered = compiler.lower(builder.build, key, arch, builder.pass_configs)
        compiled = compiler.compile_cuda(lowered.source, arch)
        usage = resources(compiled.log)
        rows.append(
            {
                "kernel": builder.name,
                "key": repr(key),
                "arch": arch,
                "registers": usage.registers,
                "spilled bytes": usage.spilled,
                "shared bytes": usage.static_shared + max(lowered.dynamic_shared.values(), default=0),
                **_widths(lowered.source, compiled.cubin, arch),
            }
        )
    return rows


def _listed(op: str, module: ModuleType, arch: str) -> list[tuple[Builder, Key]]:
    """The kernels that a module lists for CI, except those named after another operator."""
    others = set(module.KERNELS) - {op}
    return [
        (entry[0], plain_key(entry[1]))
        for entry in module.CI_KEYS
        # A variant may run the kernel that is named after its parent.
        if (entry[0].name not in others or op.startswith(entry[0].name)) and (len(entry) < 3 or arch in entry[2])
    ]


def _needed(op: str, arch: str) -> list[tuple[Builder, Key]]:
    """The kernels of the last benchmark point of an operator."""
    cases = cases_of(op)
    if cases is None or not cases.bench:
        return []
    recorder = CudaBackend("meta")
    arguments = cases.bench[-1].make(ShapeMaker(recorder.layout))

    def call() -> None:
        with registry.use_backend(recorder):
            public_function(op)(*arguments.args, **arguments.kwargs)

    return [(job.builder, job.key) for job in precompile.needed(call, [arch])]


def _widths(source: str, cubin: bytes, arch: str) -> dict[str, str]:
    """Global loads and stores in the code by bytes of one access, such as ``16x8 4x1``: from SASS, else from PTX."""
    tool = shutil.which("cuobjdump")
    with tempfile.TemporaryDirectory(prefix="tk-inspect-") as folder:
        if tool is not None:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(cubin)
            text = subprocess.run([tool, "-sass", str(path)], capture_output=True, text=True, check=True).stdout
            loads, stores = _count_sass(text)
        else:
            loads, stores = _count_ptx(_ptx(source, arch, Path(folder)))
    return {"loads": _shown(loads), "stores": _shown(stores), "read from": "PTX" if tool is None else "SASS"}


def _ptx(source: str, arch: str, folder: Path) -> str:
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    (folder / "kernel.cu").write_text(source)
    flags = [f for f in compiler.nvcc_flags(arch) if not f.startswith(("-cubin", "--cubin", "-gencode", "-arch"))]
    virtual = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch.replace('sm_', 'compute_')}"
    includes = [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
    command = [str(compiler.nvcc_path()), *flags, virtual, "-ptx", *includes, "-o", "kernel.ptx", "kernel.cu"]
    subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return (folder / "kernel.ptx").read_text()


def _count_ptx(text: str) -> tuple[Counter[int], Counter[int]]:
    counts: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for kind, lanes, bits in _PTX.findall(text):
        counts[kind][int(lanes or 1) * int(bits) // 8] += 1
    return counts["ld"], counts["st"]


def _count_sass(text: str) -> tuple[Counter[int], Counter[int]]:
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    counts: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter()}
    for match in _SASS.finditer(text):
        width = _SASS_WIDTH.search(match.group(0))
        counts[match.group(1)][sizes[width.group(1)] if width else 4] += 1
    return counts["LDG"], counts["STG"]


def _shown(counts: Counter[int]) -> str:
    return " ".join(f"{size}x{count}" for size, count in sorted(counts.items(), reverse=True)) or "none"
