"""Reference of transpose."""

from __future__ import annotations

from torch import Tensor


def transpose(x: Tensor) -> Tensor:
    """The transposed matrix in new memory."""
    return x.t().contiguous()


REFERENCES = {"transform.transpose": transpose}
