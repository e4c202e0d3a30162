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
// Write store `at` of groups x words x rows, each row a scale along `outer` repeated 4 kQuads times. Scales of a word
// lie along `inner`. Returns whether there is such a store.
template <int kQuads, int kWidth>
__device__ __forceinline__ bool tk_replicate(const float* sf, void* out, int at, int groups, int outer, int inner,
                                             long long outer_stride, long long inner_stride) {
  const int quads = outer * kQuads, words = (inner + 3) / 4;
  const int line = at / quads, group = line / words, first = line % words * 4;
  if (group >= groups) return false;
  sf += (long long)group * outer * inner + at % quads / kQuads * outer_stride + first * inner_stride;
  const unsigned word = tk_pack(sf, inner_stride, inner - first);
  const unsigned rows[4] = {word, word, word, word};
  tk_store<16, kWidth>(static_cast<uint4*>(out) + at, rows, 16);
  return true;
}
template <int kQuads, int kWidth>
__device__ __forceinline__ void tk_transpose_weight(const float* sf, void* sf0, void* sf1, int at, int groups, int n,
                                                    int k) {
  if (tk_replicate<kQuads, kWidth>(sf, sf0, at, groups, n, k, k, 1)) return;
  at -= groups * n * kQuads * ((k + 3) / 4);
  tk_replicate<kQuads, kWidth>(sf, sf1, at, groups, k, n, 1, k);
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

    def blocks(size: Any) -> Any:
        """Thread blocks for a weight: a store for each thread."""
        groups, n, k = size
        return T.ceildiv(groups * (T.ceildiv(k, 4) * n + T.ceildiv(n, 4) * k) * (block_size // 4), _THREADS)

    def origin(tensor: Any, access_type: str) -> Any:
        return T.access_ptr(tensor[(0,) * len(tensor.shape)], access_type)

    @T.macro
    def body(tensors: Any) -> None:
        with T.Kernel(sum(blocks(size) for size in sizes), threads=_THREADS) as block:
            T.import_source(access.SOURCE + _SOURCE)
            thread = T.get_thread_binding()
            turn = T.alloc_local((1,), "int32")
            turn[0] = block
            for size, given in zip(sizes, tensors):
                if turn[0] >= 0 and turn[0] < blocks(size):
                    T.call_extern(
                        "handle",
                        f"tk_transpose_weight<{block_size // 4}, {store_width}>",
                        origin(given[0], "r"),
                        origin(given[1], "w"),
                        origin(given[2], "w"),
                        turn[0] * _THREADS + thread,
                        *size,
                    )
                turn[0] -= blocks(size)

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
