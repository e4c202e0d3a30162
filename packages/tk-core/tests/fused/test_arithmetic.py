"""fma of the references: one rounding, against exact rationals."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from tk_core.reference.arithmetic import fma


def _nearest(exact: Fraction) -> np.float32:
    """The fp32 number nearest to a rational, ties to even."""
    near = np.float32(float(exact))
    around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    best = min(abs(Fraction(float(v)) - exact) for v in around)
    ties = [v for v in around if abs(Fraction(float(v)) - exact) == best]
    return ties[0] if len(ties) == 1 else next(v for v in ties if int(v.view(np.uint32)) % 2 == 0)


def _check(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    result = fma(a, b, c).tolist()
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), result):
        assert got == float(_nearest(Fraction(x) * Fraction(y) + Fraction(z))), (x, y, z)


def test_random_operands_of_all_magnitudes():
    g = torch.Generator().manual_seed(0)
    values = [
        torch.randn(4000, generator=g) * torch.exp2(torch.randint(-30, 30, (4000,), generator=g)) for _ in range(3)
    ]
    _check(*values)


def test_where_fp64_rounds_onto_a_tie():
    """c + a b is 2^-70 off halfway between two fp32 numbers; fp64 rounds it onto halfway, and a tie goes astray."""
    a, b = torch.tensor([1 + 2.0**-23] * 2), torch.tensor([1.0, -1.0]) * (2.0**-24 * (1 - 2.0**-23))
    c = torch.tensor([1 + 2.0**-23] * 2)
    assert (a.double() * b.double() + c.double()).float().tolist() == [1 + 2.0**-22, 1.0]
    assert fma(a, b, c).tolist() == [1 + 2.0**-23, 1 + 2.0**-23]
    assert fma(-a, b, -c).tolist() == [-1 - 2.0**-23, -1 - 2.0**-23]
    _check(a, b, c)


def test_special_values():
    inf, nan = math.inf, math.nan
    a = torch.tensor([inf, inf, 0.0, nan, 1.0, 0.0])
    b = torch.tensor([1.0, 0.0, -1.0, 1.0, 1.0, 1.0])
    c = torch.tensor([1.0, 1.0, 0.0, 1.0, -inf, -0.0])
    out = fma(a, b, c)
    assert out[[0, 4]].tolist() == [inf, -inf]
    assert out[[1, 3]].isnan().all()
    assert out[[2, 5]].tolist() == [0.0, 0.0]


def test_subnormal_results():
    a, b = torch.tensor([3 * 2.0**-75, 2.0**-75]), torch.tensor([2.0**-75, 2.0**-75])
    assert fma(a, b, torch.zeros(2)).tolist() == [2.0**-148, 0.0], "1.5 and 0.5 of the smallest number: ties to even"
