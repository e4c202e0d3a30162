"""Eight consecutive elements of a row, plain or quantized: read, widened, measured, encoded, written.

``T.import_source(SOURCE)`` brings, for an element type ``E`` of :func:`element` and a format number of :func:`number`::

    void tk_fetch8<E, Width>(unsigned* words, const void* row, int column, int columns)
    void tk_values8<E>(float* v, const unsigned* words)
    unsigned tk_amax8<E>(const unsigned* words)
    float tk_sf_at<Kind>(const void* sf, long long s0, long long s1, int row_block, int column_block)
    void tk_encode8<Format, Stochastic, Short>(unsigned* words, const float* v, unsigned quad, bool saturate)
    void tk_decode8<Format>(float* v, const unsigned* words)
    void tk_emit8<Format, Width>(void* row, const unsigned* words, int column, int columns)

``columns`` are the logical columns that exist, 0 for a row that does not; what is missing reads as zero and is not
written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tk_core.formats import FORMATS

from . import vectors

_NUMBERS = {"e4m3": 0, "e2m1": 1, "e5m6": 2}
SF_NONE, SF_FLOAT, SF_E4M3, SF_PACKED, SF_PACKED_ROWS = -1, 0, 1, 2, 3

SOURCE = (
    vectors.SOURCE
    + r"""
struct TkE2m1 {};
struct TkE5m6 {};

