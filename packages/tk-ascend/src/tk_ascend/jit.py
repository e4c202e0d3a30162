"""TileLang functions by key: on CPU tensors they run in the emulator, on NPU tensors on the device.

A kernel module keeps one :class:`Builder` for each TileLang function and calls it with a key and the arguments::

    _CAST = Builder("quant.per_token_cast", _build)
    _CAST((x.dtype, x.shape[1], …), x, q, sf)

Nothing here imports TileLang when it is imported, nor when the lowered source is in the cache.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from . import emulator
from .cache import digest
from .emulator.launch import Options
from .lowering import Lowered, lower

Key = tuple[Any, ...]

EMULATED_CORES = 4
"""Vector cores that persistent kernels see in the emulator: few, so that each of them loops."""

_options: ContextVar[Options | None] = ContextVar("tk_ascend_emulation", default=None)


@contextlib.contextmanager
def emulation(**options: Any) -> Iterator[None]:
    """Choose how the emulator runs kernels in a scope; the keywords of ``emulator.run`` (mode, seed, …)."""
    token = _options.set(Options(**options))
    try:
        yield
    finally:
        _options.reset(token)


_trace: ContextVar[list[tuple[Lowered, tuple[Any, ...]]] | None] = ContextVar("tk_ascend_trace", default=None)


@contextlib.contextmanager
def traced() -> Iterator[list[tuple[Lowered, tuple[Any, ...]]]]:
    """Collect the lowered functions that run in a scope, with their arguments."""
    launches: list[tuple[Lowered, tuple[Any, ...]]] = []
    token = _trace.set(launches)
    try:
        yield launches
    finally:
        _trace.reset(token)


def vector_cores(device: torch.device) -> int:
    """Vector cores of a device, for the grids of persistent kernels. Results must not depend on it."""
    if device.type == "cpu":
        return EMULATED_CORES
    return int(torch.get_device_module(device).get_device_properties(device).vector_core_num)


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


class Builder:
    """A TileLang function that is specialized by key.

    Args:
        name: names it in reports, such as ``"quant.per_token_cast"``; unique.
        build: takes the elements of a key (dtypes as names such as ``"bfloat16"``), returns a ``T.prim_func`` of
            TileLang's Ascend dialect. It imports TileLang itself.
    """

    def __init__(self, name: str, build: Callable[..., Any]) -> None:
        self.name = name
        self.build = build
        self._lowered: dict[Key, Lowered] = {}
        self._compiled: dict[Key, Callable[..., None]] = {}

    def __repr__(self) -> str:
        return f"Builder({self.name!r})"

    def __call__(self, key: Key, *arguments: Any) -> None:
        """Run the kernel of a key in place."""
        device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
        if device.type == "cpu":
            launches = _trace.get()
            if launches is not None:
                launches.append((self.lowered(key), arguments))
            options = _options.get() or Options()
            emulator.run(
                self.lowered(key),
                *arguments,
                mode=options.mode,
                seed=options.seed,
                check_vector_order=options.check_vector_order,
            )
        else:
            self.compiled(key)(*arguments)

    def lowered(self, key: Key) -> Lowered:
        """AscendC source of a key, from memory, the disk cache, or TileLang."""
        found = self._lowered.get(key)
        if found is None:
            plain = tuple(_plain(v) for v in key)
            identity = digest(self.name, repr(plain), *_sources(self.build))
            found = self._lowered[key] = lower(lambda: self.build(*plain), identity)
        return found

    def compiled(self, key: Key) -> Callable[..., None]:
        """The kernel of a key on an NPU: compiled by TileLang with CANN's compiler, kept in TileLang's own cache."""
        found = self._compiled.get(key)
        if found is None:
            import tilelang

            function = self.build(*(_plain(v) for v in key))
            # Each product and sum is rounded by itself, as in the references and the emulator.
            found = tilelang.compile(function, target="ascend", compile_flags=["-ffp-contract=off"])
            self._compiled[key] = found
        return found


def _sources(build: Callable[..., Any]) -> list[str]:
    """The text that decides what a builder makes: its own module, and those that modules share."""
    own = Path(inspect.getfile(sys.modules[build.__module__]))
    shared = [*own.parent.glob("_*.py"), *(Path(__file__).parent / "tile").glob("*.py")]
    return [path.read_text() for path in dict.fromkeys([own, *sorted(shared)])]
