"""Reference of quant.per_channel_cast_and_transpose."""

from __future__ import annotations

from torch import Tensor

from ..scales import quantize


def per_channel_cast_and_transpose(
    x: Tensor, num_per_tokens: int, round_sf: bool, clamp_min: float
) -> tuple[Tensor, Tensor]:
    q, sf = quantize(x, "e4m3", num_per_tokens, 1, clamp_min, round_sf)
    return q.t().contiguous(), sf


REFERENCES = {"quant.per_channel_cast_and_transpose": per_channel_cast_and_transpose}
