"""Stochastic rounding: the bits by plain integers, and the statistics that it promises."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tk_core import quant

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
MASK = 0xFFFFFFFF

MAGNITUDES = {
    "e4m3": [float(v) for v in torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()],
    "e2m1": [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
}


def _pattern(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _hash(quad: list[float], index: int) -> tuple[int, int]:
    factors = (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)
    h = (sum(_pattern(v) * f for v, f in zip(quad, factors)) + index) & MASK
    h ^= h >> 23
    h = h * 0x7FEB352D & MASK
    h ^= h >> 16
    r0, r1 = h * 0x846CA68B & MASK, h * 0xD35A2D97 & MASK
    return r0 ^ r0 >> 11, r1 ^ r1 >> 11


def _rotate(r: int, by: int) -> int:
    return (r << by | r >> 32 - by) & MASK if by else r


def _round_to_levels(value: float, r: int, levels: list[float]) -> float:
    """The level below or above, by the rule of the definition in exact arithmetic."""
    magnitude = abs(value)
    if magnitude >= levels[-1]:
        return math.copysign(levels[-1], value)
    upper = next(i for i, level in enumerate(levels) if level > magnitude)
    low, high = Fraction(levels[upper - 1]), Fraction(levels[upper])
    threshold = math.floor(2**32 * (Fraction(magnitude) - low) / (high - low))
    return math.copysign(levels[upper] if r < threshold else levels[upper - 1], value)


def _round_to_bf16(value: float, r: int) -> float:
    bits = _pattern(value)
    if bits & 0x7F800000 == 0x7F800000:
        return value
    high = (bits >> 16) + (r < (bits & 0xFFFF))
    high = min(high & 0x7FFF, 0x7F7F) | (high & 0x8000)
    return struct.unpack("<f", struct.pack("<I", high << 16))[0]


def _witness(values: list[float], fmt: str) -> list[float]:
    result = []
    for start in range(0, len(values), 4):
        quad = values[start : start + 4]
        r0, r1 = _hash(quad + [0.0] * (4 - len(quad)), start // 4)
        for i, value in enumerate(quad):
            if fmt == "bf16":
                result.append(_round_to_bf16(value, (r0, r0 >> 16, r1, r1 >> 16)[i] & 0xFFFF))
            else:
                result.append(_round_to_levels(value, _rotate(r0, 8 * i), MAGNITUDES[fmt]))
    return result


def _values(n: int, largest: float) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    v = torch.randn(n, generator=generator) * torch.exp2(torch.randint(-14, 8, (n,), generator=generator).float())
    v = v.clamp(-largest, largest)
    edges = [0.0, -0.0, 2.0**-10, -(2.0**-140), 2.0**-149, 0.3, 1.96875, largest]
    v[: min(n, 8)] = torch.tensor(edges[: min(n, 8)])
    return v


def _same(got: Tensor, expected: list[float]) -> bool:
    wanted = torch.tensor(expected)
    return torch.equal(got.float().view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 130, 1001])
def test_cast_bits(n: int) -> None:
    v = _values(n, 1000.0)
    assert _same(quant.cast(v, BF16, True), _witness(v.tolist(), "bf16"))
    assert _same(quant.cast(v, E4M3, True), _witness(v.tolist(), "e4m3"))
    narrow = v.bfloat16()
    assert _same(quant.cast(narrow, E4M3, True), _witness(narrow.tolist(), "e4m3"))


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("columns", [16, 18, 90])
def test_per_token_cast_bits(fmt: str, columns: int) -> None:
    qmax = MAGNITUDES[fmt][-1]
    x = torch.stack([_values(columns, qmax) for _ in range(3)])
    x[:, -1] = qmax
    x[1] *= 8.0
    x[2, :5] = 0.0
    q, sf = quant.per_token_cast(x, fmt, columns, round_sf=True, stochastic_cast=True)
    assert sf.flatten().tolist() == [1.0, 8.0, 1.0]
    got = quant.per_token_cast_back((q, torch.ones_like(sf)), "fp32", columns)
    for row in range(3):
        assert _same(got[row], _witness((x[row] / sf[row]).tolist(), fmt))


def test_scales_are_those_of_rounding_to_nearest() -> None:
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    for flags in ({}, {"round_sf": True}, {"use_e4m3_sf": True}):
        nearest = quant.per_token_cast(x, "e4m3", 32, **flags)
        stochastic = quant.per_token_cast(x, "e4m3", 32, stochastic_cast=True, **flags)
        assert torch.equal(nearest.sf.float(), stochastic.sf.float())
        assert not torch.equal(nearest.data.view(torch.uint8), stochastic.data.view(torch.uint8))


def test_q17_carry_into_the_exponent() -> None:
    x = torch.full((1, 1_000_000), 1.96875)
    x[0, 0] = 448.0
    q, sf = quant.per_token_cast(x, "e4m3", 1_000_000, stochastic_cast=True)
    assert sf.item() == 1.0
    values = q.float()[0, 4:]
    assert values.unique().tolist() == [1.875, 2.0]
    assert abs((values == 2.0).float().mean().item() - 0.75) < 0.0015


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_cast_is_unbiased_and_adjacent(dtype: torch.dtype) -> None:
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    y, again = quant.cast(x, dtype, True), quant.cast(x, dtype, True)
    assert torch.equal(y.view(torch.uint8), again.view(torch.uint8))
    step = 2.0**-7 if dtype == BF16 else 2.0**-3
    difference = y.float() - x
    assert abs(difference.mean()) <= 10 * step * x.abs().mean() / x.numel() ** 0.5
    below = ((difference < 0).sum() + (difference == 0).sum() / 2) / x.numel()
    assert abs(below - 0.5) < 10 / x.numel() ** 0.5
    nearest = quant.cast(x, dtype)
    ints = torch.int16 if dtype == BF16 else torch.int8
    assert (y.view(ints).int() - nearest.view(ints).int()).abs().max() == 1


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_per_token_cast_is_unbiased(fmt: str, dtype: torch.dtype) -> None:
    x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    back = quant.per_token_cast_back(quant.per_token_cast(x, fmt, 32, stochastic_cast=True), "fp32", 32)
    step = 2.0**-3 if fmt == "e4m3" else 2.0**-1
    assert abs((back - x.float()).mean()) / x.float().abs().mean() < 10 * step / x.numel() ** 0.5


def test_each_value_is_rounded_up_as_often_as_it_should() -> None:
    """The four elements of a quad draw different bits, each uniform."""
    fractions = torch.tensor([0.1, 0.35, 0.5, 0.9])
    noise = torch.randn(200_000, 4, generator=torch.Generator().manual_seed(3)) * 1e-3
    v = 4.0 + 0.5 * (fractions + noise)
    up = quant.cast(v, E4M3, True).float() == 4.5
    expected = (fractions + noise).mean(0)
    assert ((up.float().mean(0) - expected).abs() < 6 * 0.5 / 200_000**0.5).all()
    centred = up.double() - up.double().mean(0)
    correlation = (centred.T @ centred) / len(up) / (centred.std(0)[:, None] * centred.std(0))
    assert (correlation - torch.eye(4)).abs().max() < 0.02


def test_finite_values_stay_finite_and_others_pass() -> None:
    largest = torch.finfo(FP32).max
    x = torch.tensor([largest, -largest, math.inf, -math.inf, math.nan, 464.0, -500.0, 448.0])
    y = quant.cast(x, BF16, True).float()
    top = torch.finfo(BF16).max
    assert y[:4].tolist() == [top, -top, math.inf, -math.inf]
    assert y[4].isnan()
    z = quant.cast(x, E4M3, True).float()
    assert z[:4].tolist() == [448.0, -448.0, 448.0, -448.0]
    assert z[4].isnan()
    assert z[5:].tolist() == [448.0, -448.0, 448.0]


def test_slices_of_rows_round_alike_but_slices_of_a_flat_cast_do_not() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(4))
    whole = quant.per_token_cast(x, "e4m3", 32, stochastic_cast=True)
    part = quant.per_token_cast(x[10:20], "e4m3", 32, stochastic_cast=True)
    assert torch.equal(whole.data[10:20].view(torch.uint8), part.data.view(torch.uint8))
    flat = quant.cast(x.view(-1), E4M3, True).view(torch.uint8)
    assert not torch.equal(flat[4:], quant.cast(x.view(-1)[4:].clone(), E4M3, True).view(torch.uint8))
