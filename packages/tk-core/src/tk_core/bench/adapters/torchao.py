"""torchao: DeepSeek-style FP8 casts in Triton, 1 x 128 for activations and 128 x 128 for weights, fp32 scales."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from ...backend import Layout
from ...cases import Call
from . import only

NAME = "torchao"


def version() -> str:
    """Version of torchao."""
    import torchao  # noqa: F401

    return importlib.metadata.version("torchao")


def bind(op: str, arguments: Call, layout: Layout, device: torch.device) -> Callable[[], Any] | None:
    """Casts with plain fp32 row-major scales."""
    from torchao.kernel.blockwise_quantization import fp8_blockwise_act_quant, fp8_blockwise_weight_quant

    if op == "quant.per_token_cast":
        given = only(op, arguments, {"x", "fmt", "num_per_channels"})
        if given is None or given["fmt"] != "e4m3" or given["x"].shape[1] % given["num_per_channels"]:
            return None
        x, group = given["x"], given["num_per_channels"]
        return lambda: fp8_blockwise_act_quant(x, group)
    if op == "quant.per_block_cast":
        given = only(op, arguments, {"x", "fmt", "block_size"})
        if given is None or given["fmt"] != "e4m3" or len(set(given["block_size"])) > 1:
            return None
        x, block = given["x"], given["block_size"][0]
        if x.shape[0] % block or x.shape[1] % block:
            return None
        return lambda: fp8_blockwise_weight_quant(x, block)
    return None
