"""Quantization: casts between bf16/fp32 and FP8, FP4 and E5M6 with every scale layout."""

from __future__ import annotations

from .amax_clamp import get_amax_clamp_for_quant, set_amax_clamp_for_quant
from .per_token_cast import per_token_cast, per_token_cast_with_precomputed_sf, per_token_cast_with_sf_only
from .per_token_cast_to_e5m6 import per_token_cast_to_e5m6
from .scales import QuantTensor

__all__ = [
    "QuantTensor",
    "get_amax_clamp_for_quant",
    "per_token_cast",
    "per_token_cast_to_e5m6",
    "per_token_cast_with_precomputed_sf",
    "per_token_cast_with_sf_only",
    "set_amax_clamp_for_quant",
]
