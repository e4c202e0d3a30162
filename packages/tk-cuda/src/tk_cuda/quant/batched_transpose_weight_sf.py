"""CUDA kernel of ``quant.batched_transpose_weight_sf``: up to eight weights in one launch, bound by its latency.

The tensors are kernel parameters, not a table in memory, so a launch copies nothing and can be captured in a graph.
Each thread packs one word and writes it to four consecutive rows, all in one block of the weight, in one store.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder
from ..tile import access
from ..tile.function import prim_func

_THREADS = 256
_PER_LAUNCH = 8

_SOURCE = r"""
// The biased exponent of a power of two, 0 or Inf; 255, NaN, for any other scale.
__device__ __forceinline__ unsigned tk_exponent(float sf) {
  const unsigned bits = __float_as_uint(sf);
  return bits & 0x807fffffu ? 255u : bits >> 23;
}
// A word of scales at `sf` and every `stride`; `count` of them exist.
__device__ __forceinline__ unsigned tk_pack(const float* sf, long long stride, int count) {
  unsigned word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) word |= tk_exponent(sf[i * stride]) << (8 * i);
  }
  return word;
}
"""


class _Weight(NamedTuple):
    """What of a weight is compiled in: whether it has groups, and whether ``sf1`` is seen row-major."""

    grouped: bool
    transposed: bool


def _types(weight: _Weight, block_size: int, i: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Sizes ``(groups, n, k)`` of a weight's scales, and the types of its three tensors."""
    import tilelang.language as T

    groups, n, k = T.dynamic(f"groups_{i}"), T.dynamic(f"n_{i}"), T.dynamic(f"k_{i}")
    rows, columns = n * block_size, k * block_size
    words0, words1 = T.ceildiv(k, 4), T.ceildiv(n, 4)

    def grouped(*values: Any) -> tuple[Any, ...]:
        return values if weight.grouped else values[1:]

    sf0 = T.StridedTensor(grouped(groups, rows, words0), grouped(words0 * rows, 1, rows), "int32")
    if weight.transposed:
        sf1 = T.Tensor(grouped(groups, words1, columns), "int32")
    else:
        sf1 = T.StridedTensor(grouped(groups, columns, words1), grouped(words1 * columns, 1, columns), "int32")
    return (groups if weight.grouped else 1, n, k), (T.Tensor(grouped(groups, n, k), "float32"), sf0, sf1)


