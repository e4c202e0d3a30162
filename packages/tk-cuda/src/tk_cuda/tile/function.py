"""TileLang functions in modules whose annotations are strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def prim_func(function: Callable[..., None], *types: Any) -> Any:
    """Make a ``T.prim_func`` of ``function``; ``types`` of its parameters, such as ``T.Tensor(...)``, come in order.

    TileLang evaluates string annotations in the closure of the function, where sizes used only in annotations are
    missing.
    """
    import tilelang.language as T

    names = [name for name in function.__annotations__ if name != "return"]
    function.__annotations__.update(zip(names, types, strict=True))
    return T.prim_func(function)
