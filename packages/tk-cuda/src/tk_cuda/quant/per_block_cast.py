"""CUDA kernels of ``quant.per_block_cast`` and its variants: one pass, bound by bandwidth.

``x`` is read once, into registers, in vectors of 16 bytes. The lanes of a warp take consecutive vectors of a row of a
block and as many rows as fit; ``warps`` warps share a block and meet in shared memory when there is more than one. A
thread block takes neighbouring blocks of a row of blocks. Where a vector does not divide a block's columns, or a warp
is larger than a block, a group of threads walks over each block twice, element by element.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core.backend import Refused
from tk_core.formats import FORMATS, is_column_major

from ..jit import Builder
from ..tile import access, block_scales, source
from ..tile.function import prim_func

_ROWS = 8
"""The most vectors of 16 bytes that a thread holds."""
_THREADS = 256
_SF_THREADS = 64
"""Threads of a thread block that only reads: 11% faster than 256 for blocks of 32 x 32."""
_THREADS_PER_SM = 1024
"""Threads that a multiprocessor shall hold: with eight vectors each, enough bytes are on their way."""
_SIZE = {"bfloat16": 2, "float32": 4}


class _Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        part: ``all``, only the scales (``sf``), or only the data for given scales (``data``).
        rounded, packed, padded: scales are powers of two; UE8M0 bytes in words; columns of the tensor are padded.
        load_width, store_width: widest access in bytes that rows of ``x`` and of the result allow.
        rows: vectors that a thread holds; 0 for the walk over elements.
        threads: in a thread block.
    """

    dtype: Any
    fmt: str
    block_rows: int
    block_columns: int
    part: str
    rounded: bool
    packed: bool
    padded: bool
    load_width: int
    store_width: int
    rows: int
    threads: int


