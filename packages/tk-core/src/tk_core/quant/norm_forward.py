"""RMSNorm with residual, alone or fused with a cast: ``norm_forward`` and ``norm_forward_and_per_token_cast``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..formats import TensorSpec, ceil_div, scale_spec
from ..op import Operator, new_result
from ..registry import layout
from ..repeat import repeatable
from .amax_clamp import get_amax_clamp_for_quant
from .scales import QuantTensor, check_flags, pair_of_buffers
from .swiglu_rows import ROW_DTYPES, compute_dtype

_GRADIENT = "tk_core.layers.rms_norm"
_LANES = 128
"""Channels in a word, and rows in a tile, of the scale buffer of the fused MoE kernel."""


@repeatable
def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    with_rstd: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Normalize rows by their root mean square, after adding a residual.

    In fp32, each product rounded::

        h    = x + residual                             # rounded to the dtype of x; h = x without residual
        rstd = 1 / sqrt(sum(h * h) / H + eps)
        out  = (h * rstd) * (weight * out_scale)        # or * out_scale without weight; rounded to the dtype of x

    The sum may be taken in any order. float64 input is computed in float64.

    Args:
        x: ``(T, H)`` or ``(B, T, H)`` bfloat16, float32 or float64, ``H >= 1``; unit stride along the last dimension,
            any other strides.
        weight: ``(H,)``, dtype of ``x``, contiguous; None means ones.
        eps: added to the mean square, finite and at least 0.
        residual: shape and dtype of ``x``; unit stride along the last dimension. May be ``x`` itself.
        out_scale: multiplies the weight.
        out: buffer for the result: shape and dtype of ``x``, unit stride along the last dimension, no overlap with an
            input or another buffer.
        residual_out: buffer for ``h``, likewise; not written without ``residual``.
        with_rstd: also return ``rstd``.

    Returns:
        ``(out, rstd, norm_input)``. ``out``: shape and dtype of ``x``, the given buffer or contiguous. ``rstd``:
        ``x.shape[:-1]`` float32 (float64 for float64 ``x``), contiguous; None without ``with_rstd``. ``norm_input``:
        ``h``, in ``residual_out`` or contiguous; ``x`` itself without ``residual``.

    Raises:
        InvalidArgumentError: a shape, stride or overlap outside the above.
        InvalidDtypeError: a tensor has another dtype.
        UnsupportedError: legal, but the backend of ``x.device`` has no kernel for it; the message says why.

    Gradient: ``norm_backward``; tk_core.layers.rms_norm joins the two.
    Determinism: bitwise reproducible; a row's result depends on that row alone. ``norm_input`` equals the reference bit
        for bit, ``rstd`` within 2e-6 relative, as the order of the sum is free.
    Cost: one pass; reads ``x`` and ``residual``, writes ``out`` and ``norm_input``; bound by memory bandwidth.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).

    >>> out, rstd, h = norm_forward(torch.tensor([[3.0, 4.0]]), None, 0.0, with_rstd=True)
    >>> [round(v, 4) for v in (*out[0].tolist(), rstd.item())]
    [0.8485, 1.1314, 0.2828]
    """
    op = "quant.norm_forward"
    checks.is_tensor(op, "x", x)
    if residual_out is not None:
        _check_row_buffer(op, "residual_out", residual_out, x, x.dtype)
    _check_overlaps(op, (("x", x), ("residual", residual), ("weight", weight)), out, None, residual_out)
    h = None if residual is None else residual_out if residual_out is not None else _like(x, x.dtype)
    rstd = _rstd(x) if with_rstd else None
    args = (x, weight, residual, rstd, h, eps, out_scale)
    if out is None:
        out = NORM_FORWARD(*args)
    else:
        NORM_FORWARD.into((out,), *args)
    return out, rstd, _norm_input(x, h)


