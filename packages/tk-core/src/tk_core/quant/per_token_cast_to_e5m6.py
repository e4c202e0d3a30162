"""Quantize rows to packed 12-bit e5m6 codes."""

from __future__ import annotations

from torch import Tensor

from .. import checks
from ..formats import E5M6, E5M6_AMAX_CLAMP, TensorSpec, ceil_div, scale_spec
from ..op import Operator
from ..registry import layout
from ..repeat import repeatable
from .scales import QuantTensor, check_flags, check_plain


@repeatable
def per_token_cast_to_e5m6(
    x: Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Quantize each row of a matrix to packed 12-bit e5m6 codes, in groups of consecutive columns.

    For each row and each group ``g`` of ``num_per_channels`` columns, in fp32::

        a  = max(max(|x[g]|), 1e-4)
        sf = a / 65024
        v  = x[g] * (65024 / a)           # a separate division, not 1 / sf

    With ``round_sf``, ``sf = 2**ceil(log2(a / 65024))`` and the factor is ``1 / sf``. A code is the top 12 bits of an
    fp16: ``v`` is truncated to fp16, then rounded to the nearest even code by the low 17 bits of its fp32 mantissa,
    which is round to nearest even for ``|v| >= 2**-14`` and follows those bits alone below.

    Args:
        x: ``(M, K)`` bfloat16 or float32, ``K`` a multiple of 8; ``stride(1) == 1``, any row stride.
        num_per_channels: columns per scale; divides ``K``.
        use_tma_aligned_col_major_sf: scales column-major, columns padded as TMA needs.
        round_sf: round scales up to powers of two. Required by ``use_packed_ue8m0``.
        use_packed_ue8m0: scales as UE8M0 bytes packed in words along the columns.

    Returns:
        ``(q, sf)``. ``q``: ``(M, 3 K / 2)`` uint8, contiguous: 8 codes in three little-endian 32-bit words, the lowest
        column in the highest bits. ``sf``: as for per_token_cast. Padding is zero.

    Raises:
        InvalidArgumentError: a shape, stride or flag combination outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of ``x.device`` cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit. A group that holds a NaN or an Inf gets a
        NaN scale (fp32 NaN, UE8M0 byte 255); its codes are unspecified.
    Cost: one pass; reads ``x``, writes ``q`` and ``sf``; bound by memory bandwidth.
    Source: the 1-5-6 format that tile-kernels 1.0 defines: an IEEE 754 binary16 without its last four bits.

    >>> q, sf = per_token_cast_to_e5m6(torch.tensor([[1, -2, 0.5, 65024, 0, 0, 0, 0]]), 8)
    >>> sf.item(), q.tolist()
    (1.0, [[56, 0, 12, 60, 0, 0, 191, 7, 0, 0, 0, 0]])
    """
    checks.is_tensor("quant.per_token_cast_to_e5m6", "x", x)
    device = layout(x.device.type)
    return QuantTensor(
        *PER_TOKEN_CAST_TO_E5M6(
            x,
            num_per_channels,
            use_tma_aligned_col_major_sf,
            round_sf,
            use_packed_ue8m0,
            E5M6_AMAX_CLAMP,
            device.ue8m0_per_word,
            device.sf_align_bytes,
        )
    )


def _check(
    x: Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> None:
    op = "quant.per_token_cast_to_e5m6"
    check_flags(op, round_sf, use_packed_ue8m0)
    columns = check_plain(op, x)
    if columns % E5M6.codes:
        checks.invalid(op, "x", "have a multiple of 8 columns for e5m6", columns)
    checks.at_least(op, "num_per_channels", num_per_channels, 1)
    if columns % num_per_channels:
        checks.invalid(op, "num_per_channels", f"divide the {columns} columns of x", num_per_channels)


def _outputs(
    x: Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[TensorSpec, ...]:
    rows, columns = x.shape
    return (
        TensorSpec((rows, E5M6.width(columns)), E5M6.dtype),
        scale_spec(
            rows,
            ceil_div(columns, num_per_channels),
            column_major_sf=use_tma_aligned_col_major_sf,
            packed=use_packed_ue8m0,
            ue8m0_per_word=ue8m0_per_word,
            sf_align_bytes=sf_align_bytes,
        ),
    )


PER_TOKEN_CAST_TO_E5M6 = Operator(
    "quant.per_token_cast_to_e5m6",
    "(Tensor x, int num_per_channels, bool use_tma_aligned_col_major_sf, bool round_sf, bool use_packed_ue8m0, "
    "float clamp_min, int ue8m0_per_word, int sf_align_bytes) -> (Tensor, Tensor)",
    check=_check,
    outputs=_outputs,
)
