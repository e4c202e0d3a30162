"""per_channel_cast, by the kernel of all casts in blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..tile.blocks import EXACT, ROUNDED
from ._block_cast import block_cast


class PerChannelCast:
    """``quant.per_channel_cast``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        x_sf: Tensor | None,
        num_per_tokens: int,
        num_per_channels: int,
        round_sf: bool,
        use_packed_ue8m0: bool,
        clamp_min: float,
        ue8m0_per_word: int,
    ) -> None:
        q, sf = outs
        mode = ROUNDED if round_sf else EXACT
        block_cast(x, q, sf, "e4m3", (num_per_tokens, 1), mode, clamp_min, x_sf=x_sf, group=num_per_channels)


KERNELS: dict[str, Any] = {"quant.per_channel_cast": PerChannelCast()}
