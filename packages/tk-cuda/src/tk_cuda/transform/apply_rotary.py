"""CUDA kernel of ``transform.apply_rotary``: in place, bound by bandwidth.

A thread rotates 8 pairs of channels, two vectors of 8 elements, or 4 pairs side by side, one vector, in several heads
of one token, with the cosines and sines of its pairs in registers. A block covers several heads of one token, or
several tokens where these have few heads. One launch serves query and key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder
from ..tile import access, vectors
from ..tile.function import prim_func

_THREADS = 128
_VECTORS_AT_ONCE = 2
"""Vectors of a thread whose loads are in flight together; more cost threads."""

_SOURCE = (
    vectors.SOURCE
    + r"""
// Up to eight cosines and sines of a position from column `pair`; zeros past the cache.
template <int kWidth>
TK_FN void tk_load_angles(float* c, float* z, const float* cache, long long stride, long long length,
                          long long position, int pair, int half, bool conjugate) {
  unsigned words[16];
  const float* row = cache + position * stride;
  const int count = position >= 0 && position < length ? half - pair : 0;
  tk_load8<TkF32, kWidth>(words, row + pair, count);
  tk_load8<TkF32, kWidth>(words + 8, row + half + pair, count);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    c[i] = tk_float(words[i]);
    z[i] = conjugate ? -tk_float(words[8 + i]) : tk_float(words[8 + i]);
  }
}
// Pairs of one head: eight in two vectors (a0 a1 ...; b0 b1 ...), or four side by side in one (a0 b0 a1 b1 ...).
template <class E, int kWidth, bool kInterleaved>
TK_FN void tk_load_pairs(unsigned* words, const void* p, int half, int pairs) {
  tk_load8<E, kWidth>(words, p, kInterleaved ? 2 * pairs : pairs);
  if constexpr (!kInterleaved) {
    tk_load8<E, kWidth>(words + 2 * E::kBytes, static_cast<const char*>(p) + half * E::kBytes, pairs);
  }
}
template <class E, int kWidth, bool kInterleaved>
TK_FN void tk_rotate_pairs(void* p, const unsigned* words, const float* c, const float* z, int half, int pairs) {
  float v[kInterleaved ? 8 : 16];
  tk_widen8<E>(v, words);
  if constexpr (!kInterleaved) tk_widen8<E>(v + 8, words + 2 * E::kBytes);
#pragma unroll
  for (int i = 0; i < (kInterleaved ? 4 : 8); ++i) {
    const int at = kInterleaved ? 2 * i : i, other = kInterleaved ? 2 * i + 1 : i + 8;
    const float a = v[at], b = v[other];
    v[at] = __fmaf_rn(a, c[i], -__fmul_rn(b, z[i]));
    v[other] = __fmaf_rn(a, z[i], __fmul_rn(b, c[i]));
  }
  tk_store8<E, kWidth>(p, v, kInterleaved ? 2 * pairs : pairs);
  if constexpr (!kInterleaved) tk_store8<E, kWidth>(static_cast<char*>(p) + half * E::kBytes, v + 8, pairs);
}
"""
)


class _Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        rank: dimensions of ``query``.
        channels: channels of a head.
        heads, key_heads: heads of query and key; 0 without a key.
        width, cache_width: widest accesses in bytes of the heads and of the cache.
        positions: dtype of the positions, or None.
    """

    dtype: Any
    rank: int
    channels: int
    heads: int
    key_heads: int
    width: int
    cache_width: int
    positions: Any
    interleaved: bool


