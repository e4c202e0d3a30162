"""Quantize a matrix in rectangular blocks: ``per_block_cast`` and its variants."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..formats import FORMATS, TensorSpec, ceil_div, scale_spec
from ..op import Operator
from ..registry import layout
from ..repeat import repeatable
from .amax_clamp import get_amax_clamp_for_quant
from .scales import (
    QuantTensor,
    block,
    check_block,
    check_flags,
    check_format,
    check_plain,
    check_precomputed,
    check_precomputed_flags,
    pair_of_buffers,
    run_into,
)


@repeatable
def per_block_cast(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> QuantTensor:
    """Quantize a matrix in rectangular blocks, as weights are.

    For each block ``b`` of ``block_size``, edge blocks being partial, in fp32::

        a  = max(max(|x[b]|), clamp)      # clamp: get_amax_clamp_for_quant(fmt, False)
        sf = a / qmax                     # qmax = 448 for e4m3, 6 for e2m1
        q  = to_fmt(x[b] * (qmax / a))    # a separate division, not 1 / sf

    ``to_fmt`` rounds to nearest even, saturates to ±qmax and keeps the sign of zero. ``sf`` is the dequantization
    multiplier: ``x ≈ q * sf``. With ``round_sf``, ``sf = 2**ceil(log2(a / qmax))`` and the factor is ``1 / sf``.

    Args:
        x: ``(M, K)`` bfloat16 or float32, ``K`` even for e2m1; ``stride(1) == 1``, any row stride.
        fmt: ``"e4m3"`` or ``"e2m1"``.
        block_size: ``(rows, columns)`` of a block, each at least 1; they need not divide ``M`` and ``K``.
        use_tma_aligned_col_major_sf: scales column-major, columns padded as TMA needs. Not with ``use_packed_ue8m0``
            for blocks of one column.
        round_sf: round scales up to powers of two. Required by ``use_packed_ue8m0``.
        use_packed_ue8m0: scales as UE8M0 bytes packed in words along the columns; along the rows for blocks of one
            column.
        out: buffers for ``(q, sf)``; None elements are allocated. ``q`` contiguous; ``sf`` row-major, any row stride.

    Returns:
        ``(q, sf)``. ``q``: contiguous; ``(M, K)`` float8_e4m3fn, or ``(M, K / 2)`` int8 holding two e2m1 codes in a
        byte, even column in the low nibble. ``sf``: one scale for each block, float32, row-major; the flags select
        the other layouts of docs/numerics.md, "Scale factors". Padding is zero.

    Raises:
        InvalidArgumentError: a shape, stride or flag combination outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of ``x.device`` cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit. A block that holds a NaN or an Inf gets a
        NaN scale (fp32 NaN, UE8M0 byte 255); its codes are unspecified.
    Cost: one pass; reads ``x``, writes ``q`` and ``sf``; bound by memory bandwidth.
    Source: DeepSeek-V3, section 3.3 (blocks of 128 x 128); OCP Microscaling Formats v1.0.

    >>> q, sf = per_block_cast(torch.full((3, 4), 896.0), "e4m3", (2, 2))
    >>> sf.tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    """
    op = "quant.per_block_cast"
    args = _arguments(op, x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if out is None:
        return QuantTensor(*PER_BLOCK_CAST(*args))
    return QuantTensor(*run_into(PER_BLOCK_CAST, pair_of_buffers(op, out, use_tma_aligned_col_major_sf), args))


def _arguments(
    op: str,
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
) -> tuple[Tensor, str, int, int, bool, bool, bool, float, int, int]:
    checks.is_tensor(op, "x", x)
    checks.one_of(op, "fmt", fmt, ("e4m3", "e2m1"))
    rows, columns = block(op, "block_size", block_size)
    device = layout(x.device.type)
    clamp_min = get_amax_clamp_for_quant(fmt, False)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return x, fmt, rows, columns, *flags, clamp_min, device.ue8m0_per_word, device.sf_align_bytes


def _check_all(
    op: str,
    x: Tensor,
    fmt: str,
    block_rows: int,
    block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
) -> None:
    check_flags(op, round_sf, use_packed_ue8m0)
    check_block(op, "block_size", block_rows, block_columns)
    check_format(op, fmt, check_plain(op, x))
    if block_columns == 1 and use_packed_ue8m0:
        checks.excludes(
            op,
            "use_packed_ue8m0 for blocks of one column",
            True,
            "use_tma_aligned_col_major_sf",
            use_tma_aligned_col_major_sf,
        )


def _check(
    x: Tensor,
    fmt: str,
    block_rows: int,
    block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> None:
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    _check_all("quant.per_block_cast", x, fmt, block_rows, block_columns, *flags)


def _outputs(
    x: Tensor,
    fmt: str,
    block_rows: int,
    block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[TensorSpec, ...]:
    rows, columns = x.shape
    sf = scale_spec(
        ceil_div(rows, block_rows),
        ceil_div(columns, block_columns),
        column_major_sf=use_tma_aligned_col_major_sf,
        packed=use_packed_ue8m0,
        pack_rows=block_columns == 1,
        ue8m0_per_word=ue8m0_per_word,
        sf_align_bytes=sf_align_bytes,
    )
    return TensorSpec((rows, FORMATS[fmt].width(columns)), FORMATS[fmt].dtype), sf


_ARGUMENTS = (
    "(Tensor x, str fmt, int block_rows, int block_columns, bool use_tma_aligned_col_major_sf, bool round_sf, "
    "bool use_packed_ue8m0, float clamp_min, int ue8m0_per_word, int sf_align_bytes)"
)

PER_BLOCK_CAST = Operator("quant.per_block_cast", f"{_ARGUMENTS} -> (Tensor, Tensor)", check=_check, outputs=_outputs)


@repeatable
def per_block_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out_sf: Tensor | None = None,
) -> Tensor:
    """Only the scales that :func:`per_block_cast` would give, bit for bit.

    Args:
        x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0: as in :func:`per_block_cast`.
        out_sf: buffer for the scales, row-major, any row stride.

    Returns:
        One scale for each block, in the layout of the flags. Padding is zero.

    Raises:
        InvalidArgumentError: a shape, stride or flag combination outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of ``x.device`` cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit. Non-finite blocks get a NaN scale.
    Cost: one pass; reads ``x``, writes the scales; bound by memory bandwidth.
    Source: DeepSeek-V3, section 3.3; OCP Microscaling Formats v1.0.

    >>> per_block_cast_with_sf_only(torch.full((3, 2), 896.0), "e4m3", (2, 2)).tolist()
    [[2.0], [2.0]]
    """
    op = "quant.per_block_cast_with_sf_only"
    args = _arguments(op, x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if out_sf is None:
        return PER_BLOCK_CAST_WITH_SF_ONLY(*args)
    checks.excludes(op, "out_sf", True, "use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    return run_into(PER_BLOCK_CAST_WITH_SF_ONLY, (out_sf,), args)[0]


def _check_sf_only(
    x: Tensor,
    fmt: str,
    block_rows: int,
    block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> None:
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    _check_all("quant.per_block_cast_with_sf_only", x, fmt, block_rows, block_columns, *flags)


def _outputs_sf_only(
    x: Tensor,
    fmt: str,
    block_rows: int,
    block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[TensorSpec, ...]:
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return _outputs(x, fmt, block_rows, block_columns, *flags, clamp_min, ue8m0_per_word, sf_align_bytes)[1:]


PER_BLOCK_CAST_WITH_SF_ONLY = Operator(
    "quant.per_block_cast_with_sf_only", f"{_ARGUMENTS} -> Tensor", check=_check_sf_only, outputs=_outputs_sf_only
)


@repeatable
def per_block_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    sf: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Quantize a matrix in blocks with given scales: ``q = to_fmt(x * (1 / sf))``, in fp32, ``1 / sf`` rounded.

    ``to_fmt`` is that of :func:`per_block_cast`. For scales that are not powers of two the codes can differ from those
    of :func:`per_block_cast`, which multiplies by ``qmax / a``. With ``sf = 0``, nonzero values become ±qmax and zeros
    NaN; NaN becomes 0x7F in e4m3 and the code of +6 in e2m1.

    Args:
        x, fmt, block_size: as in :func:`per_block_cast`.
        sf: one scale for each block, float32; unit column stride, any row stride.
        use_tma_aligned_col_major_sf, use_packed_ue8m0: must be False: ``sf`` is row-major and unpacked.
        round_sf: says that ``sf`` holds powers of two; it changes nothing.
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
    Source: DeepSeek-V3, section 3.3; OCP Microscaling Formats v1.0.

    >>> x, sf = torch.tensor([[2.0, 5.0]]), torch.tensor([[0.5]])
    >>> per_block_cast_with_precomputed_sf(x, "e4m3", (1, 2), sf).float().tolist()
    [[4.0, 10.0]]
    """
    op = "quant.per_block_cast_with_precomputed_sf"
    check_precomputed_flags(op, sf, use_tma_aligned_col_major_sf, use_packed_ue8m0, False)
    args = (x, sf, fmt, *block(op, "block_size", block_size))
    if out is None:
        return PER_BLOCK_CAST_WITH_PRECOMPUTED_SF(*args)
    return PER_BLOCK_CAST_WITH_PRECOMPUTED_SF.into((out,), *args)[0]


def _check_precomputed_sf(x: Tensor, sf: Tensor, fmt: str, block_rows: int, block_columns: int) -> None:
    op = "quant.per_block_cast_with_precomputed_sf"
    check_block(op, "block_size", block_rows, block_columns)
    check_format(op, fmt, check_plain(op, x))
    checks.dtype(op, "sf", sf, (torch.float32,))
    check_precomputed(op, x, sf, block_rows, block_columns)


def _outputs_precomputed_sf(
    x: Tensor, sf: Tensor, fmt: str, block_rows: int, block_columns: int
) -> tuple[TensorSpec, ...]:
    return (TensorSpec((x.shape[0], FORMATS[fmt].width(x.shape[1])), FORMATS[fmt].dtype),)


PER_BLOCK_CAST_WITH_PRECOMPUTED_SF = Operator(
    "quant.per_block_cast_with_precomputed_sf",
    "(Tensor x, Tensor sf, str fmt, int block_rows, int block_columns) -> Tensor",
    check=_check_precomputed_sf,
    outputs=_outputs_precomputed_sf,
)
