"""Backends: discovery through entry points, the handshake, selection, refusals and the fallback policy.

Discovery happens once, when tk_core is imported: each entry point of the group ``tk.backends`` is imported (light
modules: no compiler, no driver call) and checked. A backend that fails stays visible with its reason. Which kernel
serves an operator is decided at the first call of that operator on a device type.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from .backend import CONTRACT, Backend, Kernel, Launch, Layout, Refused, locate
from .errors import (
    AmbiguousBackendError,
    InvalidArgumentError,
    InvalidDtypeError,
    NoBackendError,
    UnsupportedError,
)
from .formats import whole_storage

if TYPE_CHECKING:
    from .op import Operator

ENTRY_POINTS = "tk.backends"
Fallback = Literal["error", "reference"]

_INSTALL = {"cuda": "pip install ./packages/tk-cuda", "npu": "pip install './packages/tk-ascend[npu]'"}
"""In a checkout: the packages are not on the public index."""


class Rejected(NamedTuple):
    """An entry point that could not become a backend."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Selection:
    """What ``use_backend`` chose for its scope: backends in order, and what to do when none can run a call."""

    backends: tuple[Backend, ...] | None
    fallback: Fallback


class ReferenceKernel:
    """A PyTorch reference seen as a kernel: it computes results, then copies them where the caller wants them."""

    def __init__(self, function: Callable[..., Any], revision: int) -> None:
        self.function = function
        self.revision = revision

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], *args: Any) -> None:
        with torch.inference_mode():  # so that inference tensors can be written anywhere, as kernels can
            results = self.function(*args)
            if isinstance(results, Tensor):
                results = (results,)
            for out, result in zip(outs, results or (), strict=True):
                if out.dim() >= 2 and out.stride(-2) == 1 and out.stride() != result.stride():
                    # A column-major result owns its padding, which holds zeros.
                    room = out.untyped_storage().nbytes() // out.element_size() - out.storage_offset()
                    columns = whole_storage(out)
                    if columns.numel() <= room:
                        columns.view(torch.uint8).zero_()
                out.copy_(result)


class ReferenceBackend:
    """The PyTorch references, on any device. They serve ``cpu`` unless another backend is asked for."""

    name = "reference"
    device_type = "cpu"
    contract = CONTRACT

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout if layout is not None else Layout()
        self.version = importlib.metadata.version("tk-core")

    def applies(self) -> bool:
        return True

    def unavailable(self) -> str | None:
        return None

    def kernel(self, op: str) -> Kernel | None:
        from .op import OPERATORS

        found = locate("tk_core.reference", op, "REFERENCES")
        return None if found is None else ReferenceKernel(found[1], OPERATORS[op].revision)


_lock = threading.RLock()
_found: dict[str, Backend] = {}
_installed: dict[str, Backend] = {}
_rejected: list[Rejected] = []
_defaults: dict[str, tuple[Backend, ...]] = {}
_default_fallback: Fallback = "error"
_selection: ContextVar[Selection | None] = ContextVar("tk_selection", default=None)
_selections: dict[tuple[Any, ...], Selection] = {}
_MOST_SELECTIONS = 256
_services: dict[tuple[str, str, Selection | None], Service] = {}
_fallbacks: Counter[tuple[str, str]] = Counter()
_calls: Counter[tuple[str, str]] = Counter()
_counting = False


def _handshake(backend: Any) -> str | None:
    """Why this object cannot be a backend of this core, or None."""
    missing = [
        a
        for a in ("name", "device_type", "contract", "layout", "version", "applies", "unavailable", "kernel")
        if not hasattr(backend, a)
    ]
    if missing:
        return f"it lacks {', '.join(missing)} (docs/backend-contract.md)"
    contract = tuple(backend.contract)
    if len(contract) != 2 or contract[0] != CONTRACT[0] or contract[1] > CONTRACT[1]:
        ours = ".".join(map(str, CONTRACT))
        return f"it speaks contract {'.'.join(map(str, contract))}, this tk-core {ours}; install versions that match"
    if not isinstance(backend.layout, Layout):
        return f"its layout must be a tk_core.backend.Layout, got {type(backend.layout).__name__}"
    return None


