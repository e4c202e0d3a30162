"""What is asserted of one operator on one backend, sample by sample."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .. import config, registry
from .. import op as operators
from ..backend import Backend
from ..cases import LEVELS, Call, Cases, ErrorSample, Level, Maker, Sample, cases_of, tensors_in
from ..errors import UnsupportedError
from .compare import bits, mismatches
from .guard import guarded

Status = Literal["passed", "refused", "failed"]


@dataclass
class Outcome:
    """The verdict on one sample: passed, refused with the backend's sentence, or failed with all that was wrong."""

    op: str
    sample: str
    status: Status
    problems: list[str] = field(default_factory=list)
    refusal: str = ""


def public_function(op: str) -> Callable[..., Any]:
    """The function that users call, ``tk_core.FAMILY.NAME``."""
    family, _, name = op.partition(".")
    return getattr(importlib.import_module(f"tk_core.{family}"), name)


def device_of(backend: Backend) -> torch.device:
    """Where the inputs of a backend's samples live."""
    return torch.device(backend.device_type)


def samples_of(cases: Cases, level: Level) -> list[Sample]:
    """The samples up to a level."""
    return [s for s in cases.samples if LEVELS.index(s.level) <= LEVELS.index(level)]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _results(cases: Cases, arguments: Call, returned: Any) -> list[Tensor]:
    """Everything that a call computes: what it returned, then what it wrote in place."""
    return specified(cases, arguments, tensors_in(returned) + cases.written(arguments))


def specified(cases: Cases, arguments: Call, results: list[Tensor]) -> list[Tensor]:
    """The results of a call without what is unspecified in them, which becomes zero in copies."""
    if cases.unspecified is not None:
        results = [r.clone() if r.is_contiguous() else _clone_strided(r) for r in results]
        cases.unspecified(arguments, results)
    return results


def _clone_strided(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def _memory(values: list[Any]) -> list[Tensor]:
    """The bytes behind some arguments, each once, whatever strides their tensors have."""
    storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors_in(values))}
    return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages.values() if s.nbytes()]