template <class E, int kWidth>
TK_FN void tk_fetch8(unsigned* words, const void* row, int column, int columns) {
  const char* p = static_cast<const char*>(row);
  if constexpr (tk_same<E, TkE2m1>) {
    tk_load<4, (kWidth < 4 ? kWidth : 4)>(words, p + column / 2, (columns - column) / 2);
  } else if constexpr (tk_same<E, TkE5m6>) {
    tk_load<12, (kWidth < 4 ? kWidth : 4)>(words, p + column / 2 * 3, (columns - column) / 2 * 3);
  } else {
    tk_load8<E, kWidth>(words, p + static_cast<long long>(column) * E::kBytes, columns - column);
  }
}
// Four elements; not of e5m6.
template <class E, int kWidth>
TK_FN void tk_fetch4(unsigned* words, const void* row, int column, int columns) {
  const char* p = static_cast<const char*>(row);
  if constexpr (tk_same<E, TkE2m1>) {
    tk_load<2, (kWidth < 2 ? kWidth : 2)>(words, p + column / 2, (columns - column) / 2);
  } else {
    tk_load4<E, kWidth>(words, p + static_cast<long long>(column) * E::kBytes, columns - column);
  }
}
template <class E>
TK_FN void tk_values4(float* v, const unsigned* words) {
  if constexpr (tk_same<E, TkE2m1>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = tk_from_e2m1(words[0], i);
  } else {
    tk_widen4<E>(v, words);
  }
}
template <class E>
TK_FN void tk_values8(float* v, const unsigned* words) {
  if constexpr (tk_same<E, TkE2m1>) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = tk_from_e2m1(words[0], i);
  } else if constexpr (tk_same<E, TkE5m6>) {
    tk_from_e5m6x8(v, words);
  } else {
    tk_widen8<E>(v, words);
  }
}
template <class E>
TK_FN unsigned tk_amax8(const unsigned* words) {
  unsigned acc = 0;
  if constexpr (tk_same<E, TkBf16>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc = tk_amax_bf16x2(acc, words[i]);
    return tk_amax_fold(acc);
  } else if constexpr (tk_same<E, TkE4m3>) {
    return tk_amax_e4m3x8(words);
  } else {
    float v[8];
    tk_values8<E>(v, words);
#pragma unroll
    for (int i = 0; i < 8; ++i) acc = tk_amax(acc, v[i]);
    return acc;
  }
}
// Scale of a block of quantized input: fp32, e4m3, or UE8M0 packed along columns or rows.
template <int kKind>
TK_FN float tk_sf_at(const void* sf, long long s0, long long s1, int row_block, int column_block) {
  if constexpr (kKind == 0) {
    return __ldg(static_cast<const float*>(sf) + row_block * s0 + column_block * s1);
  } else if constexpr (kKind == 1) {
    return tk_from_e4m3(__ldg(static_cast<const unsigned char*>(sf) + row_block * s0 + column_block * s1), 0);
  } else {
    const int packed = kKind == 2 ? column_block : row_block;
    const long long word = kKind == 2 ? row_block * s0 + column_block / 4 * s1 : row_block / 4 * s0 + column_block * s1;
    return tk_from_ue8m0(__ldg(static_cast<const unsigned char*>(sf) + 4 * word + packed % 4));
  }
}
// kShort: values have at most eight significant bits; saturate: of e2m1, magnitudes can reach 7.
template <int kFormat, bool kStochastic, bool kShort>
TK_FN void tk_encode8(unsigned* words, const float* v, unsigned quad, bool saturate) {
  if constexpr (kFormat == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i] = kStochastic ? tk_e4m3x4_stochastic(v + 4 * i, quad + i) : tk_e4m3x4(v + 4 * i);
    }
  } else if constexpr (kFormat == 1 && kShort) {
    words[0] = kStochastic ? tk_e2m1x8_short_stochastic(v, quad) : tk_e2m1x8_short(v);
  } else if constexpr (kFormat == 1) {
    words[0] = kStochastic ? tk_e2m1x4_stochastic(v, quad) | tk_e2m1x4_stochastic(v + 4, quad + 1) << 16
                           : tk_e2m1x8(v, saturate);
  } else {
    tk_e5m6x8(words, v);
  }
}
template <int kFormat>
TK_FN void tk_decode8(float* v, const unsigned* words) {
  if constexpr (kFormat == 0) {
    tk_widen8<TkE4m3>(v, words);
  } else {
    tk_values8<TkE2m1>(v, words);
  }
}
// Three words of each lane of a warp, one after the other, in stores of 16 bytes: those of a lane would leave gaps.
TK_FN void tk_store_run(char* p, const unsigned* words, int bytes) {
  __shared__ __align__(16) unsigned runs[32][96];
  unsigned* run = runs[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 3; ++i) run[3 * lane + i] = words[i];
  __syncwarp();
  if (lane < 24) tk_store<16, 16>(p + 16 * lane, run + 4 * lane, bytes - 16 * lane);
}
// e5m6 in accesses of 16 bytes: by whole warps, whose lanes have neighbouring columns.
template <int kFormat, int kWidth>
TK_FN void tk_emit8(void* row, const unsigned* words, int column, int columns) {
  constexpr int kVector = kFormat == 0 ? 8 : kFormat == 1 ? 4 : 12;
  constexpr int kPart = kFormat == 0 ? kWidth : kWidth < 4 ? kWidth : 4;
  const int left = columns - column;
  char* p = static_cast<char*>(row) + (kFormat == 0 ? column : kFormat == 1 ? column / 2 : column / 2 * 3);
  if constexpr (kFormat == 2 && kWidth == 16) {
    const int lane = threadIdx.x % 32;
    tk_store_run(p - 12 * lane, words, left / 2 * 3 + 12 * lane);
  } else {
    tk_store<kVector, (kPart < kVector ? kPart : kVector)>(
        p, words, kFormat == 0 ? left : kFormat == 1 ? left / 2 : left / 2 * 3);
  }
}
TK_FN void tk_put_word(void* p, unsigned value) { *static_cast<unsigned*>(p) = value; }
TK_FN void tk_put_byte(void* p, unsigned value) { *static_cast<unsigned char*>(p) = (unsigned char)value; }
"""
)


def element(dtype: str) -> str:
    """The C++ type that stands for elements stored in a dtype."""
    return {"int8": "TkE2m1", "uint8": "TkE5m6"}.get(dtype) or vectors.element(dtype)


def words(dtype: str) -> int:
    """32-bit words of eight elements stored in a dtype."""
    return {"int8": 1, "uint8": 3}.get(dtype) or vectors.words(dtype)


def number(fmt: str) -> int:
    """The number of a format in the device functions."""
    return _NUMBERS[fmt]


def data_type(fmt: str) -> str:
    """TileLang's name of the dtype that stores a format."""
    return str(FORMATS[fmt].dtype).removeprefix("torch.")


def sf_kind(sf: Tensor | None, block_columns: int) -> int:
    """How the scales of a quantized input are stored."""
    if sf is None:
        return SF_NONE
    if sf.dtype == torch.float32:
        return SF_FLOAT
    if sf.dtype == torch.float8_e4m3fn:
        return SF_E4M3
    return SF_PACKED_ROWS if block_columns == 1 else SF_PACKED


def sf_type(kind: int) -> str:
    """TileLang's name of the dtype of stored scales."""
    return {SF_FLOAT: "float32", SF_E4M3: "float8_e4m3fn"}.get(kind, "int32")