def _load(entry: importlib.metadata.EntryPoint) -> Backend | Rejected:
    try:
        backend = entry.load()
        reason = _handshake(backend)
        if reason is None and backend.name != entry.name:
            reason = f"its entry point is named {entry.name!r}, but the backend calls itself {backend.name!r}"
        if reason is None:
            _installed[backend.name] = backend
        if reason is None and not backend.applies():
            built = f"this build of torch ({torch.__version__})"
            return Rejected(entry.name, f"{built} does not support its devices ({backend.device_type})")
    except Exception as error:  # a broken wheel must not break the others; its reason is kept and shown
        return Rejected(entry.name, f"importing {entry.value} raised {type(error).__name__}: {error}")
    return backend if reason is None else Rejected(entry.name, reason)


def load() -> None:
    """Discover the installed backends. Called when tk_core is imported; calling it again starts afresh."""
    from .op import forget_plans

    with _lock:
        for table in (_found, _installed, _rejected, _defaults, _services):
            table.clear()
        wanted = [n.strip() for n in os.environ.get("TK_BACKENDS", "").split(",") if n.strip()]
        reference = ReferenceBackend()
        _found[reference.name] = reference
        entries = sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda e: e.name)
        for entry in entries:
            if wanted and entry.name not in wanted:
                _rejected.append(Rejected(entry.name, f"TK_BACKENDS={','.join(wanted)} leaves it out"))
                continue
            backend = _load(entry)
            if isinstance(backend, Rejected):
                _rejected.append(backend)
            elif backend.name in _found:
                _rejected.append(Rejected(entry.name, f"another installed backend is already named {backend.name!r}"))
            else:
                _found[backend.name] = backend
        for name in wanted:
            if name != "reference" and name not in {e.name for e in entries}:
                _rejected.append(Rejected(name, "TK_BACKENDS names it, but no installed package provides it"))
        order = wanted or list(_found)
        for device_type in sorted({b.device_type for b in _found.values()} - {"cpu"}):
            claims = tuple(_found[n] for n in order if n in _found and _found[n].device_type == device_type)
            _defaults[device_type] = claims[:1] if wanted else claims
        _defaults["cpu"] = (reference,)
        forget_plans()  # after the tables: a plan made of the old ones meanwhile goes too


def _claimants(device_type: str) -> tuple[Backend, ...]:
    """The backends to ask, in order, for a device type under the current selection."""
    selection = _selection.get()
    if selection is not None and selection.backends is not None:
        chosen = tuple(b for b in selection.backends if b.device_type == device_type or b.name == "reference")
        if chosen:
            return chosen
        names = ", ".join(f"{b.name} ({b.device_type})" for b in selection.backends)
        raise NoBackendError(f"the tensors are on {device_type!r}, but use_backend selected only {names}")
    claims = _defaults.get(device_type, ())
    if len(claims) > 1:
        names = " and ".join(b.name for b in claims)
        raise AmbiguousBackendError(
            f"{names} both serve device type {device_type!r}; choose with tk_core.use_backend({claims[0].name!r}) "
            f"or TK_BACKENDS={claims[0].name}"
        )
    if not claims:
        raise NoBackendError(_no_backend(device_type))
    return claims


def _no_backend(device_type: str) -> str:
    text = f"no backend serves device type {device_type!r}"
    if device_type in _INSTALL:
        text += f"; install one, in the checkout: {_INSTALL[device_type]}"
    return text + _failures() + '; or ask for the PyTorch reference: tk_core.use_backend("reference")'


def _failures() -> str:
    if not _rejected:
        return ""
    return " [found but not usable: " + "; ".join(f"{r.name}: {r.reason}" for r in _rejected) + "]"


def layout(device_type: str) -> Layout:
    """The layout of the backend that serves a device type; the default one where none does."""
    selection = _selection.get()
    if selection is not None and selection.backends is not None:
        for backend in selection.backends:
            if backend.device_type == device_type or backend.name == "reference":
                return backend.layout
    claims = _defaults.get(device_type)
    return claims[0].layout if claims else Layout()


# What torch.compiler.assume_constant_result does, without importing Dynamo: a compiled graph keeps the layout that it
# was traced with.
layout._dynamo_marked_constant = True  # type: ignore[attr-defined]


