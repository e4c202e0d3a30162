"""Groups wider than the usual tile of SwiGLU and of the norm, and than any tile: the conformance has none."""

import pytest
import torch

from tk_ascend.backend import EMULATOR
from tk_ascend.tile.groups import TILES
from tk_core import quant, registry

ONE_TILE = TILES[-1][1] // 4
PACKED = {"round_sf": True, "use_packed_ue8m0": True, "use_tma_aligned_col_major_sf": True}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def swiglu(channels, group, **options):
    return quant.swiglu_forward_and_per_token_cast(random(3, 2 * channels), "e4m3", group, **options)


def swiglu_backward(channels, group, **options):
    data, sf = random(3, 2 * channels).to(torch.float8_e4m3fn), random(3, 2 * channels // group, seed=2).float().abs()
    x_grad, (q, scales) = quant.swiglu_backward_and_per_token_cast(
        (data, sf), random(3, channels, seed=1), "e4m3", group, **options
    )
    return x_grad, q, scales


def norm(channels, group, **options):
    """Of numbers whose mean square is 1 in any order of the sum."""
    x = random(2, 3, channels).sign()
    (q, sf), out, _, _ = quant.norm_forward_and_per_token_cast(
        x, random(channels, seed=1), 0.0, "e4m3", group, with_out_bf16=True, **options
    )
    return q, sf, out


CALLS = {
    "a gradient in one wide tile": lambda: swiglu_backward(ONE_TILE, ONE_TILE // 2, **PACKED),
    "SwiGLU in one wide tile": lambda: swiglu(ONE_TILE + 200, ONE_TILE // 2, **PACKED),
    "SwiGLU past any tile": lambda: swiglu(TILES[-1][1] + 100, TILES[-1][1] + 8),
    "a norm past any tile": lambda: norm(TILES[-1][1] + 100, TILES[-1][1] + 8, **PACKED),
}


@pytest.mark.parametrize("why", CALLS)
def test_equals_the_reference(why):
    with registry.use_backend(registry.ReferenceBackend(EMULATOR.layout)):
        expected = CALLS[why]()
    with registry.use_backend(EMULATOR):
        actual = CALLS[why]()
    for e, a in zip(expected, actual, strict=True):
        assert (e.dtype, e.shape, e.stride()) == (a.dtype, a.shape, a.stride())
        assert torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (e, a)))
