"""cast: vector cores take spans of the flattened tensor in turn, one SIMT thread an element.

Stochastic rounding takes four elements a thread, which share their random words. A cast to the same dtype moves bytes.

Bytes: the input once in, the result once out.
"""

from typing import Any

import torch
from torch import Tensor

from ..jit import Builder, vector_cores
from ..tile import codes, decode, stochastic
from ..tile.indices import SPAN, THREADS, kept, within

_BYTE_DTYPE = {torch.float8_e4m3fn: torch.uint8}
"""SIMT code sees e4m3 as bytes."""


def _build(x_dtype: str, out_dtype: str, random: bool, cores: int):
    from tilelang.ascend import language as T

    n = T.dynamic("n", "int64")

    def value(source: Any, place: Any) -> Any:
        element = source[within(T, place, SPAN)]
        exact = decode.e4m3(T, T.Cast(T.int32, element)) if x_dtype == "uint8" else T.Cast(T.float32, element)
        return kept(T, exact)

    def store_nearest(source: Any, result: Any, place: Any) -> None:
        v = value(source, place)
        rounded = T.reinterpret(codes.to_e4m3(T, v), T.uint8) if out_dtype == "uint8" else T.Cast(out_dtype, v)
        T.buffer_store(result, rounded, [place])

    def store_random(source: Any, result: Any, place: Any, start: Any, width: Any) -> None:
        """Four elements from ``4 * place``."""
        places = [kept(T, place * 4 + i) for i in range(4)]
        values = [kept(T, T.if_then_else(p < width, value(source, p), T.float32(0.0))) for p in places]
        words = stochastic.random_words(T, (start >> 2) + place, values)
        for i, v in enumerate(values):
            if out_dtype == "uint8":
                code = stochastic.encode(T, v, stochastic.rotated(T, words[0], i), "e4m3")
                T.buffer_store(result, T.Cast(T.uint8, code), [place * 4 + i])
            else:
                pattern = T.Cast(T.uint16, stochastic.to_bf16(T, v, words, i))
                T.buffer_store(result, T.reinterpret(pattern, T.bfloat16), [place * 4 + i])

    @T.prim_func
    def cast(x: T.Tensor((n,), x_dtype), y: T.Tensor((n,), out_dtype), spans: T.int32):
        with T.Kernel(cores) as core:
            source = T.alloc_shared((SPAN,), x_dtype)
            result = T.alloc_shared((SPAN,), out_dtype)
            for part in T.Persistent([spans], cores, core, group_size=1, num_stages=2):
                start = T.Cast(T.int64, part) * SPAN
                width = T.min(T.int64(SPAN), n - start)
                T.copy(x[start : start + width], source[0:width])
                with T.SimtVF(threads=THREADS):
                    count = kept(T, T.Cast(T.int32, width))
                    for step in T.serial(SPAN // (4 if random else 1) // THREADS):
                        for thread in T.Parallel(THREADS):
                            place = step * THREADS + thread
                            if random:
                                if place * 4 < count:
                                    store_random(source, result, place, start, count)
                            elif place < count:
                                store_nearest(source, result, place)
                T.copy(result[0:width], y[start : start + width])

    return cast


def _build_copy(cores: int):
    from tilelang.ascend import language as T

    n = T.dynamic("n", "int64")

    @T.prim_func
    def copy(x: T.Tensor((n,), T.uint8), y: T.Tensor((n,), T.uint8), spans: T.int32):
        with T.Kernel(cores) as core:
            data = T.alloc_shared((4 * SPAN,), T.uint8)
            for part in T.Persistent([spans], cores, core, group_size=1, num_stages=2):
                start = T.Cast(T.int64, part) * (4 * SPAN)
                width = T.min(T.int64(4 * SPAN), n - start)
                T.copy(x[start : start + width], data[0:width])
                T.copy(data[0:width], y[start : start + width])

    return copy


_CAST = Builder("quant.cast", _build)
_COPY = Builder("quant.cast to the same dtype", _build_copy)


class Cast:
    """``quant.cast``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], x: Tensor, dtype: torch.dtype, stochastic_rounding: bool) -> None:
        x, y = x.view(-1), outs[0].view(-1)
        cores = vector_cores(x.device)
        if x.dtype == dtype:
            x, y = x.view(torch.uint8), y.view(torch.uint8)
            _COPY((cores,), x, y, -(-x.numel() // (4 * SPAN)))
            return
        x, y = (t.view(_BYTE_DTYPE.get(t.dtype, t.dtype)) for t in (x, y))
        _CAST((x.dtype, y.dtype, stochastic_rounding, cores), x, y, -(-x.numel() // SPAN))


KERNELS: dict[str, Any] = {"quant.cast": Cast()}
