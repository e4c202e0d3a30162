"""Checks that every cast with scales shares: the flags of the output, and quantized input."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..errors import InvalidDtypeError
from ..formats import FORMAT_OF_DTYPE, PACKED_DTYPE, ceil_div


class QuantTensor(NamedTuple):
    """Quantized data with its scale factors, ``x ≈ data * sf`` block by block. Any 2-tuple is accepted as one.

    Attributes:
        data: float8_e4m3fn codes ``(M, K)``; or int8 ``(M, K / 2)`` with two e2m1 codes in a byte, even column in the
            low nibble; or uint8 ``(M, 3 K / 2)`` with packed e5m6 codes.
        sf: the scales, in one of the layouts of docs/numerics.md, "Scale factors".
    """

    data: Tensor
    sf: Tensor


def split(op: str, x: Tensor | QuantTensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """A plain tensor, or the data and scales of a quantized one."""
    if isinstance(x, Tensor):
        return x, None
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], Tensor) and isinstance(x[1], Tensor):
        return x[0], x[1]
    raise InvalidDtypeError(f"{op}: x must be a tensor or a pair (data, sf) of tensors, got {type(x).__name__}")


def check_flags(op: str, round_sf: bool, use_packed_ue8m0: bool, use_e4m3_sf: bool = False) -> None:
    """Packed UE8M0 holds powers of two only; e4m3 scales are rounded in their own way."""
    checks.requires(op, "use_packed_ue8m0", use_packed_ue8m0, "round_sf", round_sf)
    checks.excludes(op, "use_e4m3_sf", use_e4m3_sf, "round_sf", round_sf)


def check_quantized(
    op: str, data: Tensor, sf: Tensor, block_rows: int, block_columns: int, ue8m0_per_word: int, name: str = "x"
) -> tuple[int, int]:
    """Check a quantized matrix against its block size; returns its logical ``(M, K)``."""
    checks.dtype(op, f"{name}[0]", data, tuple(FORMAT_OF_DTYPE))
    checks.rank(op, f"{name}[0]", data, "(M, K)")
    checks.last_stride_1(op, f"{name}[0]", data)
    rows, columns = data.shape[0], FORMAT_OF_DTYPE[data.dtype].logical(data.shape[1])
    word = PACKED_DTYPE[ue8m0_per_word]
    checks.dtype(op, f"{name}[1]", sf, (torch.float32, torch.float8_e4m3fn, word))
    checks.same_device(op, f"{name}[1]", sf, data.device, f"{name}[0]")
    row_blocks, column_blocks = ceil_div(rows, block_rows), ceil_div(columns, block_columns)
    letters = "blocks of x"
    if sf.dtype == word:
        letters = f"blocks of x, {ue8m0_per_word} packed in a word"
        if block_columns == 1:
            row_blocks = ceil_div(row_blocks, ue8m0_per_word)
        else:
            column_blocks = ceil_div(column_blocks, ue8m0_per_word)
    checks.shape(op, f"{name}[1]", sf, (row_blocks, column_blocks), letters)
    if sf.numel() and sf.stride(0) != 1 and sf.stride(1) != 1 and sf.shape[1] > 1:
        checks.invalid(op, f"{name}[1]", "be row-major or column-major", f"strides {tuple(sf.stride())}")
    return rows, columns
