"""CUDA kernel of ``quant.cast``: elementwise, bound by bandwidth.

Threads take ``VECTORS`` vectors of eight elements, all loads in flight together, or twice as many of four where the
result is fp32: so the stores of a warp leave no gaps. Only the last vector of the tensor goes element by element.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..jit import Builder
from ..tile import groups, vectors
from ..tile.function import prim_func

THREADS = 256
VECTORS = 4
"""Vectors of a thread where there are many."""
SMALL = 1 << 22
"""Elements up to which a thread takes one vector, to keep every multiprocessor busy."""


class _Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        dtype, out_dtype: of input and result.
        load_width, store_width: alignment of their base addresses in bytes, at most 16.
        vectors: of eight elements, of a thread.
    """

    dtype: Any
    out_dtype: Any
    stochastic: bool
    load_width: int
    store_width: int
    vectors: int


_BYTES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = _Key(*key)
    kind, out_kind = vectors.element(k.dtype), vectors.element(k.out_dtype)
    vector = 4 if k.out_dtype == "float32" else 8
    count = k.vectors * 8 // vector
    words, out_words = vector * _BYTES[k.dtype] // 4, vector * _BYTES[k.out_dtype] // 4
    n = T.dynamic("n", "int64")

    @T.macro
    def fetch(x: Any, raw: Any, i: Any, at: Any) -> None:
        """Load vector ``i``, which starts at element ``at``: whole, or the elements that exist."""
        if at + vector <= n:
            T.call_extern(
                "handle",
                f"tk_load{vector}<{kind}, {k.load_width}>",
                T.access_ptr(raw[i * words], "w", words),
                T.access_ptr(x[at], "r"),
                vector,
            )
        else:
            T.call_extern(
                "handle",
                f"tk_load{vector}<{kind}, {_BYTES[k.dtype]}>",
                T.access_ptr(raw[i * words], "w", words),
                T.access_ptr(x[at], "r"),
                T.Cast("int32", T.max(n - at, T.int64(0))),
            )

    @T.macro
    def convert(to: Any, raw: Any, i: Any, at: Any) -> None:
        if k.dtype == k.out_dtype:
            for j in T.unroll(words):
                to[j] = raw[i * words + j]
        else:
            v = T.alloc_local((vector,), "float32")
            T.call_extern(
                "handle",
                f"tk_widen{vector}<{kind}>",
                T.access_ptr(v[0], "w", vector),
                T.access_ptr(raw[i * words], "r", words),
            )
            if k.stochastic:
                for j in T.unroll(2):
                    quad = T.Cast("uint32", (at // 4 + j) % (1 << 32))
                    if k.out_dtype == "bfloat16":
                        T.call_extern(
                            "handle",
                            "tk_bf16x4_stochastic",
                            T.access_ptr(to[2 * j], "w", 2),
                            T.access_ptr(v[4 * j], "r", 4),
                            quad,
                        )
                    else:
                        to[j] = T.call_extern("uint32", "tk_e4m3x4_stochastic", T.access_ptr(v[4 * j], "r", 4), quad)
            else:
                T.call_extern(
                    "handle",
                    f"tk_narrow{vector}<{out_kind}>",
                    T.access_ptr(to[0], "w", out_words),
                    T.access_ptr(v[0], "r", vector),
                )

    @T.macro
    def put(y: Any, to: Any, at: Any) -> None:
        if at + vector <= n:
            T.call_extern(
                "handle",
                f"tk_put{vector}<{out_kind}, {k.store_width}>",
                T.access_ptr(y[at], "w"),
                T.access_ptr(to[0], "r", out_words),
                vector,
            )
        else:
            T.call_extern(
                "handle",
                f"tk_put{vector}<{out_kind}, {_BYTES[k.out_dtype]}>",
                T.access_ptr(y[at], "w"),
                T.access_ptr(to[0], "r", out_words),
                T.Cast("int32", T.max(n - at, T.int64(0))),
            )

    def cast(x: Any, y: Any) -> None:
        with T.Kernel(T.ceildiv(n, THREADS * count * vector), threads=THREADS) as index:
            T.import_source(groups.SOURCE)
            start = T.alloc_var(
                "int64", init=(T.Cast("int64", index) * (THREADS * count) + T.get_thread_binding()) * vector
            )
            raw = T.alloc_local((count * words,), "uint32")
            to = T.alloc_local((out_words,), "uint32")
            for i in T.unroll(count):
                fetch(x, raw, i, start + i * (THREADS * vector))
            for i in T.unroll(count):
                convert(to, raw, i, start + i * (THREADS * vector))
                put(y, to, start + i * (THREADS * vector))

    return prim_func(cast, T.Tensor((n,), k.dtype), T.Tensor((n,), k.out_dtype))


# Every access is predicated where it is made.
_CAST = Builder("quant.cast", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


def _alignment(t: Tensor) -> int:
    bits = t.data_ptr() | 16
    return bits & -bits


class Cast:
    """Elementwise cast."""

    revision = 1

    def refusal(self, x: Tensor, dtype: torch.dtype, stochastic_rounding: bool) -> str | None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], x: Tensor, dtype: torch.dtype, stochastic_rounding: bool) -> None:
        vectors = 1 if x.numel() <= SMALL else VECTORS
        key = _Key(x.dtype, dtype, stochastic_rounding, _alignment(x), _alignment(outs[0]), vectors)
        launch = _CAST.get(key, x.device) or _CAST.compile(key, x.device)
        launch(x.view(-1), outs[0].view(-1))


KERNELS = {"quant.cast": Cast()}
CI_KEYS = [
    (_CAST, _Key("float32", "bfloat16", False, 16, 16, VECTORS)),
    (_CAST, _Key("float32", "bfloat16", True, 16, 16, VECTORS)),
    (_CAST, _Key("bfloat16", "float8_e4m3fn", True, 16, 16, VECTORS)),
    (_CAST, _Key("float8_e4m3fn", "float32", False, 1, 4, 1)),
    (_CAST, _Key("bfloat16", "bfloat16", False, 2, 16, VECTORS)),
]
