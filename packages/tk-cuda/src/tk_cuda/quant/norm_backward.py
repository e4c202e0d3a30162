"""CUDA kernels of ``quant.norm_backward``: bound by bandwidth.

Each of 132 blocks (the multiprocessors of an H200; a fixed number, so that results do not depend on the device) takes
every 132nd row, a few at a time. A thread owns columns: it fetches its part of the next rows into shared memory
asynchronously, so that loads never wait for the reduction of a row, and adds up its columns of the weight's gradient in
registers. A second kernel adds up the 132 partial sums in a fixed order; both are launched by one call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import config
from tk_core.backend import Refused

from ..jit import Builder
from ..tile import vectors
from ..tile.function import prim_func
from . import _swiglu

PARTIALS = 132
_MOST_WARPS = 16
_MOST_STAGES = 3
_VECTORS_TOGETHER = 4
"""Vectors of 8 channels that a thread works on between two barriers, of one row or of several."""
_MOST_CHANNELS = 65536
_IN_REGISTERS = 16384
"""Channels of which a thread of 16 warps can hold its part in registers; longer rows get 32 warps, and spill."""
_SHARED_BYTES = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_120a": 99 << 10}
_STATIC_BYTES = 1 << 10
_COLUMNS, _GROUPS = 32, 8

_SOURCE = (
    vectors.SOURCE
    + r"""
// Asynchronous copy of 16 bytes to shared memory in accesses of kWidth; zeros past `bytes`.
template <int kWidth>
TK_FN void tk_copy_async(unsigned* to, const void* from, int bytes) {
#ifdef __CUDA_ARCH__
#pragma unroll
  for (int i = 0; i < 16; i += kWidth) {
    const unsigned shared = (unsigned)__cvta_generic_to_shared(to) + i;
    const char* p = static_cast<const char*>(from) + i;
    const int size = bytes - i >= kWidth ? kWidth : 0;
    if constexpr (kWidth == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(p), "r"(size) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(p), "n"(kWidth), "r"(size)
                   : "memory");
    }
  }
#else
  memset(to, 0, 16);
  if (bytes > 0) memcpy(to, from, bytes < 16 ? bytes : 16);
#endif
}
TK_FN void tk_commit_async() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until all but the last kPending commits of this thread have arrived.
template <int kPending>
TK_FN void tk_wait_async() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

struct TkNormGrad {
  const char* source[3];    // out_grad, x and residual_out_grad
  long long stride[3];      // of their rows, in bytes
  const void* weight;
  const float* rstd;
  void* x_grad;
  float* partials;          // (partial sums, channels)
};

// The part of a row that this thread owns, in shared memory that no other thread touches, or in registers.
template <class Shape>
struct TkNormFetch {
  using S = Shape;
  static constexpr int kParts = S::E::kBytes / 2;  // of 16 bytes in a vector
  static constexpr int kWords = 4 * kParts;
  static TK_FN unsigned* slot(unsigned* ring, int stage, int source, int v, int part) {
    const int vector = (stage * S::kSources + source) * S::kVectors + v;
    return ring + ((vector * kParts + part) * S::kThreads + threadIdx.x) * 4;
  }
  // The rows of a stage: `first` and every 132nd after it.
  static TK_FN void fetch(const TkNormGrad& a, unsigned* ring, int stage, long long first, int rows) {
#pragma unroll
    for (int n = 0; n < S::kRows; ++n) {
      const long long row = first + n * S::kPartials;
      if (row >= rows) continue;
#pragma unroll
      for (int s = 0; s < S::kSources; ++s) {
#pragma unroll
        for (int v = 0; v < S::kVectors; ++v) {
          const int column = (v * S::kThreads + threadIdx.x) * 8;
          const char* p = a.source[s] + row * a.stride[s] + column * S::E::kBytes;
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            const int bytes = S::kWhole ? 16 : (S::kChannels - column) * S::E::kBytes - 16 * i;
            unsigned* to = slot(ring, stage * S::kRows + n, s, v, i);
            tk_copy_async<S::kWidth < 4 ? 4 : S::kWidth>(to, p + 16 * i, bytes);
          }
        }
      }
    }
    tk_commit_async();
  }
  static TK_FN void take(const TkNormGrad& a, unsigned* ring, int stage, long long row, bool exists,
                         unsigned (*words)[S::kVectors][kWords]) {
#pragma unroll
    for (int s = 0; s < S::kSources; ++s) {
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        if (!exists) {
#pragma unroll
          for (int i = 0; i < kWords; ++i) words[s][v][i] = 0u;
          continue;
        }
        if constexpr (S::kStages > 0) {
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            const uint4 part = *reinterpret_cast<const uint4*>(slot(ring, stage, s, v, i));
            words[s][v][4 * i] = part.x;
            words[s][v][4 * i + 1] = part.y;
            words[s][v][4 * i + 2] = part.z;
            words[s][v][4 * i + 3] = part.w;
          }
        } else {
          const int column = (v * S::kThreads + threadIdx.x) * 8;
          const char* p = a.source[s] + row * a.stride[s] + column * S::E::kBytes;
          tk_load8<typename S::E, S::kWidth>(words[s][v], p, S::kWhole ? 8 : S::kChannels - column);
        }
      }
    }
  }
};

