"""quant.cast to nearest, against ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from tk_core import InvalidArgumentError, quant

DTYPES = {
    torch.float32: np.float32,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
}


@pytest.mark.parametrize("source", list(DTYPES))
@pytest.mark.parametrize("target", list(DTYPES))
def test_every_pair(source: torch.dtype, target: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (50_000,), generator=generator).to(torch.int32).view(torch.float32)
    near = torch.randn(50_000, generator=generator) * 100
    x = torch.cat((bits[bits.isfinite()], near))
    x = (x.clamp(-448, 448) if source == torch.float8_e4m3fn else x).to(source)
    wide = x.float().numpy()
    if target == torch.float8_e4m3fn:
        wide = np.clip(wide, -448, 448)
    with np.errstate(over="ignore"):
        expected = wide.astype(DTYPES[target])
    got = quant.cast(x, target)
    np.testing.assert_array_equal(got.view(torch.uint8).numpy(), expected.view(np.uint8))


def test_specials() -> None:
    x = torch.tensor([math.inf, -math.inf, 1e30, 464.0, -0.0, 3.4e38])
    assert quant.cast(x, torch.float8_e4m3fn).float().tolist() == [448.0, -448.0, 448.0, 448.0, 0.0, 448.0]
    assert quant.cast(x, torch.bfloat16).float()[[0, 1, 5]].tolist() == [math.inf, -math.inf, math.inf]
    assert quant.cast(torch.tensor([math.nan]), torch.float8_e4m3fn).float().isnan().all()


def test_shapes_and_new_tensors() -> None:
    x = torch.randn(3, 5, 7)
    y = quant.cast(x, torch.float32)
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()
    assert quant.cast(x[0, 0, 0], torch.bfloat16).shape == ()
    assert quant.cast(x[:0], torch.bfloat16, True).shape == (0, 5, 7)
    with pytest.raises(InvalidArgumentError, match="x must be contiguous, got shape"):
        quant.cast(x.transpose(0, 1), torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="stochastic_rounding must be used only from"):
        quant.cast(x.bfloat16(), torch.bfloat16, True)
