"""Reference of quant.per_channel_cast_fused."""

from __future__ import annotations

from torch import Tensor

from ..codes import decode
from ..scales import element_scales, quantize


def per_channel_cast_fused(
    x: Tensor,
    x_sf: Tensor | None,
    pos_to_token: Tensor | None,
    num_per_tokens: int,
    num_per_channels: int,
    round_sf: bool,
    clamp_min: float,
    ue8m0_per_word: int,
) -> tuple[Tensor, Tensor]:
    if x_sf is not None:
        x = decode(x)
        x_sf = element_scales(x_sf, 1, num_per_channels, *x.shape)
    if pos_to_token is not None:
        x = _gather(x, pos_to_token)
        x_sf = None if x_sf is None else _gather(x_sf, pos_to_token)
    return quantize(x, "e4m3", num_per_tokens, 1, clamp_min, round_sf, x_sf=x_sf)


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """Rows by index; zeros where the index is out of range."""
    exists = (index >= 0) & (index < rows.shape[0])
    return rows[index.clamp(0, rows.shape[0] - 1).long()].masked_fill(~exists[:, None], 0.0)


REFERENCES = {"quant.per_channel_cast_fused": per_channel_cast_fused}
