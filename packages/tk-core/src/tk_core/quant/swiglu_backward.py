"""Gradient of SwiGLU, from a plain or a quantized saved input: ``swiglu_backward`` and its casting form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..errors import InvalidDtypeError
from ..formats import TensorSpec, scale_spec
from ..op import Operator, new_result
from ..registry import layout
from ..repeat import repeatable
from .amax_clamp import get_amax_clamp_for_quant
from .scales import QuantTensor, check_flags
from .swiglu_rows import (
    PLAIN_FORMATS,
    alignment_of,
    check_clamp,
    check_columns,
    check_fmt,
    check_gate_up,
    check_rows,
    compute_dtype,
    flat_rows,
)


@repeatable
def swiglu_backward(
    x: Tensor,
    act_x_grad: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
    *,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    token_alignment: int | None = None,
) -> tuple[Tensor, ...]:
    """Compute the gradient of ``swiglu_forward`` for its input and its weights, and on request its result again.

    With ``g`` the gradient of the weighted result, ``l'``, ``r'``, ``w`` and valid rows as in ``swiglu_forward``, and
    ``t = 1 + exp(-l')``, each operation rounded to fp32 and ``fma`` rounded once::

        s      = 1 / t
        q      = (g * w) * s
        d_gate = (q * r') * fma(l', 1 - s, 1)           # 0 where l > c
        d_up   = q * l'                                 # 0 where r > c or r < -c
        act    = (l' / t) * r'
        d_w    = (sum over channels of g * act) * routed_scaling_factor

    At exactly the clamp the gradient passes. float64 input is computed in float64.

    Args:
        x: ``(T, 2H)`` or ``(B, S, 2H)`` bfloat16, float32 or float64, gate columns then up columns; unit stride along
            the last dimension, rows at any one stride.
        act_x_grad: ``(T, H)`` or ``(B, S, H)``, dtype of ``x``; strides likewise.
        fmt: dtype of the results: ``"bf16"`` or ``"fp32"``; ``"fp64"`` for float64 ``x``.
        psum_num_tokens_per_expert: as for ``swiglu_forward``, and so are ``topk_weights``, ``routed_scaling_factor``,
            ``clamp_value``, ``pos_to_token_topk``, ``pos_to_expert`` and ``token_alignment``.
        do_recompute: also return the weighted result of the forward pass.

    Returns:
        A tuple of those that exist, in this order. ``x_grad``: ``(T, 2H)``. ``weight_grad``: like ``topk_weights``;
        only with ``topk_weights``; where they are two-dimensional, entries that no row refers to are 0. ``act_out``:
        ``(T, H)``, ``act * w``; only with ``do_recompute``. All are contiguous; ``x_grad`` and ``act_out`` are of the
        dtype of ``fmt``, ``weight_grad`` is float32 (float64 for float64 ``x``). Rows that are not valid are not read,
        and +0 is written for them.

    Raises:
        InvalidArgumentError: a shape, stride or combination outside the above, or ``clamp_value <= 0``.
        InvalidDtypeError: a tensor has another dtype.
        UnsupportedError: legal, but the backend of ``x.device`` has no kernel for it; the message says why.

    Gradient: none; results never require grad.
    Determinism: bitwise reproducible; ``x_grad`` and ``act_out`` equal the reference on the same device bit for bit.
        The sum of ``weight_grad`` may be taken in any fixed order.
    Cost: one pass; reads ``x`` and ``act_x_grad``, writes the results; bound by memory bandwidth.
    Source: as ``swiglu_forward``.

    >>> x = torch.tensor([[0.0, 2.0]])
    >>> swiglu_backward(x, torch.ones(1, 1), "fp32")[0].tolist()
    [[1.0, 0.0]]
    """
    op = "quant.swiglu_backward"
    x = flat_rows(op, "x", x)
    act_x_grad = flat_rows(op, "act_x_grad", act_x_grad)
    weight_grad = _weight_grad(x, topk_weights)
    act_out = None
    if do_recompute:
        checks.one_of(op, "fmt", fmt, tuple(PLAIN_FORMATS))
        act_out = _rows_result(op, x, PLAIN_FORMATS[fmt])
    x_grad = SWIGLU_BACKWARD(
        x,
        act_x_grad,
        fmt,
        psum_num_tokens_per_expert,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        routed_scaling_factor,
        clamp_value,
        weight_grad,
        act_out,
        alignment_of(token_alignment),
    )
    return (x_grad, *(t for t in (weight_grad, act_out) if t is not None))


@repeatable
def swiglu_backward_and_per_token_cast(
    x: QuantTensor | tuple[Tensor, Tensor],
    act_x_grad: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = False,
    *,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    token_alignment: int | None = None,
) -> tuple[Tensor | QuantTensor, ...]:
    """Compute the gradient of SwiGLU from a quantized saved input, in bf16 and quantized.

    ``x`` is ``data * sf`` rounded to fp32; then everything is as in ``swiglu_backward``. The quantized gradient is made
    from the fp32 gradient, not from the bf16 one: for each row and each group of ``num_per_channels`` columns,
    ``a = max(max(|d|), clamp)``, ``sf = a / 448`` and ``q = to_e4m3(d * (448 / a))``, or, with ``round_sf``,
    ``sf = 2**ceil(log2(a / 448))`` and ``q = to_e4m3(d / sf)``. No group holds gate and up columns both.

    Args:
        x: ``(data, sf)``: ``(T, 2H)`` or ``(B, S, 2H)`` float8_e4m3fn, contiguous, and float32
            ``(T, 2H / num_per_channels)``, contiguous.
        act_x_grad: ``(T, H)`` or ``(B, S, H)`` bfloat16 or float32; unit stride along the last dimension, rows at any
            one stride.
        fmt: ``"e4m3"``.
        num_per_channels: columns per scale, of ``x`` and of the result; at least 1, divides ``H``.
        psum_num_tokens_per_expert: as for ``swiglu_forward``, and so are ``topk_weights``, ``routed_scaling_factor``,
            ``clamp_value``, ``pos_to_token_topk``, ``pos_to_expert`` and ``token_alignment``.
        use_tma_aligned_col_major_sf: scales of the result column-major, columns padded as TMA needs.
        round_sf: round scales of the result up to powers of two. Required by ``use_packed_ue8m0``.
        use_packed_ue8m0: scales of the result as UE8M0 bytes packed in words along the columns.
        do_recompute: also return the weighted result of the forward pass.

    Returns:
        A tuple of those that exist, in this order. ``x_grad``: ``(T, 2H)`` bfloat16. ``(q, sf)``: ``(T, 2H)``
        float8_e4m3fn and ``(T, 2H / num_per_channels)`` scales, float32 row-major or as the flags select; padding is
        zero. ``weight_grad``: float32, like ``topk_weights``; only with ``topk_weights``. ``act_out``: ``(T, H)``
        bfloat16; only with ``do_recompute``. All but column-major scales are contiguous. Rows that are not valid are
        not read; +0 is written for them, as code, as scale and as byte of a packed scale.

    Raises:
        InvalidArgumentError: a shape, stride or combination outside the above, or ``clamp_value <= 0``.
        InvalidDtypeError: a tensor has another dtype.
        UnsupportedError: legal, but the backend of the device has no kernel for it; the message says why.

    Gradient: none; results never require grad.
    Determinism: bitwise reproducible; all but ``weight_grad`` equal the reference on the same device bit for bit. A
        group that holds a NaN or an Inf gets a NaN scale; its codes are unspecified.
    Cost: one pass; reads ``x`` and ``act_x_grad``, writes the results; bound by memory bandwidth.
    Source: as ``swiglu_forward``; scale blocks after DeepSeek-V3, section 3.3.

    >>> x = torch.ones(1, 64).to(torch.float8_e4m3fn), torch.ones(1, 2)
    >>> x_grad, (q, sf) = swiglu_backward_and_per_token_cast(x, torch.ones(1, 32), "e4m3", 32)
    >>> x_grad.dtype, q.shape, sf.shape
    (torch.bfloat16, torch.Size([1, 64]), torch.Size([1, 2]))
    """
    op = "quant.swiglu_backward_and_per_token_cast"
    if not (isinstance(x, tuple) and len(x) == 2):
        raise InvalidDtypeError(f"{op}: x must be a pair (data, sf) of tensors, got {type(x).__name__}")
    data = flat_rows(op, "x[0]", x[0])
    act_x_grad = flat_rows(op, "act_x_grad", act_x_grad)
    weight_grad = _weight_grad(data, topk_weights)
    act_out = _rows_result(op, data, torch.bfloat16) if do_recompute else None
    device = layout(data.device.type)
    x_grad, q, sf = SWIGLU_BACKWARD_AND_PER_TOKEN_CAST(
        data,
        x[1],
        act_x_grad,
        fmt,
        num_per_channels,
        psum_num_tokens_per_expert,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        routed_scaling_factor,
        use_tma_aligned_col_major_sf,
        round_sf,
        use_packed_ue8m0,
        clamp_value,
        weight_grad,
        act_out,
        alignment_of(token_alignment),
        get_amax_clamp_for_quant("e4m3", False),
        device.ue8m0_per_word,
        device.sf_align_bytes,
    )
    return (x_grad, QuantTensor(q, sf), *(t for t in (weight_grad, act_out) if t is not None))


def _weight_grad(x: Tensor, topk_weights: Tensor | None) -> Tensor | None:
    if not isinstance(topk_weights, Tensor):
        return None
    return new_result(TensorSpec(tuple(topk_weights.shape), compute_dtype(x.dtype)), x)


def _rows_result(op: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    checks.rank(op, "x", x, "(T, 2H)")
    return new_result(TensorSpec((x.shape[0], x.shape[1] // 2), dtype), x)


def _check(
    x: Tensor,
    act_x_grad: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    clamp_value: float | None,
    weight_grad: Tensor | None,
    act_out: Tensor | None,
    token_alignment: int,
) -> None:
    op = "quant.swiglu_backward"
    check_gate_up(op, x)
    check_fmt(op, fmt, x)
    _check_gradient(op, "x", x, act_x_grad, (x.dtype,))
    check_rows(
        op,
        x,
        psum_num_tokens_per_expert,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        routed_scaling_factor,
        token_alignment,
        weight_dtype=compute_dtype(x.dtype),
    )
    check_clamp(op, clamp_value)
    _check_buffers(op, x, topk_weights, weight_grad, act_out, PLAIN_FORMATS[fmt])


def _check_gradient(op: str, name: str, x: Tensor, act_x_grad: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    checks.is_tensor(op, "act_x_grad", act_x_grad)
    checks.dtype(op, "act_x_grad", act_x_grad, dtypes)
    checks.shape(op, "act_x_grad", act_x_grad, (x.shape[0], x.shape[1] // 2), "(T, H)")
    checks.last_stride_1(op, "act_x_grad", act_x_grad)
    checks.same_device(op, "act_x_grad", act_x_grad, x.device, name)


def _check_buffers(
    op: str,
    x: Tensor,
    topk_weights: Tensor | None,
    weight_grad: Tensor | None,
    act_out: Tensor | None,
    act_dtype: torch.dtype,
) -> None:
    """Check the optional results, which the public functions allocate."""
    if (weight_grad is None) != (topk_weights is None):
        checks.invalid(op, "weight_grad", "be given exactly when topk_weights is", weight_grad)
    if weight_grad is not None and topk_weights is not None:
        checks.dtype(op, "weight_grad", weight_grad, (compute_dtype(x.dtype),))
        checks.shape(op, "weight_grad", weight_grad, topk_weights.shape)
        checks.contiguous(op, "weight_grad", weight_grad)
        checks.same_device(op, "weight_grad", weight_grad, x.device)
    if act_out is not None:
        checks.dtype(op, "act_out", act_out, (act_dtype,))
        checks.shape(op, "act_out", act_out, (x.shape[0], x.shape[1] // 2), "(T, H)")
        checks.contiguous(op, "act_out", act_out)
        checks.same_device(op, "act_out", act_out, x.device)


def _outputs(
    x: Tensor,
    act_x_grad: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    clamp_value: float | None,
    weight_grad: Tensor | None,
    act_out: Tensor | None,
    token_alignment: int,
) -> tuple[TensorSpec, ...]:
    return (TensorSpec(tuple(x.shape), PLAIN_FORMATS[fmt]),)


def _empty(
    outs: tuple[Tensor, ...],
    x: Tensor,
    act_x_grad: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    clamp_value: float | None,
    weight_grad: Tensor | None,
    *rest: Any,
) -> bool:
    return _zero_weight_grad(x, weight_grad)


def _zero_weight_grad(x: Tensor, weight_grad: Tensor | None) -> bool:
    """Without rows no entry of a two-dimensional weight gradient is referred to."""
    if x.shape[0]:
        return False
    if weight_grad is not None:
        weight_grad.zero_()
    return True


SWIGLU_BACKWARD = Operator(
    "quant.swiglu_backward",
    "(Tensor x, Tensor act_x_grad, str fmt, Tensor? psum_num_tokens_per_expert, Tensor? topk_weights, "
    "Tensor? pos_to_token_topk, Tensor? pos_to_expert, float? routed_scaling_factor, float? clamp_value, "
    "Tensor(a!)? weight_grad, Tensor(b!)? act_out, int token_alignment) -> Tensor",
    check=_check,
    outputs=_outputs,
    empty=_empty,
)


def _check_cast(
    x: Tensor,
    x_sf: Tensor,
    act_x_grad: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_value: float | None,
    weight_grad: Tensor | None,
    act_out: Tensor | None,
    token_alignment: int,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> None:
    op = "quant.swiglu_backward_and_per_token_cast"
    checks.one_of(op, "fmt", fmt, ("e4m3",))
    _check_quantized(op, x, x_sf, num_per_channels)
    check_flags(op, round_sf, use_packed_ue8m0)
    _check_gradient(op, "x[0]", x, act_x_grad, (torch.bfloat16, torch.float32))
    check_rows(
        op,
        x,
        psum_num_tokens_per_expert,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        routed_scaling_factor,
        token_alignment,
        x_name="x[0]",
    )
    check_clamp(op, clamp_value)
    _check_buffers(op, x, topk_weights, weight_grad, act_out, torch.bfloat16)


def _check_quantized(op: str, x: Tensor, x_sf: Tensor, num_per_channels: int) -> None:
    checks.dtype(op, "x[0]", x, (torch.float8_e4m3fn,))
    checks.rank(op, "x[0]", x, "(T, 2H)")
    checks.contiguous(op, "x[0]", x)
    check_columns(op, x, "x[0]")
    checks.at_least(op, "num_per_channels", num_per_channels, 1)
    if (x.shape[1] // 2) % num_per_channels:
        checks.invalid(op, "num_per_channels", f"divide H = {x.shape[1] // 2}", num_per_channels)
    checks.is_tensor(op, "x[1]", x_sf)
    checks.dtype(op, "x[1]", x_sf, (torch.float32,))
    checks.shape(op, "x[1]", x_sf, (x.shape[0], x.shape[1] // num_per_channels), "(T, 2H / num_per_channels)")
    checks.contiguous(op, "x[1]", x_sf)
    checks.same_device(op, "x[1]", x_sf, x.device, "x[0]")


def _outputs_cast(
    x: Tensor,
    x_sf: Tensor,
    act_x_grad: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_value: float | None,
    weight_grad: Tensor | None,
    act_out: Tensor | None,
    token_alignment: int,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[TensorSpec, ...]:
    rows, columns = x.shape
    return (
        TensorSpec((rows, columns), torch.bfloat16),
        TensorSpec((rows, columns), torch.float8_e4m3fn),
        scale_spec(
            rows,
            columns // num_per_channels,
            column_major_sf=use_tma_aligned_col_major_sf,
            packed=use_packed_ue8m0,
            ue8m0_per_word=ue8m0_per_word,
            sf_align_bytes=sf_align_bytes,
        ),
    )


def _empty_cast(
    outs: tuple[Tensor, ...],
    x: Tensor,
    x_sf: Tensor,
    act_x_grad: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    clamp_value: float | None,
    weight_grad: Tensor | None,
    *rest: Any,
) -> bool:
    return _zero_weight_grad(x, weight_grad)


SWIGLU_BACKWARD_AND_PER_TOKEN_CAST = Operator(
    "quant.swiglu_backward_and_per_token_cast",
    "(Tensor x, Tensor x_sf, Tensor act_x_grad, str fmt, int num_per_channels, Tensor? psum_num_tokens_per_expert, "
    "Tensor? topk_weights, Tensor? pos_to_token_topk, Tensor? pos_to_expert, float? routed_scaling_factor, "
    "bool use_tma_aligned_col_major_sf, bool round_sf, bool use_packed_ue8m0, float? clamp_value, "
    "Tensor(a!)? weight_grad, Tensor(b!)? act_out, int token_alignment, float clamp_min, int ue8m0_per_word, "
    "int sf_align_bytes) -> (Tensor, Tensor, Tensor)",
    check=_check_cast,
    outputs=_outputs_cast,
    empty=_empty_cast,
)
