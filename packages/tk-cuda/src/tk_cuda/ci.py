"""Lower every kernel and compile it with nvcc for every architecture, without a GPU: ``python -m tk_cuda.ci``.

A kernel module lists what to build::

    CI_KEYS = [(BUILDER, key), ...]          # one representative key for each variant of each builder
    LARGEST_KEYS = [(BUILDER, key), ...]     # the legal shapes that need most shared memory

An entry may have a third element: the architectures that the key is for. The full level compiles both lists for every
architecture. The quick level compiles the first of each builder's ``CI_KEYS`` for every architecture and the others
for sm_90a, and lowers ``LARGEST_KEYS`` for the architecture with the least shared memory. A module with a builder that
no entry names fails. Results are kept by hash: what did not change is not built again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import sys
import time
import traceback
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import tk_cuda

from . import cache, compiler, pool
from .jit import BUILDERS, Builder, Key, plain_key

SHARED_LIMIT = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}
"""Shared memory that a block may use, in KiB (CUDA C++ Programming Guide, "Technical Specifications")."""


ERROR_LINES = 30
"""Lines shown of a compiler's message; the source that follows it is long."""


class Task(NamedTuple):
    """One kernel to check."""

    builder: Builder
    key: Key
    arch: str
    compiled: bool


class Usage(NamedTuple):
    """Resources of the kernels behind one key: the largest of each. ``registers`` is -1 where only lowered."""

    registers: int
    spilled: int
    static_shared: int
    dynamic_shared: int


class Failure(Exception):
    """A kernel that does not build or does not fit, with the reason as text."""


def kernel_modules() -> list[str]:
    """Names of all modules below the families of tk_cuda."""
    families = [m.name for m in pkgutil.iter_modules(tk_cuda.__path__) if m.ispkg and m.name != "tile"]
    return [
        f"tk_cuda.{family}.{module.name}"
        for family in families
        for module in pkgutil.iter_modules([f"{path}/{family}" for path in tk_cuda.__path__])
    ]


def tasks_of(module: Any, archs: Sequence[str], full: bool) -> tuple[list[Task], list[str]]:
    """The kernels that a module lists, and what is wrong with its list."""
    tasks: dict[Task, None] = {}
    listed: set[str] = set()
    for name, compiled in (("CI_KEYS", True), ("LARGEST_KEYS", full)):
        for entry in getattr(module, name, ()):
            builder, key = entry[0], plain_key(entry[1])
            wanted = [arch for arch in archs if len(entry) < 3 or arch in entry[2]]
            if not compiled:
                wanted = sorted(wanted, key=SHARED_LIMIT.__getitem__)[:1]
            elif not full and builder.name in listed:
                wanted = ["sm_90a"] if "sm_90a" in wanted else wanted[:1]
            listed.add(builder.name)
            tasks.update((Task(builder, key, arch, compiled), None) for arch in wanted)
    lists = f"{module.__name__}.CI_KEYS"
    own = [b for b in BUILDERS.values() if b.build.__module__ == module.__name__ and not b.waits]
    problems = [f"{lists} names no key of builder {b.name}" for b in own if b.name not in listed]
    return list(tasks), problems


def usage_of(task: Task) -> Usage:
    """Build one kernel, or take the result from the cache, and check it against the architecture's limits.

    Raises:
        Failure: it does not build, or needs too much shared memory.
    """
    identity = {**task.builder.identity(task.key, task.arch), "checked": task.compiled}
    stem = cache.stem_of(identity)
    version = compiler.toolkit() or "none"
    found = cache.find(stem, identity, version, "ci")
    if found is not None:
        usage = Usage(**json.loads(found.payload))
    else:
        try:
            usage = _built(task)
        except Exception as error:
            lines = str(error).splitlines()[:ERROR_LINES]
            raise Failure("\n".join([type(error).__name__, *lines, _where(error)])) from None
        cache.store(stem, version, json.dumps(usage._asdict()).encode(), {"identity": identity}, "ci")
    limit = SHARED_LIMIT[task.arch] * 1024
    if usage.static_shared + usage.dynamic_shared > limit:
        raise Failure(
            f"needs {usage.dynamic_shared} bytes of dynamic and {usage.static_shared} of static shared memory; "
            f"{task.arch} has {limit} for a block"
        )
    return usage


