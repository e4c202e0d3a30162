"""Reference of quant.per_token_cast and its variants."""

from __future__ import annotations

from torch import Tensor

from ...formats import FORMATS
from ..codes import decode
from ..scales import block_amax, block_scales, element_scales, quantize, quantize_with, store_scales


def per_token_cast(
    x: Tensor,
    x_sf: Tensor | None,
    fmt: str,
    num_per_channels: int,
    x_block_rows: int,
    x_block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_e4m3_sf: bool,
    stochastic_cast: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[Tensor, Tensor]:
    if x_sf is not None:
        x = decode(x)
        x_sf = element_scales(x_sf, x_block_rows, x_block_columns, *x.shape)
    q, sf = quantize(x, fmt, 1, num_per_channels, clamp_min, round_sf, use_e4m3_sf, x_sf, stochastic_cast)
    return q, store_scales(sf, use_packed_ue8m0, use_e4m3_sf, ue8m0_per_word=ue8m0_per_word)


def per_token_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_e4m3_sf: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> Tensor:
    amax = block_amax(x.float(), 1, num_per_channels)
    sf = block_scales(amax, FORMATS[fmt].qmax, clamp_min, round_sf, use_e4m3_sf)[0]
    return store_scales(sf, use_packed_ue8m0, use_e4m3_sf, ue8m0_per_word=ue8m0_per_word)


def per_token_cast_with_precomputed_sf(x: Tensor, sf: Tensor, fmt: str, num_per_channels: int) -> Tensor:
    return quantize_with(x, fmt, 1, num_per_channels, sf)


REFERENCES = {
    "quant.per_token_cast": per_token_cast,
    "quant.per_token_cast_with_sf_only": per_token_cast_with_sf_only,
    "quant.per_token_cast_with_precomputed_sf": per_token_cast_with_precomputed_sf,
}
