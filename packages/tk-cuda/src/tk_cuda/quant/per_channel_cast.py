"""CUDA kernel of ``quant.per_channel_cast`` and its fused and transposing forms: one pass, bound by bandwidth.

A thread block takes 64 columns, or 128 to be transposed, of ``blocks`` blocks of ``num_per_tokens`` rows, 128 rows
where they fit. Each thread reads one vector of columns from ``rows`` consecutive rows into registers; partial amaxes
meet in shared memory, threads make the scales and their inverses, and every thread encodes what it holds.
The transposing form turns four rows of a column into a word and writes rows of the result through shared memory, the
word of column ``c`` and row word ``r`` at ``33 c + skew + r``, which spreads both directions over the banks. Rows of
e4m3 whose scales are powers of two not far apart are scaled in pairs of fp16, which is exact. Where blocks or groups do
not suit, a thread walks down one column twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core.backend import Refused
from tk_core.formats import E4M3

from ..jit import Builder
from ..tile import access, block_scales, source
from ..tile.function import prim_func

_COLUMNS, _TRANSPOSED_COLUMNS = 64, 128
"""Columns of a thread block."""
_MOST_THREADS = 1024
"""Threads of a block."""
_BLOCK_ROWS = 128
"""Rows of a thread block, for smaller blocks of rows: of a transposed result, whole 128-byte lines."""
_ROWS = 8
"""The most rows that a thread holds."""
_THREADS_PER_SM = 1024
"""Threads that a multiprocessor shall hold: with eight vectors each, enough bytes are on their way."""
_SOURCE = r"""
// The first `bytes` of vectors in rows `stride` bytes apart, of which `rows` exist; zeros for the others.
template <int kRows, int kVector, int kWidth>
TK_FN void tk_load_rows(unsigned* words, const void* p, long long stride, int rows, int bytes) {
  const char* row = static_cast<const char*>(p);
  if (rows >= kRows && bytes >= kVector) {  // without a predicate for each
#pragma unroll
    for (int i = 0; i < kRows; ++i, row += stride) {
      tk_load<kVector, kWidth>(words + i * ((kVector + 3) / 4), row, kVector);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i, row += stride) {
      tk_load<kVector, kWidth>(words + i * ((kVector + 3) / 4), row, i < rows ? bytes : 0);
    }
  }
}
// fp16 holds an e4m3 times 2^e for e from -15 up. These functions work on pairs of columns, in 8 columns of kRows rows
// whose scales are powers of two (with kZeros, or 0 for a row of zeros); they return true, and have done nothing, where
// that fails.
template <int kRows, bool kZeros>
TK_FN bool tk_scale_range(unsigned* least, unsigned* most, const float* scales) {
  unsigned any = 0u;
  *most = 0u;
  *least = 0xffffffffu;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const unsigned bits = tk_bits(scales[i]);
    any |= bits;
    *most = max(*most, bits);
    *least = min(*least, kZeros ? bits - 1u : bits);  // the largest number for a zero
  }
  if (kZeros) *least += 1u;
  return (any & 0x807fffffu) || *most == 0u || *least == 0u || *most >= 0x7f800000u;
}
TK_FN unsigned tk_scaled_pair(unsigned pair, unsigned powers) {
  unsigned out = pair;
#ifdef __CUDA_ARCH__
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(powers));
#endif
  return out;
}
// Bits of the largest magnitudes of the columns.
template <int kRows, bool kZeros>
TK_FN bool tk_scaled_amax(unsigned* amax, const unsigned* words, const float* scales) {
  unsigned least, most;
  if (tk_scale_range<kRows, kZeros>(&least, &most, scales) || most - least > 14u << 23) return true;
#ifdef TK_HAS_FP8
  unsigned acc[4] = {0u, 0u, 0u, 0u};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const unsigned bits = tk_bits(scales[i]);
    const unsigned powers = (((kZeros && !bits ? most : bits) - most + (15u << 23)) >> 13) * 0x10001u;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      unsigned pairs[2];
      tk_e4m3x4_to_f16(pairs, words[2 * i + j / 2] & 0x7f7f7f7fu);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(acc[j + h]) : "r"(tk_scaled_pair(pairs[h], powers)));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) amax[j] = tk_bits(__fmul_rn(tk_from_f16(acc[j / 2] >> (j % 2 * 16)), tk_float(most)));
  return false;
