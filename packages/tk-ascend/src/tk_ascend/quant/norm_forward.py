"""norm_forward, alone and with a cast: a kernel adds the residual and makes rstd of each row, another one the result.

The first reads global memory, a few SIMT threads a row. The second takes tiles of rows and channels: they are copied to
UB, normalized there, one thread an element, quantized if asked for, and copied out.

Bytes: x and residual once in, their sum once out and, like x without a residual, once in again; the result, or codes
and scales, once out.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder, vector_cores
from ..tile import encode, groups, scale_tensors
from ..tile.indices import kept
from ..tile.memory import spanned
from ._swiglu import unsupported
from ._token_groups import quantize

ROWS, LANES = 4, 128
"""Rows that a core adds up at a time, and SIMT threads of each."""
THREADS = ROWS * LANES
PLAIN_TILING = groups.Tiling(*groups.TILES[0], groups.TILES[0][1])


def _build_rstd(dtype: str, cores: int):
    from tilelang.ascend import language as T

    batch, tokens, channels = T.dynamic("batch"), T.dynamic("tokens"), T.dynamic("channels")
    x_batch, x_row, r_batch, r_row = (T.dynamic(n) for n in ("x_batch", "x_row", "r_batch", "r_row"))
    h_size, h_tokens, h_channels = T.dynamic("h_size"), T.dynamic("h_tokens"), T.dynamic("h_channels")
    h_batch, h_row, statistics = T.dynamic("h_batch"), T.dynamic("h_row"), T.dynamic("statistics")

    @T.prim_func
    def norm_rstd(
        x: T.StridedTensor((batch, tokens, channels), (x_batch, x_row, 1), dtype),
        residual: T.StridedTensor((batch, tokens, channels), (r_batch, r_row, 1), dtype),
        h: T.StridedTensor((h_size, h_tokens, h_channels), (h_batch, h_row, 1), dtype),
        rstd: T.Tensor((statistics,), T.float32),
        with_residual: T.int32,
        eps: T.float32,
    ):
        with T.Kernel(cores) as core:
            sums = T.alloc_shared((ROWS, LANES), T.float32)
            for b, block in T.Persistent([batch, T.ceildiv(tokens, ROWS)], cores, core, group_size=1):
                with T.SimtVF(threads=THREADS):
                    for i, lane in T.Parallel(ROWS, LANES):
                        total = T.alloc_var(T.float32)
                        value = T.alloc_var(T.float32)
                        column = T.alloc_var(T.int32)
                        row = kept(T, block * ROWS + i)
                        item = kept(T, b)
                        total = T.float32(0.0)
                        if row < tokens:
                            column = lane
                            while column < channels:
                                value = T.Cast(T.float32, x[item, row, column])
                                if with_residual == 1:
                                    added = T.Cast(dtype, value + T.Cast(T.float32, residual[item, row, column]))
                                    h[item, row, column] = added
                                    value = T.Cast(T.float32, added)
                                total = total + value * value
                                column = column + LANES
                        sums[i, lane] = total
                with T.SimtVF(threads=32):
                    for i in T.Parallel(32):
                        total = T.alloc_var(T.float32)
                        row = kept(T, block * ROWS + i)
                        if i < ROWS and row < tokens:
                            total = T.float32(0.0)
                            for k in T.serial(LANES):
                                total = total + sums[i % ROWS, k]
                            mean = total / T.Cast(T.float32, channels)
                            rstd[b * tokens + row] = T.float32(1.0) / T.sqrt(mean + eps)

    return norm_rstd


def _build(dtype: str, height: int, width: int, cast: bool, cores: int):
    from tilelang.ascend import language as T

    batch, tokens, channels = T.dynamic("batch"), T.dynamic("tokens"), T.dynamic("channels")
    h_batch, h_row, statistics, weights = (T.dynamic(n) for n in ("h_batch", "h_row", "statistics", "weights"))
    o_size, o_tokens, o_channels = T.dynamic("o_size"), T.dynamic("o_tokens"), T.dynamic("o_channels")
    o_batch, o_row, q_batch, q_row = (T.dynamic(n) for n in ("o_batch", "o_row", "q_batch", "q_row"))
    q_size, q_tokens, q_channels = T.dynamic("q_size"), T.dynamic("q_tokens"), T.dynamic("q_channels")
    sf_size, bytes_size = T.dynamic("sf_size"), T.dynamic("bytes_size")
    out_dtype = "bfloat16" if cast else dtype
    quantize_tile = groups.quantizer(T, height, width, THREADS)

    @T.prim_func
    def norm_forward(
        h: T.StridedTensor((batch, tokens, channels), (h_batch, h_row, 1), dtype),
        weight: T.Tensor((weights,), dtype),
        rstd: T.Tensor((statistics,), T.float32),
        out: T.StridedTensor((o_size, o_tokens, o_channels), (o_batch, o_row, 1), out_dtype),
        with_weight: T.int32,
        with_out: T.int32,
        out_scale: T.float32,
        tiles_down: T.int32,
        tiles_across: T.int32,
        step: T.int32,
        q: T.StridedTensor((q_size, q_tokens, q_channels), (q_batch, q_row, 1), "float8_e4m3fn"),
        wide_sf: T.Tensor((sf_size,), T.float32),
        narrow_sf: T.Tensor((bytes_size,), T.uint8),
        kind: T.int32,
        batch_stride: T.int64,
        row_stride: T.int64,
        group_stride: T.int64,
        rounded: T.int32,
        group: T.int32,
        clamp_min: T.float32,
    ):
        with T.Kernel(cores) as core:
            source = T.alloc_shared((height, width), dtype)
            result = T.alloc_shared((height, width), out_dtype)
            values = T.alloc_shared((height, width) if cast else (1, 8), T.float32)
            factors = T.alloc_shared((height, width) if cast else (1, 8), T.float32)
            coded = T.alloc_shared((height, width) if cast else (1, 32), "float8_e4m3fn")
            item = T.alloc_var(T.int32)
            top = T.alloc_var(T.int32)
            left = T.alloc_var(T.int32)
            tall = T.alloc_var(T.int32)
            wide = T.alloc_var(T.int32)
            for tile in T.Persistent([batch * tiles_down * tiles_across], cores, core, group_size=1):
                item = T.truncdiv(tile, tiles_down * tiles_across)
                top = T.truncmod(T.truncdiv(tile, tiles_across), tiles_down) * height
                left = T.truncmod(tile, tiles_across) * step
                tall = T.min(height, tokens - top)
                wide = T.min(step, channels - left)
                T.copy(h[item, top : top + tall, left : left + wide], source[0:tall, 0:wide])
                with T.SimtVF(threads=THREADS):
                    for i, j in T.Parallel(height, width):
                        factor = T.alloc_var(T.float32)
                        if i < kept(T, tall) and j < kept(T, wide):
                            factor = out_scale
                            if with_weight == 1:
                                factor = T.Cast(T.float32, weight[kept(T, left + j)]) * out_scale
                            normal = T.Cast(T.float32, source[i, j]) * rstd[kept(T, item * tokens + top + i)]
                            rounded_normal = T.Cast(dtype, kept(T, normal * factor))
                            result[i, j] = T.Cast(out_dtype, rounded_normal)
                            if cast:
                                values[i, j] = T.Cast(T.float32, rounded_normal)
                T.copy(result[0 : tall * with_out, 0:wide], out[item, top : top + tall * with_out, left : left + wide])
                if cast:
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
                        groups.Place(
                            top,
                            T.truncdiv(left, group),
                            tall,
                            wide,
                            T.truncdiv(channels + group - 1, group),
                            offset=item * batch_stride,
                        ),
                    )
                    T.copy(coded[0:tall, 0:wide], q[item, top : top + tall, left : left + wide])

    return norm_forward


def _build_mega_moe(cores: int):
    from tilelang.ascend import language as T

    sf_size, bytes_size, buffer_size = T.dynamic("sf_size"), T.dynamic("bytes_size"), T.dynamic("buffer_size")

    @T.prim_func
    def norm_mega_moe(
        wide_sf: T.Tensor((sf_size,), T.float32),
        narrow_sf: T.Tensor((bytes_size,), T.uint8),
        kind: T.int32,
        row_stride: T.int64,
        group_stride: T.int64,
        buffer: T.Tensor((buffer_size,), T.uint8),
        buffer_rows: T.int64,
        tokens: T.int32,
        groups_each: T.int32,
        block: T.int32,
    ):
        with T.Kernel(cores) as core:
            for part in T.Persistent([T.ceildiv(tokens * groups_each, THREADS)], cores, core, group_size=1):
                with T.SimtVF(threads=THREADS):
                    for lane in T.Parallel(THREADS):
                        power = T.alloc_var(T.int32)
                        place = T.alloc_var(T.int64)
                        token = kept(T, T.truncdiv(part * THREADS + lane, groups_each))
                        g = kept(T, part * THREADS + lane - token * groups_each)
                        if token < tokens:
                            place = T.Cast(T.int64, token) * row_stride
                            if kind == scale_tensors.UE8M0:
                                place = place + T.Cast(T.int64, g >> 1) * group_stride + T.Cast(T.int64, g & 1)
                                power = T.Cast(T.int32, narrow_sf[place])
                            else:
                                place = place + T.Cast(T.int64, g) * group_stride
                                power = (T.reinterpret(wide_sf[place], T.int32) >> 23) & 255
                            i = kept(T, T.truncmod(token, block))
                            padded = kept(T, ((block + 127) >> 7) << 7)
                            row = kept(T, T.truncdiv(token, block) * padded + ((i >> 7) << 7))
                            row = kept(T, row + (i & 31) * 4 + ((i & 127) >> 5))
                            place = T.Cast(T.int64, g >> 2) * buffer_rows + T.Cast(T.int64, row)
                            buffer[place * T.int64(4) + T.Cast(T.int64, g & 3)] = T.Cast(T.uint8, power)

    return norm_mega_moe


_RSTD = Builder("quant.norm_rstd", _build_rstd)
_FORWARD = Builder("quant.norm_forward", _build)
_MEGA_MOE = Builder("quant.norm_mega_moe", _build_mega_moe)


def _batched(t: Tensor) -> Tensor:
    """``(T, H)`` as ``(1, T, H)``."""
    return t if t.dim() == 3 else t.unsqueeze(0)


def _launch(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor | None,
    residual_out: Tensor | None,
    out: Tensor | None,
    eps: float,
    out_scale: float,
    tiling: groups.Tiling,
    cast: tuple[Any, ...] | None,
) -> None:
    x = _batched(x)
    none = x.new_empty(1, 1, 1)
    h = none if residual_out is None else _batched(residual_out)
    if rstd is None:
        rstd = torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)
    rstd, cores = rstd.view(-1), vector_cores(x.device)
    with_residual = int(residual is not None)
    _RSTD((x.dtype, cores), x, x if residual is None else _batched(residual), h, rstd, with_residual, eps)
    if out is None:
        out = torch.empty(1, 1, 1, dtype=torch.bfloat16, device=x.device)
        with_out = 0
    else:
        out, with_out = _batched(out), 1
    number = torch.empty(1, 1, dtype=torch.float32, device=x.device)
    unused = (number.view(torch.float8_e4m3fn).unsqueeze(0), *scale_tensors.arguments(number)[:3], 0, 1, 1, 0, 1, 0.0)
    _FORWARD(
        (x.dtype, tiling.height, tiling.width, cast is not None, cores),
        h if with_residual else x,
        none.view(-1) if weight is None else weight,
        rstd,
        out,
        int(weight is not None),
        with_out,
        out_scale,
        -(-x.shape[1] // tiling.height),
        -(-x.shape[2] // tiling.step),
        tiling.step,
        *(unused if cast is None else cast),
    )


class NormForward:
    """``quant.norm_forward``."""

    revision = 1

    def refusal(self, x: Tensor, *rest: Any) -> str | None:
        return unsupported(x)

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        weight: Tensor | None,
        residual: Tensor | None,
        rstd: Tensor | None,
        residual_out: Tensor | None,
        eps: float,
        out_scale: float,
    ) -> None:
        reason = self.refusal(x)
        if reason is not None:
            raise Refused(reason)
        _launch(x, weight, residual, rstd, residual_out, outs[0], eps, out_scale, PLAIN_TILING, None)


class NormForwardAndPerTokenCast:
    """``quant.norm_forward_and_per_token_cast``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

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
        *layout: int,
    ) -> None:
        channels = x.shape[-1]
        group = min(num_per_channels, channels)
        tiling = groups.tiling(channels, group, use_packed_ue8m0)
        q, sf = (_batched(t) for t in outs)
        wide, narrow, kind, row_stride, group_stride, *_ = scale_tensors.arguments(sf[0])
        memory = spanned(sf)
        if use_packed_ue8m0:
            narrow, batch_stride = memory.view(torch.uint8), 2 * sf.stride(0)
        else:
            wide, batch_stride = memory, sf.stride(0)
        cast = (
            *(q, wide, narrow, kind, batch_stride, row_stride, group_stride),
            *(int(round_sf), group, clamp_min),
        )
        if tiling is None:
            normal = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            _launch(x, weight, residual, rstd, residual_out, normal, eps, out_scale, PLAIN_TILING, None)
            if out_bf16 is not None:
                out_bf16.copy_(normal)
            rounding = encode.ROUNDED if round_sf else encode.PLAIN
            for rows, codes, scales in zip(_batched(normal), q, sf, strict=True):
                quantize(rows, fmt, group, q=codes, sf=scales, rounding=rounding, clamp_min=clamp_min)
        else:
            _launch(x, weight, residual, rstd, residual_out, out_bf16, eps, out_scale, tiling, cast)
        if mega_moe_buffer is not None:
            _MEGA_MOE(
                (vector_cores(x.device),),
                *(wide, narrow, kind, row_stride, group_stride),
                mega_moe_buffer.view(-1).view(torch.uint8),
                mega_moe_buffer.shape[1],
                x.shape[0],
                channels // num_per_channels,
                mega_moe_block_m,
            )


KERNELS: dict[str, Any] = {
    "quant.norm_forward": NormForward(),
    "quant.norm_forward_and_per_token_cast": NormForwardAndPerTokenCast(),
}
