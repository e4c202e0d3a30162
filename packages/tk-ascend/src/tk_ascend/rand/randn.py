"""randn and rand: Philox4x32-10; one SIMT thread a block of the generator, four numbers.

Numbers are made in UB and copied out a part at a time. A second kernel advances the offset once all have read it.

Bytes: the result once out. Bound by arithmetic: ten rounds of two 32-bit products, and Box-Muller.
"""

import struct
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..jit import Builder, vector_cores

THREADS = 256
PART = 4096
"""Numbers in UB at a time."""
LAUNCH = 2**30
"""Numbers of one launch, so that they are counted in 32 bits."""

_LOG = ["BDEBD1B8", "3DEF251A", "BDFE5D4F", "3E11E9BF", "BE2AAE50", "3E4CCEAC", "BE7FFFFC", "3EAAAAAA"]


def _constant(word: str) -> float:
    """An fp32 number from its pattern."""
    return float(struct.unpack(">f", bytes.fromhex(word))[0])


def _build(dtype: str, normal: bool, cores: int):
    from tilelang.ascend import language as T

    count = T.dynamic("count")
    cut = 24 if dtype == "bfloat16" else 8

    def real(word: str) -> Any:
        return T.float32(_constant(word))

    @T.prim_func
    def draw(state: T.Tensor((2,), T.int64), out: T.Tensor((count,), dtype), start: T.int64):
        with T.Kernel(cores) as core:
            part = T.alloc_shared((PART,), dtype)
            for block in T.Persistent([T.ceildiv(count, PART)], cores, core, group_size=1):
                size = T.min(PART, count - block * PART)
                with T.SimtVF(threads=THREADS):
                    for quad in T.Parallel(PART // 4):
                        counter = T.alloc_var(T.uint64)
                        product = T.alloc_var(T.uint64)
                        words = T.alloc_local((4,), T.uint32)
                        k0 = T.alloc_var(T.uint32)
                        k1 = T.alloc_var(T.uint32)
                        high = T.alloc_var(T.uint32)
                        k0 = T.Cast(T.uint32, state[0])
                        k1 = T.Cast(T.uint32, state[0] >> T.int64(32))
                        counter = T.Cast(T.uint64, state[1] + start + T.Cast(T.int64, block * (PART // 4) + quad))
                        words[0] = T.Cast(T.uint32, counter)
                        words[1] = T.Cast(T.uint32, counter >> T.uint64(32))
                        words[2] = T.uint32(0 if normal else 1)
                        words[3] = T.uint32(0)
                        for _ in T.serial(10):
                            product = T.Cast(T.uint64, words[2]) * T.uint64(0xCD9E8D57)
                            high = T.Cast(T.uint32, product >> T.uint64(32)) ^ words[1] ^ k0
                            words[1] = T.Cast(T.uint32, product)
                            product = T.Cast(T.uint64, words[0]) * T.uint64(0xD2511F53)
                            words[0] = high
                            words[2] = T.Cast(T.uint32, product >> T.uint64(32)) ^ words[3] ^ k1
                            words[3] = T.Cast(T.uint32, product)
                            k0 = k0 + T.uint32(0x9E3779B9)
                            k1 = k1 + T.uint32(0xBB67AE85)
                        if normal:
                            for pair in T.serial(2):
                                bits = T.alloc_var(T.int32)
                                exponent = T.alloc_var(T.int32)
                                f = T.alloc_var(T.float32)
                                z = T.alloc_var(T.float32)
                                p = T.alloc_var(T.float32)
                                k = T.alloc_var(T.float32)
                                # The radius: the square root of -2 ln(((word >> 8) + 1) / 2^24).
                                uniform = T.Cast(T.int32, words[2 * pair] >> T.uint32(8)) + 1
                                bits = T.reinterpret(T.Cast(T.float32, uniform), T.int32)
                                exponent = (bits - T.int32(0x3F3504F3)) >> 23
                                f = T.reinterpret(bits - (exponent << 23), T.float32) - T.float32(1.0)
                                z = f * f
                                p = real("3D9021BB")
                                for word in _LOG:
                                    p = p * f + real(word)
                                k = T.Cast(T.float32, exponent - 24)
                                p = (p * f) * z
                                p = p + k * real("B95E8083")
                                p = p - z * T.float32(0.5)
                                p = (f + p) + k * real("3F318000")
                                radius = T.alloc_var(T.float32)
                                radius = T.if_then_else(p == T.float32(0.0), 0.0, T.sqrt(p * T.float32(-2.0)))
                                # The angle 2 pi (word >> 8) / 2^24, less quarters of a turn.
                                t = T.alloc_var(T.int32)
                                quarter = T.alloc_var(T.int32)
                                x = T.alloc_var(T.float32)
                                q = T.alloc_var(T.float32)
                                sine = T.alloc_var(T.float32)
                                cosine = T.alloc_var(T.float32)
                                t = T.Cast(T.int32, words[2 * pair + 1] >> T.uint32(8))
                                quarter = (t + T.int32(1 << 21)) >> 22
                                x = T.Cast(T.float32, t - (quarter << 22)) * real("34C90FDB")
                                q = x * x
                                sine = q * real("B94CA1F9") + real("3C08839E")
                                sine = sine * q + real("BE2AAAA3")
                                sine = (sine * q) * x + x
                                cosine = q * real("37CCF5CE") + real("BAB6061A")
                                cosine = cosine * q + real("3D2AAAA5")
                                cosine = (cosine * q) * q
                                cosine = (cosine - q * T.float32(0.5)) + T.float32(1.0)
                                swap = (quarter & 1) == 1
                                first = T.if_then_else(swap, sine, cosine)
                                second = T.if_then_else(swap, cosine, sine)
                                first = T.if_then_else(((quarter + 1) & 2) != 0, -first, first)
                                second = T.if_then_else((quarter & 2) != 0, -second, second)
                                part[4 * quad + 2 * pair] = T.Cast(dtype, radius * first)
                                part[4 * quad + 2 * pair + 1] = T.Cast(dtype, radius * second)
                        else:
                            for i in T.serial(4):
                                leading = T.Cast(T.float32, T.Cast(T.int32, words[i] >> T.uint32(cut)))
                                part[4 * quad + i] = T.Cast(dtype, leading * T.float32(2.0 ** (cut - 32)))
                T.copy(part[0:size], out[block * PART : block * PART + size])

    return draw


def _build_advance():
    from tilelang.ascend import language as T

    @T.prim_func
    def advance(state: T.Tensor((2,), T.int64), blocks: T.int64):
        with T.Kernel(1) as _, T.SimtVF(threads=32):
            for lane in T.Parallel(32):
                if lane == 0:
                    state[1] = state[1] + blocks

    return advance


_DRAW = Builder("rand.randn", _build)
_ADVANCE = Builder("rand.advance", _build_advance)


class Draw:
    """Normal or uniform numbers."""

    revision = 1

    def __init__(self, normal: bool) -> None:
        self.normal = normal

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], state: Tensor, size: Sequence[int], fmt: str) -> None:
        out = outs[0].view(-1)
        key = (out.dtype, self.normal, vector_cores(out.device))
        for first in range(0, out.numel(), LAUNCH):
            _DRAW(key, state, out[first : first + LAUNCH], first // 4)
        _ADVANCE((), state, -(-out.numel() // 4))


KERNELS: dict[str, Any] = {"rand.randn": Draw(normal=True)}
