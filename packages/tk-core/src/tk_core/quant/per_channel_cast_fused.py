"""Gather rows, requantize where they are quantized, and quantize each column in groups of rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import checks
from ..formats import E4M3, TensorSpec, ceil_div
from ..op import Operator
from ..registry import layout
from ..repeat import repeatable
from .amax_clamp import get_amax_clamp_for_quant
from .scales import QuantTensor, check_plain, check_quantized, split


@repeatable
def per_channel_cast_fused(
    x: Tensor | QuantTensor | tuple[Tensor, Tensor],
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Tensor | None = None,
) -> QuantTensor:
    """:func:`per_channel_cast` of rows gathered by an index.

    Output row ``m`` is row ``pos_to_token[m]`` of ``x``. A negative index stands for a row of zeros: it writes bytes
    0x00 and does not count for the scale. The last group of rows may be shorter and holds nothing else.

    Args:
        x: ``(T, K)`` bfloat16 or float32, ``stride(1) == 1``, any row stride. Or ``(data, sf)``, float8_e4m3fn with one
            scale for each row and group of ``num_per_channels`` columns, in any layout of docs/numerics.md, "Scale
            factors".
        fmt: ``"e4m3"``.
        num_per_tokens: output rows per scale, at least 1. Need not divide ``M``.
        round_sf: round scales up to powers of two.
        num_per_channels: columns per scale of a quantized ``x``; None for a plain one.
        pos_to_token: ``(M,)`` int32, contiguous, each less than ``T``; None for the rows as they are (``M = T``). An
            index past ``T - 1`` raises where values are looked at (CPU tensors, or ``TK_VALIDATE=1``), else it counts
            as negative.

    Returns:
        ``(q, sf)``. ``q``: ``(M, K)`` float8_e4m3fn; ``sf``: ``(ceil(M / num_per_tokens), K)`` float32; contiguous.

    Raises:
        InvalidArgumentError: a shape, stride, flag combination or index outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of the device cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit. A group that holds a NaN or an Inf gets a
        NaN scale; its codes are unspecified.
    Cost: one pass; reads the gathered rows and the index, writes ``q`` and ``sf``; bound by memory bandwidth.
    Source: DeepSeek-V3, section 3.3 (operands of weight gradients of experts).

    >>> x, rows = torch.tensor([[448.0], [896.0]]), torch.tensor([1, -1], dtype=torch.int32)
    >>> q, sf = per_channel_cast_fused(x, "e4m3", 2, pos_to_token=rows)
    >>> q.float().tolist(), sf.tolist()
    ([[448.0], [0.0]], [[2.0]])
    """
    op = "quant.per_channel_cast_fused"
    checks.one_of(op, "fmt", fmt, ("e4m3",))
    data, x_sf = split(op, x)
    if (x_sf is None) != (num_per_channels is None):
        checks.invalid(op, "num_per_channels", "be given exactly when x is quantized", num_per_channels)
    result = PER_CHANNEL_CAST_FUSED(
        data,
        x_sf,
        pos_to_token,
        num_per_tokens,
        0 if num_per_channels is None else num_per_channels,
        round_sf,
        get_amax_clamp_for_quant("e4m3", False),
        layout(data.device.type).ue8m0_per_word,
    )
    if pos_to_token is not None and checks.validates(pos_to_token) and pos_to_token.numel():
        last = int(pos_to_token.max())
        if last >= data.shape[0]:
            checks.invalid(op, "pos_to_token", f"be less than T = {data.shape[0]}", last)
    return QuantTensor(*result)


def _check(
    x: Tensor,
    x_sf: Tensor | None,
    pos_to_token: Tensor | None,
    num_per_tokens: int,
    num_per_channels: int,
    round_sf: bool,
    clamp_min: float,
    ue8m0_per_word: int,
) -> None:
    op = "quant.per_channel_cast_fused"
    checks.at_least(op, "num_per_tokens", num_per_tokens, 1)
    if x_sf is None:
        check_plain(op, x)
    else:
        checks.at_least(op, "num_per_channels", num_per_channels, 1)
        check_quantized(op, x, x_sf, 1, num_per_channels, ue8m0_per_word, formats=(E4M3,))
    if pos_to_token is not None:
        checks.dtype(op, "pos_to_token", pos_to_token, (torch.int32,))
        checks.rank(op, "pos_to_token", pos_to_token, "(M,)")
        checks.contiguous(op, "pos_to_token", pos_to_token)
        checks.same_device(op, "pos_to_token", pos_to_token, x.device)


def _outputs(
    x: Tensor,
    x_sf: Tensor | None,
    pos_to_token: Tensor | None,
    num_per_tokens: int,
    num_per_channels: int,
    round_sf: bool,
    clamp_min: float,
    ue8m0_per_word: int,
) -> tuple[TensorSpec, ...]:
    rows = x.shape[0] if pos_to_token is None else pos_to_token.shape[0]
    columns = x.shape[1]
    return (
        TensorSpec((rows, columns), torch.float8_e4m3fn),
        TensorSpec((ceil_div(rows, num_per_tokens), columns), torch.float32),
    )


def _no_rows(
    outs: tuple[Tensor, ...],
    x: Tensor,
    x_sf: Tensor | None,
    pos_to_token: Tensor | None,
    num_per_tokens: int,
    num_per_channels: int,
    round_sf: bool,
    clamp_min: float,
    ue8m0_per_word: int,
) -> bool:
    """With no row to gather from, every output row is zero and every scale is that of the clamp."""
    if x.shape[0]:
        return False
    smallest = float(torch.tensor(clamp_min, dtype=torch.float32)) / E4M3.qmax
    if round_sf and smallest:
        mantissa, exponent = math.frexp(smallest)
        smallest = math.ldexp(1.0, exponent - (mantissa == 0.5))
    outs[0].view(torch.uint8).zero_()
    outs[1].fill_(smallest)
    return True


PER_CHANNEL_CAST_FUSED = Operator(
    "quant.per_channel_cast_fused",
    "(Tensor x, Tensor? x_sf, Tensor? pos_to_token, int num_per_tokens, int num_per_channels, bool round_sf, "
    "float clamp_min, int ue8m0_per_word) -> (Tensor, Tensor)",
    check=_check,
    outputs=_outputs,
    empty=_no_rows,
)
