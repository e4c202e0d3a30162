"""Work in several processes, each with its own compiler; a crash takes down one job, not the run."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Item = TypeVar("Item")
Progress = Callable[[int, int, Any, Any], None]
"""Called after each item with: done, total, the item, its result or exception."""


def default_workers() -> int:
    """Half of the cores that this process may use: each worker runs nvcc beside itself."""
    return max(1, min(16, len(os.sched_getaffinity(0)) // 2 or 1))


def run(
    function: Callable[[Item], Any], items: Sequence[Item], workers: int, progress: Progress | None = None
) -> list[Any]:
    """Results in the order of the items; an item that failed has its exception as its result."""
    results: dict[int, Any] = {}
    waiting = list(range(len(items)))

    def note(index: int, result: Any) -> None:
        results[index] = result
        if progress is not None:
            progress(len(results), len(items), items[index], result)

    while waiting:
        crashed = _round(function, items, waiting, workers, note)
        waiting = [index for index in waiting if index not in results]
        if crashed and workers == 1 and waiting:
            note(waiting.pop(0), RuntimeError("the compiler crashed and took its process down"))
        if crashed:
            workers = 1  # one at a time from here, to know which item it is
    return [results[index] for index in range(len(items))]


def _round(
    function: Callable[[Item], Any],
    items: Sequence[Item],
    waiting: list[int],
    workers: int,
    note: Callable[[int, Any], None],
) -> bool:
    """Run what waits; whether a worker process died, with items left over."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(workers, len(waiting)), mp_context=context) as pool:
        futures = {pool.submit(function, items[index]): index for index in waiting}
        for future in concurrent.futures.as_completed(futures):
            try:
                result = future.result()
            except BrokenProcessPool:
                return True
            except Exception as error:
                result = error
            note(futures[future], result)
    return False
