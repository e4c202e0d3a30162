"""What the references of several gates share."""

from __future__ import annotations

import torch
from torch import Tensor


def ranking_keys(scores: Tensor) -> Tensor:
    """int32 keys in the order of fp32 scores: -0.0 equals +0.0, and NaN, of either sign, is below -inf."""
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(scores.isnan(), torch.iinfo(torch.int32).min, ordered)


def ascending_sum(t: Tensor) -> Tensor:
    """Sum of each row from +0, column by column, so that its rounding does not depend on how a device reduces."""
    total = t.new_zeros(t.shape[0])
    for column in range(t.shape[1]):
        total += t[:, column]
    return total
