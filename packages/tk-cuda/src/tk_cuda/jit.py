"""Compiled kernels by key: memory, then the disk cache, then TileLang and nvcc.

A kernel module keeps one :class:`Builder` for each TileLang function and asks it for the launcher of a key::

    launch = _CAST.get(key, x.device)
    if launch is None:
        launch = _CAST.compile(key, x.device)
    launch(x, out, ...)

A launcher is the raw TVM-FFI function: it launches on PyTorch's current stream, can be captured in a CUDA graph, and
checks dtype, shape, strides and device of its tensors itself. No module here imports TileLang when it is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from tk_core.backend import Refused

from . import compiler, runtime

Launcher = Callable[..., None]
Key = tuple[Any, ...]

_TYPICAL_SMS = {"sm_80": 108, "sm_89": 142, "sm_90a": 132, "sm_100a": 148, "sm_120a": 188}
_lock = threading.RLock()
_archs: dict[torch.device, str] = {}
_sms: dict[torch.device, int] = {}


class Job(NamedTuple):
    """One kernel to build: a key of a builder for an architecture."""

    builder: Builder
    key: Key
    arch: str


class _Recording(NamedTuple):
    arch: str
    jobs: dict[Job, None]


_recording: ContextVar[_Recording | None] = ContextVar("tk_cuda_recording", default=None)


@contextlib.contextmanager
def recording(arch: str) -> Iterator[dict[Job, None]]:
    """Within the scope, calls on ``meta`` tensors collect the kernels that they need instead of running."""
    jobs: dict[Job, None] = {}
    token = _recording.set(_Recording(arch, jobs))
    try:
        yield jobs
    finally:
        _recording.reset(token)


def arch_name(major: int, minor: int) -> str:
    """``sm_90a`` for (9, 0): the name with the features of exactly that architecture where there are any."""
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def arch_of(device: torch.device) -> str:
    """The architecture of a device, such as ``sm_90a``."""
    arch = _archs.get(device)
    if arch is None:
        if device.type == "meta":
            return _recorder().arch
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise Refused(f"needs compute capability 8.0 or newer, {device} has {major}.{minor}")
        arch = _archs[device] = arch_name(major, minor)
    return arch


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device, for grid sizes. Results must not depend on it."""
    count = _sms.get(device)
    if count is None:
        if device.type == "meta":
            return _TYPICAL_SMS.get(_recorder().arch, 132)
        count = _sms[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _recorder() -> _Recording:
    found = _recording.get()
    if found is None:
        raise Refused("meta tensors hold no data; only tk_cuda.jit.recording runs kernels on them")
    return found


class Builder:
    """A TileLang function that is specialized by key.

    Args:
        name: names it in reports and cache entries, such as ``"quant.per_token_cast"``; unique.
        build: takes the elements of a key, and ``arch`` if it has such a parameter; returns a ``T.prim_func``. It
            imports TileLang itself.
        pass_configs: TileLang pass configs.
    """

    def __init__(self, name: str, build: Callable[..., Any], pass_configs: dict[str, Any] | None = None) -> None:
        self.name = name
        self.build = build
        self.pass_configs = dict(pass_configs or {})
        self._launchers: dict[tuple[torch.device, Key], Launcher] = {}

    def __repr__(self) -> str:
        return f"Builder({self.name!r})"

    def get(self, key: Key, device: torch.device) -> Launcher | None:
        """The launcher of a key that this process has used on a device before, else None."""
        return self._launchers.get((device, key))

    def compile(self, key: Key, device: torch.device) -> Launcher:
        """Load or compile the launcher of a key.

        Raises:
            Refused: no cache holds it and there is no compiler here.
            CompileError: it does not compile.
        """
        if device.type == "meta":
            found = _recorder()
            found.jobs[Job(self, plain_key(key), found.arch)] = None
            return _no_launch
        with _lock:
            launcher = self._launchers.get((device, key))
            if launcher is not None:
                return launcher
            function = self.load(plain_key(key), arch_of(device))
            if torch.cuda.device_count() > 1:
                function = _on_device(function, device)
            self._launchers[device, key] = function
            return _first_call(function)

    def load(self, key: Key, arch: str) -> Launcher:
        """The raw function of a plain key for an architecture."""
        lowered = compiler.lower(
            self.build, key, arch, self.pass_configs, lambda source: compiler.compile_cuda(source, arch)[0]
        )
        return runtime.load_bytes(compiler.link(lowered), lowered.entry)


def plain_key(key: Key) -> Key:
    """A key with dtypes as TileLang's names; only values whose ``repr`` is the same everywhere are allowed."""
    return tuple(_plain(value) for value in key)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return plain_key(value)
    raise TypeError(
        f"a kernel key holds {value!r}; only bool, int, float, str, None, torch.dtype and tuples are allowed"
    )


def _no_launch(*args: Any) -> None:
    """Stands for a launcher while kernels are only recorded."""


def _on_device(function: Launcher, device: torch.device) -> Launcher:
    """Launch on a device and leave the current one as it was: the host code selects the device of its tensors."""
    index = device.index
    current = torch._C._cuda_getDevice

    def launch(*args: Any) -> None:
        if current() == index:
            function(*args)
        else:
            with torch.cuda.device(index):
                function(*args)

    return launch


def _first_call(function: Launcher) -> Launcher:
    """The first launch loads the cubin, which a stream capture in its default mode would forbid."""

    def launch(*args: Any) -> None:
        with _relaxed_capture():
            function(*args)

    return launch


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    driver = runtime.driver()
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
