"""cast_back: each vector core takes spans of rows in turn.

Codes are copied to UB. The scales of the blocks of a span, of any layout, are read from global memory by one SIMT
thread each; then one thread takes each value, or each two that share a byte.

Bytes: codes and scales once in, values once out.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core.formats import FORMAT_OF_DTYPE

from ..jit import Builder, vector_cores
from ..tile import decode, scale_tensors
from ..tile.indices import SPAN, THREADS, kept, within

_GROUPS = {"e4m3": (1, 1), "e2m1": (2, 1), "e5m6": (2, 3)}
"""Values, and bytes that hold them, of one thread, by format."""


def _build(fmt: str, out_dtype: str, cores: int):
    from tilelang.ascend import language as T

    count, size = _GROUPS[fmt]
    stored_span = SPAN // count * size
    rows, columns, stored, ld = (T.dynamic(n) for n in ("rows", "columns", "stored", "ld"))
    wide_size, narrow_size = T.dynamic("wide_size"), T.dynamic("narrow_size")

    def values_of(codes: Any, group: Any) -> list[Any]:
        """The values of one thread."""
        places = [group * size + j for j in range(size)]
        if fmt == "e5m6":  # a big-endian stream of 12-bit codes in little-endian words
            places = [place ^ 3 for place in places]
        data = [kept(T, T.Cast(T.int32, codes[within(T, place, stored_span)])) for place in places]
        if fmt == "e4m3":
            return [decode.e4m3(T, data[0])]
        if fmt == "e2m1":
            return [decode.e2m1(T, data[0] & 15), decode.e2m1(T, data[0] >> 4)]
        pair = ((data[0] << 4) | (data[1] >> 4), ((data[1] & 15) << 8) | data[2])
        return [decode.e5m6(T, kept(T, code)) for code in pair]

    def dequantize(
        codes: Any, scales: Any, values: Any, place: Any, start: Any, first: Any, block_columns: Any
    ) -> None:
        """The work of one thread."""
        group = kept(T, place)
        for i, value in enumerate(values_of(codes, group)):
            block = T.truncdiv(start + group * count + i, block_columns) - first
            scaled = value * scales[within(T, block, SPAN)]
            T.buffer_store(values, T.Cast(out_dtype, scaled), [place * count + i])

    @T.prim_func
    def cast_back(
        x: T.StridedTensor((rows, stored), (ld, 1), T.uint8),
        y: T.Tensor((rows, columns), out_dtype),
        wide: T.Tensor((wide_size,), T.float32),
        narrow: T.Tensor((narrow_size,), T.uint8),
        kind: T.int32,
        row_stride: T.int64,
        column_stride: T.int64,
        row_bit: T.int32,
        column_bit: T.int32,
        block_rows: T.int32,
        block_columns: T.int32,
        spans: T.int32,
    ):
        with T.Kernel(cores) as core:
            codes = T.alloc_shared((stored_span,), T.uint8)
            scales = T.alloc_shared((SPAN,), T.float32)
            values = T.alloc_shared((SPAN,), out_dtype)
            for row, part in T.Persistent([rows, spans], cores, core, group_size=1, num_stages=2):
                width = T.min(SPAN, columns - part * SPAN)
                stored_width = T.min(stored_span, stored - part * stored_span)
                T.copy(x[row, part * stored_span : part * stored_span + stored_width], codes[0:stored_width])
                with T.SimtVF(threads=THREADS):
                    block_row = kept(T, T.truncdiv(row, block_rows))
                    start = kept(T, part * SPAN)
                    first = kept(T, T.truncdiv(start, block_columns))
                    blocks = kept(T, T.truncdiv(start + width - 1, block_columns) - first + 1)
                    for step in T.serial(SPAN // THREADS):
                        for thread in T.Parallel(THREADS):
                            if step * THREADS + thread < blocks:
                                at = scale_tensors.offset(
                                    T,
                                    block_row,
                                    first + step * THREADS + thread,
                                    (row_stride, column_stride),
                                    (row_bit, column_bit),
                                )
                                scales[step * THREADS + thread] = scale_tensors.load(T, wide, narrow, kind, at)
                    T.sync_threads()
                    groups = kept(T, T.truncdiv(width, count))
                    for step in T.serial(SPAN // count // THREADS):
                        for thread in T.Parallel(THREADS):
                            if step * THREADS + thread < groups:
                                dequantize(codes, scales, values, step * THREADS + thread, start, first, block_columns)
                T.copy(values[0:width], y[row, part * SPAN : part * SPAN + width])

    return cast_back


_CAST_BACK = Builder("quant.cast_back", _build)


class CastBack:
    """``quant.cast_back`` and ``quant.cast_back_e5m6``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        x_sf: Tensor,
        fmt: str,
        x_block_rows: int,
        x_block_columns: int,
        ue8m0_per_word: int,
    ) -> None:
        (y,) = outs
        rows, columns = y.shape
        _CAST_BACK(
            (FORMAT_OF_DTYPE[x.dtype].name, y.dtype, vector_cores(x.device)),
            x.view(torch.uint8),
            y,
            *scale_tensors.arguments(x_sf, x_block_columns == 1),
            min(x_block_rows, rows),
            min(x_block_columns, columns),
            -(-columns // SPAN),
        )


KERNELS: dict[str, Any] = {"quant.cast_back": CastBack()}
