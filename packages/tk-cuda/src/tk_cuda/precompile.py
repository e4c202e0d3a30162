"""Fill the kernel cache ahead of time: which kernels calls need, and building them in parallel. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import pool
from .jit import Job, recording

Progress = Callable[[int, int, str, str], None]
"""Called after each kernel with: done, total, its name, and ``cached``, ``compiled`` or what went wrong."""


def needed(call: Callable[[], Any], archs: Iterable[str]) -> list[Job]:
    """The kernels that a call on meta tensors would launch, for some architectures."""
    jobs: dict[Job, None] = {}
    for arch in archs:
        with recording(arch) as found:
            call()
        jobs.update(found)
    return list(jobs)


def build(jobs: Sequence[Job], workers: int, progress: Progress) -> list[str]:
    """Build kernels into the cache, each in one of some processes; returns what went wrong."""
    problems: list[str] = []

    def note(done: int, total: int, job: Job, result: Any) -> None:
        name = f"{job.builder.name} {job.arch} {job.key}"
        if isinstance(result, Exception):
            problems.append(f"{name}: {type(result).__name__}: {str(result).splitlines()[0] if str(result) else ''}")
            progress(done, total, name, problems[-1])
        else:
            progress(done, total, name, result)

    pool.run(_build, list(jobs), workers, note)
    return problems


def _build(job: Job) -> str:
    return job.builder.build_entry(job.key, job.arch)
