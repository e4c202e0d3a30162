"""Time benchmark points: every candidate is checked against the reference, then timed in turns."""

from __future__ import annotations

import datetime
import importlib.metadata
import pathlib
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import registry
from ..backend import Backend
from ..cases import Call, Cases, Maker, Point, bytes_of, cases_of, tensors_in
from ..conformance.compare import mismatches
from ..conformance.engine import device_of, public_function, specified
from .adapters import Adapter, adapter
from .timing import Clock, Spread, clock_of
from .worker import Worker, WorkerError

ROUNDS = 2
"""Each candidate is timed this often: once in the given order, once reversed."""
ROTATION = 2
"""Rotating buffers cover this many times the cache."""
MAX_SETS = 12


@dataclass
class Candidate:
    """One contender at one point: its bound calls over rotating buffers, and its samples."""

    name: str
    version: str
    measure: Callable[[str], list[float]]
    checked: str = ""
    device: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    error: str | None = None


def environment(backend: Backend) -> dict[str, Any]:
    """What a reader needs to know of the machine and the versions, years later."""
    device = device_of(backend)
    row: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "backend": backend.name,
        "backend_version": backend.version,
        "tk_core": importlib.metadata.version("tk-core"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        row |= {
            "device": properties.name,
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }
    try:
        row["tilelang"] = importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        row["tilelang"] = None
    return row


def points(ops: Iterable[str]) -> Iterator[tuple[str, Cases, Point]]:
    """The benchmark points of some operators."""
    for op in ops:
        cases = cases_of(op)
        for point in cases.bench if cases is not None else ():
            yield op, cases, point  # type: ignore[misc]


def _expected(op: str, cases: Cases, point: Point, backend: Backend) -> list[Tensor]:
    arguments = point.make(Maker(device_of(backend), backend.layout))
    with registry.use_backend(registry.ReferenceBackend(backend.layout)):
        returned = public_function(op)(*arguments.args, **arguments.kwargs)
    return specified(cases, arguments, tensors_in(returned) + cases.written(arguments))


def _verdict(cases: Cases, arguments: Call, expected: list[Tensor], got: list[Tensor]) -> str:
    got = _in_layout_of(expected, got)
    if [t.shape for t in got] == [t.shape for t in expected]:
        got = specified(cases, arguments, got)
    wrong = mismatches(expected, got, cases.tolerance)
    return f"differs: {wrong[0]}"[:300] if wrong else "equal"


def _in_layout_of(expected: list[Tensor], got: list[Tensor]) -> list[Tensor]:
    """Results with the strides of the reference's: candidates may lay out equal values in another way."""
    if len(expected) != len(got):
        return got
    return [
        torch.empty_strided(e.shape, e.stride(), dtype=g.dtype, device=g.device).copy_(g)
        if e.shape == g.shape and e.stride() != g.stride()
        else g
        for e, g in zip(expected, got)
    ]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


class Bench:
    """Times points on one backend.

    Args:
        backend: whose kernels ``tk`` stands for.
        others: names of further candidates (``tk_core.bench.adapters``); ``NAME@FOLDER`` runs one in a process of its
            own, with the library taken from a folder.
    """

    def __init__(self, backend: Backend, others: Iterable[str] = ()) -> None:
        self.backend = backend
        self.device = device_of(backend)
        self.clock: Clock = clock_of(self.device)
        self.environment = environment(backend)
        self.copy_rate = self.clock.copy_rate()
        self.adapters: list[Adapter] = [adapter("tk")]
        self.missing: dict[str, str] = {}
        self.workers: list[Worker] = []
        for other in others:
            name, _, site = other.partition("@")
            candidate = adapter(name)
            if site:
                self.workers.append(Worker(name, pathlib.Path(site), self.device))
                continue
            try:
                candidate.version()
            except ImportError as error:
                self.missing[name] = f"not installed here: {error}"
            else:
                self.adapters.append(candidate)

    def run(self, op: str, cases: Cases, point: Point) -> list[dict[str, Any]]:
        """Time one point with every candidate; one row each."""
        first = point.make(Maker(self.device, self.backend.layout))
        expected = _expected(op, cases, point, self.backend)
        inputs = tensors_in([*first.args, *first.kwargs.values()])
        touched = bytes_of([inputs]) + bytes_of([expected])
        sets = 1 if cases.inplace else max(1, min(MAX_SETS, -(-ROTATION * self.clock.cache_bytes() // max(touched, 1))))
        makers = [first, *(point.make(Maker(self.device, self.backend.layout, seed)) for seed in range(1, sets))]
        moved = cases.bytes_moved(first, expected) if cases.bytes_moved is not None else touched
        with registry.use_backend(self.backend):
            candidates = [c for a in self.adapters if (c := self._here(a, op, cases, makers, expected)) is not None]
            for worker in self.workers:
                candidate = self._there(worker, op, cases, point, first, sets, expected)
                candidates += [] if candidate is None else [candidate]
            for turn in range(ROUNDS):
                for candidate in candidates if turn % 2 == 0 else reversed(candidates):
                    self._time(candidate)
        shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs]
        return [self._row(op, point, c, moved, shapes) for c in candidates]

    def _here(
        self, source: Adapter, op: str, cases: Cases, makers: list[Call], expected: list[Tensor]
    ) -> Candidate | None:
        """A candidate of this process, checked at the first arguments; None where it has no such operator."""
        calls = []
        for arguments in makers:
            call = source.bind(op, arguments, self.backend.layout, self.device)
            if call is None:
                return None
            calls.append(call)
        candidate = Candidate(source.NAME, source.version(), lambda kind: getattr(self.clock, kind)(calls))
        try:
            got = tensors_in(calls[0]()) + cases.written(makers[0])
        except Exception as error:  # a candidate that cannot run this point is a row with its reason
            candidate.error = _first_line(error)
        else:
            candidate.checked = _verdict(cases, makers[0], expected, got)
        return candidate

    def _there(
        self, worker: Worker, op: str, cases: Cases, point: Point, first: Call, sets: int, expected: list[Tensor]
    ) -> Candidate | None:
        """A candidate in a process of its own."""
        try:
            candidate = Candidate(worker.NAME, worker.version(), worker.time)
            if not worker.prepare(op, point.name, sets, self.backend.layout):
                return None
        except WorkerError as error:
            return Candidate(worker.NAME, "", worker.time, error=str(error))
        try:
            candidate.checked = _verdict(cases, first, expected, [t.to(self.device) for t in worker.results()])
        except WorkerError as error:
            candidate.error = str(error)
        return candidate

    def _time(self, candidate: Candidate) -> None:
        if candidate.error is not None:
            return
        try:
            candidate.device += candidate.measure("device")
            candidate.cold += candidate.measure("cold")
            candidate.host += candidate.measure("host")
        except Exception as error:  # e.g. a candidate that cannot be captured
            candidate.error = _first_line(error)
            if self.device.type == "cuda":
                torch.cuda.synchronize()

    def _row(self, op: str, point: Point, c: Candidate, moved: int, shapes: list[str]) -> dict[str, Any]:
        row: dict[str, Any] = {
            **self.environment,
            "op": op,
            "point": point.name,
            "candidate": c.name,
            "candidate_version": c.version,
            "inputs": shapes,
            "bytes": moved,
            "copy_gbps": round(self.copy_rate / 1e9, 1),
            "against_reference": c.checked,
        }
        if c.error is not None:
            return row | {"error": c.error}
        device = Spread.of(c.device)
        return row | {
            "device_us": [round(v, 3) for v in device],
            "cold_us": [round(v, 3) for v in Spread.of(c.cold)],
            "host_us": [round(v, 3) for v in Spread.of(c.host)],
            "gbps": round(moved / device.median / 1e3, 1),
            "share_of_copy": round(moved / (device.median * 1e-6) / self.copy_rate, 4),
        }
