"""The smallest amax that a quantizer may use, a process-wide setting that the public functions read."""

from __future__ import annotations

from .. import checks
from ..formats import AMAX_CLAMP_DEFAULT
from ..op import forget_plans

_LARGEST = 2.0**128 - 2.0**104

_clamp: dict[tuple[str, bool], float] = dict(AMAX_CLAMP_DEFAULT)


def get_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool) -> float:
    """The floor of a block's amax for ``fmt`` (``"e4m3"`` or ``"e2m1"``), with or without e4m3 scales.

    Raises:
        InvalidArgumentError: another ``fmt``.
        InvalidDtypeError: ``use_e4m3_sf`` is no bool.
    """
    op = "get_amax_clamp_for_quant"
    checks.one_of(op, "fmt", fmt, ("e4m3", "e2m1"))
    checks.is_bool(op, "use_e4m3_sf", use_e4m3_sf)
    return _clamp[fmt, use_e4m3_sf]


def set_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool, clamp_min_value: float) -> None:
    """Set the floor of a block's amax. It keeps scales positive: with 0, an all-zero block gets scale 0.

    Args:
        fmt: ``"e4m3"`` or ``"e2m1"``.
        use_e4m3_sf: the setting for e4m3 scales, or for the other kinds.
        clamp_min_value: from 0 to the largest float32.

    Raises:
        InvalidArgumentError: a value outside the above.
        InvalidDtypeError: ``use_e4m3_sf`` is no bool, or ``clamp_min_value`` no number.
    """
    op = "set_amax_clamp_for_quant"
    checks.one_of(op, "fmt", fmt, ("e4m3", "e2m1"))
    checks.is_bool(op, "use_e4m3_sf", use_e4m3_sf)
    checks.finite_at_least(op, "clamp_min_value", clamp_min_value, 0.0)
    if clamp_min_value > _LARGEST:
        checks.invalid(op, "clamp_min_value", f"be at most the largest float32, {_LARGEST}", clamp_min_value)
    _clamp[fmt, use_e4m3_sf] = float(clamp_min_value) + 0.0  # not -0.0
    forget_plans()


def reset_amax_clamp_for_quant() -> None:
    """Restore the default floors."""
    _clamp.update(AMAX_CLAMP_DEFAULT)
    forget_plans()
