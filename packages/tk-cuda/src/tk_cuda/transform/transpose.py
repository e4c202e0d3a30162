"""CUDA kernel of ``transform.transpose`` and ``transform.batched_transpose``: a copy of bits, bound by bandwidth.

A block of 256 threads moves a tile of 128 columns by as many rows as make 128 bytes of a transposed row (32 words).
Each thread loads four 16-byte vectors, transposes in registers until every 32-bit word holds consecutive rows of one
column, and passes the words through shared memory; it then stores four 16-byte vectors of transposed rows. The word of
column ``c`` and row word ``r`` lies at ``33 c + 4 (c / 32) + r``, which spreads both directions over all banks.
Neighbouring blocks take tiles one below the other, so that what they write together is contiguous: 6% faster than the
other order. Rows or pointers that are not aligned to 16 bytes are accessed in narrower pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..jit import Builder
from ..tile import access
from ..tile.function import prim_func

_COLUMNS = 128
_WORDS = 32
_THREADS = 256
_BYTES = {
    "float8_e4m3fn": 1,
    "uint8": 1,
    "int8": 1,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float32": 4,
    "int32": 4,
    "int64": 8,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NATIVE = frozenset(getattr(torch, name) for name in _BYTES)


def _build(dtype: str, batched: bool, load_width: int, store_width: int) -> Any:
    import tilelang.language as T

    size = _BYTES[dtype]
    per_vector = 16 // size
    words_per_element = max(size // 4, 1)
    rows_per_unit = max(4 // size, 1)  # rows that a thread turns into words
    units = _WORDS // words_per_element  # units of a tile, from top to bottom
    tile_rows = units * rows_per_unit
    panels = _COLUMNS // (8 * per_vector)  # panels of a tile from left to right, 128 bytes wide each
    panels_per_pass = _THREADS // 8 // units
    columns_per_pass = _THREADS // 8
    load = f"tk_load<16, {load_width}>"
    store = f"tk_store<16, {store_width}>"

    batch, rows, columns = T.dynamic("batch"), T.dynamic("rows"), T.dynamic("columns")
    batch_stride, row_stride = T.dynamic("batch_stride", "int64"), T.dynamic("row_stride", "int64")

    def permute(a: Any, b: Any, selector: int) -> Any:
        return T.call_extern("uint32", "__byte_perm", a, b, T.uint32(selector))

    @T.macro
    def transpose_words(words: Any, vectors: Any, base: Any) -> None:
        """Turn the rows of a unit into words of one column each."""
        if size >= 4:
            for j in T.unroll(4):
                words[j] = vectors[base + j]
        elif size == 2:
            for j in T.unroll(4):
                words[2 * j] = permute(vectors[base + j], vectors[base + 4 + j], 0x5410)
                words[2 * j + 1] = permute(vectors[base + j], vectors[base + 4 + j], 0x7632)
        else:
            low = T.alloc_local((2,), "uint32")
            high = T.alloc_local((2,), "uint32")
            for j in T.unroll(4):
                for h in T.unroll(2):
                    low[h] = permute(vectors[base + 8 * h + j], vectors[base + 8 * h + 4 + j], 0x5140)
                    high[h] = permute(vectors[base + 8 * h + j], vectors[base + 8 * h + 4 + j], 0x7362)
                words[4 * j] = permute(low[0], low[1], 0x5410)
                words[4 * j + 1] = permute(low[0], low[1], 0x7632)
                words[4 * j + 2] = permute(high[0], high[1], 0x5410)
                words[4 * j + 3] = permute(high[0], high[1], 0x7632)

    @T.macro
    def move_tile(x: Any, out: Any, index: Any, row0: Any, column0: Any) -> None:
        """Transpose the tile at (row0, column0) of the matrix at ``index``, a tuple of no or one batch index."""
        T.import_source(access.SOURCE)
        thread = T.get_thread_binding()
        vectors = T.alloc_local((4 * 4,), "uint32")
        words = T.alloc_local((max(per_vector, 4),), "uint32")
        tile = T.alloc_shared((_COLUMNS * 33 + _COLUMNS // 32 * 4,), "uint32", scope="shared")
        unit = thread // 8 % units
        first_column = (thread // 8 // units * 8 + thread % 8) * per_vector

        for i in T.unroll(panels // panels_per_pass):
            for j in T.unroll(rows_per_unit):
                row = row0 + unit * rows_per_unit + j
                column = column0 + i * panels_per_pass * 8 * per_vector + first_column
                T.call_extern(
                    "handle",
                    load,
                    T.access_ptr(vectors[(i * rows_per_unit + j) * 4], "w", 4),
                    T.access_ptr(x[index + (row, column)], "r"),
                    T.if_then_else(row < rows, T.min(columns - column, per_vector), 0) * size,
                )
        for i in T.unroll(panels // panels_per_pass):
            transpose_words(words, vectors, i * rows_per_unit * 4)
            for j in T.unroll(per_vector):
                for h in T.unroll(words_per_element):
                    c = i * panels_per_pass * 8 * per_vector + first_column + j
                    tile[c * 33 + c // 32 * 4 + unit * words_per_element + h] = words[j * words_per_element + h]
        T.sync_threads()
        for i in T.unroll(_COLUMNS // columns_per_pass):
            c = i * columns_per_pass + thread // 8
            row = row0 + thread % 8 * per_vector
            for j in T.unroll(4):
                vectors[i * 4 + j] = tile[c * 33 + c // 32 * 4 + thread % 8 * 4 + j]
            T.call_extern(
                "handle",
                store,
                T.access_ptr(out[index + (column0 + c, row)], "w"),
                T.access_ptr(vectors[i * 4], "r", 4),
                T.if_then_else(column0 + c < columns, T.min(rows - row, per_vector), 0) * size,
            )

    def transpose(x: Any, out: Any) -> None:
        with T.Kernel(T.ceildiv(rows, tile_rows) * T.ceildiv(columns, _COLUMNS), threads=_THREADS) as block:
            down = T.alloc_var("int32", init=T.ceildiv(rows, tile_rows))
            move_tile(x, out, (), T.truncmod(block, down) * tile_rows, T.truncdiv(block, down) * _COLUMNS)

    def batched_transpose(x: Any, out: Any) -> None:
        with T.Kernel(batch * T.ceildiv(rows, tile_rows) * T.ceildiv(columns, _COLUMNS), threads=_THREADS) as block:
            across = T.alloc_var("int32", init=T.ceildiv(columns, _COLUMNS))
            down = T.alloc_var("int32", init=T.ceildiv(rows, tile_rows))
            line = T.alloc_var("int32", init=T.truncdiv(block, down))
            move_tile(
                x,
                out,
                (T.truncdiv(line, across),),
                T.truncmod(block, down) * tile_rows,
                T.truncmod(line, across) * _COLUMNS,
            )

    if batched:
        return prim_func(
            batched_transpose,
            T.StridedTensor((batch, rows, columns), (batch_stride, row_stride, 1), dtype),
            T.Tensor((batch, columns, rows), dtype),
        )
    return prim_func(
        transpose,
        T.StridedTensor((rows, columns), (row_stride, 1), dtype),
        T.Tensor((columns, rows), dtype),
    )


# Every access is predicated where it is made.
_TRANSPOSE = Builder("transform.transpose", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


class Transpose:
    """Transpose the last two dimensions."""

    revision = 1

    def __init__(self, batched: bool) -> None:
        self.batched = batched

    def refusal(self, x: Tensor) -> str | None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], x: Tensor) -> None:
        out = outs[0]
        if x.dtype not in _NATIVE:
            bits = _BITS[x.element_size()]
            x, out = x.view(bits), out.view(bits)
        key = (x.dtype, self.batched, access.access_width(x), access.access_width(out))
        launch = _TRANSPOSE.get(key, x.device)
        if launch is None:
            launch = _TRANSPOSE.compile(key, x.device)
        launch(x, out)


KERNELS = {"transform.transpose": Transpose(batched=False)}

CI_KEYS = [
    (_TRANSPOSE, ("float8_e4m3fn", False, 16, 16)),
    (_TRANSPOSE, ("bfloat16", True, 16, 2)),
    (_TRANSPOSE, ("float32", True, 8, 16)),
    (_TRANSPOSE, ("int64", False, 16, 16)),
]
