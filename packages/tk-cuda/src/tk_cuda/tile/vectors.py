"""Eight consecutive elements of one dtype: loaded, widened to fp32, narrowed, stored.

``T.import_source(SOURCE)`` brings, for an element type ``E`` of :func:`element`::

    void tk_load8<E, Width>(unsigned* words, const void* p, int count)
    void tk_put8<E, Width>(void* p, const unsigned* words, int count)
    void tk_store8<E, Width>(void* p, const float* v, int count)
    void tk_widen8<E>(float* v, const unsigned* words)
    void tk_narrow8<E>(unsigned* words, const float* v)

and the same of four elements, ``tk_load4`` and so on: of fp32, these are what a lane stores at once without gaps.
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

template <class E, int kWidth, int kCount>
__device__ __forceinline__ void tk_load_vector(unsigned* words, const void* p, int count) {
  constexpr int kVector = E::kBytes * kCount < 16 ? E::kBytes * kCount : 16;
  constexpr int kPart = kWidth < kVector ? kWidth : kVector;
#pragma unroll
  for (int i = 0; i < E::kBytes * kCount / kVector; ++i) {
    tk_load<kVector, kPart>(words + 4 * i, static_cast<const char*>(p) + 16 * i, count * E::kBytes - 16 * i);
  }
}
template <class E, int kWidth>
__device__ __forceinline__ void tk_load4(unsigned* words, const void* p, int count) {
  tk_load_vector<E, kWidth, 4>(words, p, count);
}
template <class E, int kWidth>
__device__ __forceinline__ void tk_load8(unsigned* words, const void* p, int count) {
  tk_load_vector<E, kWidth, 8>(words, p, count);
}
template <class E>
__device__ __forceinline__ void tk_widen4(float* v, const unsigned* words) {
  if constexpr (tk_same<E, TkE4m3>) {
    tk_from_e4m3x4(v, words[0]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = tk_same<E, TkF32> ? tk_float(words[i]) : i % 2 ? tk_bf16_hi(words[i / 2]) : tk_bf16_lo(words[i / 2]);
    }
  }
}
template <class E>
__device__ __forceinline__ void tk_widen8(float* v, const unsigned* words) {
  tk_widen4<E>(v, words);
  tk_widen4<E>(v + 4, words + E::kBytes);
}
template <class E>
__device__ __forceinline__ void tk_narrow4(unsigned* words, const float* v) {
  if constexpr (tk_same<E, TkE4m3>) {
    words[0] = tk_e4m3x4(v);
  } else if constexpr (tk_same<E, TkBf16>) {
    words[0] = tk_to_bf16x2(v[0], v[1]);
    words[1] = tk_to_bf16x2(v[2], v[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = tk_bits(v[i]);
  }
}
template <class E>
__device__ __forceinline__ void tk_narrow8(unsigned* words, const float* v) {
  tk_narrow4<E>(words, v);
  tk_narrow4<E>(words + E::kBytes, v + 4);
}
template <class E, int kWidth, int kCount>
__device__ __forceinline__ void tk_put_vector(void* p, const unsigned* words, int count) {
  constexpr int kVector = E::kBytes * kCount < 16 ? E::kBytes * kCount : 16;
  constexpr int kPart = kWidth < kVector ? kWidth : kVector;
#pragma unroll
  for (int i = 0; i < E::kBytes * kCount / kVector; ++i) {
    tk_store<kVector, kPart>(static_cast<char*>(p) + 16 * i, words + 4 * i, count * E::kBytes - 16 * i);
  }
}
template <class E, int kWidth>
__device__ __forceinline__ void tk_put4(void* p, const unsigned* words, int count) {
  tk_put_vector<E, kWidth, 4>(p, words, count);
}
template <class E, int kWidth>
__device__ __forceinline__ void tk_put8(void* p, const unsigned* words, int count) {
  tk_put_vector<E, kWidth, 8>(p, words, count);
}
template <class E, int kWidth>
__device__ __forceinline__ void tk_store4(void* p, const float* v, int count) {
  unsigned words[4];
  tk_narrow4<E>(words, v);
  tk_put4<E, kWidth>(p, words, count);
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
