"""What the SwiGLU kernels share: which rows are real and what they weigh, the counters, and the gradient of an element.

Small kernels look every row up once, so that those that move the data read one expert and one weight a row, whatever
the caller gave.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..jit import Builder, vector_cores
from ..tile.activation import clamped
from ..tile.arithmetic import fma
from ..tile.indices import kept

THREADS = 512
COUNTED_ROWS = 8
"""Rows that a core counts in at a time."""


REAL, WEIGHTED = 1, 2
"""What is known of the rows, as bits."""


class Rows(NamedTuple):
    """An expert (negative: the row is not real) and a weight for each row, where ``known`` says that there are any."""

    known: int
    experts: Tensor
    weights: Tensor


def _build_mark(cores: int):
    from tilelang.ascend import language as T

    rows, experts = T.dynamic("rows"), T.dynamic("experts")

    @T.prim_func
    def swiglu_mark(ends: T.Tensor((experts,), T.int32), expert_of: T.Tensor((rows,), T.int32), alignment: T.int64):
        with T.Kernel(cores) as core:
            for e in T.Persistent([experts], cores, core, group_size=1):
                with T.SimtVF(threads=THREADS):
                    for lane in T.Parallel(THREADS):
                        row = T.alloc_var(T.int64)
                        end = T.alloc_var(T.int64)
                        row = T.int64(0)
                        if e > 0:
                            row = T.Cast(T.int64, ends[T.max(e - 1, 0)]) + alignment - T.int64(1)
                            row = row - T.floormod(row, alignment)
                        row = T.max(row, T.int64(0)) + T.Cast(T.int64, lane)
                        end = T.min(T.Cast(T.int64, ends[e]), T.Cast(T.int64, rows))
                        while row < end:
                            expert_of[T.Cast(T.int32, row)] = e
                            row = row + T.int64(THREADS)

    return swiglu_mark


def _build_weigh(cores: int):
    from tilelang.ascend import language as T

    rows, size, indices = T.dynamic("rows"), T.dynamic("size"), T.dynamic("indices")

    @T.prim_func
    def swiglu_weigh(
        given: T.Tensor((size,), T.float32),
        index: T.Tensor((indices,), T.int32),
        weights: T.Tensor((rows,), T.float32),
        with_index: T.int32,
        factor: T.float32,
    ):
        with T.Kernel(cores) as core:
            for block in T.Persistent([T.ceildiv(rows, THREADS)], cores, core, group_size=1):
                with T.SimtVF(threads=THREADS):
                    for lane in T.Parallel(THREADS):
                        row = T.alloc_var(T.int32)
                        at = T.alloc_var(T.int32)
                        weight = T.alloc_var(T.float32)
                        row = block * THREADS + lane
                        if row < rows:
                            at = row
                            if with_index == 1:
                                at = index[row]
                            weight = T.float32(0.0)
                            if at >= 0 and at < size:
                                weight = given[at]
                            weights[row] = weight * factor

    return swiglu_weigh


_MARK = Builder("quant.swiglu_mark", _build_mark)
_WEIGH = Builder("quant.swiglu_weigh", _build_weigh)


def rows_of(
    x: Tensor,
    psum: Tensor | None,
    weights: Tensor | None,
    index: Tensor | None,
    experts: Tensor | None,
    factor: float | None,
    alignment: int,
) -> Rows:
    """Look the rows of ``x`` up on the device."""
    rows, key = x.shape[0], (vector_cores(x.device),)
    one, none = (torch.empty(1, dtype=dtype, device=x.device) for dtype in (torch.float32, torch.int32))
    known = 0
    if psum is not None:
        experts = torch.full((rows,), -1, dtype=torch.int32, device=x.device)
        _MARK(key, psum, experts, alignment)
    if experts is not None:
        known |= REAL
    found = one
    if weights is not None:
        known |= WEIGHTED
        found = torch.empty(rows, dtype=torch.float32, device=x.device)
        given = weights.view(-1) if weights.numel() else one.fill_(0.0)
        factor = 1.0 if factor is None else factor
        _WEIGH(key, given, none if index is None else index, found, int(index is not None), factor)
    return Rows(known, none if experts is None else experts, found)


def _build_count(x_dtype: str, cores: int):
    from tilelang.ascend import language as T

    rows, columns, ld, known_rows = (T.dynamic(n) for n in ("rows", "columns", "ld", "known_rows"))

    @T.prim_func
    def swiglu_count(
        x: T.StridedTensor((rows, columns), (ld, 1), x_dtype),
        experts: T.Tensor((known_rows,), T.int32),
        counters: T.Tensor((4,), T.int64),
        channels: T.int32,
        known: T.int32,
        bound: T.float32,
    ):
        with T.Kernel(cores) as core:
            for block in T.Persistent([T.ceildiv(rows, COUNTED_ROWS)], cores, core, group_size=1):
                with T.SimtVF(threads=THREADS):
                    for lane in T.Parallel(THREADS):
                        row = T.alloc_var(T.int32)
                        expert = T.alloc_var(T.int32)
                        gates = T.alloc_var(T.int32)
                        ups = T.alloc_var(T.int32)
                        downs = T.alloc_var(T.int32)
                        results = T.alloc_var(T.int32)
                        gates = 0
                        ups = 0
                        downs = 0
                        results = 0
                        for i in T.serial(COUNTED_ROWS):
                            row = block * COUNTED_ROWS + i
                            if row < rows:
                                expert = 0
                                if (known & REAL) != 0:
                                    expert = experts[row]
                                if expert >= 0:
                                    for k in T.serial(T.ceildiv(channels, THREADS)):
                                        if k * THREADS + lane < channels:
                                            gate = T.Cast(T.float32, x[row, k * THREADS + lane])
                                            up = T.Cast(T.float32, x[row, channels + k * THREADS + lane])
                                            results = results + 1
                                            if gate > bound:
                                                gates = gates + 1
                                            if up > bound:
                                                ups = ups + 1
                                            if up < -bound:
                                                downs = downs + 1
                        if gates > 0:
                            T.atomic_add(counters[0], T.Cast(T.int64, gates))
                        if ups > 0:
                            T.atomic_add(counters[1], T.Cast(T.int64, ups))
                        if downs > 0:
                            T.atomic_add(counters[2], T.Cast(T.int64, downs))
                        if results > 0:
                            T.atomic_add(counters[3], T.Cast(T.int64, results))

    return swiglu_count


_COUNT = Builder("quant.swiglu_count", _build_count)


def count(counters: Tensor, x: Tensor, rows: Rows, bound: float) -> None:
    """Add the numbers of gates and ups past the bounds, and of results, over the rows that are real."""
    _COUNT((x.dtype, vector_cores(x.device)), x, rows.experts, counters, x.shape[1] // 2, rows.known, bound)


def unsupported(x: Tensor) -> str | None:
    """Why no kernel takes this input."""
    return "the vector cores have no float64 arithmetic" if x.dtype == torch.float64 else None


def gradient(T: Any, gate: Any, up: Any, g: Any, weight: Any, bound: Any) -> tuple[Any, Any, Any]:
    """The gradients of gate and up from that of the weighted result, and the unweighted result."""
    l = kept(T, T.if_then_else(gate > bound, bound, gate))
    r = kept(T, clamped(T, up, -bound, bound))
    denominator = kept(T, T.exp(-l) + T.float32(1.0))
    s = kept(T, T.float32(1.0) / denominator)
    q = kept(T, (g * weight) * s)
    zero = T.float32(0.0)
    gate_grad = T.if_then_else(gate > bound, zero, (q * r) * fma(T, l, T.float32(1.0) - s, T.float32(1.0)))
    up_grad = T.if_then_else(up > bound, zero, T.if_then_else(up < -bound, zero, q * l))
    return kept(T, gate_grad), kept(T, up_grad), kept(T, (l / denominator) * r)
