"""CUDA kernel of ``quant.swiglu_forward_and_per_channel_cast_and_transpose``: bound by bandwidth.

A block of 256 threads takes 128 rows by 64 channels; a thread 4 consecutive rows of 8 channels. Its results stay in
registers, rounded to bf16, while the amax of each group of rows is taken in shared memory. Four rows of a channel make
one word of codes, so a transposed tile passes through shared memory by words, 33 to a channel to spread the banks.
Groups that do not divide 128 rows have a block of their own, which steps over its rows twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder
from ..tile import access
from ..tile.function import prim_func
from . import _swiglu

_ROWS, _COLUMNS, _THREADS = 128, 64, 256
_BLOCKS_PER_SM = 4
"""Thread blocks that a multiprocessor shall hold at least, where their registers are few enough."""

_SOURCE = (
    _swiglu.SOURCE
    + r"""
// Results of 4 rows of 8 channels, rounded to bf16; zeros where there are none.
template <class Shape>
TK_FN void tk_channel_values(float (*v)[8], const char* x, long long stride, int row, int end, int column,
                             float clamp) {
  using S = Shape;
  float l[4][8], r[4][8];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const char* p = x + ((row + j) * stride + column) * S::E::kBytes;
    tk_gate_up8<typename S::E, S::kXWidth>(l[j], r[j], p, S::kChannels, row + j < end ? S::kChannels - column : 0);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    tk_swiglu8<S::kClamp, false>(v[j], l[j], r[j], clamp, 1.0f);
    tk_round8<TkBf16>(v[j]);
  }
}
// Raises the amax of the groups of 4 rows from `row` of the tile.
template <class Shape>
TK_FN void tk_channel_amax(unsigned (*amax)[64], const float (*v)[8], int row, int column) {
  using S = Shape;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (S::kGroups == 1 || S::kGroup % 4 == 0) {
      unsigned most = tk_amax(tk_amax(tk_amax(tk_amax(0u, v[0][i]), v[1][i]), v[2][i]), v[3][i]);
      if constexpr (S::kGroups == 1 || S::kGroup % 16 == 0) {  // the 16 rows of the warp
        most = tk_amax_bits(most, __shfl_xor_sync(0xffffffffu, most, 8));
        most = tk_amax_bits(most, __shfl_xor_sync(0xffffffffu, most, 16));
        if (threadIdx.x % 32 < 8) atomicMax(&amax[S::kGroups == 1 ? 0 : row / S::kGroup][column + i], most);
      } else {
        atomicMax(&amax[row / S::kGroup][column + i], most);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) atomicMax(&amax[(row + j) / S::kGroup][column + i], tk_amax(0u, v[j][i]));
    }
  }
}
// Scales of a tile; the amax of each group becomes the factor that quantizes it.
template <class Shape>
TK_FN void tk_channel_scales(unsigned (*amax)[64], float* sf, int first_row, int rows, int first_column,
                             float clamp_min) {
  using S = Shape;
  for (int i = threadIdx.x; i < S::kGroups * 64; i += 256) {
    const int group = i / 64, column = first_column + i % 64, row = first_row + group * S::kGroup;
    unsigned scale;
    const float inverse = tk_group_scale<S::kRound, false>(&scale, amax[group][i % 64], clamp_min);
    if (row < rows && column < S::kChannels) {
      sf[(long long)(row / S::kGroup) * S::kChannels + column] = tk_float(scale);
    }
    amax[group][i % 64] = tk_bits(inverse);
  }
}
template <class Shape>
TK_FN void tk_swiglu_channels(const void* x, void* out, void* sf, long long stride, int rows, int tile, float clamp,
                              float clamp_min) {
  using S = Shape;
  __shared__ unsigned amax[S::kGroups][64];
  __shared__ unsigned turned[S::kTranspose ? 64 * 33 : 1];
  constexpr int kAcross = (S::kChannels + 63) / 64;
  const int first_row = tile / kAcross * S::kRows, first_column = tile % kAcross * 64;
  const int end = min(rows, first_row + S::kRows);
  const int column = threadIdx.x % 8 * 8, row = threadIdx.x / 8 * 4;  // in the tile
  const char* base = static_cast<const char*>(x);
  float v[4][8];
  for (int i = threadIdx.x; i < S::kGroups * 64; i += 256) amax[i / 64][i % 64] = 0u;
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step < S::kSteps; ++step) {
    tk_channel_values<S>(v, base, stride, first_row + step * 128 + row, end, first_column + column, clamp);
    tk_channel_amax<S>(amax, v, row, column);
  }
  __syncthreads();
  tk_channel_scales<S>(amax, static_cast<float*>(sf), first_row, rows, first_column, clamp_min);
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step < S::kSteps; ++step) {
    const int start = first_row + step * 128;
    if constexpr (S::kSteps > 1) {
      tk_channel_values<S>(v, base, stride, start + row, end, first_column + column, clamp);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int group = S::kGroups == 1 ? 0 : (row + j) / S::kGroup;
#pragma unroll
      for (int i = 0; i < 8; ++i) v[j][i] = __fmul_rn(v[j][i], tk_float(amax[group][column + i]));
      if constexpr (!S::kTranspose) {
        char* p = static_cast<char*>(out) + (long long)(start + row + j) * S::kChannels + first_column + column;
        const int count = start + row + j < end ? S::kChannels - first_column - column : 0;
        tk_store8<TkE4m3, S::kOutWidth>(p, v[j], count);
      }
    }
    if constexpr (S::kTranspose) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float rows4[4] = {v[0][i], v[1][i], v[2][i], v[3][i]};
        turned[(column + i) * 33 + row / 4] = tk_e4m3x4(rows4);
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = i * 32 + threadIdx.x / 8, at = threadIdx.x % 8 * 16;
        unsigned words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = turned[c * 33 + at / 4 + j];
        char* p = static_cast<char*>(out) + (long long)(first_column + c) * rows + start + at;
        tk_store<16, S::kOutWidth>(p, words, first_column + c < S::kChannels ? end - start - at : 0);
      }
      if constexpr (S::kSteps > 1) __syncthreads();
    }
  }
}
"""
)


class _Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        group: rows per scale.
        load_width, store_width: widest access in bytes that rows of ``x`` and of the codes allow.
    """

    dtype: torch.dtype
    channels: int
    group: int
    rounded: bool
    transposed: bool
    clamped: bool
    load_width: int
    store_width: int


