"""SwiGLU of gate and up columns, alone or fused with a cast: ``swiglu_forward`` and its variants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..formats import TensorSpec, ceil_div, scale_spec
from ..op import Operator
from ..registry import layout
from ..repeat import repeatable
from .amax_clamp import get_amax_clamp_for_quant
from .scales import QuantTensor, check_flags
from .swiglu_rows import PLAIN_FORMATS, alignment_of, check_clamp, check_fmt, check_gate_up, check_rows, compute_dtype

_GRADIENT = "tk_core.layers.swiglu"


@repeatable
def swiglu_forward(
    x: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    *,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    token_alignment: int | None = None,
) -> Tensor:
    """Apply SwiGLU to rows of gate columns followed by up columns, and weight each row.

    With ``l`` in the left and ``r`` in the right half of a row, each operation rounded to fp32::

        l' = min(l, c);  r' = min(max(r, -c), c)        # only with clamp_value = c; NaN stays NaN
        v  = ((l' / (1 + exp(-l'))) * r') * w           # IEEE division; * w only with topk_weights

    The weight of row ``p`` is ``w = topk_weights[p]``, or ``topk_weights.flatten()[pos_to_token_topk[p]]`` (0 where
    that index is negative or out of range; past the end raises with ``TK_VALIDATE=1``), times ``routed_scaling_factor``
    (rounded once) where that is given. Give the factor here or to the gate, not to both: it would apply twice. float64
    input is computed in float64.

    A row is valid if ``start[e] <= p < psum[e]`` for some expert, where ``start[0] = 0`` and ``start[e]`` is
    ``psum[e - 1]`` rounded up to ``token_alignment`` (a ``psum[e]`` below ``start[e]`` is an expert
    without rows); or if ``pos_to_expert[p] >= 0``; without either, every row is. Rows that are not valid are not read.

    Args:
        x: ``(T, 2H)`` bfloat16, float32 or float64, ``T >= 0``, ``H >= 1``; ``stride(1) == 1``, any row stride.
        fmt: ``"bf16"`` or ``"fp32"``; ``"fp64"`` for float64 ``x``.
        psum_num_tokens_per_expert: ``(E,)`` int32, contiguous, ``E >= 1``: end of the rows of each expert.
        topk_weights: ``(T,)`` float32 (float64 for float64 ``x``), contiguous; or ``(num_tokens, num_topk)`` together
            with ``pos_to_token_topk``.
        routed_scaling_factor: multiplies the weights; needs ``topk_weights``.
        clamp_value: greater than 0; None means no clamp.
        clamped_count: ``(4,)`` int64, contiguous; needs ``clamp_value``. Increased by the numbers of ``l > c``,
            ``r > c``, ``r < -c`` and of results, over valid rows; NaN is never counted.
        pos_to_token_topk: ``(T,)`` int32, contiguous: flat index in two-dimensional ``topk_weights``.
        pos_to_expert: ``(T,)`` int32, contiguous; excludes ``psum_num_tokens_per_expert``.
        token_alignment: at least 1; None takes ``config.get_token_alignment()``.

    Returns:
        ``(T, H)`` in the dtype of ``fmt``, contiguous. Rows that are not valid are unspecified.

    Raises:
        InvalidArgumentError: a shape, stride or combination outside the above, or ``clamp_value <= 0``.
        InvalidDtypeError: a tensor has another dtype.
        UnsupportedError: legal, but the backend of ``x.device`` has no kernel for it; the message says why.

    Gradient: ``swiglu_backward``; tk_core.layers.swiglu joins the two.
    Determinism: bitwise reproducible, and equal to the reference on the same device bit for bit.
    Cost: one pass; reads the valid rows of ``x``, writes half as many elements; bound by memory bandwidth.
    Source: Shazeer, GLU Variants Improve Transformer (2020); expert layout after DeepSeek-V3, section 3.2.

    >>> round(swiglu_forward(torch.tensor([[50.0, 50.0]]), "fp32", clamp_value=10.0).item(), 4)
    99.9955
    """
    return SWIGLU_FORWARD(
        x,
        fmt,
        psum_num_tokens_per_expert,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        routed_scaling_factor,
        clamp_value,
        clamped_count,
        alignment_of(token_alignment),
    )


@repeatable
def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    *,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    token_alignment: int | None = None,
    sf_clamp_min: float | None = None,
) -> QuantTensor:
    """Apply SwiGLU as ``swiglu_forward`` does, and quantize each row in groups of consecutive channels.

    The fp32 result ``v`` of ``swiglu_forward`` is quantized as ``per_token_cast`` quantizes it, without a rounding to
    bf16 in between: for each group ``a = max(max(|v|), clamp)``, ``sf = a / 448`` and ``q = to_e4m3(v * (448 / a))``,
    or ``sf = 2**ceil(log2(a / 448))`` and ``q = to_e4m3(v / sf)`` with ``round_sf``.

    Args:
        x: ``(T, 2H)`` bfloat16 or float32, as for ``swiglu_forward``.
        fmt: ``"e4m3"``.
        num_per_channels: channels per scale, at least 1. Need not divide ``H``.
        psum_num_tokens_per_expert: as for ``swiglu_forward``, and so are all arguments not listed here.
        use_tma_aligned_col_major_sf: scales column-major, columns padded as TMA needs.
        round_sf: round scales up to powers of two. Required by ``use_packed_ue8m0``.
        use_packed_ue8m0: scales as UE8M0 bytes packed in words along the channels.
        sf_clamp_min: floor of a group's amax for this call, finite and at least 0; None:
            ``get_amax_clamp_for_quant("e4m3", False)``.

    Returns:
        ``(q, sf)``. ``q``: ``(T, H)`` float8_e4m3fn, contiguous. ``sf``: ``(T, ceil(H / num_per_channels))`` float32,
        row-major; the flags select the other layouts of docs/numerics.md, "Scale factors". Codes and scales of rows
        that are not valid are unspecified; padding (rows past ``T``, bytes past the last scale) is zero.

    Raises:
        InvalidArgumentError: a shape, stride or combination outside the above, or ``clamp_value <= 0``.
        InvalidDtypeError: a tensor has another dtype.
        UnsupportedError: legal, but the backend of ``x.device`` has no kernel for it; the message says why.

    Gradient: ``swiglu_backward_and_per_token_cast``, with the cast straight through.
    Determinism: bitwise reproducible, and equal to the reference on the same device bit for bit. A group that holds a
        NaN or an Inf gets a NaN scale; its codes are unspecified.
    Cost: one pass; reads the valid rows of ``x``, writes ``q`` and ``sf``; bound by memory bandwidth.
    Source: as ``swiglu_forward``; scale blocks after DeepSeek-V3, section 3.3.

    >>> q, sf = swiglu_forward_and_per_token_cast(torch.tensor([[50.0, 448.0]]), "e4m3", 128, round_sf=True)
    >>> (q.float() * sf).tolist()
    [[22528.0]]
    """
    op = "quant.swiglu_forward_and_per_token_cast"
    checks.is_tensor(op, "x", x)
    if sf_clamp_min is not None:
        checks.finite_at_least(op, "sf_clamp_min", sf_clamp_min, 0.0)
    device = layout(x.device.type)
    return QuantTensor(
        *SWIGLU_FORWARD_AND_PER_TOKEN_CAST(
            x,
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
            clamped_count,
            alignment_of(token_alignment),
            get_amax_clamp_for_quant("e4m3", False) if sf_clamp_min is None else sf_clamp_min,
            device.ue8m0_per_word,
            device.sf_align_bytes,
        )
    )


@repeatable
def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    clamp_value: float | None = None,
) -> QuantTensor:
    """Apply SwiGLU, round to bf16, quantize each channel in groups of consecutive rows, and transpose.

    The result is that of ``per_channel_cast(swiglu_forward(x, "bf16", clamp_value=clamp_value), ...)``, its codes
    transposed: for each channel and each group of ``num_per_tokens`` rows (the last may be shorter) of the bf16 values
    ``u``, ``a = max(max(|u|), clamp)``, ``sf = a / 448`` and ``q = to_e4m3(u * (448 / a))``, or, with ``round_sf``,
    ``sf = 2**ceil(log2(a / 448))`` and ``q = to_e4m3(u / sf)``. It is the operand of a weight gradient, which sums over
    rows.

    Args:
        x: ``(T, 2H)`` bfloat16 or float32, ``T >= 0``, ``H >= 1``; ``stride(1) == 1``, any row stride.
        fmt: ``"e4m3"``.
        num_per_tokens: rows per scale, at least 1. Need not divide ``T``.
        round_sf: round scales up to powers of two.
        without_transpose: leave the codes in the order of ``x``.
        clamp_value: as for ``swiglu_forward``: greater than 0; None means no clamp.

    Returns:
        ``(q, sf)``, both contiguous. ``q``: ``(H, T)`` float8_e4m3fn; ``(T, H)`` with ``without_transpose``. ``sf``:
        ``(ceil(T / num_per_tokens), H)`` float32 in both cases.

    Raises:
        InvalidArgumentError: a shape, stride or value outside the above.
        InvalidDtypeError: ``x`` has another dtype.
        UnsupportedError: legal, but the backend of ``x.device`` has no kernel for it; the message says why.

    Gradient: none; results never require grad.
    Determinism: bitwise reproducible, and equal to the reference on the same device bit for bit. A group that holds a
        NaN or an Inf gets a NaN scale; its codes are unspecified.
    Cost: one pass; reads ``x``, writes ``q`` and ``sf``; bound by memory bandwidth.
    Source: as ``swiglu_forward``; scale blocks after DeepSeek-V3, section 3.3.

    >>> q, sf = swiglu_forward_and_per_channel_cast_and_transpose(torch.ones(2, 6), "e4m3", 32)
    >>> q.shape, sf.shape
    (torch.Size([3, 2]), torch.Size([1, 3]))
    """
    return QuantTensor(
        *SWIGLU_FORWARD_AND_PER_CHANNEL_CAST_AND_TRANSPOSE(
            x,
            fmt,
            num_per_tokens,
            round_sf,
            without_transpose,
            clamp_value,
            get_amax_clamp_for_quant("e4m3", False),
        )
    )


def _check(
    x: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    clamp_value: float | None,
    clamped_count: Tensor | None,
    token_alignment: int,
) -> None:
    op = "quant.swiglu_forward"
    check_gate_up(op, x)
    check_fmt(op, fmt, x)
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
    inputs = {
        "x": x,
        "psum_num_tokens_per_expert": psum_num_tokens_per_expert,
        "topk_weights": topk_weights,
        "pos_to_token_topk": pos_to_token_topk,
        "pos_to_expert": pos_to_expert,
    }
    _check_clamp_and_count(op, inputs, x.device, clamp_value, clamped_count)


def _check_clamp_and_count(
    op: str,
    inputs: dict[str, Tensor | None],
    device: torch.device,
    clamp_value: float | None,
    clamped_count: Tensor | None,
) -> None:
    check_clamp(op, clamp_value)
    if clamped_count is None:
        return
    if clamp_value is None:
        checks.invalid(op, "clamped_count", "be used only together with clamp_value", "clamp_value=None")
    checks.is_tensor(op, "clamped_count", clamped_count)
    checks.dtype(op, "clamped_count", clamped_count, (torch.int64,))
    checks.shape(op, "clamped_count", clamped_count, (4,))
    checks.contiguous(op, "clamped_count", clamped_count)
    checks.same_device(op, "clamped_count", clamped_count, device)
    for name, t in inputs.items():
        if t is not None:
            checks.disjoint(op, "clamped_count", clamped_count, name, t)


def _outputs(
    x: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    routed_scaling_factor: float | None,
    clamp_value: float | None,
    clamped_count: Tensor | None,
    token_alignment: int,
) -> tuple[TensorSpec, ...]:
    return (TensorSpec((x.shape[0], x.shape[1] // 2), PLAIN_FORMATS[fmt]),)


def _no_rows(outs: tuple[Tensor, ...], x: Tensor, *rest: Any) -> bool:
    """Whether there is nothing to do: the counters alone would look like work."""
    return x.shape[0] == 0


SWIGLU_FORWARD = Operator(
    "quant.swiglu_forward",
    "(Tensor x, str fmt, Tensor? psum_num_tokens_per_expert, Tensor? topk_weights, Tensor? pos_to_token_topk, "
    "Tensor? pos_to_expert, float? routed_scaling_factor, float? clamp_value, Tensor(a!)? clamped_count, "
    "int token_alignment) -> Tensor",
    check=_check,
    outputs=_outputs,
    gradient=_GRADIENT,
    empty=_no_rows,
)


def _check_cast(
    x: Tensor,
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
    clamped_count: Tensor | None,
    token_alignment: int,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> None:
    op = "quant.swiglu_forward_and_per_token_cast"
    check_gate_up(op, x)
    checks.dtype(op, "x", x, (torch.bfloat16, torch.float32))
    checks.one_of(op, "fmt", fmt, ("e4m3",))
    checks.at_least(op, "num_per_channels", num_per_channels, 1)
    check_flags(op, round_sf, use_packed_ue8m0)
    checks.finite_at_least(op, "sf_clamp_min", clamp_min, 0.0)
    check_rows(
        op,
        x,
        psum_num_tokens_per_expert,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        routed_scaling_factor,
        token_alignment,
    )
    inputs = {
        "x": x,
        "psum_num_tokens_per_expert": psum_num_tokens_per_expert,
        "topk_weights": topk_weights,
        "pos_to_token_topk": pos_to_token_topk,
        "pos_to_expert": pos_to_expert,
    }
    _check_clamp_and_count(op, inputs, x.device, clamp_value, clamped_count)


def _outputs_cast(
    x: Tensor,
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
    clamped_count: Tensor | None,
    token_alignment: int,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[TensorSpec, ...]:
    rows, channels = x.shape[0], x.shape[1] // 2
    return (
        TensorSpec((rows, channels), torch.float8_e4m3fn),
        scale_spec(
            rows,
            ceil_div(channels, num_per_channels),
            column_major_sf=use_tma_aligned_col_major_sf,
            packed=use_packed_ue8m0,
            ue8m0_per_word=ue8m0_per_word,
            sf_align_bytes=sf_align_bytes,
        ),
    )


SWIGLU_FORWARD_AND_PER_TOKEN_CAST = Operator(
    "quant.swiglu_forward_and_per_token_cast",
    "(Tensor x, str fmt, int num_per_channels, Tensor? psum_num_tokens_per_expert, Tensor? topk_weights, "
    "Tensor? pos_to_token_topk, Tensor? pos_to_expert, float? routed_scaling_factor, "
    "bool use_tma_aligned_col_major_sf, bool round_sf, bool use_packed_ue8m0, float? clamp_value, "
    "Tensor(a!)? clamped_count, int token_alignment, float clamp_min, int ue8m0_per_word, int sf_align_bytes) "
    "-> (Tensor, Tensor)",
    check=_check_cast,
    outputs=_outputs_cast,
    empty=_no_rows,
)


def _check_channel(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool,
    without_transpose: bool,
    clamp_value: float | None,
    clamp_min: float,
) -> None:
    op = "quant.swiglu_forward_and_per_channel_cast_and_transpose"
    check_gate_up(op, x)
    checks.dtype(op, "x", x, (torch.bfloat16, torch.float32))
    checks.one_of(op, "fmt", fmt, ("e4m3",))
    checks.at_least(op, "num_per_tokens", num_per_tokens, 1)
    check_clamp(op, clamp_value)


def _outputs_channel(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool,
    without_transpose: bool,
    clamp_value: float | None,
    clamp_min: float,
) -> tuple[TensorSpec, ...]:
    rows, channels = x.shape[0], x.shape[1] // 2
    return (
        TensorSpec((rows, channels) if without_transpose else (channels, rows), torch.float8_e4m3fn),
        TensorSpec((ceil_div(rows, num_per_tokens), channels), torch.float32),
    )


SWIGLU_FORWARD_AND_PER_CHANNEL_CAST_AND_TRANSPOSE = Operator(
    "quant.swiglu_forward_and_per_channel_cast_and_transpose",
    "(Tensor x, str fmt, int num_per_tokens, bool round_sf, bool without_transpose, float? clamp_value, "
    "float clamp_min) -> (Tensor, Tensor)",
    check=_check_channel,
    outputs=_outputs_channel,
)
