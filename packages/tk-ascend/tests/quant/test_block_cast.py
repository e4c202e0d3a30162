"""Blocks that are larger than a tile of UB, which the operators' cases, being quick, do not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tk_ascend.backend import EMULATOR, LAYOUT
from tk_core import quant, registry

PACKED = {"round_sf": True, "use_packed_ue8m0": True}


def equal_to_reference(operator: Any, *args: Any, **flags: Any) -> None:
    with registry.use_backend(registry.ReferenceBackend(LAYOUT)):
        expected = operator(*args, **flags)
    with registry.use_backend(EMULATOR):
        actual = operator(*args, **flags)
    for e, a in zip(expected, actual, strict=True):
        assert e.stride() == a.stride()
        if e.dtype.itemsize == 1:
            e, a = e.view(torch.uint8), a.view(torch.uint8)
        torch.testing.assert_close(a, e, rtol=0, atol=0)


@pytest.mark.parametrize("block", [(200, 48), (30, 300), (150, 333), (1000, 1000)])
@pytest.mark.parametrize("flags", [{}, PACKED], ids=["exact", "packed"])
def test_blocks_in_both_directions(block: tuple[int, int], flags: dict[str, bool]) -> None:
    x = torch.randn(321, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    equal_to_reference(quant.per_block_cast, x, "e4m3", block, **flags)


def test_given_scales() -> None:
    x = torch.randn(321, 640, generator=torch.Generator().manual_seed(1)).bfloat16()
    sf = torch.rand(2, 2, generator=torch.Generator().manual_seed(2)) + 0.5

    def cast(*args: Any) -> tuple[torch.Tensor]:
        return (quant.per_block_cast_with_precomputed_sf(*args),)

    equal_to_reference(cast, x, "e4m3", (200, 320), sf)


@pytest.mark.parametrize("outer", [(256, 64), (32, 512), (320, 704)])
@pytest.mark.parametrize("flags", [{}, PACKED], ids=["float", "packed"])
def test_lossless(outer: tuple[int, int], flags: dict[str, bool]) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-128, 128, (310, 350), dtype=torch.int8, generator=generator)
    exponents = torch.randint(-5, 6, (310, 22), generator=generator)
    x = codes, torch.exp2(exponents.float())
    equal_to_reference(quant.per_block_cast_lossless, x, "e4m3", (1, 32), outer, **flags)
