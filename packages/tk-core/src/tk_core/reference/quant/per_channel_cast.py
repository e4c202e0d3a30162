"""Reference of quant.per_channel_cast."""

from __future__ import annotations

from torch import Tensor

from ..codes import decode
from ..scales import element_scales, quantize, store_scales


def per_channel_cast(
    x: Tensor,
    x_sf: Tensor | None,
    num_per_tokens: int,
    num_per_channels: int,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
) -> tuple[Tensor, Tensor]:
    if x_sf is not None:
        x = decode(x)
        x_sf = element_scales(x_sf, 1, num_per_channels, *x.shape)
    q, sf = quantize(x, "e4m3", num_per_tokens, 1, clamp_min, round_sf, x_sf=x_sf)
    return q, store_scales(sf, use_packed_ue8m0, pack_rows=True, ue8m0_per_word=ue8m0_per_word)


REFERENCES = {"quant.per_channel_cast": per_channel_cast}