def tiling(block_rows: int, block_columns: int, per_vector: int, wanted: int = _THREADS) -> tuple[int, int]:
    """Vectors that a thread holds (0: the blocks do not suit) and threads of a thread block, ``wanted`` if possible."""
    lanes, odd = divmod(block_columns, per_vector)
    if odd or lanes not in (1, 2, 4, 8, 16, 32) or block_rows % (32 // lanes):
        return 0, 32 if block_rows * block_columns <= 2048 else _THREADS
    vectors = block_rows // (32 // lanes)
    rows = max(r for r in range(1, _ROWS + 1) if vectors % r == 0)
    threads = vectors // rows * 32
    if threads > 1024:
        return 0, _THREADS
    return rows, threads * max(wanted // threads, 1)


def _build(*key: Any) -> Any:
    k = _Key(*key)
    return _build_vectors(k) if k.rows else _build_elements(k)


def _signature(k: _Key, body: Any) -> Any:
    """The TileLang function of a part, given what it does with ``(x, out, sf, clamp)``."""
    import tilelang.language as T

    rows, columns, stride = T.dynamic("rows"), T.dynamic("columns"), T.dynamic("row_stride", "int64")
    out_columns = T.dynamic("out_columns")
    sf_shape = (T.dynamic("sf_rows"), T.dynamic("sf_columns"))
    sf_strides = (T.dynamic("sf_stride_0", "int64"), T.dynamic("sf_stride_1", "int64"))
    x_type = T.StridedTensor((rows, columns), (stride, 1), k.dtype)
    sf_type = T.StridedTensor(sf_shape, sf_strides, "int32" if k.packed else "float32")
    out_type = T.Tensor((rows, out_columns), "float8_e4m3fn" if k.fmt == "e4m3" else "int8")

    def per_block_cast(x: Any, out: Any, sf: Any, clamp: Any) -> None:
        body(x, out, sf, clamp, rows, columns, *sf_strides)

    def per_block_cast_with_sf_only(x: Any, sf: Any, clamp: Any) -> None:
        body(x, None, sf, clamp, rows, columns, *sf_strides)

    def per_block_cast_with_precomputed_sf(x: Any, out: Any, sf: Any) -> None:
        body(x, out, sf, None, rows, columns, *sf_strides)

    if k.part == "sf":
        return prim_func(per_block_cast_with_sf_only, x_type, sf_type, T.float32)
    if k.part == "data":
        return prim_func(per_block_cast_with_precomputed_sf, x_type, out_type, sf_type)
    return prim_func(per_block_cast, x_type, out_type, sf_type, T.float32)


def _scale_macros(k: _Key) -> tuple[Any, Any]:
    """Macros: from the bits of an amax to the factor of the data, and the same written as a scale."""
    import tilelang.language as T

    qmax = FORMATS[k.fmt].qmax
    padded = T.bool(k.padded)

    def factor(amax: Any) -> Any:
        if k.rounded:
            return T.call_extern("float32", "tk_inv_ue8m0", T.call_extern("uint32", "tk_ue8m0", amax, T.float32(qmax)))
        return T.call_extern("float32", "tk_inv_plain", amax, T.float32(qmax))

    @T.macro
    def write_scale(sf: Any, s0: Any, s1: Any, row: Any, column: Any, rows: Any, columns: Any, amax: Any) -> None:
        if k.rounded:
            biased = T.call_extern("uint32", "tk_ue8m0", amax, T.float32(qmax))
            if not k.packed:
                value = T.call_extern("float32", "tk_sf_ue8m0", biased)
                T.call_extern(
                    "handle", "tk_put_sf", T.access_ptr(sf[0, 0], "w"), s0, s1, row, column, rows, padded, value
                )
            elif k.block_columns == 1:
                T.call_extern(
                    "handle", "tk_put_ue8m0_down<1>", T.access_ptr(sf[0, 0], "w"), s0, row, column, rows, biased
                )
            else:
                T.call_extern(
                    "handle",
                    "tk_put_ue8m0",
                    T.access_ptr(sf[0, 0], "w"),
                    s0,
                    s1,
                    row,
                    column,
                    rows,
                    columns,
                    padded,
                    biased,
                )
        else:
            value = T.call_extern("float32", "tk_sf_plain", amax, T.float32(qmax))
            T.call_extern("handle", "tk_put_sf", T.access_ptr(sf[0, 0], "w"), s0, s1, row, column, rows, padded, value)

    return factor, write_scale


def _build_vectors(k: _Key) -> Any:
    import tilelang.language as T

    size = _SIZE[k.dtype]
    per_vector = 16 // size
    codes = FORMATS[k.fmt].codes
    lanes = k.block_columns // per_vector
    step = 32 // lanes  # rows of a warp
    warps = k.block_rows // (step * k.rows)  # warps of a block
    blocks = k.threads // 32 // warps  # blocks of a thread block
    load = f"tk_load<16, {k.load_width}>"
    store = f"tk_store<{per_vector // codes}, {min(k.store_width, per_vector // codes)}>"
    factor, write_scale = _scale_macros(k)

    @T.macro
    def encode(words: Any, vectors: Any, i: Any, inv: Any) -> None:
        values = T.alloc_local((per_vector,), "float32")
        if size == 2:
            for j in T.unroll(4):
                values[2 * j] = T.ieee_mul(T.call_extern("float32", "tk_bf16_lo", vectors[4 * i + j]), inv)
                values[2 * j + 1] = T.ieee_mul(T.call_extern("float32", "tk_bf16_hi", vectors[4 * i + j]), inv)
        else:
            for j in T.unroll(4):
                values[j] = T.ieee_mul(T.reinterpret("float32", vectors[4 * i + j]), inv)
        if k.fmt == "e4m3":
            for j in T.unroll(per_vector // 4):
                words[j] = T.call_extern("uint32", "tk_e4m3x4", T.access_ptr(values[4 * j], "r", 4))
        elif size == 2 and k.rounded and k.part == "all":
            words[0] = T.call_extern("uint32", "tk_e2m1x8_short", T.access_ptr(values[0], "r", per_vector))
        else:
            name = "tk_e2m1x8" if per_vector == 8 else "tk_e2m1x4"
            # Only given scales can leave values that saturate.
            words[0] = T.call_extern("uint32", name, T.access_ptr(values[0], "r", per_vector), T.bool(k.part == "data"))

    @T.macro
    def block_amax(amax: Any, vectors: Any, shared: Any, block: Any, warp: Any, lane: Any) -> None:
        """The bits of the largest magnitude among all threads of a block, in each of them."""
        amax[0] = T.uint32(0)
        if size == 2:
            for i in T.unroll(4 * k.rows):
                amax[0] = T.call_extern("uint32", "tk_amax_bf16x2", amax[0], vectors[i])
            amax[0] = T.call_extern("uint32", "tk_amax_fold", amax[0])
        else:
            for i in T.unroll(4 * k.rows):
                amax[0] = T.max(amax[0], T.bitwise_and(vectors[i], T.uint32(0x7FFFFFFF)))
        amax[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(0xFFFFFFFF), amax[0])
        if warps > 1:
            if lane == 0:
                shared[block * warps + warp] = amax[0]
            T.sync_threads()
            for i in T.unroll(warps):
                amax[0] = T.max(amax[0], shared[block * warps + i])

    @T.macro
    def cast(x: Any, out: Any, sf: Any, clamp: Any, rows: Any, columns: Any, s0: Any, s1: Any) -> None:
        down, across = T.ceildiv(rows, k.block_rows), T.ceildiv(columns, k.block_columns)
        with T.Kernel(down * T.ceildiv(across, blocks), threads=k.threads) as index:
            T.import_source(source.SOURCE + access.SOURCE + block_scales.SOURCE)
            T.annotate_min_blocks_per_sm(max(_THREADS_PER_SM // k.threads, 1))
            thread = T.get_thread_binding()
            lane, warp, block = thread % 32, thread // 32 % warps, thread // 32 // warps
            groups = T.alloc_var("int32", init=T.ceildiv(across, blocks))
            block_row = T.alloc_var("int32", init=T.truncdiv(index, groups))
            block_column = T.alloc_var("int32", init=T.truncmod(index, groups) * blocks + block)
            column = T.alloc_var("int32", init=block_column * k.block_columns + lane % lanes * per_vector)
            row = T.alloc_var("int32", init=block_row * k.block_rows + warp * step + lane // lanes)
            count = T.alloc_var("int32", init=T.min(columns - column, per_vector))
            vectors = T.alloc_local((4 * k.rows,), "uint32")
            words = T.alloc_local((max(per_vector // 4, 1),), "uint32")
            amax = T.alloc_local((1,), "uint32")
            inv = T.alloc_var("float32", init=T.float32(0))
            shared = T.alloc_shared((k.threads // 32,), "uint32", scope="shared")

            for i in T.unroll(k.rows):
                T.call_extern(
                    "handle",
                    load,
                    T.access_ptr(vectors[4 * i], "w", 4),
                    T.access_ptr(x[row + i * warps * step, column], "r"),
                    T.if_then_else(row + i * warps * step < rows, count * size, 0),
                )
            if k.part == "data":
                if block_column < across:
                    inv = T.ieee_frcp(sf[block_row, block_column])
            else:
                block_amax(amax, vectors, shared, block, warp, lane)
                amax[0] = T.max(amax[0], T.reinterpret("uint32", clamp))
                inv = factor(amax[0])
                if thread % (32 * warps) == 0 and block_column < across:
                    write_scale(sf, s0, s1, block_row, block_column, down, across, amax[0])
            if k.part != "sf":
                for i in T.unroll(k.rows):
                    encode(words, vectors, i, inv)
                    T.call_extern(
                        "handle",
                        store,
                        T.access_ptr(out[row + i * warps * step, column // codes], "w"),
                        T.access_ptr(words[0], "r", max(per_vector // 4, 1)),
                        T.if_then_else(row + i * warps * step < rows, count // codes, 0),
                    )

    return _signature(k, cast)


def _build_elements(k: _Key) -> Any:
    import tilelang.language as T

    codes = FORMATS[k.fmt].codes
    # Two blocks of an odd number of columns share bytes of e2m1, so they are cast together.
    blocks = 2 if k.block_columns % codes else 1
    panel = blocks * k.block_columns
    teams = _THREADS // k.threads
    factor, write_scale = _scale_macros(k)

    def magnitude(x: Any, row: Any, column: Any) -> Any:
        bits = T.reinterpret("uint32", T.Cast("float32", x[row, column]))
        return T.bitwise_and(bits, T.uint32(0x7FFFFFFF))

    def value(x: Any, row: Any, column: Any, inv: Any) -> Any:
        return T.ieee_mul(T.Cast("float32", x[row, column]), inv)

    @T.macro
    def block_amax(amax: Any, x: Any, shared: Any, row0: Any, column0: Any, rows: Any, columns: Any) -> None:
        """The bits of the largest magnitude of the block at (row0, column0), in each thread of its team."""
        thread = T.get_thread_binding()
        amax[0] = T.uint32(0)
        for i in T.serial(T.ceildiv(k.block_rows * k.block_columns, k.threads)):
            at = i * k.threads + thread % k.threads
            row, column = row0 + at // k.block_columns, column0 + at % k.block_columns
            if at < k.block_rows * k.block_columns and row < rows and column < columns:
                amax[0] = T.max(amax[0], magnitude(x, row, column))
        amax[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(0xFFFFFFFF), amax[0])
        if k.threads > 32:
            T.sync_threads()
            if thread % 32 == 0:
                shared[thread // 32] = amax[0]
            T.sync_threads()
            for i in T.unroll(k.threads // 32):
                amax[0] = T.max(amax[0], shared[i])

    @T.macro
    def cast(x: Any, out: Any, sf: Any, clamp: Any, rows: Any, columns: Any, s0: Any, s1: Any) -> None:
        down, across = T.ceildiv(rows, k.block_rows), T.ceildiv(columns, k.block_columns)
        panels = T.ceildiv(across, blocks)
        with T.Kernel(T.ceildiv(down * panels, teams), threads=_THREADS) as index:
            T.import_source(source.SOURCE + block_scales.SOURCE)
            thread = T.get_thread_binding()
            team = T.alloc_var("int32", init=index * teams + thread // k.threads)
            width = T.alloc_var("int32", init=panels)
            block_row = T.alloc_var("int32", init=T.truncdiv(team, width))
            block_column = T.alloc_var("int32", init=T.truncmod(team, width) * blocks)
            row0 = T.alloc_var("int32", init=block_row * k.block_rows)
            column0 = T.alloc_var("int32", init=block_column * k.block_columns)
            inv = T.alloc_local((2,), "float32")
            pair = T.alloc_local((2,), "float32")
            amax = T.alloc_local((1,), "uint32")
            shared = T.alloc_shared((_THREADS // 32,), "uint32", scope="shared")

            for b in T.unroll(blocks):
                if k.part == "data":
                    if block_row < down and block_column + b < across:
                        inv[b] = T.ieee_frcp(sf[block_row, block_column + b])
                else:
                    block_amax(amax, x, shared, row0, column0 + b * k.block_columns, rows, columns)
                    amax[0] = T.max(amax[0], T.reinterpret("uint32", clamp))
                    inv[b] = factor(amax[0])
                    if thread % k.threads == 0 and block_row < down and block_column + b < across:
                        write_scale(sf, s0, s1, block_row, block_column + b, down, across, amax[0])
            if k.part != "sf":
                for i in T.serial(T.ceildiv(k.block_rows * (panel // codes), k.threads)):
                    at = i * k.threads + thread % k.threads
                    row = row0 + at // (panel // codes)
                    c = at % (panel // codes) * codes
                    if at < k.block_rows * (panel // codes) and row < rows and column0 + c < columns:
                        for j in T.unroll(codes):
                            pair[j] = value(
                                x,
                                row,
                                column0 + c + j,
                                T.if_then_else(c + j < k.block_columns, inv[0], inv[blocks - 1]),
                            )
                        out[row, (column0 + c) // codes] = (
                            T.reinterpret(
                                "float8_e4m3fn", T.Cast("uint8", T.call_extern("uint32", "tk_e4m3x1", pair[0]))
                            )
                            if codes == 1
                            else T.Cast("int8", T.call_extern("uint32", "tk_e2m1x2", pair[0], pair[1]))
                        )

    return _signature(k, cast)


# Every access is predicated where it is made.
_CAST = Builder("quant.per_block_cast", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


def _launcher(
    x: Tensor, out: Tensor | None, sf: Tensor, fmt: str, block: tuple[int, int], part: str, rounded: bool, packed: bool
) -> Any:
    block = access.bounded(block[0], x.shape[0]), access.bounded(block[1], x.shape[1])
    rows, threads = tiling(*block, 16 // x.element_size(), _SF_THREADS if part == "sf" else _THREADS)
    key = _Key(
        x.dtype,
        fmt,
        *block,
        part,
        rounded,
        packed,
        is_column_major(sf),
        access.access_width(x),
        access.access_width(out, 8) if out is not None else 0,
        rows,
        threads,
    )
    return _CAST.get(key, x.device) or _CAST.compile(key, x.device)


class PerBlockCast:
    """Data and scales, or (``sf_only``) the scales alone."""

    revision = 1

    def __init__(self, sf_only: bool) -> None:
        self.sf_only = sf_only

    def refusal(
        self,
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
    ) -> str | None:
        if use_packed_ue8m0 and ue8m0_per_word != 4:
            return f"packs 4 scales in a word, the layout asks for {ue8m0_per_word}"
        return None

    def __call__(self, outs: tuple[Tensor, ...], *args: Any) -> None:
        x, fmt, block_rows, block_columns, _, round_sf, packed, clamp_min, _, _ = args
        reason = self.refusal(*args)
        if reason is not None:
            raise Refused(reason)
        out, sf = (None, outs[0]) if self.sf_only else outs
        part = "sf" if self.sf_only else "all"
        launch = _launcher(x, out, sf, fmt, (block_rows, block_columns), part, round_sf, packed)
        if out is None:
            launch(x, sf, clamp_min)
        else:
            launch(x, out, sf, clamp_min)


class PerBlockCastWithPrecomputedSf:
    """Data for given scales."""

    revision = 1

    def refusal(self, x: Tensor, sf: Tensor, fmt: str, block_rows: int, block_columns: int) -> str | None:
        return None

    def __call__(
        self, outs: tuple[Tensor, ...], x: Tensor, sf: Tensor, fmt: str, block_rows: int, block_columns: int
    ) -> None:
        launch = _launcher(x, outs[0], sf, fmt, (block_rows, block_columns), "data", False, False)
        launch(x, outs[0], sf)


KERNELS = {
    "quant.per_block_cast": PerBlockCast(sf_only=False),
    "quant.per_block_cast_with_sf_only": PerBlockCast(sf_only=True),
    "quant.per_block_cast_with_precomputed_sf": PerBlockCastWithPrecomputedSf(),
}

CI_KEYS = [
    (_CAST, _Key(torch.bfloat16, "e4m3", 128, 128, "all", True, True, True, 16, 8, 8, 256)),
    (_CAST, _Key(torch.float32, "e2m1", 32, 32, "all", False, False, False, 16, 8, 8, 256)),
    (_CAST, _Key(torch.bfloat16, "e2m1", 32, 32, "data", False, False, False, 16, 8, 4, 256)),
    (_CAST, _Key(torch.bfloat16, "e2m1", 7, 5, "all", True, True, False, 2, 1, 0, 32)),
    (_CAST, _Key(torch.float32, "e4m3", 128, 129, "sf", False, False, True, 4, 0, 0, 256)),
]
