"""Reference of quant.per_block_cast and its variants."""

from __future__ import annotations

from torch import Tensor

from ...formats import FORMATS
from ..scales import block_amax, block_scales, quantize, quantize_with, store_scales


def per_block_cast(
    x: Tensor,
    fmt: str,
    block_rows: int,
    block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[Tensor, Tensor]:
    q, sf = quantize(x, fmt, block_rows, block_columns, clamp_min, round_sf)
    return q, store_scales(sf, use_packed_ue8m0, pack_rows=block_columns == 1, ue8m0_per_word=ue8m0_per_word)


def per_block_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    block_rows: int,
    block_columns: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> Tensor:
    amax = block_amax(x.float(), block_rows, block_columns)
    sf = block_scales(amax, FORMATS[fmt].qmax, clamp_min, round_sf)[0]
    return store_scales(sf, use_packed_ue8m0, pack_rows=block_columns == 1, ue8m0_per_word=ue8m0_per_word)


def per_block_cast_with_precomputed_sf(x: Tensor, sf: Tensor, fmt: str, block_rows: int, block_columns: int) -> Tensor:
    return quantize_with(x, fmt, block_rows, block_columns, sf)


REFERENCES = {
    "quant.per_block_cast": per_block_cast,
    "quant.per_block_cast_with_sf_only": per_block_cast_with_sf_only,
    "quant.per_block_cast_with_precomputed_sf": per_block_cast_with_precomputed_sf,
}
