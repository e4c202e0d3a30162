"""CUDA kernels of ``quant.cast_back`` and ``quant.cast_back_e5m6``: ``y = q * sf``, bound by bandwidth.

A thread takes vectors of eight elements in the same columns of ``rows`` neighbouring rows, or of four in twice as many
rows where the result is fp32: so the stores of a warp leave no gaps. All its loads are in flight together. A vector
has one scale where the blocks allow it, else one for each element; rows of one block share them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tk_core.backend import Refused
from tk_core.formats import FLOAT_OUT, FORMAT_OF_DTYPE, ceil_div

from ..jit import Builder
from ..tile import access, groups, vectors
from ..tile.function import prim_func
from .per_token_cast import refuse_words

THREADS = 256
ROWS = 2
"""Rows that a thread takes where there are many."""
SMALL = 1 << 19
"""Elements up to which a thread takes one row, to keep every multiprocessor busy."""


class _Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        dtype, out_dtype: of the data and of the result.
        columns: logical columns.
        kind, block_rows, block_columns: how the scales are stored, and their block.
        load_width, store_width: widest access in bytes that rows of the data and of the result allow.
        rows: of a thread that takes eight columns.
    """

    dtype: Any
    out_dtype: Any
    columns: int
    kind: int
    block_rows: int
    block_columns: int
    load_width: int
    store_width: int
    rows: int


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = _Key(*key)
    kind = groups.element(k.dtype)
    vector = 4 if k.out_dtype == "float32" and k.dtype != "uint8" else 8
    count = k.rows * 8 // vector  # rows of a thread
    words = ceil_div(groups.words(k.dtype) * vector, 8)
    per_row = ceil_div(k.columns, vector)
    stored = {"int8": k.columns // 2, "uint8": k.columns // 2 * 3}.get(k.dtype, k.columns)
    factors = 1 if k.block_columns % vector == 0 or k.block_columns >= k.columns else vector
    scale_rows = 1 if k.block_rows % count == 0 else count  # rows of a thread with scales of their own
    rows, sf_rows, sf_columns = T.dynamic("rows"), T.dynamic("sf_rows"), T.dynamic("sf_columns")
    stride = T.dynamic("x_stride", "int64")
    s0, s1 = T.dynamic("sf_stride_0", "int64"), T.dynamic("sf_stride_1", "int64")
    x_type = T.StridedTensor((rows, stored), (stride, 1), k.dtype)
    sf_type = T.StridedTensor((sf_rows, sf_columns), (s0, s1), groups.sf_type(k.kind))
    y_type = T.Tensor((rows, k.columns), k.out_dtype)

    def cast_back(x: Any, sf: Any, y: Any) -> None:
        with T.Kernel(T.ceildiv(T.ceildiv(rows, count) * per_row, THREADS), threads=THREADS) as index:
            T.import_source(groups.SOURCE)
            flat = T.alloc_var("int32", init=index * THREADS + T.get_thread_binding())
            row0 = T.alloc_var("int32", init=T.truncdiv(flat, per_row) * count)
            column = T.alloc_var("int32", init=T.truncmod(flat, per_row) * vector)
            raw = T.alloc_local((count * words,), "uint32")
            scale = T.alloc_local((scale_rows * factors,), "float32")
            v = T.alloc_local((vector,), "float32")

            for r in T.unroll(count):
                T.call_extern(
                    "handle",
                    f"tk_fetch{vector}<{kind}, {k.load_width}>",
                    T.access_ptr(raw[r * words], "w", words),
                    T.access_ptr(x[row0 + r, 0], "r"),
                    column,
                    T.if_then_else(row0 + r < rows, k.columns, 0),
                )
            for r in T.unroll(scale_rows):
                for j in T.unroll(factors):
                    scale[r * factors + j] = T.call_extern(
                        "float32",
                        f"tk_sf_at<{k.kind}>",
                        T.access_ptr(sf[0, 0], "r"),
                        s0,
                        s1,
                        T.truncdiv(T.min(row0 + r, rows - 1), k.block_rows),
                        T.truncdiv(T.min(column + j, k.columns - 1), k.block_columns),
                    )
            for r in T.unroll(count):
                T.call_extern(
                    "handle",
                    f"tk_values{vector}<{kind}>",
                    T.access_ptr(v[0], "w", vector),
                    T.access_ptr(raw[r * words], "r", words),
                )
                for j in T.unroll(vector):
                    v[j] = T.ieee_mul(v[j], scale[r % scale_rows * factors + j % factors])
                T.call_extern(
                    "handle",
                    f"tk_store{vector}<{vectors.element(k.out_dtype)}, {k.store_width}>",
                    T.access_ptr(y[row0 + r, column], "w"),
                    T.access_ptr(v[0], "r", vector),
                    T.if_then_else(row0 + r < rows, k.columns - column, 0),
                )

    return prim_func(cast_back, x_type, sf_type, y_type)


# Every access is predicated where it is made.
_BACK = Builder("quant.cast_back", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


class CastBack:
    """Dequantize e4m3, e2m1 or e5m6 with scales in any layout."""

    revision = 1

    def refusal(
        self, x: Tensor, x_sf: Tensor, fmt: str, x_block_rows: int, x_block_columns: int, ue8m0_per_word: int
    ) -> str | None:
        return refuse_words(groups.sf_type(groups.sf_kind(x_sf, x_block_columns)) == "int32", ue8m0_per_word)

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
        x = access.unit_columns(x)
        columns = FORMAT_OF_DTYPE[x.dtype].logical(x.shape[1])
        key = _Key(
            x.dtype,
            FLOAT_OUT[fmt],
            columns,
            groups.sf_kind(x_sf, x_block_columns),
            access.bounded(x_block_rows, x.shape[0]),
            access.bounded(x_block_columns, columns),
            access.access_width(x),
            access.access_width(outs[0]),
            1 if x.shape[0] * columns <= SMALL else ROWS,
        )
        launch = _BACK.get(key, x.device)
        if launch is None:
            reason = self.refusal(x, x_sf, fmt, x_block_rows, x_block_columns, ue8m0_per_word)
            if reason is not None:
                raise Refused(reason)
            launch = _BACK.compile(key, x.device)
        launch(x, x_sf, outs[0])


KERNELS = {"quant.cast_back": CastBack()}


def _key(dtype: str, out: str, kind: int, block: tuple[int, int], **other: Any) -> _Key:
    return _Key(dtype, out, 7168, kind, *block, 16, 16, ROWS)._replace(**other)


CI_KEYS = [
    (_BACK, _key("float8_e4m3fn", "bfloat16", groups.SF_FLOAT, (1, 128))),
    (_BACK, _key("float8_e4m3fn", "float32", groups.SF_PACKED_ROWS, (32, 1), rows=1)),
    (_BACK, _key("int8", "bfloat16", groups.SF_PACKED, (32, 32))),
    (_BACK, _key("int8", "float32", groups.SF_E4M3, (3, 5), load_width=1, store_width=4)),
    (_BACK, _key("uint8", "bfloat16", groups.SF_FLOAT, (1, 7168))),
]
