"""Decode packed e2m1 codes with plain PyTorch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_from_e2m1fn_x2(x: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode packed e2m1 codes: the low nibble of byte ``i`` is element ``2 i``, the high nibble element ``2 i + 1``.

    A code is a sign, two exponent bits (bias 1) and a mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives;
    code 8 is -0.0.

    Args:
        x: ``(..., L)`` int8 or uint8, any strides, at least one dimension.
        out_dtype: dtype of the result.

    Returns:
        ``(..., 2 L)`` of ``out_dtype``, contiguous.

    Raises:
        InvalidArgumentError: ``x`` has no dimension.
        InvalidDtypeError: another dtype.

    Gradient: none.
    Determinism: exact.
    Cost: plain PyTorch, several passes: for looking at data, not for speed.
    Source: OCP Microscaling Formats v1.0 (E2M1).

    >>> unpack_from_e2m1fn_x2(torch.tensor([0x21, -1], dtype=torch.int8)).tolist()
    [0.5, 1.0, -6.0, -6.0]
    """
    op = "quant.unpack_from_e2m1fn_x2"
    checks.is_tensor(op, "x", x)
    checks.dtype(op, "x", x, (torch.int8, torch.uint8))
    if x.dim() == 0:
        checks.invalid(op, "x", "have at least one dimension", "a scalar")
    values = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], device=x.device)
    codes = x.view(torch.uint8).to(torch.int64)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1)
    return values[nibbles].flatten(-2).to(out_dtype)
