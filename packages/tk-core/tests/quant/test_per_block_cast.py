"""quant.per_block_cast, its variants and quant.per_block_cast_lossless, against the witness and exact arithmetic."""

from __future__ import annotations

from typing import Any

import cast_witness as witness
import numpy as np
import pytest
import torch
from torch import Tensor

import tk_core
from tk_core import InvalidArgumentError, quant
from tk_core.formats import AMAX_CLAMP_DEFAULT
from tk_core.quant.per_block_cast_lossless import PER_BLOCK_CAST_LOSSLESS

MX: dict[str, Any] = {"round_sf": True, "use_packed_ue8m0": True}


def _x(rows: int, columns: int, dtype: torch.dtype = torch.float32, spread: int = 20) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    exponents = torch.randint(-spread, spread, (rows, columns), generator=generator).float()
    return (torch.randn(rows, columns, generator=generator) * torch.exp2(exponents)).to(dtype)


def _codes(data: Tensor) -> np.ndarray:
    stored = data.view(torch.uint8).numpy()
    return witness.unpack_nibbles(stored) if data.dtype == torch.int8 else stored


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("mode", ["plain", "round"])
@pytest.mark.parametrize("block", [(32, 32), (128, 128), (3, 7), (32, 1), (1, 16), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_witness(fmt: str, mode: str, block: tuple[int, int], dtype: torch.dtype) -> None:
    x = _x(70, 84, dtype)
    q, sf = quant.per_block_cast(x, fmt, block, round_sf=mode == "round")
    expected, scales = witness.quantize(x.float().numpy(), fmt, block, mode, AMAX_CLAMP_DEFAULT[fmt, False])
    np.testing.assert_array_equal(sf.numpy(), scales)
    np.testing.assert_array_equal(_codes(q), expected)
    assert torch.equal(quant.per_block_cast_with_sf_only(x, fmt, block, round_sf=mode == "round"), sf)
    given = quant.per_block_cast_with_precomputed_sf(x, fmt, block, sf)
    factor = witness.expand(np.float32(1) / scales, block, 70, 84)
    np.testing.assert_array_equal(_codes(given), witness.encode(x.float().numpy() * factor, fmt))
    back = quant.cast_back((q, sf), "fp32", block)
    np.testing.assert_array_equal(back.numpy(), witness.decode(expected, fmt) * witness.expand(scales, block, 70, 84))


@pytest.mark.parametrize("per_word", [4, 2])
@pytest.mark.parametrize("block", [(32, 32), (16, 1)])
def test_packed_scales(per_word: int, block: tuple[int, int]) -> None:
    x = _x(70, 160)
    backend = tk_core.backends.ReferenceBackend(tk_core.backend.Layout(per_word, 0))
    with tk_core.use_backend(backend):
        sf = quant.per_block_cast_with_sf_only(x, "e4m3", block, **MX)
    scales = witness.quantize(x.numpy(), "e4m3", block, "round")[1]
    along_rows = block[1] == 1
    expected = witness.pack_ue8m0(scales, per_word, along_rows)
    np.testing.assert_array_equal(sf.view(torch.uint8).view(*sf.shape, per_word).numpy(), expected)


def test_out_is_filled_and_returned() -> None:
    x = _x(70, 160)
    expected = quant.per_block_cast(x, "e4m3", (32, 32))
    data, sf = torch.zeros(70, 160, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.full((3, 9), -1.0)[:, :5]
    got = quant.per_block_cast(x, "e4m3", (32, 32), out=(data, sf))
    assert got.data is data
    assert got.sf is sf
    assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(sf, expected.sf)
    assert quant.per_block_cast_with_sf_only(x, "e4m3", (32, 32), out_sf=sf) is sf
    assert quant.per_block_cast_with_precomputed_sf(x, "e4m3", (32, 32), sf, out=data) is data
    with pytest.raises(InvalidArgumentError, match=r"out\[1\] must not be combined"):
        quant.per_block_cast(x, "e4m3", (32, 32), True, out=(None, sf))
    with pytest.raises(InvalidArgumentError, match=r"out\[0\] must be contiguous"):
        quant.per_block_cast(x, "e4m3", (32, 32), out=(torch.cat((data, data), 1)[:, :160], None))


def test_empty() -> None:
    q = quant.per_block_cast(torch.zeros(0, 128), "e2m1", (32, 32), True, **MX)
    assert q.data.shape == (0, 64)
    assert q.sf.shape == (0, 1)
    assert quant.per_block_cast(torch.zeros(0, 128), "e4m3", (32, 1), **MX).sf.shape == (0, 128)


# ---------------------------------------------------------------------- lossless


def _e2m1(rows: int, columns: int, flags: dict[str, Any]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    x = torch.where(x < 0, -1.0, 1.0) * x.abs().clamp(min=2.0**-7)
    return quant.per_token_cast(x, "e2m1", 32, round_sf=True, **flags)


@pytest.mark.parametrize("flags_in", [{}, {"use_packed_ue8m0": True, "use_tma_aligned_col_major_sf": True}])
@pytest.mark.parametrize("flags", [{}, MX, {"use_tma_aligned_col_major_sf": True, **MX}])
@pytest.mark.parametrize("outer", [(1, 32), (1, 128), (32, 32), (128, 128), (5, 64)])
def test_lossless(flags_in: dict[str, Any], flags: dict[str, Any], outer: tuple[int, int]) -> None:
    x = _e2m1(131, 288, flags_in)
    made = quant.per_block_cast_lossless(x, "e4m3", (1, 32), outer, **flags)
    back = quant.cast_back(made, "fp32", outer)
    assert torch.equal(back.view(torch.int32), quant.cast_back(x, "fp32", (1, 32)).view(torch.int32))


def _pair(exponents: list[list[int]]) -> tuple[Tensor, Tensor]:
    e = torch.tensor(exponents, dtype=torch.int32)
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    data = (codes[0::2] | codes[1::2] << 4).view(torch.int8).repeat(e.shape[0], e.shape[1])
    return data, (e << 23).view(torch.float32)


def test_lossless_scale_is_the_largest_exponent_less_6() -> None:
    data, sf = _pair([[100, 103], [95, 101]])
    made = quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (2, 64))
    assert made.sf.tolist() == [[2.0 ** (97 - 127)]]
    assert torch.equal(quant.cast_back(made, "fp32", (2, 64)), quant.cast_back((data, sf), "fp32", (1, 32)))
    zero = quant.per_block_cast_lossless((data[:, :1], sf[:, :1] * 0 + 1), "e4m3", (1, 2), (1, 2))
    assert zero.data.view(torch.uint8)[0].tolist() == [0x00, 0x60]
    assert zero.sf.tolist() == [[2.0**-6]] * 2


def test_lossless_down_to_output_exponent_0() -> None:
    data, sf = _pair([[6, 1, 3, 5]])
    made = quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 128))
    assert made.sf.item() == 2.0**-127
    assert torch.equal(quant.cast_back(made, "fp32", (1, 128)), quant.cast_back((data, sf), "fp32", (1, 32)))
    packed = quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 128), **MX)
    assert packed.sf.item() == 0
    assert torch.equal(quant.cast_back(packed, "fp32", (1, 128)), quant.cast_back((data, sf), "fp32", (1, 32)))