@repeatable
def norm_forward_and_per_token_cast(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    out: tuple[Tensor | None, Tensor | None] | None = None,
    out_bf16: Tensor | None = None,
    residual_out: Tensor | None = None,
    mega_moe_sf: Tensor | None = None,
    mega_moe_block_m: int = 0,
    with_rstd: bool = False,
) -> tuple[QuantTensor, Tensor | None, Tensor | None, Tensor]:
    """Normalize rows as ``norm_forward`` does, and quantize them in groups of consecutive channels.

    The codes and scales are those of ``per_token_cast`` of the ``out`` of ``norm_forward``, rounded to the dtype of
    ``x``: for each group ``a = max(max(|out|), clamp)``, ``sf = a / 448`` and ``q = to_e4m3(out * (448 / a))``, or,
    with ``round_sf``, ``sf = 2**ceil(log2(a / 448))`` and ``q = to_e4m3(out / sf)``.

    ``mega_moe_sf`` receives the same scales as UE8M0 bytes for a fused MoE kernel, four groups of 32 channels in a
    word. Token ``t`` goes to row ``(t // bm) * abm + (i // 128) * 128 + (i % 32) * 4 + (i % 128) // 32`` with
    ``bm = mega_moe_block_m``, ``i = t % bm`` and ``abm = bm`` rounded up to 128. Other rows are left as they are.

    Args:
        x: ``(T, H)`` or ``(B, T, H)`` bfloat16 or float32, as for ``norm_forward``, and so are ``weight``, ``eps``,
            ``residual``, ``out_scale`` and ``residual_out``.
        fmt: ``"e4m3"``.
        num_per_channels: channels per scale, at least 1. Need not divide ``H``.
        use_tma_aligned_col_major_sf: scales column-major, columns padded as TMA needs, for each batch item.
        round_sf: round scales up to powers of two. Required by ``use_packed_ue8m0`` and ``mega_moe_sf``.
        use_packed_ue8m0: scales as UE8M0 bytes packed in words along the channels.
        with_out_bf16: also return the normalized rows in bf16.
        out: buffers for ``(q, sf)`` with unit stride along the last dimension; None elements are allocated. Row-major
            scales only.
        out_bf16: buffer for the bf16 rows: shape of ``x``, unit stride along the last dimension; needs
            ``with_out_bf16``.
        mega_moe_sf: ``(T, H / 128)`` int32 view of a column-major buffer of ``R = stride(1)`` rows, ``stride(0) == 1``,
            or of more of its rows (of all ``R`` under torch.compile);
            two-dimensional ``x``, ``num_per_channels = 32``, ``H % 128 == 0`` and ``ceil(T / bm) * abm <= R``.
        mega_moe_block_m: tokens in a block of that kernel, at least 1; given exactly with ``mega_moe_sf``.
        with_rstd: also return ``rstd``.

    Returns:
        ``((q, sf), out_bf16, rstd, norm_input)``. ``q``: shape of ``x``, float8_e4m3fn. ``sf``:
        ``(..., T, ceil(H / num_per_channels))`` float32, row-major; the flags select the other layouts of
        docs/numerics.md, "Scale factors", for each batch item; padding is zero. ``out_bf16``: shape of ``x``, None
        without ``with_out_bf16``. ``rstd`` and ``norm_input``: as for ``norm_forward``. Buffers are returned as given.

    Raises:
        InvalidArgumentError: a shape, stride, overlap or combination outside the above.
        InvalidDtypeError: a tensor has another dtype.
        UnsupportedError: legal, but the backend of ``x.device`` has no kernel for it; the message says why.

    Gradient: ``norm_backward``, with the cast straight through.
    Determinism: bitwise reproducible; equal, bit for bit, to ``per_token_cast(norm_forward(...))`` on the same device.
        A group that holds a NaN or an Inf gets a NaN scale; its codes are unspecified.
    Cost: one pass; reads ``x`` and ``residual``, writes the results; bound by memory bandwidth.
    Source: as ``norm_forward``; OCP Microscaling Formats v1.0 (UE8M0).

    >>> x = torch.full((1, 32), 448.0)
    >>> (q, sf), _, _, h = norm_forward_and_per_token_cast(x, None, 0.0, "e4m3", 32, round_sf=True)
    >>> (q.float() * sf).unique().tolist()
    [1.0]
    """
    op = "quant.norm_forward_and_per_token_cast"
    checks.is_tensor(op, "x", x)
    if out_bf16 is not None and not with_out_bf16:
        checks.invalid(op, "out_bf16", "be given only together with with_out_bf16=True", "with_out_bf16=False")
    q, sf = (None, None) if out is None else pair_of_buffers(op, out, use_tma_aligned_col_major_sf)
    if residual_out is not None:
        _check_row_buffer(op, "residual_out", residual_out, x, x.dtype)
    inputs = (("x", x), ("residual", residual), ("weight", weight))
    _check_overlaps(op, inputs, q, sf, residual_out, out_bf16, mega_moe_sf)
    if mega_moe_block_m != 0 if mega_moe_sf is None else mega_moe_block_m == 0:
        checks.invalid(op, "mega_moe_block_m", "be given exactly together with mega_moe_sf", mega_moe_block_m)
    h = None if residual is None else residual_out if residual_out is not None else _like(x, x.dtype)
    if with_out_bf16 and out_bf16 is None:
        out_bf16 = _like(x, torch.bfloat16)
    rstd = _rstd(x) if with_rstd else None
    device = layout(x.device.type)
    args = (
        x,
        weight,
        residual,
        out_bf16,
        rstd,
        h,
        None if mega_moe_sf is None else _whole_buffer(op, mega_moe_sf, x),
        eps,
        fmt,
        num_per_channels,
        out_scale,
        use_tma_aligned_col_major_sf,
        round_sf,
        use_packed_ue8m0,
        mega_moe_block_m,
        get_amax_clamp_for_quant("e4m3", False),
        device.ue8m0_per_word,
        device.sf_align_bytes,
    )
    if out is None:
        quantized = QuantTensor(*NORM_FORWARD_AND_PER_TOKEN_CAST(*args))
    else:
        quantized = QuantTensor(*NORM_FORWARD_AND_PER_TOKEN_CAST.into((q, sf), *args))
    return quantized, out_bf16, rstd, _norm_input(x, h)


