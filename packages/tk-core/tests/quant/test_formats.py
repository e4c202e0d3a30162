"""The element formats of the reference, against ml_dtypes, exact rationals and the bytes of their definitions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from cast_witness import decode, encode, pack_nibbles, unpack_nibbles
from torch import Tensor

import tk_core
from tk_core.reference import codes


def _values() -> Tensor:
    """Random bit patterns, every magnitude near the formats, and both neighbours of every tie."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator).to(torch.int32).view(torch.float32)
    near = torch.randn(1 << 16, generator=generator) * torch.exp2(
        torch.randint(-14, 10, (1 << 16,), generator=generator).float()
    )
    grid = torch.cat(
        [torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float(), torch.arange(0, 13) / 2]
    )
    grid = grid.unique()
    ties = (grid[1:] + grid[:-1]) / 2
    edges = torch.cat([grid, ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
    values = torch.cat([patterns, near, edges, -edges])
    values = values[values.isfinite()]
    return values[: len(values) // 8 * 8].view(1, -1)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_rounds_to_nearest_even_and_saturates(fmt: str) -> None:
    v = _values()
    got = codes.encode(v, fmt).view(torch.uint8).numpy()
    expected = encode(v.numpy(), fmt)
    np.testing.assert_array_equal(got, pack_nibbles(expected) if fmt == "e2m1" else expected)


def test_e2m1_bytes_of_every_value() -> None:
    row = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    data = codes.encode(torch.tensor([row]), "e2m1")
    assert data.view(torch.uint8)[0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert codes.decode(data)[0].tolist() == row
    assert codes.decode(data)[0, 8].signbit()


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (0.25, 0.0),
        (float(np.nextafter(np.float32(0.25), np.float32(1))), 0.5),
        (float(np.nextafter(np.float32(0.75), np.float32(0))), 0.5),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (float(np.nextafter(np.float32(5), np.float32(9))), 6.0),
        (1e30, 6.0),
    ],
)
def test_e2m1_ties(value: float, result: float) -> None:
    assert codes.decode(codes.encode(torch.tensor([[value, -value]]), "e2m1"))[0].tolist() == [result, -result]


def test_e4m3_specials() -> None:
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([[inf, -inf, nan, -nan, 449.0, -0.0, -(2.0**-11), 2.0**-10, 3 * 2.0**-10]])
    expected = [0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0x80, 0x80, 0x00, 0x02]
    assert codes.encode(values, "e4m3").view(torch.uint8)[0].tolist() == expected


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_decodes_every_byte(fmt: str) -> None:
    data = torch.arange(256, dtype=torch.uint8)[None]
    if fmt == "e4m3":
        got = codes.decode(data.view(torch.float8_e4m3fn)).numpy()
        np.testing.assert_array_equal(got, decode(data.numpy(), fmt))
    else:
        got = codes.decode(data.view(torch.int8)).numpy()
        expected = decode(unpack_nibbles(data.numpy()), fmt)
        np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


# ---------------------------------------------------------------------- e5m6


def test_e5m6_bytes_of_the_definition() -> None:
    row = [1.0, -2.0, 0.5, 65024.0, 2.0**-20, -0.0, 1 + 1 / 64, 1 + 1 / 128]
    data = codes.encode(torch.tensor([row]), "e5m6")
    assert bytes(data[0].tolist()).hex(" ") == "38 00 0c 3c 18 00 bf 07 c0 13 3c 00"
    row[7] = 1.0
    assert codes.decode(data)[0].tolist() == row


def _e5m6(value: Fraction) -> int:
    """The code of a positive normal value by exact arithmetic: the nearest of its two neighbours, ties to even."""
    exponent = 15
    while Fraction(2) ** exponent > value:
        exponent -= 1
    steps = value / Fraction(2) ** (exponent - 6)
    lower = steps.numerator // steps.denominator
    rest = steps - lower
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and lower % 2 == 1)
    return (exponent + 14) * 64 + lower + up


def test_e5m6_rounds_normal_values_to_nearest_even() -> None:
    generator = torch.Generator().manual_seed(2)
    exponents = torch.randint(-14, 15, (4096,), generator=generator).float()
    v = (1 + torch.rand(4096, generator=generator)) * torch.exp2(exponents)
    v[::4] = (v[::4].view(torch.int32) & ~0xFFFF | 0x10000).view(torch.float32)
    got = _codes_of(codes.encode(v.view(1, -1), "e5m6"))
    assert got == [_e5m6(Fraction(float(value))) for value in v]


def _codes_of(data: Tensor) -> list[int]:
    """Codes read as the definition writes them: three little-endian words, codes from the highest bit on."""
    raw = bytes(data[0].tolist())
    result = []
    for start in range(0, len(raw), 12):
        stream = b"".join(raw[start + 4 * i : start + 4 * i + 4][::-1] for i in range(3))
        number = int.from_bytes(stream, "big")
        result += [number >> 84 - 12 * i & 0xFFF for i in range(8)]
    return result


def test_e5m6_below_the_normal_range_follows_the_low_mantissa_bits() -> None:
    up = 1 + 65537 * 2.0**-23
    row = [1.5 * 2.0**-20, 1.75 * 2.0**-20, up * 2.0**-20, 2.0**-21, up * 2.0**-60, -up * 2.0**-60, 0.0, 2.0**-130]
    got = codes.decode(codes.encode(torch.tensor([row]), "e5m6"))[0] * 2.0**20
    assert got.tolist() == [1.0, 1.0, 2.0, 0.0, 1.0, -1.0, 0.0, 0.0]


def test_e5m6_decodes_every_code() -> None:
    every = np.arange(4096, dtype=np.uint16)
    expected = (every << 4).view(np.float16).astype(np.float32)
    stream = 0
    for code in every:
        stream = stream << 12 | int(code)
    raw = stream.to_bytes(4096 * 12 // 8, "big")
    words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    data = torch.frombuffer(bytearray(words), dtype=torch.uint8)[None]
    np.testing.assert_array_equal(codes.decode(data)[0].numpy(), expected)


# ---------------------------------------------------------------------- unpack_from_e2m1fn_x2


def test_unpack_puts_the_low_nibble_first() -> None:
    x = torch.tensor([0x21, -1], dtype=torch.int8)
    assert tk_core.quant.unpack_from_e2m1fn_x2(x).tolist() == [0.5, 1.0, -6.0, -6.0]


def test_unpack_any_rank_layout_and_dtype() -> None:
    x = torch.arange(24, dtype=torch.uint8).view(2, 3, 4).transpose(0, 1)
    got = tk_core.quant.unpack_from_e2m1fn_x2(x, torch.bfloat16)
    expected = decode(unpack_nibbles(x.reshape(6, 4).numpy()), "e2m1").reshape(3, 2, 8)
    assert got.dtype == torch.bfloat16
    assert got.is_contiguous()
    np.testing.assert_array_equal(got.float().numpy(), expected)
    assert tk_core.quant.unpack_from_e2m1fn_x2(x[:0]).shape == (0, 2, 8)
    assert tk_core.quant.unpack_from_e2m1fn_x2(x[..., :0]).shape == (3, 2, 0)


def test_unpack_refuses_scalars_and_other_dtypes() -> None:
    with pytest.raises(tk_core.InvalidArgumentError, match="at least one dimension"):
        tk_core.quant.unpack_from_e2m1fn_x2(torch.tensor(3, dtype=torch.int8))
    with pytest.raises(tk_core.InvalidDtypeError, match="x must be int8 or uint8, got float32"):
        tk_core.quant.unpack_from_e2m1fn_x2(torch.zeros(3))


def test_the_witness_knows_the_formats() -> None:
    assert float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max) == 448.0
    assert float(ml_dtypes.finfo(ml_dtypes.float4_e2m1fn).max) == 6.0
