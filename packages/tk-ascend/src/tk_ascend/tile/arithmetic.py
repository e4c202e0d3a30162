"""Single operations that TIR has no expression for; ``T`` is ``tilelang.ascend.language``."""

from typing import Any


def fma(T: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of fp32 with one rounding, in SIMT code."""
    return T.call_extern("float32", "fmaf", a, b, c)
