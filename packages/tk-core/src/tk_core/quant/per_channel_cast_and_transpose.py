"""Quantize each column in groups of rows, and transpose the codes."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..formats import TensorSpec, ceil_div
from ..op import Operator
from ..repeat import repeatable
from .amax_clamp import get_amax_clamp_for_quant
from .scales import QuantTensor, check_plain


@repeatable
def per_channel_cast_and_transpose(x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False) -> QuantTensor:
    """:func:`per_channel_cast` that writes the codes transposed; the scales are not transposed.

    Args:
        x: ``(M, K)`` bfloat16 or float32, ``stride(1) == 1``, any row stride.
        fmt: ``"e4m3"``.
        num_per_tokens: rows per scale, at least 1. Need not divide ``M``.
        round_sf: round scales up to powers of two.

    Returns:
        ``(q, sf)``. ``q``: ``(K, M)`` float8_e4m3fn; ``sf``: ``(ceil(M / num_per_tokens), K)`` float32; contiguous.

    Raises:
        InvalidArgumentError: a shape, stride or flag outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of ``x.device`` cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit. A group that holds a NaN or an Inf gets a
        NaN scale; its codes are unspecified.
    Cost: one pass; reads ``x``, writes ``q`` and ``sf``; bound by memory bandwidth.
    Source: DeepSeek-V3, section 3.3 (operands of weight gradients).

    >>> q, sf = per_channel_cast_and_transpose(torch.tensor([[448.0, 896.0], [1.0, 2.0]]), "e4m3", 2)
    >>> q.float().tolist(), sf.tolist()
    ([[448.0, 1.0], [448.0, 1.0]], [[1.0, 2.0]])
    """
    checks.one_of("quant.per_channel_cast_and_transpose", "fmt", fmt, ("e4m3",))
    clamp_min = get_amax_clamp_for_quant("e4m3", False)
    return QuantTensor(*PER_CHANNEL_CAST_AND_TRANSPOSE(x, num_per_tokens, round_sf, clamp_min))


def _check(x: Tensor, num_per_tokens: int, round_sf: bool, clamp_min: float) -> None:
    op = "quant.per_channel_cast_and_transpose"
    check_plain(op, x)
    checks.at_least(op, "num_per_tokens", num_per_tokens, 1)


def _outputs(x: Tensor, num_per_tokens: int, round_sf: bool, clamp_min: float) -> tuple[TensorSpec, ...]:
    rows, columns = x.shape
    return (
        TensorSpec((columns, rows), torch.float8_e4m3fn),
        TensorSpec((ceil_div(rows, num_per_tokens), columns), torch.float32),
    )


PER_CHANNEL_CAST_AND_TRANSPOSE = Operator(
    "quant.per_channel_cast_and_transpose",
    "(Tensor x, int num_per_tokens, bool round_sf, float clamp_min) -> (Tensor, Tensor)",
    check=_check,
    outputs=_outputs,
)
