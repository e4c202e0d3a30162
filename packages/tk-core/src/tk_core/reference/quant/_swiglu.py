"""SwiGLU itself, and which rows are real and what weights they have: shared by forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Which rows are valid, ``(T, 1)``, and the effective weight of each, ``(T, 1)`` or None."""

    valid: Tensor
    weight: Tensor | None


class Gated(NamedTuple):
    """The parts of SwiGLU, each ``(T, H)``; ``l`` and ``r`` before the clamp."""

    l: Tensor
    r: Tensor
    l_clamped: Tensor
    r_clamped: Tensor
    denominator: Tensor
    act: Tensor


def rows_of(
    x: Tensor,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    token_alignment: int,
) -> Rows:
    """Find the valid rows of ``(T, 2H)``, and their weights."""
    if psum_num_tokens_per_expert is not None:
        valid = rows_of_psum(x.shape[0], psum_num_tokens_per_expert, token_alignment)
    elif pos_to_expert is not None:
        valid = pos_to_expert >= 0
    else:
        valid = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    weight = topk_weights
    if topk_weights is not None and pos_to_token_topk is not None:
        weight = _gathered(topk_weights, pos_to_token_topk)
    if weight is not None:
        if routed_scaling_factor is not None:
            weight = weight * routed_scaling_factor
        weight = weight[:, None]
    return Rows(valid[:, None], weight)


def rows_of_psum(rows: int, psum: Tensor, token_alignment: int) -> Tensor:
    """``(T,)``: whether a row lies in ``start[e] <= row < psum[e]`` of some expert."""
    ends = psum.long()
    starts = torch.cat([ends.new_zeros(1), -(-ends[:-1] // token_alignment) * token_alignment])
    ends = torch.maximum(starts, ends)
    steps = torch.zeros(rows + 1, dtype=torch.int64, device=psum.device)
    steps.index_add_(0, starts.clamp(0, rows), torch.ones_like(starts))
    steps.index_add_(0, ends.clamp(0, rows), -torch.ones_like(starts))
    return steps.cumsum(0)[:rows] > 0


def _gathered(topk_weights: Tensor, pos_to_token_topk: Tensor) -> Tensor:
    """The weight that each row refers to; 0 where it refers to none."""
    flat = torch.cat([topk_weights.flatten(), topk_weights.new_zeros(1)])
    index = pos_to_token_topk.long()
    known = (index >= 0) & (index < topk_weights.numel())
    return flat[torch.where(known, index, topk_weights.numel())]


def gated(x: Tensor, valid: Tensor, clamp_value: float | None) -> Gated:
    """SwiGLU of ``(T, 2H)`` in float32, or in the float64 of ``x``; rows that are not valid count as zeros."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    halves = torch.where(valid, x.to(compute), 0).chunk(2, dim=1)
    l, r = (half.contiguous() for half in halves)
    l_clamped, r_clamped = l, r
    if clamp_value is not None:
        l_clamped, r_clamped = l.clamp(max=clamp_value), r.clamp(-clamp_value, clamp_value)
    denominator = exp(-l_clamped) + 1
    return Gated(l, r, l_clamped, r_clamped, denominator, (l_clamped / denominator) * r_clamped)


def exp(x: Tensor) -> Tensor:
    """The exponential to compare with: CUDA's own ``expf``, which kernels there share; elsewhere correctly rounded."""
    return torch.exp(x) if x.device.type == "cuda" else torch.exp(x.double()).to(x.dtype)


def weighted(act: Tensor, weight: Tensor | None) -> Tensor:
    """The activation times the weight of its row."""
    return act if weight is None else act * weight
