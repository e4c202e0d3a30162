"""FlagGems: FP8 casts of groups of columns in Triton, fp32 scales, plain or rounded."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from ...backend import Layout
from ...cases import Call
from . import only

NAME = "flag-gems"


def version() -> str:
    """Version of flag-gems."""
    import flag_gems  # noqa: F401

    return importlib.metadata.version("flag-gems")


def bind(op: str, arguments: Call, layout: Layout, device: torch.device) -> Callable[[], Any] | None:
    """per_token_cast to e4m3 with row-major fp32 scales."""
    if op != "quant.per_token_cast":
        return None
    given = only(op, arguments, {"x", "fmt", "num_per_channels", "round_sf"})
    if given is None or given["fmt"] != "e4m3" or given["x"].shape[1] % given["num_per_channels"]:
        return None
    from flag_gems.ops.per_token_group_quant_fp8 import per_token_group_quant_fp8

    x, group, rounded = given["x"], given["num_per_channels"], bool(given.get("round_sf"))
    return lambda: per_token_group_quant_fp8(x, group, eps=1e-4, dtype=torch.float8_e4m3fn, scale_ue8m0=rounded)
