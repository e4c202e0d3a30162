"""cast_back_e5m6: the kernel of cast_back."""

from typing import Any

from .cast_back import CastBack

KERNELS: dict[str, Any] = {"quant.cast_back_e5m6": CastBack()}
