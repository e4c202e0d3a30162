"""SwiGLU of elements; ``T`` is ``tilelang.ascend.language``."""

from typing import Any

from .indices import kept


def clamped(T: Any, value: Any, low: Any, high: Any) -> Any:
    """A value within bounds; NaN stays NaN."""
    return T.if_then_else(value > high, high, T.if_then_else(value < low, low, value))


def activation(T: Any, gate: Any, up: Any, bound: Any) -> Any:
    """``silu(gate) * up`` of elements that are clamped first; without a clamp the bound is infinite."""
    l, r = kept(T, T.Cast(T.float32, gate)), kept(T, T.Cast(T.float32, up))
    l = kept(T, T.if_then_else(l > bound, bound, l))
    return (l / (T.exp(-l) + T.float32(1.0))) * clamped(T, r, -bound, bound)
