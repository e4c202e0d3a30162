"""Codes as int32 to their values as fp32, in expressions of the Ascend dialect; exact."""

from typing import Any

from .indices import kept


def ue8m0(T: Any, byte: Any) -> Any:
    """The value of a UE8M0 byte: 0 is 2**-127, 255 is NaN."""
    pattern = kept(T, T.if_then_else(byte == 0, T.int32(1 << 22), byte << 23))
    return T.if_then_else(byte == 255, T.float32(float("nan")), T.reinterpret(pattern, T.float32))


def e4m3(T: Any, byte: Any) -> Any:
    """The value of an e4m3 byte."""
    return T.Cast(T.float32, T.reinterpret(T.Cast(T.uint8, byte), "float8_e4m3fn"))


def e2m1(T: Any, code: Any) -> Any:
    """The value of an e2m1 code, 0 to 15."""
    magnitude = kept(T, code & 7)
    # From 1 on, exponent and mantissa move to their places; 0.5 is the only subnormal number.
    normal = (magnitude << 22) + T.int32(126 << 23)
    pattern = T.if_then_else(magnitude > 1, normal, magnitude * T.int32(126 << 23))
    return T.reinterpret(pattern | ((code & 8) << 28), T.float32)


def e5m6(T: Any, code: Any) -> Any:
    """The value of an e5m6 code, 0 to 4095: an fp16 without its last four bits."""
    magnitude = kept(T, code & 0x7FF)
    # Exponents 1 to 30 are rebased; 31, Inf and NaN, becomes the largest of fp32.
    base = T.if_then_else(magnitude >= 31 << 6, T.int32(224 << 23), T.int32(112 << 23))
    normal = T.reinterpret((magnitude << 17) + base, T.float32)
    value = kept(T, T.if_then_else(magnitude < 64, T.Cast(T.float32, magnitude) * T.float32(2.0**-20), normal))
    return T.if_then_else(code > 0x7FF, -value, value)
