"""Re-block e2m1 data as e4m3 without loss."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..formats import E2M1, PACKED_DTYPE, TensorSpec, ceil_div, scale_spec
from ..op import Operator
from ..registry import layout
from ..repeat import repeatable
from .scales import (
    QuantTensor,
    block,
    check_block,
    check_flags,
    check_quantized,
    split_quantized,
)


@repeatable
def per_block_cast_lossless(
    x: QuantTensor | tuple[Tensor, Tensor],
    fmt: str,
    x_block_size: tuple[int, int],
    out_block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Turn e2m1 data with power-of-two scales into e4m3 data with coarser blocks, exactly.

    With ``E`` the biased exponent of an input scale, and the maximum over the input blocks of an output block::

        E_out = max(max(E) - 6, 0)        # the output scale is 2**(E_out - 127)
        q_out = q * 2**(E - E_out)        # exact in e4m3; the sign of zero is kept

    It is exact where ``E_out - E <= 5`` for every input block, that is, where the scales inside an output block differ
    by at most ``2**11``. Scales outside that range, and float32 scales that are not positive normal powers of two, are
    an error: their output blocks get a NaN scale, never a silently wrong one, and the call raises where values are
    looked at (CPU tensors, or ``TK_VALIDATE=1``).

    Args:
        x: ``(data, sf)``. ``data``: ``(M, K / 2)`` int8 of e2m1 codes, ``stride(1) == 1``, any row stride. ``sf``:
            one scale for each block, float32 powers of two or packed UE8M0, in any layout of docs/numerics.md,
            "Scale factors".
        fmt: ``"e4m3"``.
        x_block_size: ``(rows, columns)`` of an input block.
        out_block_size: ``(rows, columns)`` of an output block, each a multiple of that of ``x_block_size``; edge
            blocks are partial.
        use_tma_aligned_col_major_sf: scales column-major, columns padded as TMA needs. Not with ``use_packed_ue8m0``
            for blocks of one column.
        round_sf: required by ``use_packed_ue8m0``; changes nothing else, since scales are powers of two anyway.
        use_packed_ue8m0: scales as UE8M0 bytes packed in words along the columns; along the rows for blocks of one
            column.

    Returns:
        ``(q, sf)``. ``q``: ``(M, K)`` float8_e4m3fn, contiguous. ``sf``: one scale for each output block, in the layout
        of the flags; ``E_out = 0`` is 2**-127. Padding is zero.

    Raises:
        InvalidArgumentError: a shape, stride or flag combination outside the above, or such scales.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of the device cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit. Codes of a block with a NaN scale are
        unspecified.
    Cost: one pass; reads and writes each element once; bound by memory bandwidth.
    Source: OCP Microscaling Formats v1.0; the range of e4m3 (2**-9 to 448) holds e2m1 times 2**-5 to 2**6.

    >>> x = torch.tensor([[0x27]], dtype=torch.int8), torch.ones(1, 1)
    >>> q, sf = per_block_cast_lossless(x, "e4m3", (1, 2), (1, 2))
    >>> q.float().tolist(), sf.item()
    ([[384.0, 64.0]], 0.015625)
    """
    op = "quant.per_block_cast_lossless"
    checks.one_of(op, "fmt", fmt, ("e4m3",))
    check_flags(op, round_sf, use_packed_ue8m0)
    data, sf = split_quantized(op, x)
    device = layout(data.device.type)
    result = PER_BLOCK_CAST_LOSSLESS(
        data,
        sf,
        *block(op, "x_block_size", x_block_size),
        *block(op, "out_block_size", out_block_size),
        use_tma_aligned_col_major_sf,
        use_packed_ue8m0,
        device.ue8m0_per_word,
        device.sf_align_bytes,
    )
    if checks.validates(data):
        _refuse_nan_scales(op, result[1], use_packed_ue8m0)
    return QuantTensor(*result)


def _refuse_nan_scales(op: str, sf: Tensor, packed: bool) -> None:
    bad = (sf.new_empty(sf.shape).copy_(sf).view(torch.uint8) == 255) if packed else sf.isnan()
    if bad.any():
        checks.invalid(
            op,
            "x[1]",
            "hold positive powers of two that differ by at most 2**11 inside an output block",
            f"others in {int(bad.sum())} of the output blocks",
        )


def _check(
    x: Tensor,
    x_sf: Tensor,
    x_block_rows: int,
    x_block_columns: int,
    block_rows: int,
    block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    use_packed_ue8m0: bool,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> None:
    op = "quant.per_block_cast_lossless"
    check_quantized(op, x, x_sf, x_block_rows, x_block_columns, ue8m0_per_word, formats=(E2M1,))
    checks.dtype(op, "x[1]", x_sf, (torch.float32, PACKED_DTYPE[ue8m0_per_word]))
    check_block(op, "out_block_size", block_rows, block_columns)
    for i, (out, inner) in enumerate(((block_rows, x_block_rows), (block_columns, x_block_columns))):
        if out % inner:
            checks.invalid(op, f"out_block_size[{i}]", f"be a multiple of x_block_size[{i}] = {inner}", out)
    if block_columns == 1 and use_packed_ue8m0:
        checks.excludes(
            op,
            "use_packed_ue8m0 for blocks of one column",
            True,
            "use_tma_aligned_col_major_sf",
            use_tma_aligned_col_major_sf,
        )


def _outputs(
    x: Tensor,
    x_sf: Tensor,
    x_block_rows: int,
    x_block_columns: int,
    block_rows: int,
    block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    use_packed_ue8m0: bool,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[TensorSpec, ...]:
    rows, columns = x.shape[0], E2M1.logical(x.shape[1])
    sf = scale_spec(
        ceil_div(rows, block_rows),
        ceil_div(columns, block_columns),
        column_major_sf=use_tma_aligned_col_major_sf,
        packed=use_packed_ue8m0,
        pack_rows=block_columns == 1,
        ue8m0_per_word=ue8m0_per_word,
        sf_align_bytes=sf_align_bytes,
    )
    return TensorSpec((rows, columns), torch.float8_e4m3fn), sf


PER_BLOCK_CAST_LOSSLESS = Operator(
    "quant.per_block_cast_lossless",
    "(Tensor x, Tensor x_sf, int x_block_rows, int x_block_columns, int block_rows, int block_columns, "
    "bool use_tma_aligned_col_major_sf, bool use_packed_ue8m0, int ue8m0_per_word, int sf_align_bytes) "
    "-> (Tensor, Tensor)",
    check=_check,
    outputs=_outputs,
)
