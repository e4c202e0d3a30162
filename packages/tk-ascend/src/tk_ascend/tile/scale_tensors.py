"""Scale tensors in any layout: seen as flat memory by kernels, so that one kernel serves all layouts."""

from typing import Any

import torch
from torch import Tensor

from . import decode
from .indices import kept
from .memory import spanned

FP32, E4M3, UE8M0 = 0, 1, 2
"""Kinds of scales; UE8M0 bytes are packed in pairs along the columns or the rows."""


def arguments(sf: Tensor, pack_rows: bool = False) -> tuple[Any, ...]:
    """What a kernel takes for a scale tensor ``(row blocks, column blocks)``.

    Returns:
        The scales as fp32 and as bytes (one of them a stand-in), their kind, the strides of rows and columns, and
        whether the low bit of the row, or of the column, chooses a byte of a word.
    """
    row_stride, column_stride = sf.stride()
    if sf.dtype == torch.float32:
        return spanned(sf), sf.new_empty(1, dtype=torch.uint8), FP32, row_stride, column_stride, 0, 0
    stand_in = sf.new_empty(1, dtype=torch.float32)
    memory = spanned(sf).view(torch.uint8)
    if sf.dtype == torch.float8_e4m3fn:
        return stand_in, memory, E4M3, row_stride, column_stride, 0, 0
    return stand_in, memory, UE8M0, 2 * row_stride, 2 * column_stride, int(pack_rows), int(not pack_rows)


def offset(T: Any, row: Any, column: Any, strides: tuple[Any, Any], bits: tuple[Any, Any]) -> Any:
    """Where the scale of a block lies in the flat view."""
    row, column = kept(T, row), kept(T, column)
    words = (row >> bits[0]) * strides[0] + (column >> bits[1]) * strides[1]
    return kept(T, words + (row & bits[0]) + (column & bits[1]))


def load(T: Any, wide: Any, narrow: Any, kind: Any, at: Any) -> Any:
    """The fp32 value of the scale at an offset."""
    byte = kept(T, T.if_then_else(kind == FP32, T.int32(0), T.Cast(T.int32, narrow[at])))
    other = T.if_then_else(kind == E4M3, decode.e4m3(T, byte), decode.ue8m0(T, byte))
    return kept(T, T.if_then_else(kind == FP32, wide[at], other))
