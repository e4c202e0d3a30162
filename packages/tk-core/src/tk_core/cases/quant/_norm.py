"""Comparison of normalized rows, shared by the cases of the norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...formats import PACKED_DTYPE, ceil_div
from ...reference.scales import dequantize, load_scales, quantize, store_scales
from .._near import differs

GROUPS = (32, 128, 24, 5, 2**40)
"""Channels per scale in the cases of the cast; where a shape does not tell which, it is the first."""

CLAMP = 1e-4
RSTD = 2e-6
"""Relative error of rstd: an fp32 sum of squares in a tree of at most 30 additions, a division, a reciprocal root."""

ROUNDING = {torch.bfloat16: 2.0**-7, torch.float32: RSTD + 4 * 2.0**-24}
"""Relative error of a normalized value: that of rstd and of three products; bf16 may then round to its neighbour."""


def compare_normal(expected: list[Tensor], actual: list[Tensor]) -> str | None:
    """``(out, rstd?, norm_input, ...)``: the input bit for bit, the others within rounding."""
    for i, (e, a) in enumerate(zip(expected, actual)):
        if i == 0:
            found = differs("out", e, a, rtol=ROUNDING.get(e.dtype, 1e-12), atol=1e-38)
        elif e.dim() < expected[0].dim():
            found = differs("rstd", e, a, rtol=RSTD)
        else:
            found = differs("norm_input", e, a)
        if found is not None:
            return found
    return None


class Quantized(NamedTuple):
    """The results of a norm with a cast."""

    q: Tensor
    sf: Tensor
    out_bf16: Tensor | None
    rstd: Tensor | None
    norm_input: Tensor
    buffer: Tensor | None

    @property
    def group(self) -> int:
        """Channels per scale, at most those of a row."""
        columns = self.q.shape[-1]
        per_word = {dtype: n for n, dtype in PACKED_DTYPE.items()}.get(self.sf.dtype, 1)
        found = next(g for g in GROUPS if ceil_div(ceil_div(columns, g), per_word) == self.sf.shape[-1])
        return min(found, columns)

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        """Codes and scales as matrices."""
        rows = self.q.shape[:-1].numel()
        return self.q.reshape(rows, -1), self.sf.reshape(rows, -1)


def parts(results: list[Tensor]) -> Quantized:
    """Tell which result is which: the optional ones are left out of the list."""
    q, sf, *rest = results
    buffer = rest.pop() if rest[-1].dtype == torch.int32 else None
    norm_input = rest.pop()
    rstd = rest.pop() if rest and rest[-1].dim() < q.dim() else None
    return Quantized(q, sf, rest.pop() if rest else None, rstd, norm_input, buffer)


def compare_quantized(expected: list[Tensor], actual: list[Tensor]) -> str | None:
    """What is quantized may differ by rounding, so a code by a step; but codes and scales must fit each other.

    Where bf16 rows come with them and are what was quantized, they must be the codes and scales of those very rows.
    """
    e, a = parts(expected), parts(actual)
    for name, loose in (("q", True), ("sf", True), ("out_bf16", False), ("rstd", False), ("norm_input", False)):
        x, y = getattr(e, name), getattr(a, name)
        if x is None:
            continue
        if loose and x.stride() == y.stride():
            x, y = torch.zeros_like(x), torch.zeros_like(y)
        rtol = {"out_bf16": 2.0**-7, "rstd": RSTD}.get(name, 0.0)
        found = differs(name, x, y, rtol=rtol, atol=1e-38 if rtol else 0.0)
        if found is not None:
            return found
    if e.buffer is not None and a.buffer is not None:
        found = differs("mega_moe_sf", e.buffer, a.buffer)
        if found is not None:
            return found
    if not e.q.numel():
        return None
    return _differ_by_more_than_a_code(e, a) or _not_of_the_rows(e, a)


def _differ_by_more_than_a_code(e: Quantized, a: Quantized) -> str | None:
    sizes = [load_scales(sf, e.group, sf.shape[0], ceil_div(e.q.shape[-1], e.group)) for sf in (e.flat[1], a.flat[1])]
    values = [dequantize(*r.flat, 1, e.group) for r in (e, a)]
    normal = torch.maximum(*(v.abs() for v in values)) / 8
    subnormal = torch.maximum(*sizes).repeat_interleave(e.group, 1)[:, : normal.shape[1]] * 2.0**-9
    bound = torch.maximum(normal, subnormal) * 1.02
    wrong = ((values[0] - values[1]).abs() > bound) | (values[0].isnan() != values[1].isnan())
    if not bool(wrong.any()):
        return None
    index = tuple(int(i) for i in torch.nonzero(wrong)[0])
    return f"dequantized values differ by more than a code, first at {index}: {values[0][index]}, {values[1][index]}"


def _not_of_the_rows(e: Quantized, a: Quantized) -> str | None:
    """Quantize the bf16 rows that the call returned, in the mode in which the reference quantized its own."""
    if e.out_bf16 is None or a.out_bf16 is None or e.norm_input.dtype != torch.bfloat16:
        return None
    packed = e.sf.dtype in PACKED_DTYPE.values()
    scales = e.sf if packed else e.sf[e.sf.isfinite()]
    rounded = packed or bool((scales.view(torch.int32) & 0x7FFFFF == 0).all())
    q, sf = quantize(a.out_bf16.reshape(a.flat[0].shape), "e4m3", 1, a.group, CLAMP, rounded)
    per_word = next((n for n, dtype in PACKED_DTYPE.items() if dtype == a.sf.dtype), 4)
    sf = store_scales(sf, packed, ue8m0_per_word=per_word)
    codes = a.flat[0].contiguous().view(torch.uint8) != q.view(torch.uint8)
    poisoned = dequantize(q, sf, 1, a.group).isnan()
    if bool((codes & ~poisoned).any()):
        return "codes are not those of the bf16 rows returned with them"
    return differs("scales of the bf16 rows", sf, a.flat[1].contiguous().view_as(sf))
