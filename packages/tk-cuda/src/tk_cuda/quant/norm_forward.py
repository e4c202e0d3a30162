"""CUDA kernels of ``quant.norm_forward`` and ``quant.norm_forward_and_per_token_cast``: bound by bandwidth.

A block takes one row and keeps it in registers, packed. The sum of squares is a tree over eights of channels within
chunks of 256, then over the chunks: the same tree whatever number of threads shares the row, so many rows can use few
threads each, and few rows to cast many. A thread takes vectors of 8 channels; pairs of neighbouring vectors where codes
are all that is stored of them, so that a scale costs half as much (stores of wider elements would leave gaps).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder, num_sms
from ..tile import access
from ..tile.function import prim_func
from . import _swiglu

_CHUNK = 256
_VECTORS = 4
"""Vectors of 8 channels in a thread, with many rows: loads in flight against threads."""
_THREADS_PER_SM = 1120
"""Threads that a multiprocessor shall hold of the form that is bound by latency."""
_MOST_CHANNELS = 65536
_MOST_GROUPS = 8192
_WAVES_OF_FEW_ROWS = 2
"""Rows for each multiprocessor up to which a row that is cast gets as many threads as there are vectors."""

_SOURCE = (
    _swiglu.SOURCE
    + r"""
struct TkNormRow {  // pointers to a row; null for what is not asked for
  const void* x;
  const void* residual;
  const void* weight;
  void* out;
  void* out_bf16;
  void* h;
  float* rstd;
  void* sf;
  void* mega;
};

// First channel of vector `v` of this thread.
template <class Shape>
TK_FN int tk_norm_column(int v) {
  return (v / Shape::kPair * Shape::kThreads + threadIdx.x) * 8 * Shape::kPair + v % Shape::kPair * 8;
}
// Groups that no lanes of a warp share: the amax of each in shared memory.
template <class Shape>
TK_FN unsigned* tk_group_amax() {
  __shared__ unsigned amax[Shape::kOddGroups];
  return amax;
}
template <class Shape, int kWords>
TK_FN unsigned tk_pair_amax(const unsigned (*words)[kWords]) {
  unsigned acc = 0u;
#pragma unroll
  for (int i = 0; i < Shape::kPair * kWords; ++i) {
    const unsigned word = words[i / kWords][i % kWords];
    acc = kWords == 4 ? tk_amax_bf16x2(acc, word) : tk_amax(acc, tk_float(word));
  }
  return kWords == 4 ? tk_amax_fold(acc) : acc;
}
template <class Shape, int kWords>
TK_FN void tk_store_norm(const TkNormRow& row, const unsigned (*words)[kWords], long long group_stride,
                         long long mega_stride, float clamp_min) {
  using S = Shape;
  const int lane = threadIdx.x % 32;
  constexpr bool kOdd = S::kOddGroups > 1;
  unsigned* odd = tk_group_amax<S>();
  if constexpr (kOdd) {
    for (int i = threadIdx.x; i < S::kGroups; i += S::kThreads) odd[i] = 0u;
    __syncthreads();
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      const int column = tk_norm_column<S>(v);
      float n[8];
      tk_widen8<typename S::E>(n, words[v]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i < S::kChannels) atomicMax(&odd[(column + i) / S::kGroup], tk_amax(0u, n[i]));
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < (S::kGroups + 31) / 32 * 32; i += S::kThreads) {
      unsigned scale;
      tk_group_scale<S::kRound, S::kPacked>(&scale, i < S::kGroups ? odd[i] : 0u, clamp_min);
      tk_store_scale<S::kPacked, 1, true>(row.sf, scale, i, S::kGroups, S::kGroups, group_stride, lane);
    }
  }
