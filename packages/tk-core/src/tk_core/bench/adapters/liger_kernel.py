"""liger-kernel: RMSNorm and SwiGLU in Triton, for bf16 results without casts."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from ...backend import Layout
from ...cases import Call
from . import only

NAME = "liger-kernel"


def version() -> str:
    """Version of liger-kernel."""
    import liger_kernel  # noqa: F401

    return importlib.metadata.version("liger-kernel")


def bind(op: str, arguments: Call, layout: Layout, device: torch.device) -> Callable[[], Any] | None:
    """RMSNorm with or without a residual, and SwiGLU over fused gate and up columns."""
    if op == "quant.norm_forward":
        given = only(op, arguments, {"x", "weight", "eps", "residual"})
        if given is None or given["weight"] is None:
            return None
        return _norm(given["x"], given["weight"], given["eps"], given.get("residual"))
    if op == "quant.swiglu_forward":
        given = only(op, arguments, {"x", "fmt"})
        if given is None or given["fmt"] != "bf16" or given["x"].dtype != torch.bfloat16:
            return None
        from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

        x = given["x"]
        return lambda: swiglu_fused_gate_up_forward(x)[1]
    return None


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> Callable[[], Any]:
    if residual is None:
        from liger_kernel.ops.rms_norm import rms_norm_forward

        return lambda: rms_norm_forward(x, weight, eps, 0.0, "llama", False)[0]
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    return lambda: fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "llama")[:2]
