"""Tensors with many strides as the memory that they span, for kernels that compute addresses themselves."""

from __future__ import annotations

from torch import Tensor


def spanned(t: Tensor) -> Tensor:
    """The elements from the first to the last of a tensor, gaps included, as one dimension; one unused one for none."""
    if not t.numel():
        return t.new_empty(1)
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((last + 1,), (1,))
