"""Transposes of matrices and of batches of them, whose elements are moved as integers of their size.

A tile is copied to UB row by row, transposed by SIMT threads, and copied out row by row. Matrices that are much smaller
than a tile are gathered instead: one SIMT thread an element of the result, in its order.

Bytes: x once in, as much out.
"""

from typing import Any

import torch
from torch import Tensor

from ..jit import Builder, vector_cores

THREADS = 512
GATHERED = 1024
"""Elements of a matrix up to which it is gathered."""
STEP = 8192
"""Elements that are gathered at a time; whole matrices."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _build_tiled(dtype: str, side: int, cores: int):
    from tilelang.ascend import language as T

    batch, rows, columns = T.dynamic("batch"), T.dynamic("rows"), T.dynamic("columns")
    batch_stride, ld = T.dynamic("batch_stride"), T.dynamic("ld")

    @T.prim_func
    def transpose(
        x: T.StridedTensor((batch, rows, columns), (batch_stride, ld, 1), dtype),
        out: T.Tensor((batch, columns, rows), dtype),
    ):
        with T.Kernel(cores) as core:
            tile = T.alloc_shared((side, side), dtype)
            turned = T.alloc_shared((side, side), dtype)
            for b, down, across in T.Persistent(
                [batch, T.ceildiv(rows, side), T.ceildiv(columns, side)], cores, core, group_size=1
            ):
                top = down * side
                left = across * side
                height = T.min(side, rows - top)
                width = T.min(side, columns - left)
                T.copy(x[b, top : top + height, left : left + width], tile[0:height, 0:width])
                with T.SimtVF(threads=THREADS):
                    for j, i in T.Parallel(side, side):
                        if i < height and j < width:
                            turned[j, i] = tile[i, j]
                T.copy(turned[0:width, 0:height], out[b, left : left + width, top : top + height])

    return transpose


def _build_gathered(dtype: str, cores: int):
    from tilelang.ascend import language as T

    batch, rows, columns = T.dynamic("batch"), T.dynamic("rows"), T.dynamic("columns")
    batch_stride, ld = T.dynamic("batch_stride"), T.dynamic("ld")

    @T.prim_func
    def transpose_small(
        x: T.StridedTensor((batch, rows, columns), (batch_stride, ld, 1), dtype),
        out: T.Tensor((batch, columns, rows), dtype),
        matrices: T.int32,
        area: T.int32,
    ):
        with T.Kernel(cores) as core:
            for block in T.Persistent([T.ceildiv(batch, matrices)], cores, core, group_size=1):
                with T.SimtVF(threads=THREADS):
                    for e in T.Parallel(STEP):
                        b = T.alloc_var(T.int32)
                        i = T.alloc_var(T.int32)
                        j = T.alloc_var(T.int32)
                        b = block * matrices + T.truncdiv(e, area)
                        j = T.truncdiv(T.truncmod(e, area), rows)
                        i = T.truncmod(e, rows)
                        if e < matrices * area and b < batch:
                            out[b, j, i] = x[b, i, j]

    return transpose_small


_TILED = Builder("transform.transpose", _build_tiled)
_GATHERED = Builder("transform.transpose_small", _build_gathered)


def launch(out: Tensor, x: Tensor) -> None:
    """Transpose each matrix of a batch."""
    dtype = _INTEGERS[x.dtype.itemsize]
    x, out, cores = x.view(dtype), out.view(dtype), vector_cores(x.device)
    if x.shape[1] * x.shape[2] <= GATHERED:
        area = x.shape[1] * x.shape[2]
        _GATHERED((dtype, cores), x, out, STEP // area, area)
    else:
        _TILED((dtype, 128 if dtype.itemsize < 4 else 64, cores), x, out)


class Transpose:
    """``transform.transpose``."""

    revision = 1

    def refusal(self, x: Tensor) -> str | None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], x: Tensor) -> None:
        launch(outs[0].unsqueeze(0), x.unsqueeze(0))


KERNELS: dict[str, Any] = {"transform.transpose": Transpose()}
