"""Elementwise cast, to nearest or stochastically."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..formats import TensorSpec
from ..op import Operator
from ..repeat import repeatable

_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
_STOCHASTIC = {torch.bfloat16: (torch.float32,), torch.float8_e4m3fn: (torch.float32, torch.bfloat16)}


@repeatable
def cast(x: Tensor, dtype: torch.dtype, stochastic_rounding: bool = False) -> Tensor:
    """Convert each element to another dtype, without scales.

    To nearest even; finite values past the range become Inf in bf16, and ±448 in e4m3, as does Inf; NaN stays NaN. A
    cast to the dtype of ``x`` is a copy. With ``stochastic_rounding``, ``v`` between two neighbouring magnitudes ``L``
    and ``U`` becomes ``U`` with probability ``(|v| - L) / (U - L)``, unbiased, and finite values past the range become
    the largest finite value. The random bits are a hash of each four consecutive elements and of their place in the
    flattened tensor: the same call gives the same bits everywhere, but a slice of the result is not the result of the
    slice.

    Args:
        x: any shape, contiguous; float32, bfloat16 or float8_e4m3fn.
        dtype: float32, bfloat16 or float8_e4m3fn.
        stochastic_rounding: only from float32 to bfloat16, and from float32 or bfloat16 to float8_e4m3fn.

    Returns:
        A new tensor of the shape of ``x``, contiguous.

    Raises:
        InvalidArgumentError: not contiguous, or another pair of dtypes for stochastic rounding.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of ``x.device`` cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit, but for sign and payload of NaN.
    Cost: one pass; reads ``x``, writes the result; bound by memory bandwidth.
    Source: OCP 8-bit Floating Point Specification v1.0 (e4m3, saturating conversion).

    >>> cast(torch.tensor([1.0625, 1e6]), torch.float8_e4m3fn).float().tolist()
    [1.0, 448.0]
    """
    return CAST(x, dtype, stochastic_rounding)


def _check(x: Tensor, dtype: torch.dtype, stochastic_rounding: bool) -> None:
    op = "quant.cast"
    checks.is_tensor(op, "x", x)
    checks.dtype(op, "x", x, _DTYPES)
    checks.one_of(op, "dtype", dtype, _DTYPES)
    checks.contiguous(op, "x", x)
    if stochastic_rounding and x.dtype not in _STOCHASTIC.get(dtype, ()):
        checks.invalid(
            op,
            "stochastic_rounding",
            "be used only from float32 to bfloat16, and from float32 or bfloat16 to float8_e4m3fn",
            f"{x.dtype} to {dtype}",
        )


def _outputs(x: Tensor, dtype: torch.dtype, stochastic_rounding: bool) -> tuple[TensorSpec, ...]:
    return (TensorSpec(tuple(x.shape), dtype),)


CAST = Operator(
    "quant.cast",
    "(Tensor x, ScalarType dtype, bool stochastic_rounding) -> Tensor",
    check=_check,
    outputs=_outputs,
)
