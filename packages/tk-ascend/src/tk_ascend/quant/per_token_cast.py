"""per_token_cast and its variants: quantization in groups of columns, as in _token_groups."""

from typing import Any

from torch import Tensor

from ..tile import encode
from ._token_groups import quantize


def _rounding(round_sf: bool, e4m3_sf: bool) -> int:
    return encode.ROUNDED if round_sf else encode.E4M3 if e4m3_sf else encode.PLAIN


class PerTokenCast:
    """``quant.per_token_cast``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        x_sf: Tensor | None,
        fmt: str,
        num_per_channels: int,
        x_block_rows: int,
        x_block_columns: int,
        use_tma_aligned_col_major_sf: bool,
        round_sf: bool,
        use_packed_ue8m0: bool,
        use_e4m3_sf: bool,
        stochastic_cast: bool,
        clamp_min: float,
        *layout: int,
    ) -> None:
        quantize(
            x,
            fmt,
            num_per_channels,
            q=outs[0],
            sf=outs[1],
            x_sf=x_sf,
            x_block=(x_block_rows, x_block_columns),
            rounding=_rounding(round_sf, use_e4m3_sf),
            clamp_min=clamp_min,
            random=stochastic_cast,
        )


class PerTokenCastWithSfOnly:
    """``quant.per_token_cast_with_sf_only``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        fmt: str,
        num_per_channels: int,
        use_tma_aligned_col_major_sf: bool,
        round_sf: bool,
        use_packed_ue8m0: bool,
        use_e4m3_sf: bool,
        clamp_min: float,
        *layout: int,
    ) -> None:
        rounding = _rounding(round_sf, use_e4m3_sf)
        quantize(x, fmt, num_per_channels, sf=outs[0], rounding=rounding, clamp_min=clamp_min)


class PerTokenCastWithPrecomputedSf:
    """``quant.per_token_cast_with_precomputed_sf``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], x: Tensor, sf: Tensor, fmt: str, num_per_channels: int) -> None:
        quantize(x, fmt, num_per_channels, q=outs[0], sf=sf, given=True)


KERNELS: dict[str, Any] = {
    "quant.per_token_cast": PerTokenCast(),
    "quant.per_token_cast_with_sf_only": PerTokenCastWithSfOnly(),
    "quant.per_token_cast_with_precomputed_sf": PerTokenCastWithPrecomputedSf(),
}
