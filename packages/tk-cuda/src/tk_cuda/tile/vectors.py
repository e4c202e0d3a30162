"""Eight consecutive elements of one dtype: loaded, widened to fp32, narrowed, stored.

``T.import_source(SOURCE)`` brings, for an element type ``E`` of :func:`element`::

    void tk_load8<E, Width>(unsigned* words, const void* p, int count)
    void tk_store8<E, Width>(void* p, const float* v, int count)
    void tk_widen8<E>(float* v, const unsigned* words)

Accesses are of ``Width`` bytes; ``count`` elements exist (as in ``tile.access``: may be negative, or more than 8).
"""

from __future__ import annotations

from . import access, source

_ELEMENTS = {"bfloat16": ("TkBf16", 4), "float32": ("TkF32", 8), "float8_e4m3fn": ("TkE4m3", 2)}

_VECTORS = r"""
struct TkBf16 { static constexpr int kBytes = 2; };
struct TkF32 { static constexpr int kBytes = 4; };
struct TkE4m3 { static constexpr int kBytes = 1; };
template <class A, class B> constexpr bool tk_same = false;
template <class A> constexpr bool tk_same<A, A> = true;

template <class E, int kWidth>
__device__ __forceinline__ void tk_load8(unsigned* words, const void* p, int count) {
  constexpr int kVector = E::kBytes * 8 < 16 ? E::kBytes * 8 : 16;
  constexpr int kPart = kWidth < kVector ? kWidth : kVector;
#pragma unroll
  for (int i = 0; i < E::kBytes * 8 / kVector; ++i) {
    tk_load<kVector, kPart>(words + 4 * i, static_cast<const char*>(p) + 16 * i, count * E::kBytes - 16 * i);
  }
}
template <class E>
__device__ __forceinline__ void tk_widen8(float* v, const unsigned* words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (tk_same<E, TkBf16>) {
      v[2 * i] = tk_bf16_lo(words[i]);
      v[2 * i + 1] = tk_bf16_hi(words[i]);
    } else if constexpr (tk_same<E, TkF32>) {
      v[2 * i] = tk_float(words[2 * i]);
      v[2 * i + 1] = tk_float(words[2 * i + 1]);
    } else if (i < 2) {
      tk_from_e4m3x4(v + 4 * i, words[i]);
    }
  }
}
template <class E>
__device__ __forceinline__ void tk_narrow8(unsigned* words, const float* v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (tk_same<E, TkBf16>) {
      words[i] = tk_to_bf16x2(v[2 * i], v[2 * i + 1]);
    } else if constexpr (tk_same<E, TkF32>) {
      words[2 * i] = tk_bits(v[2 * i]);
      words[2 * i + 1] = tk_bits(v[2 * i + 1]);
    } else if (i < 2) {
      words[i] = tk_e4m3x4(v + 4 * i);
    }
  }
}
template <class E, int kWidth>
__device__ __forceinline__ void tk_put8(void* p, const unsigned* words, int count) {
  constexpr int kVector = E::kBytes * 8 < 16 ? E::kBytes * 8 : 16;
  constexpr int kPart = kWidth < kVector ? kWidth : kVector;
#pragma unroll
  for (int i = 0; i < E::kBytes * 8 / kVector; ++i) {
    tk_store<kVector, kPart>(static_cast<char*>(p) + 16 * i, words + 4 * i, count * E::kBytes - 16 * i);
  }
}
template <class E, int kWidth>
__device__ __forceinline__ void tk_store8(void* p, const float* v, int count) {
  unsigned words[8];
  tk_narrow8<E>(words, v);
  tk_put8<E, kWidth>(p, words, count);
}
// Rounded to the element type and widened again.
template <class E>
__device__ __forceinline__ void tk_round8(float* v) {
  unsigned words[8];
  tk_narrow8<E>(words, v);
  tk_widen8<E>(v, words);
}
"""

SOURCE = source.SOURCE + access.SOURCE + _VECTORS


def element(dtype: str) -> str:
    """The C++ type that stands for elements of a dtype."""
    return _ELEMENTS[dtype][0]


def words(dtype: str) -> int:
    """32-bit words of eight elements."""
    return _ELEMENTS[dtype][1]
