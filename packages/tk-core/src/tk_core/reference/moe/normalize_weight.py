"""References of moe.normalize_weight and its gradient."""

from __future__ import annotations

from torch import Tensor

from ._shared import ascending_sum


def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights over their sum in ascending k, plus 1e-20."""
    denominator = ascending_sum(topk_weights) + 1e-20
    return denominator, topk_weights / denominator[:, None]


def normalize_weight_backward(
    grad: Tensor, denominator: Tensor, normalized: Tensor, grad_denominator: Tensor | None
) -> Tensor:
    """``(g - sum(g n)) / d``, plus the gradient of ``d`` itself."""
    dot = ascending_sum(grad * normalized)
    grad_weights = (grad - dot[:, None]) / denominator[:, None]
    return grad_weights if grad_denominator is None else grad_weights + grad_denominator[:, None]


REFERENCES = {
    "moe.normalize_weight": normalize_weight,
    "moe.normalize_weight_backward": normalize_weight_backward,
}
