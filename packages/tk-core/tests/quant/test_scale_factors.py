"""Scales: values against exact arithmetic, layouts against worked examples, non-finite blocks, the clamp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from cast_witness import scale
from torch import Tensor

import tk_core
from tk_core import InvalidArgumentError, quant
from tk_core.backend import Layout
from tk_core.formats import AMAX_CLAMP_DEFAULT, FORMATS, whole_storage
from tk_core.quant.amax_clamp import reset_amax_clamp_for_quant
from tk_core.reference.scales import block_scales
from tk_core.registry import ReferenceBackend

NARROW = ReferenceBackend(Layout(ue8m0_per_word=2, sf_align_bytes=0))
"""The reference with two scale bytes in a word and no padding."""


@pytest.fixture
def clamp() -> Iterator[Callable[[str, bool, float], None]]:
    yield quant.set_amax_clamp_for_quant
    reset_amax_clamp_for_quant()


def _amaxes(qmax: float) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    random = torch.randint(1, 0x7F7FFFFF, (20000,), generator=generator).to(torch.int32).view(torch.float32)
    around = torch.tensor([qmax * 2.0**n for n in range(-130, 118)])
    tops = torch.cat((around, around.nextafter(torch.tensor(0.0)), around.nextafter(torch.tensor(math.inf))))
    amaxes = torch.cat((random, tops, torch.tensor([2.0**-149, torch.finfo(torch.float32).max])))
    return amaxes[amaxes.isfinite()]


@pytest.mark.parametrize(
    ("fmt", "mode"),
    [(f, m) for f in ("e4m3", "e2m1", "e5m6") for m in ("plain", "round", "e4m3") if (f, m) != ("e5m6", "e4m3")],
)
def test_scales_equal_exact_arithmetic(fmt: str, mode: str) -> None:
    floor = FORMATS[fmt].qmax * (2.0**-9 if mode == "e4m3" else 2.0**-126)
    amaxes = _amaxes(FORMATS[fmt].qmax)
    got = block_scales(amaxes, FORMATS[fmt].qmax, floor, mode == "round", mode == "e4m3")
    expected = np.array([scale(np.float32(a), fmt, floor, mode) for a in amaxes.numpy()])
    np.testing.assert_array_equal(got[0].numpy(), expected[:, 0])
    np.testing.assert_array_equal(got[1].numpy(), expected[:, 1])


@pytest.mark.parametrize(
    ("amax", "byte"),
    [(0.43750003, 118), (448.0, 0x7F), (449.0, 0x80), (896.0, 0x80), (224.0, 0x7E), (448.4375, 0x80)],
)
def test_round_up_is_exact_beside_powers_of_two(amax: float, byte: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 7] = -amax
    sf = quant.per_token_cast(x, "e4m3", 32, round_sf=True, use_packed_ue8m0=True).sf
    assert sf.view(torch.uint8).tolist() == [[byte, 0, 0, 0]]
    assert quant.per_token_cast(x, "e4m3", 32, round_sf=True).sf.item() == 2.0 ** (byte - 127)


def test_requantized_amax_stays_in_fp32() -> None:
    data = torch.zeros(1, 32).to(torch.float8_e4m3fn)
    data[0, 0] = 448.0
    x = data, torch.full((1, 1), 1.0009766)
    q, sf = quant.per_token_cast(x, "e4m3", 32, (1, 32), round_sf=True, use_packed_ue8m0=True)
    assert sf.view(torch.uint8)[0, 0] == 0x80
    assert q.float()[0, 0] == 224.0


# ---------------------------------------------------------------------- zero blocks and the clamp


@pytest.mark.parametrize(
    ("fmt", "flags", "sf"),
    [
        ("e4m3", {}, 2.2321428616578487e-07),
        ("e4m3", {"round_sf": True}, 2.0**-22),
        ("e2m1", {}, 2.0**-126),
        ("e2m1", {"round_sf": True}, 2.0**-126),
        ("e4m3", {"use_e4m3_sf": True}, 2.0**-9),
        ("e2m1", {"use_e4m3_sf": True}, 2.0**-9),
    ],
)
def test_zero_blocks(fmt: str, flags: dict[str, bool], sf: float) -> None:
    x = torch.zeros(2, 256)
    x[1] = -0.0
    q = quant.per_token_cast(x, fmt, 32, **flags)
    assert q.sf.float().unique().tolist() == [sf]
    assert q.data.view(torch.uint8)[0].unique().tolist() == [0]
    assert q.data.view(torch.uint8)[1].unique().tolist() == [0x80 if fmt == "e4m3" else 0x88]
    assert quant.per_token_cast_back(q, "fp32", 32).tolist() == [[0.0] * 256] * 2
    if "round_sf" in flags:
        packed = quant.per_token_cast(x, fmt, 32, use_packed_ue8m0=True, **flags).sf
        assert packed.view(torch.uint8).unique().tolist() == [105 if fmt == "e4m3" else 1]


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("flags", [{}, {"round_sf": True}, {"use_e4m3_sf": True}])
def test_clamp_of_zero_gives_scale_zero(fmt: str, flags: dict[str, bool], clamp: Callable[..., None]) -> None:
    clamp(fmt, "use_e4m3_sf" in flags, 0.0)
    q = quant.per_token_cast(torch.zeros(2, 64), fmt, 32, **flags)
    assert q.sf.float().unique().tolist() == [0.0]
    assert q.data.view(torch.uint8).unique().tolist() == [0]
    assert quant.per_token_cast_back(q, "fp32", 32).unique().tolist() == [0.0]
    x = torch.tensor([[0.0, -0.0, 2.0**-140, -(2.0**-149)]])
    back = quant.per_token_cast_back(quant.per_token_cast(x, fmt, 4, **flags), "fp32", 4)
    assert not back.isnan().any()


def test_clamp_is_used_by_every_cast_that_makes_scales(clamp: Callable[..., None]) -> None:
    clamp("e4m3", False, 1e6)
    x = torch.randn(32, 128, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    expected = float(np.float32(1e6) / np.float32(448))
    made = [
        quant.per_token_cast(x, "e4m3", 32).sf,
        quant.per_token_cast_with_sf_only(x, "e4m3", 32),
        quant.per_block_cast(x, "e4m3", (32, 32)).sf,
        quant.per_block_cast_with_sf_only(x, "e4m3", (32, 32)),
        quant.per_channel_cast(x, "e4m3", 32).sf,
        quant.per_channel_cast_fused(x, "e4m3", 32).sf,
        quant.per_channel_cast_and_transpose(x, "e4m3", 32).sf,
    ]
    for sf in made:
        assert sf.unique().tolist() == [expected]
    y = x.clone()
    quant.per_token_cast_and_cast_back(y, "e4m3", 32)
    assert torch.equal(y, quant.per_token_cast_back(quant.per_token_cast(x, "e4m3", 32), "bf16", 32))


def test_clamp_setting(clamp: Callable[..., None]) -> None:
    for (fmt, e4m3_sf), value in AMAX_CLAMP_DEFAULT.items():
        assert quant.get_amax_clamp_for_quant(fmt, e4m3_sf) == value
    clamp("e2m1", True, 3.0)
    assert quant.get_amax_clamp_for_quant("e2m1", True) == 3.0
    assert quant.get_amax_clamp_for_quant("e2m1", False) == 6.0 * 2.0**-126
    for fmt, value in (("e5m6", 1.0), ("e4m3", -1.0), ("e4m3", math.nan), ("e4m3", math.inf)):
        with pytest.raises(InvalidArgumentError):
            clamp(fmt, False, value)


# ---------------------------------------------------------------------- non-finite blocks


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_non_finite_value_makes_its_scale_nan(bad: float, fmt: str, dtype: torch.dtype) -> None:
    x = torch.ones(3, 96, dtype=dtype)
    x[1, 40] = bad
    for flags in ({}, {"round_sf": True}, {"use_e4m3_sf": True}):
        q = quant.per_token_cast(x, fmt, 32, **flags)
        assert q.sf.float().isnan().tolist() == [[False] * 3, [False, True, False], [False] * 3]
        back = quant.per_token_cast_back(q, "fp32", 32)
        assert back[1, 32:64].isnan().all()
        assert int(back.isnan().sum()) == 32
        y = x.clone()
        quant.per_token_cast_and_cast_back(y, fmt, 32, **flags)
        assert torch.equal(y.isnan(), back.isnan())
    packed = quant.per_token_cast(x, fmt, 32, round_sf=True, use_packed_ue8m0=True).sf
    assert packed.view(torch.uint8)[1, 1] == 255
    assert quant.per_token_cast(x, fmt, 32, use_e4m3_sf=True).sf.view(torch.uint8)[1, 1] == 0x7F


@pytest.mark.parametrize("round_sf", [False, True])
def test_non_finite_values_in_other_casts(round_sf: bool) -> None:
    x = torch.ones(64, 64)
    x[3, 5] = math.inf
    assert int(quant.per_block_cast(x, "e2m1", (32, 32), round_sf=round_sf).sf.isnan().sum()) == 1
    column = quant.per_channel_cast(x, "e4m3", 32, round_sf).sf
    assert column.isnan().nonzero().tolist() == [[0, 5]]
    assert torch.equal(quant.per_channel_cast_and_transpose(x, "e4m3", 32, round_sf).sf.isnan(), column.isnan())
    assert torch.equal(quant.per_channel_cast_fused(x, "e4m3", 32, round_sf).sf.isnan(), column.isnan())
    assert int(quant.per_token_cast_to_e5m6(x, 64, round_sf=round_sf).sf.isnan().sum()) == 1


# ---------------------------------------------------------------------- layouts


def _example() -> Tensor:
    """Two rows of six groups of 32: scale 2**g in row 0, 2**(10 + g) in row 1."""
    exponents = torch.arange(6.0).repeat(2, 1) + torch.tensor([[0.0], [10.0]])
    return (448.0 * torch.exp2(exponents)).repeat_interleave(32, dim=1)


def _hex(words: Tensor) -> list[list[str]]:
    width = words.element_size() * 2
    return [[f"{int(w) & (1 << 4 * width) - 1:0{width}X}" for w in row] for row in words]


MX = {"round_sf": True, "use_packed_ue8m0": True}


def test_packed_example_four_bytes_in_a_word() -> None:
    row = quant.per_token_cast(_example(), "e4m3", 32, **MX).sf
    assert row.dtype == torch.int32
    assert row.stride() == (2, 1)
    assert _hex(row) == [["8281807F", "00008483"], ["8C8B8A89", "00008E8D"]]
    column = quant.per_token_cast(_example(), "e4m3", 32, use_tma_aligned_col_major_sf=True, **MX).sf
    assert column.stride() == (1, 4)
    assert torch.equal(column, row)
    assert _hex(whole_storage(column)) == [
        ["8281807F", "8C8B8A89", "00000000", "00000000"],
        ["00008483", "00008E8D", "00000000", "00000000"],
    ]


def test_packed_example_two_bytes_in_a_word() -> None:
    with tk_core.use_backend(NARROW):
        row = quant.per_token_cast(_example(), "e4m3", 32, **MX).sf
        column = quant.per_token_cast(_example(), "e4m3", 32, use_tma_aligned_col_major_sf=True, **MX).sf
    assert row.dtype == torch.int16
    assert row.stride() == (3, 1)
    assert column.stride() == (1, 2)
    assert _hex(row) == _hex(column) == [["807F", "8281", "8483"], ["8A89", "8C8B", "8E8D"]]


def test_packed_along_the_rows_example() -> None:
    exponents = torch.arange(6.0)[:, None] + 10 * torch.arange(4.0)
    x = (448.0 * torch.exp2(exponents)).repeat_interleave(32, dim=0)
    expected = [["8281807F", "8C8B8A89", "96959493", "A09F9E9D"], ["00008483", "00008E8D", "00009897", "0000A2A1"]]
    for made in (
        quant.per_channel_cast(x, "e4m3", 32, True, use_packed_ue8m0=True),
        quant.per_block_cast(x, "e4m3", (32, 1), **MX),
    ):
        assert _hex(made.sf) == expected
        assert made.sf.stride() == (4, 1)
        assert torch.equal(quant.cast_back(made, "fp32", (32, 1)), x)
    with tk_core.use_backend(NARROW):
        sf = quant.per_channel_cast(x[:96], "e4m3", 32, True, use_packed_ue8m0=True).sf
    assert _hex(sf) == [["807F", "8A89", "9493", "9E9D"], ["0081", "008B", "0095", "009F"]]


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 4001])
def test_column_major_shapes_strides_and_zero_padding(rows: int) -> None:
    x = torch.randn(rows, 576, generator=torch.Generator().manual_seed(0))
    for flags, dtype, unit, columns in (
        ({}, torch.float32, 4, 5),
        (MX, torch.int32, 4, 2),
        ({"use_e4m3_sf": True}, torch.float8_e4m3fn, 16, 5),
    ):
        sf = quant.per_token_cast(x, "e4m3", 128, use_tma_aligned_col_major_sf=True, **flags).sf
        padded = -(-rows // unit) * unit
        assert sf.dtype == dtype
        assert sf.shape == (rows, columns)
        assert sf.stride() == (1, padded)
        if rows:
            assert whole_storage(sf)[:, rows:].contiguous().view(torch.uint8).eq(0).all()
            assert torch.equal(
                sf.contiguous().view(torch.uint8),
                quant.per_token_cast(x, "e4m3", 128, **flags).sf.view(torch.uint8),
            )


def test_q07_scales_in_any_strides_are_read_alike() -> None:
    x = torch.randn(5, 640, generator=torch.Generator().manual_seed(0))
    q = quant.per_token_cast(x, "e4m3", 128, use_tma_aligned_col_major_sf=True, **MX)
    assert q.sf.shape == (5, 2)
    assert q.sf.stride() == (1, 8)
    assert q.sf.view(torch.int32)[0, 1] < 256
    wide = torch.full((5, 7), -1, dtype=torch.int32)
    wide[:, :2] = q.sf
    same = [quant.QuantTensor(q.data, sf) for sf in (q.sf, q.sf.contiguous(), wide[:, :2])]
    backs = [quant.per_token_cast_back(s, "fp32", 128) for s in same]
    requantized = [quant.per_token_cast(s, "e2m1", 32, (1, 128)) for s in same]
    for back, made in zip(backs[1:], requantized[1:]):
        assert torch.equal(back, backs[0])
        assert torch.equal(made.data, requantized[0].data)
        assert torch.equal(made.sf, requantized[0].sf)
    one = quant.QuantTensor(q.data[:1], q.sf[:1])
    assert torch.equal(quant.per_token_cast_back(one, "fp32", 128), backs[0][:1])
