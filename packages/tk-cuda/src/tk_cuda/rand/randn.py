"""CUDA kernels of ``rand.randn`` and ``rand.rand``: Philox4x32-10, bound by arithmetic.

A thread makes the numbers of two blocks of the generator, 8 elements, at a time. Every fp32 operation of Box-Muller is
rounded by itself, so the bits are those of any other device. The offset in the state advances after all blocks have
read it: by a second kernel of the same launch, or by the block itself where one is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..jit import Builder, num_sms
from ..tile import access, vectors
from ..tile.function import prim_func

_THREADS = 128
_PER_THREAD = 8
_BLOCKS_PER_SM = 16
_RESIDENT_BLOCKS = 12
"""Blocks that a multiprocessor shall hold at once: more registers for each thread would leave it too few warps."""

_SOURCE = (
    vectors.SOURCE
    + r"""
struct TkWords { unsigned w[4]; };
TK_FN TkWords tk_philox(unsigned k0, unsigned k1, unsigned long long counter, unsigned stream) {
  unsigned c0 = (unsigned)counter, c1 = (unsigned)(counter >> 32), c2 = stream, c3 = 0u;
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    const unsigned hi0 = __umulhi(0xD2511F53u, c0), lo0 = 0xD2511F53u * c0;
    const unsigned hi1 = __umulhi(0xCD9E8D57u, c2), lo1 = 0xCD9E8D57u * c2;
    c0 = hi1 ^ c1 ^ k0;
    c1 = lo1;
    c2 = hi0 ^ c3 ^ k1;
    c3 = lo0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
TK_FN float tk_step(float p, float x, unsigned constant) { return __fadd_rn(__fmul_rn(p, x), tk_float(constant)); }
// The square root of a normal number below 2^60, correctly rounded: one step from the approximation is enough.
TK_FN float tk_sqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  const float root = __fmul_rn(x, y);
  return __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(0.5f, y), root);
}
// sqrt(-2 ln(u)) of u = ((word >> 8) + 1) / 2^24. A fused multiply-add stands where the product is exact.
TK_FN float tk_radius(unsigned word) {
  const unsigned bits = tk_bits((float)((word >> 8) + 1u));
  const unsigned exponent = (bits - 0x3F3504F3u - (24u << 23)) & 0xFF800000u;  // of u, times 2^23
  const float f = __fsub_rn(tk_float(bits - exponent - (24u << 23)), 1.0f), z = __fmul_rn(f, f);
  float p = tk_float(0x3D9021BBu);
  p = tk_step(p, f, 0xBDEBD1B8u);
  p = tk_step(p, f, 0x3DEF251Au);
  p = tk_step(p, f, 0xBDFE5D4Fu);
  p = tk_step(p, f, 0x3E11E9BFu);
  p = tk_step(p, f, 0xBE2AAE50u);
  p = tk_step(p, f, 0x3E4CCEACu);
  p = tk_step(p, f, 0xBE7FFFFCu);
  p = tk_step(p, f, 0x3EAAAAAAu);
  const float k = (float)(int)exponent;
  float y = __fmul_rn(__fmul_rn(p, f), z);
  y = __fadd_rn(y, __fmul_rn(k, tk_float(0xB95E8083u - (23u << 23))));
  y = __fmaf_rn(-0.5f, z, y);
  const float ln = __fmaf_rn(k, tk_float(0x3F318000u - (23u << 23)), __fadd_rn(f, y));
  return ln == 0.0f ? 0.0f : tk_sqrt(__fmul_rn(-2.0f, ln));
}
// Radius times cosine and sine of the angle 2 pi (word >> 8) / 2^24: the upper two bits of `turned` are the quarter,
// the 22 below bit 30 of the word the signed distance from its middle.
TK_FN void tk_box_muller(float* out, unsigned radius_word, unsigned angle_word) {
  const unsigned turned = angle_word + (1u << 29);
  const float x = __fmul_rn((float)(int)(angle_word << 2 & 0xFFFFFC00u), tk_float(0x34C90FDBu - (10u << 23)));
  const float q = __fmul_rn(x, x);
  float s = __fadd_rn(__fmul_rn(tk_float(0xB94CA1F9u), q), tk_float(0x3C08839Eu));
  s = tk_step(s, q, 0xBE2AAAA3u);
  s = __fadd_rn(__fmul_rn(__fmul_rn(s, q), x), x);
  float c = __fadd_rn(__fmul_rn(tk_float(0x37CCF5CEu), q), tk_float(0xBAB6061Au));
  c = tk_step(c, q, 0x3D2AAAA5u);
  c = __fmul_rn(__fmul_rn(c, q), q);
  c = __fadd_rn(__fmaf_rn(-0.5f, q, c), 1.0f);
  const float r = tk_radius(radius_word);
  const bool odd = turned & 0x40000000u;
  const unsigned first = tk_bits(odd ? s : c), second = tk_bits(odd ? c : s);
  out[0] = __fmul_rn(r, tk_float(first ^ ((turned + 0x40000000u) & 0x80000000u)));
  out[1] = __fmul_rn(r, tk_float(second ^ (turned & 0x80000000u)));
}
// Elements `first` to first + 7, of which those before `count` exist.
template <class E, int kWidth, bool kNormal>
TK_FN void tk_draw8(void* out, long long first, long long count, unsigned long long seed, unsigned long long offset) {
  const unsigned long long block = offset + (unsigned long long)first / 4;
  float v[8];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const TkWords words = tk_philox((unsigned)seed, (unsigned)(seed >> 32), block + i, kNormal ? 0u : 1u);
    if constexpr (kNormal) {
      tk_box_muller(v + 4 * i, words.w[0], words.w[1]);
      tk_box_muller(v + 4 * i + 2, words.w[2], words.w[3]);
    } else {
      constexpr int kCut = E::kBytes == 2 ? 24 : 8;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[4 * i + j] = __fmul_rn((float)(words.w[j] >> kCut), kCut == 24 ? 0x1p-8f : 0x1p-24f);
      }
    }
  }
  const long long left = count - first;
  tk_store8<E, kWidth>(static_cast<char*>(out) + first * E::kBytes, v, left < 8 ? (int)left : 8);
}
"""
)


class _Key(NamedTuple):
    """What is compiled into a kernel: one block, which advances the state itself, or several (``alone``)."""

    dtype: Any
    normal: bool
    width: int
    alone: bool


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = _Key(*key)
    draw8 = f"tk_draw8<{vectors.element(k.dtype)}, {k.width}, {str(k.normal).lower()}>"
    count = T.dynamic("count", "int64")

    @T.macro
    def fill(state: Any, out: Any, block: Any, blocks: Any, passes: Any) -> None:
        T.import_source(_SOURCE)
        first = T.alloc_var("int64")
        seed = T.alloc_var("int64", init=state[0])
        offset = T.alloc_var("int64", init=state[1])
        for i in T.serial(passes):
            first = (T.cast(i, "int64") * blocks + block) * (_THREADS * _PER_THREAD)
            first = first + T.get_thread_binding() * _PER_THREAD
            if first < count:
                T.call_extern(
                    "handle",
                    draw8,
                    T.address_of(out[0]),
                    first,
                    count,
                    seed,
                    offset,
                )

    def draw(state: Any, out: Any, blocks: Any, passes: Any) -> None:
        with T.Kernel(blocks, threads=_THREADS) as block:
            T.annotate_min_blocks_per_sm(_RESIDENT_BLOCKS)
            fill(state, out, block, blocks, passes)
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                state[1] = state[1] + T.truncdiv(count + 3, T.int64(4))

    def draw_alone(state: Any, out: Any) -> None:
        with T.Kernel(1, threads=_THREADS) as block:
            fill(state, out, block, 1, 1)
            T.sync_threads()
            if T.get_thread_binding() == 0:
                state[1] = state[1] + T.truncdiv(count + 3, T.int64(4))

    types = T.Tensor((2,), "int64"), T.Tensor((count,), k.dtype)
    if k.alone:
        return prim_func(draw_alone, *types)
    return prim_func(draw, *types, T.int32, T.int32)


_DRAW = Builder("rand.randn", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


class Draw:
    """Normal or uniform numbers."""

    revision = 1

    def __init__(self, normal: bool) -> None:
        self.normal = normal

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], state: Tensor, size: Sequence[int], fmt: str) -> None:
        out = outs[0].view(-1)
        tiles = -(-out.numel() // (_THREADS * _PER_THREAD))
        key = (out.dtype, self.normal, access.access_width(out), tiles == 1)
        launch = _DRAW.get(key, out.device)
        if launch is None:
            launch = _DRAW.compile(key, out.device)
        if tiles == 1:
            launch(state, out)
            return
        blocks = min(tiles, _BLOCKS_PER_SM * num_sms(out.device))
        launch(state, out, blocks, math.ceil(tiles / blocks))


KERNELS = {"rand.randn": Draw(normal=True)}

CI_KEYS = [
    (_DRAW, ("float32", True, 16, False)),
    (_DRAW, ("bfloat16", True, 2, True)),
    (_DRAW, ("bfloat16", False, 16, False)),
]
