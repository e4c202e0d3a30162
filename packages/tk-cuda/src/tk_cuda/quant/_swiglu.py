"""What the SwiGLU kernels share, as CUDA device functions: the activation, which rows are real, and scales of groups.

All arithmetic is correctly rounded, operation by operation. ``l / (1 + exp(-l))`` costs no IEEE division for the usual
``|l| <= 87``: with ``s = RN(1 / t)`` (one Newton step from the hardware's reciprocal), ``q = RN(l s)`` and the exact
remainder ``e = q t - l``, ``q - e s`` rounds to the quotient. The hardest quotients of every divisor were tried: those
within two divisors' units of a rounding boundary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tile import access, vectors

_ACTIVATION = r"""
// NaN stays NaN.
TK_FN float tk_at_most(float x, float most) { return x > most ? most : x; }
TK_FN float tk_at_least(float x, float least) { return x < least ? least : x; }

// Of eight gates l, with t = 1 + exp(-l): act = l / t and s = 1 / t.
TK_FN void tk_silu8(float* act, float* s, const float* l) {
  float t[8], most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    t[i] = __fadd_rn(1.0f, expf(-l[i]));
    most = fmaxf(most, fabsf(l[i]));
  }
  if (most <= 87.0f) {  // 1 / t is normal
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float r = tk_rcp(t[i]);
      s[i] = __fmaf_rn(r, __fmaf_rn(-t[i], r, 1.0f), r);
      const float q = __fmul_rn(l[i], s[i]);
      act[i] = __fmaf_rn(-__fmaf_rn(q, t[i], -l[i]), s[i], q);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      s[i] = __frcp_rn(t[i]);
      act[i] = __fdiv_rn(l[i], t[i]);
    }
  }
}

