"""quant.cast_back and quant.cast_back_e5m6 by hand."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from tk_core import InvalidArgumentError, InvalidDtypeError, quant


def test_subnormal_codes_and_scales_count_in_full() -> None:
    code = torch.tensor([[1, 0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert quant.cast_back((code, torch.ones(1, 1)), "fp32", (1, 2)).tolist() == [[2.0**-9, 1.0]]
    assert quant.cast_back((code, torch.tensor([[2.0**-149]])), "fp32", (1, 2)).tolist() == [[0.0, 2.0**-149]]
    sf = torch.tensor([[1]], dtype=torch.int32)
    assert quant.cast_back((code, sf), "fp32", (1, 2))[0, 1] == 2.0**-126
    e4m3 = torch.tensor([[1]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert quant.cast_back((code, e4m3), "bf16", (1, 2)).tolist() == [[2.0**-18, 2.0**-9]]


def test_ue8m0_ends() -> None:
    sf = torch.tensor([[0 | 255 << 8 | 254 << 16]], dtype=torch.int32)
    got = quant.cast_back((torch.ones(1, 6).to(torch.float8_e4m3fn), sf), "fp32", (1, 2))[0]
    assert got[:2].tolist() == [2.0**-127] * 2
    assert got[2:4].isnan().all()
    assert got[4:].tolist() == [2.0**127] * 2


def test_products_past_the_range_are_inf_and_nan_codes_nan() -> None:
    code = torch.tensor([[0x7E, 0xFE, 0x7F, 0x80]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = quant.cast_back((code, torch.full((1, 1), 1e38)), "fp32", (1, 4))[0].tolist()
    assert got[:2] == [math.inf, -math.inf]
    assert math.isnan(got[2])
    assert math.copysign(1, got[3]) == -1
    near = quant.cast_back((code[:, :1], torch.tensor([[3.4e38 / 448]])), "bf16", (1, 4))
    assert near.item() == math.inf


def test_bf16_is_the_fp32_product_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    code = torch.randint(0, 0x7F, (64, 64), generator=generator).to(torch.uint8)
    sf = torch.rand(16, 4, generator=generator)
    got = quant.cast_back((code.view(torch.float8_e4m3fn), sf), "bf16", (4, 16))
    values = code.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    product = values * np.kron(sf.numpy(), np.ones((4, 16), np.float32))
    np.testing.assert_array_equal(got.float().numpy(), product.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("block", [(3, 5), (1, 7), (16, 16), (64, 64), (4, 1)])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_blocks_of_any_size_with_partial_edges(block: tuple[int, int], fmt: str) -> None:
    rows, columns = 11, 22
    sf = torch.arange(1.0, 1 + -(-rows // block[0]) * -(-columns // block[1])).view(-(-rows // block[0]), -1)
    if fmt == "e4m3":
        data = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    else:
        data = torch.full((rows, columns // 2), 0x22, dtype=torch.int8)
    expected = [[sf[i // block[0], j // block[1]].item() for j in range(columns)] for i in range(rows)]
    assert quant.cast_back((data, sf), "fp32", block).tolist() == expected


def test_a_pair_is_a_tuple_and_dtypes_are_checked() -> None:
    data, sf = torch.ones(2, 4).to(torch.float8_e4m3fn), torch.ones(2, 1)
    with pytest.raises(InvalidDtypeError, match="x must be a tensor or a pair"):
        quant.cast_back([data, sf], "fp32", (1, 4))
    with pytest.raises(InvalidDtypeError, match="x must be a pair"):
        quant.cast_back(data, "fp32", (1, 4))
    with pytest.raises(InvalidDtypeError, match=r"x\[1\] must be float32 or float8_e4m3fn or int32, got float64"):
        quant.cast_back((data, sf.double()), "fp32", (1, 4))
    with pytest.raises(InvalidArgumentError, match="x_special_fmt must be None or 'e5m6', got 'e3m4'"):
        quant.cast_back((data, sf), "fp32", (1, 4), "e3m4")
    with pytest.raises(InvalidDtypeError, match=r"x\[0\] must be uint8"):
        quant.cast_back((data, sf), "fp32", (1, 4), "e5m6")


# ---------------------------------------------------------------------- e5m6


def test_e5m6_scales_and_codes() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5, 65024.0, 2.0**-20, -0.0, 1 + 1 / 64, 1 + 1 / 128]])
    q, sf = quant.per_token_cast_to_e5m6(x, 8)
    assert sf.item() == 1.0
    assert bytes(q[0].tolist()).hex(" ") == "38 00 0c 3c 18 00 bf 07 c0 13 3c 00"
    assert quant.cast_back_e5m6((q, sf * 2), "fp32", (1, 8))[0, :4].tolist() == [2.0, -4.0, 1.0, 130048.0]


def test_e5m6_zero_rows() -> None:
    zero = torch.zeros(1, 16)
    expected = np.float32(1e-4) / np.float32(65024)
    assert quant.per_token_cast_to_e5m6(zero, 16).sf.item() == float(expected)
    assert quant.per_token_cast_to_e5m6(zero, 16, round_sf=True).sf.item() == 2.0**-29


def test_e5m6_round_up_needs_a_true_division() -> None:
    for n in (-20, 0, 17, 90):
        just_above = float(np.nextafter(np.float32(65024 * 2.0**n), np.float32(np.inf)))
        x = torch.zeros(1, 8)
        x[0, 0] = just_above
        assert quant.per_token_cast_to_e5m6(x, 8, round_sf=True).sf.item() == 2.0 ** (n + 1)


@pytest.mark.parametrize("value", [2.0**-20, 63 / 64 * 2.0**-14, 2.0**-14])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_e5m6_keeps_its_smallest_values(value: float, dtype: torch.dtype) -> None:
    x = torch.full((2, 64), value, dtype=dtype)
    x[:, -1] = 65024.0
    q = quant.per_token_cast_to_e5m6(x, 64)
    expected = x.float()
    if dtype == torch.float32:
        assert q.sf.tolist() == [[1.0]] * 2
        assert torch.equal(quant.cast_back_e5m6(q, "fp32", (1, 64)), expected)
    else:
        back = quant.cast_back_e5m6(q, "fp32", (1, 64))
        assert ((back - expected) ** 2).sum() / (back**2 + expected**2).sum() < 5e-6


def test_e5m6_error() -> None:
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(1))
    for flags in ({}, {"round_sf": True, "use_packed_ue8m0": True, "use_tma_aligned_col_major_sf": True}):
        back = quant.cast_back_e5m6(quant.per_token_cast_to_e5m6(x, 576, **flags), "fp32", (1, 576)).double()
        assert ((back - x) ** 2).sum() / (back**2 + x.double() ** 2).sum() < 1e-4