template <class Shape>
TK_FN void tk_norm_grad_rows(const TkNormGrad& a, unsigned* ring, int first, int rows, float out_scale) {
  using S = Shape;
  using E = typename S::E;
  using Fetch = TkNormFetch<S>;
  constexpr int kWarps = S::kThreads / 32;
  constexpr int kStep = S::kRows * S::kPartials;
  __shared__ float sums[2][S::kRows][kWarps];
  float total[S::kWeight ? S::kVectors : 1][8];
  unsigned weight[S::kWeight ? S::kVectors : 1][Fetch::kWords];
#pragma unroll
  for (int v = 0; v < (S::kWeight ? S::kVectors : 0); ++v) {
    const int column = (v * S::kThreads + threadIdx.x) * 8;
    const char* p = static_cast<const char*>(a.weight) + column * E::kBytes;
    tk_load8<E, S::kWeightWidth>(weight[v], p, S::kChannels - column);
#pragma unroll
    for (int i = 0; i < 8; ++i) total[v][i] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < S::kStages; ++i) Fetch::fetch(a, ring, i, first + (long long)i * kStep, rows);
  int stage = 0, turn = 0;
#pragma unroll 1
  for (long long row = first; row < rows; row += kStep) {
    float rstd[S::kRows], dot[S::kRows];
    unsigned words[S::kRows][S::kSources][S::kVectors][Fetch::kWords];
    if constexpr (S::kStages > 0) tk_wait_async<(S::kStages > 0 ? S::kStages - 1 : 0)>();
#pragma unroll
    for (int n = 0; n < S::kRows; ++n) {
      const long long at = row + n * S::kPartials;
      rstd[n] = at < rows ? __ldg(a.rstd + at) : 0.0f;
      Fetch::take(a, ring, stage * S::kRows + n, at, at < rows, words[n]);
    }
    if constexpr (S::kStages > 0) {
      Fetch::fetch(a, ring, stage, row + (long long)S::kStages * kStep, rows);
      stage = stage + 1 == S::kStages ? 0 : stage + 1;
    }
    float g[S::kRows][S::kVectors][8], xhat[S::kRows][S::kVectors][8];
#pragma unroll
    for (int n = 0; n < S::kRows; ++n) {
      dot[n] = 0.0f;
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        float w[8];
        tk_widen8<E>(g[n][v], words[n][0][v]);
        tk_widen8<E>(xhat[n][v], words[n][1][v]);
        if constexpr (S::kWeight) tk_widen8<E>(w, weight[v]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          xhat[n][v][i] = __fmul_rn(xhat[n][v][i], rstd[n]);
          g[n][v][i] = __fmul_rn(g[n][v][i], out_scale);
          if constexpr (S::kWeight) {
            total[v][i] = __fmaf_rn(xhat[n][v][i], g[n][v][i], total[v][i]);
            g[n][v][i] = __fmul_rn(g[n][v][i], w[i]);
          }
          dot[n] = __fmaf_rn(xhat[n][v][i], g[n][v][i], dot[n]);
        }
      }
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) {
#pragma unroll
      for (int n = 0; n < S::kRows; ++n) dot[n] = __fadd_rn(dot[n], __shfl_xor_sync(0xffffffffu, dot[n], mask));
    }
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int n = 0; n < S::kRows; ++n) sums[turn][n][threadIdx.x / 32] = dot[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < S::kRows; ++n) {
      const long long at = row + n * S::kPartials;
      dot[n] = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) dot[n] = __fadd_rn(dot[n], sums[turn][n][i]);
      const float mean = __fdiv_rn(dot[n], (float)S::kChannels);
      char* out = static_cast<char*>(a.x_grad) + at * S::kChannels * E::kBytes;
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        const int column = (v * S::kThreads + threadIdx.x) * 8;
        float more[8];
        if constexpr (S::kSources == 3) tk_widen8<E>(more, words[n][S::kSources - 1][v]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& d = g[n][v][i];
          d = __fmul_rn(__fsub_rn(d, __fmul_rn(xhat[n][v][i], mean)), rstd[n]);
          if constexpr (S::kSources == 3) d = __fadd_rn(d, more[i]);
        }
        if (at < rows) {
          tk_store8<E, S::kOutWidth>(out + column * E::kBytes, g[n][v], S::kWhole ? 8 : S::kChannels - column);
        }
      }
    }
    turn ^= 1;  // the next rows write the other half, so one barrier a turn is enough
  }
