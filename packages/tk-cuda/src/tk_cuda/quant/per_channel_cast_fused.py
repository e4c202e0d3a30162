"""CUDA kernel of ``quant.per_channel_cast_fused``: that of ``quant.per_channel_cast``, over rows picked by an index."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tk_core.backend import Refused

from .per_channel_cast import launch, refuse_words


class PerChannelCastFused:
    """One scale per column of a block of gathered rows."""

    revision = 1

    def refusal(
        self,
        x: Tensor,
        x_sf: Tensor | None,
        pos_to_token: Tensor | None,
        num_per_tokens: int,
        num_per_channels: int,
        round_sf: bool,
        clamp_min: float,
        ue8m0_per_word: int,
    ) -> str | None:
        return refuse_words(ue8m0_per_word, x_sf is not None and not x_sf.is_floating_point())

    def __call__(self, outs: tuple[Tensor, ...], *args: Any) -> None:
        x, x_sf, pos_to_token, num_per_tokens, num_per_channels, rounded, clamp_min, _ = args
        reason = self.refusal(*args)
        if reason is not None:
            raise Refused(reason)
        launch(outs, x, x_sf, pos_to_token, num_per_tokens, num_per_channels, rounded, False, False, clamp_min)


KERNELS = {"quant.per_channel_cast_fused": PerChannelCastFused()}
