"""Quantize each row of a matrix in groups of consecutive columns: ``per_token_cast`` and its variants."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..formats import FORMATS, TensorSpec, ceil_div, scale_spec
from ..op import Operator
from ..registry import layout
from .amax_clamp import get_amax_clamp_for_quant
from .scales import QuantTensor, check_flags, check_quantized, split


def per_token_cast(
    x: Tensor | QuantTensor | tuple[Tensor, Tensor],
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> QuantTensor:
    """Quantize each row of a matrix in groups of consecutive columns.

    For each row and each group ``g`` of ``num_per_channels`` columns (the last may be shorter), in fp32::

        a  = max(max(|x[g]|), clamp)      # clamp: get_amax_clamp_for_quant(fmt, use_e4m3_sf)
        sf = a / qmax                     # qmax = 448 for e4m3, 6 for e2m1
        q  = to_fmt(x[g] * (qmax / a))    # a separate division, not 1 / sf

    ``to_fmt`` rounds to nearest even, saturates to ±qmax and keeps the sign of zero. ``sf`` is the dequantization
    multiplier: ``x ≈ q * sf``. With ``round_sf``, ``sf = 2**ceil(log2(a / qmax))`` and the factor is ``1 / sf``. With
    ``use_e4m3_sf``, ``sf = to_e4m3(a / qmax)`` and the factor is ``1 / sf`` rounded to fp32. A quantized ``x`` is
    requantized: ``a`` is taken over ``|x_q * x_sf|``, and ``q = to_fmt(x_q * (x_sf * factor))``.

    Args:
        x: ``(M, K)`` bfloat16 or float32, ``M >= 0``, ``K >= 1`` (even for e2m1); ``stride(1) == 1``, any row stride.
            Or ``(data, sf)`` already quantized in blocks of ``x_block_size``, in any scale layout.
        fmt: ``"e4m3"`` or ``"e2m1"``.
        num_per_channels: columns per scale, at least 1. Need not divide ``K``.
        x_block_size: ``(rows, columns)`` of a block of a quantized ``x``; None for a plain one.
        use_tma_aligned_col_major_sf: scales column-major, columns padded as TMA needs.
        round_sf: round scales up to powers of two. Required by ``use_packed_ue8m0``.
        use_packed_ue8m0: scales as UE8M0 bytes packed in words along the columns.
        use_e4m3_sf: scales in float8_e4m3fn; excludes ``round_sf``.
        stochastic_cast: round ``q`` stochastically (unbiased), with random bits that are a hash of four consecutive
            values, so the result is reproducible and equal rows round equally.
        out: buffers for ``(q, sf)``; None elements are allocated. Row-major scales only.

    Returns:
        ``(q, sf)``. ``q``: contiguous; ``(M, K)`` float8_e4m3fn, or ``(M, K / 2)`` int8 holding two e2m1 codes in a
        byte, even column in the low nibble. ``sf``: ``(M, ceil(K / num_per_channels))`` float32, row-major; the flags
        select the other layouts of docs/numerics.md, "Scale factors". Padding is zero.

    Raises:
        InvalidArgumentError: a shape, stride or flag combination outside the above; the message gives the value.
        InvalidDtypeError: ``x`` or its scales have another dtype.
        UnsupportedError: legal, but the backend of ``x.device`` has no kernel for it; the message says why.

    Gradient: none; results never require grad (tk_core.layers.fake_quantize is the straight-through form).
    Determinism: bitwise reproducible, and equal to the reference bit for bit. A group that holds a NaN or an Inf gets a
        NaN scale (fp32 NaN, UE8M0 byte 255, e4m3 0x7F); its codes are unspecified.
    Cost: one pass; reads ``x``, writes ``q`` and ``sf``; bound by memory bandwidth.
    Source: OCP Microscaling Formats v1.0 (element types, UE8M0); block sizes after DeepSeek-V3, section 3.3.

    >>> q, sf = per_token_cast(torch.full((1, 64), 448.0), "e4m3", 32)
    >>> sf.tolist(), q.float().max().item()
    ([[1.0, 1.0]], 448.0)
    """
    data, x_sf = split("quant.per_token_cast", x)
    if (x_sf is None) != (x_block_size is None):
        checks.invalid("quant.per_token_cast", "x_block_size", "be given exactly when x is quantized", x_block_size)
    checks.one_of("quant.per_token_cast", "fmt", fmt, ("e4m3", "e2m1"))
    rows, columns = x_block_size if x_block_size is not None else (0, 0)
    device = layout(data.device.type)
    args = (
        data,
        x_sf,
        fmt,
        num_per_channels,
        rows,
        columns,
        use_tma_aligned_col_major_sf,
        round_sf,
        use_packed_ue8m0,
        use_e4m3_sf,
        stochastic_cast,
        get_amax_clamp_for_quant(fmt, use_e4m3_sf),
        device.ue8m0_per_word,
        device.sf_align_bytes,
    )
    if out is None:
        return QuantTensor(*PER_TOKEN_CAST(*args))
    checks.excludes(
        "quant.per_token_cast",
        "out[1]",
        out[1] is not None,
        "use_tma_aligned_col_major_sf",
        use_tma_aligned_col_major_sf,
    )
    return QuantTensor(*PER_TOKEN_CAST.into(out, *args))


def _check(
    x: Tensor,
    x_sf: Tensor | None,
    fmt: str,
    num_per_channels: int,
    x_block_rows: int,
    x_block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_e4m3_sf: bool,
    stochastic_cast: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> None:
    op = "quant.per_token_cast"
    check_flags(op, round_sf, use_packed_ue8m0, use_e4m3_sf)
    if x_sf is not None:
        checks.at_least(op, "x_block_size[0]", x_block_rows, 1)
        checks.at_least(op, "x_block_size[1]", x_block_columns, 1)
        columns = check_quantized(op, x, x_sf, x_block_rows, x_block_columns, ue8m0_per_word)[1]
    else:
        columns = _check_plain(op, x)
    _check_groups(op, columns, fmt, num_per_channels)


def _check_plain(op: str, x: Tensor) -> int:
    """Check a plain matrix; returns its columns."""
    checks.is_tensor(op, "x", x)
    checks.dtype(op, "x", x, (torch.bfloat16, torch.float32))
    checks.rank(op, "x", x, "(M, K)")
    checks.last_stride_1(op, "x", x)
    return x.shape[1]


def _check_groups(op: str, columns: int, fmt: str, num_per_channels: int) -> None:
    checks.one_of(op, "fmt", fmt, ("e4m3", "e2m1"))
    checks.at_least(op, "num_per_channels", num_per_channels, 1)
    if columns < 1 or columns % FORMATS[fmt].codes:
        checks.invalid(
            op, "x", "have at least 1 column" + (", an even number for e2m1" if fmt == "e2m1" else ""), columns
        )


def _outputs(
    x: Tensor,
    x_sf: Tensor | None,
    fmt: str,
    num_per_channels: int,
    x_block_rows: int,
    x_block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_e4m3_sf: bool,
    stochastic_cast: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[TensorSpec, ...]:
    rows, columns = x.shape
    if x_sf is not None and x.dtype == torch.int8:
        columns = columns * 2
    data = FORMATS[fmt]
    return (
        TensorSpec((rows, data.width(columns)), data.dtype),
        scale_spec(
            rows,
            ceil_div(columns, num_per_channels),
            column_major_sf=use_tma_aligned_col_major_sf,
            packed=use_packed_ue8m0,
            e4m3_sf=use_e4m3_sf,
            ue8m0_per_word=ue8m0_per_word,
            sf_align_bytes=sf_align_bytes,
        ),
    )


PER_TOKEN_CAST = Operator(
    "quant.per_token_cast",
    "(Tensor x, Tensor? x_sf, str fmt, int num_per_channels, int x_block_rows, int x_block_columns, "
    "bool use_tma_aligned_col_major_sf, bool round_sf, bool use_packed_ue8m0, bool use_e4m3_sf, "
    "bool stochastic_cast, float clamp_min, int ue8m0_per_word, int sf_align_bytes) -> (Tensor, Tensor)",
    check=_check,
    outputs=_outputs,
)
