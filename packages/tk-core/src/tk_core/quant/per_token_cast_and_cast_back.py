"""Quantize and dequantize in place."""

from __future__ import annotations

from torch import Tensor

from .. import checks
from ..op import Operator
from ..repeat import repeatable
from .amax_clamp import get_amax_clamp_for_quant
from .scales import check_flags, check_format, check_plain


@repeatable
def per_token_cast_and_cast_back(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False
) -> None:
    """Replace each element, in place, by its value after quantization: ``x <- cast_back(per_token_cast(x))``.

    Bit for bit the composition of the two operators in the dtype of ``x``, with groups of ``num_per_channels`` columns,
    the last of which may be shorter.

    Args:
        x: ``(M, K)`` bfloat16 or float32, ``K`` even for e2m1; ``stride(1) == 1``, any row stride. Overwritten;
            elements between the rows are not touched.
        fmt: ``"e4m3"`` or ``"e2m1"``.
        num_per_channels: columns per scale, at least 1.
        round_sf: round scales up to powers of two.
        use_e4m3_sf: round scales to e4m3; excludes ``round_sf``.

    Returns:
        None.

    Raises:
        InvalidArgumentError: a shape, stride or flag combination outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of ``x.device`` cannot run the call.

    Gradient: none (tk_core.layers.fake_quantize is the straight-through form, not in place).
    Determinism: bitwise reproducible, and equal to the reference bit for bit. A group that holds a NaN or an Inf
        becomes NaN throughout.
    Cost: one pass; reads and writes ``x``; bound by memory bandwidth.
    Source: OCP Microscaling Formats v1.0; quantization-aware training as in DeepSeek-V4.

    >>> x = torch.tensor([[448.0, 17.0]])
    >>> per_token_cast_and_cast_back(x, "e4m3", 2)
    >>> x.tolist()
    [[448.0, 16.0]]
    """
    checks.one_of("quant.per_token_cast_and_cast_back", "fmt", fmt, ("e4m3", "e2m1"))
    PER_TOKEN_CAST_AND_CAST_BACK(
        x, fmt, num_per_channels, round_sf, use_e4m3_sf, get_amax_clamp_for_quant(fmt, use_e4m3_sf)
    )


def _check(x: Tensor, fmt: str, num_per_channels: int, round_sf: bool, use_e4m3_sf: bool, clamp_min: float) -> None:
    op = "quant.per_token_cast_and_cast_back"
    check_flags(op, round_sf, False, use_e4m3_sf)
    check_format(op, fmt, check_plain(op, x))
    checks.at_least(op, "num_per_channels", num_per_channels, 1)
    if x.shape[0] > 1 and x.stride(0) < x.shape[1]:
        checks.invalid(op, "x", "have rows that do not overlap, since it is written", f"strides {tuple(x.stride())}")


PER_TOKEN_CAST_AND_CAST_BACK = Operator(
    "quant.per_token_cast_and_cast_back",
    "(Tensor(a!) x, str fmt, int num_per_channels, bool round_sf, bool use_e4m3_sf, float clamp_min) -> ()",
    check=_check,
)