def _rows_of(group: int) -> int:
    """Rows of a block."""
    return _ROWS if _ROWS % group == 0 else group


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = _Key(*key)
    tile_rows = _rows_of(k.group)
    numbers = {
        "kChannels": k.channels,
        "kGroup": k.group,
        "kRows": tile_rows,
        "kGroups": tile_rows // k.group,
        "kSteps": -(-tile_rows // _ROWS),
        "kXWidth": k.load_width,
        "kOutWidth": k.store_width,
    }
    flags = {"kRound": k.rounded, "kTranspose": k.transposed, "kClamp": k.clamped}
    source = _SOURCE + _swiglu.shape_type("TkChannelShape", {"E": k.dtype}, numbers, flags)
    rows, row_stride = T.dynamic("rows"), T.dynamic("row_stride", "int64")

    def swiglu_channels(x: Any, out: Any, sf: Any, clamp: Any, clamp_min: Any, blocks: Any) -> None:
        with T.Kernel(blocks, threads=_THREADS) as block:
            T.import_source(source)
            if k.dtype == "bfloat16":
                T.annotate_min_blocks_per_sm(_BLOCKS_PER_SM)
            T.call_extern(
                "handle",
                "tk_swiglu_channels<TkChannelShape>",
                T.address_of(x[0, 0]),
                T.address_of(out[0, 0]),
                T.address_of(sf[0, 0]),
                row_stride,
                rows,
                block,
                clamp,
                clamp_min,
            )

    return prim_func(
        swiglu_channels,
        T.StridedTensor((rows, 2 * k.channels), (row_stride, 1), k.dtype),
        T.Tensor((k.channels, rows) if k.transposed else (rows, k.channels), "float8_e4m3fn"),
        T.Tensor((T.dynamic("sf_rows"), k.channels), "float32"),
        T.float32,
        T.float32,
        T.int32,
    )


_CHANNELS = Builder(
    "quant.swiglu_forward_and_per_channel_cast_and_transpose",
    _build,
    pass_configs={"tl.disable_safe_memory_legalize": True},
)


class SwigluForwardAndPerChannelCastAndTranspose:
    """SwiGLU to e4m3 with scales of groups of rows, the codes transposed or not."""

    revision = 1

    def refusal(self, x: Tensor, *args: Any) -> str | None:
        return _swiglu.unsupported(x)

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        fmt: str,
        num_per_tokens: int,
        round_sf: bool,
        without_transpose: bool,
        clamp_value: float | None,
        clamp_min: float,
    ) -> None:
        out, sf = outs
        rows, channels = x.shape[0], x.shape[1] // 2
        num_per_tokens = access.bounded(num_per_tokens, rows)
        key = _Key(
            x.dtype,
            channels,
            num_per_tokens,
            round_sf,
            not without_transpose,
            clamp_value is not None,
            _swiglu.width_of(x, channels),
            # A block of another number of rows than 128 starts at a multiple of it.
            _swiglu.width_of(out, _rows_of(num_per_tokens)),
        )
        launch = _CHANNELS.get(key, x.device)
        if launch is None:
            reason = _swiglu.unsupported(x)
            if reason:
                raise Refused(reason)
            launch = _CHANNELS.compile(key, x.device)
        blocks = -(-rows // _rows_of(num_per_tokens)) * -(-channels // _COLUMNS)
        launch(x, out, sf, 0.0 if clamp_value is None else clamp_value, clamp_min, blocks)


KERNELS = {
    "quant.swiglu_forward_and_per_channel_cast_and_transpose": SwigluForwardAndPerChannelCastAndTranspose(),
}

CI_KEYS = [
    (_CHANNELS, ("bfloat16", 3072, 128, False, True, True, 16, 16)),
    (_CHANNELS, ("bfloat16", 576, 32, True, False, False, 16, 8)),
    (_CHANNELS, ("float32", 77, 48, False, True, False, 4, 1)),
    (_CHANNELS, ("float32", 64, 2, False, True, False, 16, 4)),
]