#else
  return true;
#endif
}
// Codes of the rows times their scales and the factors of the columns, powers of two.
template <int kRows, bool kZeros>
TK_FN bool tk_scaled_codes(unsigned* codes, const unsigned* words, const float* scales, const float* factors) {
  unsigned least, most, least_factor, most_factor;
  if (tk_scale_range<kRows, kZeros>(&least, &most, scales)) return true;
  if (tk_scale_range<8, false>(&least_factor, &most_factor, factors)) return true;
  if (most + most_factor > (254u + 15u) << 23 || least + least_factor < (254u - 14u) << 23) return true;
#ifdef TK_HAS_FP8
  unsigned columns[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const unsigned even = (tk_bits(factors[2 * j]) >> 13) - (239u << 10);
    const unsigned odd = (tk_bits(factors[2 * j + 1]) >> 13) - (239u << 10);
    columns[j] = even + (odd << 16);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const unsigned bits = tk_bits(scales[i]), row = ((kZeros && !bits ? most : bits) >> 13) * 0x10001u;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      unsigned pairs[2];
      tk_e4m3x4_to_f16(pairs, words[2 * i + j]);
      pairs[0] = tk_scaled_pair(pairs[0], columns[2 * j] + row);
      pairs[1] = tk_scaled_pair(pairs[1], columns[2 * j + 1] + row);
      asm("{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f16x2 a, %1; cvt.rn.satfinite.e4m3x2.f16x2 b, %2;\n"
          "mov.b32 %0, {a, b}; }"
          : "=r"(codes[2 * i + j]) : "r"(pairs[0]), "r"(pairs[1]));
    }
  }
  return false;
#else
  return true;
#endif
}
"""
_PER_VECTOR = {"bfloat16": 8, "float32": 4, "float8_e4m3fn": 8}


class _Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        sf_dtype: of the scales of a quantized ``x``, else None.
        gather, transposed: rows are picked by an index; the data is written transposed.
        rounded, packed: scales are powers of two; UE8M0 bytes in words along the rows.
        load_width, store_width: widest access in bytes that rows of ``x`` and of the result allow.
        rows: consecutive rows that a thread holds; 0 for the walk down a column.
    """

    dtype: Any
    sf_dtype: Any
    gather: bool
    transposed: bool
    num_per_tokens: int
    num_per_channels: int
    rounded: bool
    packed: bool
    load_width: int
    store_width: int
    rows: int


def rows_of_thread(dtype: torch.dtype, num_per_tokens: int, num_per_channels: int, transposed: bool) -> int:
    """Consecutive rows that a thread holds; 0 where the walk down a column has to do."""
    per_vector = _PER_VECTOR[str(dtype).removeprefix("torch.")]
    rows = max(r for r in range(1, _ROWS + 1) if num_per_tokens % r == 0)
    lanes = (_TRANSPOSED_COLUMNS if transposed else _COLUMNS) // per_vector
    if num_per_tokens // rows * lanes > _MOST_THREADS or num_per_channels % per_vector:
        return 0
    if transposed and (rows % 4 or _BLOCK_ROWS % num_per_tokens):
        return 0
    return rows


def _build(*key: Any) -> Any:
    k = _Key(*key)
    return _signature(k, _vector_body(k) if k.rows else _column_body(k))


