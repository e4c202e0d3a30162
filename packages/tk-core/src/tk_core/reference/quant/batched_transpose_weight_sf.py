"""Reference of quant.batched_transpose_weight_sf."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scales import pack_exponents


def batched_transpose_weight_sf(
    sf: list[Tensor], block_size: int, transpose_sf1s: list[bool], ue8m0_per_word: int
) -> tuple[Tensor, ...]:
    results = []
    for scales, transposed in zip(sf, transpose_sf1s):
        bits = scales.view(torch.int32)
        # Sign or mantissa bits mean that the scale is not a power of two: NaN, rather than a truncated scale.
        exponents = torch.where(bits & -0x7F800001 == 0, bits >> 23, 255)
        sf1 = _replicated(exponents.transpose(-1, -2), block_size, ue8m0_per_word)
        results.append(_replicated(exponents, block_size, ue8m0_per_word))
        results.append(sf1.transpose(-1, -2) if transposed else sf1)
    return tuple(results)


def _replicated(exponents: Tensor, block_size: int, ue8m0_per_word: int) -> Tensor:
    """Exponents packed along the last dimension, each row repeated for the rows of its block."""
    words = pack_exponents(exponents.flatten(0, -2), ue8m0_per_word=ue8m0_per_word)
    return words.view(*exponents.shape[:-1], words.shape[-1]).repeat_interleave(block_size, dim=-2)


REFERENCES = {"quant.batched_transpose_weight_sf": batched_transpose_weight_sf}
