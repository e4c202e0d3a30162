"""Reference of quant.per_block_cast_lossless."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...formats import PACKED_DTYPE
from ..codes import decode, encode
from ..scales import decode_ue8m0, pack_exponents, spread, unpack_exponents

_INVALID = 255


def per_block_cast_lossless(
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
) -> tuple[Tensor, Tensor]:
    values = decode(x)
    rows, columns = values.shape
    exponents = _exponents(x_sf, x_block_columns)[: -(-rows // x_block_rows), : -(-columns // x_block_columns)]
    ratio = (block_rows // x_block_rows, block_columns // x_block_columns)
    largest = _reduce(exponents, *ratio, torch.amax, -1)
    out = (largest - 6).clamp(min=0)
    lossless = (largest != _INVALID) & (_reduce(exponents, *ratio, torch.amin, _INVALID) + 5 >= out)
    shift = spread(exponents, x_block_rows, x_block_columns, rows, columns)
    shift = shift - spread(out, block_rows, block_columns, rows, columns)
    q = encode(values * torch.exp2(shift.float()), "e4m3")
    out = torch.where(lossless, out, _INVALID)
    if use_packed_ue8m0:
        return q, pack_exponents(out, block_columns == 1, ue8m0_per_word)
    return q, decode_ue8m0(out)


def _exponents(sf: Tensor, block_columns: int) -> Tensor:
    """Biased exponents as int32; 255 where a scale is not a positive normal power of two (nor UE8M0)."""
    if sf.dtype in PACKED_DTYPE.values():
        return unpack_exponents(sf, block_columns == 1).int()
    bits = sf.view(torch.int32)
    normal = (bits & 0x7FFFFF == 0) & (bits > 0)
    return torch.where(normal, bits >> 23, _INVALID)


def _reduce(exponents: Tensor, rows: int, columns: int, reduction: Callable[..., Tensor], neutral: int) -> Tensor:
    """The largest or smallest exponent of each group of blocks, over the blocks that exist."""
    row_blocks, column_blocks = exponents.shape
    rows, columns = min(rows, max(row_blocks, 1)), min(columns, max(column_blocks, 1))  # not far past the matrix
    full = pad(exponents, (0, -column_blocks % columns, 0, -row_blocks % rows), value=neutral)
    return reduction(full.view(full.shape[0] // rows, rows, full.shape[1] // columns, columns), dim=(1, 3))


REFERENCES = {"quant.per_block_cast_lossless": per_block_cast_lossless}
