"""apply_rotary in place: one SIMT thread a pair of channels, straight on global memory.

A vector core takes a group of tokens at a time, or a part of the pairs of one token where it has many. Query and key
are rotated one after the other. Positions are read as 32-bit words, two to an int64, so that one kernel serves both.

Bytes: query and key once in and once out. Bound by the SIMT threads' loads and stores of single elements.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder, vector_cores
from ..tile.arithmetic import fma
from ..tile.memory import spanned

THREADS = 512
PAIRS = 2048
"""Pairs that a core rotates at a time."""


def _build(dtype: str, cores: int):
    from tilelang.ascend import language as T

    size, cache_size, words = T.dynamic("size", "int64"), T.dynamic("cache_size", "int64"), T.dynamic("words", "int64")

    @T.prim_func
    def apply_rotary(
        t: T.Tensor((size,), dtype),
        cache: T.Tensor((cache_size,), T.float32),
        positions: T.Tensor((words,), T.int32),
        batch: T.int32,
        tokens: T.int32,
        heads: T.int32,
        half: T.int32,
        batch_stride: T.int64,
        token_stride: T.int64,
        head_stride: T.int64,
        length: T.int64,
        cache_stride: T.int64,
        positions_stride: T.int64,
        words_each: T.int32,
        offset: T.int64,
        group: T.int32,
        apart: T.int32,
        sign: T.float32,
    ):
        with T.Kernel(cores) as core:
            for b, block, part in T.Persistent(
                [batch, T.ceildiv(tokens, group), T.ceildiv(group * heads * half, PAIRS)], cores, core, group_size=1
            ):
                with T.SimtVF(threads=THREADS):
                    for e in T.Parallel(PAIRS):
                        pair = T.alloc_var(T.int32)
                        head = T.alloc_var(T.int32)
                        token = T.alloc_var(T.int32)
                        place = T.alloc_var(T.int64)
                        at = T.alloc_var(T.int64)
                        cos = T.alloc_var(T.float32)
                        sin = T.alloc_var(T.float32)
                        pair = T.truncmod(part * PAIRS + e, half)
                        head = T.truncdiv(part * PAIRS + e, half)
                        token = T.truncdiv(head, heads)
                        head = head - token * heads
                        if token < group and block * group + token < tokens:
                            token = token + block * group
                            at = T.Cast(T.int64, token)
                            place = b * positions_stride + token * T.Cast(T.int64, words_each)
                            if words_each == 1:
                                at = T.Cast(T.int64, positions[place])
                            if words_each == 2:
                                low = T.Cast(T.int64, T.Cast(T.uint32, positions[place]))
                                at = (T.Cast(T.int64, positions[place + T.int64(1)]) << T.int64(32)) | low
                            at = at + offset
                            cos = T.float32(0.0)
                            sin = T.float32(0.0)
                            if at >= T.int64(0) and at < length:
                                cos = cache[at * cache_stride + pair]
                                sin = cache[at * cache_stride + half + pair] * sign
                            place = b * batch_stride + token * token_stride + head * head_stride
                            place = place + T.if_then_else(apart == 1, pair * 2, pair)
                            x = T.Cast(T.float32, t[place])
                            y = T.Cast(T.float32, t[place + apart])
                            t[place] = T.Cast(dtype, fma(T, x, cos, -(y * sin)))
                            t[place + apart] = T.Cast(dtype, fma(T, x, sin, y * cos))

    return apply_rotary


_ROTATE = Builder("transform.apply_rotary", _build)


def _rotate(t: Tensor, cache: Tensor, positions: Tensor | None, interleaved: bool, sign: float, offset: int) -> None:
    """Rotate the heads of query or key ``(B, S, heads, D)``."""
    batch, tokens, heads, half = *t.shape[:3], t.shape[3] // 2
    words_each, stride = 0, 0
    if positions is None:
        positions = torch.empty(1, dtype=torch.int32, device=t.device)
    else:
        words_each = positions.dtype.itemsize // 4
        positions = positions.view(torch.int32)
        stride = positions.stride(0)
    _ROTATE(
        (t.dtype, vector_cores(t.device)),
        spanned(t),
        spanned(cache),
        spanned(positions),
        *(batch, tokens, heads, half),
        *t.stride()[:3],
        *(cache.shape[0], cache.stride(0)),
        *(stride, words_each, offset),
        min(tokens, max(1, PAIRS // (heads * half))),
        1 if interleaved else half,
        sign,
    )


class ApplyRotary:
    """``transform.apply_rotary``."""

    revision = 1

    def refusal(self, query: Tensor, *rest: Any) -> str | None:
        return "the vector cores have no float64 arithmetic" if query.dtype == torch.float64 else None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        query: Tensor,
        cos_sin_cache: Tensor,
        key: Tensor | None,
        positions: Tensor | None,
        interleaved: bool,
        conjugate: bool,
        seqlen_offset: int,
    ) -> None:
        reason = self.refusal(query)
        if reason is not None:
            raise Refused(reason)
        for t in (query, key):
            if t is None or not t.numel():
                continue
            batched = t.dim() == 4
            places = positions if positions is None or batched else positions.unsqueeze(0)
            sign = -1.0 if conjugate else 1.0
            _rotate(t if batched else t.unsqueeze(0), cos_sin_cache, places, interleaved, sign, seqlen_offset)


KERNELS: dict[str, Any] = {"transform.apply_rotary": ApplyRotary()}
