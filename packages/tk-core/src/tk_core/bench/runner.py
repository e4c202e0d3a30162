"""Time benchmark points: every candidate is checked against the reference, then timed in turns."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import registry
from ..backend import Backend
from ..cases import Cases, Maker, Point, bytes_of, cases_of, tensors_in
from ..conformance.compare import mismatches
from ..conformance.engine import device_of, public_function
from .adapters import Adapter, adapter
from .timing import Clock, Spread, clock_of

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
    calls: list[Callable[[], Any]]
    checked: str
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
    written = [arguments.kwargs.get(i) if isinstance(i, str) else arguments.args[i] for i in cases.inplace]
    return [t.clone() for t in tensors_in(returned) + tensors_in(written)]


class Bench:
    """Times points on one backend.

    Args:
        backend: whose kernels ``tk`` stands for.
        others: names of further candidates (``tk_core.bench.adapters``).
    """

    def __init__(self, backend: Backend, others: Iterable[str] = ()) -> None:
        self.backend = backend
        self.device = device_of(backend)
        self.clock: Clock = clock_of(self.device)
        self.environment = environment(backend)
        self.copy_rate = self.clock.copy_rate()
        self.adapters: list[Adapter] = [adapter("tk")]
        self.missing: dict[str, str] = {}
        for name in others:
            candidate = adapter(name)
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
            candidates = [
                c for a in self.adapters if (c := self._candidate(a, op, cases, makers, expected)) is not None
            ]
            for turn in range(ROUNDS):
                for candidate in candidates if turn % 2 == 0 else reversed(candidates):
                    self._time(candidate)
        shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs]
        return [self._row(op, point, c, moved, shapes) for c in candidates]

    def _candidate(
        self, source: Adapter, op: str, cases: Cases, makers: list[Any], expected: list[Tensor]
    ) -> Candidate | None:
        calls = []
        for arguments in makers:
            call = source.bind(op, arguments, self.backend.layout, self.device)
            if call is None:
                return None
            calls.append(call)
        candidate = Candidate(source.NAME, source.version(), calls, "")
        try:
            returned = calls[0]()
        except Exception as error:  # a candidate that cannot run this point is a row with its reason
            candidate.error = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            return candidate
        got = tensors_in(returned)
        if cases.inplace:
            written = [makers[0].kwargs.get(i) if isinstance(i, str) else makers[0].args[i] for i in cases.inplace]
            got += tensors_in(written)
        wrong = mismatches(expected, got, cases.tolerance)
        candidate.checked = "equal" if not wrong else f"differs: {wrong[0]}"[:300]
        return candidate

    def _time(self, candidate: Candidate) -> None:
        if candidate.error is not None:
            return
        try:
            candidate.device += self.clock.device(candidate.calls)
            candidate.cold += self.clock.cold(candidate.calls)
            candidate.host += self.clock.host(candidate.calls)
        except Exception as error:  # e.g. a candidate that cannot be captured
            candidate.error = f"{type(error).__name__}: {error}".splitlines()[0][:300]
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