template <bool kClamp>
TK_FN void tk_clamp8(float* l, float* r, float clamp) {
#pragma unroll
  for (int i = 0; i < (kClamp ? 8 : 0); ++i) {
    l[i] = tk_at_most(l[i], clamp);
    r[i] = tk_at_least(tk_at_most(r[i], clamp), -clamp);
  }
}
// Weighted results of gates l and up values r.
template <bool kClamp, bool kWeight>
TK_FN void tk_swiglu8(float* v, float* l, float* r, float clamp, float weight) {
  float s[8];
  tk_clamp8<kClamp>(l, r, clamp);
  tk_silu8(v, s, l);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = __fmul_rn(v[i], r[i]);
    if constexpr (kWeight) v[i] = __fmul_rn(v[i], weight);
  }
}
// Gates and up values at p and at p + channels; zeros past `count`.
template <class E, int kWidth>
TK_FN void tk_gate_up8(float* l, float* r, const void* p, int channels, int count) {
  unsigned gate[8], up[8];
  tk_load8<E, kWidth>(gate, p, count);
  tk_load8<E, kWidth>(up, static_cast<const char*>(p) + (long long)channels * E::kBytes, count);
  tk_widen8<E>(l, gate);
  tk_widen8<E>(r, up);
}
// Numbers of l > c, r > c, r < -c; then of rows.
TK_FN void tk_count8(int* counts, const float* l, const float* r, float clamp) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    counts[0] += l[i] > clamp;
    counts[1] += r[i] > clamp;
    counts[2] += r[i] < -clamp;
  }
}
// Adds the counts of all threads of the block, the rows times `channels`, to the total.
TK_FN void tk_add_counts(int64_t* total, const int* counts, int channels) {
  __shared__ int sums[4];
  if (threadIdx.x < 4) sums[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int n = counts[i];
#pragma unroll
    for (int mask = 16; mask; mask /= 2) n += __shfl_xor_sync(0xffffffffu, n, mask);
    if (threadIdx.x % 32 == 0 && n) atomicAdd(&sums[i], n);
  }
  __syncthreads();
  if (threadIdx.x < 4) {
    const long long n = (long long)sums[threadIdx.x] * (threadIdx.x == 3 ? channels : 1);
    if (n) atomicAdd(reinterpret_cast<unsigned long long*>(total) + threadIdx.x, (unsigned long long)n);
  }
}
"""

_ROWS = r"""
// Whether start[e] <= row < psum[e] for some expert, where start[e] is psum[e - 1] rounded up to the alignment: that is
// at most `row` if psum[e - 1] is at most `row` rounded down. By a whole warp.
TK_FN bool tk_row_of_expert(const int* psum, int experts, int alignment, long long row, int lane) {
  const int limit = (int)((unsigned)row - (unsigned)row % (unsigned)alignment);
  bool found = false;
  for (int e = lane; e < experts; e += 32) {
    const int before = e == 0 ? 0 : __ldg(psum + e - 1);
    found = found || (before <= limit && (int)row < __ldg(psum + e));
  }
  return __any_sync(0xffffffffu, found);
}
// Whether a row is real; `weight` becomes its weight. By a whole warp. Pointers that the flags do not need are ignored.
template <bool kPsum, bool kWeighted, bool kIndexed, bool kMapped>
TK_FN bool tk_row_facts(float* weight, const void* psum, int experts, int alignment, const void* weights,
                        const void* index, long long weights_count, const void* expert_of, float factor,
                        long long row, int lane) {
  if constexpr (kPsum) {
    if (!tk_row_of_expert(static_cast<const int*>(psum), experts, alignment, row, lane)) return false;
  }
  if constexpr (kMapped) {
    if (__ldg(static_cast<const int*>(expert_of) + row) < 0) return false;
  }
  if constexpr (kWeighted) {
    long long at = row;
    if constexpr (kIndexed) at = __ldg(static_cast<const int*>(index) + row);
    const bool known = !kIndexed || (at >= 0 && at < weights_count);
    *weight = known ? __fmul_rn(__ldg(static_cast<const float*>(weights) + at), factor) : 0.0f;
  }
  return true;
}
"""

_GROUPS = r"""
TK_FN unsigned tk_amax8(const float* v) {
  unsigned amax = 0u;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = tk_amax(amax, v[i]);
  return amax;
}
// The largest over groups of `kLanes` lanes, a power of two.
template <int kLanes>
TK_FN unsigned tk_amax_lanes(unsigned amax) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) amax = tk_amax_bits(amax, __shfl_xor_sync(0xffffffffu, amax, mask));
  return amax;
}
// The factor that quantizes a group to e4m3; `sf` becomes its scale: a UE8M0 byte if packed, else the bits of an fp32.
template <bool kRound, bool kPacked>
TK_FN float tk_group_scale(unsigned* sf, unsigned amax, float clamp_min) {
  amax = tk_amax_bits(amax, tk_bits(clamp_min));
  if constexpr (kRound) {
    const unsigned biased = tk_ue8m0(amax, 448.0f);
    *sf = kPacked ? biased : tk_bits(tk_sf_ue8m0(biased));
    return tk_inv_ue8m0(biased);
  } else {
    *sf = tk_bits(tk_sf_plain(amax, 448.0f));
    return tk_inv_plain(amax, 448.0f);
  }
}
// Stores the scale of group `group` (`sf` is the element of group 0), if it is below `end`. By a whole warp: every lane
// has the scale of its group, of `kLanes` lanes. Bytes after that of the last of `groups` groups in its packed word
// become 0. Where words of four groups never belong to two warps (`kWords`), they are stored whole.
template <bool kPacked, int kLanes, bool kWords>
TK_FN void tk_store_scale(void* sf, unsigned scale, int group, int end, int groups, long long stride, int lane) {
  const bool leads = lane % kLanes == 0 && group < end;
  if constexpr (!kPacked) {
    if (leads) static_cast<unsigned*>(sf)[group * stride] = scale;
  } else if constexpr (kWords && kLanes <= 8) {
    unsigned word = group < end ? scale << (8 * (group & 3)) : 0u;
    word |= __shfl_xor_sync(0xffffffffu, word, kLanes);
    word |= __shfl_xor_sync(0xffffffffu, word, 2 * kLanes);
    if (lane % (4 * kLanes) == 0 && group < end) static_cast<unsigned*>(sf)[(group >> 2) * stride] = word;
  } else if (leads) {
    unsigned char* bytes = reinterpret_cast<unsigned char*>(static_cast<unsigned*>(sf) + (group >> 2) * stride);
    bytes[group & 3] = (unsigned char)scale;
    if (group == groups - 1) {
      for (int i = (group & 3) + 1; i < 4; ++i) bytes[i] = 0;
    }
  }
}
// Sixteen values as codes.
template <int kWidth>
TK_FN void tk_store_codes16(void* p, const float* v, int count) {
  const unsigned words[4] = {tk_e4m3x4(v), tk_e4m3x4(v + 4), tk_e4m3x4(v + 8), tk_e4m3x4(v + 12)};
  tk_store<16, kWidth>(p, words, count);
}
TK_FN void tk_scale8(float* v, float factor) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(v[i], factor);
}
"""

GROUPS = _GROUPS
SOURCE = vectors.SOURCE + _ACTIVATION + _ROWS + _GROUPS


STEP = 256
"""Results of a warp in one step: 8 in each lane."""


def flag(value: bool) -> str:
    """A C++ literal."""
    return "true" if value else "false"


def shape_type(name: str, dtypes: dict[str, Any], numbers: dict[str, int], flags: dict[str, bool]) -> str:
    """A C++ type whose static members are what a kernel is compiled for."""
    lines = [f"  using {member} = {vectors.element(dtype)};" for member, dtype in dtypes.items()]
    lines += [f"  static constexpr int {member} = {value};" for member, value in numbers.items()]
    lines += [f"  static constexpr bool {member} = {flag(value)};" for member, value in flags.items()]
    return "\n".join([f"struct {name} {{", *lines, "};\n"])


def segment_of(group: int) -> tuple[int, int, int]:
    """Channels that a warp takes, steps of 256 in them, and the lanes of a group (32 where it is the segment)."""
    if group == 0:
        return STEP, 1, 32
    if group % 8 == 0 and STEP % group == 0:
        return STEP, 1, group // 8
    return group, -(-group // STEP), 32


class Facts(NamedTuple):
    """Which arguments that tell something of rows are given: ends of experts, weights, their index, experts of rows."""

    psum: bool
    weighted: bool
    indexed: bool
    mapped: bool

    @property
    def function(self) -> str:
        """The device function that reads them."""
        return f"tk_row_facts<{', '.join(map(flag, self))}>"

    def types(self, rows: Any, experts: Any, tokens: Any, topk: Any, absent: Any) -> tuple[Any, ...]:
        """Types of the four parameters. ``absent`` is the type of the tensor passed for one that is not given."""
        import tilelang.language as T

        weights = T.Tensor((tokens, topk) if self.indexed else (rows,), "float32")
        return (
            T.Tensor((experts,), "int32") if self.psum else absent,
            weights if self.weighted else absent,
            T.Tensor((rows,), "int32") if self.indexed else absent,
            T.Tensor((rows,), "int32") if self.mapped else absent,
        )


def facts_of(psum: Tensor | None, weights: Tensor | None, index: Tensor | None, experts: Tensor | None) -> Facts:
    """Which of the arguments are given."""
    return Facts(psum is not None, weights is not None, index is not None, experts is not None)


def unsupported(x: Tensor) -> str | None:
    """Why rows of this dtype cannot run here, or None."""
    if x.dtype == torch.float64:
        return "needs bfloat16 or float32 rows, got float64"
    return None


def width_of(t: Tensor, *columns: int) -> int:
    """The widest access, at most 16 bytes, that rows of ``t`` allow at multiples of these numbers of columns."""
    bits = access.access_width(t)
    for count in columns:
        bits |= count * t.element_size()
    return bits & -bits


def stored_rows(sf: Tensor, column_major: bool) -> int:
    """Rows of a scale result, with the padding of its columns."""
    return sf.stride(1) if column_major else sf.shape[0]
