"""Reference of norm_backward."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_backward(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None,
    weight_grad: Tensor | None,
    out_scale: float,
    accumulate: bool,
) -> Tensor:
    """Gradients of RMSNorm in float32, or in the float64 of ``x``. Both sums are taken in float64."""
    compute = rstd.dtype
    xhat = x.to(compute) * rstd[:, None]
    d = out_grad.to(compute) * out_scale
    g = d if weight is None else d * weight.to(compute)
    if weight_grad is not None:
        total = (xhat.double() * d.double()).sum(dim=0).to(compute)
        weight_grad.copy_(weight_grad.to(compute) + total if accumulate else total)
    dots = (xhat.double() * g.double()).sum(dim=1, keepdim=True)
    mean = (dots / torch.full_like(dots, x.shape[1])).to(compute)
    x_grad = (g - xhat * mean) * rstd[:, None]
    if residual_out_grad is not None:
        x_grad = x_grad + residual_out_grad.to(compute)
    return x_grad.to(x.dtype)


REFERENCES = {"quant.norm_backward": norm_backward}
