"""Comparison of results, bit for bit or within a stated tolerance; messages locate the first difference."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cases import Tolerance

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: Tensor) -> Tensor:
    """The elements as integers of the same width."""
    return t if t.dtype == torch.bool else t.contiguous().view(_WORD[t.element_size()])


def _is_nan(t: Tensor) -> Tensor:
    if not t.dtype.is_floating_point:
        return torch.zeros(t.shape, dtype=torch.bool, device=t.device)
    return (t.float() if t.element_size() < 4 else t).isnan()


def mismatch(expected: Tensor, actual: Tensor, tolerance: Tolerance, name: str) -> str | None:
    """What is wrong with one result, or None. NaNs equal each other, whatever their payload."""
    for what in ("dtype", "shape", "device"):
        if getattr(expected, what) != getattr(actual, what):
            return f"{name}: {what} is {getattr(actual, what)}, the reference has {getattr(expected, what)}"
    if expected.numel() == 0:
        return None
    if expected.stride() != actual.stride():
        return f"{name}: strides are {actual.stride()}, the reference has {expected.stride()}"
    same = bits(expected) == bits(actual)
    if bool(same.all()):
        return None
    same |= _is_nan(expected) & _is_nan(actual)
    if (tolerance.rtol or tolerance.atol) and expected.dtype.is_floating_point:
        wide = torch.float64 if expected.element_size() >= 4 else torch.float32
        same |= torch.isclose(actual.to(wide), expected.to(wide), rtol=tolerance.rtol, atol=tolerance.atol)
    if bool(same.all()):
        return None
    wrong = int((~same).sum())
    index = tuple(int(i) for i in torch.nonzero(~same)[0])
    want, got = bits(expected)[index], bits(actual)[index]
    width = expected.element_size() * 2
    mask = (1 << (width * 4)) - 1
    return (
        f"{name}: {wrong} of {expected.numel()} elements differ, first at {index}: expected {expected[index].item()} "
        f"(0x{int(want) & mask:0{width}x}), got {actual[index].item()} (0x{int(got) & mask:0{width}x})"
    )


def mismatches(expected: list[Tensor], actual: list[Tensor], tolerance: Tolerance, label: str = "result") -> list[str]:
    """What is wrong with a list of results."""
    if len(expected) != len(actual):
        return [f"{len(actual)} results, the reference has {len(expected)}"]
    if tolerance.compare is not None:
        text = tolerance.compare(expected, actual)
        return [] if text is None else [text]
    found = (mismatch(e, a, tolerance, f"{label}[{i}]") for i, (e, a) in enumerate(zip(expected, actual)))
    return [text for text in found if text is not None]
