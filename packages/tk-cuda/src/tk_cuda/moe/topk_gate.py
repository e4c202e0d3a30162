"""CUDA kernel of ``moe.topk_gate``: one warp for each row, bound by the instructions of its reductions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder
from ..tile.access import access_width, unit_columns
from ..tile.function import prim_func
from ._topk import SOURCE, topk_refusal

_ROWS = 4  # a block


def _build(num_experts: int, num_topk: int, width: int) -> Any:
    import tilelang.language as T

    rows = T.dynamic("rows", "int64")
    row_stride = T.dynamic("row_stride", "int64")
    write_row = f"tk::write_topk_row<{num_experts}, {num_topk}, {width}>"

    def topk_gate(scores: Any, ids: Any) -> None:
        with T.Kernel(T.ceildiv(rows, _ROWS), threads=_ROWS * 32) as block:
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            row = T.cast(block, "int64") * _ROWS + thread // 32
            if row < rows:
                T.call_extern(
                    "handle",
                    write_row,
                    T.access_ptr(ids[row, 0], "w", num_topk),
                    T.access_ptr(scores[row, 0], "r", num_experts),
                    thread % 32,
                )

    return prim_func(
        topk_gate,
        T.StridedTensor((rows, num_experts), (row_stride, 1), "float32"),
        T.Tensor((rows, num_topk), "int64"),
    )


# Every access is predicated where it is made.
_TOPK = Builder("moe.topk_gate", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


class TopkGate:
    """Stable top-k of each row."""

    revision = 1

    def refusal(self, scores: Tensor, num_topk: int) -> str | None:
        return topk_refusal(num_topk, scores.shape[1])

    def __call__(self, outs: tuple[Tensor, ...], scores: Tensor, num_topk: int) -> None:
        key = (scores.shape[1], num_topk, access_width(scores))
        launch = _TOPK.get(key, scores.device)
        if launch is None:
            reason = self.refusal(scores, num_topk)
            if reason is not None:
                raise Refused(reason)
            launch = _TOPK.compile(key, scores.device)
        launch(unit_columns(scores), outs[0])


KERNELS = {"moe.topk_gate": TopkGate()}

CI_KEYS = [
    (_TOPK, (256, 8, 16)),
    (_TOPK, (257, 9, 4)),
    (_TOPK, (1026, 32, 8)),
]
