"""Scales that are not powers of two, where a kernel must write NaN: values on a device are not looked at."""

from __future__ import annotations

import math

import pytest
import torch

from tk_ascend.backend import EMULATOR
from tk_core import InvalidArgumentError, use_backend
from tk_core.quant import per_block_cast_lossless
from tk_core.quant.batched_transpose_weight_sf import BATCHED_TRANSPOSE_WEIGHT_SF


@pytest.mark.parametrize("bad", [3.0, -2.0, math.nan, 2.0**-127])
def test_a_scale_that_no_byte_can_hold_is_nan_and_never_truncated(bad: float) -> None:
    """The mantissa of 3.0 was dropped, which made it 2.0."""
    sf = torch.ones(4, 4)
    sf[1, 2] = bad
    per_word = EMULATOR.layout.ue8m0_per_word
    with use_backend(EMULATOR):
        sf0, sf1 = BATCHED_TRANSPOSE_WEIGHT_SF([sf], 32, [False], per_word)
    assert sf0[32].contiguous().view(torch.uint8).tolist() == [127, 127, 255, 127]
    assert sf1[64].contiguous().view(torch.uint8).tolist() == [127, 255, 127, 127]


@pytest.mark.parametrize("bad", [3.0, -2.0, math.nan, 2.0**-127])
def test_a_lossless_block_of_another_scale_is_nan(bad: float) -> None:
    """The interface finds such scales in the kernel's result."""
    sf = torch.ones(4, 2)
    sf[1, 1] = bad
    with use_backend(EMULATOR), pytest.raises(InvalidArgumentError, match="others in 1 of the output blocks"):
        per_block_cast_lossless((torch.zeros(4, 32, dtype=torch.int8), sf), "e4m3", (1, 32), (1, 64))
