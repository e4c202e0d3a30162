"""Stochastic rounding in expressions of the Ascend dialect: docs/numerics.md, "Stochastic rounding"."""

from collections.abc import Sequence
from typing import Any

from . import codes
from .indices import kept

_FACTORS = (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)
_LAYOUT = {"e4m3": (3, -6, 0x7E, 448.0), "e2m1": (1, 0, 7, 6.0)}
"""Mantissa bits, exponent of the smallest normal number, largest finite code, and its value, by format."""


def random_words(T: Any, quad: Any, values: Sequence[Any]) -> tuple[Any, Any]:
    """The two random words of four consecutive values, of which missing ones are +0.0; ``quad`` is their number."""
    h = T.Cast(T.uint32, quad)
    for value, factor in zip(values, _FACTORS, strict=True):
        h = kept(T, h + T.Cast(T.uint32, codes.bits(T, value)) * T.uint32(factor))
    h = kept(T, (h ^ (h >> 23)) * T.uint32(0x7FEB352D))
    h = kept(T, h ^ (h >> 16))
    words = (kept(T, h * T.uint32(factor)) for factor in (0x846CA68B, 0xD35A2D97))
    first, second = (kept(T, word ^ (word >> 11)) for word in words)
    return first, second


def rotated(T: Any, word: Any, i: Any) -> Any:
    """The 32 random bits of value ``i`` of four."""
    left = T.Cast(T.uint32, i) * T.uint32(8)
    return (word << left) | (word >> ((T.uint32(32) - left) & T.uint32(31)))


def encode(T: Any, value: Any, random: Any, fmt: str) -> Any:
    """The e4m3 or e2m1 code of a value as int32, saturated. NaN: 0x7F in e4m3, +6 in e2m1."""
    mantissa, smallest, largest, qmax = _LAYOUT[fmt]
    a = kept(T, T.min(codes.real(T, codes.magnitude(T, value)), T.float32(qmax)))
    exponent = kept(T, T.max((codes.bits(T, a) >> 23) - 127, smallest))
    # Units of the last place: exact, and below 2 to the number of mantissa bits plus 1.
    units = kept(T, a * codes.real(T, (T.int32(127 + mantissa) - exponent) << 23))
    lower = kept(T, T.Cast(T.int32, units))
    threshold = T.Cast(T.uint32, (units - T.Cast(T.float32, lower)) * T.float32(2.0**32))
    up = T.Cast(T.int32, random < threshold)
    code = T.min(((exponent - smallest) << mantissa) + lower + up, largest)
    sign_bit = 7 if fmt == "e4m3" else 3
    signed = code | ((codes.bits(T, value) >> (31 - sign_bit)) & T.int32(1 << sign_bit))
    nan = 0x7F if fmt == "e4m3" else 7
    return kept(T, T.if_then_else(codes.magnitude(T, value) > codes.INFINITY_BITS, T.int32(nan), signed))


def to_bf16(T: Any, value: Any, words: tuple[Any, Any], i: int) -> Any:
    """The pattern of value ``i`` of four in bf16, as int32; finite values stay finite."""
    random = T.Cast(T.int32, (words[i // 2] >> (16 * (i % 2))) & T.uint32(0xFFFF))
    bits, magnitude = kept(T, codes.bits(T, value)), kept(T, codes.magnitude(T, value))
    up = T.Cast(T.int32, random < (magnitude & 0xFFFF))
    finite = T.min((magnitude >> 16) + up, T.int32(0x7F7F))
    special = T.if_then_else(magnitude > codes.INFINITY_BITS, T.int32(0x7FC0), T.int32(0x7F80))
    rounded = T.if_then_else(magnitude < codes.INFINITY_BITS, finite, special)
    return kept(T, rounded | ((bits >> 16) & 0x8000))
