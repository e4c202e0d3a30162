"""norm_backward: a kernel makes the mean of each row, a second one the gradient of x, a third one that of the weight.

The first reads global memory, many SIMT threads a row. The second gives a core some channels of consecutive rows: they
are copied to UB in tiles, where a thread owns a channel and adds up its part of the weight's gradient. The third adds
up these parts, at most ``PARTIALS`` for each channel. The order of both sums depends on the shape alone.

Bytes: x and the gradient twice in, the residual's gradient once, as many elements as x out.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder, vector_cores
from ..tile.indices import kept
from ._swiglu import unsupported

ROWS, LANES = 4, 128
"""Rows whose means a core makes at a time, and SIMT threads of each."""
HEIGHT, WIDTH = 8, 512
"""Rows and channels of a tile; a thread owns a channel."""
PARTIALS = 64
"""Most parts of a channel of the weight's gradient: as many as a device has vector cores, for narrow matrices."""
THREADS = 256


def _build_means(dtype: str, cores: int):
    from tilelang.ascend import language as T

    rows, channels, weights = T.dynamic("rows"), T.dynamic("channels"), T.dynamic("weights")
    ld_g, ld_x = T.dynamic("ld_g", "int64"), T.dynamic("ld_x", "int64")

    @T.prim_func
    def norm_means(
        out_grad: T.StridedTensor((rows, channels), (ld_g, 1), dtype),
        x: T.StridedTensor((rows, channels), (ld_x, 1), dtype),
        weight: T.Tensor((weights,), dtype),
        rstd: T.Tensor((rows,), T.float32),
        means: T.Tensor((rows,), T.float32),
        weighted: T.int32,
        out_scale: T.float32,
    ):
        with T.Kernel(cores) as core:
            sums = T.alloc_shared((ROWS, LANES), T.float32)
            for block in T.Persistent([T.ceildiv(rows, ROWS)], cores, core, group_size=1):
                with T.SimtVF(threads=ROWS * LANES):
                    for i, lane in T.Parallel(ROWS, LANES):
                        total = T.alloc_var(T.float32)
                        g = T.alloc_var(T.float32)
                        column = T.alloc_var(T.int32)
                        row = kept(T, block * ROWS + i)
                        total = T.float32(0.0)
                        if row < rows:
                            column = lane
                            while column < channels:
                                g = T.Cast(T.float32, out_grad[row, column]) * out_scale
                                if weighted == 1:
                                    g = g * T.Cast(T.float32, weight[column])
                                total = total + (T.Cast(T.float32, x[row, column]) * rstd[row]) * g
                                column = column + LANES
                        sums[i, lane] = total
                with T.SimtVF(threads=32):
                    for i in T.Parallel(32):
                        total = T.alloc_var(T.float32)
                        row = kept(T, block * ROWS + i)
                        if i < ROWS and row < rows:
                            total = T.float32(0.0)
                            for k in T.serial(LANES):
                                total = total + sums[i % ROWS, k]
                            means[row] = total / T.Cast(T.float32, channels)

    return norm_means


