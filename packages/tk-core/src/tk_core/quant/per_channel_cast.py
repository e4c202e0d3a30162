"""Quantize each column of a matrix in groups of consecutive rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..formats import E4M3, TensorSpec, ceil_div, scale_spec
from ..op import Operator
from ..registry import layout
from ..repeat import repeatable
from .amax_clamp import get_amax_clamp_for_quant
from .scales import QuantTensor, check_flags, check_plain, check_quantized, split


@repeatable
def per_channel_cast(
    x: Tensor | QuantTensor | tuple[Tensor, Tensor],
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Quantize each column of a matrix to e4m3 in groups of consecutive rows.

    For each column and each group ``g`` of ``num_per_tokens`` rows (the last may be shorter), in fp32::

        a  = max(max(|x[g]|), clamp)      # clamp: get_amax_clamp_for_quant("e4m3", False)
        sf = a / 448
        q  = to_e4m3(x[g] * (448 / a))    # a separate division, not 1 / sf

    ``to_e4m3`` rounds to nearest even, saturates to ±448 and keeps the sign of zero. ``sf`` is the dequantization
    multiplier: ``x ≈ q * sf``. With ``round_sf``, ``sf = 2**ceil(log2(a / 448))`` and the factor is ``1 / sf``. A
    quantized ``x`` is requantized: ``a`` is taken over ``|x_q * x_sf|``, and ``q = to_e4m3(x_q * (x_sf * factor))``.

    Args:
        x: ``(M, K)`` bfloat16 or float32, ``stride(1) == 1``, any row stride. Or ``(data, sf)``, float8_e4m3fn with one
            scale for each row and group of ``num_per_channels`` columns, in any layout of docs/numerics.md, "Scale
            factors".
        fmt: ``"e4m3"``.
        num_per_tokens: rows per scale, at least 1. Need not divide ``M``.
        round_sf: round scales up to powers of two. Required by ``use_packed_ue8m0``.
        num_per_channels: columns per scale of a quantized ``x``; None for a plain one.
        use_packed_ue8m0: scales as UE8M0 bytes packed in words along the rows.

    Returns:
        ``(q, sf)``. ``q``: ``(M, K)`` float8_e4m3fn, contiguous. ``sf``: ``(ceil(M / num_per_tokens), K)`` float32, or
        with ``use_packed_ue8m0`` words of P scales, ``(ceil(ceil(M / num_per_tokens) / P), K)``; contiguous. Unused
        bytes of the last words are zero.

    Raises:
        InvalidArgumentError: a shape, stride or flag combination outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of the device cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit. A group that holds a NaN or an Inf gets a
        NaN scale (fp32 NaN, UE8M0 byte 255); its codes are unspecified.
    Cost: one pass; reads ``x``, writes ``q`` and ``sf``; bound by memory bandwidth.
    Source: DeepSeek-V3, section 3.3 (operands of weight gradients); OCP Microscaling Formats v1.0.

    >>> q, sf = per_channel_cast(torch.tensor([[448.0, 896.0], [1.0, 2.0]]), "e4m3", 2)
    >>> q.float().tolist(), sf.tolist()
    ([[448.0, 448.0], [1.0, 1.0]], [[1.0, 2.0]])
    """
    op = "quant.per_channel_cast"
    checks.one_of(op, "fmt", fmt, ("e4m3",))
    data, x_sf = split(op, x)
    if (x_sf is None) != (num_per_channels is None):
        checks.invalid(op, "num_per_channels", "be given exactly when x is quantized", num_per_channels)
    return QuantTensor(
        *PER_CHANNEL_CAST(
            data,
            x_sf,
            num_per_tokens,
            0 if num_per_channels is None else num_per_channels,
            round_sf,
            use_packed_ue8m0,
            get_amax_clamp_for_quant("e4m3", False),
            layout(data.device.type).ue8m0_per_word,
        )
    )


def _check(
    x: Tensor,
    x_sf: Tensor | None,
    num_per_tokens: int,
    num_per_channels: int,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
) -> None:
    op = "quant.per_channel_cast"
    check_flags(op, round_sf, use_packed_ue8m0)
    checks.at_least(op, "num_per_tokens", num_per_tokens, 1)
    if x_sf is None:
        check_plain(op, x)
    else:
        checks.at_least(op, "num_per_channels", num_per_channels, 1)
        check_quantized(op, x, x_sf, 1, num_per_channels, ue8m0_per_word, formats=(E4M3,))


def _outputs(
    x: Tensor,
    x_sf: Tensor | None,
    num_per_tokens: int,
    num_per_channels: int,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
) -> tuple[TensorSpec, ...]:
    rows, columns = x.shape
    sf = scale_spec(
        ceil_div(rows, num_per_tokens),
        columns,
        packed=use_packed_ue8m0,
        pack_rows=True,
        ue8m0_per_word=ue8m0_per_word,
    )
    return TensorSpec((rows, columns), torch.float8_e4m3fn), sf


PER_CHANNEL_CAST = Operator(
    "quant.per_channel_cast",
    "(Tensor x, Tensor? x_sf, int num_per_tokens, int num_per_channels, bool round_sf, bool use_packed_ue8m0, "
    "float clamp_min, int ue8m0_per_word) -> (Tensor, Tensor)",
    check=_check,
    outputs=_outputs,
)