#pragma unroll
  for (int v = 0; v < S::kVectors; v += S::kPair) {
    const int column = tk_norm_column<S>(v);
    float n[8 * S::kPair];
    unsigned scale;
#pragma unroll
    for (int i = 0; i < S::kPair; ++i) tk_widen8<typename S::E>(n + 8 * i, words[v + i]);
    if constexpr (kOdd) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int group = min(column + i, S::kChannels - 1) / S::kGroup;
        n[i] = __fmul_rn(n[i], tk_group_scale<S::kRound, S::kPacked>(&scale, odd[group], clamp_min));
      }
    } else {
      const int group = column / S::kGroup;
      const unsigned amax = tk_amax_lanes<S::kLanes>(tk_pair_amax<S, kWords>(words + v));
      const float inverse = tk_group_scale<S::kRound, S::kPacked>(&scale, amax, clamp_min);
#pragma unroll
      for (int i = 0; i < S::kPair; ++i) tk_scale8(n + 8 * i, inverse);
      tk_store_scale<S::kPacked, S::kLanes, true>(row.sf, scale, group, S::kGroups, S::kGroups, group_stride, lane);
      if constexpr (S::kMega) {
        const unsigned biased = S::kPacked ? scale : scale >> 23;
        tk_store_scale<true, S::kLanes, true>(row.mega, biased, group, S::kGroups, S::kGroups, mega_stride, lane);
      }
    }
    char* out = static_cast<char*>(row.out) + column;
    const int count = S::kWhole ? 8 * S::kPair : S::kChannels - column;
    if constexpr (S::kPair == 2) {
      tk_store_codes16<S::kOutWidth>(out, n, count);
    } else {
      tk_store8<TkE4m3, S::kOutWidth>(out, n, count);
    }
  }
}

template <class Shape>
TK_FN void tk_norm_row(TkNormRow row, float eps, float out_scale, long long group_stride, long long mega_stride,
                       float clamp_min) {
  using S = Shape;
  using E = typename S::E;
  constexpr int kWarps = S::kThreads / 32, kShare = 32 / S::kPair;  // lanes that share a chunk
  const int lane = threadIdx.x % 32;
  __shared__ float sums[S::kVectors * kWarps];
  unsigned words[S::kVectors][E::kBytes * 2], more[S::kVectors][E::kBytes * 2];
  const auto at = [](const void* p, int column, int bytes) { return static_cast<const char*>(p) + column * bytes; };
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const int column = tk_norm_column<S>(v), count = S::kWhole ? 8 : S::kChannels - column;
    tk_load8<E, S::kXWidth>(words[v], at(row.x, column, E::kBytes), count);
    if constexpr (S::kResidual) tk_load8<E, S::kResidualWidth>(more[v], at(row.residual, column, E::kBytes), count);
  }
  float sum[S::kPair];
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const int column = tk_norm_column<S>(v), count = S::kWhole ? 8 : S::kChannels - column;
    float h[8], &squares = sum[v % S::kPair];
    tk_widen8<E>(h, words[v]);
    if constexpr (S::kResidual) {
      float r[8];
      tk_widen8<E>(r, more[v]);
#pragma unroll
      for (int i = 0; i < 8; ++i) h[i] = __fadd_rn(h[i], r[i]);
      tk_narrow8<E>(words[v], h);
      tk_widen8<E>(h, words[v]);
      tk_put8<E, S::kHWidth>(const_cast<char*>(at(row.h, column, E::kBytes)), words[v], count);
    }
    squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = __fmaf_rn(h[i], h[i], squares);