#pragma unroll
  for (int v = 0; v < (S::kWeight ? S::kVectors : 0); ++v) {
    const int column = (v * S::kThreads + threadIdx.x) * 8;
    float* p = a.partials + (long long)first * S::kChannels + column;
    tk_store8<TkF32, S::kPartialWidth>(p, total[v], S::kChannels - column);
  }
}

// Adds up the partial sums of kColumns columns, kGroups of them at a time, in a fixed order.
template <class Out, int kColumns, int kGroups>
TK_FN void tk_norm_weight_grad(void* weight_grad, const float* partials, int count, int channels, int first,
                               bool accumulate) {
  __shared__ float sums[kGroups][kColumns];
  const int column = first + threadIdx.x % kColumns, group = threadIdx.x / kColumns;
  float sum = 0.0f;
  if (column < channels) {
#pragma unroll 8
    for (int i = group; i < count; i += kGroups) {
      sum = __fadd_rn(sum, __ldg(partials + (long long)i * channels + column));
    }
  }
  sums[group][threadIdx.x % kColumns] = sum;
  __syncthreads();
  if (group == 0 && column < channels) {
#pragma unroll
    for (int i = 1; i < kGroups; ++i) sum = __fadd_rn(sum, sums[i][threadIdx.x % kColumns]);
    if constexpr (Out::kBytes == 4) {
      float* out = static_cast<float*>(weight_grad) + column;
      *out = accumulate ? __fadd_rn(*out, sum) : sum;
    } else {
      unsigned short* out = static_cast<unsigned short*>(weight_grad) + column;
      *out = tk_to_bf16(accumulate ? __fadd_rn(tk_bf16_lo(*out), sum) : sum);
    }
  }
}
"""
)


class _Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        weight_grad_dtype: dtype of the weight's gradient; None without a weight.
        width: widest access in bytes that the rows of all inputs allow; ``weight_width``, ``out_width`` likewise.
        residual: whether there is a gradient of the residual.
    """

    dtype: Any
    weight_grad_dtype: Any
    channels: int
    width: int
    weight_width: int
    out_width: int
    residual: bool