def _build(dtype: str, cores: int):
    from tilelang.ascend import language as T

    rows, channels, weights = T.dynamic("rows"), T.dynamic("channels"), T.dynamic("weights")
    r_rows, r_channels, parts, p_channels = (T.dynamic(n) for n in ("r_rows", "r_channels", "parts", "p_channels"))
    ld_g, ld_x, ld_r, ld_out = (T.dynamic(n, "int64") for n in ("ld_g", "ld_x", "ld_r", "ld_out"))

    @T.prim_func
    def norm_backward(
        out_grad: T.StridedTensor((rows, channels), (ld_g, 1), dtype),
        x: T.StridedTensor((rows, channels), (ld_x, 1), dtype),
        weight: T.Tensor((weights,), dtype),
        rstd: T.Tensor((rows,), T.float32),
        means: T.Tensor((rows,), T.float32),
        residual: T.StridedTensor((r_rows, r_channels), (ld_r, 1), dtype),
        x_grad: T.StridedTensor((rows, channels), (ld_out, 1), dtype),
        partial: T.Tensor((parts, p_channels), T.float32),
        weighted: T.int32,
        with_residual: T.int32,
        out_scale: T.float32,
        parts_down: T.int32,
        tiles_down: T.int32,
        tiles_across: T.int32,
    ):
        with T.Kernel(cores) as core:
            grads = T.alloc_shared((HEIGHT, WIDTH), dtype)
            inputs = T.alloc_shared((HEIGHT, WIDTH), dtype)
            others = T.alloc_shared((HEIGHT, WIDTH), dtype)
            result = T.alloc_shared((HEIGHT, WIDTH), dtype)
            totals = T.alloc_shared((1, WIDTH), T.float32)
            part = T.alloc_var(T.int32)
            top = T.alloc_var(T.int32)
            left = T.alloc_var(T.int32)
            tall = T.alloc_var(T.int32)
            wide = T.alloc_var(T.int32)
            more = T.alloc_var(T.int32)
            for item in T.Persistent([parts_down * tiles_across], cores, core, group_size=1):
                part = T.truncdiv(item, tiles_across)
                left = T.truncmod(item, tiles_across) * WIDTH
                wide = T.min(WIDTH, channels - left)
                with T.SimtVF(threads=WIDTH):
                    for j in T.Parallel(WIDTH):
                        totals[0, j] = T.float32(0.0)
                for step in T.serial(tiles_down):
                    top = (part * tiles_down + step) * HEIGHT
                    tall = T.max(T.min(HEIGHT, rows - top), 0)
                    more = tall * with_residual
                    T.copy(out_grad[top : top + tall, left : left + wide], grads[0:tall, 0:wide])
                    T.copy(x[top : top + tall, left : left + wide], inputs[0:tall, 0:wide])
                    T.copy(residual[top : top + more, left : left + wide], others[0:more, 0:wide])
                    with T.SimtVF(threads=WIDTH):
                        for j in T.Parallel(WIDTH):
                            factor = T.alloc_var(T.float32)
                            total = T.alloc_var(T.float32)
                            value = T.alloc_var(T.float32)
                            end = kept(T, tall)
                            if j < kept(T, wide):
                                factor = T.float32(1.0)
                                if weighted == 1:
                                    factor = T.Cast(T.float32, weight[kept(T, left + j)])
                                total = totals[0, j]
                                for i in T.serial(HEIGHT):
                                    if i < end:
                                        row = kept(T, top + i)
                                        scale = kept(T, rstd[row])
                                        normal = kept(T, T.Cast(T.float32, inputs[i, j]) * scale)
                                        incoming = kept(T, T.Cast(T.float32, grads[i, j]) * out_scale)
                                        total = total + normal * incoming
                                        value = (incoming * factor - normal * means[row]) * scale
                                        if with_residual == 1:
                                            value = value + T.Cast(T.float32, others[i, j])
                                        result[i, j] = T.Cast(dtype, value)
                                totals[0, j] = total
                    T.copy(result[0:tall, 0:wide], x_grad[top : top + tall, left : left + wide])
                T.copy(totals[0:weighted, 0:wide], partial[part : part + weighted, left : left + wide])

    return norm_backward


def _build_weight_grad(dtype: str, cores: int):
    from tilelang.ascend import language as T

    parts, channels = T.dynamic("parts"), T.dynamic("channels")

    @T.prim_func
    def norm_weight_grad(
        partial: T.Tensor((parts, channels), T.float32),
        weight_grad: T.Tensor((channels,), dtype),
        accumulate: T.int32,
    ):
        with T.Kernel(cores) as core:
            for block in T.Persistent([T.ceildiv(channels, THREADS)], cores, core, group_size=1):
                with T.SimtVF(threads=THREADS):
                    for lane in T.Parallel(THREADS):
                        total = T.alloc_var(T.float32)
                        column = kept(T, block * THREADS + lane)
                        if column < channels:
                            total = T.float32(0.0)
                            for k in T.serial(parts):
                                total = total + partial[k, column]
                            if accumulate == 1:
                                total = T.Cast(T.float32, weight_grad[column]) + total
                            weight_grad[column] = T.Cast(dtype, total)

    return norm_weight_grad


_MEANS = Builder("quant.norm_means", _build_means)
_BACKWARD = Builder("quant.norm_backward", _build)
_WEIGHT_GRAD = Builder("quant.norm_weight_grad", _build_weight_grad)


class NormBackward:
    """``quant.norm_backward``."""

    revision = 1

    def refusal(self, out_grad: Tensor, x: Tensor, *rest: Any) -> str | None:
        return unsupported(x)

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
        reason = self.refusal(out_grad, x)
        if reason is not None:
            raise Refused(reason)
        (rows, channels), cores = x.shape, vector_cores(x.device)
        none = x.new_empty(1)
        weights, weighted = (none, 0) if weight is None else (weight, 1)
        residual, with_residual = (none.view(1, 1), 0) if residual_out_grad is None else (residual_out_grad, 1)
        means = torch.empty_like(rstd)
        _MEANS((x.dtype, cores), out_grad, x, weights, rstd, means, weighted, out_scale)
        tiles_down = -(-rows // (HEIGHT * PARTIALS))
        parts = -(-rows // (HEIGHT * tiles_down))
        partial = torch.empty((parts, channels) if weighted else (1, 1), dtype=torch.float32, device=x.device)
        _BACKWARD(
            (x.dtype, cores),
            *(out_grad, x, weights, rstd, means, residual, outs[0], partial),
            weighted,
            with_residual,
            out_scale,
            parts,
            tiles_down,
            -(-channels // WIDTH),
        )
        if weight_grad is not None:
            _WEIGHT_GRAD((weight_grad.dtype, cores), partial, weight_grad, int(accumulate))


KERNELS: dict[str, Any] = {"quant.norm_backward": NormBackward()}
