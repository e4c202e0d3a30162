"""Rows and groups wider than what a vector core works on at once, in every way that the conformance does not reach."""

import pytest
import torch

from tk_ascend.backend import EMULATOR
from tk_ascend.tile.indices import SPAN
from tk_core import quant, registry
from tk_core.reference.scales import quantize

COLUMNS = 2 * SPAN + 1000


def matrix(dtype=torch.bfloat16):
    return torch.randn(2, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)


def back_in_place():
    x = matrix()
    quant.per_token_cast_and_cast_back(x, "e4m3", COLUMNS)
    return (x,)


def odd_group():
    """Groups that end where no packed codes and no random bits do."""
    return quant.per_token_cast(
        matrix(), "e4m3", 4001, round_sf=True, use_packed_ue8m0=True, use_tma_aligned_col_major_sf=True
    )


def several_groups_a_span():
    return quant.per_token_cast(matrix(), "e4m3", 1)


def requantized():
    return quant.per_token_cast(quantize(matrix(), "e4m3", 2, 32, 1e-4), "e2m1", SPAN + 8, (2, 32))


def cast_back():
    return (quant.cast_back(quantize(matrix(), "e4m3", 2, SPAN + 1, 1e-4), "bf16", (2, SPAN + 1)),)


@pytest.mark.parametrize("call", [back_in_place, odd_group, several_groups_a_span, requantized, cast_back])
def test_equals_the_reference(call):
    with registry.use_backend(registry.ReferenceBackend(EMULATOR.layout)):
        expected = call()
    with registry.use_backend(EMULATOR):
        actual = call()
    for e, a in zip(expected, actual, strict=True):
        assert (e.dtype, e.shape, e.stride()) == (a.dtype, a.shape, a.stride())
        assert torch.equal(e.contiguous().view(torch.uint8), a.contiguous().view(torch.uint8))
