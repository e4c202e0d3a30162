"""Stable top-k of one row by one warp, as CUDA device functions for the gates.

``T.import_source(SOURCE)`` brings ``tk::topk_row<E, K, Width>(row, lane)``: lane ``k`` gets the id of rank ``k``. The
row is read through the read-only cache, first as a whole in accesses of ``Width`` bytes, then in parts; so it costs no
shared memory and no barrier, whatever the number of experts.

A lane owns a segment of consecutive columns and keeps the largest key in it. Since a segment without one of the ``K``
largest maxima (ties: lower lane) holds none of the ``K`` largest scores, the rest of the work is on ``K`` segments:

- Few columns left for each lane (``kSplit``): the segments are dealt out again, each lane sorts its columns, and an
  extraction is two warp reductions (largest key; lowest column that has it) and a pop.
- Else: an extraction finds the segment of the largest maximum, and the warp searches that segment together. What was
  taken before needs no flags: it is exactly what precedes the last id in the order of the result.
"""

from __future__ import annotations

SOURCE = r"""
#ifndef TK_TOPK
#define TK_TOPK
namespace tk {
constexpr unsigned kWarp = 0xffffffffu;
constexpr int kNoColumn = 0x7fffffff;

// Unsigned keys in the order of scores: -0 as +0, NaN (1) below -inf. 0 stands for no column.
__device__ __forceinline__ unsigned rank_key(float x) {
  const unsigned b = __float_as_uint(__fadd_rn(x, 0.0f));
  const unsigned ordered = b ^ (static_cast<unsigned>(static_cast<int>(b) >> 31) | 0x80000000u);
  return x != x ? 1u : ordered;
}

template <int E, int K>
struct TopkShape {
  static constexpr int kSegment = (E + 127) / 128 * 4;                     // columns of a lane
  static constexpr int kSegments = (E + kSegment - 1) / kSegment;
  static constexpr bool kSelect = kSegments > K && K <= 16;                // worth choosing segments first
  static constexpr int kLanes = kSelect ? 32 / K : 1;                      // lanes that share a chosen segment
  static constexpr int kColumns = (kSegment + kLanes - 1) / kLanes;        // columns of a lane after that
  static constexpr bool kSplit = kColumns <= 4;
};

// The largest key of this lane's segment. fmaxf drops NaN unless there is nothing else.
template <int E, int K, int Width>
__device__ __forceinline__ unsigned segment_key(const float* row, int lane) {
  using S = TopkShape<E, K>;
  constexpr int kStep = Width / 4;
  const int first = lane * S::kSegment;
  float most = __uint_as_float(0x7fc00000u);
#pragma unroll
  for (int i = 0; i < S::kSegment; i += kStep) {
    if (E == 32 * S::kSegment || first + i < E) {
      if constexpr (Width == 16) {
        const float4 v = __ldg(reinterpret_cast<const float4*>(row + first + i));
        most = fmaxf(fmaxf(most, fmaxf(v.x, v.y)), fmaxf(v.z, v.w));
      } else if constexpr (Width == 8) {
        const float2 v = __ldg(reinterpret_cast<const float2*>(row + first + i));
        most = fmaxf(most, fmaxf(v.x, v.y));
      } else {
        most = fmaxf(most, __ldg(row + first + i));
      }
    }
  }
  return first < E ? rank_key(most) : 0u;
}

// The segment whose columns a lane holds next: lanes q * kLanes and following get the q-th best.
template <int E, int K>
__device__ __forceinline__ int chosen_segment(unsigned most, int lane) {
  using S = TopkShape<E, K>;
  int mine = lane;
  if constexpr (S::kSelect) {
    mine = S::kSegments;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const unsigned best = __reduce_max_sync(kWarp, most);
      const int winner = __ffs(__ballot_sync(kWarp, most == best)) - 1;
      if (lane / S::kLanes == k) mine = winner;
      if (lane == winner) most = 0u;
    }
  }
  return mine;
}

template <int E, int K, int Width>
__device__ __forceinline__ int topk_split(const float* row, int lane) {
  using S = TopkShape<E, K>;
  unsigned key[S::kColumns];
  int column[S::kColumns];
  const int segment = S::kSelect ? chosen_segment<E, K>(segment_key<E, K, Width>(row, lane), lane) : lane;
  const int part = lane % S::kLanes * S::kColumns;
#pragma unroll
  for (int i = 0; i < S::kColumns; ++i) {
    const int at = segment * S::kSegment + part + i;
    const bool exists = part + i < S::kSegment && at < E;
    column[i] = exists ? at : kNoColumn;
    key[i] = exists ? rank_key(__ldg(row + at)) : 0u;
  }
  // Neighbours change places only if they differ, so equal scores stay in the order of their columns.
#pragma unroll
  for (int i = 1; i < S::kColumns; ++i) {
#pragma unroll
    for (int j = S::kColumns - 1; j >= i; --j) {
      const bool swap = key[j] > key[j - 1];
      const unsigned k = key[j];
      const int c = column[j];
      key[j] = swap ? key[j - 1] : k;
      column[j] = swap ? column[j - 1] : c;
      key[j - 1] = swap ? k : key[j - 1];
      column[j - 1] = swap ? c : column[j - 1];
    }
  }
  int id = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const unsigned best = __reduce_max_sync(kWarp, key[0]);
    const int taken = __reduce_min_sync(kWarp, key[0] == best ? column[0] : kNoColumn);
    if (lane == k) id = taken;
    if (column[0] == taken) {
#pragma unroll
      for (int i = 1; i < S::kColumns; ++i) {
        key[i - 1] = key[i];
        column[i - 1] = column[i];
      }
      key[S::kColumns - 1] = 0u;
    }
  }
  return id;
}

template <int E, int K, int Width>
__device__ __forceinline__ int topk_search(const float* row, int lane) {
  using S = TopkShape<E, K>;
  constexpr int kRounds = (S::kSegment + 31) / 32;
  unsigned most = segment_key<E, K, Width>(row, lane);
  unsigned last = kWarp;
  int taken = -1, id = 0;
  for (int k = 0; k < K; ++k) {
    const unsigned best = __reduce_max_sync(kWarp, most);
    const int winner = __ffs(__ballot_sync(kWarp, most == best)) - 1;
    const int after = best == last ? taken : -1;  // columns up to here that have the key `best` are taken
    unsigned next = 0u;
    int found = -1;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int at = r * 32 + lane, column = winner * S::kSegment + at;
      unsigned key = at < S::kSegment && column < E ? rank_key(__ldg(row + column)) : 0u;
      if (key > best || (key == best && column <= after)) key = 0u;
      const unsigned equal = __ballot_sync(kWarp, key == best);
      if (found < 0 && equal != 0u) {
        found = winner * S::kSegment + r * 32 + __ffs(equal) - 1;
        if (column == found) key = 0u;
      }
      next = key > next ? key : next;
    }
    next = __reduce_max_sync(kWarp, next);
    if (lane == winner) most = next;
    if (lane == k) id = found;
    last = best;
    taken = found;
  }
  return id;
}

template <int E, int K, int Width>
__device__ __forceinline__ int topk_row(const float* row, int lane) {
  if constexpr (TopkShape<E, K>::kSplit) {
    return topk_split<E, K, Width>(row, lane);
  } else {
    return topk_search<E, K, Width>(row, lane);
  }
}

template <int E, int K, int Width, typename Id>
__device__ __forceinline__ void write_topk_row(Id* ids, const float* row, int lane) {
  const int id = topk_row<E, K, Width>(row, lane);
  if (lane < K) ids[lane] = id;
}
}  // namespace tk
#endif
"""

MAX_TOPK = 32
MAX_EXPERTS = 4096


def topk_refusal(num_topk: int, num_experts: int) -> str | None:
    """Why a warp cannot select ``num_topk`` of ``num_experts``, or None."""
    if num_topk > MAX_TOPK:
        return f"selects at most {MAX_TOPK} experts, one for each lane of a warp, got num_topk = {num_topk}"
    if num_experts > MAX_EXPERTS:
        return f"ranks at most {MAX_EXPERTS} experts, got {num_experts}"
    return None
