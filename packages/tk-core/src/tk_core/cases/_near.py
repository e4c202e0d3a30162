"""Comparison of results one by one, for tolerances that differ between the results of an operator."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differs(name: str, expected: Tensor, actual: Tensor, rtol: float = 0.0, atol: float = 0.0) -> str | None:
    """What is wrong with one result, or None. Without bounds bit for bit, NaNs equal whatever their payload."""
    for what in ("dtype", "shape", "device"):
        if getattr(expected, what) != getattr(actual, what):
            return f"{name}: {what} is {getattr(actual, what)}, the reference has {getattr(expected, what)}"
    if expected.numel() == 0:
        return None
    if expected.stride() != actual.stride():
        return f"{name}: strides are {actual.stride()}, the reference has {expected.stride()}"
    word = _WORD[expected.element_size()]
    same = expected.contiguous().view(word) == actual.contiguous().view(word)
    if expected.dtype.is_floating_point:
        e, a = expected.double(), actual.double()
        same |= e.isnan() & a.isnan()
        if rtol or atol:
            same |= torch.isclose(a, e, rtol=rtol, atol=atol)
    if bool(same.all()):
        return None
    index = tuple(int(i) for i in torch.nonzero(~same)[0])
    return (
        f"{name}: {int((~same).sum())} of {same.numel()} elements differ, first at {index}: expected "
        f"{expected[index].item()!r}, got {actual[index].item()!r}"
    )
