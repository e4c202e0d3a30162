"""Quantization: casts between bf16/fp32 and FP8, FP4 and E5M6 with every scale layout."""

from __future__ import annotations

from .amax_clamp import get_amax_clamp_for_quant, set_amax_clamp_for_quant
from .batched_transpose_weight_sf import batched_transpose_weight_sf
from .cast import cast
from .cast_back import cast_back, per_token_cast_back
from .cast_back_e5m6 import cast_back_e5m6
from .norm_backward import norm_backward
from .norm_forward import norm_forward, norm_forward_and_per_token_cast
from .per_block_cast import per_block_cast, per_block_cast_with_precomputed_sf, per_block_cast_with_sf_only
from .per_block_cast_lossless import per_block_cast_lossless
from .per_channel_cast import per_channel_cast
from .per_channel_cast_and_transpose import per_channel_cast_and_transpose
from .per_channel_cast_fused import per_channel_cast_fused
from .per_token_cast import per_token_cast, per_token_cast_with_precomputed_sf, per_token_cast_with_sf_only
from .per_token_cast_and_cast_back import per_token_cast_and_cast_back
from .per_token_cast_to_e5m6 import per_token_cast_to_e5m6
from .scales import QuantTensor
from .swiglu_backward import swiglu_backward, swiglu_backward_and_per_token_cast
from .swiglu_forward import (
    swiglu_forward,
    swiglu_forward_and_per_channel_cast_and_transpose,
    swiglu_forward_and_per_token_cast,
)
from .unpack_from_e2m1fn_x2 import unpack_from_e2m1fn_x2

__all__ = [
    "QuantTensor",
    "batched_transpose_weight_sf",
    "cast",
    "cast_back",
    "cast_back_e5m6",
    "get_amax_clamp_for_quant",
    "norm_backward",
    "norm_forward",
    "norm_forward_and_per_token_cast",
    "per_block_cast",
    "per_block_cast_lossless",
    "per_block_cast_with_precomputed_sf",
    "per_block_cast_with_sf_only",
    "per_channel_cast",
    "per_channel_cast_and_transpose",
    "per_channel_cast_fused",
    "per_token_cast",
    "per_token_cast_and_cast_back",
    "per_token_cast_back",
    "per_token_cast_to_e5m6",
    "per_token_cast_with_precomputed_sf",
    "per_token_cast_with_sf_only",
    "set_amax_clamp_for_quant",
    "swiglu_backward",
    "swiglu_backward_and_per_token_cast",
    "swiglu_forward",
    "swiglu_forward_and_per_channel_cast_and_transpose",
    "swiglu_forward_and_per_token_cast",
    "unpack_from_e2m1fn_x2",
]