#pragma unroll
    for (int mask = kShare / 2; mask; mask /= 2) {
      squares = __fadd_rn(squares, __shfl_xor_sync(0xffffffffu, squares, mask));
    }
    if (v % S::kPair == S::kPair - 1 && lane % kShare == 0) {
      const int chunk = (v / S::kPair * kWarps + threadIdx.x / 32) * S::kPair + lane / kShare;
      sums[chunk] = S::kPair == 2 ? __fadd_rn(sum[0], squares) : squares;
    }
    if constexpr (S::kWeight && S::kPair == 1) {
      tk_load8<E, S::kWeightWidth>(more[v], at(row.weight, column, E::kBytes), count);
    }
  }
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < S::kChunks; i += 32) {
    if (i + lane < S::kChunks) total = __fadd_rn(total, sums[i + lane]);
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, mask));
  const float rstd = rsqrtf(__fadd_rn(__fdiv_rn(total, (float)S::kChannels), eps));
  if constexpr (S::kRstd) {
    if (threadIdx.x == 0) *row.rstd = rstd;
  }
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const int column = tk_norm_column<S>(v), count = S::kWhole ? 8 : S::kChannels - column;
    float n[8], w[8];
    if constexpr (S::kWeight && S::kPair == 2) {  // where registers are short
      tk_load8<E, S::kWeightWidth>(more[v], at(row.weight, column, E::kBytes), count);
    }
    tk_widen8<E>(n, words[v]);
    if constexpr (S::kWeight) tk_widen8<E>(w, more[v]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      n[i] = __fmul_rn(__fmul_rn(n[i], rstd), S::kWeight ? __fmul_rn(w[i], out_scale) : out_scale);
      if (S::kGroup && !S::kWhole && i >= count) n[i] = 0.0f;  // 0 times an infinite rstd
    }
    tk_narrow8<E>(words[v], n);
    if constexpr (S::kGroup == 0) {
      tk_put8<E, S::kOutWidth>(const_cast<char*>(at(row.out, column, E::kBytes)), words[v], count);
    } else if constexpr (S::kBf16) {
      tk_store8<TkBf16, S::kBf16Width>(const_cast<char*>(at(row.out_bf16, column, 2)), n, count);
    }
  }
  if constexpr (S::kGroup > 0) tk_store_norm<S>(row, words, group_stride, mega_stride, clamp_min);
}
// Where the fused MoE kernel has the scales of a token: blocks padded to 128, transposed 4 x 32 in each 128.
TK_FN long long tk_mega_row(int token, int block) {
  const int i = token % block;
  return (long long)(token / block) * ((block + 127) / 128 * 128) + i / 128 * 128 + i % 32 * 4 + i % 128 / 32;
}
template <class Shape>
TK_FN void tk_norm(const void* x, const void* residual, const void* weight, void* out, void* out_bf16, void* h,
                   void* rstd, void* sf, void* mega, int token, int block_m, float eps, float out_scale,
                   long long group_stride, long long mega_stride, float clamp_min) {
  if constexpr (Shape::kMega) mega = static_cast<int*>(mega) + tk_mega_row(token, block_m);
  tk_norm_row<Shape>({x, residual, weight, out, out_bf16, h, static_cast<float*>(rstd), sf, mega}, eps, out_scale,
                     group_stride, mega_stride, clamp_min);
}
// The scales of a row that is padding.
template <class Shape>
TK_FN void tk_norm_padding(void* sf, long long group_stride) {
  constexpr int kWords = Shape::kPacked ? (Shape::kGroups + 3) / 4 : Shape::kGroups;
#pragma unroll 1
  for (int i = threadIdx.x; i < kWords; i += Shape::kThreads) static_cast<unsigned*>(sf)[i * group_stride] = 0u;
}
"""
)


class _Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        rank: dimensions of ``x``.
        threads, vectors: threads of a row, vectors of 8 channels in each.
        group: channels per scale; 0 without a cast.
        rounded, packed: scales are powers of two; UE8M0 bytes in words.
        widths: widest accesses in bytes of ``x``, the residual, the weight, ``out``, ``residual_out`` and ``out_bf16``;
            0 where there is none.
        rstd, mega: whether ``rstd`` and the scale buffer of the fused MoE kernel are written.
    """

    dtype: Any
    rank: int
    channels: int
    threads: int
    vectors: int
    group: int
    rounded: bool
    packed: bool
    widths: tuple[int, int, int, int, int, int]
    rstd: bool
    mega: bool


def _pair(group: int, codes_alone: bool) -> int:
    """Neighbouring vectors of a thread: 2 if all of them lie in one group, and rows are stored as codes alone."""
    return 2 if codes_alone and group and group % 16 == 0 and 512 % group == 0 else 1


def _lanes(group: int, pair: int = 1) -> int:
    """Lanes of a warp that share a group; 0 if groups are not whole lanes, a power of two of them."""
    lanes, odd = divmod(group, 8 * pair)
    return lanes if not odd and lanes in (1, 2, 4, 8, 16, 32) else 0


