"""An independent witness of the casts: NumPy, ml_dtypes and exact rational numbers; it shares no code with tk_core."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

QMAX = {"e4m3": 448, "e2m1": 6, "e5m6": 65024}
Array = NDArray[np.float32]


def round_up_to_power_of_two(value: Fraction) -> int:
    """The smallest ``k`` with ``value <= 2**k``."""
    k = value.numerator.bit_length() - value.denominator.bit_length()
    while Fraction(2) ** k < value:
        k += 1
    while Fraction(2) ** (k - 1) >= value:
        k -= 1
    return k


def scale(amax: np.float32, fmt: str, clamp: float, mode: str) -> tuple[np.float32, np.float32]:
    """``(sf, inv)`` of one block, with Python's exact arithmetic or single IEEE operations of NumPy."""
    a = max(amax, np.float32(clamp))
    qmax = np.float32(QMAX[fmt])
    if mode == "round":
        k = round_up_to_power_of_two(Fraction(float(a)) / QMAX[fmt])
        return np.float32(2.0**k), np.float32(2.0**-k)
    sf = np.float32(a / qmax)
    if mode == "e4m3":
        sf = np.minimum(sf, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return sf, np.float32(np.float32(1) / sf)
    return sf, np.float32(qmax / a)


def encode(v: Array, fmt: str) -> NDArray[np.uint8]:
    """Codes, one in a byte, by ml_dtypes: to nearest even, saturated."""
    if fmt == "e4m3":
        return np.clip(v, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.clip(v, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def decode(codes: NDArray[np.uint8], fmt: str) -> Array:
    """Values of codes by ml_dtypes."""
    dtype = ml_dtypes.float8_e4m3fn if fmt == "e4m3" else ml_dtypes.float4_e2m1fn
    return codes.view(dtype).astype(np.float32)


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes in a byte, the even column in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One code in a byte."""
    return np.stack((data & 15, data >> 4), axis=-1).reshape(data.shape[0], -1)


def quantize(
    x: Array, fmt: str, block: tuple[int, int], mode: str = "plain", clamp: float = 1e-4, x_sf: Array | None = None
) -> tuple[NDArray[np.uint8], Array]:
    """Quantize block by block: codes, one in a byte, and fp32 scales. ``x_sf``: a scale for each element of ``x``."""
    rows, columns = x.shape
    codes = np.zeros((rows, columns), np.uint8)
    scales = np.zeros((-(-rows // block[0]), -(-columns // block[1])), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            values = x[part] if x_sf is None else x[part] * x_sf[part]
            sf, inv = scale(np.abs(values).max(), fmt, clamp, mode)
            factor = inv if x_sf is None else x_sf[part] * inv
            codes[part], scales[i, j] = encode(x[part] * factor, fmt), sf
    return codes, scales


def expand(scales: Array, block: tuple[int, int], rows: int, columns: int) -> Array:
    """A scale for each element."""
    return np.kron(scales, np.ones(block, np.float32))[:rows, :columns].astype(np.float32)


def pack_ue8m0(scales: Array, per_word: int, along_rows: bool = False) -> NDArray[np.uint8]:
    """The bytes of packed scales: ``(rows, words, per_word)``, or ``(words, columns, per_word)`` along the rows."""
    exponents = np.array([[int(np.log2(float(s))) + 127 for s in row] for row in scales], np.uint8)
    if along_rows:
        full = np.zeros((-(-len(exponents) // per_word) * per_word, exponents.shape[1]), np.uint8)
        full[: len(exponents)] = exponents
        return full.reshape(-1, per_word, exponents.shape[1]).transpose(0, 2, 1)
    full = np.zeros((len(exponents), -(-exponents.shape[1] // per_word) * per_word), np.uint8)
    full[:, : exponents.shape[1]] = exponents
    return full.reshape(len(exponents), -1, per_word)