selection = _selection.get
"""What ``use_backend`` chose for the current scope, or None."""


def selects_meta() -> bool:
    """Whether a backend for meta tensors was chosen: one that records which kernels calls need."""
    selection = _selection.get()
    return selection is not None and any(b.device_type == "meta" for b in selection.backends or ())


def kernel_of(backend: Backend, operator: Operator) -> tuple[Kernel | None, str]:
    """A backend's kernel of an operator, or None with the reason: unavailable, missing, stale or broken."""
    reason = backend.unavailable()
    if reason is not None:
        return None, reason
    try:
        kernel = backend.kernel(operator.name)
    except Exception as error:  # one broken kernel file must not hide the others
        return None, f"broken: its kernel raised {type(error).__name__} when imported: {error}"
    if kernel is None:
        return None, "missing: it has no kernel for this operator"
    revision = getattr(kernel, "revision", None)
    if revision != operator.revision:
        return None, f"stale: its kernel implements revision {revision}, tk-core needs {operator.revision}"
    return kernel, ""


class Service:
    """An operator on a device type under a selection: the kernels that may serve it, in order.

    Args:
        operator: which one.
        device_type: where its tensors live.
    """

    def __init__(self, operator: Operator, device_type: str) -> None:
        selection = _selection.get()
        fallback = selection.fallback if selection is not None else _default_fallback
        self.operator = operator
        self.candidates: list[tuple[Backend, Kernel]] = []
        self.reasons: list[str] = []
        for backend in _claimants(device_type):
            kernel, reason = kernel_of(backend, operator)
            if kernel is None:
                self.reasons.append(f"{backend.name}: {reason}")
            else:
                self.candidates.append((backend, kernel))
        self.reference = kernel_of(_found["reference"], operator)[0] if fallback == "reference" else None

    def launch(self, outs: tuple[Tensor, ...], args: tuple[Any, ...]) -> None:
        """Run a call on the first kernel that can."""
        self._serve(outs, args, _run)

    def bind(self, outs: tuple[Tensor, ...], args: tuple[Any, ...]) -> tuple[Launch, str | None]:
        """Run a call like ``launch``.

        Returns:
            What runs further calls of the same signature, and the name of the backend that they count for; None where
            the function counts its calls itself.
        """
        bound: tuple[Launch, str | None] = (self.launch, None)

        def run(backend: Backend, kernel: Kernel, outs: tuple[Tensor, ...], args: tuple[Any, ...]) -> None:
            nonlocal bound
            bind = getattr(backend, "bind", None)
            if bind is None:
                kernel(outs, *args)
            else:
                launch = bind(kernel, outs, args)
                if launch is not None:
                    bound = (launch, backend.name)

        self._serve(outs, args, run)
        return bound

    def _serve(self, outs: tuple[Tensor, ...], args: tuple[Any, ...], run: Callable[..., None]) -> None:
        operator, refused = self.operator, self.reasons
        for backend, kernel in self.candidates:
            try:
                run(backend, kernel, outs, args)
            except Refused as refusal:
                refused = [*refused, f"{backend.name}: {refusal}"]
            else:
                count(operator, backend.name)
                return
        if self.reference is None:
            raise UnsupportedError(_unsupported(operator, args, refused))
        reason = "; ".join(refused)
        if (operator.name, reason) not in _fallbacks:
            warnings.warn(f"{operator.name} runs on the PyTorch reference: {reason}", RuntimeWarning, stacklevel=2)
        _fallbacks[operator.name, reason] += 1
        self.reference(outs, *args)
        count(operator, "reference")


def _run(backend: Backend, kernel: Kernel, outs: tuple[Tensor, ...], args: tuple[Any, ...]) -> None:
    kernel(outs, *args)


def service(operator: Operator, device_type: str) -> Service:
    """Who runs an operator on a device type under the current selection."""
    key = (operator.name, device_type, _selection.get())
    found = _services.get(key)
    if found is None:
        with _lock:
            found = _services[key] = Service(operator, device_type)
    return found


