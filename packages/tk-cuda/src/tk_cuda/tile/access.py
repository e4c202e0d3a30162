"""Vectors of up to 16 bytes between global memory and registers, in accesses as wide as the alignment permits.

``access_width`` finds at call time the widest access that base pointer, strides and row length allow; it is part of a
kernel's key. In the kernel ``T.import_source(SOURCE)`` brings two device functions, called with ``T.call_extern``::

    void tk_load<Vector, Width>(void* words, const void* p, int bytes)
    void tk_store<Vector, Width>(void* p, const void* words, int bytes)

They move a vector of ``Vector`` bytes between memory at ``p`` and 32-bit register words, in accesses of ``Width``
bytes. Only the first ``bytes`` exist (a multiple of ``Width``; may be negative, or more than the vector): the rest is
read as zero, respectively not written.
"""

from __future__ import annotations

from torch import Tensor

SOURCE = r"""
template <int kWidth> struct TkAccess;
template <> struct TkAccess<1> { using type = unsigned char; };
template <> struct TkAccess<2> { using type = unsigned short; };
template <> struct TkAccess<4> { using type = unsigned int; };
template <> struct TkAccess<8> { using type = uint2; };
template <> struct TkAccess<16> { using type = uint4; };

template <int kVector, int kWidth>
__device__ __forceinline__ void tk_load(void* words, const void* p, int bytes) {
  using Access = typename TkAccess<kWidth>::type;
  union { unsigned int word[4]; Access part[16 / kWidth]; } r;
#pragma unroll
  for (int i = 0; i < 4; ++i) r.word[i] = 0;
#pragma unroll
  for (int i = 0; i < kVector / kWidth; ++i) {
    if (i * kWidth < bytes) r.part[i] = __ldg(static_cast<const Access*>(p) + i);
  }
#pragma unroll
  for (int i = 0; i < (kVector + 3) / 4; ++i) static_cast<unsigned int*>(words)[i] = r.word[i];
}

template <int kVector, int kWidth>
__device__ __forceinline__ void tk_store(void* p, const void* words, int bytes) {
  using Access = typename TkAccess<kWidth>::type;
  union { unsigned int word[4]; Access part[16 / kWidth]; } r;
#pragma unroll
  for (int i = 0; i < (kVector + 3) / 4; ++i) r.word[i] = static_cast<const unsigned int*>(words)[i];
#pragma unroll
  for (int i = 0; i < kVector / kWidth; ++i) {
    if (i * kWidth < bytes) __stwb(static_cast<Access*>(p) + i, r.part[i]);
  }
}
"""

_LARGE = 4096
"""Block sizes up to which every size is compiled for as it is."""


def access_width(t: Tensor, limit: int = 16) -> int:
    """The widest access in bytes, at most ``limit``, that every row of ``t`` can be read or written with.

    It divides the address of the first element, all strides but the last in bytes, and the bytes of a row.
    """
    size = t.element_size()
    bits = t.data_ptr() | t.shape[-1] * size | limit
    for extent, stride in zip(t.shape[:-1], t.stride()[:-1]):
        if extent > 1:
            bits |= stride * size
    return bits & -bits


def bounded(size: int, extent: int) -> int:
    """A block size that divides ``extent`` like ``size``, but is not far past it: indices fit 32 bits, keys are few."""
    return min(size, 1 << (max(extent, _LARGE) - 1).bit_length())


def unit_columns(t: Tensor) -> Tensor:
    """A matrix with unit stride along its columns: one of a single column may have any, which launchers refuse."""
    if t.shape[1] == 1 and t.stride(1) != 1:
        return t.as_strided(t.shape, (t.stride(0), 1))
    return t