def _signature(k: _Key, body: Any) -> Any:
    """The TileLang function whose tensors are those that the key calls for."""
    import tilelang.language as T

    source_rows, rows, columns = T.dynamic("source_rows"), T.dynamic("rows"), T.dynamic("columns")
    if not k.gather:
        source_rows = rows
    stride, sf_stride = T.dynamic("row_stride", "int64"), T.dynamic("x_sf_stride_0", "int64")
    x_type = T.StridedTensor((source_rows, columns), (stride, 1), k.dtype)
    x_sf_type = T.StridedTensor(
        (T.dynamic("x_sf_rows"), T.dynamic("x_sf_columns")),
        (sf_stride, T.dynamic("x_sf_stride_1", "int64")),
        k.sf_dtype or "float32",
    )
    index_type = T.Tensor((rows,), "int32")
    out_type = T.Tensor((columns, rows) if k.transposed else (rows, columns), "float8_e4m3fn")
    sf_type = T.Tensor((T.dynamic("sf_rows"), columns), "int32" if k.packed else "float32")

    def cast(x: Any, out: Any, sf: Any, clamp: Any) -> None:
        body(x, None, None, out, sf, clamp, (source_rows, rows, columns), (stride, 0))

    def cast_quantized(x: Any, x_sf: Any, out: Any, sf: Any, clamp: Any) -> None:
        body(x, x_sf, None, out, sf, clamp, (source_rows, rows, columns), (stride, sf_stride))

    def cast_gathered(x: Any, index: Any, out: Any, sf: Any, clamp: Any) -> None:
        body(x, None, index, out, sf, clamp, (source_rows, rows, columns), (stride, 0))

    def cast_gathered_quantized(x: Any, x_sf: Any, index: Any, out: Any, sf: Any, clamp: Any) -> None:
        body(x, x_sf, index, out, sf, clamp, (source_rows, rows, columns), (stride, sf_stride))

    functions: dict[tuple[bool, bool], Callable[..., None]] = {
        (False, False): cast,
        (True, False): cast_quantized,
        (False, True): cast_gathered,
        (True, True): cast_gathered_quantized,
    }
    types = [x_type, *([x_sf_type] if k.sf_dtype else []), *([index_type] if k.gather else []), out_type, sf_type]
    return prim_func(functions[bool(k.sf_dtype), k.gather], *types, T.float32)


def _scale_expressions(k: _Key) -> tuple[Any, Any, Any]:
    """Of an amax's bits: the UE8M0 byte, the fp32 scale, and the factor of the data."""
    import tilelang.language as T

    qmax = T.float32(E4M3.qmax)

    def biased(amax: Any) -> Any:
        return T.call_extern("uint32", "tk_ue8m0", amax, qmax)

    def scale(amax: Any) -> Any:
        if k.rounded:
            return T.call_extern("float32", "tk_sf_ue8m0", biased(amax))
        return T.call_extern("float32", "tk_sf_plain", amax, qmax)

    def factor(amax: Any) -> Any:
        if k.rounded:
            return T.call_extern("float32", "tk_inv_ue8m0", biased(amax))
        return T.call_extern("float32", "tk_inv_plain", amax, qmax)

    return biased, scale, factor


