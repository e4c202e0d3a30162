"""per_token_cast_to_e5m6: quantization in groups of columns, as in _token_groups."""

from typing import Any

from torch import Tensor

from ..tile import encode
from ._token_groups import quantize


class PerTokenCastToE5m6:
    """``quant.per_token_cast_to_e5m6``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        num_per_channels: int,
        use_tma_aligned_col_major_sf: bool,
        round_sf: bool,
        use_packed_ue8m0: bool,
        clamp_min: float,
        *layout: int,
    ) -> None:
        rounding = encode.ROUNDED if round_sf else encode.PLAIN
        quantize(x, "e5m6", num_per_channels, q=outs[0], sf=outs[1], rounding=rounding, clamp_min=clamp_min)


KERNELS: dict[str, Any] = {"quant.per_token_cast_to_e5m6": PerTokenCastToE5m6()}
