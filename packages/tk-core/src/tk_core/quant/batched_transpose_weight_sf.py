"""Scale tensors of weights and of their transposes, for many weights in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import checks
from ..formats import PACKED_DTYPE, TensorSpec, ceil_div
from ..op import Operator
from ..registry import layout

_ALIGNMENT = 32


def batched_transpose_weight_sf(
    sf: Sequence[Tensor],
    block_size: int,
    transpose_sf1s: Sequence[bool],
    outs: Sequence[tuple[Tensor, Tensor] | None] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Make, from power-of-two scales of square weight blocks, packed UE8M0 scales for W and for its transpose.

    For each weight of ``N = n * block_size`` rows and ``K = k * block_size`` columns, with P bytes in a word and
    ``exponent`` the biased exponent of a scale::

        sf0[r, w] byte t = exponent(sf[r // block_size, P * w + t])       # for W
        sf1[c, w] byte t = exponent(sf[P * w + t, c // block_size])       # for W transposed

    Bytes past the last scale are 0. A scale that is not a power of two (nor 0 or Inf) becomes byte 255, NaN, never the
    power of two below it; the call raises where values are looked at (CPU tensors, or ``TK_VALIDATE=1``).

    Args:
        sf: for each weight ``(n, k)`` or ``(G, n, k)`` float32, contiguous, on one device.
        block_size: 32 or 128; ``N`` and ``K`` are multiples of 128.
        transpose_sf1s: for each weight, whether ``sf1`` is seen row-major with words outermost. The bytes in memory
            are the same.
        outs: for each weight, buffers ``(sf0, sf1)`` to overwrite or None; each must have exactly the dtype, shape and
            strides below and a 32-byte aligned address. None: all are allocated.

    Returns:
        For each weight ``(sf0, sf1)``, int32 (4 bytes in a word) or int16 (2) as the device packs. ``sf0``:
        ``([G,] N, ceil(k / P))`` with strides ``([ceil(k / P) * N,] 1, N)``; ``sf1``: ``([G,] K, ceil(n / P))`` with
        strides ``([ceil(n / P) * K,] 1, K)``, or ``([G,] ceil(n / P), K)``, contiguous, where ``transpose_sf1s`` says
        so. A pair of ``outs`` is returned as it is.

    Raises:
        InvalidArgumentError: a shape, stride, length, alignment or scale outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of the device cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit.
    Cost: reads each scale, writes each result once; bound by launch latency.
    Source: the scale layout of DeepGEMM; OCP Microscaling Formats v1.0 (UE8M0).

    >>> sf0, sf1 = batched_transpose_weight_sf([torch.full((1, 1), 2.0)], 128, [False])[0]
    >>> sf0.shape, sf0.stride(), hex(sf0[0, 0].item())
    (torch.Size([128, 1]), (1, 128), '0x80')
    """
    op = "quant.batched_transpose_weight_sf"
    sf, flags = list(sf), [bool(flag) for flag in transpose_sf1s]
    checks.same_length(op, "transpose_sf1s", flags, "sf", sf)
    if not sf:
        return []
    checks.is_tensor(op, "sf[0]", sf[0])
    args = (sf, block_size, flags, layout(sf[0].device.type).ue8m0_per_word)
    if outs is None:
        flat = BATCHED_TRANSPOSE_WEIGHT_SF(*args)
    else:
        checks.same_length(op, "outs", outs, "sf", sf)
        flat = BATCHED_TRANSPOSE_WEIGHT_SF.into(_buffers(op, outs), *args)
    if checks.validates(sf[0]):
        _refuse_other_scales(op, sf)
    pairs = [(flat[2 * i], flat[2 * i + 1]) for i in range(len(sf))]
    return pairs if outs is None else [pair if out is None else out for pair, out in zip(pairs, outs)]


def _buffers(op: str, outs: Sequence[tuple[Tensor, Tensor] | None]) -> list[Tensor | None]:
    flat: list[Tensor | None] = []
    for i, out in enumerate(outs):
        if out is not None and (not isinstance(out, tuple) or len(out) != 2):
            checks.invalid(op, f"outs[{i}]", "be a pair of tensors or None", type(out).__name__)
        for j, buffer in enumerate((None, None) if out is None else out):
            if buffer is not None and checks.is_concrete(buffer) and buffer.data_ptr() % _ALIGNMENT:
                checks.invalid(
                    op, f"outs[{i}][{j}]", f"start at a multiple of {_ALIGNMENT} bytes", hex(buffer.data_ptr())
                )
            flat.append(buffer)
    return flat


def _refuse_other_scales(op: str, sf: list[Tensor]) -> None:
    for i, scales in enumerate(sf):
        other = (scales.view(torch.int32) & -0x7F800001) != 0
        if other.any():
            checks.invalid(op, f"sf[{i}]", "hold powers of two", scales[other][0].item())


def _check(sf: list[Tensor], block_size: int, transpose_sf1s: list[bool], ue8m0_per_word: int) -> None:
    op = "quant.batched_transpose_weight_sf"
    checks.one_of(op, "block_size", block_size, (32, 128))
    checks.same_length(op, "transpose_sf1s", transpose_sf1s, "sf", sf)
    for i, scales in enumerate(sf):
        name = f"sf[{i}]"
        checks.is_tensor(op, name, scales)
        checks.dtype(op, name, scales, (torch.float32,))
        checks.contiguous(op, name, scales)
        checks.same_device(op, name, scales, sf[0].device, "sf[0]")
        if scales.dim() not in (2, 3):
            checks.invalid(op, name, "have shape (n, k) or (G, n, k)", tuple(scales.shape))
        for size in scales.shape[-2:]:
            if size * block_size % 128:
                checks.invalid(op, name, "cover a multiple of 128 rows and columns", tuple(scales.shape))


def _outputs(
    sf: list[Tensor], block_size: int, transpose_sf1s: list[bool], ue8m0_per_word: int
) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    for scales, transposed in zip(sf, transpose_sf1s):
        n, k = scales.shape[-2:]
        specs.append(_spec(scales.shape[:-2], n, k, block_size, False, ue8m0_per_word))
        specs.append(_spec(scales.shape[:-2], k, n, block_size, transposed, ue8m0_per_word))
    return tuple(specs)


def _spec(
    groups: Sequence[int], outer: int, inner: int, block_size: int, transposed: bool, ue8m0_per_word: int
) -> TensorSpec:
    rows, words = outer * block_size, ceil_div(inner, ue8m0_per_word)
    dtype = PACKED_DTYPE[ue8m0_per_word]
    if transposed:
        return TensorSpec((*groups, words, rows), dtype)
    return TensorSpec((*groups, rows, words), dtype, (*(words * rows for _ in groups), 1, rows))


BATCHED_TRANSPOSE_WEIGHT_SF = Operator(
    "quant.batched_transpose_weight_sf",
    "(Tensor[] sf, int block_size, bool[] transpose_sf1s, int ue8m0_per_word) -> Tensor[]",
    check=_check,
    outputs=_outputs,
)
