"""Materialized transpose of a matrix: ``transpose``."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..errors import InvalidDtypeError
from ..formats import TensorSpec
from ..op import Operator
from ..repeat import repeatable


@repeatable
def transpose(x: Tensor) -> Tensor:
    """Transpose a matrix into new memory: ``out[j, i] = x[i, j]``, bits unchanged.

    Args:
        x: ``(M, N)`` of any dtype of 1, 2, 4 or 8 bytes, ``M, N >= 0``; ``stride(1) == 1``, any row stride. Packed
            formats are moved as the elements that store them.

    Returns:
        ``(N, M)``, dtype of ``x``, contiguous.

    Raises:
        InvalidArgumentError: another rank, or ``stride(1) != 1``.
        InvalidDtypeError: elements of another size.
        UnsupportedError: legal, but the backend of ``x.device`` has no kernel for it; the message says why.

    Gradient: none recorded; ``x.t().contiguous()`` is the differentiable form.
    Determinism: a copy of bits.
    Cost: one pass; reads ``x``, writes as much; bound by memory bandwidth.
    Source: none.

    >>> import torch
    >>> transpose(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist()
    [[1, 4], [2, 5], [3, 6]]
    """
    check_bits("transform.transpose", x)
    return TRANSPOSE(x)


def check_bits(op: str, x: Tensor) -> None:
    """Check a tensor whose elements are moved as they are."""
    checks.is_tensor(op, "x", x)
    if not torch.compiler.is_compiling() and x.is_conj():  # the elements in memory are not those of x
        checks.invalid(op, "x", "hold its values (see Tensor.resolve_conj)", "a lazily conjugated view")
    if x.dtype.itemsize not in (1, 2, 4, 8) or x.is_quantized:
        raise InvalidDtypeError(
            f"{op}: x must have elements of 1, 2, 4 or 8 bytes, got {str(x.dtype).removeprefix('torch.')}"
        )


def _check(x: Tensor) -> None:
    check_bits("transform.transpose", x)
    checks.rank("transform.transpose", "x", x, "(M, N)")
    checks.last_stride_1("transform.transpose", "x", x)


def _outputs(x: Tensor) -> tuple[TensorSpec, ...]:
    return (TensorSpec((x.shape[1], x.shape[0]), x.dtype),)


TRANSPOSE = Operator(
    "transform.transpose", "(Tensor x) -> Tensor", check=_check, outputs=_outputs, gradient="x.t().contiguous()"
)
