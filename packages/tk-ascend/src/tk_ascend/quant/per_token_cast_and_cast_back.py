"""per_token_cast_and_cast_back: quantization in groups of columns, as in _token_groups, and back to values."""

from typing import Any

from torch import Tensor

from ..tile import encode
from ._token_groups import quantize


class PerTokenCastAndCastBack:
    """``quant.per_token_cast_and_cast_back``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
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
        rounding = encode.ROUNDED if round_sf else encode.E4M3 if use_e4m3_sf else encode.PLAIN
        quantize(x, fmt, num_per_channels, q=x, rounding=rounding, clamp_min=clamp_min)


KERNELS: dict[str, Any] = {"quant.per_token_cast_and_cast_back": PerTokenCastAndCastBack()}
