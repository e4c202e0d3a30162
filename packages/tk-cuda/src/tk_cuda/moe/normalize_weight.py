"""CUDA kernels of ``moe.normalize_weight`` and its gradient: one thread for each row, bound by launch latency.

Up to 64 columns stay in registers; longer rows are read twice. Sums run in ascending ``k`` with one rounding for each
operation: products are rounded before they are added, as in the reference.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..jit import Builder
from ..tile import access
from ..tile.function import prim_func

_THREADS = 64
_EPSILON = 1e-20
_CHUNK = 64  # columns that a thread holds at once


def _vectors(num_topk: int) -> tuple[int, int]:
    """Vectors of four columns in a chunk, and chunks in a row."""
    columns = min(num_topk, _CHUNK)
    return -(-columns // 4), -(-num_topk // columns)


def _build_forward(num_topk: int, load_width: int, store_width: int) -> Any:
    import tilelang.language as T

    rows, row_stride = T.dynamic("rows", "int64"), T.dynamic("row_stride", "int64")
    vectors, chunks = _vectors(num_topk)
    load, store = f"tk_load<16, {load_width}>", f"tk_store<16, {store_width}>"

    @T.macro
    def read(words: Any, weights: Any, row: Any, c: Any) -> None:
        for v in T.unroll(vectors):
            column = c * _CHUNK + v * 4
            T.call_extern(
                "handle",
                load,
                T.access_ptr(words[v * 4], "w", 4),
                T.access_ptr(weights[row, column], "r"),
                (num_topk - column) * 4,
            )

    def normalize_weight(weights: Any, denominator: Any, normalized: Any) -> None:
        with T.Kernel(T.ceildiv(rows, _THREADS), threads=_THREADS) as block:
            T.import_source(access.SOURCE)
            row = T.cast(block, "int64") * _THREADS + T.get_thread_binding()
            words = T.alloc_local((vectors * 4,), "float32")
            total = T.alloc_var("float32", init=0.0)
            if row < rows:
                for c in T.serial(chunks):
                    read(words, weights, row, c)
                    for i in T.unroll(vectors * 4):
                        total = total + words[i]
                total = total + T.float32(_EPSILON)
                denominator[row] = total
                for c in T.serial(chunks):
                    if chunks > 1:
                        read(words, weights, row, c)
                    for i in T.unroll(vectors * 4):
                        words[i] = T.ieee_fdiv(words[i], total)
                    for v in T.unroll(vectors):
                        column = c * _CHUNK + v * 4
                        T.call_extern(
                            "handle",
                            store,
                            T.access_ptr(normalized[row, column], "w"),
                            T.access_ptr(words[v * 4], "r", 4),
                            (num_topk - column) * 4,
                        )

    return prim_func(
        normalize_weight,
        T.StridedTensor((rows, num_topk), (row_stride, 1), "float32"),
        T.Tensor((rows,), "float32"),
        T.Tensor((rows, num_topk), "float32"),
    )


def _build_backward(num_topk: int, grad_width: int, load_width: int, store_width: int, with_denominator: bool) -> Any:
    import tilelang.language as T

    rows = T.dynamic("rows", "int64")
    grad_stride, row_stride = T.dynamic("grad_stride", "int64"), T.dynamic("row_stride", "int64")
    vectors, chunks = _vectors(num_topk)
    load_grad, load = f"tk_load<16, {grad_width}>", f"tk_load<16, {load_width}>"
    store = f"tk_store<16, {store_width}>"

    @T.macro
    def read(function: str, words: Any, t: Any, row: Any, c: Any) -> None:
        for v in T.unroll(vectors):
            column = c * _CHUNK + v * 4
            T.call_extern(
                "handle",
                function,
                T.access_ptr(words[v * 4], "w", 4),
                T.access_ptr(t[row, column], "r"),
                (num_topk - column) * 4,
            )

    @T.macro
    def body(grad: Any, denominator: Any, normalized: Any, extra: Any, out: Any, block: Any) -> None:
        T.import_source(access.SOURCE)
        row = T.cast(block, "int64") * _THREADS + T.get_thread_binding()
        g = T.alloc_local((vectors * 4,), "float32")
        n = T.alloc_local((vectors * 4,), "float32")
        dot = T.alloc_var("float32", init=0.0)
        if row < rows:
            for c in T.serial(chunks):
                read(load_grad, g, grad, row, c)
                read(load, n, normalized, row, c)
                for i in T.unroll(min(vectors * 4, num_topk)):
                    dot = T.call_extern("float32", "__fadd_rn", dot, T.call_extern("float32", "__fmul_rn", g[i], n[i]))
            for c in T.serial(chunks):
                if chunks > 1:
                    read(load_grad, g, grad, row, c)
                for i in T.unroll(vectors * 4):
                    g[i] = T.ieee_fdiv(g[i] - dot, denominator[row])
                    if with_denominator:
                        g[i] = g[i] + extra[row]
                for v in T.unroll(vectors):
                    column = c * _CHUNK + v * 4
                    T.call_extern(
                        "handle",
                        store,
                        T.access_ptr(out[row, column], "w"),
                        T.access_ptr(g[v * 4], "r", 4),
                        (num_topk - column) * 4,
                    )

    def normalize_weight_backward(grad: Any, denominator: Any, normalized: Any, extra: Any, out: Any) -> None:
        with T.Kernel(T.ceildiv(rows, _THREADS), threads=_THREADS) as block:
            body(grad, denominator, normalized, extra, out, block)

    def normalize_weight_backward_alone(grad: Any, denominator: Any, normalized: Any, out: Any) -> None:
        with T.Kernel(T.ceildiv(rows, _THREADS), threads=_THREADS) as block:
            body(grad, denominator, normalized, denominator, out, block)

    inputs = [
        T.StridedTensor((rows, num_topk), (grad_stride, 1), "float32"),
        T.Tensor((rows,), "float32"),
        T.StridedTensor((rows, num_topk), (row_stride, 1), "float32"),
    ]
    result = T.Tensor((rows, num_topk), "float32")
    if with_denominator:
        return prim_func(normalize_weight_backward, *inputs, T.Tensor((rows,), "float32"), result)
    return prim_func(normalize_weight_backward_alone, *inputs, result)


# Every access is predicated where it is made.
_CONFIGS = {"tl.disable_safe_memory_legalize": True}
_FORWARD = Builder("moe.normalize_weight", _build_forward, pass_configs=_CONFIGS)
_BACKWARD = Builder("moe.normalize_weight_backward", _build_backward, pass_configs=_CONFIGS)


class NormalizeWeight:
    """Weights over their sum."""

    revision = 1

    def refusal(self, topk_weights: Tensor) -> str | None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], topk_weights: Tensor) -> None:
        denominator, normalized = outs
        key = (topk_weights.shape[1], access.access_width(topk_weights), access.access_width(normalized))
        launch = _FORWARD.get(key, topk_weights.device) or _FORWARD.compile(key, topk_weights.device)
        launch(access.unit_columns(topk_weights), denominator, normalized)


class NormalizeWeightBackward:
    """Gradient of the weights from that of the normalized ones."""

    revision = 1

    def refusal(self, grad: Tensor, denominator: Tensor, normalized: Tensor, grad_denominator: Any) -> str | None:
        return None

    def __call__(
        self, outs: tuple[Tensor, ...], grad: Tensor, denominator: Tensor, normalized: Tensor, grad_denominator: Any
    ) -> None:
        widths = (access.access_width(grad), access.access_width(normalized), access.access_width(outs[0]))
        key = (grad.shape[1], *widths, grad_denominator is not None)
        grad, normalized = access.unit_columns(grad), access.unit_columns(normalized)
        launch = _BACKWARD.get(key, grad.device) or _BACKWARD.compile(key, grad.device)
        if grad_denominator is None:
            launch(grad, denominator, normalized, outs[0])
        else:
            launch(grad, denominator, normalized, grad_denominator, outs[0])


KERNELS = {
    "moe.normalize_weight": NormalizeWeight(),
    "moe.normalize_weight_backward": NormalizeWeightBackward(),
}

CI_KEYS = [
    (_FORWARD, (8, 16, 16)),
    (_FORWARD, (77, 4, 4)),
    (_BACKWARD, (8, 16, 16, 16, True)),
    (_BACKWARD, (6, 8, 4, 8, False)),
]
