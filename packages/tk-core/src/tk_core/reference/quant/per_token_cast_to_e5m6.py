"""Reference of quant.per_token_cast_to_e5m6."""

from __future__ import annotations

from torch import Tensor

from ..scales import quantize, store_scales


def per_token_cast_to_e5m6(
    x: Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[Tensor, Tensor]:
    q, sf = quantize(x, "e5m6", 1, num_per_channels, clamp_min, round_sf)
    return q, store_scales(sf, use_packed_ue8m0, ue8m0_per_word=ue8m0_per_word)


REFERENCES = {"quant.per_token_cast_to_e5m6": per_token_cast_to_e5m6}
