"""swiglu_forward_and_per_channel_cast_and_transpose, by the kernel of all casts in blocks.

Bytes: x once in, codes and scales once out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..tile.blocks import EXACT, ROUNDED
from ._block_cast import block_cast


class SwigluForwardAndPerChannelCastAndTranspose:
    """``quant.swiglu_forward_and_per_channel_cast_and_transpose``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        fmt: str,
        num_per_tokens: int,
        round_sf: bool,
        without_transpose: bool,
        clamp_value: float | None,
        clamp_min: float,
    ) -> None:
        q, sf = outs
        block_cast(
            x,
            q,
            sf,
            fmt,
            (num_per_tokens, 1),
            ROUNDED if round_sf else EXACT,
            clamp_min,
            transposed=not without_transpose,
            swiglu=True,
            limit=clamp_value,
        )


KERNELS: dict[str, Any] = {
    "quant.swiglu_forward_and_per_channel_cast_and_transpose": SwigluForwardAndPerChannelCastAndTranspose()
}
