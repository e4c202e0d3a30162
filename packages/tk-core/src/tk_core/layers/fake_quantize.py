"""Fake quantization with a straight-through gradient, for quantization-aware training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..quant.cast_back import per_token_cast_back
from ..quant.per_token_cast import per_token_cast
from ..quant.per_token_cast_and_cast_back import per_token_cast_and_cast_back


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: str, num_per_channels: int, round_sf: bool, use_e4m3_sf: bool) -> Tensor:
        if torch.compiler.is_compiling():  # PyTorch 2.11 loses the gradient of a Function that mutates its result
            rows = x.reshape(-1, x.shape[-1])
            quantized = per_token_cast(rows, fmt, num_per_channels, round_sf=round_sf, use_e4m3_sf=use_e4m3_sf)
            dtype = "bf16" if x.dtype == torch.bfloat16 else "fp32"
            return per_token_cast_back(quantized, dtype, num_per_channels).view(x.shape)
        y = x.clone(memory_format=torch.contiguous_format)
        rows = y.unsqueeze(0) if y.dim() == 1 else y.flatten(0, -2)
        per_token_cast_and_cast_back(rows, fmt, num_per_channels, round_sf, use_e4m3_sf)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        return grad, None, None, None, None


def fake_quantize(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False
) -> Tensor:
    """The values that ``x`` has after quantization, with the gradient of the identity.

    ``quant.cast_back(quant.per_token_cast(x))`` along the last dimension, in the dtype of ``x``; the gradient passes
    straight through, as if quantization changed nothing.

    Args:
        x: ``(..., K)`` bfloat16 or float32, at least one dimension, any strides; ``K`` even for e2m1.
        fmt: ``"e4m3"`` or ``"e2m1"``.
        num_per_channels: elements of the last dimension per scale, at least 1; the last group may be shorter.
        round_sf: round scales up to powers of two.
        use_e4m3_sf: round scales to e4m3; excludes ``round_sf``.

    Returns:
        A new contiguous tensor of the shape and dtype of ``x``.

    Raises:
        InvalidArgumentError: a shape or flag combination outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of ``x.device`` cannot run the call.

    Gradient: ``grad_x = grad``, unchanged.
    Determinism: bitwise reproducible, and equal to the reference bit for bit.
    Cost: a copy of ``x``, then one pass in place.
    Source: straight-through estimator of Bengio, Leonard and Courville (2013), arXiv 1308.3432.

    >>> x = torch.tensor([[448.0, 17.0]], requires_grad=True)
    >>> y = fake_quantize(x, "e4m3", 2)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([[448.0, 16.0]], [[1.0, 1.0]])
    """
    op = "layers.fake_quantize"
    checks.is_tensor(op, "x", x)
    if x.dim() == 0:
        checks.invalid(op, "x", "have at least one dimension", "a scalar")
    return _FakeQuantize.apply(x, fmt, num_per_channels, round_sf, use_e4m3_sf)  # type: ignore[no-untyped-call]
