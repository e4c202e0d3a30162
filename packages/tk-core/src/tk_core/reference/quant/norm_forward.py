"""Reference of norm_forward, alone and with a cast."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import E4M3
from ..scales import pack_exponents, quantize, store_scales


def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor | None,
    residual_out: Tensor | None,
    eps: float,
    out_scale: float,
) -> Tensor:
    """RMSNorm in float32, or in the float64 of ``x``. The sum of squares is taken in float64."""
    h = x if residual is None else x + residual
    if residual_out is not None:
        residual_out.copy_(h)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = h.to(compute)
    inverse = _rstd(wide, eps)
    if rstd is not None:
        rstd.copy_(inverse)
    normal = wide * inverse[..., None]
    if weight is None:
        return (normal * out_scale).to(x.dtype)
    return (normal * (weight.to(compute) * out_scale)).to(x.dtype)


def _rstd(h: Tensor, eps: float) -> Tensor:
    squares = h.double().square().sum(dim=-1)
    mean = squares / torch.full_like(squares, h.shape[-1])
    return (mean + torch.tensor(eps, dtype=h.dtype).double().item()).rsqrt().to(h.dtype)


def norm_forward_and_per_token_cast(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    out_bf16: Tensor | None,
    rstd: Tensor | None,
    residual_out: Tensor | None,
    mega_moe_buffer: Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    out_scale: float,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    mega_moe_block_m: int,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[Tensor, Tensor]:
    """RMSNorm, rounded to the dtype of ``x``, then quantized."""
    normal = norm_forward(x, weight, residual, rstd, residual_out, eps, out_scale)
    if out_bf16 is not None:
        out_bf16.copy_(normal)
    q, sf = quantize(normal.reshape(-1, x.shape[-1]), E4M3.name, 1, num_per_channels, clamp_min, round_sf)
    if mega_moe_buffer is not None:
        words = pack_exponents(sf.view(torch.int32) >> 23, ue8m0_per_word=4)
        mega_moe_buffer[:, mega_moe_rows(x.shape[0], mega_moe_block_m).to(x.device)] = words.t()
    scales = store_scales(sf, use_packed_ue8m0, ue8m0_per_word=ue8m0_per_word)
    return q.view(x.shape), scales.view(*x.shape[:-1], scales.shape[-1])


def mega_moe_rows(tokens: int, block_m: int) -> Tensor:
    """Row of each token in the scale buffer of the fused MoE kernel: padded blocks, transposed 4 x 32 in each 128."""
    t = torch.arange(tokens)
    i = t % block_m
    padded = -(-block_m // 128) * 128
    return t // block_m * padded + i // 128 * 128 + i % 32 * 4 + i % 128 // 32


REFERENCES = {
    "quant.norm_forward": norm_forward,
    "quant.norm_forward_and_per_token_cast": norm_forward_and_per_token_cast,
}
