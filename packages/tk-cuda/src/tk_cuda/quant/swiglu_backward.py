"""CUDA kernels of ``quant.swiglu_backward`` and ``quant.swiglu_backward_and_per_token_cast``: bound by bandwidth.

A block takes one row, a warp segments of 256 channels of it, 8 in each lane, as in the forward kernel; the block adds
up the gradient of the row's weight in an order that depends on the number of channels alone. Rows that are not real
are not read; zeros are written for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder
from ..tile.function import prim_func
from . import _swiglu

_MOST_WARPS = 16

_GRADIENT = r"""
// Gradients of eight gates l and up values r from that of the weighted results, g. `act` becomes the weighted results;
// unweighted ones times g are added to `dot`.
template <bool kClamp, bool kWeight>
TK_FN void tk_swiglu_grad8(float* l_grad, float* r_grad, float* act, float* dot, float* l, float* r, const float* g,
                           float clamp, float weight) {
  unsigned l_out = 0u, r_out = 0u;
#pragma unroll
  for (int i = 0; i < (kClamp ? 8 : 0); ++i) {
    l_out |= (unsigned)(l[i] > clamp) << i;
    r_out |= (unsigned)(r[i] > clamp || r[i] < -clamp) << i;
  }
  tk_clamp8<kClamp>(l, r, clamp);
  float s[8];
  tk_silu8(act, s, l);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float q = __fmul_rn(kWeight ? __fmul_rn(g[i], weight) : g[i], s[i]);
    const float slope = __fmaf_rn(l[i], __fsub_rn(1.0f, s[i]), 1.0f);
    l_grad[i] = l_out >> i & 1u ? 0.0f : __fmul_rn(__fmul_rn(q, r[i]), slope);
    r_grad[i] = r_out >> i & 1u ? 0.0f : __fmul_rn(q, l[i]);
    act[i] = __fmul_rn(act[i], r[i]);
    if constexpr (kWeight) {
      *dot = __fmaf_rn(g[i], act[i], *dot);
      act[i] = __fmul_rn(act[i], weight);
    }
  }
}
// Eight gates and up values: of plain elements, or of codes times the scales of their groups.
template <class E, int kWidth, int kGroup>
TK_FN void tk_saved8(float* l, float* r, const void* x, const float* sf, int channels, int column, int count) {
  tk_gate_up8<E, kWidth>(l, r, static_cast<const char*>(x) + (long long)column * E::kBytes, channels, count);
  if constexpr (kGroup > 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= count) continue;
      const int group = (kGroup % 8 == 0 ? column : column + i) / kGroup;
      l[i] = __fmul_rn(l[i], __ldg(sf + group));
      r[i] = __fmul_rn(r[i], __ldg(sf + channels / kGroup + group));
    }
  }
}
"""

_ROW = r"""
struct TkSwigluRow {  // pointers to a row, but for `sf`, its first scale
  const void* x;
  const float* x_sf;
  const void* g;
  void* x_grad;
  void* act_out;
  void* codes;
  void* sf;
};

// Results of a segment of kChannels channels from `start`, by a warp. Returns its share of the weight's gradient.
template <class Shape>
TK_FN float tk_swiglu_segment(const TkSwigluRow& row, bool real, int start, long long group_stride, float clamp,
                              float weight, float clamp_min, int lane) {
  using S = Shape;
  constexpr int kGroups = S::kGroup ? S::kChannels / S::kGroup : 1;
  float grad[2][8], dot = 0.0f, spare;
  unsigned amax[2] = {0u, 0u}, scale[2] = {0u, 0u};
  const auto compute = [&](int column, int count, float* act, float* sum) {
    float l[8], r[8], g[8];
    unsigned words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) grad[0][i] = grad[1][i] = act[i] = 0.0f;
    if (!real) return;
    tk_saved8<typename S::X, S::kXWidth, S::kGroup>(l, r, row.x, row.x_sf, S::kChannels, column, count);
    tk_load8<typename S::G, S::kGWidth>(words, static_cast<const char*>(row.g) + column * S::G::kBytes, count);
    tk_widen8<typename S::G>(g, words);
    tk_swiglu_grad8<S::kClamp, S::kWeight>(grad[0], grad[1], act, sum, l, r, g, clamp, weight);
  };
  const auto store = [&](void* p, int column, const float* v, int count) {
    tk_store8<typename S::O, S::kOWidth>(static_cast<char*>(p) + (long long)column * S::O::kBytes, v, count);
  };
