"""Materialized transpose of a batch of matrices: ``batched_transpose``."""

from __future__ import annotations

from torch import Tensor

from .. import checks
from ..formats import TensorSpec
from ..op import Operator
from ..repeat import repeatable
from .transpose import check_bits


@repeatable
def batched_transpose(x: Tensor) -> Tensor:
    """Transpose each matrix of a batch into new memory: ``out[b, j, i] = x[b, i, j]``, bits unchanged.

    Args:
        x: ``(B, M, N)`` of any dtype of 1, 2, 4 or 8 bytes, ``B, M, N >= 0``; ``stride(2) == 1``, any other strides.
            Packed formats are moved as the elements that store them.

    Returns:
        ``(B, N, M)``, dtype of ``x``, contiguous.

    Raises:
        InvalidArgumentError: another rank, or ``stride(2) != 1``.
        InvalidDtypeError: elements of another size.
        UnsupportedError: legal, but the backend of ``x.device`` has no kernel for it; the message says why.

    Gradient: none recorded; ``x.mT.contiguous()`` is the differentiable form.
    Determinism: a copy of bits.
    Cost: one pass; reads ``x``, writes as much; bound by memory bandwidth.
    Source: none.

    >>> import torch
    >>> batched_transpose(torch.tensor([[[1, 2]], [[3, 4]]])).tolist()
    [[[1], [2]], [[3], [4]]]
    """
    check_bits("transform.batched_transpose", x)
    return BATCHED_TRANSPOSE(x)


def _check(x: Tensor) -> None:
    check_bits("transform.batched_transpose", x)
    checks.rank("transform.batched_transpose", "x", x, "(B, M, N)")
    checks.last_stride_1("transform.batched_transpose", "x", x)


def _outputs(x: Tensor) -> tuple[TensorSpec, ...]:
    return (TensorSpec((x.shape[0], x.shape[2], x.shape[1]), x.dtype),)


BATCHED_TRANSPOSE = Operator(
    "transform.batched_transpose", "(Tensor x) -> Tensor", check=_check, outputs=_outputs, gradient="x.mT.contiguous()"
)