class _InputScale:
    """The scale of a row of a quantized ``x``: where it is, its stored bits, and what they mean."""

    def __init__(self, k: _Key) -> None:
        import tilelang.language as T

        self._T, self._k = T, k
        self.packed = k.sf_dtype not in (None, "float32", "float8_e4m3fn")
        self.along_rows = self.packed and k.num_per_channels == 1
        self.size = size = 1 if k.sf_dtype == "float8_e4m3fn" else 4

        @T.macro
        def fetch(bits: Any, i: Any, x_sf: Any, row: Any, column: Any, exists: Any) -> None:
            at, group, _ = self.place(row, column)
            T.call_extern(
                "handle",
                f"tk_load<{size}, {size}>",
                T.access_ptr(bits[i], "w"),
                T.access_ptr(x_sf[at, group], "r"),
                T.if_then_else(exists, size, 0),
            )

        self.fetch = fetch

    def place(self, row: Any, column: Any) -> tuple[Any, Any, Any]:
        """Row and column of the element that holds the scale, and the byte in it."""
        group = column // self._k.num_per_channels
        if not self.packed:
            return row, group, 0
        return (row // 4, group, row % 4) if self.along_rows else (row, group // 4, group % 4)

    def value(self, bits: Any, row: Any, column: Any) -> Any:
        T = self._T
        if self._k.sf_dtype == "float32":
            return T.reinterpret("float32", bits)
        if self._k.sf_dtype == "float8_e4m3fn":
            return T.call_extern("float32", "tk_from_e4m3", bits, 0)
        return self.exact(self.normal(bits, row, column))

    def normal(self, bits: Any, row: Any, column: Any) -> Any:
        """The value of a packed scale, if it is a normal number."""
        T = self._T
        byte = T.Cast("uint32", self.place(row, column)[2] * 8)
        biased = T.bitwise_and(T.shift_right(bits, byte), T.uint32(255))
        return T.reinterpret("float32", T.shift_left(biased, T.uint32(23)))

    def exact(self, normal: Any) -> Any:
        """The value of any packed scale, given what ``normal`` makes of it."""
        T = self._T
        return T.call_extern("float32", "tk_from_ue8m0", T.shift_right(T.reinterpret("uint32", normal), T.uint32(23)))


def _vector_body(k: _Key) -> Any:
    import tilelang.language as T

    per_vector = _PER_VECTOR[k.dtype]
    bytes_of = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}[k.dtype]
    vector_words = per_vector * bytes_of // 4
    block_columns = _TRANSPOSED_COLUMNS if k.transposed else _COLUMNS
    lanes = block_columns // per_vector
    slots = k.num_per_tokens // k.rows  # threads that share a column of a block
    blocks = max(min(_BLOCK_ROWS // k.num_per_tokens, _MOST_THREADS // (lanes * slots)), 1)
    threads = lanes * slots * blocks
    shares = math.gcd(max(threads // block_columns, 1), blocks)
    own = blocks // shares  # of a thread that makes scales
    run = math.gcd(own, 4)  # packed scales that it stores at once
    tile_rows = k.num_per_tokens * blocks
    load_width = min(k.load_width, vector_words * 4)
    load = f"tk_load<{vector_words * 4}, {load_width}>"
    load_rows = f"tk_load_rows<{k.rows}, {vector_words * 4}, {load_width}>"
    store = f"tk_store<{per_vector}, {min(k.store_width, per_vector)}>"
    # bf16 amaxes stay two in a word; others are fp32 bits.
    pairs = k.dtype == "bfloat16"
    amax_words = per_vector // 2 if pairs else per_vector
    tile_words = block_columns * 33 + 5 if k.transposed else 1
    input_scale = _InputScale(k)
    in_fp16 = k.dtype == "float8_e4m3fn" and k.sf_dtype is not None and k.rounded
    lazy = in_fp16 and input_scale.packed  # scales are exact only where fp32 needs them
    zeros = str(not input_scale.packed).lower()
    biased, scale, factor = _scale_expressions(k)
    by_rows = not k.gather and not input_scale.along_rows

    @T.macro
    def widen(values: Any, vectors: Any, i: Any) -> None:
        """Row ``i`` of the thread in fp32, without the input's scale."""
        if k.dtype == "bfloat16":
            for j in T.unroll(4):
                values[2 * j] = T.call_extern("float32", "tk_bf16_lo", vectors[i * 4 + j])
                values[2 * j + 1] = T.call_extern("float32", "tk_bf16_hi", vectors[i * 4 + j])
        elif k.dtype == "float32":
            for j in T.unroll(4):
                values[j] = T.reinterpret("float32", vectors[i * 4 + j])
        else:
            for j in T.unroll(2):
                T.call_extern("handle", "tk_from_e4m3x4", T.access_ptr(values[4 * j], "w", 4), vectors[i * 2 + j])

    @T.macro
    def read(vectors: Any, factors: Any, inputs: Any, row: Any, column: Any, extents: Any, strides: Any) -> None:
        """All loads before the first use of one, so that they are in flight together."""
        x, x_sf, index = inputs
        source_rows, rows, columns = extents
        left = T.if_then_else(column < columns, rows - row, 0)  # rows that exist
        bits = T.alloc_local((k.rows,), "uint32")
        picked = T.alloc_local((k.rows,), "int32")
        if k.gather:
            for i in T.unroll(k.rows):
                picked[i] = -1
                if i < left:
                    picked[i] = index[row + i]
            for i in T.unroll(k.rows):
                picked[i] = T.if_then_else(picked[i] < source_rows, picked[i], -1)
                T.call_extern(
                    "handle",
                    load,
                    T.access_ptr(vectors[i * vector_words], "w", vector_words),
                    T.access_ptr(x[picked[i], column], "r"),
                    T.if_then_else(picked[i] >= 0, T.min(columns - column, per_vector), 0) * bytes_of,
                )
        else:
            T.call_extern(
                "handle",
                load_rows,
                T.access_ptr(vectors[0], "w", k.rows * vector_words),
                T.access_ptr(x[row, column], "r"),
                strides[0] * bytes_of,
                left,
                T.min(columns - column, per_vector) * bytes_of,
            )
        if k.sf_dtype is not None:
            if by_rows:
                at, group, _ = input_scale.place(row, column)
                T.call_extern(
                    "handle",
                    f"tk_load_rows<{k.rows}, {input_scale.size}, {input_scale.size}>",
                    T.access_ptr(bits[0], "w", k.rows),
                    T.access_ptr(x_sf[at, group], "r"),
                    strides[1] * input_scale.size,
                    left,
                    input_scale.size,
                )
            else:
                for i in T.unroll(k.rows):
                    if not k.gather:
                        picked[i] = T.if_then_else(i < left, row + i, -1)
                    input_scale.fetch(bits, i, x_sf, picked[i], column, picked[i] >= 0)
            for i in T.unroll(k.rows):
                decode = input_scale.normal if lazy else input_scale.value
                factors[i] = decode(bits[i], row + i if by_rows else picked[i], column)

    @T.macro
    def make_exact(factors: Any) -> None:
        for i in T.unroll(k.rows):
            factors[i] = input_scale.exact(factors[i])

    @T.macro
    def partial_amax(amax: Any, values: Any, vectors: Any, factors: Any) -> None:
        """Bits of the largest magnitude of each column that the thread holds."""
        for j in T.unroll(amax_words):
            amax[j] = T.uint32(0)
        for i in T.unroll(k.rows):
            if pairs:
                for j in T.unroll(4):
                    amax[j] = T.call_extern("uint32", "tk_amax_bf16x2", amax[j], vectors[i * 4 + j])
            else:
                widen(values, vectors, i)
                for j in T.unroll(per_vector):
                    if k.sf_dtype is not None:
                        values[j] = T.ieee_mul(values[j], factors[i])
                    amax[j] = T.call_extern("uint32", "tk_amax", amax[j], values[j])

    @T.macro
    def column_amax(result: Any, partial: Any, block: Any, c: Any) -> None:
        result[0] = T.uint32(0)
        for s in T.unroll(slots):
            at = (block * slots + s) * lanes * amax_words
            if pairs:
                half = T.shift_right(partial[at + c // 2], T.Cast("uint32", c % 2 * 16))
                result[0] = T.max(result[0], T.shift_left(half, T.uint32(16)))
            else:
                result[0] = T.max(result[0], partial[at + c])

    @T.macro
    def make_scales(inverse: Any, partial: Any, sf: Any, clamp: Any, place: Any, down: Any, columns: Any) -> None:
        """Scale and inverse of each column of each block; ``shares`` threads share the blocks of a column."""
        block0, column0 = place
        for turn in T.unroll((block_columns * shares + threads - 1) // threads):
            item = turn * threads + T.get_thread_binding()
            c, b0 = item % block_columns, item // block_columns * own
            amax = T.alloc_local((1,), "uint32")
            word = T.alloc_local((1,), "uint32")
            word[0] = T.uint32(0)
            if item < block_columns * shares:
                for b in T.unroll(own):
                    column_amax(amax, partial, b0 + b, c)
                    amax[0] = T.max(amax[0], T.reinterpret("uint32", clamp))
                    inverse[(b0 + b) * block_columns + c] = factor(amax[0])
                    if k.packed:
                        if block0 + b0 + b < down:
                            word[0] = T.bitwise_or(word[0], T.shift_left(biased(amax[0]), T.uint32(b % run * 8)))
                        if b % run == run - 1:
                            if column0 + c < columns and block0 + b0 + b - b % run < down:
                                T.call_extern(
                                    "handle",
                                    f"tk_put_ue8m0_down<{run}>",
                                    T.access_ptr(sf[0, 0], "w"),
                                    T.Cast("int64", columns),
                                    block0 + b0 + b - b % run,
                                    column0 + c,
                                    down,
                                    word[0],
                                )
                            word[0] = T.uint32(0)
                    elif column0 + c < columns and block0 + b0 + b < down:
                        sf[block0 + b0 + b, column0 + c] = scale(amax[0])

    @T.macro
    def encode(codes: Any, values: Any, vectors: Any, factors: Any, inv: Any, i: Any) -> None:
        widen(values, vectors, i)
        for j in T.unroll(per_vector):
            factor_of_element = T.ieee_mul(factors[i], inv[j]) if k.sf_dtype is not None else inv[j]
            values[j] = T.ieee_mul(values[j], factor_of_element)
        for j in T.unroll(per_vector // 4):
            codes[i * (per_vector // 4) + j] = T.call_extern("uint32", "tk_e4m3x4", T.access_ptr(values[4 * j], "r", 4))

    def permute(a: Any, b: Any, selector: int) -> Any:
        return T.call_extern("uint32", "__byte_perm", a, b, T.uint32(selector))

    def skew(c: Any) -> Any:
        return c // 32 % 2 + c // 64 * 4

    @T.macro
    def write_transposed(out: Any, codes: Any, tile: Any, place: Any, rows: Any, columns: Any) -> None:
        row0, column0 = place
        thread = T.get_thread_binding()
        group = per_vector // 4
        pair = T.alloc_local((4,), "uint32")
        words = T.alloc_local((4,), "uint32")
        for q in T.unroll(k.rows // 4):
            for g in T.unroll(group):
                for h in T.unroll(2):
                    first = (q * 4 + 2 * h) * group + g
                    pair[h] = permute(codes[first], codes[first + group], 0x5140)
                    pair[2 + h] = permute(codes[first], codes[first + group], 0x7362)
                for h in T.unroll(2):
                    words[2 * h] = permute(pair[2 * h], pair[2 * h + 1], 0x5410)
                    words[2 * h + 1] = permute(pair[2 * h], pair[2 * h + 1], 0x7632)
                for j in T.unroll(4):
                    c = thread % lanes * per_vector + g * 4 + j
                    tile[c * 33 + skew(c) + thread // lanes * (k.rows // 4) + q] = words[j]
        T.sync_threads()
        for i in T.unroll(block_columns * (tile_rows // 16) // threads):
            at = i * threads + thread
            c, row = at // (tile_rows // 16), at % (tile_rows // 16) * 16
            for j in T.unroll(4):
                words[j] = tile[c * 33 + skew(c) + row // 4 + j]
            T.call_extern(
                "handle",
                f"tk_store<16, {k.store_width}>",
                T.access_ptr(out[column0 + c, row0 + row], "w"),
                T.access_ptr(words[0], "r", 4),
                T.if_then_else(column0 + c < columns, rows - row0 - row, 0),
            )

    @T.macro
    def body(x: Any, x_sf: Any, index: Any, out: Any, sf: Any, clamp: Any, extents: Any, strides: Any) -> None:
        _, rows, columns = extents
        with T.Kernel(T.ceildiv(rows, tile_rows) * T.ceildiv(columns, block_columns), threads=threads) as at:
            T.import_source(source.SOURCE + access.SOURCE + block_scales.SOURCE + _SOURCE)
            T.annotate_min_blocks_per_sm(max(_THREADS_PER_SM // threads, 1))
            thread = T.get_thread_binding()
            # Neighbouring thread blocks write what is contiguous: columns of one row, or rows of a transposed column.
            down, across = T.ceildiv(rows, tile_rows), T.ceildiv(columns, block_columns)
            line = T.alloc_var("int32", init=down if k.transposed else across)
            outer = T.alloc_var("int32", init=T.truncdiv(at, line))
            inner = T.alloc_var("int32", init=T.truncmod(at, line))
            group = T.alloc_var("int32", init=inner if k.transposed else outer)
            column0 = T.alloc_var("int32", init=(outer if k.transposed else inner) * block_columns)
            column = T.alloc_var("int32", init=column0 + thread % lanes * per_vector)
            row = T.alloc_var("int32", init=group * tile_rows + thread // lanes * k.rows)
            vectors = T.alloc_local((vector_words * k.rows,), "uint32")
            factors = T.alloc_local((k.rows,), "float32")
            values = T.alloc_local((per_vector,), "float32")
            amax = T.alloc_local((amax_words,), "uint32")
            inv = T.alloc_local((per_vector,), "float32")
            codes = T.alloc_local((k.rows * (per_vector // 4),), "uint32")
            partial = T.alloc_shared((threads * amax_words,), "uint32", scope="shared")
            inverse = T.alloc_shared((blocks * block_columns,), "float32", scope="shared")

            read(vectors, factors, (x, x_sf, index), row, column, extents, strides)
            in_fp32 = T.alloc_var("bool", init=True)
            if in_fp16:
                in_fp32 = T.call_extern(
                    "bool",
                    f"tk_scaled_amax<{k.rows}, {zeros}>",
                    T.access_ptr(amax[0], "w", amax_words),
                    T.access_ptr(vectors[0], "r", vector_words * k.rows),
                    T.access_ptr(factors[0], "r", k.rows),
                )
            if in_fp32:
                if lazy:
                    make_exact(factors)
                partial_amax(amax, values, vectors, factors)
            for j in T.vectorized(amax_words):
                partial[thread * amax_words + j] = amax[j]
            T.sync_threads()
            place = (group * blocks, column0)
            make_scales(inverse, partial, sf, clamp, place, T.ceildiv(rows, k.num_per_tokens), columns)
            T.sync_threads()
            for j in T.vectorized(per_vector):
                inv[j] = inverse[thread // lanes // slots * block_columns + thread % lanes * per_vector + j]
            if in_fp16:
                in_fp32 = T.call_extern(
                    "bool",
                    f"tk_scaled_codes<{k.rows}, {zeros}>",
                    T.access_ptr(codes[0], "w", k.rows * (per_vector // 4)),
                    T.access_ptr(vectors[0], "r", vector_words * k.rows),
                    T.access_ptr(factors[0], "r", k.rows),
                    T.access_ptr(inv[0], "r", per_vector),
                )
            if in_fp32:
                if lazy:
                    make_exact(factors)
                for i in T.unroll(k.rows):
                    encode(codes, values, vectors, factors, inv, i)
            for i in T.unroll(k.rows):
                if not k.transposed:
                    T.call_extern(
                        "handle",
                        store,
                        T.access_ptr(out[row + i, column], "w"),
                        T.access_ptr(codes[i * (per_vector // 4)], "r", per_vector // 4),
                        T.if_then_else(row + i < rows, columns - column, 0),
                    )
            if k.transposed:
                tile = T.alloc_shared((tile_words,), "uint32", scope="shared")
                write_transposed(out, codes, tile, (group * tile_rows, column0), rows, columns)

    return body


def _column_body(k: _Key) -> Any:
    import tilelang.language as T

    threads = 128
    biased, scale, factor = _scale_expressions(k)
    input_scale = _InputScale(k)

    @T.macro
    def element(
        value: Any, in_scale: Any, x: Any, x_sf: Any, index: Any, row: Any, column: Any, source_rows: Any
    ) -> None:
        """One element in fp32 and its scale; 0 where no row is picked."""
        picked = T.alloc_local((1,), "int32")
        picked[0] = index[row] if k.gather else row
        value[0] = T.float32(0)
        in_scale[0] = T.float32(1)
        if picked[0] >= 0 and picked[0] < source_rows:
            value[0] = T.Cast("float32", x[picked[0], column])
            if k.sf_dtype is not None:
                bits = T.alloc_local((1,), "uint32")
                input_scale.fetch(bits, 0, x_sf, picked[0], column, True)
                in_scale[0] = input_scale.value(bits[0], picked[0], column)

    @T.macro
    def body(x: Any, x_sf: Any, index: Any, out: Any, sf: Any, clamp: Any, extents: Any, strides: Any) -> None:
        source_rows, rows, columns = extents
        with T.Kernel(T.ceildiv(rows, k.num_per_tokens) * T.ceildiv(columns, threads), threads=threads) as at:
            T.import_source(source.SOURCE + access.SOURCE + block_scales.SOURCE)
            across = T.alloc_var("int32", init=T.ceildiv(columns, threads))
            block = T.alloc_var("int32", init=T.truncdiv(at, across))
            column = T.alloc_var("int32", init=T.truncmod(at, across) * threads + T.get_thread_binding())
            value = T.alloc_local((1,), "float32")
            in_scale = T.alloc_local((1,), "float32")
            amax = T.alloc_local((1,), "uint32")
            count = T.alloc_var("int32", init=T.min(rows - block * k.num_per_tokens, k.num_per_tokens))
            inv = T.alloc_var("float32", init=T.float32(0))
            amax[0] = T.reinterpret("uint32", clamp)
            if column < columns:
                for i in T.serial(count):
                    element(value, in_scale, x, x_sf, index, block * k.num_per_tokens + i, column, source_rows)
                    amax[0] = T.call_extern("uint32", "tk_amax", amax[0], T.ieee_mul(value[0], in_scale[0]))
                inv = factor(amax[0])
                if k.packed:
                    T.call_extern(
                        "handle",
                        "tk_put_ue8m0_down<1>",
                        T.access_ptr(sf[0, 0], "w"),
                        T.Cast("int64", columns),
                        block,
                        column,
                        T.ceildiv(rows, k.num_per_tokens),
                        biased(amax[0]),
                    )
                else:
                    sf[block, column] = scale(amax[0])
                for i in T.serial(count):
                    row = block * k.num_per_tokens + i
                    element(value, in_scale, x, x_sf, index, row, column, source_rows)
                    scaled = T.ieee_mul(value[0], T.ieee_mul(in_scale[0], inv))
                    code = T.Cast("uint8", T.call_extern("uint32", "tk_e4m3x1", scaled))
                    if k.transposed:
                        out[column, row] = T.reinterpret("float8_e4m3fn", code)
                    else:
                        out[row, column] = T.reinterpret("float8_e4m3fn", code)

    return body


# Every access is predicated where it is made.
_CAST = Builder("quant.per_channel_cast", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


def launch(
    outs: tuple[Tensor, ...],
    x: Tensor,
    x_sf: Tensor | None,
    index: Tensor | None,
    num_per_tokens: int,
    num_per_channels: int,
    rounded: bool,
    packed: bool,
    transposed: bool,
    clamp_min: float,
) -> None:
    """Cast ``x`` (rows picked by ``index`` if given) with one scale per column of ``num_per_tokens`` rows."""
    out, sf = outs
    num_per_tokens = access.bounded(num_per_tokens, x.shape[0] if index is None else index.shape[0])
    num_per_channels = access.bounded(num_per_channels, x.shape[1])
    rows = rows_of_thread(x.dtype, num_per_tokens, num_per_channels if x_sf is not None else 0, transposed)
    key = _Key(
        x.dtype,
        x_sf.dtype if x_sf is not None else None,
        index is not None,
        transposed,
        num_per_tokens,
        num_per_channels if x_sf is not None else 0,
        rounded,
        packed,
        access.access_width(x),
        access.access_width(out, 16 if transposed else 8),
        rows,
    )
    function = _CAST.get(key, x.device) or _CAST.compile(key, x.device)
    given = [t for t in (x, x_sf, index) if t is not None]
    function(*given, out, sf, clamp_min)


class PerChannelCast:
    """One scale per column of a block of rows."""

    revision = 1

    def refusal(
        self,
        x: Tensor,
        x_sf: Tensor | None,
        num_per_tokens: int,
        num_per_channels: int,
        round_sf: bool,
        use_packed_ue8m0: bool,
        clamp_min: float,
        ue8m0_per_word: int,
    ) -> str | None:
        return refuse_words(ue8m0_per_word, use_packed_ue8m0 or (x_sf is not None and not x_sf.is_floating_point()))

    def __call__(self, outs: tuple[Tensor, ...], *args: Any) -> None:
        x, x_sf, num_per_tokens, num_per_channels, rounded, packed, clamp_min, _ = args
        reason = self.refusal(*args)
        if reason is not None:
            raise Refused(reason)
        launch(outs, x, x_sf, None, num_per_tokens, num_per_channels, rounded, packed, False, clamp_min)


def refuse_words(ue8m0_per_word: int, packed: bool) -> str | None:
    """Refuse packed scales in words of another device."""
    if packed and ue8m0_per_word != 4:
        return f"packs 4 scales in a word, the layout asks for {ue8m0_per_word}"
    return None


KERNELS = {"quant.per_channel_cast": PerChannelCast()}

_BF16, _FP32, _FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
CI_KEYS = [
    (_CAST, _Key(_BF16, None, False, False, 128, 0, True, True, 16, 8, 8)),
    (_CAST, _Key(_BF16, None, False, True, 32, 0, True, False, 16, 16, 8)),
    (_CAST, _Key(_FP32, None, False, True, 128, 0, False, False, 16, 16, 8)),
    (_CAST, _Key(_FP8, torch.int32, False, False, 32, 32, True, True, 16, 8, 8)),
    (_CAST, _Key(_FP8, _FP32, True, False, 128, 128, False, False, 16, 8, 8)),
    (_CAST, _Key(_FP8, _FP8, True, True, 100, 5, False, False, 1, 1, 0)),
]
