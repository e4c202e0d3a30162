"""batched_transpose_weight_sf: one launch a result; vector cores take spans of a column of words in turn.

A word holds the exponents of two neighbouring scales, and repeats for the rows of a block. One SIMT thread makes a
word from global memory; neighbouring threads read the same scales.

Bytes: each scale once in, each word once out. Bound by launches.
"""

from typing import Any

from torch import Tensor

from ..jit import Builder, vector_cores
from ..tile.indices import SPAN, THREADS, kept
from ..tile.memory import spanned

_NOT_EXPONENT = 0x807FFFFF - (1 << 32)
"""Sign and mantissa of fp32, as int32."""


def _build(cores: int):
    from tilelang.ascend import language as T

    scales, size = T.dynamic("scales"), T.dynamic("size")

    def exponent(sf: Any, at: Any) -> Any:
        """The UE8M0 byte of a scale; 255, NaN, of one that is not a power of two."""
        pattern = kept(T, T.reinterpret(sf[at], T.int32))
        return T.if_then_else((pattern & T.int32(_NOT_EXPONENT)) == 0, pattern >> 23, T.int32(255))

    @T.prim_func
    def transpose_weight_sf(
        sf: T.Tensor((scales,), T.float32),
        out: T.Tensor((size,), T.int16),
        columns: T.int32,
        spans: T.int32,
        words: T.int32,
        rows: T.int32,
        block_bits: T.int32,
        inner: T.int32,
        group_stride: T.int64,
        outer_stride: T.int64,
        inner_stride: T.int64,
    ):
        with T.Kernel(cores) as core:
            tile = T.alloc_shared((SPAN,), T.int16)
            for column, part in T.Persistent([columns, spans], cores, core, group_size=1):
                width = T.min(SPAN, rows - part * SPAN)
                with T.SimtVF(threads=THREADS):
                    group = kept(T, T.truncdiv(column, words))
                    first = kept(T, T.truncmod(column, words) * 2)
                    for step in T.serial(SPAN // THREADS):
                        for thread in T.Parallel(THREADS):
                            if step * THREADS + thread < width:
                                block = kept(T, (part * SPAN + step * THREADS + thread) >> block_bits)
                                at = kept(T, group * group_stride + block * outer_stride + first * inner_stride)
                                high = T.if_then_else(
                                    first + 1 < inner, exponent(sf, kept(T, at + inner_stride)), T.int32(0)
                                )
                                tile[step * THREADS + thread] = T.Cast(T.int16, exponent(sf, at) | (high << 8))
                start = T.Cast(T.int64, column) * rows + part * SPAN
                T.copy(tile[0:width], out[start : start + width])

    return transpose_weight_sf


_TRANSPOSE = Builder("quant.batched_transpose_weight_sf", _build)


def _replicate(sf: Tensor, out: Tensor, block_size: int) -> None:
    """Words along the last dimension of ``sf``, ``([G,] outer, inner)``, each repeated for the rows of its block."""
    if out.numel() == 0:
        return
    groups = sf.shape[0] if sf.dim() == 3 else 1
    outer, inner = sf.shape[-2:]
    words, rows = -(-inner // 2), outer * block_size
    _TRANSPOSE(
        (vector_cores(sf.device),),
        spanned(sf),
        spanned(out),
        groups * words,
        -(-rows // SPAN),
        words,
        rows,
        block_size.bit_length() - 1,
        inner,
        outer * inner,
        *sf.stride()[-2:],
    )


class BatchedTransposeWeightSf:
    """``quant.batched_transpose_weight_sf``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        sf: list[Tensor],
        block_size: int,
        transpose_sf1s: list[bool],
        ue8m0_per_word: int,
    ) -> None:
        for scales, sf0, sf1 in zip(sf, outs[0::2], outs[1::2], strict=True):
            _replicate(scales, sf0, block_size)
            _replicate(scales.transpose(-1, -2), sf1, block_size)


KERNELS: dict[str, Any] = {"quant.batched_transpose_weight_sf": BatchedTransposeWeightSf()}
