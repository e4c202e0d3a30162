"""quant.per_token_cast, its variants and its inverse, against the witness and values worked out by hand."""

from __future__ import annotations

from typing import Any

import cast_witness as witness
import numpy as np
import pytest
import torch
from torch import Tensor

import tk_core
from tk_core import InvalidArgumentError, InvalidDtypeError, quant
from tk_core.formats import AMAX_CLAMP_DEFAULT

MODES: dict[str, dict[str, Any]] = {"plain": {}, "round": {"round_sf": True}, "e4m3": {"use_e4m3_sf": True}}


def _data(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of different magnitude, with elements of every magnitude below."""
    generator = torch.Generator().manual_seed(seed)
    top = torch.exp2(torch.randint(-120, 110, (rows, 1), generator=generator).float())
    below = torch.exp2(-torch.randint(0, 14, (rows, columns), generator=generator).float())
    return (torch.randn(rows, columns, generator=generator) * top * below).to(dtype)


def _codes(data: Tensor) -> np.ndarray:
    stored = data.view(torch.uint8).numpy()
    return witness.unpack_nibbles(stored) if data.dtype == torch.int8 else stored


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [16, 32, 128, 5])
def test_equals_the_witness(fmt: str, mode: str, dtype: torch.dtype, n: int) -> None:
    x = _data(40, 192, dtype)
    q, sf = quant.per_token_cast(x, fmt, n, **MODES[mode])
    clamp = AMAX_CLAMP_DEFAULT[fmt, mode == "e4m3"]
    expected, scales = witness.quantize(x.float().numpy(), fmt, (1, n), mode, clamp)
    np.testing.assert_array_equal(sf.float().numpy(), scales)
    np.testing.assert_array_equal(_codes(q), expected)
    assert torch.equal(quant.per_token_cast_with_sf_only(x, fmt, n, **MODES[mode]).float(), sf.float())
    back = quant.per_token_cast_back((q, sf), "fp32", n)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(
            back.numpy(), witness.decode(expected, fmt) * witness.expand(scales, (1, n), 40, 192)
        )
    assert torch.equal(quant.per_token_cast_back((q, sf), "bf16", n), back.bfloat16())
    y = x.clone()
    quant.per_token_cast_and_cast_back(y, fmt, n, **MODES[mode])
    assert torch.equal(y, back.to(dtype))


@pytest.mark.parametrize("per_word", [4, 2])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_packed_scales_equal_the_witness(fmt: str, per_word: int) -> None:
    x = _data(9, 7 * 32, torch.float32)
    backend = tk_core.backends.ReferenceBackend(tk_core.backend.Layout(per_word, 16 if per_word == 4 else 0))
    with tk_core.use_backend(backend):
        q, sf = quant.per_token_cast(x, fmt, 32, round_sf=True, use_packed_ue8m0=True)
        back = quant.per_token_cast_back((q, sf), "fp32", 32)
    expected, scales = witness.quantize(x.numpy(), fmt, (1, 32), "round", AMAX_CLAMP_DEFAULT[fmt, False])
    np.testing.assert_array_equal(_codes(q), expected)
    bytes_ = sf.view(torch.uint8).view(9, -1, per_word).numpy()
    np.testing.assert_array_equal(bytes_, witness.pack_ue8m0(scales, per_word))
    plain = quant.per_token_cast_back(quant.per_token_cast(x, fmt, 32, round_sf=True), "fp32", 32)
    assert torch.equal(back, plain)


@pytest.mark.parametrize("fmt_in", ["e4m3", "e2m1"])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("block", [(1, 32), (4, 16), (3, 64)])
def test_requantizing_equals_the_witness(fmt_in: str, fmt: str, mode: str, block: tuple[int, int]) -> None:
    x = torch.randn(13, 128, generator=torch.Generator().manual_seed(4))
    codes, scales = witness.quantize(x.numpy(), fmt_in, block)
    stored = torch.from_numpy(witness.pack_nibbles(codes) if fmt_in == "e2m1" else codes)
    data = stored.view(torch.int8 if fmt_in == "e2m1" else torch.float8_e4m3fn)
    q, sf = quant.per_token_cast((data, torch.from_numpy(scales)), fmt, 48, block, **MODES[mode])
    expected, expected_sf = witness.quantize(
        witness.decode(codes, fmt_in),
        fmt,
        (1, 48),
        mode,
        AMAX_CLAMP_DEFAULT[fmt, mode == "e4m3"],
        witness.expand(scales, block, 13, 128),
    )
    np.testing.assert_array_equal(sf.float().numpy(), expected_sf)
    np.testing.assert_array_equal(_codes(q), expected)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_precomputed_scales_multiply_by_the_rounded_reciprocal(fmt: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(20, 96, generator=generator, dtype=torch.bfloat16)
    sf = torch.rand(20, 3, generator=generator) + 0.01
    got = quant.per_token_cast_with_precomputed_sf(x, fmt, 32, sf)
    factor = witness.expand(np.float32(1) / sf.numpy(), (1, 32), 20, 96)
    np.testing.assert_array_equal(_codes(got), witness.encode(x.float().numpy() * factor, fmt))
    again = quant.per_token_cast_with_precomputed_sf(x, fmt, 32, sf, round_sf=True)
    assert torch.equal(again.view(torch.uint8), got.view(torch.uint8))
    e4m3 = sf.to(torch.float8_e4m3fn)
    got = quant.per_token_cast_with_precomputed_sf(x, fmt, 32, e4m3, use_e4m3_sf=True)
    widened = quant.per_token_cast_with_precomputed_sf(x, fmt, 32, e4m3.float())
    assert torch.equal(got.view(torch.uint8), widened.view(torch.uint8))


def test_precomputed_scale_of_zero() -> None:
    x = torch.tensor([[0.0, -0.0, 1.0, -1.0]])
    got = quant.per_token_cast_with_precomputed_sf(x, "e4m3", 4, torch.zeros(1, 1))
    assert got.view(torch.uint8).tolist() == [[0x7F, 0x7F, 0x7E, 0xFE]]


def test_powers_of_two_give_the_codes_of_the_cast() -> None:
    x = _data(9, 128, torch.float32)
    q, sf = quant.per_token_cast(x, "e4m3", 32, round_sf=True)
    again = quant.per_token_cast_with_precomputed_sf(x, "e4m3", 32, sf, round_sf=True)
    assert torch.equal(again.view(torch.uint8), q.view(torch.uint8))


def test_a_partial_last_group_has_its_own_scale() -> None:
    x = torch.cat((torch.full((1, 128), 448.0), torch.full((1, 64), 896.0)), dim=1)
    q, sf = quant.per_token_cast(x, "e4m3", 128)
    assert sf.tolist() == [[1.0, 2.0]]
    assert q.float().unique().tolist() == [448.0]


def test_e4m3_scales_can_saturate_codes() -> None:
    x = torch.full((1, 16), 448.0 * 1.06)
    q, sf = quant.per_token_cast(x, "e4m3", 16, use_e4m3_sf=True)
    assert sf.float().tolist() == [[1.0]]
    assert q.float().unique().tolist() == [448.0]


def test_subnormal_input_is_not_flushed() -> None:
    x = torch.zeros(1, 32)
    x[0, 3] = 2.0**-127
    q, sf = quant.per_token_cast(x, "e2m1", 32)
    assert sf.tolist() == [[2.0**-126]]
    assert q.view(torch.uint8)[0].tolist() == [0, 0x10] + [0] * 14
    assert quant.per_token_cast_back((q, sf), "fp32", 32)[0, 3] == 2.0**-127


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 127, 128, 129, 4097])
def test_q19_a_row_does_not_depend_on_the_others(rows: int) -> None:
    row = _data(1, 96, torch.bfloat16, 7)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(8)).bfloat16()
    x[rows // 2] = row
    for stochastic in (False, True):
        one = quant.per_token_cast(row, "e4m3", 32, stochastic_cast=stochastic)
        many = quant.per_token_cast(x, "e4m3", 32, stochastic_cast=stochastic)
        assert torch.equal(many.data[rows // 2 : rows // 2 + 1].view(torch.uint8), one.data.view(torch.uint8))
        assert torch.equal(many.sf[rows // 2], one.sf[0])


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_unbiased(fmt: str) -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(9))
    back = quant.per_token_cast_back(quant.per_token_cast(x, fmt, 128), "fp32", 128)
    below = ((back < x).sum() + (back == x).sum() / 2) / x.numel()
    assert abs(below - 0.5) < 10 / x.numel() ** 0.5


def test_strided_misaligned_and_expanded_rows() -> None:
    base = torch.randn(9, 512, generator=torch.Generator().manual_seed(10)).bfloat16()
    x = base[:, :256]
    expected = quant.per_token_cast(x.contiguous(), "e4m3", 128)
    shifted = torch.empty(9 * 256 + 1, dtype=torch.bfloat16)[1:].view(9, 256).copy_(x)
    for y in (x, shifted):
        got = quant.per_token_cast(y, "e4m3", 128)
        assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(got.sf, expected.sf)
    got = quant.per_token_cast(x[:1].expand(4, 256), "e4m3", 128)
    assert torch.equal(got.sf, expected.sf[:1].expand(4, 2))


def test_in_place_leaves_other_columns_alone() -> None:
    base = torch.randn(9, 512, generator=torch.Generator().manual_seed(11))
    before, version = base.clone(), base._version
    quant.per_token_cast_and_cast_back(base[:, :256], "e2m1", 32, round_sf=True)
    assert torch.equal(base[:, 256:], before[:, 256:])
    assert base._version > version
    back = quant.per_token_cast_back(quant.per_token_cast(before[:, :256], "e2m1", 32, round_sf=True), "fp32", 32)
    assert torch.equal(base[:, :256], back)


def test_out_is_filled_and_returned() -> None:
    x = torch.randn(6, 160, generator=torch.Generator().manual_seed(12))
    expected = quant.per_token_cast(x, "e4m3", 32)
    data = torch.zeros(6, 160, dtype=torch.int8).view(torch.float8_e4m3fn)
    for sf in (torch.full((6, 5), -1.0), torch.full((6, 9), -1.0)[:, :5]):
        got = quant.per_token_cast(x, "e4m3", 32, out=(data, sf))
        assert got.data is data
        assert got.sf is sf
        assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(sf, expected.sf)
        assert quant.per_token_cast_with_sf_only(x, "e4m3", 32, out_sf=sf.fill_(-1.0)) is sf
        assert torch.equal(sf, expected.sf)
    got = quant.per_token_cast(x, "e4m3", 32, out=(None, sf))
    assert got.sf is sf
    assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))
    codes = quant.per_token_cast_with_precomputed_sf(x, "e4m3", 32, sf, out=data)
    assert codes is data


def test_a_strided_out_does_not_touch_what_lies_between() -> None:
    wide = torch.full((6, 9), -1.0)
    quant.per_token_cast(torch.ones(6, 160), "e4m3", 32, out=(None, wide[:, :5]))
    assert wide[:, 5:].unique().tolist() == [-1.0]


def test_fmt_e5m6_is_the_e5m6_cast() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(13))
    q = quant.per_token_cast(x, "e5m6", 64, None, True, True, True)
    expected = quant.per_token_cast_to_e5m6(x, 64, True, True, True)
    assert torch.equal(q.data, expected.data)
    assert torch.equal(q.sf, expected.sf)
    assert q.sf.stride() == expected.sf.stride()
    back = quant.cast_back(q, "fp32", (1, 64), "e5m6")
    assert torch.equal(back, quant.per_token_cast_back(q, "fp32", 64, "e5m6"))
    assert torch.equal(back, quant.cast_back_e5m6(q, "fp32", (1, 64)))
    for name, value in (("use_e4m3_sf", True), ("stochastic_cast", True), ("out", (None, None))):
        with pytest.raises(InvalidArgumentError, match=name):
            quant.per_token_cast(x, "e5m6", 64, **{name: value})


def test_messages_name_argument_value_and_what_is_allowed() -> None:
    x = torch.zeros(4, 64)
    with pytest.raises(InvalidArgumentError, match=r"cast: x must have shape \(M, K\), got \(4, 8, 64\)"):
        quant.per_token_cast(torch.zeros(4, 8, 64), "e4m3", 32)
    with pytest.raises(InvalidArgumentError, match="fmt must be 'e4m3' or 'e2m1' or 'e5m6', got 'fp8'"):
        quant.per_token_cast(x, "fp8", 32)
    with pytest.raises(InvalidDtypeError, match="num_per_channels must be an int, got float"):
        quant.per_token_cast(x, "e4m3", 32.0)
    with pytest.raises(InvalidArgumentError, match="must have unit stride along its last dimension, got strides"):
        quant.per_token_cast(x.t(), "e4m3", 32)


def test_no_tokens_and_no_columns() -> None:
    q = quant.per_token_cast(torch.zeros(0, 96), "e2m1", 32, use_tma_aligned_col_major_sf=True)
    assert q.data.shape == (0, 48)
    assert q.sf.shape == (0, 3)
    assert quant.per_token_cast_back(q, "bf16", 32).shape == (0, 96)
    q = quant.per_token_cast(torch.zeros(3, 0), "e4m3", 32)
    assert q.data.shape == (3, 0)
    assert q.sf.shape == (3, 0)


def test_results_never_require_grad() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    q = quant.per_token_cast(x, "e4m3", 32)
    assert not q.data.requires_grad
    assert not q.sf.requires_grad


def test_a_group_far_wider_than_the_matrix_is_one_group():
    x = torch.randn(3, 96)
    for group in (96, 97, 2**40):
        q, sf = quant.per_token_cast(x, "e4m3", group)
        assert sf.shape == (3, 1)
        assert torch.equal(q.view(torch.uint8), quant.per_token_cast(x, "e4m3", 96).data.view(torch.uint8))
        assert quant.per_token_cast_back((q, sf), "fp32", group).shape == (3, 96)