#pragma unroll 1
  for (int step = 0; step < S::kSteps; ++step) {
    const int column = start + step * 256 + lane * 8;
    const int count = S::kWhole ? 8 : min(min(start + S::kSegment, S::kChannels) - column, 8);
    float act[8];
    compute(column, count, act, &dot);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store(row.x_grad, column + half * S::kChannels, grad[half], count);
      if constexpr (S::kGroup > 0) amax[half] = tk_amax_bits(amax[half], tk_amax8(grad[half]));
    }
    if constexpr (S::kRecompute) store(row.act_out, column, act, count);
  }
  if constexpr (S::kGroup > 0) {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      amax[half] = tk_amax_lanes<S::kLanes>(amax[half]);
      inverse[half] = tk_group_scale<S::kRound, S::kPacked>(&scale[half], amax[half], clamp_min);
    }
#pragma unroll 1
    for (int step = 0; step < S::kSteps; ++step) {
      const int column = start + step * 256 + lane * 8;
      const int count = S::kWhole ? 8 : min(min(start + S::kSegment, S::kChannels) - column, 8);
      float act[8];
      if constexpr (S::kSteps > 1) compute(column, count, act, &spare);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        tk_scale8(grad[half], inverse[half]);
        char* p = static_cast<char*>(row.codes) + column + half * S::kChannels;
        tk_store8<TkE4m3, S::kCodeWidth>(p, grad[half], count);
      }
    }
    const int group = start / S::kGroup + lane / S::kLanes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tk_store_scale<S::kPacked, S::kLanes, kGroups % 4 == 0>(
          row.sf, real ? scale[half] : 0u, group + half * kGroups, (half + 1) * kGroups, 2 * kGroups, group_stride,
          lane);
    }
  }
  return dot;
}