def test_lossless_range_is_2_to_the_11() -> None:
    quant.per_block_cast_lossless(_pair([[100, 89]]), "e4m3", (1, 32), (1, 64))
    with pytest.raises(InvalidArgumentError, match=r"differ by at most 2\*\*11"):
        quant.per_block_cast_lossless(_pair([[100, 88]]), "e4m3", (1, 32), (1, 64))


@pytest.mark.parametrize("bad", [3.0, -1.0, 0.0, float("inf"), float("nan"), 2.0**-127])
def test_lossless_refuses_scales_that_are_not_powers_of_two(bad: float) -> None:
    data, sf = _pair([[127, 127], [127, 127]])
    sf[1, 0] = bad
    with pytest.raises(InvalidArgumentError, match="positive powers of two"):
        quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 64))
    unchecked = PER_BLOCK_CAST_LOSSLESS(data, sf, 1, 32, 1, 64, False, False, 4, 16)
    assert unchecked[1].isnan().tolist() == [[False], [True]]
    packed = PER_BLOCK_CAST_LOSSLESS(data, sf, 1, 32, 1, 64, False, True, 4, 16)[1]
    assert packed.tolist() == [[121], [255]]


def test_lossless_blocks_far_larger_than_the_matrix_are_one_block():
    data, sf = torch.full((2, 4), 0x27, dtype=torch.int8), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    whole = tk_core.quant.per_block_cast_lossless((data, sf), "e4m3", (1, 4), (2, 8))
    large = tk_core.quant.per_block_cast_lossless((data, sf), "e4m3", (1, 4), (2**40, 2**40))
    assert torch.equal(large[0].float(), whole[0].float())
    assert torch.equal(large[1], whole[1])
