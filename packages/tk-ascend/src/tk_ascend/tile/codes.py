"""Element formats and scales as expressions of the Ascend dialect; ``T`` is ``tilelang.ascend.language``.

Each function returns a TIR expression and matches docs/numerics.md bit for bit: rounding to nearest even, saturation,
the sign of zero kept, a NaN scale for a block that holds NaN or Inf.
"""

from typing import Any

INFINITY_BITS = 0x7F800000


def bits(T: Any, value: Any) -> Any:
    """The fp32 pattern as int32."""
    return T.reinterpret(value, T.int32)


def real(T: Any, pattern: Any) -> Any:
    """An int32 as the fp32 with that pattern."""
    return T.reinterpret(pattern, T.float32)


def magnitude(T: Any, value: Any) -> Any:
    """The pattern of ``|value|``, whose order is that of magnitudes, with Inf and NaN on top."""
    return bits(T, value) & T.int32(0x7FFFFFFF)


def scale(T: Any, most: Any, clamp_min: Any, qmax: float, round_sf: bool, e4m3_sf: bool) -> tuple[Any, Any]:
    """Scale and factor of a block from the pattern of its amax; both NaN where that is not finite."""
    bad = most >= T.int32(INFINITY_BITS)
    a = T.max(real(T, most), clamp_min)
    sf = a / T.float32(qmax)
    nan = T.float32(float("nan"))
    if round_sf:
        exponent = (bits(T, sf) + T.int32(0x7FFFFF)) >> 23
        return (
            T.if_then_else(bad, nan, real(T, exponent << 23)),
            T.if_then_else(bad, nan, real(T, (T.int32(254) - exponent) << 23)),
        )
    top = T.float32(qmax)
    if e4m3_sf:
        sf = T.Cast(T.float32, to_e4m3(T, sf))
        a, top = sf, T.float32(1.0)
    # A zero clamp gives scale 0; the factor stays finite, so that zeros stay zeros.
    inverse = T.min(top / a, T.float32(3.4028234663852886e38))
    return T.if_then_else(bad, nan, sf), T.if_then_else(bad, nan, inverse)


def exponent(T: Any, sf: Any) -> Any:
    """The UE8M0 byte of a power of two; 255 for NaN."""
    return (bits(T, sf) >> 23) & T.int32(255)


def to_e4m3(T: Any, value: Any) -> Any:
    """Round to e4m3; saturates, and keeps NaN."""
    limited = T.min(T.max(value, T.float32(-448.0)), T.float32(448.0))
    return T.Cast("float8_e4m3fn", T.if_then_else(magnitude(T, value) > T.int32(INFINITY_BITS), value, limited))


def to_e2m1(T: Any, value: Any) -> Any:
    """The e2m1 code of a value as int32: ties to the even code; NaN gives 7."""
    a = T.abs(value)
    code = (
        T.Cast(T.int32, a > T.float32(0.25))
        + T.Cast(T.int32, a >= T.float32(0.75))
        + T.Cast(T.int32, a > T.float32(1.25))
        + T.Cast(T.int32, a >= T.float32(1.75))
        + T.Cast(T.int32, a > T.float32(2.5))
        + T.Cast(T.int32, a >= T.float32(3.5))
        + T.Cast(T.int32, a > T.float32(5.0))
    )
    signed = code | ((bits(T, value) >> 28) & T.int32(8))
    return T.if_then_else(magnitude(T, value) > T.int32(INFINITY_BITS), T.int32(7), signed)
