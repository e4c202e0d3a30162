"""CUDA kernel of ``quant.per_channel_cast_and_transpose``: the transposing form of ``quant.per_channel_cast``."""

from __future__ import annotations

from torch import Tensor

from .per_channel_cast import launch


class PerChannelCastAndTranspose:
    """One scale per column of a block of rows; the data transposed, the scales not."""

    revision = 1

    def refusal(self, x: Tensor, num_per_tokens: int, round_sf: bool, clamp_min: float) -> str | None:
        return None

    def __call__(
        self, outs: tuple[Tensor, ...], x: Tensor, num_per_tokens: int, round_sf: bool, clamp_min: float
    ) -> None:
        launch(outs, x, None, None, num_per_tokens, 0, round_sf, False, True, clamp_min)


KERNELS = {"quant.per_channel_cast_and_transpose": PerChannelCastAndTranspose()}
