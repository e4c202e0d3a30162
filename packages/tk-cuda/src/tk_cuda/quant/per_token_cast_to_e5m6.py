"""CUDA kernel of ``quant.per_token_cast_to_e5m6``: groups of any size, mostly whole rows (:mod:`._row_chunks`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tk_core.backend import Refused

from ..tile import access
from .per_token_cast import launcher, mode_of, refuse_words, stored_scales


class PerTokenCastToE5m6:
    """Data and scales."""

    revision = 1

    def refusal(
        self,
        x: Tensor,
        num_per_channels: int,
        use_tma_aligned_col_major_sf: bool,
        round_sf: bool,
        use_packed_ue8m0: bool,
        clamp_min: float,
        ue8m0_per_word: int,
        sf_align_bytes: int,
    ) -> str | None:
        return refuse_words(use_packed_ue8m0, ue8m0_per_word)

    def __call__(self, outs: tuple[Tensor, ...], *args: Any) -> None:
        x, group, padded, round_sf, packed, clamp, _, _ = args
        reason = self.refusal(*args)
        if reason is not None:
            raise Refused(reason)
        x = access.unit_columns(x)
        launch = launcher("all", x, None, outs[0], "e5m6", group, mode_of(round_sf, False), packed, padded)
        launch(x, outs[0], stored_scales(outs[1], padded), clamp)


KERNELS = {"quant.per_token_cast_to_e5m6": PerTokenCastToE5m6()}
