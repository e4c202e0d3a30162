"""Load a built kernel: tvm_ffi and the TVM runtime library of TileLang's wheel, without importing TileLang."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_loaded: list[Any] = []


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver library."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _tvm() -> Any:
    """tvm_ffi, with the TVM runtime in the process, which knows how to load and launch CUDA modules."""
    spec = importlib.util.find_spec("tilelang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("tilelang is not installed; tk-cuda needs the runtime library of its wheel")
    import tvm_ffi

    library = Path(spec.submodule_search_locations[0]) / "lib" / "libtvm_runtime.so"
    _loaded.append(ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL))
    return tvm_ffi


def load_file(path: str | Path, entry: str) -> Callable[..., None]:
    """The launcher named ``entry`` of a built library, as a raw FFI function."""
    module = _tvm().load_module(os.fspath(path))
    # A function does not keep its library mapped.
    _loaded.append(module)
    return module.get_function(entry, query_imports=True)


def load_bytes(library: bytes, entry: str) -> Callable[..., None]:
    """Like ``load_file``, for a library that is not on disk."""
    with tempfile.TemporaryDirectory(prefix="tk-load-") as folder:
        path = Path(folder) / "kernel.so"
        path.write_bytes(library)
        return load_file(path, entry)