def _shape(k: _Key) -> str:
    """The key as a C++ type."""
    x, residual, weight, out, h, bf16 = k.widths
    pair = _pair(k.group, not h and not bf16)
    groups = -(-k.channels // k.group) if k.group else 1
    numbers = {
        "kChannels": k.channels,
        "kThreads": k.threads,
        "kVectors": k.vectors,
        "kPair": pair,
        "kChunks": -(-k.channels // _CHUNK),
        "kGroup": k.group,
        "kGroups": groups,
        "kLanes": max(_lanes(k.group, pair), 1),
        "kOddGroups": groups + 1 if k.group and not _lanes(k.group, pair) else 1,
        "kXWidth": x,
        "kResidualWidth": residual or 1,
        "kWeightWidth": weight or 1,
        "kOutWidth": out,
        "kHWidth": h or 1,
        "kBf16Width": bf16 or 1,
    }
    flags = {
        "kWhole": k.channels == k.threads * k.vectors * 8,
        "kRound": k.rounded,
        "kPacked": k.packed,
        "kResidual": residual > 0,
        "kWeight": weight > 0,
        "kBf16": bf16 > 0,
        "kRstd": k.rstd,
        "kMega": k.mega,
    }
    return _swiglu.shape_type("TkNormShape", {"E": k.dtype}, numbers, flags)


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = _Key(*key)
    _, has_residual, has_weight, _, has_h, has_bf16 = (width > 0 for width in k.widths)
    source = _SOURCE + _shape(k)
    paired = k.dtype == "bfloat16" and _pair(k.group, not has_h and not has_bf16) == 2
    batch, rows = T.dynamic("batch"), T.dynamic("rows")
    names = iter(range(100))

    def strided(columns: Any, dtype: Any, last: Any = 1) -> Any:
        """A tensor of x's leading dimensions at any strides."""
        leading = (batch, rows) if k.rank == 3 else (rows,)
        strides = tuple(T.dynamic(f"stride_{next(names)}", "int64") for _ in leading)
        return T.StridedTensor((*leading, columns), (*strides, last), dtype)

    group_stride, mega_rows = T.dynamic("group_stride", "int64"), T.dynamic("mega_rows", "int64")
    x_type = strided(k.channels, k.dtype)
    out_type = strided(k.channels, "float8_e4m3fn" if k.group else k.dtype)
    sf_type = strided(T.dynamic("sf_columns"), "int32" if k.packed else "float32", group_stride)
    rstd_type = T.Tensor((batch, rows) if k.rank == 3 else (rows,), "float32")

    def norm(
        x: Any,
        residual: Any,
        weight: Any,
        out: Any,
        sf: Any,
        out_bf16: Any,
        h: Any,
        rstd: Any,
        mega: Any,
        eps: Any,
        out_scale: Any,
        clamp_min: Any,
        block_m: Any,
        stored_rows: Any,
        blocks: Any,
    ) -> None:
        with T.Kernel(blocks, threads=k.threads) as block:
            T.import_source(source)
            if paired:
                T.annotate_min_blocks_per_sm(max(_THREADS_PER_SM // k.threads, 1))
            item = T.alloc_var("int32")
            row = T.alloc_var("int64")
            item = T.truncdiv(block, stored_rows) if k.rank == 3 else 0
            row = T.cast(block - item * stored_rows, "int64")
            leading = (item, row) if k.rank == 3 else (row,)
            if row < rows:
                T.call_extern(
                    "handle",
                    "tk_norm<TkNormShape>",
                    T.address_of(x[leading + (0,)]),
                    T.address_of(residual[leading + (0,)]),
                    T.address_of(weight[0]) if has_weight else T.address_of(x[leading + (0,)]),
                    T.address_of(out[leading + (0,)]),
                    T.address_of(out_bf16[leading + (0,)]),
                    T.address_of(h[leading + (0,)]),
                    T.address_of(rstd[leading]) if k.rstd else T.address_of(x[leading + (0,)]),
                    T.address_of(sf[leading + (0,)]),
                    T.address_of(mega[0, 0]) if k.mega else T.address_of(x[leading + (0,)]),
                    T.cast(row, "int32"),
                    block_m,
                    eps,
                    out_scale,
                    group_stride if k.group else 0,
                    mega_rows if k.mega else 0,
                    clamp_min,
                )
            elif k.group:
                T.call_extern("handle", "tk_norm_padding<TkNormShape>", T.address_of(sf[leading + (0,)]), group_stride)

    return prim_func(
        norm,
        x_type,
        strided(k.channels, k.dtype) if has_residual else x_type,
        T.Tensor((k.channels,), k.dtype) if has_weight else x_type,
        out_type,
        sf_type if k.group else x_type,
        strided(k.channels, "bfloat16") if has_bf16 else x_type,
        strided(k.channels, k.dtype) if has_h else x_type,
        rstd_type if k.rstd else x_type,
        T.Tensor((k.channels // 128, mega_rows), "int32") if k.mega else x_type,
        T.float32,
        T.float32,
        T.float32,
        T.int32,
        T.int32,
        T.int32,
    )


_NORM = Builder("quant.norm_forward", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


def _geometry(channels: int, rows: int, sms: int, pair: int, casts: bool) -> tuple[int, int]:
    """Threads of a row, and vectors in each: many threads for few rows to cast, which are a matter of latency."""
    chunks = -(-channels // (_CHUNK * pair))
    count = 1 if casts and rows <= _WAVES_OF_FEW_ROWS * sms else min(_VECTORS // pair, chunks)
    count = max(count, -(-chunks // 32))
    return -(-chunks // count) * 32, count * pair


class _Cast(NamedTuple):
    """What only the form with a cast has."""

    sf: Tensor
    group: int
    column_major: bool
    rounded: bool
    packed: bool
    clamp_min: float
    out_bf16: Tensor | None
    mega: Tensor | None
    block_m: int


def _width(t: Tensor | None) -> int:
    return 0 if t is None else _swiglu.width_of(t)


def _launch(
    cast: _Cast | None,
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor | None,
    h: Tensor | None,
    eps: float,
    out_scale: float,
) -> None:
    rows, channels = x.shape[-2:]
    items = x.shape[0] if x.dim() == 3 else 1
    bf16 = None if cast is None else cast.out_bf16
    mega = None if cast is None else cast.mega
    group = 0 if cast is None else access.bounded(cast.group, channels)
    key = _Key(
        x.dtype,
        x.dim(),
        channels,
        *_geometry(channels, items * rows, num_sms(x.device), _pair(group, h is None and bf16 is None), group > 0),
        group,
        cast is not None and cast.rounded,
        cast is not None and cast.packed,
        (_width(x), _width(residual), _width(weight), _width(out), _width(h), _width(bf16)),
        rstd is not None,
        mega is not None,
    )
    launch = _NORM.get(key, x.device)
    if launch is None:
        reason = _unsupported(x, key.group)
        if reason:
            raise Refused(reason)
        launch = _NORM.compile(key, x.device)
    stored = cast.sf.stride(-1) if cast is not None and cast.column_major else rows
    launch(
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        out,
        x if cast is None else cast.sf,
        x if bf16 is None else bf16,
        x if h is None else h,
        x if rstd is None else rstd,
        x if mega is None else mega,
        eps,
        out_scale,
        0.0 if cast is None else cast.clamp_min,
        1 if cast is None else max(cast.block_m, 1),
        stored,
        items * stored,
    )


def _unsupported(x: Tensor, group: int) -> str | None:
    channels = x.shape[-1]
    if channels > _MOST_CHANNELS:
        return f"needs at most {_MOST_CHANNELS} channels, got {channels}"
    if group and not _lanes(group) and -(-channels // group) > _MOST_GROUPS:
        return f"past {_MOST_GROUPS} groups in a row needs num_per_channels 8, 16, 32, 64, 128 or 256, got {group}"
    return _swiglu.unsupported(x)


class NormForward:
    """RMSNorm with an optional residual."""

    revision = 1

    def refusal(self, x: Tensor, *args: Any) -> str | None:
        return _unsupported(x, 0)

    def __call__(self, outs: tuple[Tensor, ...], x: Tensor, *args: Any) -> None:
        _launch(None, outs[0], x, *args)


class NormForwardAndPerTokenCast:
    """RMSNorm to e4m3 with scales of groups of channels."""

    revision = 1

    def refusal(self, x: Tensor, *args: Any) -> str | None:
        return _unsupported(x, args[8])

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        weight: Tensor | None,
        residual: Tensor | None,
        out_bf16: Tensor | None,
        rstd: Tensor | None,
        residual_out: Tensor | None,
        mega_moe_buffer: Tensor | None,
        eps: float,
        fmt: str,
        num_per_channels: int,
        out_scale: float,
        use_tma_aligned_col_major_sf: bool,
        round_sf: bool,
        use_packed_ue8m0: bool,
        mega_moe_block_m: int,
        clamp_min: float,
        ue8m0_per_word: int,
        sf_align_bytes: int,
    ) -> None:
        out, sf = outs
        cast = _Cast(
            sf,
            num_per_channels,
            use_tma_aligned_col_major_sf,
            round_sf,
            use_packed_ue8m0,
            clamp_min,
            out_bf16,
            mega_moe_buffer,
            mega_moe_block_m,
        )
        _launch(cast, out, x, weight, residual, rstd, residual_out, eps, out_scale)


KERNELS = {
    "quant.norm_forward": NormForward(),
    "quant.norm_forward_and_per_token_cast": NormForwardAndPerTokenCast(),
}

CI_KEYS = [
    (_NORM, ("bfloat16", 2, 7168, 224, 4, 0, False, False, (16, 0, 16, 16, 0, 0), False, False)),
    (_NORM, ("float32", 3, 77, 32, 1, 0, False, False, (4, 4, 4, 4, 4, 0), True, False)),
    (_NORM, ("bfloat16", 2, 7168, 224, 4, 32, True, True, (16, 16, 16, 8, 16, 16), True, True)),
    (_NORM, ("bfloat16", 2, 7168, 448, 2, 32, True, True, (16, 0, 16, 16, 0, 0), False, False)),
    (_NORM, ("float32", 3, 130, 32, 1, 48, False, False, (8, 0, 8, 2, 0, 4), False, False)),
]