def _build(block_size: int, weights: tuple[_Weight, ...], store_width: int) -> Any:
    import tilelang.language as T

    weights = tuple(_Weight(*weight) for weight in weights)
    sizes, types = zip(*(_types(weight, block_size, i) for i, weight in enumerate(weights)))
    quads = block_size // 4  # stores that fill the rows of a block

    def units(size: Any) -> tuple[Any, Any]:
        """Words to pack for the two results of a weight, times the stores of each."""
        groups, n, k = size
        return groups * T.ceildiv(k, 4) * n * quads, groups * T.ceildiv(n, 4) * k * quads

    def blocks(size: Any) -> Any:
        return T.ceildiv(sum(units(size)), _THREADS)

    @T.macro
    def pack(sf: Any, out: Any, sf_index: Any, out_index: Any, stride: Any, count: Any) -> None:
        """Write the word of scales from ``sf_index`` on to four rows of the result."""
        words = T.alloc_local((4,), "uint32")
        word = T.call_extern("uint32", "tk_pack", T.access_ptr(sf[sf_index], "r"), stride, count)
        for i in T.unroll(4):
            words[i] = word
        T.call_extern(
            "handle",
            f"tk_store<16, {store_width}>",
            T.access_ptr(out[out_index], "w"),
            T.access_ptr(words[0], "r", 4),
            16,
        )

    def place(weight: _Weight, size: Any, unit: Any, second: bool) -> tuple[Any, ...]:
        """Of a unit of the first or second result: where its scales start, where its rows start, stride, count."""
        inner, outer = (size[1], size[2]) if second else (size[2], size[1])
        row = unit % (outer * quads) * 4
        word = unit // (outer * quads) % T.ceildiv(inner, 4)
        group = (unit // (outer * quads) // T.ceildiv(inner, 4),) if weight.grouped else ()
        sf_index = (word * 4, row // block_size) if second else (row // block_size, word * 4)
        out_index = (word, row) if second and weight.transposed else (row, word)
        stride = T.Cast("int64", size[2]) if second else T.int64(1)
        return (*group, *sf_index), (*group, *out_index), stride, inner - word * 4

    @T.macro
    def transpose_weight(weight: Any, size: Any, sf: Any, sf0: Any, sf1: Any, unit: Any) -> None:
        if unit < units(size)[0]:
            pack(sf, sf0, *place(weight, size, unit, False))
        elif unit < sum(units(size)):
            pack(sf, sf1, *place(weight, size, unit - units(size)[0], True))

    @T.macro
    def body(tensors: Any) -> None:
        ends = [sum(blocks(size) for size in sizes[: i + 1]) for i in range(len(sizes))]
        with T.Kernel(ends[-1], threads=_THREADS) as block:
            T.import_source(access.SOURCE + _SOURCE)
            thread = T.get_thread_binding()
            for i, (weight, size, given) in enumerate(zip(weights, sizes, tensors)):
                start = ends[i - 1] if i else 0
                if block >= start and block < ends[i]:
                    transpose_weight(weight, size, *given, (block - start) * _THREADS + thread)

    def batched_transpose_weight_sf(
        a: Any, a0: Any, a1: Any, b: Any, b0: Any, b1: Any, c: Any, c0: Any, c1: Any, d: Any, d0: Any, d1: Any,
        e: Any, e0: Any, e1: Any, f: Any, f0: Any, f1: Any, g: Any, g0: Any, g1: Any, h: Any, h0: Any, h1: Any,
    ) -> None:  # fmt: skip
        body(
            [
                (a, a0, a1),
                (b, b0, b1),
                (c, c0, c1),
                (d, d0, d1),
                (e, e0, e1),
                (f, f0, f1),
                (g, g0, g1),
                (h, h0, h1),
            ]
        )

    # Weights that a launch has no use for are integers.
    unused = [T.int32] * (3 * (_PER_LAUNCH - len(weights)))
    return prim_func(batched_transpose_weight_sf, *(t for triple in types for t in triple), *unused)


# Every access is predicated where it is made.
_TRANSPOSE = Builder(
    "quant.batched_transpose_weight_sf", _build, pass_configs={"tl.disable_safe_memory_legalize": True}
)


class BatchedTransposeWeightSf:
    """Packed scales for weights and their transposes."""

    revision = 1

    def refusal(self, sf: list[Tensor], block_size: int, transpose_sf1s: list[bool], ue8m0_per_word: int) -> str | None:
        if ue8m0_per_word != 4:
            return f"packs 4 scales in a word, the layout asks for {ue8m0_per_word}"
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        sf: list[Tensor],
        block_size: int,
        transpose_sf1s: list[bool],
        ue8m0_per_word: int,
    ) -> None:
        reason = self.refusal(sf, block_size, transpose_sf1s, ue8m0_per_word)
        if reason is not None:
            raise Refused(reason)
        weights = [
            (_Weight(scales.dim() == 3, bool(flag)), (scales, *outs[2 * i : 2 * i + 2]))
            for i, (scales, flag) in enumerate(zip(sf, transpose_sf1s))
            if scales.numel()
        ]
        for i in range(0, len(weights), _PER_LAUNCH):
            self._launch(weights[i : i + _PER_LAUNCH], block_size)

    def _launch(self, weights: list[tuple[_Weight, tuple[Tensor, ...]]], block_size: int) -> None:
        tensors = [t for _, triple in weights for t in triple]
        aligned = not any(out.data_ptr() % 16 for _, (_, *pair) in weights for out in pair)
        key = (block_size, tuple(weight for weight, _ in weights), 16 if aligned else 4)
        device = tensors[0].device
        launch = _TRANSPOSE.get(key, device) or _TRANSPOSE.compile(key, device)
        launch(*tensors, *(0,) * (3 * (_PER_LAUNCH - len(weights))))


KERNELS = {"quant.batched_transpose_weight_sf": BatchedTransposeWeightSf()}

CI_KEYS = [(_TRANSPOSE, (128, (_Weight(False, False), _Weight(True, True), _Weight(True, False)), 16))]
