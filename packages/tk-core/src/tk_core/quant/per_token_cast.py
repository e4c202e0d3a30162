"""Quantize each row of a matrix in groups of consecutive columns: ``per_token_cast`` and its variants."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..formats import FORMATS, TensorSpec, ceil_div, scale_spec
from ..op import Operator
from ..registry import layout
from ..repeat import repeatable
from .amax_clamp import get_amax_clamp_for_quant
from .per_token_cast_to_e5m6 import per_token_cast_to_e5m6
from .scales import (
    QuantTensor,
    block,
    check_flags,
    check_format,
    check_plain,
    check_precomputed,
    check_precomputed_flags,
    check_quantized,
    pair_of_buffers,
    run_into,
    split,
)


@repeatable
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
        x: ``(M, K)`` bfloat16 or float32, ``M >= 0``, ``K >= 0`` (even for e2m1); ``stride(1) == 1``, any row stride.
            Or ``(data, sf)`` already quantized in blocks of ``x_block_size``, in any scale layout.
        fmt: ``"e4m3"`` or ``"e2m1"``; ``"e5m6"`` is :func:`per_token_cast_to_e5m6`.
        num_per_channels: columns per scale, at least 1. Need not divide ``K``.
        x_block_size: ``(rows, columns)`` of a block of a quantized ``x``; None for a plain one.
        use_tma_aligned_col_major_sf: scales column-major, columns padded as TMA needs.
        round_sf: round scales up to powers of two. Required by ``use_packed_ue8m0``.
        use_packed_ue8m0: scales as UE8M0 bytes packed in words along the columns.
        use_e4m3_sf: scales in float8_e4m3fn; excludes ``round_sf``.
        stochastic_cast: round ``q`` stochastically (unbiased), with random bits that are a hash of four consecutive
            values, so the result is reproducible and equal rows round equally.
        out: buffers for ``(q, sf)``; None elements are allocated. ``q`` contiguous; ``sf`` row-major, any row stride.

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
    op = "quant.per_token_cast"
    checks.one_of(op, "fmt", fmt, ("e4m3", "e2m1", "e5m6"))
    data, x_sf = split(op, x)
    if (x_sf is None) != (x_block_size is None):
        checks.invalid(op, "x_block_size", "be given exactly when x is quantized", x_block_size)
    if fmt == "e5m6":
        checks.excludes(op, "fmt='e5m6'", True, "a quantized x", x_sf is not None)
        checks.excludes(op, "fmt='e5m6'", True, "use_e4m3_sf", use_e4m3_sf)
        checks.excludes(op, "fmt='e5m6'", True, "stochastic_cast", stochastic_cast)
        checks.excludes(op, "fmt='e5m6'", True, "out", out is not None)
        return per_token_cast_to_e5m6(data, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    rows, columns = block(op, "x_block_size", x_block_size) if x_block_size is not None else (0, 0)
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
    return QuantTensor(*run_into(PER_TOKEN_CAST, pair_of_buffers(op, out, use_tma_aligned_col_major_sf), args))


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
        columns = check_quantized(op, x, x_sf, x_block_rows, x_block_columns, ue8m0_per_word)[1]
    else:
        columns = check_plain(op, x)
    check_format(op, fmt, columns)
    checks.at_least(op, "num_per_channels", num_per_channels, 1)


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


@repeatable
def per_token_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out_sf: Tensor | None = None,
) -> Tensor:
    """Only the scales that :func:`per_token_cast` would give a plain matrix, bit for bit.

    Args:
        x: ``(M, K)`` bfloat16 or float32, ``stride(1) == 1``, any row stride.
        fmt, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf: as in
            :func:`per_token_cast`.
        out_sf: buffer for the scales, row-major, any row stride.

    Returns:
        The scales ``(M, ceil(K / num_per_channels))`` in the layout of the flags. Padding is zero.

    Raises:
        InvalidArgumentError: a shape, stride or flag combination outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of ``x.device`` cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit. Non-finite groups get a NaN scale.
    Cost: one pass; reads ``x``, writes the scales; bound by memory bandwidth.
    Source: OCP Microscaling Formats v1.0; DeepSeek-V3, section 3.3.

    >>> per_token_cast_with_sf_only(torch.full((1, 64), 896.0), "e4m3", 32).tolist()
    [[2.0, 2.0]]
    """
    op = "quant.per_token_cast_with_sf_only"
    checks.is_tensor(op, "x", x)
    checks.one_of(op, "fmt", fmt, ("e4m3", "e2m1"))
    device = layout(x.device.type)
    args = (
        x,
        fmt,
        num_per_channels,
        use_tma_aligned_col_major_sf,
        round_sf,
        use_packed_ue8m0,
        use_e4m3_sf,
        get_amax_clamp_for_quant(fmt, use_e4m3_sf),
        device.ue8m0_per_word,
        device.sf_align_bytes,
    )
    if out_sf is None:
        return PER_TOKEN_CAST_WITH_SF_ONLY(*args)
    checks.excludes(op, "out_sf", True, "use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    return run_into(PER_TOKEN_CAST_WITH_SF_ONLY, (out_sf,), args)[0]


def _check_sf_only(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_e4m3_sf: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> None:
    op = "quant.per_token_cast_with_sf_only"
    check_flags(op, round_sf, use_packed_ue8m0, use_e4m3_sf)
    check_format(op, fmt, check_plain(op, x))
    checks.at_least(op, "num_per_channels", num_per_channels, 1)


def _outputs_sf_only(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_e4m3_sf: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[TensorSpec, ...]:
    return (
        scale_spec(
            x.shape[0],
            ceil_div(x.shape[1], num_per_channels),
            column_major_sf=use_tma_aligned_col_major_sf,
            packed=use_packed_ue8m0,
            e4m3_sf=use_e4m3_sf,
            ue8m0_per_word=ue8m0_per_word,
            sf_align_bytes=sf_align_bytes,
        ),
    )


PER_TOKEN_CAST_WITH_SF_ONLY = Operator(
    "quant.per_token_cast_with_sf_only",
    "(Tensor x, str fmt, int num_per_channels, bool use_tma_aligned_col_major_sf, bool round_sf, "
    "bool use_packed_ue8m0, bool use_e4m3_sf, float clamp_min, int ue8m0_per_word, int sf_align_bytes) -> Tensor",
    check=_check_sf_only,
    outputs=_outputs_sf_only,
)


@repeatable
def per_token_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    sf: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Quantize each row of a matrix with given scales: ``q = to_fmt(x * (1 / sf))``, in fp32, ``1 / sf`` rounded.

    ``to_fmt`` is that of :func:`per_token_cast`. For scales that are not powers of two the codes can differ from those
    of :func:`per_token_cast`, which multiplies by ``qmax / a``. With ``sf = 0``, nonzero values become ±qmax and zeros
    NaN; NaN becomes 0x7F in e4m3 and the code of +6 in e2m1.

    Args:
        x: ``(M, K)`` bfloat16 or float32, ``stride(1) == 1``, any row stride.
        fmt, num_per_channels: as in :func:`per_token_cast`.
        sf: ``(M, ceil(K / num_per_channels))`` float32, or float8_e4m3fn with ``use_e4m3_sf``; unit column stride, any
            row stride.
        use_tma_aligned_col_major_sf, use_packed_ue8m0: must be False: ``sf`` is row-major and unpacked.
        round_sf: says that ``sf`` holds powers of two; it changes nothing.
        use_e4m3_sf: ``sf`` is float8_e4m3fn.
        out: contiguous buffer for the codes.

    Returns:
        The codes, contiguous: ``(M, K)`` float8_e4m3fn or ``(M, K / 2)`` int8.

    Raises:
        InvalidArgumentError: a shape, stride or flag combination outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of ``x.device`` cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit.
    Cost: one pass; reads ``x`` and ``sf``, writes the codes; bound by memory bandwidth.
    Source: OCP Microscaling Formats v1.0.

    >>> x, sf = torch.tensor([[2.0, 5.0]]), torch.tensor([[0.5]])
    >>> per_token_cast_with_precomputed_sf(x, "e4m3", 2, sf).float().tolist()
    [[4.0, 10.0]]
    """
    op = "quant.per_token_cast_with_precomputed_sf"
    check_precomputed_flags(op, sf, use_tma_aligned_col_major_sf, use_packed_ue8m0, use_e4m3_sf)
    check_flags(op, round_sf, use_packed_ue8m0, use_e4m3_sf)
    args = (x, sf, fmt, num_per_channels)
    if out is None:
        return PER_TOKEN_CAST_WITH_PRECOMPUTED_SF(*args)
    return PER_TOKEN_CAST_WITH_PRECOMPUTED_SF.into((out,), *args)[0]


def _check_precomputed_sf(x: Tensor, sf: Tensor, fmt: str, num_per_channels: int) -> None:
    op = "quant.per_token_cast_with_precomputed_sf"
    check_format(op, fmt, check_plain(op, x))
    checks.at_least(op, "num_per_channels", num_per_channels, 1)
    check_precomputed(op, x, sf, 1, num_per_channels)


def _outputs_precomputed_sf(x: Tensor, sf: Tensor, fmt: str, num_per_channels: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec((x.shape[0], FORMATS[fmt].width(x.shape[1])), FORMATS[fmt].dtype),)


PER_TOKEN_CAST_WITH_PRECOMPUTED_SF = Operator(
    "quant.per_token_cast_with_precomputed_sf",
    "(Tensor x, Tensor sf, str fmt, int num_per_channels) -> Tensor",
    check=_check_precomputed_sf,
    outputs=_outputs_precomputed_sf,
)
