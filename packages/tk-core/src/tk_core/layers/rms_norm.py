"""RMSNorm with gradients and a residual: ``rms_norm`` and the module ``RMSNorm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import checks
from ..quant.norm_backward import norm_backward
from ..quant.norm_forward import norm_forward
from ._backend import keep_backend, on_kept_backend


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalize rows by their root mean square, differentiably, after adding a residual.

    The forward pass is ``quant.norm_forward``, the backward pass ``quant.norm_backward``.

    Args:
        x: ``(..., H)`` bfloat16, float32 or float64 (the latter on the reference only).
        weight: ``(H,)``; rounded to the dtype of ``x`` if it is of another. None means ones.
        eps: added to the mean square.
        residual: shape and dtype of ``x``.

    Returns:
        The normalized rows, shape and dtype of ``x``; with ``residual`` a pair of them and of ``x + residual``, the
        residual of the next layer.

    Raises:
        InvalidArgumentError, InvalidDtypeError, UnsupportedError: as ``quant.norm_forward``.

    Gradient: of ``x``, ``weight`` (in its dtype, summed in float32) and ``residual``, once.
    Determinism: as ``quant.norm_forward`` and ``quant.norm_backward``.
    Cost: one kernel each way; ``x + residual`` and one number per row are kept for the backward pass.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).

    >>> y, h = rms_norm(torch.tensor([[1.0, 4.0]]), eps=0.0, residual=torch.tensor([[2.0, 0.0]]))
    >>> h.tolist(), y.square().mean().round(decimals=4).item()
    ([[3.0, 4.0]], 1.0)
    """
    checks.is_tensor("layers.rms_norm", "x", x)
    if x.dim() == 0:
        checks.invalid("layers.rms_norm", "x", "have at least one dimension", "a scalar")
    flat = x.flatten(0, -2)
    if residual is None:
        return _RMSNorm.apply(flat, weight, None, eps)[0].view(x.shape)
    checks.is_tensor("layers.rms_norm", "residual", residual)
    if residual.shape != x.shape:
        checks.invalid("layers.rms_norm", "residual", f"have shape {tuple(x.shape)}", tuple(residual.shape))
    out, h = _RMSNorm.apply(flat, weight, residual.flatten(0, -2), eps)
    return out.view(x.shape), h.view(x.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        keep_backend(ctx)
        cast = None if weight is None else weight.to(x.dtype).contiguous()
        out, rstd, h = norm_forward(x, cast, eps, residual, with_rstd=True)
        ctx.save_for_backward(h, cast, rstd)
        ctx.weight_dtype = None if weight is None else weight.dtype
        ctx.with_residual = residual is not None
        ctx.set_materialize_grads(False)
        return (out, h) if residual is not None else (out,)

    @staticmethod
    @once_differentiable
    @on_kept_backend
    def backward(ctx: Any, out_grad: Tensor | None, h_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        h, weight, rstd = ctx.saved_tensors
        if out_grad is None:
            return h_grad, None, h_grad if ctx.with_residual else None, None
        total = None
        if weight is not None and ctx.weight_dtype != weight.dtype and ctx.weight_dtype == torch.float32:
            total = torch.zeros_like(weight, dtype=torch.float32)
        x_grad, weight_grad = norm_backward(
            out_grad.contiguous(),
            h,
            weight,
            rstd,
            None if h_grad is None else h_grad.contiguous(),
            weight_grad=total,
        )
        if weight_grad is not None:
            weight_grad = weight_grad.to(ctx.weight_dtype)
        return x_grad, weight_grad, x_grad if ctx.with_residual else None, None


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, with a learned weight and an optional residual.

    Args:
        hidden: size of the last dimension.
        eps: added to the mean square.
        device, dtype: of the weight, which starts as ones.
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-6,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Apply ``rms_norm``: the normalized rows, and with ``residual`` also ``x + residual``."""
        return rms_norm(x, self.weight, self.eps, residual)

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.hidden}, eps={self.eps}"