def _stages(row_bytes: int, width: int, arch: str) -> int:
    """How many times these bytes are in flight; 0 for loads to registers, where copies are too narrow or do not fit."""
    if width < 4:
        return 0
    room = _SHARED_BYTES.get(arch, 227 << 10) - _STATIC_BYTES
    count = min(_MOST_STAGES, room // row_bytes)
    return count if count >= 2 else 0


def _build(*key: Any, arch: str) -> Any:
    import tilelang.language as T

    k = _Key(*key)
    weighted = k.weight_grad_dtype is not None
    chunks = -(-k.channels // 256)
    count = -(-chunks // (_MOST_WARPS if k.channels <= _IN_REGISTERS else 32))
    threads = -(-chunks // count) * 32
    sources = 3 if k.residual else 2
    vector_bytes = 16 if k.dtype == "bfloat16" else 32
    row_bytes = sources * count * threads * vector_bytes
    together = max(_VECTORS_TOGETHER // count, 1)
    stages = _stages(row_bytes * together, k.width, arch)
    if stages == 0 and together > 1:
        together = 1
        stages = _stages(row_bytes, k.width, arch)
    numbers = {
        "kChannels": k.channels,
        "kThreads": threads,
        "kVectors": count,
        "kSources": sources,
        "kStages": stages,
        "kRows": together,
        "kPartials": PARTIALS,
        "kWidth": k.width,
        "kWeightWidth": max(k.weight_width, 1),
        "kOutWidth": k.out_width,
        "kPartialWidth": 16 if k.channels % 4 == 0 else 4,
    }
    flags = {"kWeight": weighted, "kWhole": k.channels == threads * count * 8}
    source = _SOURCE + _swiglu.shape_type("TkNormGradShape", {"E": k.dtype}, numbers, flags)
    source += r"""
TK_FN void tk_norm_grad(const void* out_grad, const void* x, const void* residual_out_grad, const void* weight,
                        const void* rstd, void* x_grad, void* partials, void* ring, long long out_grad_stride,
                        long long x_stride, long long residual_stride, int first, int rows, float out_scale) {
  constexpr long long kBytes = TkNormGradShape::E::kBytes;
  const TkNormGrad a = {
      {static_cast<const char*>(out_grad), static_cast<const char*>(x), static_cast<const char*>(residual_out_grad)},
      {out_grad_stride * kBytes, x_stride * kBytes, residual_stride * kBytes},
      weight, static_cast<const float*>(rstd), x_grad, static_cast<float*>(partials)};
  tk_norm_grad_rows<TkNormGradShape>(a, static_cast<unsigned*>(ring), first, rows, out_scale);
}
"""
    weight_grad = f"tk_norm_weight_grad<{vectors.element(k.weight_grad_dtype or 'float32')}, {_COLUMNS}, {_GROUPS}>"

    rows, parts = T.dynamic("rows"), T.dynamic("parts")
    strides = [T.dynamic(name, "int64") for name in ("out_grad_stride", "x_stride", "residual_stride")]
    row_types = [T.StridedTensor((rows, k.channels), (stride, 1), k.dtype) for stride in strides]

    @T.macro
    def gradient(
        out_grad: Any,
        x: Any,
        residual: Any,
        weight: Any,
        rstd: Any,
        x_grad: Any,
        partials: Any,
        out_scale: Any,
        count: Any,
        blocks: Any,
        block: Any,
    ) -> None:
        """The gradient of every 132nd row, from several first rows where fewer blocks run."""
        T.import_source(source)
        ring = T.alloc_shared((max(stages * together * row_bytes // 4, 4),), "uint32")
        for i in T.serial(T.ceildiv(count - block, blocks)):
            T.call_extern(
                "handle",
                "tk_norm_grad",
                T.address_of(out_grad[0, 0]),
                T.address_of(x[0, 0]),
                T.address_of(residual[0, 0]) if k.residual else T.address_of(x[0, 0]),
                T.address_of(weight[0]) if weighted else T.address_of(x[0, 0]),
                T.address_of(rstd[0]),
                T.address_of(x_grad[0, 0]),
                T.address_of(partials[0, 0]),
                T.address_of(ring[0]),
                strides[0],
                strides[1],
                strides[2] if k.residual else 0,
                block + i * blocks,
                rows,
                out_scale,
            )

    def norm_backward(
        out_grad: Any,
        x: Any,
        residual: Any,
        weight: Any,
        rstd: Any,
        x_grad: Any,
        partials: Any,
        weight_grad_out: Any,
        out_scale: Any,
        accumulate: Any,
        count: Any,
        blocks: Any,
    ) -> None:
        with T.Kernel(blocks, threads=threads) as block:
            gradient(out_grad, x, residual, weight, rstd, x_grad, partials, out_scale, count, blocks, block)
        with T.Kernel(T.ceildiv(k.channels, _COLUMNS), threads=_COLUMNS * _GROUPS) as block:
            T.call_extern(
                "handle",
                weight_grad,
                T.address_of(weight_grad_out[0]),
                T.address_of(partials[0, 0]),
                count,
                k.channels,
                block * _COLUMNS,
                accumulate,
            )

    def norm_backward_without_weight(
        out_grad: Any,
        x: Any,
        residual: Any,
        rstd: Any,
        x_grad: Any,
        out_scale: Any,
        count: Any,
        blocks: Any,
    ) -> None:
        with T.Kernel(blocks, threads=threads) as block:
            gradient(out_grad, x, residual, x, rstd, x_grad, x, out_scale, count, blocks, block)

    residual_type = row_types[2] if k.residual else row_types[1]
    rstd_type, out_type = T.Tensor((rows,), "float32"), T.Tensor((rows, k.channels), k.dtype)
    if not weighted:
        return prim_func(
            norm_backward_without_weight,
            *row_types[:2],
            residual_type,
            rstd_type,
            out_type,
            T.float32,
            T.int32,
            T.int32,
        )
    return prim_func(
        norm_backward,
        *row_types[:2],
        residual_type,
        T.Tensor((k.channels,), k.dtype),
        rstd_type,
        out_type,
        T.Tensor((parts, k.channels), "float32"),
        T.Tensor((k.channels,), k.weight_grad_dtype),
        T.float32,
        T.int32,
        T.int32,
        T.int32,
    )


_BACKWARD = Builder("quant.norm_backward", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


class NormBackward:
    """Gradient of RMSNorm."""

    revision = 1

    def refusal(self, out_grad: Tensor, x: Tensor, *args: Any) -> str | None:
        if x.shape[1] > _MOST_CHANNELS:
            return f"needs at most {_MOST_CHANNELS} channels, got {x.shape[1]}"
        return _swiglu.unsupported(x)

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        out_grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        residual_out_grad: Tensor | None,
        weight_grad: Tensor | None,
        out_scale: float,
        accumulate: bool,
    ) -> None:
        rows, channels = x.shape
        inputs = [t for t in (out_grad, x, residual_out_grad) if t is not None]
        key = _Key(
            x.dtype,
            None if weight_grad is None else weight_grad.dtype,
            channels,
            min(map(_swiglu.width_of, inputs)),
            0 if weight is None else _swiglu.width_of(weight),
            _swiglu.width_of(outs[0]),
            residual_out_grad is not None,
        )
        launch = _BACKWARD.get(key, x.device)
        if launch is None:
            reason = self.refusal(out_grad, x)
            if reason:
                raise Refused(reason)
            launch = _BACKWARD.compile(key, x.device)
        count = min(rows, PARTIALS)
        blocks = min(count, config.get_num_sms() or count)
        residual = x if residual_out_grad is None else residual_out_grad
        if weight is None or weight_grad is None:
            launch(out_grad, x, residual, rstd, outs[0], out_scale, count, blocks)
            return
        partials = x.new_empty((count, channels), dtype=torch.float32)
        launch(
            out_grad,
            x,
            residual,
            weight,
            rstd,
            outs[0],
            partials,
            weight_grad,
            out_scale,
            int(accumulate),
            count,
            blocks,
        )


KERNELS = {"quant.norm_backward": NormBackward()}

CI_KEYS = [
    (_BACKWARD, ("bfloat16", "float32", 7168, 16, 16, 16, True)),
    (_BACKWARD, ("bfloat16", "bfloat16", 7168, 16, 16, 16, False)),
    (_BACKWARD, ("float32", None, 77, 4, 0, 4, False)),
    (_BACKWARD, ("bfloat16", "bfloat16", 300, 2, 8, 8, True)),
]
LARGEST_KEYS = [
    (_BACKWARD, ("float32", "float32", 16384, 16, 16, 16, True)),
    (_BACKWARD, ("float32", "float32", 65536, 16, 16, 16, True)),
]
