"""Expert weights divided by their sum, with gradients: ``normalize_weight``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..moe import normalize_weight as forward_pass
from ..moe import normalize_weight_backward as backward_pass
from ._backend import keep_backend, on_kept_backend


def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Divide the weights of each token's experts by their sum, differentiably.

    The forward pass is ``moe.normalize_weight``, the backward pass ``moe.normalize_weight_backward``.

    Args:
        topk_weights: ``(N, K)`` float32; ``stride(1) == 1``, any row stride.

    Returns:
        ``(denominator, normalized)``: ``(N,)`` float32, and ``(N, K)`` float32, contiguous.

    Raises:
        InvalidArgumentError, InvalidDtypeError, UnsupportedError: as ``moe.normalize_weight``.

    Gradient: of ``topk_weights``, through both results, once.
    Determinism: as ``moe.normalize_weight``.
    Cost: one kernel each way; both results are kept for the backward pass.
    Source: normalized affinities of DeepSeek-V3, section 2.1.2.

    >>> weights = torch.tensor([[1.0, 3.0]], requires_grad=True)
    >>> normalize_weight(weights)[1][0, 0].backward()
    >>> weights.grad
    tensor([[ 0.1875, -0.0625]])
    """
    return _NormalizeWeight.apply(topk_weights)


class _NormalizeWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        keep_backend(ctx)
        denominator, normalized = forward_pass(topk_weights)
        ctx.save_for_backward(denominator, normalized)
        ctx.set_materialize_grads(False)
        return denominator, normalized

    @staticmethod
    @once_differentiable
    @on_kept_backend
    def backward(ctx: Any, grad_denominator: Tensor | None, grad: Tensor | None) -> Tensor | None:
        denominator, normalized = ctx.saved_tensors
        if grad is None and grad_denominator is None:
            return None
        grad = torch.zeros_like(normalized) if grad is None else grad.contiguous()
        extra = None if grad_denominator is None else grad_denominator.contiguous()
        return backward_pass(grad, denominator, normalized, extra)
