"""Checks that every cast with scales shares: the flags of the output, and quantized input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..errors import InvalidDtypeError
from ..formats import E2M1, E4M3, FORMATS, PACKED_DTYPE, Format, ceil_div, is_column_major
from ..op import Operator


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


def split_quantized(op: str, x: QuantTensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The data and scales of a quantized tensor."""
    data, sf = split(op, x)
    if sf is None:
        raise InvalidDtypeError(f"{op}: x must be a pair (data, sf) of tensors, got Tensor")
    return data, sf


def check_flags(op: str, round_sf: bool, use_packed_ue8m0: bool, use_e4m3_sf: bool = False) -> None:
    """Packed UE8M0 holds powers of two only; e4m3 scales are rounded in their own way."""
    checks.requires(op, "use_packed_ue8m0", use_packed_ue8m0, "round_sf", round_sf)
    checks.excludes(op, "use_e4m3_sf", use_e4m3_sf, "round_sf", round_sf)


def check_plain(op: str, x: Tensor, name: str = "x") -> int:
    """Check a matrix to quantize; returns its columns."""
    checks.is_tensor(op, name, x)
    checks.dtype(op, name, x, (torch.bfloat16, torch.float32))
    checks.rank(op, name, x, "(M, K)")
    checks.last_stride_1(op, name, x)
    return x.shape[1]


def check_format(op: str, fmt: str, columns: int) -> None:
    """Check an output format against the columns of a matrix: e2m1 codes come in pairs."""
    checks.one_of(op, "fmt", fmt, ("e4m3", "e2m1"))
    if columns % FORMATS[fmt].codes:
        checks.invalid(op, "x", f"have an even number of columns for {fmt}", columns)


def check_block(op: str, name: str, rows: int, columns: int) -> None:
    """Check the size of a block."""
    checks.at_least(op, f"{name}[0]", rows, 1)
    checks.at_least(op, f"{name}[1]", columns, 1)


def block(op: str, name: str, size: tuple[int, int]) -> tuple[int, int]:
    """The rows and columns of a block size."""
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        checks.invalid(op, name, "be a pair (rows, columns)", repr(size))
    for i, value in enumerate(size):
        checks.is_int(op, f"{name}[{i}]", value)
    return size[0], size[1]


def check_precomputed(op: str, x: Tensor, sf: Tensor, block_rows: int, block_columns: int) -> None:
    """Check given scales: unpacked, row-major with any row stride, one for each block."""
    checks.is_tensor(op, "sf", sf)
    checks.dtype(op, "sf", sf, (torch.float32, torch.float8_e4m3fn))
    checks.same_device(op, "sf", sf, x.device)
    expected = (ceil_div(x.shape[0], block_rows), ceil_div(x.shape[1], block_columns))
    checks.shape(op, "sf", sf, expected, "blocks of x")
    checks.last_stride_1(op, "sf", sf)


def check_precomputed_flags(
    op: str, sf: Tensor, use_tma_aligned_col_major_sf: bool, use_packed_ue8m0: bool, use_e4m3_sf: bool
) -> None:
    """Flags of a cast with given scales: they describe ``sf``, which must be row-major and unpacked."""
    checks.excludes(op, "sf", True, "use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    checks.excludes(op, "sf", True, "use_packed_ue8m0", use_packed_ue8m0)
    checks.is_tensor(op, "sf", sf)
    checks.dtype(op, "sf", sf, (torch.float8_e4m3fn if use_e4m3_sf else torch.float32,))


def check_quantized(
    op: str,
    data: Tensor,
    sf: Tensor,
    block_rows: int,
    block_columns: int,
    ue8m0_per_word: int,
    name: str = "x",
    formats: Sequence[Format] = (E4M3, E2M1),
) -> tuple[int, int]:
    """Check a quantized matrix against its block size; returns its logical ``(M, K)``."""
    check_block(op, f"{name}_block_size", block_rows, block_columns)
    checks.dtype(op, f"{name}[0]", data, [f.dtype for f in formats])
    checks.rank(op, f"{name}[0]", data, "(M, K)")
    checks.last_stride_1(op, f"{name}[0]", data)
    fmt = next(f for f in formats if f.dtype == data.dtype)
    if data.shape[1] % fmt.storage:
        checks.invalid(op, f"{name}[0]", f"have a multiple of {fmt.storage} columns for {fmt.name}", data.shape[1])
    rows, columns = data.shape[0], fmt.logical(data.shape[1])
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
    if sf.numel() and sf.stride(1) != 1 and sf.shape[1] > 1:
        if not is_column_major(sf):
            checks.invalid(op, f"{name}[1]", "be row-major or column-major", f"strides {tuple(sf.stride())}")
        if sf.dtype == word and block_columns == 1:
            checks.invalid(op, f"{name}[1]", "be row-major where rows are packed", f"strides {tuple(sf.stride())}")
    return rows, columns


def run_into(op: Operator, outs: Sequence[Tensor | None], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Run into the caller's buffers, the last of which is the scale tensor and may have any row stride."""
    sf = outs[-1]
    if (
        not isinstance(sf, Tensor)
        or sf.layout != torch.strided
        or sf.dim() != 2
        or sf.stride(1) != 1
        or sf.is_contiguous()
    ):
        return op.into(outs, *args)
    op.check(*args)
    spec = op.outputs(*args)[-1]
    name = f"out[{len(outs) - 1}]" if len(outs) > 1 else "out_sf"
    checks.dtype(op.name, name, sf, (spec.dtype,))
    checks.shape(op.name, name, sf, spec.shape)
    checks.same_device(op.name, name, sf, args[0].device)
    checks.distinct_elements(op.name, name, sf)
    for other_name, other in zip((*op.parameters, "out[0]"), (*args, *outs[:-1])):
        if isinstance(other, Tensor):
            checks.disjoint(op.name, name, sf, other_name, other)
    results = op.into((*outs[:-1], None), *args)
    sf.copy_(results[-1])
    return (*results[:-1], sf)


def pair_of_buffers(
    op: str, out: tuple[Tensor | None, Tensor | None], use_tma_aligned_col_major_sf: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The ``out=`` argument of a cast: a pair, with row-major scales if any."""
    if not isinstance(out, tuple) or len(out) != 2:
        checks.invalid(op, "out", "be a pair (data, sf), each a tensor or None", type(out).__name__)
    checks.excludes(op, "out[1]", out[1] is not None, "use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    return out
