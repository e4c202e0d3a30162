"""What every SwiGLU operator shares: which rows are real, what weight a row has, and the checks of both."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks, config
from ..errors import InvalidDtypeError

ROW_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
PLAIN_FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64 input, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def alignment_of(token_alignment: int | None) -> int:
    """The alignment of the rows of an expert: the given one, else the configured one."""
    return config.get_token_alignment() if token_alignment is None else token_alignment


def check_fmt(op: str, fmt: str, x: Tensor) -> None:
    """Check the format of an unquantized result; ``fp64`` belongs to float64 input."""
    checks.one_of(op, "fmt", fmt, ("fp64",) if x.dtype == torch.float64 else ("bf16", "fp32"))


def check_gate_up(op: str, x: Tensor) -> None:
    """Check a matrix of gate columns followed by as many up columns."""
    checks.is_tensor(op, "x", x)
    checks.dtype(op, "x", x, ROW_DTYPES)
    checks.rank(op, "x", x, "(T, 2H)")
    checks.last_stride_1(op, "x", x)
    check_columns(op, x)


def check_columns(op: str, x: Tensor, name: str = "x") -> None:
    """Require an even, positive number of columns."""
    if x.shape[1] < 2 or x.shape[1] % 2:
        checks.invalid(op, name, "have an even number of columns, at least 2", x.shape[1])


def check_clamp(op: str, clamp_value: float | None) -> None:
    """Require a positive clamp; None means no clamp."""
    if clamp_value is not None:
        checks.is_float(op, "clamp_value", clamp_value)
    if clamp_value is not None and not clamp_value > 0:
        checks.invalid(op, "clamp_value", "be greater than 0, or None for no clamp", clamp_value)


def check_rows(
    op: str,
    x: Tensor,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    token_alignment: int,
    x_name: str = "x",
    weight_dtype: torch.dtype = torch.float32,
) -> None:
    """Check where rows and their weights come from."""
    rows = x.shape[0]
    if psum_num_tokens_per_expert is not None:
        checks.excludes(op, "psum_num_tokens_per_expert", True, "pos_to_expert", pos_to_expert is not None)
        _check_index(op, "psum_num_tokens_per_expert", psum_num_tokens_per_expert, x, x_name)
        if psum_num_tokens_per_expert.shape[0] < 1:
            checks.invalid(op, "psum_num_tokens_per_expert", "have at least 1 element", "(0,)")
        checks.at_least(op, "token_alignment", token_alignment, 1)
    for name, index in (("pos_to_token_topk", pos_to_token_topk), ("pos_to_expert", pos_to_expert)):
        if index is not None:
            _check_index(op, name, index, x, x_name)
            checks.shape(op, name, index, (rows,), "(T,)")
    if topk_weights is None:
        for name, value in (("routed_scaling_factor", routed_scaling_factor), ("pos_to_token_topk", pos_to_token_topk)):
            if value is not None:
                checks.invalid(op, name, "be used only together with topk_weights", "topk_weights=None")
        return
    checks.is_tensor(op, "topk_weights", topk_weights)
    checks.dtype(op, "topk_weights", topk_weights, (weight_dtype,))
    checks.same_device(op, "topk_weights", topk_weights, x.device, x_name)
    if pos_to_token_topk is None:
        checks.shape(op, "topk_weights", topk_weights, (rows,), "(T,); (num_tokens, num_topk) needs pos_to_token_topk")
    else:
        checks.rank(op, "topk_weights", topk_weights, "(num_tokens, num_topk)")
        checks.values_within(op, "pos_to_token_topk", pos_to_token_topk, -1, topk_weights.numel())
    checks.contiguous(op, "topk_weights", topk_weights)


def _check_index(op: str, name: str, index: Tensor, x: Tensor, x_name: str) -> None:
    checks.is_tensor(op, name, index)
    checks.dtype(op, name, index, (torch.int32,))
    checks.rank(op, name, index, "(E,)" if name.startswith("psum") else "(T,)")
    checks.contiguous(op, name, index)
    checks.same_device(op, name, index, x.device, x_name)


def flat_rows(op: str, name: str, t: Tensor) -> Tensor:
    """View ``(B, S, C)`` as ``(B * S, C)``; other ranks are left for the checks."""
    if not isinstance(t, Tensor):
        raise InvalidDtypeError(f"{op}: {name} must be a torch.Tensor, got {type(t).__name__}")
    if t.dim() != 3:
        return t
    batch, tokens, columns = t.shape
    if batch > 1 and tokens > 1 and t.stride(0) != tokens * t.stride(1):
        checks.invalid(
            op, name, "have rows at one stride, so that (B, S, C) is a view of (B * S, C)", tuple(t.stride())
        )
    return t.view(batch * tokens, columns)
