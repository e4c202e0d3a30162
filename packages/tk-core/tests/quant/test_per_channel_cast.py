"""quant.per_channel_cast, its fused and its transposing form, against the witness."""

from __future__ import annotations

from typing import Any

import cast_witness as witness
import numpy as np
import pytest
import torch
from torch import Tensor

from tk_core import InvalidArgumentError, InvalidDtypeError, quant
from tk_core.quant.per_channel_cast_fused import PER_CHANNEL_CAST_FUSED


def _x(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    exponents = torch.randint(-20, 20, (rows, columns), generator=generator).float()
    return (torch.randn(rows, columns, generator=generator) * torch.exp2(exponents)).to(dtype)


def _bytes(q: Tensor) -> np.ndarray:
    return q.view(torch.uint8).numpy()


@pytest.mark.parametrize("n", [32, 128, 1, 7])
@pytest.mark.parametrize("mode", ["plain", "round"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_witness(n: int, mode: str, dtype: torch.dtype) -> None:
    x = _x(130, 35, dtype)
    round_sf = mode == "round"
    q, sf = quant.per_channel_cast(x, "e4m3", n, round_sf)
    expected, scales = witness.quantize(x.float().numpy(), "e4m3", (n, 1), mode)
    np.testing.assert_array_equal(sf.numpy(), scales)
    np.testing.assert_array_equal(_bytes(q), expected)
    fused = quant.per_channel_cast_fused(x, "e4m3", n, round_sf)
    np.testing.assert_array_equal(_bytes(fused.data), expected)
    np.testing.assert_array_equal(fused.sf.numpy(), scales)
    turned = quant.per_channel_cast_and_transpose(x, "e4m3", n, round_sf)
    assert turned.data.is_contiguous()
    np.testing.assert_array_equal(_bytes(turned.data), expected.T)
    np.testing.assert_array_equal(turned.sf.numpy(), scales)


def _pair(rows: int, columns: int, channels: int, **flags: Any) -> quant.QuantTensor:
    return quant.per_token_cast(_x(rows, columns), "e4m3", channels, **flags)


@pytest.mark.parametrize("channels", [32, 128, 20])
@pytest.mark.parametrize("mode", ["plain", "round"])
@pytest.mark.parametrize("flags", [{}, {"round_sf": True, "use_packed_ue8m0": True}, {"use_e4m3_sf": True}])
def test_requantizing_equals_the_witness(channels: int, mode: str, flags: dict[str, Any]) -> None:
    x = _pair(70, 160, channels, **flags)
    scales = quant.cast_back((torch.ones(70, 160).to(x.data.dtype), x.sf), "fp32", (1, channels)).numpy()
    values = witness.decode(_bytes(x.data), "e4m3")
    expected, expected_sf = witness.quantize(values, "e4m3", (32, 1), mode, 1e-4, scales)
    for made in (
        quant.per_channel_cast(x, "e4m3", 32, mode == "round", channels),
        quant.per_channel_cast_fused(x, "e4m3", 32, mode == "round", channels),
    ):
        np.testing.assert_array_equal(made.sf.numpy(), expected_sf)
        np.testing.assert_array_equal(_bytes(made.data), expected)


def test_token_slices_of_column_major_scales() -> None:
    x = _pair(64, 256, 32, use_tma_aligned_col_major_sf=True)
    part = x.data[3:40], x.sf[3:40]
    got = quant.per_channel_cast(part, "e4m3", 32, num_per_channels=32)
    expected = quant.per_channel_cast((part[0], part[1].contiguous()), "e4m3", 32, num_per_channels=32)
    assert torch.equal(got.sf, expected.sf)
    np.testing.assert_array_equal(_bytes(got.data), _bytes(expected.data))


# ---------------------------------------------------------------------- gathered rows


@pytest.mark.parametrize("channels", [None, 32])
@pytest.mark.parametrize("n", [32, 128])
def test_gathering_equals_quantizing_the_gathered_rows(channels: int | None, n: int) -> None:
    x = _x(20, 96)
    source: Any = x if channels is None else quant.per_token_cast(x, "e4m3", channels)
    index = torch.randint(-2, 20, (150,), generator=torch.Generator().manual_seed(1)).int()
    got = quant.per_channel_cast_fused(source, "e4m3", n, num_per_channels=channels, pos_to_token=index)
    values, scales = x.numpy(), None
    if channels is not None:
        values = witness.decode(_bytes(source.data), "e4m3")
        scales = witness.expand(source.sf.numpy(), (1, channels), 20, 96)
    masked = index.numpy() < 0
    rows = np.where(masked[:, None], np.float32(0), values[index.numpy()])
    if scales is not None:
        scales = np.where(masked[:, None], np.float32(0), scales[index.numpy()])
    expected, expected_sf = witness.quantize(rows, "e4m3", (n, 1), "plain", 1e-4, scales)
    np.testing.assert_array_equal(got.sf.numpy(), expected_sf)
    np.testing.assert_array_equal(_bytes(got.data), expected)
    assert not _bytes(got.data)[masked].any()


@pytest.mark.parametrize("round_sf", [False, True])
def test_p01_token_0_does_not_enter_the_last_group(round_sf: bool) -> None:
    x = torch.ones(9, 64)
    x[0] = 1e4
    index = torch.ones(144, dtype=torch.int32)
    index[:16] = 0
    sf = quant.per_channel_cast_fused(x, "e4m3", 128, round_sf, pos_to_token=index).sf
    expected = 2.0**-8 if round_sf else float(np.float32(1) / np.float32(448))
    assert sf[1].unique().tolist() == [expected]


@pytest.mark.parametrize(("round_sf", "sf"), [(False, 2.2321428616578487e-07), (True, 2.0**-22)])
@pytest.mark.parametrize("tokens", [0, 5])
def test_masked_groups_get_the_smallest_scale(round_sf: bool, sf: float, tokens: int) -> None:
    index = torch.full((70,), -1, dtype=torch.int32)
    got = quant.per_channel_cast_fused(torch.ones(tokens, 8), "e4m3", 32, round_sf, pos_to_token=index)
    assert got.sf.shape == (3, 8)
    assert got.sf.unique().tolist() == [sf]
    assert _bytes(got.data).max() == 0


def test_an_index_past_the_end_is_refused_or_counts_as_masked() -> None:
    x, index = torch.ones(4, 8), torch.tensor([0, 4, 3, -1], dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match="pos_to_token must be less than T = 4, got 4"):
        quant.per_channel_cast_fused(x, "e4m3", 4, pos_to_token=index)
    data = PER_CHANNEL_CAST_FUSED(x, None, index, 4, 0, False, 1e-4, 4)[0]
    assert data.float().amax(1).tolist() == [448.0, 0.0, 448.0, 0.0]


def test_empty() -> None:
    assert quant.per_channel_cast(torch.zeros(0, 8), "e4m3", 32).sf.shape == (0, 8)
    turned = quant.per_channel_cast_and_transpose(torch.zeros(0, 8), "e4m3", 32)
    assert turned.data.shape == (8, 0)
    assert turned.sf.shape == (0, 8)
    none = torch.zeros(0, dtype=torch.int32)
    assert quant.per_channel_cast_fused(torch.zeros(3, 8), "e4m3", 32, pos_to_token=none).data.shape == (0, 8)


def test_gathered_rows_under_vmap():
    x = torch.randn(3, 5, 16)
    rows = torch.tensor([[0, -1, 4, 2], [1, 1, -1, 0], [3, 2, 1, 0]], dtype=torch.int32)

    def cast(x, rows):
        return tuple(quant.per_channel_cast_fused(x, "e4m3", 2, pos_to_token=rows))

    q, sf = torch.func.vmap(cast)(x, rows)
    for i in range(3):
        want = cast(x[i], rows[i])
        assert torch.equal(q[i].view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(sf[i], want[1])


def test_gathered_rows_of_no_matrix():
    rows = torch.zeros(2, dtype=torch.int32)
    for x in (torch.tensor(1.0), torch.ones(3)):
        with pytest.raises(InvalidArgumentError, match="x must have shape"):
            quant.per_channel_cast_fused(x, "e4m3", 2, pos_to_token=rows)
    for bad in (rows.to(torch.complex64), rows.float(), [0, 1]):
        with pytest.raises(InvalidDtypeError, match="pos_to_token must be"):
            quant.per_channel_cast_fused(torch.ones(3, 4), "e4m3", 2, pos_to_token=bad)
