"""swiglu_forward, alone and with a cast: a vector core takes tiles of rows and channels, a SIMT thread an element.

Gate and up columns are copied to UB, the result is made there, in fp32 if it is quantized, and copied out. A kernel of
its own counts clamped values.

Bytes: x once in (twice with counters), half as many elements out; or as many codes, and scales. Groups that are wider
than any tile are quantized by the kernel of per_token_cast, from a result in fp32.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder, vector_cores
from ..tile import encode, groups, scale_tensors
from ..tile.activation import activation
from ..tile.indices import kept
from . import _swiglu
from ._swiglu import REAL, THREADS, WEIGHTED
from ._token_groups import quantize


def _build(x_dtype: str, dtype: str, height: int, width: int, cores: int):
    from tilelang.ascend import language as T

    rows, columns, ld, channels = T.dynamic("rows"), T.dynamic("columns"), T.dynamic("ld"), T.dynamic("channels")
    known_rows, weighted_rows = T.dynamic("known_rows"), T.dynamic("weighted_rows")

    @T.prim_func
    def swiglu_forward(
        x: T.StridedTensor((rows, columns), (ld, 1), x_dtype),
        experts: T.Tensor((known_rows,), T.int32),
        weights: T.Tensor((weighted_rows,), T.float32),
        out: T.Tensor((rows, channels), dtype),
        known: T.int32,
        bound: T.float32,
    ):
        with T.Kernel(cores) as core:
            gates = T.alloc_shared((height, width), x_dtype)
            ups = T.alloc_shared((height, width), x_dtype)
            result = T.alloc_shared((height, width), dtype)
            for down, across in T.Persistent(
                [T.ceildiv(rows, height), T.ceildiv(channels, width)], cores, core, group_size=1
            ):
                top = down * height
                left = across * width
                tall = T.min(height, rows - top)
                wide = T.min(width, channels - left)
                T.copy(x[top : top + tall, left : left + wide], gates[0:tall, 0:wide])
                T.copy(x[top : top + tall, channels + left : channels + left + wide], ups[0:tall, 0:wide])
                with T.SimtVF(threads=THREADS):
                    for i, j in T.Parallel(height, width):
                        weight = T.alloc_var(T.float32)
                        expert = T.alloc_var(T.int32)
                        value = T.alloc_var(T.float32)
                        if i < kept(T, tall) and j < kept(T, wide):
                            row = kept(T, top + i)
                            weight = T.float32(1.0)
                            expert = 0
                            if (known & REAL) != 0:
                                expert = experts[row]
                            if (known & WEIGHTED) != 0:
                                weight = weights[row]
                            value = T.float32(0.0)
                            if expert >= 0:
                                gate = T.Cast(T.float32, gates[i, j])
                                up = T.Cast(T.float32, ups[i, j])
                                value = activation(T, gate, up, bound) * weight
                            result[i, j] = T.Cast(dtype, value)
                T.copy(result[0:tall, 0:wide], out[top : top + tall, left : left + wide])

    return swiglu_forward


def _build_cast(x_dtype: str, height: int, width: int, cores: int):
    from tilelang.ascend import language as T

    rows, columns, ld, channels = T.dynamic("rows"), T.dynamic("columns"), T.dynamic("ld"), T.dynamic("channels")
    known_rows, weighted_rows, sf_size, bytes_size = (
        T.dynamic(n) for n in ("known_rows", "weighted_rows", "sf_size", "bytes_size")
    )
    quantize_tile = groups.quantizer(T, height, width, THREADS)

    @T.prim_func
    def swiglu_forward_and_per_token_cast(
        x: T.StridedTensor((rows, columns), (ld, 1), x_dtype),
        experts: T.Tensor((known_rows,), T.int32),
        weights: T.Tensor((weighted_rows,), T.float32),
        q: T.Tensor((rows, channels), "float8_e4m3fn"),
        wide_sf: T.Tensor((sf_size,), T.float32),
        narrow_sf: T.Tensor((bytes_size,), T.uint8),
        kind: T.int32,
        row_stride: T.int64,
        group_stride: T.int64,
        rounded: T.int32,
        known: T.int32,
        bound: T.float32,
        group: T.int32,
        step: T.int32,
        tiles_across: T.int32,
        clamp_min: T.float32,
    ):
        with T.Kernel(cores) as core:
            gates = T.alloc_shared((height, width), x_dtype)
            ups = T.alloc_shared((height, width), x_dtype)
            values = T.alloc_shared((height, width), T.float32)
            factors = T.alloc_shared((height, width), T.float32)
            coded = T.alloc_shared((height, width), "float8_e4m3fn")
            top = T.alloc_var(T.int32)
            left = T.alloc_var(T.int32)
            tall = T.alloc_var(T.int32)
            wide = T.alloc_var(T.int32)
            for tile in T.Persistent([T.ceildiv(rows, height) * tiles_across], cores, core, group_size=1):
                top = T.truncdiv(tile, tiles_across) * height
                left = T.truncmod(tile, tiles_across) * step
                tall = T.min(height, rows - top)
                wide = T.min(step, channels - left)
                T.copy(x[top : top + tall, left : left + wide], gates[0:tall, 0:wide])
                T.copy(x[top : top + tall, channels + left : channels + left + wide], ups[0:tall, 0:wide])
                with T.SimtVF(threads=THREADS):
                    for i, j in T.Parallel(height, width):
                        weight = T.alloc_var(T.float32)
                        expert = T.alloc_var(T.int32)
                        value = T.alloc_var(T.float32)
                        if i < kept(T, tall) and j < kept(T, wide):
                            row = kept(T, top + i)
                            weight = T.float32(1.0)
                            expert = 0
                            if (known & REAL) != 0:
                                expert = experts[row]
                            if (known & WEIGHTED) != 0:
                                weight = weights[row]
                            value = T.float32(0.0)
                            if expert >= 0:
                                gate = T.Cast(T.float32, gates[i, j])
                                up = T.Cast(T.float32, ups[i, j])
                                value = activation(T, gate, up, bound) * weight
                            values[i, j] = value
                quantize_tile(
                    values,
                    factors,
                    coded,
                    wide_sf,
                    narrow_sf,
                    kind,
                    row_stride,
                    group_stride,
                    rounded,
                    group,
                    clamp_min,
                    groups.Place(top, T.truncdiv(left, group), tall, wide, T.truncdiv(channels + group - 1, group)),
                )
                T.copy(coded[0:tall, 0:wide], q[top : top + tall, left : left + wide])

    return swiglu_forward_and_per_token_cast


_FORWARD = Builder("quant.swiglu_forward", _build)
_CAST = Builder("quant.swiglu_forward_and_per_token_cast", _build_cast)


def _launch(x: Tensor, out: Tensor, found: _swiglu.Rows, clamp_value: float | None) -> None:
    _FORWARD(
        (x.dtype, out.dtype, *groups.TILES[0], vector_cores(x.device)),
        x,
        found.experts,
        found.weights,
        out,
        found.known,
        float("inf") if clamp_value is None else clamp_value,
    )


class SwigluForward:
    """``quant.swiglu_forward``."""

    revision = 1

    def refusal(self, x: Tensor, *rest: Any) -> str | None:
        return _swiglu.unsupported(x)

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        fmt: str,
        psum_num_tokens_per_expert: Tensor | None,
        topk_weights: Tensor | None,
        pos_to_token_topk: Tensor | None,
        pos_to_expert: Tensor | None,
        routed_scaling_factor: float | None,
        clamp_value: float | None,
        clamped_count: Tensor | None,
        token_alignment: int,
    ) -> None:
        reason = self.refusal(x)
        if reason is not None:
            raise Refused(reason)
        found = _swiglu.rows_of(
            x,
            psum_num_tokens_per_expert,
            topk_weights,
            pos_to_token_topk,
            pos_to_expert,
            routed_scaling_factor,
            token_alignment,
        )
        _launch(x, outs[0], found, clamp_value)
        if clamped_count is not None and clamp_value is not None:
            _swiglu.count(clamped_count, x, found, clamp_value)


class SwigluForwardAndPerTokenCast:
    """``quant.swiglu_forward_and_per_token_cast``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
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
        clamped_count: Tensor | None,
        token_alignment: int,
        clamp_min: float,
        *layout: int,
    ) -> None:
        q, sf = outs
        channels = q.shape[1]
        group = min(num_per_channels, channels)
        found = _swiglu.rows_of(
            x,
            psum_num_tokens_per_expert,
            topk_weights,
            pos_to_token_topk,
            pos_to_expert,
            routed_scaling_factor,
            token_alignment,
        )
        tiling = groups.tiling(channels, group, use_packed_ue8m0)
        if tiling is None:
            values = torch.empty(q.shape, dtype=torch.float32, device=x.device)
            _launch(x, values, found, clamp_value)
            rounding = encode.ROUNDED if round_sf else encode.PLAIN
            quantize(values, fmt, group, q=q, sf=sf, rounding=rounding, clamp_min=clamp_min)
        else:
            _CAST(
                (x.dtype, tiling.height, tiling.width, vector_cores(x.device)),
                x,
                found.experts,
                found.weights,
                q,
                *scale_tensors.arguments(sf)[:5],
                int(round_sf),
                found.known,
                float("inf") if clamp_value is None else clamp_value,
                group,
                tiling.step,
                -(-channels // tiling.step),
                clamp_min,
            )
        if clamped_count is not None and clamp_value is not None:
            _swiglu.count(clamped_count, x, found, clamp_value)


KERNELS: dict[str, Any] = {
    "quant.swiglu_forward": SwigluForward(),
    "quant.swiglu_forward_and_per_token_cast": SwigluForwardAndPerTokenCast(),
}
