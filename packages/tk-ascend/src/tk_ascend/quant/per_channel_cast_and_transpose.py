"""per_channel_cast_and_transpose, by the kernel of all casts in blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..tile.blocks import EXACT, ROUNDED
from ._block_cast import block_cast


class PerChannelCastAndTranspose:
    """``quant.per_channel_cast_and_transpose``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self, outs: tuple[Tensor, ...], x: Tensor, num_per_tokens: int, round_sf: bool, clamp_min: float
    ) -> None:
        q, sf = outs
        mode = ROUNDED if round_sf else EXACT
        block_cast(x, q, sf, "e4m3", (num_per_tokens, 1), mode, clamp_min, transposed=True)


KERNELS: dict[str, Any] = {"quant.per_channel_cast_and_transpose": PerChannelCastAndTranspose()}
