"""Clocks. Device time is what a call keeps the device busy; host time is what an enqueue costs the caller.

A call of a few microseconds is shorter than the gap between two launches, so device time is taken inside a CUDA graph
of many calls, over buffers that rotate past the L2 cache. Event pairs around single launches, with the L2 flushed,
give the cold time. On a CPU there is one clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

CALLS_IN_GRAPH = 20
REPLAYS = 25
COLD_LAUNCHES = 25
HOST_CALLS = 100
HOST_BATCHES = 7
CPU_SECONDS = 0.5


class Spread(NamedTuple):
    """Median, 10th and 90th percentile, in microseconds."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        """Summarize samples in microseconds."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Spread(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


Calls = Sequence[Callable[[], object]]
"""The same call over rotating buffers."""


class Clock(Protocol):
    """How a device is timed."""

    def device(self, calls: Calls) -> list[float]:
        """Microseconds that one call keeps the device busy, warm; several samples."""

    def cold(self, calls: Calls) -> list[float]:
        """Microseconds of single launches with the caches flushed."""

    def host(self, calls: Calls) -> list[float]:
        """Microseconds that an eager call takes on the host, enqueue only."""

    def copy_rate(self) -> float:
        """Bytes per second of a device copy, read and written counted."""

    def cache_bytes(self) -> int:
        """Size of the last-level cache that rotating buffers must exceed."""


class CudaClock:
    """CUDA events, graphs and flushes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush: torch.Tensor | None = None

    def device(self, calls: Calls) -> list[float]:
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            keep = [calls[i % len(calls)]() for i in range(CALLS_IN_GRAPH)]
        graph.replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
        torch.cuda.synchronize()
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        del keep
        return [start.elapsed_time(end) * 1e3 / CALLS_IN_GRAPH for start, end in events]

    def cold(self, calls: Calls) -> list[float]:
        if self._flush is None:
            self._flush = torch.empty(4 * self.cache_bytes(), dtype=torch.uint8, device=self._device)
        samples = []
        for i in range(COLD_LAUNCHES):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush.zero_()  # keeps the device busy while the host enqueues what follows
            self._flush.zero_()
            start.record()
            calls[i % len(calls)]()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) * 1e3)
        return samples

    def host(self, calls: Calls) -> list[float]:
        samples = []
        for _ in range(HOST_BATCHES):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(HOST_CALLS):
                calls[i % len(calls)]()
            samples.append((time.perf_counter() - start) * 1e6 / HOST_CALLS)
            torch.cuda.synchronize()
        return samples

    def copy_rate(self) -> float:
        size = 1 << 32
        source = torch.empty(size // 4, dtype=torch.int32, device=self._device).random_()
        target = torch.empty_like(source)
        rates = []
        for _ in range(COLD_LAUNCHES):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            rates.append(2 * size / (start.elapsed_time(end) * 1e-3))
        return statistics.median(rates)

    def cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).L2_cache_size)


class CpuClock:
    """One clock for a device that computes in the calling thread."""

    def device(self, calls: Calls) -> list[float]:
        calls[0]()
        samples: list[float] = []
        begin = time.perf_counter()
        while len(samples) < 3 or time.perf_counter() - begin < CPU_SECONDS:
            start = time.perf_counter()
            calls[len(samples) % len(calls)]()
            samples.append((time.perf_counter() - start) * 1e6)
        return samples

    cold = device
    host = device

    def copy_rate(self) -> float:
        source = torch.empty(1 << 28, dtype=torch.uint8)
        target = torch.empty_like(source)
        samples = self.device([lambda: target.copy_(source)])
        return 2 * source.numel() / (statistics.median(samples) * 1e-6)

    def cache_bytes(self) -> int:
        return 32 << 20


def clock_of(device: torch.device) -> Clock:
    """The clock of a device.

    Raises:
        NotImplementedError: no clock is written for this device type.
    """
    if device.type == "cuda":
        return CudaClock(device)
    if device.type == "cpu":
        return CpuClock()
    raise NotImplementedError(f"tk bench has no clock for device type {device.type!r}")
