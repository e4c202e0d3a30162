"""Reference of swiglu_forward, alone and with casts."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import E4M3
from ..scales import quantize, store_scales
from ._swiglu import Gated, Rows, gated, rows_of, weighted

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def swiglu_forward(
    x: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    clamp_value: float | None,
    clamped_count: Tensor | None,
    token_alignment: int,
) -> Tensor:
    """SwiGLU, weighted. Rows that are not valid come out as zeros."""
    rows = rows_of(
        x,
        psum_num_tokens_per_expert,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        routed_scaling_factor,
        token_alignment,
    )
    return _forward(x, rows, clamp_value, clamped_count).to(_DTYPES[fmt])


def _forward(x: Tensor, rows: Rows, clamp_value: float | None, clamped_count: Tensor | None) -> Tensor:
    parts = gated(x, rows.valid, clamp_value)
    if clamped_count is not None and clamp_value is not None:
        _count(parts, rows.valid, clamp_value, clamped_count)
    return torch.where(rows.valid, weighted(parts.act, rows.weight), 0)


def _count(parts: Gated, valid: Tensor, clamp_value: float, clamped_count: Tensor) -> None:
    outside = (parts.l > clamp_value, parts.r > clamp_value, parts.r < -clamp_value)
    counts = [where.sum() for where in outside] + [valid.sum() * parts.l.shape[1]]
    clamped_count += torch.stack(counts)


def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_value: float | None,
    clamped_count: Tensor | None,
    token_alignment: int,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[Tensor, Tensor]:
    """SwiGLU, weighted, and quantized from fp32."""
    rows = rows_of(
        x,
        psum_num_tokens_per_expert,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        routed_scaling_factor,
        token_alignment,
    )
    v = _forward(x, rows, clamp_value, clamped_count)
    q, sf = quantize(v, E4M3.name, 1, num_per_channels, clamp_min, round_sf)
    return q, store_scales(sf, use_packed_ue8m0, ue8m0_per_word=ue8m0_per_word)


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool,
    without_transpose: bool,
    clamp_value: float | None,
    clamp_min: float,
) -> tuple[Tensor, Tensor]:
    """SwiGLU, rounded to bf16, quantized along the rows, transposed."""
    rows = rows_of(x, None, None, None, None, None, 1)
    u = _forward(x, rows, clamp_value, None).bfloat16()
    q, sf = quantize(u, E4M3.name, num_per_tokens, 1, clamp_min, round_sf)
    return (q if without_transpose else q.t().contiguous()), sf


REFERENCES = {
    "quant.swiglu_forward": swiglu_forward,
    "quant.swiglu_forward_and_per_token_cast": swiglu_forward_and_per_token_cast,
    "quant.swiglu_forward_and_per_channel_cast_and_transpose": swiglu_forward_and_per_channel_cast_and_transpose,
}