def _split(channels: int, heads: int, interleaved: bool) -> tuple[int, int, int]:
    """Threads for the pairs of a head, for heads at once, and for tokens at once; the product is at most a block."""
    lanes = min(-(-channels // (8 if interleaved else 16)), _THREADS)
    head_lanes = 1
    while 2 * head_lanes * lanes <= _THREADS and head_lanes < heads:
        head_lanes *= 2
    return lanes, head_lanes, _THREADS // (lanes * head_lanes)


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = _Key(*key)
    element = vectors.element(k.dtype)
    pairs = 4 if k.interleaved else 8  # of a thread
    words = pairs // 4 * vectors.words(k.dtype)
    at_once = _VECTORS_AT_ONCE // (pairs // 4)  # heads
    half = k.channels // 2
    lanes, head_lanes, token_lanes = _split(k.channels, max(k.heads, k.key_heads), k.interleaved)
    chunks = -(-half // (pairs * lanes))
    interleaved = str(k.interleaved).lower()
    load_pairs = f"tk_load_pairs<{element}, {k.width}, {interleaved}>"
    rotate_pairs = f"tk_rotate_pairs<{element}, {k.width}, {interleaved}>"

    batch, tokens, length = T.dynamic("batch"), T.dynamic("tokens"), T.dynamic("length")
    cache_stride = T.dynamic("cache_stride", "int64")

    def heads_of(name: str, heads: int) -> Any:
        leading = (batch, tokens) if k.rank == 4 else (tokens,)
        strides = tuple(T.dynamic(f"{name}_stride_{i}", "int64") for i in range(len(leading) + 1))
        return T.StridedTensor((*leading, heads, k.channels), (*strides, 1), k.dtype)

    @T.macro
    def rotate(t: Any, leading: Any, heads: int, first: Any, pair: Any, c: Any, z: Any) -> None:
        """Rotate the heads ``first``, ``first + head_lanes``, ... of a token, a few at once."""
        held = T.alloc_local((at_once * words,), "uint32")
        rounds = -(-heads // (head_lanes * at_once))
        offset = pair * 2 if k.interleaved else pair
        for i in T.serial(rounds):
            for j in T.unroll(min(at_once, -(-heads // head_lanes))):
                head = first + (i * at_once + j) * head_lanes
                if head < heads:
                    T.call_extern(
                        "handle",
                        load_pairs,
                        T.access_ptr(held[j * words], "w", words),
                        T.access_ptr(t[leading + (head, offset)], "r"),
                        half,
                        half - pair,
                    )
            for j in T.unroll(min(at_once, -(-heads // head_lanes))):
                head = first + (i * at_once + j) * head_lanes
                if head < heads:
                    T.call_extern(
                        "handle",
                        rotate_pairs,
                        T.access_ptr(t[leading + (head, offset)], "rw"),
                        T.access_ptr(held[j * words], "r", words),
                        T.access_ptr(c[0], "r", 8),
                        T.access_ptr(z[0], "r", 8),
                        half,
                        half - pair,
                    )

    def apply_rotary(
        query: Any, cache: Any, other: Any, positions: Any, offset: Any, conjugate: Any, blocks: Any, items: Any
    ) -> None:
        with T.Kernel(blocks, threads=_THREADS) as block:
            T.import_source(_SOURCE)
            thread = T.get_thread_binding()
            c = T.alloc_local((8,), "float32")
            z = T.alloc_local((8,), "float32")
            item = T.alloc_var("int32")
            token = T.alloc_var("int32")
            at = T.alloc_var("int64")
            first = T.truncmod(T.truncdiv(thread, lanes), head_lanes)
            item = block * token_lanes + T.truncdiv(thread, lanes * head_lanes)
            if item < items and thread < lanes * head_lanes * token_lanes:
                token = T.truncmod(item, tokens) if k.rank == 4 else item
                leading = (T.truncdiv(item, tokens), token) if k.rank == 4 else (token,)
                at = T.cast(token, "int64")
                if k.positions is not None:
                    at = T.cast(positions[leading], "int64")
                for chunk in T.serial(chunks):
                    pair = (chunk * lanes + T.truncmod(thread, lanes)) * pairs
                    T.call_extern(
                        "handle",
                        f"tk_load_angles<{k.cache_width}>",
                        T.access_ptr(c[0], "w", 8),
                        T.access_ptr(z[0], "w", 8),
                        T.address_of(cache[0, 0]),
                        cache_stride,
                        length,
                        at + offset,
                        pair,
                        half,
                        conjugate,
                    )
                    rotate(query, leading, k.heads, first, pair, c, z)
                    if k.key_heads:
                        rotate(other, leading, k.key_heads, first, pair, c, z)

    query_type = heads_of("query", k.heads)
    positions_type = query_type
    if k.positions is not None:
        token_stride = T.dynamic("token_stride", "int64")
        positions_type = T.Tensor((tokens,), k.positions)
        if k.rank == 4:
            positions_type = T.StridedTensor((batch, tokens), (token_stride, 1), k.positions)
    return prim_func(
        apply_rotary,
        query_type,
        T.StridedTensor((length, k.channels), (cache_stride, 1), "float32"),
        heads_of("key", k.key_heads) if k.key_heads else query_type,
        positions_type,
        T.int64,
        T.int32,
        T.int32,
        T.int32,
    )


_ROTARY = Builder("transform.apply_rotary", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


def _width(t: Tensor, columns: int) -> int:
    bits = access.access_width(t) | columns * t.element_size()
    return bits & -bits


class ApplyRotary:
    """Rotary position embedding in place."""

    revision = 1

    def refusal(self, query: Tensor, *args: Any) -> str | None:
        if query.dtype == torch.float64:
            return "needs bfloat16 or float32 heads, got float64"
        return None

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
        if key is not None and query.numel() == 0:
            query, key = key, None
        elif key is not None and key.numel() == 0:
            key = None
        heads, channels = query.shape[-2:]
        key_heads = 0 if key is None else key.shape[-2]
        width = min(_width(t, channels // 2) for t in (query, key) if t is not None)
        facts = _Key(
            query.dtype,
            query.dim(),
            channels,
            heads,
            key_heads,
            width,
            _width(cos_sin_cache, channels // 2),
            None if positions is None else positions.dtype,
            interleaved,
        )
        launch = _ROTARY.get(facts, query.device)
        if launch is None:
            reason = self.refusal(query)
            if reason:
                raise Refused(reason)
            launch = _ROTARY.compile(facts, query.device)
        items = query.shape[0] * query.shape[1] if query.dim() == 4 else query.shape[0]
        _, _, token_lanes = _split(channels, max(heads, key_heads), interleaved)
        launch(
            query,
            cos_sin_cache,
            query if key is None else key,
            query if positions is None else positions,
            seqlen_offset,
            int(conjugate),
            -(-items // token_lanes),
            items,
        )


KERNELS = {"transform.apply_rotary": ApplyRotary()}

CI_KEYS = [
    (_ROTARY, ("bfloat16", 3, 64, 128, 0, 16, 16, "int32", False)),
    (_ROTARY, ("bfloat16", 4, 64, 32, 8, 16, 16, None, True)),
    (_ROTARY, ("float32", 4, 6, 3, 1, 4, 4, "int64", False)),
]
