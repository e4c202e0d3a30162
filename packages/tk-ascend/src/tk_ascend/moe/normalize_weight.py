"""Weights over their sum, and the gradient: one SIMT thread a row, sums in ascending k.

Bytes: 4 K in, 4 K + 4 out a row forward; 8 K + 4 (8) in, 4 K out backward. Bound by launch and DMA latency.
"""

from typing import Any

from torch import Tensor

from ..jit import Builder, vector_cores
from ..tile.rows import room, tile_rows

EPSILON = 1e-20


def _build_forward(slots: int, rows: int, cores: int):
    from tilelang.ascend import language as T

    tokens, ld, topk = T.dynamic("tokens"), T.dynamic("ld"), T.dynamic("topk")

    @T.prim_func
    def normalize_weight(
        weights: T.StridedTensor((tokens, topk), (ld, 1), T.float32),
        denominator: T.Tensor((tokens,), T.float32),
        normalized: T.Tensor((tokens, topk), T.float32),
    ):
        with T.Kernel(cores) as core:
            tile = T.alloc_shared((rows, slots), T.float32)
            sums = T.alloc_shared((rows,), T.float32)
            for block in T.Persistent([T.ceildiv(tokens, rows)], cores, core, group_size=1):
                first = block * rows
                height = T.min(rows, tokens - first)
                T.copy(weights[first : first + height, 0:topk], tile[0:height, 0:topk])
                with T.SimtVF(threads=rows):
                    for row in T.Parallel(rows):
                        total = T.alloc_var(T.float32)
                        total = tile[row, 0]
                        for k in T.serial(topk - 1):
                            total = total + tile[row, k + 1]
                        total = total + T.float32(EPSILON)
                        sums[row] = total
                        for k in T.serial(topk):
                            tile[row, k] = tile[row, k] / total
                T.copy(sums[0:height], denominator[first : first + height])
                T.copy(tile[0:height, 0:topk], normalized[first : first + height, 0:topk])

    return normalize_weight


def _build_backward(slots: int, rows: int, with_denominator: bool, cores: int):
    from tilelang.ascend import language as T

    tokens, topk = T.dynamic("tokens"), T.dynamic("topk")
    ld_grad, ld_normalized = T.dynamic("ld_grad"), T.dynamic("ld_normalized")

    @T.prim_func
    def normalize_weight_backward(
        grad: T.StridedTensor((tokens, topk), (ld_grad, 1), T.float32),
        denominator: T.Tensor((tokens,), T.float32),
        normalized: T.StridedTensor((tokens, topk), (ld_normalized, 1), T.float32),
        grad_denominator: T.Tensor((tokens,), T.float32),
        out: T.Tensor((tokens, topk), T.float32),
    ):
        with T.Kernel(cores) as core:
            g = T.alloc_shared((rows, slots), T.float32)
            n = T.alloc_shared((rows, slots), T.float32)
            den = T.alloc_shared((rows,), T.float32)
            den_grad = T.alloc_shared((rows,), T.float32)
            for block in T.Persistent([T.ceildiv(tokens, rows)], cores, core, group_size=1):
                first = block * rows
                height = T.min(rows, tokens - first)
                T.copy(grad[first : first + height, 0:topk], g[0:height, 0:topk])
                T.copy(normalized[first : first + height, 0:topk], n[0:height, 0:topk])
                T.copy(denominator[first : first + height], den[0:height])
                if with_denominator:
                    T.copy(grad_denominator[first : first + height], den_grad[0:height])
                with T.SimtVF(threads=rows):
                    for row in T.Parallel(rows):
                        dot = T.alloc_var(T.float32)
                        dot = g[row, 0] * n[row, 0]
                        for k in T.serial(topk - 1):
                            dot = dot + g[row, k + 1] * n[row, k + 1]
                        for k in T.serial(topk):
                            if with_denominator:
                                g[row, k] = (g[row, k] - dot) / den[row] + den_grad[row]
                            else:
                                g[row, k] = (g[row, k] - dot) / den[row]
                T.copy(g[0:height, 0:topk], out[first : first + height, 0:topk])

    return normalize_weight_backward


_FORWARD = Builder("moe.normalize_weight", _build_forward)
_BACKWARD = Builder("moe.normalize_weight_backward", _build_backward)


class NormalizeWeight:
    """``moe.normalize_weight``."""

    revision = 1

    def refusal(self, topk_weights: Tensor) -> str | None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], topk_weights: Tensor) -> None:
        slots = room(topk_weights.shape[1])
        _FORWARD((slots, tile_rows(4 * slots + 4), vector_cores(topk_weights.device)), topk_weights, *outs)


class NormalizeWeightBackward:
    """``moe.normalize_weight_backward``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        grad: Tensor,
        denominator: Tensor,
        normalized: Tensor,
        grad_denominator: Tensor | None,
    ) -> None:
        slots = room(grad.shape[1])
        key = (slots, tile_rows(8 * slots + 8), grad_denominator is not None, vector_cores(grad.device))
        _BACKWARD(
            key, grad, denominator, normalized, denominator if grad_denominator is None else grad_denominator, *outs
        )


KERNELS: dict[str, Any] = {
    "moe.normalize_weight": NormalizeWeight(),
    "moe.normalize_weight_backward": NormalizeWeightBackward(),
}