def _norm_input(x: Tensor, h: Tensor | None) -> Tensor:
    return x if h is None else h


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return new_result(TensorSpec(tuple(x.shape), dtype), x)


def _rstd(x: Tensor) -> Tensor:
    return new_result(TensorSpec(tuple(x.shape[:-1]), compute_dtype(x.dtype)), x)


def _check_overlaps(op: str, inputs: tuple[tuple[str, Tensor | None], ...], *buffers: Tensor | None) -> None:
    """Refuse caller's buffers that share memory with an input or with each other."""
    names = ("out" if op == "quant.norm_forward" else "out[0]", "out[1]", "residual_out", "out_bf16", "mega_moe_sf")
    seen = list(inputs)
    for name, buffer in zip(names, buffers):
        if buffer is None:
            continue
        checks.is_tensor(op, name, buffer)
        for other_name, other in seen:
            if isinstance(other, Tensor):
                checks.disjoint(op, name, buffer, other_name, other)
        seen.append((name, buffer))


def _whole_buffer(op: str, mega_moe_sf: Tensor, x: Tensor) -> Tensor:
    """The buffer behind the view, ``(H / 128, R)`` contiguous, so that the operator sees all that it writes."""
    checks.is_tensor(op, "mega_moe_sf", mega_moe_sf)
    checks.dtype(op, "mega_moe_sf", mega_moe_sf, (torch.int32,))
    if x.dim() != 2:
        checks.invalid(op, "x", "have shape (T, H) for mega_moe_sf", tuple(x.shape))
    checks.rank(op, "mega_moe_sf", mega_moe_sf, "(T, H / 128)")
    tokens, words = mega_moe_sf.shape
    if tokens < x.shape[0] or words != x.shape[1] // _LANES:
        least = f"({x.shape[0]}, {x.shape[1] // _LANES})"
        checks.invalid(op, "mega_moe_sf", f"have shape {least} = (T, H / 128), or more rows", f"({tokens}, {words})")
    if words and mega_moe_sf.stride(0) != 1:
        checks.invalid(op, "mega_moe_sf", "have stride(0) == 1", f"strides {tuple(mega_moe_sf.stride())}")
    rows = mega_moe_sf.stride(1)
    if tokens == rows:
        return mega_moe_sf.t()
    if torch.compiler.is_compiling():  # a trace sees the elements of a view, not the memory around them
        checks.invalid(op, "mega_moe_sf", f"have all {rows} rows of its buffer under torch.compile", tokens)
    room = mega_moe_sf.untyped_storage().nbytes() // mega_moe_sf.element_size() - mega_moe_sf.storage_offset()
    if rows * words > room:
        checks.invalid(op, "mega_moe_sf", f"be a view of a buffer of {words} x {rows} words", f"room for {room}")
    return mega_moe_sf.as_strided((words, rows), (rows, 1))


