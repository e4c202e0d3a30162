"""tk: kernels for DeepSeek-style models on every accelerator.

Operators live in families (``tk_core.quant``, ``tk_core.moe``, …); each call runs on the backend that serves the
device of its tensors. ``tk info`` shows what is installed.
"""

from __future__ import annotations

from . import registry as backends
from .errors import (
    AmbiguousBackendError,
    InvalidArgumentError,
    InvalidDtypeError,
    NoBackendError,
    TkError,
    UnsupportedError,
)
from .registry import use_backend

backends.load()

from . import config, layers, moe, quant, rand, transform  # noqa: E402  (operators may be called as soon as they exist, so backends come first)

__all__ = [
    "AmbiguousBackendError",
    "InvalidArgumentError",
    "InvalidDtypeError",
    "NoBackendError",
    "TkError",
    "UnsupportedError",
    "backends",
    "config",
    "layers",
    "moe",
    "quant",
    "rand",
    "transform",
    "use_backend",
]
__version__ = "2.0.0.dev0"
