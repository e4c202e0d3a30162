"""SwiGLU with gradients: ``swiglu`` and the module ``SwiGLU``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import checks
from ..quant.swiglu_backward import swiglu_backward
from ..quant.swiglu_forward import swiglu_forward
from ._backend import keep_backend, on_kept_backend

FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def swiglu(
    x: Tensor,
    topk_weights: Tensor | None = None,
    *,
    clamp_value: float | None = None,
    routed_scaling_factor: float | None = None,
    psum_num_tokens_per_expert: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    token_alignment: int | None = None,
) -> Tensor:
    """Apply SwiGLU, differentiably in ``x`` and ``topk_weights``.

    The forward pass is ``quant.swiglu_forward`` in the dtype of ``x``, the backward pass ``quant.swiglu_backward``,
    which computes from ``x`` again instead of saving the activation.

    Args:
        x: ``(..., 2H)`` bfloat16, float32 or float64 (the latter on the reference only), gate columns then up columns.
            Leading dimensions are flattened to rows ``T``.
        topk_weights: weights of rows, as for ``quant.swiglu_forward``, and so are all other arguments.

    Returns:
        ``(..., H)``, dtype of ``x``. Rows that are not valid are unspecified; their gradient is 0.

    Raises:
        InvalidArgumentError, InvalidDtypeError, UnsupportedError: as ``quant.swiglu_forward``.

    Gradient: of ``x`` and ``topk_weights``, once.
    Determinism: as ``quant.swiglu_forward`` and ``quant.swiglu_backward``.
    Cost: one kernel each way; ``x`` is kept for the backward pass.
    Source: Shazeer, GLU Variants Improve Transformer (2020).

    >>> x = torch.tensor([[0.0, 2.0]], requires_grad=True)
    >>> swiglu(x).sum().backward()
    >>> x.grad.tolist()
    [[1.0, 0.0]]
    """
    checks.is_tensor("layers.swiglu", "x", x)
    if x.dim() == 0:
        checks.invalid("layers.swiglu", "x", "have at least one dimension", "a scalar")
    rows = (psum_num_tokens_per_expert, pos_to_token_topk, pos_to_expert)
    out = _SwiGLU.apply(x.flatten(0, -2), topk_weights, *rows, clamp_value, routed_scaling_factor, token_alignment)
    return out.view(*x.shape[:-1], out.shape[-1])


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor | None,
        psum_num_tokens_per_expert: Tensor | None,
        pos_to_token_topk: Tensor | None,
        pos_to_expert: Tensor | None,
        clamp_value: float | None,
        routed_scaling_factor: float | None,
        token_alignment: int | None,
    ) -> Tensor:
        keep_backend(ctx)
        ctx.save_for_backward(x, topk_weights, psum_num_tokens_per_expert, pos_to_token_topk, pos_to_expert)
        ctx.options = (clamp_value, routed_scaling_factor, token_alignment)
        return swiglu_forward(
            x,
            FORMATS.get(x.dtype, "bf16"),
            psum_num_tokens_per_expert,
            topk_weights,
            routed_scaling_factor,
            clamp_value,
            pos_to_token_topk=pos_to_token_topk,
            pos_to_expert=pos_to_expert,
            token_alignment=token_alignment,
        )

    @staticmethod
    @once_differentiable
    @on_kept_backend
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, topk_weights, psum, pos_to_token_topk, pos_to_expert = ctx.saved_tensors
        clamp_value, routed_scaling_factor, token_alignment = ctx.options
        results = swiglu_backward(
            x,
            grad.contiguous(),
            FORMATS[x.dtype],
            psum,
            topk_weights,
            routed_scaling_factor,
            clamp_value,
            pos_to_token_topk=pos_to_token_topk,
            pos_to_expert=pos_to_expert,
            token_alignment=token_alignment,
        )
        weight_grad = results[1] if topk_weights is not None else None
        return (results[0], weight_grad, None, None, None, None, None, None)


class SwiGLU(torch.nn.Module):
    """SwiGLU as a module without parameters: ``(..., 2H)`` to ``(..., H)``.

    Args:
        clamp_value: bound of gate and up values, greater than 0; None means no clamp.
        routed_scaling_factor: multiplies ``topk_weights``.
    """

    def __init__(self, clamp_value: float | None = None, routed_scaling_factor: float | None = None) -> None:
        super().__init__()
        self.clamp_value = clamp_value
        self.routed_scaling_factor = routed_scaling_factor

    def forward(self, x: Tensor, topk_weights: Tensor | None = None, **rows: Any) -> Tensor:
        """Apply ``swiglu``; ``rows`` are its arguments that say which rows are valid."""
        factor = self.routed_scaling_factor if topk_weights is not None else None
        return swiglu(x, topk_weights, clamp_value=self.clamp_value, routed_scaling_factor=factor, **rows)

    def extra_repr(self) -> str:
        """The settings."""
        return f"clamp_value={self.clamp_value}, routed_scaling_factor={self.routed_scaling_factor}"