def _built(task: Task) -> Usage:
    lowered = compiler.lower(task.builder.build, task.key, task.arch, task.builder.pass_configs)
    dynamic = max(lowered.dynamic_shared.values(), default=0)
    if not task.compiled:
        return Usage(-1, 0, 0, dynamic)
    log = compiler.compile_cuda(lowered.source, task.arch).log
    return resources(log)._replace(dynamic_shared=dynamic)


def resources(log: str) -> Usage:
    """What ``ptxas -v`` reported, the largest of each over the kernels of a file."""
    return Usage(
        registers=max(map(int, re.findall(r"Used (\d+) registers", log)), default=-1),
        spilled=max(map(int, re.findall(r"(\d+) bytes spill stores", log)), default=0),
        static_shared=max(map(int, re.findall(r"(\d+) bytes smem", log)), default=0),
        dynamic_shared=0,
    )


def _where(error: Exception) -> str:
    """The innermost frames that are ours, to find the line of the kernel."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "tk_cuda" in f.filename]
    return "".join(traceback.format_list(frames[-3:]))


def _collect(arguments: argparse.Namespace) -> tuple[list[Task], list[str]]:
    tasks: dict[Task, None] = {}
    problems: list[str] = []
    for name in kernel_modules():
        if arguments.only and not any(fnmatch(name.removeprefix("tk_cuda."), p) for p in arguments.only):
            continue
        try:
            module = importlib.import_module(name)
        except Exception as error:
            problems.append(f"{name} does not import: {type(error).__name__}: {error}")
            continue
        if "tilelang" in sys.modules:
            problems.append(f"importing {name} imports TileLang; import it inside the builders")
            del sys.modules["tilelang"]
        more, wrong = tasks_of(module, arguments.arch, arguments.full)
        tasks.update(dict.fromkeys(more))
        problems += wrong
    return list(tasks), problems


def _show(done: int, total: int, task: Task, result: Any) -> None:
    what = f"{task.builder.name} {task.key} {task.arch}"
    state = "FAILED" if isinstance(result, Exception) else "ok"
    print(f"[{done}/{total}] {state} {what}", flush=True)


def _table(tasks: list[Task], results: list[Any], archs: list[str]) -> str:
    """One line a key: registers, and shared memory in KiB, for each architecture."""
    rows: dict[tuple[str, Key, bool], dict[str, str]] = {}
    for task, result in zip(tasks, results):
        if isinstance(result, Exception):
            cell = "FAILED"
        else:
            shared = (result.static_shared + result.dynamic_shared) / 1024
            spilled = f" spills {result.spilled}" if result.spilled else ""
            cell = f"{result.registers if task.compiled else '-'}r {shared:.1f}K{spilled}"
        rows.setdefault((task.builder.name, task.key, task.compiled), {})[task.arch] = cell
    names = [f"{name} {key}{'' if compiled else ' (lowered)'}" for name, key, compiled in rows]
    width = max(map(len, names), default=0)
    lines = [" ".join([f"{'kernel':{width}}", *(f"{arch:>14}" for arch in archs)])]
    for name, row in zip(names, rows.values()):
        lines.append(" ".join([f"{name:{width}}", *(f"{row.get(arch, ''):>14}" for arch in archs)]))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tk_cuda.ci", description=__doc__.splitlines()[0])
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="one key for each variant, most for sm_90a only (default)")
    level.add_argument("--full", action="store_true", help="all keys, the largest shapes too, for every architecture")
    parser.add_argument("--arch", nargs="+", choices=compiler.ARCHITECTURES, default=list(compiler.ARCHITECTURES))
    parser.add_argument("--only", nargs="+", metavar="FAMILY.NAME", help="modules, with * and ?")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (all cores)")
    arguments = parser.parse_args(argv)
    if compiler.nvcc_path() is None:
        print("no nvcc found; install the CUDA toolkit, or tilelang[nvcc] from pip", file=sys.stderr)
        return 2
    started = time.monotonic()
    tasks, problems = _collect(arguments)
    results = pool.run(usage_of, tasks, arguments.jobs, _show)
    print(_table(tasks, results, arguments.arch))
    failures = list(problems)
    for task, result in zip(tasks, results):
        if isinstance(result, Exception):
            failures.append(f"{task.builder.name} {task.key} for {task.arch}: {result}")
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"nvcc {compiler.toolkit()}, {time.monotonic() - started:.0f} s")
    print(f"{len(tasks) + len(problems) - len(failures)} passed, {len(failures)} failed")
    return 1 if failures or not tasks else 0


if __name__ == "__main__":
    sys.exit(main())
