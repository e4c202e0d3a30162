"""Recipes: how one weight is stored, by the conventions of public checkpoints.

=============== ======================= ===========================================================
recipe          ``weight``              scales
=============== ======================= ===========================================================
fp8-block128    float8_e4m3fn (N, K)    ``weight_scale_inv`` float32 (N/128, K/128): DeepSeek-V3
mxfp8           float8_e4m3fn (N, K)    ``weight_scale`` uint8 UE8M0 (N, K/32): OCP MX
mxfp4           uint8 (N, K/2)          ``weight_scale`` uint8 UE8M0 (N, K/32): OCP MX
nvfp4           uint8 (N, K/2)          ``weight_scale`` e4m3 (N, K/16), ``weight_scale_2`` float32 ()
=============== ======================= ===========================================================

Every scale multiplies: ``w ≈ weight * scale`` (``* scale_2``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import quant
from ..formats import ceil_div

Tensors = dict[str, Tensor]
Shape = tuple[int, ...]


class Stored(NamedTuple):
    """A tensor of a quantized checkpoint: name suffix, dtype and shape."""

    suffix: str
    dtype: torch.dtype
    shape: Shape


class Recipe(NamedTuple):
    """One way to store weights.

    Attributes:
        name: as given on the command line.
        stored: the tensors that a weight of a shape becomes; the first has the weight's own name.
        quantize: the weight as those tensors, in the same order.
        dequantize: those tensors as a float32 weight.
        columns: a weight's columns must be a multiple of this.
        config: what ``quantization_config`` of config.json says.
    """

    name: str
    stored: Callable[[int, int], tuple[Stored, ...]]
    quantize: Callable[[Tensor], tuple[Tensor, ...]]
    dequantize: Callable[..., Tensor]
    columns: int
    config: dict[str, object]


def _fp8_stored(rows: int, columns: int) -> tuple[Stored, ...]:
    return (
        Stored("", torch.float8_e4m3fn, (rows, columns)),
        Stored("_scale_inv", torch.float32, (ceil_div(rows, 128), ceil_div(columns, 128))),
    )


def _fp8_quantize(w: Tensor) -> tuple[Tensor, ...]:
    return tuple(quant.per_block_cast(w.contiguous(), "e4m3", (128, 128)))


def _fp8_dequantize(q: Tensor, sf: Tensor) -> Tensor:
    return quant.cast_back((q, sf), "fp32", (128, 128))


def _mx_stored(dtype: torch.dtype, per_element: int) -> Callable[[int, int], tuple[Stored, ...]]:
    def stored(rows: int, columns: int) -> tuple[Stored, ...]:
        return (
            Stored("", dtype, (rows, columns // per_element)),
            Stored("_scale", torch.uint8, (rows, ceil_div(columns, 32))),
        )

    return stored


def _mx_quantize(fmt: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def quantize(w: Tensor) -> tuple[Tensor, ...]:
        q, sf = quant.per_token_cast(w, fmt, 32, round_sf=True)
        return q.view(torch.uint8) if fmt == "e2m1" else q, (sf.view(torch.int32) >> 23).to(torch.uint8)

    return quantize


def _ue8m0(scale: Tensor) -> Tensor:
    """UE8M0 bytes as float32: byte 0 is 2^-127, byte 255 is NaN (OCP MX v1.0, section 5.4.1)."""
    values = torch.exp2(scale.double() - 127).float()  # exact, subnormals included
    return values.masked_fill(scale == 255, float("nan"))


def _mx_dequantize(q: Tensor, scale: Tensor) -> Tensor:
    data = q.view(torch.int8) if q.dtype == torch.uint8 else q
    return quant.per_token_cast_back((data, _ue8m0(scale)), "fp32", 32)


def _nvfp4_stored(rows: int, columns: int) -> tuple[Stored, ...]:
    return (
        Stored("", torch.uint8, (rows, columns // 2)),
        Stored("_scale", torch.float8_e4m3fn, (rows, ceil_div(columns, 16))),
        Stored("_scale_2", torch.float32, ()),
    )


def _nvfp4_quantize(w: Tensor) -> tuple[Tensor, ...]:
    amax = w.abs().amax().float()
    scale_2 = torch.where(amax > 0, amax / (6 * 448), 1.0)
    q, sf = quant.per_token_cast(w.float() / scale_2, "e2m1", 16, use_e4m3_sf=True)
    return q.view(torch.uint8), sf, scale_2


def _nvfp4_dequantize(q: Tensor, sf: Tensor, scale_2: Tensor) -> Tensor:
    return quant.per_token_cast_back((q.view(torch.int8), sf), "fp32", 16) * scale_2


RECIPES = {
    r.name: r
    for r in (
        Recipe(
            "fp8-block128", _fp8_stored, _fp8_quantize, _fp8_dequantize, 1,
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        ),
        Recipe(
            "mxfp8", _mx_stored(torch.float8_e4m3fn, 1), _mx_quantize("e4m3"), _mx_dequantize, 1,
            {"quant_method": "mxfp8", "fmt": "e4m3", "group_size": 32, "scale_fmt": "ue8m0"},
        ),
        Recipe(
            "mxfp4", _mx_stored(torch.uint8, 2), _mx_quantize("e2m1"), _mx_dequantize, 2,
            {"quant_method": "mxfp4", "fmt": "e2m1", "group_size": 32, "scale_fmt": "ue8m0"},
        ),
        Recipe(
            "nvfp4", _nvfp4_stored, _nvfp4_quantize, _nvfp4_dequantize, 2,
            {"quant_method": "nvfp4", "fmt": "e2m1", "group_size": 16, "scale_fmt": "e4m3"},
        ),
    )
}  # fmt: skip


def recipe_of(names: set[str], weight: str, dtype: torch.dtype) -> Recipe | None:
    """The recipe that stored a weight, read off the names and dtype beside it; None for a plain tensor."""
    if f"{weight}_scale_inv" in names:
        return RECIPES["fp8-block128"]
    if f"{weight}_scale_2" in names:
        return RECIPES["nvfp4"]
    if f"{weight}_scale" in names:
        return RECIPES["mxfp8" if dtype == torch.float8_e4m3fn else "mxfp4"]
    return None