class Check:
    """One sample of one operator on one backend.

    Args:
        op: the operator's name.
        sample: its input.
        backend: who runs it.
        deep: also check torch.compile, opcheck, and on GPUs streams, capture and synchronization: seconds each.
    """

    def __init__(self, op: str, sample: Sample, backend: Backend, deep: bool = False) -> None:
        self.op, self.sample, self.backend, self.deep = op, sample, backend, deep
        cases = cases_of(op)
        if cases is None:
            raise KeyError(f"operator {op} has no cases")
        self.cases = cases
        self.function = public_function(op)
        self.device = device_of(backend)
        self.problems: list[str] = []

    def arguments(self) -> Call:
        """Fresh arguments, the same values each time."""
        return self.sample.make(Maker(self.device, self.backend.layout))

    def run(self) -> Outcome:
        """Run every assertion; never raises for a fault of the backend."""
        try:
            refusal = self._run()
        except Exception as error:  # any fault of a backend is a verdict, not a crash of the suite
            self.problems.append(f"raised {type(error).__name__}: {error}")
            refusal = ""
        if self.problems:
            return Outcome(self.op, self.sample.why, "failed", self.problems)
        return Outcome(self.op, self.sample.why, "refused" if refusal else "passed", [], refusal)

    def _run(self) -> str:
        expected_arguments = self.arguments()
        with registry.use_backend(registry.ReferenceBackend(self.backend.layout)):
            returned = self.function(*expected_arguments.args, **expected_arguments.kwargs)
        expected = _results(self.cases, expected_arguments, returned)
        with registry.use_backend(self.backend):
            try:
                actual = self._poisoned(0xFF, short_cut=True)
            except UnsupportedError as refused:
                return self._checked_refusal(str(refused))
            self.problems += mismatches(expected, actual, self.cases.tolerance)
            if self.sample.level == "large":  # each further copy of the results is gigabytes
                del expected_arguments, returned, expected, actual
                if self.device.type != "cpu":
                    torch.get_device_module(self.device).empty_cache()
                return ""
            again = self._poisoned(0x5A, short_cut=True)
            self.problems += [f"a second run differs: {p}" for p in mismatches(actual, again, _EXACT)]
            through_op = self._poisoned(0xFF, short_cut=False)
            self.problems += [f"through torch.ops: {p}" for p in mismatches(actual, through_op, _EXACT)]
            if self.device.type != "cpu":
                self.problems += [f"repeated: {p}" for p in mismatches(actual, self._repeated(), _EXACT)]
            if self.deep and not self.problems:
                self._compiled(actual)
                self._opcheck(actual)
                if self.device.type == "cuda":
                    self._on_side_stream(actual)
                    self._captured(actual)
                    self._with_pdl(actual)
        return ""

    def _poisoned(self, poison: int, short_cut: bool) -> list[Tensor]:
        """Results of one call between guard bands; inputs must come out unchanged."""
        arguments = self.arguments()
        inputs = self._read_only(arguments)
        before = [t.clone() for t in inputs]
        with guarded(poison) as guards, operators.short_cut(short_cut):
            returned = self.function(*arguments.args, **arguments.kwargs)
        _synchronize(self.device)
        overrun = guards.overrun()
        if overrun is not None:
            self.problems.append(overrun)
        for i, (a, b) in enumerate(zip(before, inputs)):
            if a.numel() and not torch.equal(bits(a), bits(b)):
                self.problems.append(f"input tensor {i} was modified")
        if any(t.requires_grad for t in tensors_in(returned)):
            self.problems.append("a result requires grad")
        return _results(self.cases, arguments, returned)

    def _repeated(self) -> list[Tensor]:
        """Results of a call that repeats earlier ones, for other tensors than theirs."""
        earlier = [self.arguments() for _ in range(3)]  # the second makes the plan, the third what skips the function
        for arguments in earlier:
            self.function(*arguments.args, **arguments.kwargs)
        arguments = self.arguments()
        for memory in _memory([v for a in earlier for v in (*a.args, *a.kwargs.values())]):
            memory.zero_()
        returned = self.function(*arguments.args, **arguments.kwargs)
        _synchronize(self.device)
        return _results(self.cases, arguments, returned)

    def _read_only(self, arguments: Call) -> list[Tensor]:
        skip = set(self.cases.inplace) | {"out", "out_sf"}
        values = [v for i, v in enumerate(arguments.args) if i not in skip]
        values += [v for name, v in arguments.kwargs.items() if name not in skip]
        return tensors_in(values)

    def _checked_refusal(self, message: str) -> str:
        """A refusal is a claim: it must name the backend's reason, and nothing may have been written."""
        arguments = self.arguments()
        with guarded(0xFF) as guards, contextlib.suppress(UnsupportedError):
            self.function(*arguments.args, **arguments.kwargs)
        if not guards.untouched():
            self.problems.append("refused the call after writing results")
        prefix = f"{self.backend.name}: "
        for part in message.split(" | "):
            if prefix in part:
                return part[part.index(prefix) + len(prefix) :].split(". Arguments: ")[0]
        self.problems.append(f"refused without its own reason: {message}")
        return message

    def _compiled(self, expected: list[Tensor]) -> None:
        nodes: list[int] = []

        def count(graph: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
            calls = [n for n in graph.graph.nodes if n.op == "call_function"]
            nodes.append(sum("tk_" in str(n.target) for n in calls))
            from torch._dynamo.backends.debugging import aot_eager

            return aot_eager(graph, example)

        arguments = self.arguments()
        torch._dynamo.reset()
        compiled = torch.compile(self.function, fullgraph=True, dynamic=True, backend=count)
        returned = compiled(*arguments.args, **arguments.kwargs)
        found = mismatches(expected, _results(self.cases, arguments, returned), _EXACT)
        self.problems += [f"under torch.compile: {p}" for p in found]
        if set(nodes) != {1}:  # a scalar that becomes an input makes Dynamo trace the same graph again
            self.problems.append(f"torch.compile(fullgraph=True) made graphs with {nodes} operator calls, expected [1]")

    def _opcheck(self, expected: list[Tensor]) -> None:
        recorded: list[tuple[Any, tuple[Any, ...]]] = []
        arguments = self.arguments()
        with _record_op_calls(recorded), operators.short_cut(False):
            self.function(*arguments.args, **arguments.kwargs)
        for overload, args in recorded:
            if tensors_in(args):
                torch.library.opcheck(overload, args, test_utils=_utilities(args, expected))

    def _on_side_stream(self, expected: list[Tensor]) -> None:
        """Behind a slow producer on another stream, without a host synchronization once compiled."""
        stream = torch.cuda.Stream()
        fresh = self.arguments()
        source = _memory([*fresh.args, *fresh.kwargs.values()])
        saved = [t.clone() for t in source]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for t in source:
                t.zero_()
            torch.cuda._sleep(20_000_000)
            for t, s in zip(source, saved):
                t.copy_(s)
            torch.cuda.set_sync_debug_mode("error")
            try:
                returned = self.function(*fresh.args, **fresh.kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        found = mismatches(expected, _results(self.cases, fresh, returned), _EXACT)
        self.problems += [f"on a side stream: {p}" for p in found]

    def _with_pdl(self, expected: list[Tensor]) -> None:
        """Launched programmatically, right behind the kernels that write the inputs."""
        before = config.get_pdl()
        config.set_pdl(True)
        try:
            fresh = self.arguments()
            returned = self.function(*fresh.args, **fresh.kwargs)
        finally:
            config.set_pdl(before)
        torch.cuda.synchronize()
        found = mismatches(expected, _results(self.cases, fresh, returned), _EXACT)
        self.problems += [f"with programmatic dependent launch: {p}" for p in found]

    def _captured(self, expected: list[Tensor]) -> None:
        """Captured on other values, replayed on these."""
        fresh = self.arguments()
        source = _memory([*fresh.args, *fresh.kwargs.values()])
        saved = [t.clone() for t in source]
        for t in source:
            t.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = self.function(*fresh.args, **fresh.kwargs)
        for t, s in zip(source, saved):
            t.copy_(s)
        graph.replay()
        torch.cuda.synchronize()
        found = mismatches(expected, _results(self.cases, fresh, returned), _EXACT)
        self.problems += [f"replayed from a CUDA graph: {p}" for p in found]


_EXACT = Cases(samples=()).tolerance


def _utilities(args: tuple[Any, ...], results: list[Tensor]) -> tuple[str, ...]:
    """What opcheck asks: its schema check does arithmetic, which 8-bit floats lack; its trace compares NaN by ==."""
    asked = ["test_autograd_registration", "test_faketensor"]
    if not any(t.is_floating_point() and t.element_size() == 1 for t in tensors_in(args)):
        asked.append("test_schema")
    if not any(
        t.is_floating_point() and bool((t.float() if t.element_size() < 4 else t).isnan().any()) for t in results
    ):
        asked.append("test_aot_dispatch_dynamic")
    return tuple(asked)


@contextlib.contextmanager
def _record_op_calls(into: list[tuple[Any, tuple[Any, ...]]]) -> Iterator[None]:
    """Record the overload and arguments of every tk operator that runs in a scope."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func.namespace).startswith("tk_") and func._overloadname == "default":
                copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
                into.append((func, tuple(copies)))
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield


def check_error(op: str, sample: ErrorSample, backend: Backend) -> Outcome:
    """A call outside the domain raises the declared error, with both call paths, before anything is written."""
    function = public_function(op)
    problems: list[str] = []
    for short_cut in (True, False):
        arguments = sample.make(Maker(device_of(backend), backend.layout))
        before = [t.clone() for t in tensors_in([*arguments.args, *arguments.kwargs.values()])]
        path = "" if short_cut else " through torch.ops"
        with registry.use_backend(backend), guarded(0xFF) as guards, operators.short_cut(short_cut):
            try:
                function(*arguments.args, **arguments.kwargs)
            except sample.error as error:
                if sample.match not in str(error):
                    problems.append(f"the message{path} lacks {sample.match!r}: {error}")
            except Exception as error:  # the wrong error is the finding
                problems.append(f"raised{path} {type(error).__name__} instead of {sample.error.__name__}: {error}")
            else:
                problems.append(f"raised nothing{path}, expected {sample.error.__name__}")
        if not guards.untouched():
            problems.append(f"wrote results{path} before raising")
        after = tensors_in([*arguments.args, *arguments.kwargs.values()])
        if any(a.numel() and not torch.equal(bits(a), bits(b)) for a, b in zip(before, after)):
            problems.append(f"modified its arguments{path} before raising")
    return Outcome(op, f"error: {sample.why}", "failed" if problems else "passed", problems)


def plan(op: str, level: Level, backend: Backend) -> list[Callable[[], Outcome]]:
    """Everything to run for one operator; the first samples of a level are checked in depth."""
    cases = cases_of(op)
    if cases is None:
        return [lambda: Outcome(op, "cases", "failed", ["the operator has no cases"])]
    samples = samples_of(cases, level)
    deep = 2 if level == "quick" else len(samples)
    jobs: list[Callable[[], Outcome]] = []
    for i, sample in enumerate(samples):
        in_depth = i < deep and sample.level != "large"
        jobs.append(Check(op, sample, backend, in_depth).run)
    jobs += [lambda e=e: check_error(op, e, backend) for e in cases.errors]  # type: ignore[misc]
    return jobs
