"""The smallest amax that a quantizer may use, a process-wide setting that the public functions read."""

from __future__ import annotations

import math

from .. import checks
from ..formats import AMAX_CLAMP_DEFAULT

_clamp: dict[tuple[str, bool], float] = dict(AMAX_CLAMP_DEFAULT)


def get_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool) -> float:
    """The floor of a block's amax for ``fmt`` (``"e4m3"`` or ``"e2m1"``), with or without e4m3 scales.

    Raises:
        InvalidArgumentError: another ``fmt``.
    """
    checks.one_of("get_amax_clamp_for_quant", "fmt", fmt, ("e4m3", "e2m1"))
    return _clamp[fmt, bool(use_e4m3_sf)]


def set_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool, clamp_min_value: float) -> None:
    """Set the floor of a block's amax. It keeps scales positive: with 0, an all-zero block gets scale 0.

    Args:
        fmt: ``"e4m3"`` or ``"e2m1"``.
        use_e4m3_sf: the setting for e4m3 scales, or for the other kinds.
        clamp_min_value: finite, at least 0.

    Raises:
        InvalidArgumentError: a value outside the above.
    """
    checks.one_of("set_amax_clamp_for_quant", "fmt", fmt, ("e4m3", "e2m1"))
    if not (math.isfinite(clamp_min_value) and clamp_min_value >= 0):
        checks.invalid("set_amax_clamp_for_quant", "clamp_min_value", "be finite and at least 0", clamp_min_value)
    _clamp[fmt, bool(use_e4m3_sf)] = float(clamp_min_value)


def reset_amax_clamp_for_quant() -> None:
    """Restore the default floors."""
    _clamp.update(AMAX_CLAMP_DEFAULT)