def _check(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor | None,
    residual_out: Tensor | None,
    eps: float,
    out_scale: float,
) -> None:
    _check_common("quant.norm_forward", x, weight, residual, rstd, residual_out, eps, ROW_DTYPES)


def _check_common(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor | None,
    residual_out: Tensor | None,
    eps: float,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    checks.is_tensor(op, "x", x)
    checks.dtype(op, "x", x, dtypes)
    if x.dim() not in (2, 3):
        checks.invalid(op, "x", "have shape (T, H) or (B, T, H)", tuple(x.shape))
    if x.shape[-1] < 1:
        checks.invalid(op, "x", "have at least 1 column", x.shape[-1])
    checks.last_stride_1(op, "x", x)
    checks.finite_at_least(op, "eps", eps, 0.0)
    check_weight(op, x, weight)
    if residual is not None:
        checks.is_tensor(op, "residual", residual)
        checks.dtype(op, "residual", residual, (x.dtype,))
        checks.shape(op, "residual", residual, x.shape, "shape of x")
        checks.last_stride_1(op, "residual", residual)
        checks.same_device(op, "residual", residual, x.device)
    if (residual_out is None) != (residual is None):
        checks.invalid(op, "residual_out", "be given exactly when residual is", residual_out)
    if residual_out is not None:
        _check_row_buffer(op, "residual_out", residual_out, x, x.dtype)
    if rstd is not None:
        checks.dtype(op, "rstd", rstd, (compute_dtype(x.dtype),))
        checks.shape(op, "rstd", rstd, x.shape[:-1], "x.shape[:-1]")
        checks.contiguous(op, "rstd", rstd)
        checks.same_device(op, "rstd", rstd, x.device)


def check_weight(op: str, x: Tensor, weight: Tensor | None) -> None:
    """Check the weight of a normalization of ``x``."""
    if weight is None:
        return
    checks.is_tensor(op, "weight", weight)
    checks.dtype(op, "weight", weight, (x.dtype,))
    checks.shape(op, "weight", weight, (x.shape[-1],), "(H,)")
    checks.contiguous(op, "weight", weight)
    checks.same_device(op, "weight", weight, x.device)


def _check_row_buffer(op: str, name: str, buffer: Tensor, x: Tensor, dtype: torch.dtype) -> None:
    checks.is_tensor(op, name, buffer)
    checks.dtype(op, name, buffer, (dtype,))
    checks.shape(op, name, buffer, x.shape, "shape of x")
    checks.same_device(op, name, buffer, x.device)
    checks.last_stride_1(op, name, buffer)
    checks.distinct_elements(op, name, buffer)


def _outputs(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor | None,
    residual_out: Tensor | None,
    eps: float,
    out_scale: float,
) -> tuple[TensorSpec, ...]:
    return (TensorSpec(tuple(x.shape), x.dtype, row_strided=True),)


def _no_rows(outs: tuple[Tensor, ...], x: Tensor, *rest: Any) -> bool:
    """Whether there is nothing to do: the scale buffer of the MoE kernel alone would look like work."""
    return x.numel() == 0


NORM_FORWARD = Operator(
    "quant.norm_forward",
    "(Tensor x, Tensor? weight, Tensor? residual, Tensor(a!)? rstd, Tensor(b!)? residual_out, float eps, "
    "float out_scale) -> Tensor",
    check=_check,
    outputs=_outputs,
    gradient=_GRADIENT,
    empty=_no_rows,
)


def _check_cast(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    out_bf16: Tensor | None,
    rstd: Tensor | None,
    residual_out: Tensor | None,
    mega_moe_buffer: Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    out_scale: float,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    mega_moe_block_m: int,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> None:
    op = "quant.norm_forward_and_per_token_cast"
    _check_common(op, x, weight, residual, rstd, residual_out, eps, (torch.bfloat16, torch.float32))
    checks.one_of(op, "fmt", fmt, ("e4m3",))
    checks.at_least(op, "num_per_channels", num_per_channels, 1)
    check_flags(op, round_sf, use_packed_ue8m0)
    if out_bf16 is not None:
        _check_row_buffer(op, "out_bf16", out_bf16, x, torch.bfloat16)
    if mega_moe_buffer is not None:
        _check_mega_moe(op, x, mega_moe_buffer, mega_moe_block_m, num_per_channels, round_sf)


def _check_mega_moe(op: str, x: Tensor, buffer: Tensor, block_m: int, num_per_channels: int, round_sf: bool) -> None:
    checks.dtype(op, "mega_moe_sf", buffer, (torch.int32,))
    checks.at_least(op, "mega_moe_block_m", block_m, 1)
    checks.requires(op, "mega_moe_sf", True, "round_sf", round_sf)
    if num_per_channels != 32:
        checks.invalid(op, "num_per_channels", "be 32 for mega_moe_sf", num_per_channels)
    if x.dim() != 2:
        checks.invalid(op, "x", "have shape (T, H) for mega_moe_sf", tuple(x.shape))
    tokens, channels = x.shape
    if channels % _LANES:
        checks.invalid(op, "x", "have a multiple of 128 columns for mega_moe_sf", channels)
    checks.rank(op, "mega_moe_sf", buffer, "(H / 128, R)")
    checks.contiguous(op, "mega_moe_sf", buffer)
    checks.same_device(op, "mega_moe_sf", buffer, x.device)
    rows = ceil_div(tokens, block_m) * (ceil_div(block_m, _LANES) * _LANES)
    if rows > buffer.shape[1]:
        checks.invalid(op, "mega_moe_sf", f"have at least {rows} buffer rows (stride(1))", buffer.shape[1])


def _outputs_cast(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    out_bf16: Tensor | None,
    rstd: Tensor | None,
    residual_out: Tensor | None,
    mega_moe_buffer: Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    out_scale: float,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    mega_moe_block_m: int,
    clamp_min: float,
    ue8m0_per_word: int,
    sf_align_bytes: int,
) -> tuple[TensorSpec, ...]:
    rows, channels = x.shape[-2:]
    scales = scale_spec(
        rows,
        ceil_div(channels, num_per_channels),
        column_major_sf=use_tma_aligned_col_major_sf,
        packed=use_packed_ue8m0,
        ue8m0_per_word=ue8m0_per_word,
        sf_align_bytes=sf_align_bytes,
    )
    if x.dim() == 3:
        scales = scales.batched(x.shape[0])
    if not use_tma_aligned_col_major_sf:
        scales = scales._replace(row_strided=True)
    return TensorSpec(tuple(x.shape), torch.float8_e4m3fn, row_strided=True), scales


NORM_FORWARD_AND_PER_TOKEN_CAST = Operator(
    "quant.norm_forward_and_per_token_cast",
    "(Tensor x, Tensor? weight, Tensor? residual, Tensor(a!)? out_bf16, Tensor(b!)? rstd, Tensor(c!)? residual_out, "
    "Tensor(d!)? mega_moe_buffer, float eps, str fmt, int num_per_channels, float out_scale, "
    "bool use_tma_aligned_col_major_sf, bool round_sf, bool use_packed_ue8m0, int mega_moe_block_m, float clamp_min, "
    "int ue8m0_per_word, int sf_align_bytes) -> (Tensor, Tensor)",
    check=_check_cast,
    outputs=_outputs_cast,
    empty=_no_rows,
)