// The sum over a block of kWarps warps, in a fixed order; for thread 0.
template <int kWarps>
TK_FN float tk_block_sum(float x) {
  __shared__ float sums[kWarps];
#pragma unroll
  for (int mask = 16; mask; mask /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, mask));
  if constexpr (kWarps > 1) {
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) x = __fadd_rn(x, sums[i]);
  }
  return x;
}
template <class Shape>
TK_FN void tk_swiglu_row(const void* x, const void* x_sf, const void* g, void* x_grad, void* act_out, void* codes,
                         void* sf, void* weight_grad, const void* index, long long weights_count, long long row,
                         int real, int stored, long long group_stride, float clamp, float weight, float factor,
                         float clamp_min) {
  using S = Shape;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const TkSwigluRow pointers = {x, static_cast<const float*>(x_sf), g, x_grad, act_out, codes, sf};
  float dot = 0.0f;
#pragma unroll 1
  for (int start = warp * S::kSegment; start < S::kChannels; start += S::kWarps * S::kSegment) {
    if (stored) {
      dot += tk_swiglu_segment<S>(pointers, real, start, group_stride, clamp, weight, clamp_min, lane);
    } else if constexpr (S::kGroup > 0) {
      constexpr int kGroups = S::kChannels / (S::kGroup ? S::kGroup : 1);
      const int group = start / S::kGroup + lane / S::kLanes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        tk_store_scale<S::kPacked, S::kLanes, kGroups % 4 == 0>(sf, 0u, group + half * kGroups, (half + 1) * kGroups,
                                                                2 * kGroups, group_stride, lane);
      }
    }
  }
  if constexpr (S::kWeight) {
    if (!stored) return;
    const float sum = tk_block_sum<S::kWarps>(dot);
    long long at = row;
    if constexpr (S::kIndexed) at = __ldg(static_cast<const int*>(index) + row);
    if (threadIdx.x == 0 && at >= 0 && (!S::kIndexed || at < weights_count)) {
      static_cast<float*>(weight_grad)[at] = real ? __fmul_rn(sum, factor) : 0.0f;
    }
  }
}
"""


class _Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        grad_dtype, out_dtype: of the gradient that comes in; of ``x_grad`` and ``act_out``.
        channels: results of SwiGLU in a row.
        group: channels per scale, of ``x`` and of the quantized gradient; 0 without a cast.
        rounded, packed: scales are powers of two; UE8M0 bytes in words.
        widths: widest accesses in bytes of ``x``, of the gradient, of ``x_grad`` and ``act_out``, and of the codes.
        rows: which of the arguments of :class:`_swiglu.Facts` are given.
        clamped, recomputed: whether there is a clamp, and ``act_out``.
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    out_dtype: torch.dtype
    channels: int
    group: int
    rounded: bool
    packed: bool
    widths: tuple[int, int, int, int]
    rows: _swiglu.Facts
    clamped: bool
    recomputed: bool


def _shape(k: _Key, facts: _swiglu.Facts, warps: int) -> str:
    """The key as a C++ type."""
    segment, steps, lanes = _swiglu.segment_of(k.group)
    whole = segment == _swiglu.STEP and k.channels % _swiglu.STEP == 0
    numbers = {
        "kXWidth": k.widths[0],
        "kGWidth": k.widths[1],
        "kOWidth": k.widths[2],
        "kCodeWidth": k.widths[3],
        "kChannels": k.channels,
        "kGroup": k.group,
        "kSegment": segment,
        "kSteps": steps,
        "kLanes": lanes,
        "kWarps": warps,
    }
    flags = {
        "kWhole": whole,
        "kRound": k.rounded,
        "kPacked": k.packed,
        "kClamp": k.clamped,
        "kWeight": facts.weighted,
        "kIndexed": facts.indexed,
        "kRecompute": k.recomputed,
    }
    dtypes = {"X": k.dtype, "G": k.grad_dtype, "O": k.out_dtype}
    return _swiglu.shape_type("TkSwigluShape", dtypes, numbers, flags)


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = _Key(*key)
    facts = _swiglu.Facts(*k.rows)
    segment, _, _ = _swiglu.segment_of(k.group)
    segments = -(-k.channels // segment)
    warps = -(-segments // -(-segments // _MOST_WARPS))
    source = _swiglu.SOURCE + _GRADIENT + _ROW + _shape(k, facts, warps)

    rows, experts, tokens, topk = (T.dynamic(name) for name in ("rows", "experts", "tokens", "topk"))
    strides = {name: T.dynamic(name, "int64") for name in ("row_stride", "grad_stride", "scale_stride", "group_stride")}
    x_type = T.StridedTensor((rows, 2 * k.channels), (strides["row_stride"], 1), k.dtype)
    sf_type = T.StridedTensor(
        (rows, T.dynamic("sf_columns")),
        (strides["scale_stride"], strides["group_stride"]),
        "int32" if k.packed else "float32",
    )

    def start_of(t: Any) -> Any:
        return T.address_of(t[(0,) * len(t.shape)])

    def swiglu_backward(
        x: Any,
        x_sf: Any,
        act_x_grad: Any,
        x_grad: Any,
        codes: Any,
        sf: Any,
        weight_grad: Any,
        act_out: Any,
        psum: Any,
        weights: Any,
        index: Any,
        expert_of: Any,
        alignment: Any,
        factor: Any,
        clamp: Any,
        clamp_min: Any,
        blocks: Any,
    ) -> None:
        with T.Kernel(blocks, threads=warps * 32) as block:
            T.import_source(source)
            row = T.cast(block, "int64")
            weight = T.alloc_local((1,), "float32")
            real = T.alloc_var("bool")
            weight[0] = 1.0
            real = row < rows
            if real:
                real = T.call_extern(
                    "bool",
                    facts.function,
                    T.access_ptr(weight[0], "w", 1),
                    start_of(psum),
                    experts if facts.psum else 0,
                    alignment,
                    start_of(weights),
                    start_of(index),
                    tokens * topk if facts.indexed else 0,
                    start_of(expert_of),
                    factor,
                    row,
                    T.get_thread_binding() % 32,
                )
            T.call_extern(
                "handle",
                "tk_swiglu_row<TkSwigluShape>",
                T.access_ptr(x[row, 0], "r"),
                T.access_ptr(x_sf[row, 0], "r"),
                T.access_ptr(act_x_grad[row, 0], "r"),
                T.access_ptr(x_grad[row, 0], "w"),
                T.access_ptr(act_out[row, 0], "w"),
                T.access_ptr(codes[row, 0], "w"),
                T.access_ptr(sf[row, 0], "w"),
                start_of(weight_grad),
                start_of(index),
                tokens * topk if facts.indexed else 0,
                row,
                real,
                row < rows,
                strides["group_stride"] if k.group else 0,
                clamp,
                weight[0],
                factor,
                clamp_min,
            )

    weight_grad_type = T.Tensor((tokens, topk) if facts.indexed else (rows,), "float32")
    return prim_func(
        swiglu_backward,
        x_type,
        T.Tensor((rows, 2 * k.channels // k.group), "float32") if k.group else x_type,
        T.StridedTensor((rows, k.channels), (strides["grad_stride"], 1), k.grad_dtype),
        T.Tensor((rows, 2 * k.channels), k.out_dtype),
        T.Tensor((rows, 2 * k.channels), "float8_e4m3fn") if k.group else x_type,
        sf_type if k.group else x_type,
        weight_grad_type if facts.weighted else x_type,
        T.Tensor((rows, k.channels), k.out_dtype) if k.recomputed else x_type,
        *facts.types(rows, experts, tokens, topk, x_type),
        T.int32,
        T.float32,
        T.float32,
        T.float32,
        T.int32,
    )


_BACKWARD = Builder("quant.swiglu_backward", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


class _Cast(NamedTuple):
    """What only the form with a cast has."""

    x_sf: Tensor
    codes: Tensor
    sf: Tensor
    group: int
    column_major: bool
    rounded: bool
    packed: bool
    clamp_min: float


def _launch(
    cast: _Cast | None,
    x_grad: Tensor,
    x: Tensor,
    act_x_grad: Tensor,
    psum: Tensor | None,
    weights: Tensor | None,
    index: Tensor | None,
    experts: Tensor | None,
    factor: float | None,
    clamp: float | None,
    weight_grad: Tensor | None,
    act_out: Tensor | None,
    alignment: int,
) -> None:
    rows, channels = act_x_grad.shape
    group = 0 if cast is None else cast.group
    segment, _, _ = _swiglu.segment_of(group)
    widths = (
        _swiglu.width_of(x, channels, segment),
        _swiglu.width_of(act_x_grad, segment),
        _swiglu.width_of(x_grad, channels, segment),
        0 if cast is None else _swiglu.width_of(cast.codes, channels, segment),
    )
    facts = _swiglu.facts_of(psum, weights, index, experts)
    key = _Key(
        x.dtype,
        act_x_grad.dtype,
        x_grad.dtype,
        channels,
        group,
        cast is not None and cast.rounded,
        cast is not None and cast.packed,
        widths,
        facts,
        clamp is not None,
        act_out is not None,
    )
    launch = _BACKWARD.get(key, x.device)
    if launch is None:
        reason = _swiglu.unsupported(x)
        if reason:
            raise Refused(reason)
        launch = _BACKWARD.compile(key, x.device)
    if weight_grad is not None and index is not None:
        weight_grad.zero_()  # entries that no row refers to
    launch(
        x,
        x if cast is None else cast.x_sf,
        act_x_grad,
        x_grad,
        x if cast is None else cast.codes,
        x if cast is None else cast.sf,
        x if weight_grad is None else weight_grad,
        x if act_out is None else act_out,
        x if psum is None else psum,
        x if weights is None else weights,
        x if index is None else index,
        x if experts is None else experts,
        alignment,
        1.0 if factor is None else factor,
        0.0 if clamp is None else clamp,
        0.0 if cast is None else cast.clamp_min,
        rows if cast is None else _swiglu.stored_rows(cast.sf, cast.column_major),
    )


class SwigluBackward:
    """Gradient of SwiGLU."""

    revision = 1

    def refusal(self, x: Tensor, *args: Any) -> str | None:
        return _swiglu.unsupported(x)

    def __call__(self, outs: tuple[Tensor, ...], x: Tensor, act_x_grad: Tensor, fmt: str, *rest: Any) -> None:
        _launch(None, outs[0], x, act_x_grad, *rest)


class SwigluBackwardAndPerTokenCast:
    """Gradient of SwiGLU from a quantized input, in bf16 and quantized."""

    revision = 1

    def refusal(self, x: Tensor, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        x_sf: Tensor,
        act_x_grad: Tensor,
        fmt: str,
        num_per_channels: int,
        psum_num_tokens_per_expert: Tensor | None,
        topk_weights: Tensor | None,
        pos_to_token_topk: Tensor | None,
        pos_to_expert: Tensor | None,
        routed_scaling_factor: float | None,
        use_tma_aligned_col_major_sf: bool,
        round_sf: bool,
        use_packed_ue8m0: bool,
        clamp_value: float | None,
        weight_grad: Tensor | None,
        act_out: Tensor | None,
        token_alignment: int,
        clamp_min: float,
        ue8m0_per_word: int,
        sf_align_bytes: int,
    ) -> None:
        x_grad, codes, sf = outs
        cast = _Cast(
            x_sf, codes, sf, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, clamp_min
        )
        _launch(
            cast,
            x_grad,
            x,
            act_x_grad,
            psum_num_tokens_per_expert,
            topk_weights,
            pos_to_token_topk,
            pos_to_expert,
            routed_scaling_factor,
            clamp_value,
            weight_grad,
            act_out,
            token_alignment,
        )


KERNELS = {
    "quant.swiglu_backward": SwigluBackward(),
    "quant.swiglu_backward_and_per_token_cast": SwigluBackwardAndPerTokenCast(),
}

_ALL = (True, True, False, False)
_NONE = (False, False, False, False)
_BF16, _FP32, _E4M3 = "bfloat16", "float32", "float8_e4m3fn"
CI_KEYS = [
    (_BACKWARD, (_BF16, _BF16, _BF16, 3072, 0, False, False, (16, 16, 16, 0), _NONE, False, False)),
    (_BACKWARD, (_FP32, _FP32, _BF16, 77, 0, False, False, (4, 4, 2, 0), (False, True, True, True), True, True)),
    (_BACKWARD, (_E4M3, _BF16, _BF16, 3072, 32, True, True, (8, 16, 16, 8), _ALL, True, True)),
    (_BACKWARD, (_E4M3, _FP32, _BF16, 384, 48, False, False, (8, 16, 16, 8), _NONE, False, False)),
]
