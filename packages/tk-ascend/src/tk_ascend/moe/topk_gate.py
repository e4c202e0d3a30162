"""Stable top-k of each row: one SIMT thread a row, K rounds of "the largest that comes after the last".

A tile of rows is copied to UB; each round scans the row for the best (key, expert) that follows the previous choice in
the order of descending key, then ascending expert. So nothing is marked or overwritten, and ids are distinct whatever
the scores. The key is the fp32 magnitude with its sign as an int32: both zeros are 0, NaN is the smallest.

Bytes: 4 E in, 8 K out a row. Bound by instructions: K E comparisons a row.
"""

from typing import Any

from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder, vector_cores
from ..tile.rows import room, tile_rows


def _build(columns: int, slots: int, rows: int, cores: int):
    from tilelang.ascend import language as T

    tokens, ld, experts, topk = T.dynamic("tokens"), T.dynamic("ld"), T.dynamic("experts"), T.dynamic("topk")

    @T.prim_func
    def topk_gate(
        scores: T.StridedTensor((tokens, experts), (ld, 1), T.float32), topk_idx: T.Tensor((tokens, topk), T.int64)
    ):
        with T.Kernel(cores) as core:
            tile = T.alloc_shared((rows, columns), T.float32)
            ids = T.alloc_shared((rows, slots), T.int64)
            for block in T.Persistent([T.ceildiv(tokens, rows)], cores, core, group_size=1):
                height = T.min(rows, tokens - block * rows)
                T.copy(scores[block * rows : block * rows + height, 0:experts], tile[0:height, 0:experts])
                with T.SimtVF(threads=rows):
                    for row in T.Parallel(rows):
                        last_key = T.alloc_var(T.int32)
                        last = T.alloc_var(T.int32)
                        best_key = T.alloc_var(T.int32)
                        best = T.alloc_var(T.int32)
                        last_key = T.int32(0x7FFFFFFF)
                        last = T.int32(-1)
                        for k in T.serial(topk):
                            best_key = T.int32(-(2**31))
                            best = T.int32(-1)
                            for e in T.serial(experts):
                                bits = T.reinterpret(tile[row, e], T.int32)
                                magnitude = bits & T.int32(0x7FFFFFFF)
                                ordered = T.if_then_else(bits < 0, -magnitude, magnitude)
                                key = T.if_then_else(magnitude > 0x7F800000, T.int32(-(2**31)), ordered)
                                follows = (key < last_key) or (key == last_key and e > last)
                                if follows and (best < 0 or key > best_key):
                                    best_key = key
                                    best = e
                            ids[row, k] = T.Cast(T.int64, best)
                            last_key = best_key
                            last = best
                T.copy(ids[0:height, 0:topk], topk_idx[block * rows : block * rows + height, 0:topk])

    return topk_gate


_TOPK = Builder("moe.topk_gate", _build)


class TopkGate:
    """``moe.topk_gate``."""

    revision = 1

    def refusal(self, scores: Tensor, num_topk: int) -> str | None:
        fits = tile_rows(4 * room(scores.shape[1]) + 8 * room(num_topk)) > 0
        return None if fits else f"a row of {scores.shape[1]} scores does not fit in the unified buffer"

    def __call__(self, outs: tuple[Tensor, ...], scores: Tensor, num_topk: int) -> None:
        reason = self.refusal(scores, num_topk)
        if reason is not None:
            raise Refused(reason)
        columns, slots = room(scores.shape[1]), room(num_topk)
        _TOPK((columns, slots, tile_rows(4 * columns + 8 * slots), vector_cores(scores.device)), scores, outs[0])


KERNELS: dict[str, Any] = {"moe.topk_gate": TopkGate()}
