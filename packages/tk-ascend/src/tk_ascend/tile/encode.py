"""fp32 values to scales and codes that :mod:`.codes` does not have, in expressions of the Ascend dialect."""

from collections.abc import Sequence
from typing import Any

from . import codes
from .indices import kept

PLAIN, ROUNDED, E4M3 = 0, 1, 2
"""How scales are rounded: not at all, up to a power of two, or to e4m3."""


def scale(T: Any, most: Any, clamp_min: Any, qmax: Any, rounding: Any) -> tuple[Any, Any]:
    """Scale and factor of a group from the pattern of its amax, by a rounding known at run time."""
    a = kept(T, T.max(codes.real(T, most), clamp_min))
    plain = kept(T, a / qmax)
    exponent = kept(T, (codes.bits(T, plain) + T.int32(0x7FFFFF)) >> 23)
    narrow = kept(T, T.Cast(T.float32, codes.to_e4m3(T, plain)))
    divisor = kept(T, T.if_then_else(rounding == E4M3, narrow, a))
    quotient = T.if_then_else(rounding == E4M3, T.float32(1.0), qmax) / divisor
    # A zero clamp gives scale 0; the factor stays finite, so that zeros stay zeros.
    inverse = kept(T, T.min(quotient, T.float32(3.4028234663852886e38)))
    power = kept(T, codes.real(T, exponent << 23))
    unrounded = kept(T, T.if_then_else(rounding == E4M3, narrow, plain))
    sf = kept(T, T.if_then_else(rounding == ROUNDED, power, unrounded))
    factor = kept(T, T.if_then_else(rounding == ROUNDED, codes.real(T, (254 - exponent) << 23), inverse))
    bad = most >= T.int32(codes.INFINITY_BITS)
    nan = T.float32(float("nan"))
    return kept(T, T.if_then_else(bad, nan, sf)), kept(T, T.if_then_else(bad, nan, factor))


def e4m3(T: Any, value: Any) -> Any:
    """The e4m3 byte of a value, as uint8: to nearest even, saturated."""
    return T.reinterpret(codes.to_e4m3(T, value), T.uint8)


def e5m6(T: Any, value: Any) -> Any:
    """The e5m6 code of a finite value, as int32: the top 12 bits of an fp16, rounded by the low mantissa bits."""
    pattern = kept(T, codes.bits(T, value))
    magnitude = kept(T, codes.magnitude(T, value))
    subnormal = T.Cast(T.int32, T.min(codes.real(T, magnitude), T.float32(2.0**-14)) * T.float32(2.0**20))
    truncated = kept(
        T, T.if_then_else(magnitude >= T.int32(113 << 23), (magnitude >> 17) - T.int32(112 << 6), subnormal)
    )
    up = T.Cast(T.int32, (pattern & 0x1FFFF) + (truncated & 1) > T.int32(0x10000))
    return kept(T, T.min(truncated + up, T.int32(0x7FF)) | ((pattern >> 20) & T.int32(0x800)))


def packed(fmt: str, found: Sequence[Any]) -> list[Any]:
    """Codes as the bytes that hold them, all int32: one e4m3, pairs of e2m1, or eights of e5m6 codes."""
    pairs = list(zip(found[0::2], found[1::2]))
    if fmt == "e4m3":
        return list(found)
    if fmt == "e2m1":
        return [low | (high << 4) for low, high in pairs]
    # A big-endian stream of 12-bit codes in little-endian words.
    stream = [byte for a, b in pairs for byte in (a >> 4, ((a & 15) << 4) | (b >> 8), b & 255)]
    return [stream[j ^ 3] for j in range(len(stream))]