def count(operator: Operator, server: str) -> None:
    """Note that a backend ran a call, within ``count_calls``."""
    if _counting:
        _calls[operator.name, server] += 1


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{tuple(value.shape)} strides {tuple(value.stride())} on {value.device}"
    return repr(value)


def _unsupported(operator: Operator, args: tuple[Any, ...], reasons: list[str]) -> str:
    shown = ", ".join(f"{n}={_describe(v)}" for n, v in zip(operator.parameters, args))
    return (
        f"{operator.name}: no selected backend can run this call. {' | '.join(reasons)}. Arguments: {shown}."
        f"{_failures()} "
        'Ways out: change the arguments as the reason says, or use_backend("reference")'
    )


@contextlib.contextmanager
def use_backend(*backends: str | Backend, fallback: Fallback = "error") -> Iterator[None]:
    """Choose, for a scope, which backends serve calls, in order, and what happens when none can.

    Args:
        backends: names of installed backends (or Backend objects); the first that can run a call does. None given:
            keep the default choice and change only the fallback.
        fallback: ``"error"`` raises UnsupportedError; ``"reference"`` runs the PyTorch reference instead, warns once
            for each operator and reason, and counts every use in ``tk_core.backends.report()``.

    Raises:
        NoBackendError: a name is not installed, or was rejected; says why.
        InvalidDtypeError: neither a name nor a Backend object.
        InvalidArgumentError: another fallback.
    """
    for backend in backends:
        reason = None if isinstance(backend, str) else _handshake(backend)
        if reason is not None:
            raise InvalidDtypeError(
                f"use_backend: backends must be names or Backend objects, got {type(backend).__name__}: {reason}"
            )
    chosen = tuple(_by_name(b) if isinstance(b, str) else b for b in backends)
    if fallback not in ("error", "reference"):
        raise InvalidArgumentError(f"use_backend: fallback must be 'error' or 'reference', got {fallback!r}")
    token = _selection.set(_interned(chosen, fallback))
    try:
        yield
    finally:
        _selection.reset(token)


@contextlib.contextmanager
def selected(selection: Selection | None) -> Iterator[None]:
    """Choose what ``selection()`` returned elsewhere, for a scope."""
    token = _selection.set(selection)
    try:
        yield
    finally:
        _selection.reset(token)


def _interned(chosen: tuple[Backend, ...], fallback: Fallback) -> Selection:
    """One object for equal selections, so that it can be a key that costs nothing to hash."""
    key = (*map(id, chosen), fallback)
    found = _selections.get(key)
    if found is None:
        if len(_selections) >= _MOST_SELECTIONS:
            _selections.clear()
            _services.clear()
        found = _selections[key] = Selection(chosen or None, fallback)
    return found


def _by_name(name: str) -> Backend:
    if name in _found:
        return _found[name]
    for rejected in _rejected:
        if rejected.name == name:
            raise NoBackendError(f"backend {name!r} is installed but not usable: {rejected.reason}")
    raise NoBackendError(f"backend {name!r} is not installed; installed: {', '.join(_found)}")


@contextlib.contextmanager
def count_calls() -> Iterator[Counter[tuple[str, str]]]:
    """Count the calls of each (operator, backend) in a scope."""
    global _counting
    before = _counting
    _calls.clear()
    _counting = True
    try:
        yield _calls
    finally:
        _counting = before


def found() -> dict[str, Backend]:
    """The usable backends by name."""
    return dict(_found)


def installed(name: str) -> Backend:
    """A backend by name, also where it cannot run: to compile or inspect its kernels on another machine.

    Raises:
        NoBackendError: it is not installed, or broken.
    """
    return _installed.get(name) or _by_name(name)


def rejected() -> list[Rejected]:
    """The entry points that could not become backends, with the reason of each."""
    return list(_rejected)


def chosen(device_type: str) -> list[str]:
    """Names of the backends that serve a device type by default; more than one means that a choice is needed."""
    return [b.name for b in _defaults.get(device_type, ())]


def device_types() -> list[str]:
    """Device types that some usable backend serves by default."""
    return sorted(_defaults)


def report() -> dict[str, int]:
    """Uses of the reference by fallback in this process: ``{"operator: reason": count}``."""
    return {f"{op}: {reason}": count for (op, reason), count in _fallbacks.items()}
