"""Gradient of RMSNorm: ``norm_backward``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..formats import TensorSpec
from ..op import Operator, new_result
from ..repeat import repeatable
from .norm_forward import check_weight
from .swiglu_rows import ROW_DTYPES, compute_dtype


@repeatable
def norm_backward(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None = None,
    out_scale: float = 1.0,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradient of ``norm_forward`` for its input (and, equally, its residual) and for its weight.

    With ``xhat = x * rstd`` and ``d = out_grad * out_scale``, in fp32::

        g      = d * weight                             # d without weight
        m      = sum over channels of (xhat * g) / H
        x_grad = (g - xhat * m) * rstd + residual_out_grad
        dW     = sum over rows of xhat * d

    ``rstd`` is used as given. Both sums may be taken in any fixed order that does not depend on the device in use.
    float64 input is computed in float64.

    Args:
        out_grad: ``(T, H)``, dtype of ``x``; unit stride along the last dimension.
        x: ``(T, H)`` bfloat16, float32 or float64, ``H >= 1``: the ``norm_input`` of the forward pass; unit stride
            along the last dimension.
        weight: ``(H,)``, dtype of ``x``, contiguous; None means ones.
        rstd: ``(T,)`` float32 (float64 for float64 ``x``), contiguous.
        residual_out_grad: ``(T, H)``, dtype of ``x``, unit stride along the last dimension: gradient of ``norm_input``.
        out_scale: as in the forward pass.
        weight_grad: ``(H,)`` bfloat16 or float32 (float64 for float64 ``x``), contiguous; needs ``weight``. The
            gradient is added to it in fp32 and rounded to its dtype once.

    Returns:
        ``(x_grad, weight_grad)``. ``x_grad``: ``(T, H)``, dtype of ``x``, contiguous. ``weight_grad``: the given
        buffer; a new ``(H,)`` tensor of the dtype of ``weight`` without one; None without ``weight``.

    Raises:
        InvalidArgumentError: a shape, stride or overlap outside the above.
        InvalidDtypeError: a tensor has another dtype.
        UnsupportedError: legal, but the backend of ``x.device`` has no kernel for it; the message says why.

    Gradient: none; results never require grad.
    Determinism: bitwise reproducible on a device, whatever number of multiprocessors is in use; within rounding of the
        reference, as the order of the sums is free.
    Cost: one pass; reads ``out_grad``, ``x`` and ``residual_out_grad``, writes ``x_grad``; bound by memory bandwidth.
    Source: as ``norm_forward``.

    >>> x = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    >>> x_grad, _ = norm_backward(x, x, None, torch.tensor([(0.25 + 1e-4) ** -0.5]))
    >>> round(x_grad[0, 0].item(), 6)
    0.000799
    """
    op = "quant.norm_backward"
    checks.is_tensor(op, "x", x)
    accumulate = weight_grad is not None
    if accumulate:
        _check_accumulator(op, weight_grad, (out_grad, x, weight, rstd, residual_out_grad))
    elif isinstance(weight, Tensor):
        weight_grad = new_result(TensorSpec((x.shape[-1],), weight.dtype), x)
    x_grad = NORM_BACKWARD(out_grad, x, weight, rstd, residual_out_grad, weight_grad, out_scale, accumulate)
    return x_grad, weight_grad


def _check_accumulator(op: str, weight_grad: Any, inputs: tuple[Any, ...]) -> None:
    checks.is_tensor(op, "weight_grad", weight_grad)
    for name, t in zip(("out_grad", "x", "weight", "rstd", "residual_out_grad"), inputs):
        if isinstance(t, Tensor):
            checks.disjoint(op, "weight_grad", weight_grad, name, t)


def _check(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None,
    weight_grad: Tensor | None,
    out_scale: float,
    accumulate: bool,
) -> None:
    op = "quant.norm_backward"
    checks.is_tensor(op, "x", x)
    checks.dtype(op, "x", x, ROW_DTYPES)
    checks.rank(op, "x", x, "(T, H)")
    if x.shape[1] < 1:
        checks.invalid(op, "x", "have at least 1 column", x.shape[1])
    checks.last_stride_1(op, "x", x)
    check_weight(op, x, weight)
    _check_gradient(op, "out_grad", out_grad, x)
    if residual_out_grad is not None:
        _check_gradient(op, "residual_out_grad", residual_out_grad, x)
    checks.is_tensor(op, "rstd", rstd)
    checks.dtype(op, "rstd", rstd, (compute_dtype(x.dtype),))
    checks.shape(op, "rstd", rstd, (x.shape[0],), "(T,)")
    checks.contiguous(op, "rstd", rstd)
    checks.same_device(op, "rstd", rstd, x.device)
    _check_weight_grad(op, x, weight, weight_grad)


def _check_gradient(op: str, name: str, t: Tensor, x: Tensor) -> None:
    checks.is_tensor(op, name, t)
    checks.dtype(op, name, t, (x.dtype,))
    checks.shape(op, name, t, x.shape, "shape of x")
    checks.last_stride_1(op, name, t)
    checks.same_device(op, name, t, x.device)


def _check_weight_grad(op: str, x: Tensor, weight: Tensor | None, weight_grad: Tensor | None) -> None:
    if weight_grad is None:
        if weight is not None:
            checks.invalid(op, "weight_grad", "be given when weight is", None)
        return
    if weight is None:
        checks.invalid(op, "weight_grad", "be given only together with weight", "weight=None")
    allowed = (torch.float64,) if x.dtype == torch.float64 else (torch.bfloat16, torch.float32)
    checks.dtype(op, "weight_grad", weight_grad, allowed)
    checks.shape(op, "weight_grad", weight_grad, (x.shape[1],), "(H,)")
    checks.contiguous(op, "weight_grad", weight_grad)
    checks.same_device(op, "weight_grad", weight_grad, x.device)


def _outputs(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None,
    weight_grad: Tensor | None,
    out_scale: float,
    accumulate: bool,
) -> tuple[TensorSpec, ...]:
    return (TensorSpec(tuple(x.shape), x.dtype),)


def _empty(
    outs: tuple[Tensor, ...],
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None,
    weight_grad: Tensor | None,
    out_scale: float,
    accumulate: bool,
) -> bool:
    """Without rows the weight gradient is zero."""
    if x.shape[0]:
        return False
    if weight_grad is not None and not accumulate:
        weight_grad.zero_()
    return True


NORM_BACKWARD = Operator(
    "quant.norm_backward",
    "(Tensor out_grad, Tensor x, Tensor? weight, Tensor rstd, Tensor? residual_out_grad, Tensor(a!)? weight_grad, "
    "float out_scale, bool accumulate) -> Tensor",
    check=_check,
    outputs=_outputs,
    empty=_empty,
)
