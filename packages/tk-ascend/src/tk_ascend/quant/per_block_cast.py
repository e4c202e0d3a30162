"""per_block_cast and its variants, by the kernel of all casts in blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..tile.blocks import EXACT, GIVEN, ROUNDED
from ._block_cast import block_cast


class PerBlockCast:
    """``quant.per_block_cast``; with one result, ``quant.per_block_cast_with_sf_only``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
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
    ) -> None:
        q = outs[0] if len(outs) > 1 else None
        mode = ROUNDED if round_sf else EXACT
        block_cast(x, q, outs[-1], fmt, (block_rows, block_columns), mode, clamp_min)


class PerBlockCastWithPrecomputedSf:
    """``quant.per_block_cast_with_precomputed_sf``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self, outs: tuple[Tensor, ...], x: Tensor, sf: Tensor, fmt: str, block_rows: int, block_columns: int
    ) -> None:
        block_cast(x, outs[0], sf, fmt, (block_rows, block_columns), GIVEN)


KERNELS: dict[str, Any] = {
    "quant.per_block_cast": PerBlockCast(),
    "quant.per_block_cast_with_sf_only": PerBlockCast(),
    "quant.per_block_cast_with_precomputed_sf": PerBlockCastWithPrecomputedSf(),
}
