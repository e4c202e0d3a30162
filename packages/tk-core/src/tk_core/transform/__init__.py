"""Transformations of layout and position: rotary embedding, transposes."""

from __future__ import annotations

from .apply_rotary import apply_rotary
from .batched_transpose import batched_transpose
from .transpose import transpose

__all__ = ["apply_rotary", "batched_transpose", "transpose"]
