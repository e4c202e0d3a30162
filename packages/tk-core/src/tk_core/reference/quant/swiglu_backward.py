"""Reference of swiglu_backward, alone and from a quantized input with a cast."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import E4M3
from ..arithmetic import fma
from ..scales import dequantize, quantize, store_scales
from ._swiglu import Rows, gated, rows_of, weighted

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def swiglu_backward(
    x: Tensor,
    act_x_grad: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    clamp_value: float | None,
    weight_grad: Tensor | None,
    act_out: Tensor | None,
    token_alignment: int,
) -> Tensor:
    """The gradient, rounded to the dtype of ``fmt``; the optional results are written."""
    rows = rows_of(
        x,
        psum_num_tokens_per_expert,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        routed_scaling_factor,
        token_alignment,
    )
    grad, dots = _backward(x, act_x_grad, rows, clamp_value, act_out)
    _store_weight_grad(weight_grad, dots, pos_to_token_topk, routed_scaling_factor)
    return grad.to(_DTYPES[fmt])


def _backward(
    x: Tensor, act_x_grad: Tensor, rows: Rows, clamp_value: float | None, act_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient ``(T, 2H)`` in the compute dtype, and the sum over ``g * act`` of each row in float64."""
    valid = rows.valid
    parts = gated(x, valid, clamp_value)
    g = torch.where(valid, act_x_grad.to(parts.act.dtype), 0)
    s = torch.ones_like(g) / parts.denominator
    q = weighted(g, rows.weight) * s
    d_gate = (q * parts.r_clamped) * fma(parts.l_clamped, 1 - s, 1.0)
    d_up = q * parts.l_clamped
    if clamp_value is not None:
        d_gate = torch.where(parts.l > clamp_value, 0, d_gate)
        d_up = torch.where((parts.r > clamp_value) | (parts.r < -clamp_value), 0, d_up)
    if act_out is not None:
        act_out.copy_(torch.where(valid, weighted(parts.act, rows.weight), 0))
    dots = torch.where(valid, g.double() * parts.act.double(), 0).sum(dim=1)
    return torch.where(valid, torch.cat([d_gate, d_up], dim=1), 0), dots


def _store_weight_grad(
    weight_grad: Tensor | None, dots: Tensor, pos_to_token_topk: Tensor | None, routed_scaling_factor: float | None
) -> None:
    if weight_grad is None:
        return
    values = dots.to(weight_grad.dtype)
    if routed_scaling_factor is not None:
        values = values * routed_scaling_factor
    if pos_to_token_topk is None:
        weight_grad.copy_(values)
        return
    flat = weight_grad.new_zeros(weight_grad.numel() + 1)
    index = pos_to_token_topk.long()
    known = (index >= 0) & (index < weight_grad.numel())
    flat[torch.where(known, index, weight_grad.numel())] = values
    weight_grad.copy_(flat[:-1].view_as(weight_grad))


def swiglu_backward_and_per_token_cast(
    x: Tensor,
    x_sf: Tensor,
    act_x_grad: Tensor,
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
    weight_grad: Tensor | None,
    act_out: Tensor | None,
    token_alignment: int,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient in bf16, and quantized from fp32; zeros, scales included, in rows that are not valid."""
    rows = rows_of(
        x,
        psum_num_tokens_per_expert,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        routed_scaling_factor,
        token_alignment,
    )
    values = dequantize(x, x_sf, 1, num_per_channels)
    grad, dots = _backward(values, act_x_grad, rows, clamp_value, act_out)
    _store_weight_grad(weight_grad, dots, pos_to_token_topk, routed_scaling_factor)
    q, sf = quantize(grad, E4M3.name, 1, num_per_channels, clamp_min, round_sf)
    sf = torch.where(rows.valid, sf, 0)
    return grad.bfloat16(), q, store_scales(sf, use_packed_ue8m0, ue8m0_per_word=ue8m0_per_word)


REFERENCES = {
    "quant.swiglu_backward": swiglu_backward,
    "quant.swiglu_backward_and_per_token_cast": swiglu_backward_and_per_token_cast,
}
