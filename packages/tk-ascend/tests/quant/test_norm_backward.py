"""More rows than the weight's gradient has parts of one tile, which no quick sample has."""

from __future__ import annotations

import pytest
import torch

import tk_core
from tk_core.quant import norm_backward


@pytest.mark.parametrize(("rows", "channels"), [(513, 40), (1100, 8)])
def test_parts_of_several_tiles(rows: int, channels: int) -> None:
    x, out_grad = torch.randn(rows, channels), torch.randn(rows, channels)
    weight, rstd = torch.randn(channels), torch.rand(rows) + 0.5
    expected = norm_backward(out_grad, x, weight, rstd)
    with tk_core.use_backend("ascend-emulator"):
        actual = norm_backward(out_grad, x, weight, rstd)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-4)
