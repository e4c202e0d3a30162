"""Single operations that PyTorch does not offer with one rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def fma(a: Tensor, b: Tensor, c: Tensor | float) -> Tensor:
    """``a * b + c`` with one rounding, of float32 tensors. float64 tensors get two roundings.

    The product is exact in fp64. The sum is rounded to odd there, by means of its exact error, and so the rounding to
    fp32 that follows is the only one that counts.
    """
    if a.dtype == torch.float64:
        return a * b + c
    product = a.double() * b.double()
    addend = torch.as_tensor(c, device=a.device).double()
    total = product + addend
    addend_part = total - product
    error = (product - (total - addend_part)) + (addend - addend_part)
    bits = total.view(torch.int64)
    nudge = total.isfinite() & (error != 0) & (bits & 1 == 0)
    outward = (error > 0) == (total > 0)
    odd = torch.where(nudge, torch.where(outward, bits + 1, bits - 1), bits)
    return odd.view(torch.float64).float()
