"""Reference of quant.per_token_cast_and_cast_back."""

from __future__ import annotations

from torch import Tensor

from ..scales import dequantize, quantize


def per_token_cast_and_cast_back(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool, use_e4m3_sf: bool, clamp_min: float
) -> None:
    q, sf = quantize(x, fmt, 1, num_per_channels, clamp_min, round_sf, use_e4m3_sf)
    x.copy_(dequantize(q, sf, 1, num_per_channels))


REFERENCES = {"quant.per_token_cast_and_cast_back": per_token_cast_and_cast_back}
