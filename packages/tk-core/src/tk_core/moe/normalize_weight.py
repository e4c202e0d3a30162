"""Weights of the selected experts divided by their sum: ``normalize_weight`` and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..formats import TensorSpec
from ..op import Operator
from ..repeat import repeatable


@repeatable
def normalize_weight(
    topk_weights: Tensor, out: tuple[Tensor | None, Tensor | None] | None = None
) -> tuple[Tensor, Tensor]:
    """Divide the weights of each token's experts by their sum.

    In fp32, each step rounded to nearest even, the sum taken in ascending ``k``::

        denominator[t] = ((w[t, 0] + w[t, 1]) + …) + 1e-20
        normalized[t, k] = w[t, k] / denominator[t]

    The 1e-20 only matters where the sum is below about 1e-13: a row of zeros gives zeros instead of NaN, and a row of
    tiny weights sums to less than 1. NaN and Inf propagate within their row.

    Args:
        topk_weights: ``(N, K)`` float32, ``N >= 0``, ``K >= 1``; ``stride(1) == 1``, any row stride.
        out: buffers for the results; None elements are allocated.

    Returns:
        ``(denominator, normalized)``: ``(N,)`` float32, and ``(N, K)`` float32, contiguous.

    Raises:
        InvalidArgumentError: a shape or stride outside the above; or ``topk_weights`` requires grad.
        InvalidDtypeError: ``topk_weights`` or a buffer is not float32.
        UnsupportedError: legal, but the backend of the device has no kernel for it; the message says why.

    Gradient: normalize_weight_backward; tk_core.layers.normalize_weight joins the two.
    Determinism: bitwise reproducible, and equal to the reference bit for bit.
    Cost: one pass; reads the weights, writes both results; bound by launch latency up to about 10^5 tokens.
    Source: normalized affinities of DeepSeek-V3, section 2.1.2.

    >>> normalize_weight(torch.tensor([[1.0, 3.0]]))
    (tensor([4.]), tensor([[0.2500, 0.7500]]))
    """
    if out is None:
        return NORMALIZE_WEIGHT(topk_weights)
    denominator, normalized = NORMALIZE_WEIGHT.into(out, topk_weights)
    return denominator, normalized


@repeatable
def normalize_weight_backward(
    grad: Tensor,
    denominator: Tensor,
    normalized: Tensor,
    grad_denominator: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient of ``normalize_weight`` with respect to the weights, from its results.

    In fp32, each product, sum and quotient rounded to nearest even, the sum taken in ascending ``k``::

        dot[t] = (g[t, 0] * n[t, 0] + g[t, 1] * n[t, 1]) + …
        grad_w[t, k] = (g[t, k] - dot[t]) / denominator[t]  (+ grad_denominator[t])

    Args:
        grad: ``g``, gradient of ``normalized``: ``(N, K)`` float32, ``N >= 0``, ``K >= 1``; ``stride(1) == 1``.
        denominator: ``(N,)`` float32, contiguous, of the forward pass.
        normalized: ``n``, ``(N, K)`` float32, ``stride(1) == 1``, of the forward pass.
        grad_denominator: gradient of ``denominator``, ``(N,)`` float32, contiguous; None where it is not used.
        out: buffer for the result; None allocates it.

    Returns:
        ``(N, K)`` float32, contiguous.

    Raises:
        InvalidArgumentError: a shape, stride or device outside the above.
        InvalidDtypeError: an argument is not float32.
        UnsupportedError: legal, but the backend of the device has no kernel for it; the message says why.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit.
    Cost: one pass; reads every argument once, writes the result; bound by launch latency up to about 10^5 tokens.
    Source: derivative of DeepSeek-V3, section 2.1.2.

    >>> denominator, normalized = normalize_weight(torch.tensor([[1.0, 3.0]]))
    >>> normalize_weight_backward(torch.tensor([[1.0, 0.0]]), denominator, normalized)
    tensor([[ 0.1875, -0.0625]])
    """
    if out is None:
        return NORMALIZE_WEIGHT_BACKWARD(grad, denominator, normalized, grad_denominator)
    return NORMALIZE_WEIGHT_BACKWARD.into((out,), grad, denominator, normalized, grad_denominator)[0]


def _check_rows(op: str, name: str, t: Tensor) -> None:
    checks.is_tensor(op, name, t)
    checks.dtype(op, name, t, (torch.float32,))
    checks.rank(op, name, t, "(N, K)")
    checks.last_stride_1(op, name, t)
    if t.shape[1] < 1:
        checks.invalid(op, name, "have at least 1 column", t.shape[1])


def _check_column(op: str, name: str, t: Tensor, grad: Tensor) -> None:
    checks.is_tensor(op, name, t)
    checks.dtype(op, name, t, (torch.float32,))
    checks.shape(op, name, t, (grad.shape[0],), "rows of grad")
    checks.contiguous(op, name, t)
    checks.same_device(op, name, t, grad.device, "grad")


def _check(topk_weights: Tensor) -> None:
    _check_rows("moe.normalize_weight", "topk_weights", topk_weights)


def _outputs(topk_weights: Tensor) -> tuple[TensorSpec, ...]:
    rows, columns = topk_weights.shape
    return TensorSpec((rows,), torch.float32), TensorSpec((rows, columns), torch.float32)


def _check_backward(grad: Tensor, denominator: Tensor, normalized: Tensor, grad_denominator: Tensor | None) -> None:
    op = "moe.normalize_weight_backward"
    _check_rows(op, "grad", grad)
    _check_rows(op, "normalized", normalized)
    checks.shape(op, "normalized", normalized, grad.shape, "shape of grad")
    checks.same_device(op, "normalized", normalized, grad.device, "grad")
    _check_column(op, "denominator", denominator, grad)
    if grad_denominator is not None:
        _check_column(op, "grad_denominator", grad_denominator, grad)


def _outputs_backward(
    grad: Tensor, denominator: Tensor, normalized: Tensor, grad_denominator: Tensor | None
) -> tuple[TensorSpec, ...]:
    return (TensorSpec(tuple(grad.shape), torch.float32),)


NORMALIZE_WEIGHT = Operator(
    "moe.normalize_weight",
    "(Tensor topk_weights) -> (Tensor, Tensor)",
    check=_check,
    outputs=_outputs,
    gradient="tk_core.layers.normalize_weight",
)
NORMALIZE_WEIGHT_BACKWARD = Operator(
    "moe.normalize_weight_backward",
    "(Tensor grad, Tensor denominator, Tensor normalized, Tensor? grad_denominator) -> Tensor",
    check=_check_backward,
    outputs=_outputs_backward,
)
