"""swiglu_backward, alone and from a quantized input with a cast: a vector core takes tiles of rows and channels.

Gate and up columns and the gradient are copied to UB; one SIMT thread an element makes both gradients and the result
again, which are copied out. The products that make the gradient of a row's weight are added up in the tile, and over
the tiles of a row by a kernel of its own, in an order that depends on the number of channels alone. Rows that are not
real get zeros.

Bytes: x and the gradient once in, as many elements as x out, half as many more with the result; codes and scales.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder, vector_cores
from ..tile import decode, groups, scale_tensors
from ..tile.indices import kept
from . import _swiglu
from ._swiglu import REAL, THREADS, WEIGHTED

TILES = ((8, 512), (1, 4096))
LANES = 32
"""Partial sums of a row of a tile."""


def _build(x_dtype: str, g_dtype: str, dtype: str, height: int, width: int, cores: int):
    from tilelang.ascend import language as T

    quantized = x_dtype == "uint8"
    rows, columns, ld, channels, ld_g = (T.dynamic(n) for n in ("rows", "columns", "ld", "channels", "ld_g"))
    x_groups, known_rows, weighted_rows = T.dynamic("x_groups"), T.dynamic("known_rows"), T.dynamic("weighted_rows")
    act_rows, act_columns, partials = T.dynamic("act_rows"), T.dynamic("act_columns"), T.dynamic("partials")
    x_sf_rows, q_rows, q_columns = T.dynamic("x_sf_rows"), T.dynamic("q_rows"), T.dynamic("q_columns")
    sf_size, bytes_size = T.dynamic("sf_size"), T.dynamic("bytes_size")
    quantize = groups.quantizer(T, height, width, THREADS, halves=2)

    @T.prim_func
    def swiglu_backward(
        x: T.StridedTensor((rows, columns), (ld, 1), x_dtype),
        g: T.StridedTensor((rows, channels), (ld_g, 1), g_dtype),
        experts: T.Tensor((known_rows,), T.int32),
        weights: T.Tensor((weighted_rows,), T.float32),
        out: T.Tensor((rows, columns), dtype),
        act: T.Tensor((act_rows, act_columns), dtype),
        partial: T.Tensor((partials,), T.float32),
        known: T.int32,
        with_act: T.int32,
        with_partial: T.int32,
        bound: T.float32,
        tiles_across: T.int32,
        step: T.int32,
        x_sf: T.Tensor((x_sf_rows, x_groups), T.float32),
        q: T.Tensor((q_rows, q_columns), "float8_e4m3fn"),
        wide_sf: T.Tensor((sf_size,), T.float32),
        narrow_sf: T.Tensor((bytes_size,), T.uint8),
        kind: T.int32,
        row_stride: T.int64,
        group_stride: T.int64,
        rounded: T.int32,
        group: T.int32,
        clamp_min: T.float32,
    ):
        with T.Kernel(cores) as core:
            gates = T.alloc_shared((height, width), x_dtype)
            ups = T.alloc_shared((height, width), x_dtype)
            grads = T.alloc_shared((height, width), g_dtype)
            gate_out = T.alloc_shared((height, width), dtype)
            up_out = T.alloc_shared((height, width), dtype)
            act_out = T.alloc_shared((height, width), dtype)
            scratch = T.alloc_shared((2 * height, width), T.float32)
            sums = T.alloc_shared((height, LANES), T.float32)
            absent = T.alloc_shared((max(height, 8),), T.int32)
            values = T.alloc_shared((2 * height, width) if quantized else (1, 8), T.float32)
            coded = T.alloc_shared((2 * height, width) if quantized else (1, 32), "float8_e4m3fn")
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
                T.copy(g[top : top + tall, left : left + wide], grads[0:tall, 0:wide])
                with T.SimtVF(threads=THREADS):
                    for i, j in T.Parallel(height, width):
                        weight = T.alloc_var(T.float32)
                        expert = T.alloc_var(T.int32)
                        gate_grad = T.alloc_var(T.float32)
                        up_grad = T.alloc_var(T.float32)
                        result = T.alloc_var(T.float32)
                        product = T.alloc_var(T.float32)
                        if i < kept(T, tall) and j < kept(T, wide):
                            row = kept(T, top + i)
                            weight = T.float32(1.0)
                            expert = 0
                            if (known & REAL) != 0:
                                expert = experts[row]
                            if (known & WEIGHTED) != 0:
                                weight = weights[row]
                            gate_grad = T.float32(0.0)
                            up_grad = T.float32(0.0)
                            result = T.float32(0.0)
                            product = T.float32(0.0)
                            if expert >= 0:
                                incoming = kept(T, T.Cast(T.float32, grads[i, j]))
                                if quantized:
                                    at = kept(T, T.truncdiv(left + j, group))
                                    gate = kept(T, decode.e4m3(T, T.Cast(T.int32, gates[i, j])) * x_sf[row, at])
                                    other = kept(T, at + T.truncdiv(channels, group))
                                    up = kept(T, decode.e4m3(T, T.Cast(T.int32, ups[i, j])) * x_sf[row, other])
                                else:
                                    gate = kept(T, T.Cast(T.float32, gates[i, j]))
                                    up = kept(T, T.Cast(T.float32, ups[i, j]))
                                made = _swiglu.gradient(T, gate, up, incoming, weight, bound)
                                gate_grad = made[0]
                                up_grad = made[1]
                                result = made[2] * weight
                                product = incoming * made[2]
                            gate_out[i, j] = T.Cast(dtype, gate_grad)
                            up_out[i, j] = T.Cast(dtype, up_grad)
                            act_out[i, j] = T.Cast(dtype, result)
                            scratch[i, j] = product
                            if quantized:
                                values[i, j] = gate_grad
                                values[height + i, j] = up_grad
                                if j == 0:
                                    absent[i] = T.Cast(T.int32, expert < 0)
                T.copy(gate_out[0:tall, 0:wide], out[top : top + tall, left : left + wide])
                T.copy(up_out[0:tall, 0:wide], out[top : top + tall, channels + left : channels + left + wide])
                T.copy(act_out[0 : tall * with_act, 0:wide], act[top : top + tall * with_act, left : left + wide])
                if with_partial == 1:
                    with T.SimtVF(threads=THREADS):
                        for i, lane in T.Parallel(height, LANES):
                            total = T.alloc_var(T.float32)
                            end = kept(T, wide)
                            if i < kept(T, tall):
                                total = T.float32(0.0)
                                for k in T.serial(width // LANES):
                                    if k * LANES + lane < end:
                                        total = total + scratch[i, k * LANES + lane]
                                sums[i, lane] = total
                    with T.SimtVF(threads=32):
                        for i in T.Parallel(32):
                            total = T.alloc_var(T.float32)
                            if i < kept(T, tall):
                                total = T.float32(0.0)
                                for k in T.serial(LANES):
                                    total = total + sums[i % height, k]
                                place = kept(T, (top + i) * T.Cast(T.int64, tiles_across))
                                partial[place + T.truncdiv(left, step)] = total
                if quantized:
                    half = T.truncdiv(channels, group)
                    quantize(
                        values,
                        scratch,
                        coded,
                        wide_sf,
                        narrow_sf,
                        kind,
                        row_stride,
                        group_stride,
                        rounded,
                        group,
                        clamp_min,
                        groups.Place(top, T.truncdiv(left, group), tall, wide, 2 * half, half),
                        absent,
                    )
                    T.copy(coded[0:tall, 0:wide], q[top : top + tall, left : left + wide])
                    T.copy(
                        coded[height : height + tall, 0:wide],
                        q[top : top + tall, channels + left : channels + left + wide],
                    )

    return swiglu_backward


def _build_weight_grad(cores: int):
    from tilelang.ascend import language as T

    rows, parts, indices, size = T.dynamic("rows"), T.dynamic("parts"), T.dynamic("indices"), T.dynamic("size")

    @T.prim_func
    def swiglu_weight_grad(
        partial: T.Tensor((rows, parts), T.float32),
        index: T.Tensor((indices,), T.int32),
        weight_grad: T.Tensor((size,), T.float32),
        with_index: T.int32,
        factor: T.float32,
    ):
        with T.Kernel(cores) as core:
            for block in T.Persistent([T.ceildiv(rows, THREADS)], cores, core, group_size=1):
                with T.SimtVF(threads=THREADS):
                    for lane in T.Parallel(THREADS):
                        row = T.alloc_var(T.int32)
                        at = T.alloc_var(T.int32)
                        total = T.alloc_var(T.float32)
                        row = block * THREADS + lane
                        if row < rows:
                            total = T.float32(0.0)
                            for k in T.serial(parts):
                                total = total + partial[row, k]
                            at = row
                            if with_index == 1:
                                at = index[row]
                            if at >= 0 and at < size:
                                weight_grad[at] = total * factor

    return swiglu_weight_grad


_BACKWARD = Builder("quant.swiglu_backward", _build)
_WEIGHT_GRAD = Builder("quant.swiglu_weight_grad", _build_weight_grad)


def _launch(
    x: Tensor,
    g: Tensor,
    out: Tensor,
    found: _swiglu.Rows,
    tiling: groups.Tiling,
    bound: float | None,
    act_out: Tensor | None,
    weight_grad: Tensor | None,
    index: Tensor | None,
    factor: float | None,
    cast: tuple[Any, ...],
) -> None:
    channels = g.shape[1]
    across = -(-channels // tiling.step)
    parts = torch.empty((1, 1) if weight_grad is None else (x.shape[0], across), device=x.device)
    _BACKWARD(
        (x.dtype, g.dtype, out.dtype, tiling.height, tiling.width, vector_cores(x.device)),
        x,
        g,
        found.experts,
        found.weights,
        out,
        out.new_empty(1, 1) if act_out is None else act_out,
        parts.view(-1),
        found.known,
        int(act_out is not None),
        int(weight_grad is not None),
        float("inf") if bound is None else bound,
        across,
        tiling.step,
        *cast,
    )
    if weight_grad is not None and weight_grad.numel():
        if index is not None:
            weight_grad.zero_()
        _WEIGHT_GRAD(
            (vector_cores(x.device),),
            parts,
            torch.empty(1, dtype=torch.int32, device=x.device) if index is None else index,
            weight_grad.view(-1),
            int(index is not None),
            1.0 if factor is None else factor,
        )


class SwigluBackward:
    """``quant.swiglu_backward``."""

    revision = 1

    def refusal(self, x: Tensor, *rest: Any) -> str | None:
        return _swiglu.unsupported(x)

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        act_x_grad: Tensor,
        fmt: str,
        psum_num_tokens_per_expert: Tensor | None,
        topk_weights: Tensor | None,
        pos_to_token_topk: Tensor | None,
        pos_to_expert: Tensor | None,
        routed_scaling_factor: float | None,
        clamp_value: float | None,
        weight_grad: Tensor | None,
        act_out: Tensor | None,
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
        none = torch.empty(1, 1, device=x.device)
        unused = (none, none.view(torch.float8_e4m3fn), *scale_tensors.arguments(none)[:5], 0, 1, 0.0)
        _launch(
            x,
            act_x_grad,
            outs[0],
            found,
            groups.Tiling(*TILES[0], TILES[0][1]),
            clamp_value,
            act_out,
            weight_grad,
            pos_to_token_topk,
            routed_scaling_factor,
            unused,
        )


class SwigluBackwardAndPerTokenCast:
    """``quant.swiglu_backward_and_per_token_cast``."""

    revision = 1

    def refusal(self, x: Tensor, x_sf: Tensor, act_x_grad: Tensor, fmt: str, group: int, *rest: Any) -> str | None:
        return groups.unsupported(x.shape[1] // 2, group, rest[7], TILES)

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
        *layout: int,
    ) -> None:
        x_grad, q, sf = outs
        channels = act_x_grad.shape[1]
        tiling = groups.tiling(channels, num_per_channels, use_packed_ue8m0, TILES)
        if tiling is None:
            raise Refused(str(groups.unsupported(channels, num_per_channels, use_packed_ue8m0, TILES)))
        found = _swiglu.rows_of(
            x,
            psum_num_tokens_per_expert,
            topk_weights,
            pos_to_token_topk,
            pos_to_expert,
            routed_scaling_factor,
            token_alignment,
        )
        _launch(
            x.view(torch.uint8),
            act_x_grad,
            x_grad,
            found,
            tiling,
            clamp_value,
            act_out,
            weight_grad,
            pos_to_token_topk,
            routed_scaling_factor,
            (x_sf, q, *scale_tensors.arguments(sf)[:5], int(round_sf), num_per_channels, clamp_min),
        )


KERNELS: dict[str, Any] = {
    "quant.swiglu_backward": SwigluBackward(),
    "quant.swiglu_backward_and_per_token_cast": SwigluBackwardAndPerTokenCast(),
}
