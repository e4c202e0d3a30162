"""CUDA kernel of ``quant.per_token_cast_and_cast_back``: :mod:`.per_token_cast`, decoded again in place."""

from __future__ import annotations

from torch import Tensor

from ..tile import access
from .per_token_cast import launcher, mode_of


class PerTokenCastAndCastBack:
    """Quantize and dequantize in place."""

    revision = 1

    def refusal(
        self, x: Tensor, fmt: str, num_per_channels: int, round_sf: bool, use_e4m3_sf: bool, clamp_min: float
    ) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        fmt: str,
        num_per_channels: int,
        round_sf: bool,
        use_e4m3_sf: bool,
        clamp_min: float,
    ) -> None:
        x = access.unit_columns(x)
        launch = launcher("back", x, None, None, fmt, num_per_channels, mode_of(round_sf, use_e4m3_sf))
        launch(x, clamp_min)


KERNELS = {"quant.per_token_cast_and_cast_back": PerTokenCastAndCastBack()}
