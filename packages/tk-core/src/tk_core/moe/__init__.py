"""Mixture-of-experts routing."""

from __future__ import annotations

from .normalize_weight import normalize_weight, normalize_weight_backward
from .topk_gate import topk_gate

__all__ = ["normalize_weight", "normalize_weight_backward", "topk_gate"]
