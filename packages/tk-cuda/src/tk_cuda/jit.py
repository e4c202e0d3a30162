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
import importlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tk_core import config
from tk_core.backend import Refused

from . import cache, compiler, runtime

Launcher = Callable[..., None]
Key = tuple[Any, ...]

_TYPICAL_SMS = {"sm_80": 108, "sm_89": 142, "sm_90a": 132, "sm_100a": 148, "sm_120a": 188}
_lock = threading.RLock()
_archs: dict[torch.device, str] = {}
_sms: dict[torch.device, int] = {}


BUILDERS: dict[str, Builder] = {}
"""Every builder of the imported modules, by name."""


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


_launches: ContextVar[Callable[[Launcher, tuple[Any, ...]], None] | None] = ContextVar("tk_cuda_launches", default=None)


@contextlib.contextmanager
def noting(note: Callable[[Launcher, tuple[Any, ...]], None]) -> Iterator[None]:
    """Within the scope, ``note(launcher, arguments)`` is told of each launch before it happens."""
    token = _launches.set(note)
    try:
        yield
    finally:
        _launches.reset(token)


def _noted(launcher: Launcher, run: Launcher) -> Launcher:
    """``run``, which launches ``launcher`` once, told to whoever listens."""
    note = _launches.get()
    if note is None:
        return run

    def launch(*args: Any) -> None:
        note(launcher, args)
        run(*args)

    return launch


class Builder:
    """A TileLang function that is specialized by key.

    Args:
        name: names it in reports and cache entries, such as ``"quant.per_token_cast"``; unique.
        build: takes the elements of a key, and ``arch`` if it has such a parameter; returns a ``T.prim_func``. It
            imports TileLang itself.
        pass_configs: TileLang pass configs.
        waits: kernels wait for the kernel before them themselves (programmatic dependent launch). Every builder has one
            of that kind beside it, which serves calls while ``tk_core.config.set_pdl`` is on.
    """

    build: Callable[..., Any]

    def __init__(
        self,
        name: str,
        build: Callable[..., Any],
        pass_configs: dict[str, Any] | None = None,
        *,
        waits: bool = False,
    ) -> None:
        if getattr(build, "__closure__", None):
            raise TypeError(f"Builder {name!r}: build must be a function of a module, not one that captures variables")
        other = BUILDERS.get(name)
        if other is not None and other._origin() != (build.__code__.co_filename, build.__qualname__):
            raise TypeError(f"Builder {name!r}: {other.build.__qualname__} of {other.build.__module__} has that name")
        BUILDERS[name] = self
        self.name = name
        self.build = build
        self.pass_configs = dict(pass_configs or {})
        self.waits = waits
        self.waiting = None if waits else Builder(f"{name}.waits", build, pass_configs, waits=True)
        self._launchers: dict[tuple[torch.device, Key], Launcher] = {}
        self._absent: dict[tuple[torch.device, Key], str] = {}

    def __repr__(self) -> str:
        return f"Builder({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return builder_of, (self.build.__module__, self.name)

    def _origin(self) -> tuple[str, str]:
        return self.build.__code__.co_filename, self.build.__qualname__

    def get(self, key: Key, device: torch.device) -> Launcher | None:
        """The launcher of a key that this process has used on a device before, else None."""
        if self.waiting is not None and config.get_pdl():
            return self.waiting.get(key, device)
        launcher = self._launchers.get((device, key))
        return launcher if launcher is None else _noted(launcher, launcher)

    def compile(self, key: Key, device: torch.device) -> Launcher:
        """Load or compile the launcher of a key.

        Raises:
            Refused: no cache holds it and there is no compiler here.
            CompileError: it does not compile.
        """
        if self.waiting is not None and config.get_pdl():
            return self.waiting.compile(key, device)
        if device.type == "meta":
            found = _recorder()
            found.jobs[Job(self, plain_key(key), found.arch)] = None
            return _no_launch
        with _lock:
            launcher = self.get(key, device)
            if launcher is not None:
                return launcher
            if (device, key) in self._absent:
                raise Refused(self._absent[device, key])
            try:
                function = self.load(plain_key(key), arch_of(device))
            except Refused as refusal:
                self._absent[device, key] = str(refusal)
                raise
            if torch.cuda.device_count() > 1:
                function = _on_device(function, device)
            self._launchers[device, key] = function
            return _noted(function, _first_call(function))

    def identity(self, key: Key, arch: str) -> dict[str, Any]:
        """Everything that decides the machine code of a plain key, except the CUDA toolkit."""
        return {
            **cache.environment(),
            "builder": self.name,
            "function": self.build.__qualname__,
            "key": repr(key),
            "arch": arch,
            "source": self._source(),
            "pass_configs": repr(sorted((str(k), v) for k, v in self.pass_configs.items())),
            "flags": compiler.nvcc_flags(arch),
        }

    def _source(self) -> str:
        return cache.source_digest(Path(self.build.__code__.co_filename))

    def load(self, key: Key, arch: str) -> Launcher:
        """The raw function of a plain key for an architecture, from the disk cache or compiled.

        Raises:
            Refused: no cache holds it and there is no compiler here.
            CompileError: it does not compile.
        """
        identity = self.identity(key, arch)
        stem = cache.stem_of(identity)
        return self._cached(stem, identity) or self._made(stem, identity, key, arch)

    def build_entry(self, key: Key, arch: str) -> str:
        """Make sure that the disk cache holds a plain key; says ``"cached"`` or ``"compiled"``. Needs no GPU."""
        identity = self.identity(key, arch)
        stem = cache.stem_of(identity)
        with cache.locked(stem):
            if cache.find(stem, identity, compiler.toolkit()) is not None:
                return "cached"
            if self._store(stem, identity, key, arch)[0] is None:
                raise compiler.CompileError(f"the kernel cache {cache.own_folder()} cannot be written")
        return "compiled"

    def _cached(self, stem: str, identity: dict[str, Any]) -> Launcher | None:
        found = cache.find(stem, identity, compiler.toolkit())
        if found is None:
            return None
        try:
            return runtime.load_file(found.path, found.facts["entry"])
        except (OSError, RuntimeError, AttributeError) as error:
            cache.discard(found.path, found.path.parent == cache.own_folder(), f"it does not load: {error}")
            return None

    def _made(self, stem: str, identity: dict[str, Any], key: Key, arch: str) -> Launcher:
        if compiler.toolkit() is None:
            raise Refused(
                f"no compiled kernel of {self.name} for {arch} and key {key} is in the cache, and there is no nvcc to "
                "compile it; install the CUDA toolkit, tilelang[nvcc], or tk-cuda-cubins of this version"
            )
        with cache.locked(stem):
            launcher = self._cached(stem, identity)  # another process may have made it meanwhile
            if launcher is not None:
                return launcher
            path, library, entry = self._store(stem, identity, key, arch)
        return runtime.load_file(path, entry) if path is not None else runtime.load_bytes(library, entry)

    def _store(self, stem: str, identity: dict[str, Any], key: Key, arch: str) -> tuple[Path | None, bytes, str]:
        lowered = compiler.lower(
            self.build,
            key,
            arch,
            self.pass_configs,
            lambda source: compiler.compile_cuda(source, arch).cubin,
            waits=self.waits,
        )
        library = compiler.link(lowered)
        facts = {"identity": identity, "entry": lowered.entry}
        return cache.store(stem, str(compiler.toolkit()), library, facts), library, lowered.entry


def builder_of(module: str, name: str) -> Builder:
    """The builder of a name, after importing the module that makes it."""
    importlib.import_module(module)
    return BUILDERS[name]


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
